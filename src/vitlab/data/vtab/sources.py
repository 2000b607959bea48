"""The published data sets of VTAB: where they come from, their files, and how they are located or downloaded."""

import fcntl
import logging
import shutil
import tarfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.data.downloads import download as download_file
from vitlab.errors import UserError

logger = logging.getLogger(__name__)

LOCK = ".lock"
"""A file in the folder of downloads, locked by the process that writes there; it names the archive being unpacked."""


class Source(NamedTuple):
    """Where a data set comes from and how it lies on disk."""

    page: str
    license: str
    sizes: Mapping[str, int]  # images of each split of TFDS
    folders: Sequence[str]
    """Where it may lie below the root, besides its name; downloads go to ROOT/NAME."""
    required: Mapping[str, Sequence[str]]
    """Split (or "all") -> what such a folder holds; " or " stands between alternatives, and * for any letters."""
    files: Mapping[str, Sequence[tuple[str, str]]] = {}
    """Split (or "all") -> the URLs and digests of what is downloaded; archives are unpacked."""
    lists: Mapping[str, tuple[str, str]] = {}
    """Split -> URL and digest of a list of its images, downloaded into the folder."""
    classes: int | None = None  # None where they depend on the task
    access: str = "automatic"
    """How it is obtained: "automatic", when needed; "by hand"; or "license", by hand after consent to its terms."""

    def how(self) -> str:
        """How the data is obtained, in a line."""
        ways = {"automatic": "downloaded when needed", "by hand": "by hand", "license": "by hand, with consent"}
        return f"{ways[self.access]}, from {self.page}; license: {self.license}"


SOURCES = {
    name: Source(**row) for name, row in tomllib.loads((Path(__file__).parent / "sources.toml").read_text()).items()
}
"""The data sets of VTAB and two more. Those with `classes` are also data sets by name, the others only as tasks."""


def locate(name: str, split: str, root: Path, download: bool) -> Path:
    """The folder, `root` or one below it, that holds a split of the data set `name`, which may be downloaded there."""
    source = SOURCES[name]
    if split not in source.sizes:
        raise UserError(f"{name} has the splits {', '.join(source.sizes)}, not {split!r}")
    required = source.required.get(split) or source.required["all"]
    folders = list(dict.fromkeys([root, *(root / folder for folder in (*source.folders, name))]))
    folder, missing = _most_complete(folders, required)
    was_downloaded = source.files and folder.is_relative_to(root / name)
    if missing or (was_downloaded and _unpacking(root / name)):
        what = " and ".join(missing) or "its archives unpacked"
        need = f"{name} needs {what} (from {source.page}; license: {source.license})"
        need += f"; looked in {', '.join(map(str, folders))}"
        if source.access != "automatic":
            consent = ", after consent to its license" if source.access == "license" else ""
            raise UserError(f"{need}: download it by hand{consent}, and put it there or give another root")
        _require_download(need, download)
        files = source.files.get(split) or source.files["all"]
        _download_and_unpack(files, root / name, lambda: bool(_most_complete(folders, required)[1]))
        folder, missing = _most_complete(folders, required)
        if missing:
            what = " and ".join(missing)
            raise UserError(f"{name} was downloaded, but {what} is not in {folder}: download it by hand")
    if split in source.lists:
        url, digest = source.lists[split]
        list_file = folder / url.rpartition("/")[2]
        if not list_file.is_file():
            _require_download(f"{name} needs the list of the {split} split, {url}; looked in {folder}", download)
            download_file(url, list_file, digest)
    return folder


def _download_and_unpack(files: Sequence[Sequence[str]], folder: Path, is_missing: Callable[[], bool]) -> None:
    """Downloads files into `folder` and unpacks archives; of several processes one does, and the others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        missing = is_missing()
        interrupted = _unpacking(folder)
        for url, digest in files:
            archive = folder / url.rpartition("/")[2]
            if missing or archive.name == interrupted:
                download_file(url, archive, digest)
                lock.truncate(0)
                lock.write(archive.name)
                lock.flush()
                _unpack(archive)
        lock.truncate(0)


def _unpacking(folder: Path) -> str:
    """The archive that is being unpacked, or was when a process was killed; "" for none."""
    return (folder / LOCK).read_text() if (folder / LOCK).exists() else ""


def _require_download(need: str, allowed: bool) -> None:
    if not allowed:
        raise UserError(f"{need}: put it there, give another root, or allow the download")
    logger.warning("%s: downloading it", need)


def _most_complete(folders: Sequence[Path], required: Sequence[str]) -> tuple[Path, list[str]]:
    """The most complete folder (of equal ones the first), and what is missing there."""
    missing = [
        [part for part in required if not any(any(folder.glob(name)) for name in part.split(" or "))]
        for folder in folders
    ]
    return min(zip(folders, missing, strict=True), key=lambda pair: len(pair[1]))


def _unpack(archive: Path) -> None:
    """Unpacks an archive, and archives within it, and removes them; other files stay."""
    if not archive.name.endswith((".zip", ".tar.gz", ".tgz")):
        return
    has_filter = archive.suffix != ".zip" and hasattr(tarfile, "data_filter")  # not in Python before 3.11.4
    options: dict[str, Any] = {"filter": "data"} if has_filter else {}
    try:
        shutil.unpack_archive(archive, archive.parent, **options)
    except (shutil.ReadError, tarfile.TarError, OSError, EOFError) as error:
        raise UserError(f"{archive} cannot be unpacked ({error}): remove it and download it again") from error
    for inner in archive.parent.glob("*/*.tar.gz"):
        _unpack(inner)
    archive.unlink(missing_ok=True)  # last: a call that is interrupted unpacks it again
