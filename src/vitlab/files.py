"""Files and folders that appear whole or not at all, and last; and files that one process holds at a time."""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np


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
