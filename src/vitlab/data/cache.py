"""What was computed from images and is kept on disk: whose it is, and whole or not there."""

import hashlib
import os
from pathlib import Path

import numpy as np

from vitlab.data.dataset import Dataset
from vitlab.io import ARCHIVE_DAMAGE, reading_npz


def digest_images(start: str, dataset: Dataset, places: range, stats: dict[str, bytes]) -> str:
    """SHA-256 of `start` and the images at `places`: it changes with any of them. Labels are no part of it.

    Of images in memory the bytes count; of those in files what they are called, their sizes and their times.
    `stats` remembers the files from one call to the next.
    """
    digest = hashlib.sha256(start.encode())
    part = slice(places.start, places.stop)
    if dataset.pixels is not None:
        pixels = np.ascontiguousarray(dataset.pixels[part])
        broken = [i - places.start for i in dataset.failures if i in places]
        digest.update(f"{pixels.dtype} {pixels.shape} {sorted(broken)}".encode())
        digest.update(pixels.data)
    else:
        for entry in dataset.entries[part]:
            if entry.file not in stats:
                stats[entry.file] = _stat(entry.file)
            digest.update(stats[entry.file] + f"\0{entry[1:]}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _stat(file: str) -> bytes:
    try:
        found = os.stat(file)  # noqa: PTH116  (a Path for each of a million files would cost more than the question)
    except OSError:
        return f"{file}\0missing".encode(errors="surrogateescape")  # reading it says what is wrong with it
    return f"{os.path.abspath(file)}\0{found.st_size}\0{found.st_mtime_ns}".encode(errors="surrogateescape")  # noqa: PTH100


def read_arrays(path: Path, *names: str) -> list[np.ndarray] | None:
    """The arrays `names` of an .npz; None where it is not there, lacks one, or has a byte that its checksums deny."""
    try:
        with reading_npz(path) as arrays:
            assert arrays.zip is not None  # it is open
            return None if arrays.zip.testzip() else [arrays[name] for name in names]
    except ARCHIVE_DAMAGE:
        return None
