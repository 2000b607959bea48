"""Fingerprints of a data set's images.

Portable ones are the same wherever the data set lies; a run has them in config.json, and compares them when it is
resumed. The exact one changes with the path or time of any file; cached features are named by it, and `vitlab shard`
compares it when it resumes.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from vitlab.data.dataset import Dataset, Entries
from vitlab.data.decode import ImageError, read_bytes
from vitlab.data.hub import HubEntry
from vitlab.data.registry import CUSTOM

MAX_NAMES = 100_000  # images of a split that portable fingerprints cover; of more, as many at even distances
MAX_READ = 1_000  # images of a split, at even distances, whose last bytes are covered as well
TAIL = 4096  # how many of the last bytes: the first ones may be the same header in all files
MAX_LISTED = 100  # classes that are listed by name; more have one fingerprint
_BY_NAME = b""  # stands for the content of an image of a published set, which its name identifies
_NOT_READ = b"-1"  # of an image of the hub that is not read, as no size is stored


def portable_fingerprints(splits: Mapping[str, Dataset]) -> dict[str, Any]:
    """`classes`: their names in the order of labels (`class_list`); `images`: for each split and class, the number of
    images, and a fingerprint of their names and content."""
    classes = next(iter(splits.values())).classes
    return {
        "classes": class_list(classes),
        "images": {split: _fingerprints_of_classes(dataset) for split, dataset in splits.items()},
    }


def class_list(classes: Sequence[str]) -> list[str] | str:
    """The names of classes, or a fingerprint of more than MAX_LISTED."""
    names = list(classes)
    return names if len(names) <= MAX_LISTED else f"{len(names)} names, {_short_hash(repr(names).encode())}"


def names_and_labels_fingerprint(dataset: Dataset) -> str:
    """Covers the labels, and the names of the files without their folders if these are at most MAX_NAMES."""
    labels = dataset.all_labels
    digest = hashlib.sha256(labels.offsets.tobytes() + labels.values.tobytes())
    if dataset.entries and len(dataset) <= MAX_NAMES:
        names = "\0".join(PurePath(entry.path).name for entry in dataset.entries)
        digest.update(names.encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def exact_fingerprint(start: str, dataset: Dataset) -> str:
    """SHA-256 of `start` and of the images: of their bytes if they are in memory, of the index if they are in remote
    shards, and otherwise of the paths, sizes and times of their files. Labels do not count."""
    digest = hashlib.sha256(start.encode())
    if dataset.pixels is not None:
        pixels = np.ascontiguousarray(dataset.pixels)
        digest.update(f"{pixels.dtype} {pixels.shape} {sorted(dataset.failures)}".encode())
        digest.update(pixels.data)
        return digest.hexdigest()
    if isinstance(dataset.entries, Entries):
        digest.update(dataset.entries.identity.encode())
    states: dict[str, bytes] = {}
    for entry in dataset.entries:
        if entry.file not in states:
            try:
                stat = os.stat(entry.file)  # noqa: PTH116  (a Path for every one of a million files is slow)
                state = f"{os.path.abspath(entry.file)}\0{stat.st_size}\0{stat.st_mtime_ns}"  # noqa: PTH100
            except OSError:
                state = f"{entry.file}\0missing"  # reading it raises
            states[entry.file] = state.encode(errors="surrogateescape")
        digest.update(states[entry.file] + f"\0{entry[1:]}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _fingerprints_of_classes(dataset: Dataset) -> dict[str, str]:
    """Class -> the number of its images and their fingerprint, without the name of the class."""
    labels = dataset.all_labels
    with_tail = set(_evenly_spaced(len(dataset), MAX_READ).tolist())
    images_of = [list[tuple[str, bytes]]() for _ in dataset.classes]  # path and fingerprint of each image of a class
    for index in _evenly_spaced(len(dataset), MAX_NAMES).tolist():
        # What decides if an image is held out counts: its group, and whether it is from the user's val.
        parts = [str(values[index]) for values in (dataset.groups, dataset.from_val) if values is not None]
        decisive = "\0".join(parts).encode(errors="surrogateescape")
        image = (dataset.path(index), _content(dataset, index, index in with_tail) + decisive)
        for label in labels.of_image(index):
            images_of[label].append(image)
    counts = np.bincount(labels.values, minlength=len(dataset.classes)).tolist()
    fingerprints = list(map(_fingerprint_of_images, images_of))
    if len(dataset.classes) > MAX_LISTED:
        return {"all classes": f"{len(dataset)} images, {_short_hash(repr([counts, fingerprints]).encode())}"}
    rows = zip(dataset.classes, counts, fingerprints, strict=True)
    return {name: f"{count} images, {fingerprint}" for name, count, fingerprint in rows}


def _fingerprint_of_images(images: Sequence[tuple[str, bytes]]) -> str:
    """Covers the names of a class's images, relative to the folder that all of them share, and their fingerprints."""
    folder = os.path.commonprefix([name for name, _ in images]).rpartition("/")[0]  # noqa: RUF071  (cut at a /)
    parts = []
    for name, fingerprint in images:
        parts += [name[len(folder) :].lstrip("/").encode(errors="surrogateescape"), fingerprint]
    return _short_hash(b"\0".join(parts))


def _content(dataset: Dataset, index: int, with_tail: bool) -> bytes:
    """What stands for the content of an image: the size of its file or member, and its last bytes if `with_tail`."""
    if dataset.is_remote:
        assert isinstance(dataset.entries, Entries)
        return dataset.entries.identity.encode()
    if dataset.name.partition(":")[0] not in CUSTOM or not dataset.entries:
        return _BY_NAME
    entry = dataset.entries[index]
    try:
        if isinstance(entry, HubEntry):
            return entry.data()[-TAIL:] if with_tail else _NOT_READ
        size = os.stat(entry.file).st_size if entry.is_whole_file else entry.size  # noqa: PTH116  (a Path is slow)
        start = max(size - TAIL, 0)
        tail = read_bytes(entry.file, entry.offset + start, size - start) if with_tail and size else b""
        return str(size).encode() + tail
    except (OSError, ImageError):
        return b"unreadable"


def _evenly_spaced(count: int, most: int) -> np.ndarray:
    """Up to `most` of the numbers below `count`."""
    return np.arange(count) if count <= most else np.linspace(0, count - 1, most).astype(np.int64)


def _short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]
