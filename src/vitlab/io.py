"""(Progress displays and tables: `vitlab.display`.)

Files and folders that appear whole or not at all, and last; what a killed process left of them; checksums of what
lies in a folder; files that one process holds at a time; and files from strangers, read only where they are regular and
not too large."""

import errno
import fcntl
import glob
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import stat
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vitlab.errors import UserError

logger = logging.getLogger(__name__)
SUMS = "SHA256SUMS"
"""A folder's checksums, in the format of `sha256sum --check`."""
MISSING = "is missing"
LEFTOVER = re.compile(r"\.(.+)\.([0-9a-f]{16}|[0-9]{1,7})\.(new|old)")
"""Names of temporary files and folders; older versions wrote a process id where the random part is."""
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
    new, _ = _temporary(path)
    try:
        with new.open("xb") as file, _hold(new):
            yield file
            file.flush()
            os.fsync(file.fileno())
            new.replace(path)
        sync(path.parent)
    finally:
        new.unlink(missing_ok=True)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an .npz, whole or not at all."""
    with replacing_file(path) as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]  # no array is called allow_pickle


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A folder to fill; once its files are on the disk it takes the place of the folder `path`.

    A folder cannot take another's place in one step, so the old one is moved aside first: killed between the
    two moves, this leaves the old one as `.NAME.*.old` and the new one, complete, as `.NAME.*.new`, which
    `clear_leftovers` then moves to its place.
    """
    path = path.resolve()  # so that "." has a name and a parent
    path.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(path.parent, path.name)
    new, old = _temporary(path)
    new.mkdir()
    try:
        with _hold(new):
            yield new
            for file in new.iterdir():
                sync(file)
            sync(new)
            if path.exists():
                path.replace(old)
            new.replace(path)
            sync(path.parent)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        if old.exists() and not path.exists():
            old.replace(path)
        shutil.rmtree(new, ignore_errors=True)


def clear_leftovers(folder: Path, name: str | None = None) -> None:
    """Removes what killed processes left of writing files and folders into `folder`, or of writing `name` alone.

    Where one was killed while it replaced a folder, the complete new folder takes its place. What a living process
    is writing stays.
    """
    pattern = ".*" if name is None else f".{glob.escape(name)}.*"
    for path in sorted(folder.glob(pattern)):  # .new before .old
        match = LEFTOVER.fullmatch(path.name)
        if match is None or (name is not None and match[1] != name):
            continue
        target, new, old = folder / match[1], path.with_suffix(".new"), path.with_suffix(".old")
        with _hold(new) as held:
            if new.exists() and not held:
                continue
            if target.exists() or (path == new and not old.exists()):
                _remove(path)
            else:
                path.replace(target)


def _temporary(path: Path) -> tuple[Path, Path]:
    """Names beside `path` that nobody else takes: of the new, and of the old while it makes way."""
    token = secrets.token_hex(8)  # no process id: in a container every run may have the same one
    return path.with_name(f".{path.name}.{token}.new"), path.with_name(f".{path.name}.{token}.old")


@contextmanager
def _hold(path: Path) -> Iterator[bool]:
    """Marks a file or folder as in use as long as this process lives; whether that was possible."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = True
    except OSError:  # another process has it, or the file system knows no locks
        held = False
    try:
        yield held
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------- checksums


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path, names: Iterable[str]) -> None:
    """Writes SHA256SUMS with the checksums of these files of a folder; what it says of other files stays.

    Its last line is a comment with the checksum of the lines before.
    """
    sums = read_sums(folder) | {name: sha256(folder / name) for name in names}
    text = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))
    with replacing_file(folder / SUMS) as file:
        file.write(f"{text}# {hashlib.sha256(text.encode()).hexdigest()}\n".encode())


def read_sums(folder: Path) -> dict[str, str]:
    """Name -> checksum of each file in SHA256SUMS; empty where there is none, or with a warning where it is damaged."""
    path = folder / SUMS
    if not path.exists():
        return {}
    text, _, last = path.read_bytes().rpartition(b"# ")
    if last != f"{hashlib.sha256(text).hexdigest()}\n".encode():
        logger.warning(
            "%s is damaged: it does not match its own checksum, so no file can be checked against it. Delete it, and "
            "the next start of the run writes it anew from the files as they are.",
            path,
        )
        return {}
    return {name: digest for digest, _, name in (line.partition("  ") for line in text.decode().splitlines())}


def find_damage(folder: Path, names: Collection[str] | None = None) -> dict[str, str]:
    """Files of `folder`, or these of them, that are not what SHA256SUMS says: name -> what is wrong."""
    damage = {}
    for name, digest in read_sums(folder).items():
        if names is not None and name not in names:
            continue
        try:
            if sha256(folder / name) != digest:
                damage[name] = "does not match its checksum"
        except FileNotFoundError:
            damage[name] = MISSING
        except OSError as error:
            damage[name] = f"cannot be read ({error.strerror})"
    return damage


def sync(path: Path) -> None:
    """Waits until what a file holds, or which names a folder holds, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(path: Path) -> BinaryIO | None:
    """The file, held by this process until it is closed or the process ends, however; None if another one has it.

    It names the process that holds it. A record lock, because the processes that read images do not inherit it: one
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
