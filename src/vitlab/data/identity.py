"""A location-independent fingerprint of a run's images: classes, labels, and the names and content of files."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from vitlab.data.dataset import Dataset, Entries
from vitlab.data.decode import ImageError, read_bytes
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
    return {"classes": listed(classes), "images": {split: _fingerprints(dataset) for split, dataset in splits.items()}}


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


def normalized_location(data: Mapping[str, Any], identified: bool) -> dict[str, Any]:
    """The settings of a data set with an absolute path, or without one if `identify` has identified its images."""
    kind, _, path = str(data["name"]).partition(":")
    root = Path(data.get("root") or "").expanduser()
    if kind not in ("folder", "csv", "shards") or "://" in path or path.startswith("hub:"):
        return {**data, "root": None if identified else os.path.realpath(root)}
    place = "" if identified else os.path.realpath(root / Path(path).expanduser())
    return {**data, "name": f"{kind}:{place}", "root": None}


def _fingerprints(dataset: Dataset) -> dict[str, str]:
    """The number of images of each class and their checksum, which does not depend on the name of the class."""
    labels = dataset.all_labels
    with_tail = set(_evenly_spaced(len(dataset), MAX_READ).tolist())
    images = [list[tuple[str, bytes]]() for _ in dataset.classes]
    for row in _evenly_spaced(len(dataset), MAX_NAMES).tolist():
        image = (dataset.path(row), image_fingerprint(dataset, row, row in with_tail))
        for label in labels.of_image(row):
            images[label].append(image)
    counts = np.bincount(labels.values, minlength=len(images)).tolist()
    checksums = [_checksum_of_images(each) for each in images]
    if len(images) > MAX_LISTED:
        return {"all classes": f"{len(dataset)} images, {_checksum(repr([counts, checksums]).encode())}"}
    rows = zip(dataset.classes, counts, checksums, strict=True)
    return {name: f"{count} images, {checksum}" for name, count, checksum in rows}


def _checksum_of_images(images: Sequence[tuple[str, bytes]]) -> str:
    """Checksum of the images' names below the folder that they share, and of their fingerprints."""
    folder = os.path.commonprefix([name for name, _ in images]).rpartition("/")[0]  # noqa: RUF071  (cut at a /)
    names = ((name[len(folder) :].lstrip("/"), content) for name, content in images)
    return _checksum(b"\0".join(part for name, data in names for part in (name.encode(errors="surrogateescape"), data)))


def image_fingerprint(dataset: Dataset, row: int, with_tail: bool) -> bytes:
    """The content of an image, and what decides if it is held out: its group, and whether it is from the user's val."""
    parts = [str(each[row]) for each in (dataset.groups, dataset.from_val) if each is not None]
    return _content(dataset, row, with_tail) + "\0".join(parts).encode(errors="surrogateescape")


def _content(dataset: Dataset, row: int, with_tail: bool) -> bytes:
    """The size of an image's file or member, and `with_tail` its last bytes."""
    if dataset.is_remote:  # the checksum of their index
        assert isinstance(dataset.entries, Entries)
        return dataset.entries.identity.encode()
    if dataset.name.partition(":")[0] not in CUSTOM or not dataset.entries:  # of published sets the names suffice
        return b""
    entry = dataset.entries[row]
    try:
        if entry.size < 0 and entry.member:  # of a table on the hub
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
