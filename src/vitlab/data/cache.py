"""Caches of what was computed from images: a digest that identifies the images, and intact arrays or none."""

import hashlib
import os
from pathlib import Path

import numpy as np

from vitlab.data.dataset import Dataset
from vitlab.io import ARCHIVE_DAMAGE, reading_npz


def digest_images(start: str, dataset: Dataset, indices: range, stats: dict[str, bytes]) -> str:
    """SHA-256 of `start` and the images `indices`: it changes with any of them, not with their labels.

    Of images in memory the bytes count; of those in files their paths, sizes and times. `stats` caches what is known
    of files from one call to the next.
    """
    digest = hashlib.sha256(start.encode())
    part = slice(indices.start, indices.stop)
    if dataset.pixels is not None:
        pixels = np.ascontiguousarray(dataset.pixels[part])
        broken = [i - indices.start for i in dataset.failures if i in indices]
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
        stat = os.stat(file)  # noqa: PTH116  (a Path for each of a million files would cost more than the question)
    except OSError:
        return f"{file}\0missing".encode(errors="surrogateescape")  # reading it says what is wrong with it
    return f"{os.path.abspath(file)}\0{stat.st_size}\0{stat.st_mtime_ns}".encode(errors="surrogateescape")  # noqa: PTH100


def read_arrays(path: Path, *names: str) -> list[np.ndarray] | None:
    """The arrays `names` of an .npz; None if it is missing, lacks one, or does not match its checksums."""
    try:
        with reading_npz(path) as arrays:
            assert arrays.zip is not None  # it is open
            return None if arrays.zip.testzip() else [arrays[name] for name in names]
    except ARCHIVE_DAMAGE:
        return None
