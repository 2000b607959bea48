"""What identifies the images of a run, wherever they are: classes, labels, and the names and content of files."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from vitlab.data.dataset import Dataset
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
    return {"classes": listed(classes), "images": {split: _by_class(dataset) for split, dataset in splits.items()}}


def listed(classes: Sequence[str]) -> list[str] | str:
    """The names of classes, or a checksum of more than MAX_LISTED."""
    names = list(classes)
    return names if len(names) <= MAX_LISTED else f"{len(names)} names, {_short(repr(names).encode())}"


def names_and_labels(dataset: Dataset) -> str:
    """A checksum of the labels, and of up to MAX_NAMES names of files without their folders."""
    labels = dataset.all_labels
    digest = hashlib.sha256(labels.offsets.tobytes() + labels.values.tobytes())
    if dataset.entries and len(dataset) <= MAX_NAMES:
        names = "\0".join(PurePath(entry.path).name for entry in dataset.entries)
        digest.update(names.encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def same_place(data: Mapping[str, Any], identified: bool) -> dict[str, Any]:
    """The settings of a data set with an absolute path, or without a path if its images are `identified` by
    `identify`."""
    (kind, _, path), root = str(data["name"]).partition(":"), Path(data.get("root") or "").expanduser()
    if kind not in ("folder", "csv", "shards") or "://" in path or path.startswith("hub:"):
        return {**data, "root": None if identified else os.path.realpath(root)}
    place = "" if identified else os.path.realpath(root / Path(path).expanduser())
    return {**data, "name": f"{kind}:{place}", "root": None}


def _by_class(dataset: Dataset) -> dict[str, str]:
    """The number of images of each class and their checksum, which does not depend on the name of the class."""
    rows, read = _spread(len(dataset), MAX_NAMES), set(_spread(len(dataset), MAX_READ).tolist())
    labels, members = dataset.all_labels.take(rows), [list[tuple[str, bytes]]() for _ in dataset.classes]
    for number, row in enumerate(rows.tolist()):
        for label in labels.of_image(number):
            members[label].append((dataset.path(row), _content(dataset, row, row in read) + _part(dataset, row)))
    counts = np.bincount(dataset.all_labels.values, minlength=len(members)).tolist()
    checksums = [_checksum(images) for images in members]
    if len(members) > MAX_LISTED:
        return {"all classes": f"{len(dataset)} images, {_short(repr([counts, checksums]).encode())}"}
    both = zip(dataset.classes, counts, checksums, strict=True)
    return {name: f"{count} images, {checksum}" for name, count, checksum in both}


def _checksum(images: Sequence[tuple[str, bytes]]) -> str:
    """Hash of the images' names below the folder that they share, and of their contents."""
    folder = os.path.commonprefix([name for name, _ in images]).rpartition("/")[0]  # noqa: RUF071  (cut at a /)
    names = ((name[len(folder) :].lstrip("/"), content) for name, content in images)
    return _short(b"\0".join(part for name, data in names for part in (name.encode(errors="surrogateescape"), data)))


def _content(dataset: Dataset, row: int, read: bool) -> bytes:
    """The size of an image's file and, to `read`, its last bytes; nothing of published sets, whose names suffice."""
    if dataset.name.partition(":")[0] not in CUSTOM or not dataset.entries or not getattr(dataset.entries, "local", 1):
        return getattr(dataset.entries, "identity", "").encode()
    entry = dataset.entries[row]
    size = entry.size
    try:
        if size < 0 and not entry.member:
            size = os.stat(entry.file).st_size  # noqa: PTH116  (a Path for every one of many files is slow)
        if not read or not size:
            return str(size).encode()
        if size < 0:  # of a table on the hub
            return entry.data()[-TAIL:]
        start = max(size - TAIL, 0)
        return str(size).encode() + read_bytes(entry.file, entry.offset + start, size - start)
    except (OSError, ImageError):
        return b"unreadable"


def _part(dataset: Dataset, row: int) -> bytes:
    """The group of an image, and whether it is from the user's val, where these decide what is held out."""
    parts = [str(each[row]) for each in (dataset.groups, dataset.from_val) if each is not None]
    return "\0".join(parts).encode(errors="surrogateescape")


def _spread(count: int, most: int) -> np.ndarray:
    """Up to `most` of the numbers below `count`, at even distances."""
    return np.arange(count) if count <= most else np.linspace(0, count - 1, most).astype(np.int64)


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]
