"""Files and folders that appear whole or not at all, and last; what a killed process left of them; checksums of what
lies in a folder; and files that one process holds at a time."""

import fcntl
import glob
import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

logger = logging.getLogger(__name__)
SUMS = "SHA256SUMS"
"""A folder's checksums, in the format of `sha256sum --check`."""
MISSING = "is missing"
LEFTOVER = re.compile(r"\.(.+)\.([0-9a-f]{16}|[0-9]{1,7})\.(new|old)")
"""Names of temporary files and folders; older versions wrote a process id where the random part is."""


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
