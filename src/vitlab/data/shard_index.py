"""What a data set in shards consists of: where its images lie, as arrays, and `index.json`, the list of its files.

`index.json` names every file with its bytes and its SHA-256; beside it lie `SPLIT.index.npz`, the locations and labels
of a split's images, so that no tar has to be scanned.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.data.dataset import Labels, read_arrays
from vitlab.errors import UserError
from vitlab.io import (
    JSON_BYTES,
    check_regular,
    parse_json,
    read_json,
    read_regular,
    replacing_file,
    sha256,
    write_arrays,
)

INDEX = "index.json"
CLASSES = "classes.json"
FORMAT = "vitlab-shards-1"
MAX_IMAGE_BYTES = 2**30
"""Largest member of a tar that is read."""
_ARRAYS = ("shards", "records", "offset", "size", "letters", "lengths", "labels", "counts")
_KINDS = "Uiiuuuiu"  # of their dtypes


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """Where N images lie in S shards.

    shards: the names of the tars. records: int64 [S], the number of images of each, one shard after the other. offset,
    size: int64 and uint32 [N], the bytes of each image in its shard. letters: uint8 [L], the names of all members, one
    after the other, and lengths: uint32 [N], of each name.
    """

    shards: tuple[str, ...]
    records: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    letters: np.ndarray
    lengths: np.ndarray
    shard: np.ndarray = dataclasses.field(init=False)
    """int32 [N], the number of each image's shard."""
    ends: np.ndarray = dataclasses.field(init=False)
    """int64 [N + 1], where each name starts and ends in `letters`."""

    def __post_init__(self) -> None:
        numbers = np.arange(len(self.shards), dtype=np.int32)
        object.__setattr__(self, "shard", np.repeat(numbers, self.records))
        object.__setattr__(self, "ends", np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)]))

    @classmethod
    def of_shard(cls, shard: str, members: Sequence[tuple[str, int, int]]) -> "Places":
        """Of one shard: the name of each image's member, the offset and the size of its bytes."""
        names = [name.encode(errors="surrogateescape") for name, _, _ in members]
        numbers = np.array([(offset, size) for _, offset, size in members], np.int64).reshape(-1, 2)
        letters = np.frombuffer(b"".join(names), np.uint8)
        lengths = np.array([*map(len, names)], np.uint32)
        return cls((shard,), np.array([len(names)]), numbers[:, 0], numbers[:, 1].astype(np.uint32), letters, lengths)

    @classmethod
    def joined(cls, parts: Sequence["Places"]) -> "Places":
        """The images of all parts, one part after the other."""
        names = ("records", "offset", "size", "letters", "lengths")
        arrays = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
        return cls(tuple(shard for part in parts for shard in part.shards), *arrays)

    def __len__(self) -> int:
        return len(self.offset)

    def member(self, index: int) -> str:
        """The name of an image in its tar."""
        start, end = self.ends[index : index + 2]
        return self.letters[start:end].tobytes().decode(errors="surrogateescape")


def labels_of(values: np.ndarray, counts: np.ndarray) -> Labels:
    """The labels `values`, one image after the other, of which each image has `counts`."""
    return Labels(values.astype(np.int64), np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]))


def write_places(path: Path, places: Places, labels: Labels) -> None:
    """Writes `SPLIT.index.npz`, about 30 bytes per image."""
    arrays = {name: getattr(places, name) for name in _ARRAYS if hasattr(places, name)}
    arrays |= {"shards": np.array(places.shards), "labels": labels.values.astype(np.int32)}
    several = len(labels.values) > len(labels)
    write_arrays(path, arrays | {"counts": labels.counts.astype(np.uint32) if several else np.empty(0, np.uint32)})


def read_places(path: Path) -> tuple[Places, Labels] | None:
    """What `write_places` wrote; None where the file is missing or corrupt."""
    arrays = read_arrays(path, *_ARRAYS)
    if arrays is None or any(a.ndim != 1 or a.dtype.kind != k for a, k in zip(arrays, _KINDS, strict=True)):
        return None
    shards, records, offset, size, letters, lengths, values, counts = arrays
    n = len(offset)
    counts = counts if len(counts) else np.ones(n, np.int64)
    consistent = len(shards) == len(records) and len(size) == len(lengths) == len(counts) == n == records.sum()
    consistent = consistent and lengths.sum() == len(letters) and counts.sum() == len(values) and counts.all()
    in_range = all(array.min(initial=0) >= 0 for array in (records, offset, values)) and records.max(initial=0) <= n
    if not consistent or not in_range or size.max(initial=0) > MAX_IMAGE_BYTES:
        return None
    return Places(tuple(shards.tolist()), records, offset, size, letters, lengths), labels_of(values, counts)


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a data set; bytes: -1 if unknown. records: how many images, where it is a shard."""

    file: str
    bytes: int
    sha256: str
    records: int = 0

    @classmethod
    def of(cls, path: Path, records: int = 0) -> "File":
        check_regular(path)
        return cls(path.name, path.stat().st_size, sha256(path), records)


@dataclasses.dataclass(frozen=True)
class ShardIndex:
    """The content of an `index.json`.

    shards: the tars of each split, in order. beside: the other files, `classes.json` and `SPLIT.index.npz`. left_out:
    how many images of each split could not be read. settings: how the data set was written.
    """

    shards: dict[str, tuple[File, ...]]
    beside: tuple[File, ...] = ()
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def files(self) -> tuple[File, ...]:
        return tuple(file for shards in self.shards.values() for file in shards) + self.beside

    def write(self, path: Path) -> None:
        with replacing_file(path) as file:
            file.write(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1).encode() + b"\n")


def parse_index(data: bytes, source: str) -> ShardIndex:
    """The content of an `index.json`, which errors call `source`. Raises UserError."""
    try:
        content = parse_json(data, "it")
        if content["format"] != FORMAT:
            raise UserError(f"its format is {content['format']!r}, not {FORMAT!r}")
        shards = {str(split): tuple(map(_parse_file, files)) for split, files in content["shards"].items()}
        beside = tuple(map(_parse_file, content["beside"]))
        return ShardIndex(shards, beside, dict(content["left_out"]), dict(content["settings"]))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{source} is not an index of shards ({type(error).__name__}: {error}), as `vitlab shard` writes it: get "
            f"or write the data set again"
        ) from error


def _parse_file(content: dict[str, Any]) -> File:
    file = File(str(content["file"]), int(content["bytes"]), str(content["sha256"]), int(content["records"]))
    if not re.fullmatch(r"\w[^/\\\x00-\x1f]*", file.file):  # it becomes the name of a file here
        raise UserError(f"{file.file!r} is not a plain file name")
    return file


def read_index(path: Path) -> ShardIndex:
    """The content of the file `index.json`. Raises UserError."""
    return parse_index(read_regular(path, JSON_BYTES), str(path))


def class_names(path: Path) -> tuple[str, ...]:
    """The names in `classes.json`; none if there is no such file."""
    names = read_json(path) if path.exists() else []
    if not isinstance(names, list) or (path.exists() and not names) or not all(isinstance(n, str) for n in names):
        raise UserError(f"{path} must be a list of class names in label order, not {str(names)[:60]}")
    return tuple(names)
