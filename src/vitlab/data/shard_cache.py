"""The local cache of remote shards: whole files, downloaded once, checked, and as many as there is room for."""

import functools
import os
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from vitlab.data.downloads import download
from vitlab.data.shard_index import File
from vitlab.data.shards import OpenFile
from vitlab.errors import UserError

ROOM = "VITLAB_SHARD_CACHE_GB"
"""The variable that limits the cached shards of a data set, in gigabytes; default: no limit."""


class ShardCache:
    """The files of a data set below the address `base`, and those of them that are in `folder`.

    Several processes may share the folder. room: most bytes of tars that are kept. handles: most files that a process
    keeps open.
    """

    def __init__(
        self, base: str, folder: Path, files: Sequence[File], room: int | None = None, handles: int = 1
    ) -> None:
        self.base, self.folder, self.room, self.handles = base, folder, room, handles
        self.files = {file.file: file for file in files}

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "opened"}

    @functools.cached_property
    def opened(self) -> Callable[[str], OpenFile]:
        """name -> the open file: it can be read even after it was removed to make room."""
        return functools.lru_cache(self.handles)(self._open)

    def _open(self, name: str) -> OpenFile:
        while True:
            with suppress(FileNotFoundError):  # another process made room just now
                return OpenFile(str(self.fetch(name)))

    def fetch(self, name: str, cancelled: threading.Event | None = None) -> Path:
        """The path of a file, which is downloaded unless it is there. Raises UserError."""
        if name not in self.files:
            raise UserError(f"the index of {self.base} does not list {name}: write the data set again")
        file, path = self.files[name], self.folder / name
        if not path.exists():
            digest = f"sha256:{file.sha256}" if file.sha256 else ""
            download(f"{self.base}/{name}", path, digest, file.bytes, cancelled, quiet=True)
            self._make_room(path)
        with suppress(OSError):  # removed again, or owned by another user
            os.utime(path)  # the tars that were not used for longest are removed first
        return path

    def _make_room(self, newest: Path) -> None:
        tars = []
        for path in self.folder.glob("*.tar") if self.room is not None else ():
            with suppress(FileNotFoundError):  # another process makes room as well
                stat = path.stat()
                tars.append((stat.st_mtime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in tars)
        for _, size, path in sorted(tars):
            if total > (self.room or 0) and path != newest:
                path.unlink(missing_ok=True)
                total -= size


def cache_limit(tars: Sequence[File], count: int) -> int | None:
    """How many bytes of `tars` may be cached, by the variable ROOM; the largest `count` of them must fit."""
    value = os.environ.get(ROOM)
    if not value:
        return None
    sizes = [tar.bytes for tar in tars]
    least = min(count * max(sizes), sum(sizes))
    if not re.fullmatch(r"\d+(\.\d*)?", value) or float(value) * 1e9 < least:
        raise UserError(
            f"{ROOM} is {value!r}; expected gigabytes, {least / 1e9:.2g} or more for this data set, of which {count} "
            f"shards must fit. Smaller shards (`vitlab shard --megabytes`) need less"
        )
    return int(float(value) * 1e9)
