"""Atomic files and folders, locks, and safe reading of untrusted JSON and .npz files.

NAME is written as `.NAME.TOKEN.new` and renamed when it is complete on disk: a killed process leaves only such files.
"""

import csv
import errno
import fcntl
import glob
import io
import json
import math
import os
import re
import secrets
import shutil
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError

from vitlab.errors import DISK_FULL, UserError, WriteError

FORMULA = re.compile(r"'*[=+\-@\t\r](?!(?<=[+-])\d+(\.\d+)?([eE][+-]?\d+)?\Z)")
"""Matches text that spreadsheets compute (`=1+1`, `-a`, `@x`), also after `'`; but no signed number (`-3.5`)."""
LEFTOVER = re.compile(r"\.(.+)\.[0-9a-f]{16}\.(new|old)")
"""Names of temporary files and folders."""
JSON_BYTES = 2**24
"""Size of the largest JSON file to read: an index of 100,000 shards, or a config with 200,000 class names."""
MAX_COMPRESSION = 100
"""Largest compression ratio of an .npz. Trained weights hardly compress; zeros compress 1,000 times."""
SMALL_ARCHIVE = 2**26
"""Bytes of memory that any .npz may require, whatever its size."""
NPZ_ERRORS = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""Exceptions of reading a corrupt .npz: its directory, an array's header or its data."""


@contextmanager
def replacing_file(path: Path, size: int | None = None, clear: bool = True) -> Iterator[BinaryIO]:
    """Opens a temporary file for writing that replaces `path` when it is complete and synced to disk.

    size: bytes to write, if known, for WriteError. clear: whether to remove leftovers first, slow among many files.
    """
    with writing(path.parent, size), _temporary(path, Path.touch, clear) as new, new.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
        new.replace(path)
        sync(path.parent)


def write_bytes(path: Path, data: bytes, clear: bool = True) -> None:
    """Writes a file atomically; `clear` is as in `replacing_file`."""
    with replacing_file(path, len(data), clear) as file:
        file.write(data)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an .npz atomically."""
    with replacing_file(path) as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]  # no array is called allow_pickle


def check_output(path: Path) -> None:
    """Raises UserError where no file or folder can be written at `path`, before there is work to lose."""
    path = path.absolute()
    folder = next(parent for parent in path.parents if os.path.exists(parent))  # noqa: PTH110  # Path's raises
    longest = os.pathconf(folder, "PC_NAME_MAX") - len(".." + "0" * 16 + ".new")  # as LEFTOVER
    if long := next((name for name in path.parts if len(os.fsencode(name)) > longest), None):
        raise UserError(f"the name {long[:40]}... to write has {len(long)} characters; give one of at most {longest}.")
    if not folder.is_dir():
        raise UserError(f"{path} cannot be written: {folder} is not a folder; give another name.")
    if not (path.is_dir() or os.access(path, os.W_OK) or os.access(folder, os.W_OK)):
        raise UserError(f"{path} cannot be written: permission denied; give another name, or change the permissions.")


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Writes a CSV file with a header atomically; names that are not UTF-8 keep their bytes."""
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    table.writerows(map(as_cells, rows))
    write_bytes(path, text.getvalue().encode(errors="surrogateescape"))


def as_cells(row: Iterable[Any]) -> list[Any]:
    """A row for a CSV file: FORMULA's text gets a `'` before it, so that spreadsheets show it; numbers stay.

    `from_cell` is the inverse, because such text that already begins with `'` gets another one.
    """
    return [f"'{cell}" if isinstance(cell, str) and FORMULA.match(cell) else cell for cell in row]


def from_cell(cell: str) -> str:
    """The text behind a cell of `as_cells`."""
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


@contextmanager
def replacing_folder(path: Path, size: int | None = None) -> Iterator[Path]:
    """Creates a temporary folder to fill that replaces the folder `path` when its files are synced to disk.

    One folder cannot replace another at once: the old one is first renamed to `.NAME.TOKEN.old`. size: as in `writing`.
    """
    path = resolved(path)  # so that "." has a name and a parent
    with temporary_folder(path, size) as new:
        old = new.with_suffix(".old")
        yield new
        try:
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


@contextmanager
def temporary_folder(path: Path, size: int | None = None) -> Iterator[Path]:
    """Creates a temporary folder next to `path`, for files that will replace it; removes it on exit."""
    with writing(path.parent, size), _temporary(path, Path.mkdir) as new:
        yield new


def resolved(path: Path) -> Path:
    """The absolute path without links. Raises UserError for a loop of links."""
    real = Path(os.path.realpath(path))
    if any(part.is_symlink() for part in (real, *real.parents)):
        raise UserError(f"{path} is a loop of links, which end nowhere; remove the link, or give another path.")
    return real


@contextmanager
def writing(folder: Path, size: int | None = None) -> Iterator[None]:
    """Raises WriteError, which names the `folder`, if the disk is full. size: bytes to write, if known."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, SafetensorError) else None
        number = int(reason[1]) if reason else getattr(error, "errno", None)
        if number not in DISK_FULL:
            if isinstance(error, OSError):
                raise
            raise OSError(number, str(error), str(folder)) from error
        needed = "" if size is None else f"{size:,} bytes are required, "
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.is_dir())).free
        raise WriteError(
            f"nothing more can be written to {folder} ({os.strerror(number)}): {needed}{free:,} bytes are free. Free "
            f"space, or give another folder, then run the same command again.",
            number,
        ) from error


def clear_leftovers(folder: Path, name: str | None = None) -> None:
    """Removes temporary files and folders of killed processes from `folder`: all, or only `name`'s.

    Where a process was killed between the two renames of `replacing_folder`, the new folder, or else the old one, gets
    the name. Files that a running process is writing stay, as do those that cannot be removed.
    """
    pattern = ".*" if name is None else f".{glob.escape(name)}.*"
    for path in sorted(folder.glob(pattern)):  # .new before .old
        match = LEFTOVER.fullmatch(path.name)
        if match is None or (name is not None and match[1] != name):
            continue
        target = folder / match[1]
        new = path.with_suffix(".new")
        with _hold(new) as held, suppress(OSError):
            if new.exists() and not held:  # it is being written
                continue
            is_incomplete = path == new and not path.with_suffix(".old").exists()
            if target.exists() or is_incomplete:
                _remove(path)
            else:
                path.replace(target)


@contextmanager
def _temporary(path: Path, create: Callable[[Path], None], clear: bool = True) -> Iterator[Path]:
    """Creates a file or folder next to `path`, locked while it is filled; removes it on exit unless it was renamed."""
    resolved(path.parent).mkdir(parents=True, exist_ok=True)
    if clear:
        clear_leftovers(path.parent, path.name)
    while True:
        token = secrets.token_hex(8)  # no process id: in a container every run may have the same one
        create(new := path.with_name(f".{path.name}.{token}.new"))
        with _hold(new, wait=True):
            if not new.exists():  # another process found it before it was locked, and removed it
                continue
            try:
                yield new
            finally:
                _remove(new)
            return


@contextmanager
def _hold(path: Path, wait: bool = False) -> Iterator[bool]:
    """Locks a file or folder; yields whether it could. wait: for a lock that another process holds for a moment."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        held = True
    except OSError:  # another process holds it, or the file system has no locks
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


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's entries, are on disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(path: Path) -> BinaryIO | None:
    """The file, locked until it is closed or the process ends; None if another process has locked it.

    It contains this process's id. A record lock: loader workers, which may outlive a killed run, do not inherit it.
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
    """Raises UserError for a pipe, socket or device, which may never end; OSError for a folder or a missing file."""
    mode = os.stat(path).st_mode  # noqa: PTH116
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = "a named pipe" if stat.S_ISFIFO(mode) else "a socket or a device"
        raise UserError(f"{path} is {kind}; only regular files (and links to them) are read.")


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file for reading; raises as `check_regular` does."""
    check_regular(path)
    return open(path, "rb")  # noqa: PTH123


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """The content of a regular file. Raises UserError for one of more than `limit` bytes, and OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise UserError(f"{path} has {size:,} bytes; allowed: at most {limit:,}. It is corrupt or the wrong file.")
        return file.read()


def read_json(path: Path | str, limit: int = JSON_BYTES) -> Any:
    """The content of a JSON file. Raises UserError if it is invalid, too large or too deeply nested, and OSError."""
    return parse_json(read_regular(path, limit), str(path))


def parse_json(data: bytes | str, name: str) -> Any:
    """Parses JSON; `name` is its source in messages. Raises UserError if it is invalid or too deeply nested."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not valid JSON ({error}); get it again.") from error


def finite(value: Any) -> Any:
    """`value` with null for infinity and NaN, which JSON does not know."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def reading_npz(path: Path | str) -> Iterator[np.lib.npyio.NpzFile]:
    """Opens an .npz whose arrays are read on access, after their headers are compared with the file's size.

    Raises UserError if they require far more memory than the file has bytes, and NPZ_ERRORS if it is corrupt.
    """
    with open_regular(path) as file:
        _check_headers(file, path)
        with np.lib.npyio.NpzFile(file, allow_pickle=False) as arrays:
            yield arrays


def _check_headers(file: BinaryIO, path: Path | str) -> None:
    """Raises UserError for a decompression bomb, and for a header that does not match its array's bytes."""
    size = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        required = sum(member.file_size for member in archive.infolist())
        if required > max(MAX_COMPRESSION * size, SMALL_ARCHIVE):
            raise UserError(
                f"{path} has {size:,} bytes and requires {required:,} in memory; weights compress less than "
                f"{MAX_COMPRESSION} times. It is corrupt or malicious: get the file again."
            )
        for member in archive.infolist():
            if member.filename.endswith(".npy"):
                _check_header(archive, member, path)


def _check_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path | str) -> None:
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        held = member.file_size - file.tell()
    if not dtype.hasobject and (min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != held):
        raise UserError(
            f"{path}: {member.filename} has {held:,} bytes, which do not make {dtype} of shape {shape}; it is corrupt: "
            "get the file again."
        )
