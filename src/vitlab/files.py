"""Files and folders that appear whole or not at all, and last; files that one process holds at a time; and files from
strangers, read only where they are regular and not too large."""

import errno
import fcntl
import json
import math
import os
import shutil
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vitlab.errors import UserError

JSON_BYTES = 2**24
"""Largest JSON file that is read: an index of 100,000 shards, or the card of a model with 200,000 named classes."""
JSON_DEPTH = 100
"""Deepest nesting of lists and objects in JSON that is read."""
MAX_COMPRESSION = 100
"""Most times that an .npz may grow when it is read. Trained weights hardly compress at all; zeros do, 1,000 times."""
SMALL_ARCHIVE = 2**26
"""Bytes that any .npz may ask for, however small it is."""
ARCHIVE_DAMAGE = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What a damaged .npz raises, wherever the damage is: in the archive's directory, an array's header, or its data."""


@contextmanager
def replacing_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to; once it is on the disk to the last byte it takes the place of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(path, "new")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an .npz, whole or not at all."""
    with replacing_file(path) as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]  # no array is called allow_pickle


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A folder to fill; once its files are on the disk it takes the place of the folder `path`.

    A folder cannot take another's place in one step, so the old one is moved aside first: killed between the
    two moves, this leaves the old one as `.NAME.*.old` and the new one, complete, as `.NAME.*.new`.
    """
    path = path.resolve()  # so that "." has a name and a parent
    path.parent.mkdir(parents=True, exist_ok=True)
    aside, old = _aside(path, "new"), _aside(path, "old")
    aside.mkdir()
    try:
        yield aside
        for file in aside.iterdir():
            sync(file)
        sync(aside)
        if path.exists():
            path.replace(old)
        aside.replace(path)
        sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _aside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{what}")


def sync(path: Path) -> None:
    """Waits until what a file holds, or which names a folder holds, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(path: Path) -> BinaryIO | None:
    """The file, held by this process until it is closed or the process ends, however; None if another one has it.

    It names the process that holds it. A record lock, because the processes that read pictures do not inherit it: one
    of them that outlives a killed run by a moment must not hold on.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+b")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    file.truncate(0)
    file.write(str(os.getpid()).encode())
    file.flush()
    return file


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raises UserError unless `path` leads to a regular file: a pipe, socket or device may never end. Also OSError."""
    _check_mode(path, os.stat(path).st_mode)  # noqa: PTH116


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, open for reading. Raises UserError for a pipe, socket or device, and OSError as `open` does."""
    check_regular(path)  # before it is opened: to open a device can have effects
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe that took its place since then does not block
    try:
        _check_mode(path, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except (OSError, UserError):
        os.close(descriptor)
        raise


def _check_mode(path: str | os.PathLike[str], mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a disk"}
    raise UserError(
        f"{path} is {kinds.get(stat.S_IFMT(mode), 'no file')}; only regular files (and links to them) are read. Copy "
        f"what it should hold into a file, and give that."
    )


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """What a regular file of at most `limit` bytes holds. Raises UserError for any other, and OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(data) > limit:
        raise UserError(
            f"{path} has {max(size, len(data)):,} bytes; files of its kind have at most {limit:,}. It is damaged, or "
            f"another file under this name: get it again."
        )
    return data


def read_json(path: Path | str, limit: int = JSON_BYTES) -> Any:
    """What a JSON file says. Raises UserError for no JSON, too much or too deep of it, and OSError."""
    return parse_json(read_regular(path, limit), str(path))


def parse_json(data: bytes | str, name: str) -> Any:
    """What JSON says, whose source is called `name`. Raises UserError for no JSON, and for too deep nesting."""
    try:
        found = json.loads(data)
        level: list[Any] = [[found]]
        for _ in range(JSON_DEPTH + 1):
            holders = (each.values() if isinstance(each, dict) else each for each in level)
            level = [inner for each in holders for inner in each if isinstance(inner, (dict, list))]
            if not level:
                return found
    except RecursionError:
        pass
    except ValueError as error:  # also for bytes that are no text
        raise UserError(f"{name} is not valid JSON ({error}); get it again.") from error
    raise UserError(f"{name} is JSON nested more than {JSON_DEPTH} levels deep; it is damaged: get it again.")


@contextmanager
def reading_npz(path: Path | str) -> Iterator[np.lib.npyio.NpzFile]:
    """The arrays of an .npz, each read when it is asked for, once their headers have been compared with its bytes.

    Raises UserError where they ask for far more memory than the file has bytes, and what NumPy does for damage
    (ARCHIVE_DAMAGE). A plain array (.npy) is not read.
    """
    with open_regular(path) as file:
        _headers(file, path)
        with np.lib.npyio.NpzFile(file, allow_pickle=False) as arrays:
            yield arrays


def outline_npz(path: Path | str) -> dict[str, np.ndarray]:
    """Zeros of the shapes and types of the arrays of an .npz, in no memory. Raises what `reading_npz` does."""
    with open_regular(path) as file:
        return {
            name: np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, (0,) * len(shape))
            for name, (shape, dtype) in _headers(file, path).items()
        }


def _headers(file: BinaryIO, path: Path | str) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and type of each array of an .npz. Raises UserError for a bomb."""
    size = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        asked = sum(member.file_size for member in archive.infolist())
        if asked > max(MAX_COMPRESSION * size, SMALL_ARCHIVE):
            raise UserError(
                f"{path} has {size:,} bytes and asks for {asked:,} in memory; weights and places compress less "
                f"than {MAX_COMPRESSION} times. It is damaged, or made to fill the memory: get the file again."
            )
        return {
            member.filename.removesuffix(".npy"): _header(archive, member, path)
            for member in archive.infolist()
            if member.filename.endswith(".npy")
        }


def _header(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path | str) -> tuple[tuple[int, ...], np.dtype]:
    """Raises UserError where an array's header promises more or less than the archive holds of it."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UserError(f"{path}: {member.filename} is compressed in a way that NumPy does not write; get it again.")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        held = member.file_size - file.tell()
    if not dtype.hasobject and (min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != held):
        raise UserError(
            f"{path}: {member.filename} is said to be {dtype} of shape {shape}, and there are {held:,} bytes of it; "
            f"it is damaged: get the file again."
        )
    return shape, dtype
