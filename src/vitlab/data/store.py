"""Files of a web address: fetched once, checked, and kept in a folder as many as there is room for.

Several processes may share the folder. A file appears in it whole or not at all; a beginning is kept for the next try.
"""

import contextlib
import fcntl
import functools
import hashlib
import http.client
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from vitlab.data import web
from vitlab.data.shard_index import File
from vitlab.data.shards import OpenFile
from vitlab.errors import UserError
from vitlab.io import JSON_BYTES

TRIES = 6
"""How often in a row nothing may come before the server counts as gone ..."""
PAUSE = 0.5
"""... and the seconds between the first two of them; each further pause is twice as long."""
DEADLINE = 300.0
"""Seconds that a small file may take."""

_GONE = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)
_busy: dict[tuple[int, str], threading.Lock] = {}  # of this process; `lockf` keeps only other processes away
Found = TypeVar("Found")


class Store:
    """The files of a set that lie below `base`, and those of them that are in `folder`.

    room: most bytes of tars that are kept. handles: most tars that a process keeps open. token: what the server wants
    to be shown.
    """

    def __init__(
        self, base: str, folder: Path, files: Sequence[File], room: int | None = None, handles: int = 1,
        token: str | None = None,
    ) -> None:  # fmt: skip
        self.base, self.folder, self.room, self.handles, self.token = base, folder, room, handles, token
        self.files = {file.file: file for file in files}

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "opened"}

    @functools.cached_property
    def opened(self) -> Callable[[str], OpenFile]:
        """A file that stays open for the next time: it can be read even when it was removed to make room."""
        return functools.lru_cache(self.handles)(self._opened)

    def _opened(self, name: str) -> OpenFile:
        while True:
            with contextlib.suppress(FileNotFoundError):  # another process made room just now
                return OpenFile(self.fetch(name))

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Bytes of a file, which is fetched unless it is there."""
        return self.opened(name).read(offset, size)

    def fetch(self, name: str, over: threading.Event | None = None) -> str:
        """The path of a file, once it is there whole; once `over` is set, it is given up. Raises `ValueError`."""
        if name not in self.files:
            raise UserError(f"the index of {self.base} lists no {name}: write the set again")
        path = self.folder / name
        try:
            if not path.exists():
                with _busy.setdefault((os.getpid(), str(path)), threading.Lock()):
                    while not path.exists():
                        self._fetch(path, self.files[name], over)
        except OSError as error:
            raise UserError(f"cannot keep {self.base}/{name} in {self.folder}: {error.strerror or error}") from error
        with contextlib.suppress(OSError):  # gone again, or somebody else's
            os.utime(path)  # it counts as new, and the oldest go first
        return str(path)

    def _fetch(self, path: Path, file: File, over: threading.Event | None) -> None:
        """One attempt; it may end without the file where another process was there first."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.part")
        with aside.open("a+b") as part:
            fcntl.lockf(part, fcntl.LOCK_EX)
            try:
                ours = os.fstat(part.fileno()).st_ino == aside.stat().st_ino
            except FileNotFoundError:
                ours = False
            if not ours or path.exists():
                return
            download(f"{self.base}/{file.file}", part, file, over, self.token)
            os.fsync(part.fileno())
            aside.replace(path)
        if self.room is not None:
            self._make_room(path)

    def _make_room(self, newest: Path) -> None:
        """Removes the tars that were not asked for longest."""
        found = []
        for path in self.folder.glob("*.tar"):
            with contextlib.suppress(FileNotFoundError):  # another process makes room as well
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= (self.room or 0):
                return
            if path != newest:
                path.unlink(missing_ok=True)
                total -= size


def download(
    address: str, part: BinaryIO, file: File, over: threading.Event | None = None, token: str | None = None
) -> None:
    """Completes `part`, which may hold a beginning, and compares its sum, if `file` has one. Raises `ValueError`."""
    found = ""
    for beginning in (True, False):
        if not beginning:
            part.truncate(0)  # what was there may have been of another file
        _insist(
            address, lambda: _stream(address, part, file.bytes, over, token), lambda: part.seek(0, os.SEEK_END), over
        )
        part.seek(0)
        found = hashlib.file_digest(part, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
        if found == file.sha256 or not file.sha256:
            return
    raise UserError(
        f"{address} has the sha256 {found}, not {file.sha256} as the set's index says: the file is damaged on the "
        f"server, or was replaced without its index"
    )


def get(address: str, token: str | None = None) -> bytes | None:
    """A small file, of JSON; None where there is none of this name. Raises `ValueError`."""
    end = time.monotonic() + DEADLINE

    def attempt() -> tuple[bytes | None] | None:
        data = bytearray()
        try:
            with _open(address, token=token) as answer:
                while chunk := _read(answer, 2**12):
                    data += chunk
                    if len(data) > JSON_BYTES or time.monotonic() > end:
                        raise UserError(
                            f"{address} has more than {JSON_BYTES:,} bytes, or takes more than {DEADLINE:.0f} s: look "
                            f"at the address"
                        )
                return None if answer.length else (bytes(data),)  # cut off, or whole
        except urllib.error.HTTPError as error:
            if error.code in (404, 410):
                return (None,)
            raise

    return _insist(address, attempt)[0]


def size_of(address: str, token: str | None = None) -> int:
    """The bytes of a file, as the server promises them. Raises `ValueError`."""

    def attempt() -> int:
        with _open(address, method="HEAD", token=token) as answer:
            return int(answer.headers["Content-Length"] or -1)

    if (size := _insist(address, attempt)) < 0:
        raise UserError(
            f"the server of {address} does not say how large it is: fetch the shards, and give their folder"
        )
    return size


def _insist(
    address: str,
    attempt: Callable[[], Found | None],
    progress: Callable[[], int] = lambda: 0,
    over: threading.Event | None = None,
) -> Found:
    """What `attempt` brings, once that is not None; it is tried again as long as there is progress, and nothing is
    `over`."""
    over = over or threading.Event()
    idle, before = 0, progress()
    while True:
        reason = "the connection was cut off"
        try:
            if (found := attempt()) is not None:
                return found
        except urllib.error.HTTPError as error:
            reason = f"the server says {error.code} {error.reason}"
            if error.code in (401, 403):
                raise UserError(
                    f"cannot fetch {address} ({reason}): it is not for everyone. A set of the hub may need consent, on "
                    f"its page, and a login (`hf auth login`, or the variable HF_TOKEN)"
                ) from error
            if 300 <= error.code < 500 and error.code not in (408, 416, 425, 429):
                raise UserError(f"cannot fetch {address} ({reason}): look at the address") from error
        except _GONE as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        idle, before = (0, progress()) if progress() > before else (idle + 1, before)
        if idle == TRIES:
            raise UserError(
                f"cannot fetch {address} ({reason}; tried {TRIES} times): look at the address and the network. What is "
                f"here already stays, and the same command goes on with it"
            )
        if over.wait(PAUSE * 2 ** (idle - 1) if idle else 0):
            raise UserError(f"{address} is not needed any more")


def _open(address: str, start: int = 0, method: str = "GET", token: str | None = None) -> http.client.HTTPResponse:
    headers = {"User-Agent": "vitlab"} | ({"Range": f"bytes={start}-"} if start else {})
    scheme, empty, host, *path = address.split("/")
    path = [urllib.parse.quote(part, safe="%:?&=@!$'()*+,;~") for part in path]  # spaces, and letters of all languages
    request = urllib.request.Request("/".join((scheme, empty, host, *path)), headers=headers, method=method)
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")  # for this server alone
    return web.opener(_Redirect).open(request, timeout=web.TIMEOUT)


class _Redirect(web.Redirect):
    """Shows the token again where a server sends on to itself, and nowhere else."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        shown = req.unredirected_hdrs.get("Authorization")
        same = urllib.parse.urlsplit(newurl)[:2] == urllib.parse.urlsplit(req.full_url)[:2]  # `host` may be a proxy's
        if new is not None and shown and same:
            new.add_unredirected_header("Authorization", shown)
        return new


def _read(answer: http.client.HTTPResponse, size: int) -> bytes:
    """As `answer.read`; whatever happens to the network in between is a connection that broke."""
    try:
        return answer.read(size)
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from error


def _stream(address: str, part: BinaryIO, size: int, over: threading.Event | None, token: str | None) -> bool | None:
    """Appends what `part` lacks of `size` bytes; None where the server stops early."""
    have = part.seek(0, os.SEEK_END)
    if have >= size:  # whole, or of something else: the sum tells
        return True
    with _open(address, have, token=token) as answer:
        if have and answer.status != http.client.PARTIAL_CONTENT:  # it sends all of it again
            have = part.truncate(0)
        while have < size and (chunk := _read(answer, min(2**20, size - have))):
            if over is not None and over.is_set():
                raise UserError(f"{address} is not needed any more")
            part.write(chunk)
            have += len(chunk)
    part.flush()
    return True if have == size else None
