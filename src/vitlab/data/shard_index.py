"""The files that describe a data set in shards, so that no tar has to be scanned.

`index.json` lists every other file with its bytes and its SHA-256; `SPLIT.index.npz` has the locations and labels of a
split's images; `classes.json` has the class names. write_shards.py writes them; shards.py and remote.py read them.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.checksums import sha256
from vitlab.data.dataset import Labels
from vitlab.data.limits import MAX_IMAGE_BYTES
from vitlab.errors import UserError
from vitlab.io import (
    JSON_BYTES,
    NPZ_ERRORS,
    check_regular,
    parse_json,
    read_json,
    read_regular,
    reading_npz,
    write_arrays,
)
from vitlab.settings import NonNegativeInt, read_fields

INDEX = "index.json"
CLASSES = "classes.json"
FORMAT = "vitlab-shards-1"
_LOCATION_KINDS = {"records": "i", "offset": "i", "size": "u", "names": "u", "lengths": "u"}
"""The arrays of `Locations`, and the kind of each one's dtype: int or unsigned int."""
_KINDS = {"shards": "U", **_LOCATION_KINDS, "labels": "i", "counts": "u"}
"""The same of all arrays of `SPLIT.index.npz`; "U" is text."""
_FIELDS = {"format": str, "shards": dict, "metadata": tuple, "left_out": dict, "settings": dict}
_FILE_FIELDS = {"file": str, "bytes": NonNegativeInt, "sha256": str, "records": NonNegativeInt}


@dataclasses.dataclass(eq=False)
class Locations:
    """The positions of N images in S shards, whose images follow each other."""

    shards: tuple[str, ...]  # the names of the tars
    records: np.ndarray  # int64 [S], the number of images of each
    offset: np.ndarray  # int64 [N], where each image starts in its shard
    size: np.ndarray  # uint32 [N], in bytes
    names: np.ndarray  # uint8 [L], the names of all members, concatenated
    lengths: np.ndarray  # uint32 [N], of each name

    def __post_init__(self) -> None:
        self.shard = np.repeat(np.arange(len(self.shards), dtype=np.int32), self.records)  # [N], of each image
        self.ends = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])  # [N + 1], of names in `names`

    @classmethod
    def of_shard(cls, shard: str, members: Sequence[tuple[str, int, int]]) -> "Locations":
        """Locations in one shard; `members`: name, offset and size of each image's bytes."""
        names = [name.encode(errors="surrogateescape") for name, _, _ in members]
        numbers = np.array([(offset, size) for _, offset, size in members], np.int64).reshape(-1, 2)
        lengths = np.array([*map(len, names)], np.uint32)
        size = numbers[:, 1].astype(np.uint32)
        return cls((shard,), np.array([len(names)]), numbers[:, 0], size, np.frombuffer(b"".join(names), "u1"), lengths)

    @classmethod
    def joined(cls, parts: Sequence["Locations"]) -> "Locations":
        """The images of all parts, one part after the other."""
        arrays = (np.concatenate([getattr(part, name) for part in parts]) for name in _LOCATION_KINDS)
        return cls(tuple(shard for part in parts for shard in part.shards), *arrays)

    def __len__(self) -> int:
        return len(self.offset)

    def member(self, index: int) -> str:
        """The name of an image in its tar."""
        start, end = self.ends[index : index + 2]
        return self.names[start:end].tobytes().decode(errors="surrogateescape")


def write_locations(path: Path, locations: Locations, labels: Labels) -> None:
    """Writes `SPLIT.index.npz`, about 30 bytes per image. `counts` is empty if every image has one label."""
    arrays = {
        "shards": np.array(locations.shards),
        **{name: getattr(locations, name) for name in _LOCATION_KINDS},
        "labels": labels.values.astype(np.int32),
        "counts": labels.counts.astype(np.uint32) if labels.is_multi_label else np.empty(0, np.uint32),
    }
    write_arrays(path, arrays)


def read_locations(path: Path, shards: Sequence[str]) -> tuple[Locations, Labels]:
    """Reads `SPLIT.index.npz`. Raises UserError for a corrupt one, and for one of other tars than `shards`."""
    try:
        with reading_npz(path) as file:
            arrays = {name: file[name] for name in _KINDS}
        _require_valid(arrays, shards)
    except NPZ_ERRORS as error:
        raise UserError(f"{path} does not match {INDEX} ({error}): get or write the data set again") from error
    locations = Locations(tuple(shards), *(arrays[name] for name in _LOCATION_KINDS))
    counts = arrays["counts"] if len(arrays["counts"]) else np.ones(len(locations), np.uint32)
    offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    return locations, Labels(arrays["labels"].astype(np.int64), offsets)


def _require_valid(arrays: Mapping[str, np.ndarray], shards: Sequence[str]) -> None:
    """Raises ValueError for an invalid content of `SPLIT.index.npz`."""
    if any(array.ndim != 1 or array.dtype.kind != _KINDS[name] for name, array in arrays.items()):
        raise ValueError("its arrays have another type or number of dimensions")
    n, records, counts = len(arrays["offset"]), arrays["records"], arrays["counts"]
    if min(arrays[name].min(initial=0) for name in ("records", "offset", "labels")) < 0 or records.max(initial=0) > n:
        raise ValueError("its numbers are out of range")
    sizes = {"shards": len(records), "offset": records.sum(), "names": arrays["lengths"].sum(), "size": n, "lengths": n}
    sizes |= {"counts": n, "labels": counts.sum()} if len(counts) else {"labels": n}
    if any(len(arrays[name]) != size for name, size in sizes.items()):
        raise ValueError("its arrays have different lengths")
    if arrays["shards"].tolist() != list(shards):
        raise ValueError("it lists other shards")
    if arrays["size"].max(initial=0) > MAX_IMAGE_BYTES:
        raise ValueError(f"an image has more than {MAX_IMAGE_BYTES:,} bytes")


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a data set."""

    file: str
    bytes: int
    sha256: str
    records: int = 0  # images, if it is a shard

    @classmethod
    def of(cls, path: Path, records: int = 0) -> "File":
        check_regular(path)
        return cls(path.name, path.stat().st_size, sha256(path), records)


@dataclasses.dataclass(frozen=True)
class ShardIndex:
    """The content of an `index.json`."""

    shards: dict[str, tuple[File, ...]]  # the tars of each split, in order
    metadata: tuple[File, ...] = ()  # the other files, `classes.json` and `SPLIT.index.npz`
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)  # images of each split that could not be read
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # how the data set was written

    @property
    def files(self) -> dict[str, File]:
        """All files by their names, tars first."""
        tars = [file for files in self.shards.values() for file in files]
        return {file.file: file for file in (*tars, *self.metadata)}

    def to_json(self) -> bytes:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1).encode() + b"\n"


def parse_index(data: bytes, source: str) -> ShardIndex:
    """The content of an `index.json`; `source` names it in messages. Raises UserError."""
    try:
        content = read_fields(parse_json(data, "it"), _FIELDS, "it")
        if content["format"] != FORMAT:
            raise UserError(f"its format is {content['format']!r}, not {FORMAT!r}")
        shards = {str(split): tuple(map(_parse_file, files)) for split, files in content["shards"].items()}
        metadata = tuple(map(_parse_file, content["metadata"]))
        return ShardIndex(shards, metadata, dict(content["left_out"]), dict(content["settings"]))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{source} is not an index of shards ({type(error).__name__}: {error}), as `vitlab shard` writes it: get "
            f"or write the data set again"
        ) from error


def _parse_file(content: Any) -> File:
    content = read_fields(content, _FILE_FIELDS, "a file")
    file = File(content["file"], content["bytes"], content["sha256"], content["records"])
    if not re.fullmatch(r"\w[^/\\\x00-\x1f]*", file.file):  # it becomes the name of a file here
        raise UserError(f"{file.file!r} is not a plain file name")
    return file


def read_index(path: Path) -> ShardIndex:
    """The content of the file `index.json`. Raises UserError."""
    return parse_index(read_regular(path, JSON_BYTES), str(path))


def class_names(path: Path) -> tuple[str, ...]:
    """The names in `classes.json`; none if there is no such file."""
    if not path.exists():
        return ()
    names = read_json(path)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path} must be a list of class names in label order, not {str(names)[:60]}")
    return tuple(names)
