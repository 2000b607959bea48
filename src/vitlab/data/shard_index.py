"""What a data set in shards consists of: where its images lie, as arrays, and `index.json`, the list of its files.

`index.json` is written last and names every file with its bytes and its SHA-256; beside it lie `SPLIT.index.npz`, the
places and labels of a split's images, so that no tar has to be scanned.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.data.dataset import Labels, read_arrays
from vitlab.data.downloads import Report
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
"""Largest encoded image in a tar."""
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

    def __len__(self) -> int:
        return len(self.offset)

    def member(self, index: int) -> str:
        """The name of an image in its tar."""
        start, end = self.ends[index : index + 2]
        return self.letters[start:end].tobytes().decode(errors="surrogateescape")

    @classmethod
    def joined(cls, parts: Sequence["Places"]) -> "Places":
        """The images of all parts, one part after the other."""
        arrays = (np.concatenate([getattr(part, name) for part in parts]) for name in _PLACES)
        return cls(tuple(shard for part in parts for shard in part.shards), *arrays)

    def of_shards(self, shards: Sequence[str]) -> tuple["Places", np.ndarray]:
        """The images of some shards only, and their indices."""
        numbers = [self.shards.index(shard) for shard in shards]
        rows = np.flatnonzero(np.isin(self.shard, numbers))
        letters = np.frombuffer("".join(map(self.member, rows.tolist())).encode(errors="surrogateescape"), np.uint8)
        arrays = (self.records[numbers], self.offset[rows], self.size[rows], letters, self.lengths[rows])
        return Places(tuple(shards), *arrays), rows


_PLACES = ("records", "offset", "size", "letters", "lengths")


def labels_of(values: np.ndarray, counts: np.ndarray) -> Labels:
    """The labels `values`, one image after the other, of which each image has `counts`."""
    return Labels(values.astype(np.int64), np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]))


def write_places(path: Path, places: Places, labels: Labels, **further: np.ndarray) -> None:
    """Writes `SPLIT.index.npz`, about 30 bytes per image."""
    arrays = (
        np.array(places.shards),
        places.records,
        places.offset,
        places.size,
        places.letters,
        places.lengths,
        labels.values.astype(np.int32),
        labels.counts.astype(np.uint32) if len(labels.values) > len(labels) else np.empty(0, np.uint32),
    )
    write_arrays(path, dict(zip(_ARRAYS, arrays, strict=True)) | further)


def read_places(path: Path, *further: str) -> tuple[Places, Labels, list[np.ndarray]] | None:
    """What `write_places` wrote, and the arrays `further`; None where the file is missing or corrupt."""
    if (arrays := read_arrays(path, *_ARRAYS, *further)) is None:
        return None
    if any(array.ndim != 1 or array.dtype.kind != kind for array, kind in zip(arrays, _KINDS, strict=False)):
        return None
    shards, records, offset, size, letters, lengths, values, counts = arrays[: len(_ARRAYS)]
    n = len(offset)
    counts = counts if len(counts) else np.ones(n, np.int64)
    in_range = ((records >= 0) & (records <= n)).all() and min(offset.min(initial=0), values.min(initial=0)) >= 0
    if not in_range or size.max(initial=0) > MAX_IMAGE_BYTES or not counts.all():
        return None
    if not (len(shards) == len(records) and n == records.sum() == len(size) == len(lengths) == len(counts)):
        return None
    if lengths.sum() != len(letters) or counts.sum() != len(values):
        return None
    places = Places(tuple(shards.tolist()), records, offset, size, letters, lengths)
    return places, labels_of(values, counts), arrays[len(_ARRAYS) :]


# ----------------------------------------------------------------------------------------------- index.json


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a data set. records: how many images, where it is a shard."""

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
    beside: tuple[File, ...]
    left_out: dict[str, int]
    settings: dict[str, Any]

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
    try:
        return parse_index(read_regular(path, JSON_BYTES), str(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): get or write the data set again") from error


def class_names(path: Path) -> tuple[str, ...]:
    """The names in `classes.json`; none if there is no such file."""
    if not path.exists():
        return ()
    names = read_json(path)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path} must be a list of class names in label order, not {str(names)[:60]}")
    return tuple(names)


# ----------------------------------------------------------------------------------------- whole data sets


def summary(folder: Path) -> dict[str, Any]:
    """The images, tars, bytes and unreadable images of each split of a finished data set, and its settings."""
    index = read_index(folder / INDEX)
    splits = {
        split: {
            "images": sum(file.records for file in files),
            "shards": len(files),
            "bytes": sum(file.bytes for file in files),
            "unreadable": index.left_out.get(split, 0),
        }
        for split, files in index.shards.items()
    }
    return {"folder": str(folder), "splits": splits, "settings": index.settings}


def check_shards(folder: Path | str, report: Report = lambda done, of: None) -> dict[str, Any]:
    """Compares every file of a data set with `index.json`; "wrong" has what differs. `report` receives bytes."""
    folder = Path(folder)
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} has no {INDEX}: give a folder that `vitlab shard` wrote, as shards:PATH")
    index = read_index(folder / INDEX)
    total, done = sum(file.bytes for file in index.files), 0
    wrong: dict[str, str] = {}
    for file in index.files:
        path = folder / file.file
        if not path.is_file():
            wrong[file.file] = "is missing"
        elif (size := path.stat().st_size) != file.bytes:
            wrong[file.file] = f"has {size} bytes, expected {file.bytes}"
        elif (digest := sha256(path)) != file.sha256:
            wrong[file.file] = f"has the sha256 {digest}, expected {file.sha256}"
        done += file.bytes
        report(done, total)
    listed = {file.file for file in index.files}
    wrong |= {path.name: "is not listed" for path in sorted(folder.glob("*.tar")) if path.name not in listed}
    return {"folder": str(folder), "files": len(index.files), "bytes": total, "wrong": wrong}


def summary_as_text(found: dict[str, Any]) -> str:
    """A `summary` in a few lines, for people."""
    lines = [
        f"{split}: {part['images']:,} images in {part['shards']} shards, {part['bytes'] / 1e6:,.1f} MB"
        + (f"; {part['unreadable']} could not be read" if part["unreadable"] else "")
        for split, part in found["splits"].items()
    ]
    return "\n".join([*lines, f"use it as shards:{found['folder']}"])


def check_as_text(found: dict[str, Any]) -> str:
    """The result of `check_shards` in a few lines, for people."""
    if not found["wrong"]:
        return f"all {found['files']} files of {found['folder']} match {INDEX}"
    lines = [f"{name} {problem}" for name, problem in found["wrong"].items()]
    return "\n".join([*lines, f"{found['folder']} does not match {INDEX}: get or write the data set again"])
