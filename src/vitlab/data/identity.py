"""Fingerprints of a data set's images: `identify`, wherever they lie, for runs; `digest_images`, exact, for caches."""

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

MAX_NAMES = 100_000
"""Images of a split whose files are compared; of more, as many at even distances."""
MAX_READ = 1_000
"""Files of a split, at even distances, whose last bytes are compared."""
TAIL = 4096
"""Bytes of a file that are compared: its last ones, as files may begin with the same header."""
MAX_LISTED = 100
"""Classes that are listed by name; more have one checksum."""


def identify(splits: Mapping[str, Dataset]) -> dict[str, Any]:
    """`classes`, the names in the order of labels, and `images`: for each split and class the number of images, and a
    checksum of their names below the folder of the data set, of the sizes of files and of some of their content."""
    classes = next(iter(splits.values())).classes
    return {
        "classes": listed(classes),
        "images": {split: _class_fingerprints(dataset) for split, dataset in splits.items()},
    }


def listed(classes: Sequence[str]) -> list[str] | str:
    """The names of classes, or a checksum of more than MAX_LISTED."""
    names = list(classes)
    return names if len(names) <= MAX_LISTED else f"{len(names)} names, {_checksum(repr(names).encode())}"


def names_and_labels(dataset: Dataset) -> str:
    """A checksum of the labels, and of up to MAX_NAMES names of files without their folders."""
    labels = dataset.all_labels
    digest = hashlib.sha256(labels.offsets.tobytes() + labels.values.tobytes())
    if dataset.entries and len(dataset) <= MAX_NAMES:
        names = "\0".join(PurePath(entry.path).name for entry in dataset.entries)
        digest.update(names.encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def digest_images(start: str, dataset: Dataset) -> str:
    """SHA-256 of `start` and the images: their bytes in memory, or the paths, sizes and times of files, or the index of
    remote shards. Labels do not count."""
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


def _class_fingerprints(dataset: Dataset) -> dict[str, str]:
    """The number of images of each class and their checksum, which does not depend on the name of the class."""
    labels = dataset.all_labels
    with_tail = set(_evenly_spaced(len(dataset), MAX_READ).tolist())
    images_of = [list[tuple[str, bytes]]() for _ in dataset.classes]  # path and fingerprint
    for index in _evenly_spaced(len(dataset), MAX_NAMES).tolist():
        image = (dataset.path(index), _image_fingerprint(dataset, index, index in with_tail))
        for label in labels.of_image(index):
            images_of[label].append(image)
    counts = np.bincount(labels.values, minlength=len(dataset.classes)).tolist()
    checksums = list(map(_checksum_of_images, images_of))
    if len(dataset.classes) > MAX_LISTED:
        return {"all classes": f"{len(dataset)} images, {_checksum(repr([counts, checksums]).encode())}"}
    rows = zip(dataset.classes, counts, checksums, strict=True)
    return {name: f"{count} images, {checksum}" for name, count, checksum in rows}


def _checksum_of_images(images: Sequence[tuple[str, bytes]]) -> str:
    """Checksum of the images' names below the folder that they share, and of their fingerprints."""
    folder = os.path.commonprefix([name for name, _ in images]).rpartition("/")[0]  # noqa: RUF071  (cut at a /)
    parts = []
    for name, fingerprint in images:
        parts += [name[len(folder) :].lstrip("/").encode(errors="surrogateescape"), fingerprint]
    return _checksum(b"\0".join(parts))


def _image_fingerprint(dataset: Dataset, index: int, with_tail: bool) -> bytes:
    """The content of an image, and what decides if it is held out: its group, and whether it is from the user's val."""
    parts = [str(values[index]) for values in (dataset.groups, dataset.from_val) if values is not None]
    return _content_fingerprint(dataset, index, with_tail) + "\0".join(parts).encode(errors="surrogateescape")


def _content_fingerprint(dataset: Dataset, index: int, with_tail: bool) -> bytes:
    """The size of an image's file or member, and `with_tail` its last bytes."""
    if dataset.is_remote:
        assert isinstance(dataset.entries, Entries)
        return dataset.entries.identity.encode()
    if dataset.name.partition(":")[0] not in CUSTOM or not dataset.entries:  # of published sets the names suffice
        return b""
    entry = dataset.entries[index]
    try:
        if isinstance(entry, HubEntry):
            return entry.data()[-TAIL:] if with_tail else b"-1"
        size = os.stat(entry.file).st_size if entry.is_whole_file else entry.size  # noqa: PTH116  (a Path is slow)
        start = max(size - TAIL, 0)
        tail = read_bytes(entry.file, entry.offset + start, size - start) if with_tail and size else b""
        return str(size).encode() + tail
    except (OSError, ImageError):
        return b"unreadable"


def _evenly_spaced(count: int, most: int) -> np.ndarray:
    """Up to `most` of the numbers below `count`, at even distances."""
    return np.arange(count) if count <= most else np.linspace(0, count - 1, most).astype(np.int64)


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]
