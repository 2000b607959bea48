"""What a set of shards consists of: the places of its images, in arrays, and `index.json`, the list of its files.

`index.json` is written last and names every file of the set with its bytes and its SHA-256; beside it lie
`SPLIT.index.npz`, the places and labels of a split's images, so that no tar has to be looked through.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.data.cache import read_arrays
from vitlab.data.dataset import Labels
from vitlab.errors import UserError
from vitlab.io import (
    JSON_BYTES,
    open_regular,
    parse_json,
    read_json,
    read_regular,
    replacing_file,
    write_arrays,
)

Report = Callable[[int, int], None]
"""Hears how much is done, and of how much."""
INDEX = "index.json"
CLASSES = "classes.json"
FORMAT = "vitlab-shards-1"
MAX_IMAGE_BYTES = 2**30
"""Largest image in a tar, still encoded."""
_ARRAYS = ("shards", "records", "offset", "size", "letters", "lengths", "labels", "counts")
_KINDS = "Uiiuuuiu"  # of their types


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """Where N images lie in S shards.

    shards: the names of the tars. shard: int32 [N], the number of each image's. offset, size: int64 and uint32 [N],
    the bytes of each image in its shard. letters: uint8 [L], the names of all members, one after the other, and
    ends: int64 [N + 1], where each of them starts and ends.
    """

    shards: tuple[str, ...]
    shard: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    letters: np.ndarray
    ends: np.ndarray

    @classmethod
    def of_lists(
        cls, shards: Sequence[str], records: Sequence[int] | np.ndarray, offset: np.ndarray, size: np.ndarray,
        letters: np.ndarray, lengths: np.ndarray,
    ) -> "Places":  # fmt: skip
        """records: how many images each shard has, one shard after the other. lengths: of the members' names."""
        return cls(
            tuple(shards),
            np.repeat(np.arange(len(shards), dtype=np.int32), records),
            offset.astype(np.int64),
            size.astype(np.uint32),
            letters,
            np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        )

    def __len__(self) -> int:
        return len(self.offset)

    def member(self, index: int) -> str:
        """The name of a image in its tar."""
        start, end = self.ends[index : index + 2]
        return self.letters[start:end].tobytes().decode(errors="surrogateescape")

    @property
    def records(self) -> np.ndarray:
        """How many images each shard has, int64 [S]."""
        return np.bincount(self.shard, minlength=len(self.shards))

    @classmethod
    def joined(cls, parts: Sequence["Places"]) -> "Places":
        """The images of all parts, one part after the other."""
        return cls.of_lists(
            [shard for part in parts for shard in part.shards],
            np.concatenate([part.records for part in parts]),
            np.concatenate([part.offset for part in parts]),
            np.concatenate([part.size for part in parts]),
            np.concatenate([part.letters for part in parts]),
            np.concatenate([np.diff(part.ends) for part in parts]),
        )


def write_places(path: Path, places: Places, labels: Labels, **further: np.ndarray) -> None:
    """`SPLIT.index.npz`: 30 bytes a image, or so."""
    arrays = (
        np.array(places.shards),
        places.records,
        places.offset,
        places.size,
        places.letters,
        np.diff(places.ends).astype(np.uint32),
        labels.values.astype(np.int32),
        labels.counts.astype(np.uint32) if len(labels.values) > len(labels) else np.empty(0, np.uint32),
    )
    write_arrays(path, dict(zip(_ARRAYS, arrays, strict=True)) | further)


def read_places(path: Path, *further: str) -> tuple[Places, Labels, list[np.ndarray]] | None:
    """What `write_places` wrote; None where the file is not there, or is damaged."""
    if (arrays := read_arrays(path, *_ARRAYS, *further)) is None:
        return None
    if any(each.ndim != 1 or each.dtype.kind != kind for each, kind in zip(arrays, _KINDS, strict=False)):
        return None
    shards, records, offset, size, letters, lengths, values, counts = arrays[: len(_ARRAYS)]
    n = len(offset)
    if not ((records >= 0) & (records <= n)).all() or not (offset >= 0).all() or not (values >= 0).all():
        return None
    if not (size <= MAX_IMAGE_BYTES).all():
        return None
    each = counts if len(counts) else np.ones(n, np.int64)
    whole = len(shards) == len(records) and n == records.sum() == len(size) == len(lengths) == len(each)
    if not whole or lengths.sum() != len(letters) or each.sum() != len(values) or not each.all():
        return None
    places = Places.of_lists(shards.tolist(), records, offset, size, letters, lengths)
    labels = Labels(values.astype(np.int64), np.concatenate([[0], np.cumsum(each, dtype=np.int64)]))
    return places, labels, arrays[len(_ARRAYS) :]


# ----------------------------------------------------------------------------------------------- index.json


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a set. records: how many images, where it is a shard."""

    file: str
    bytes: int
    sha256: str
    records: int = 0

    @classmethod
    def of(cls, path: Path, records: int = 0) -> "File":
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
            return cls(path.name, path.stat().st_size, digest, records)


@dataclasses.dataclass(frozen=True)
class Listing:
    """The content of an `index.json`.

    shards: the tars of each split, in order. beside: the other files, `classes.json` and `SPLIT.index.npz`. left_out:
    how many images of each split could not be read. settings: how the set was made.
    """

    shards: dict[str, tuple[File, ...]]
    beside: tuple[File, ...]
    left_out: dict[str, int]
    settings: dict[str, Any]

    @property
    def files(self) -> tuple[File, ...]:
        return tuple(file for shards in self.shards.values() for file in shards) + self.beside

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        with replacing_file(path) as file:
            file.write(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1).encode() + b"\n")


def read_listing(data: bytes, where: str) -> Listing:
    """From the bytes of an `index.json`, which `where` names in errors. Raises `ValueError`.

    The names in it become names of files here, so they may not lead out of a folder.
    """
    try:
        content = parse_json(data, "it")
        if content["format"] != FORMAT:
            raise UserError(f"its format is {content['format']!r}, not {FORMAT!r}")
        shards = {str(split): tuple(map(_file, files)) for split, files in content["shards"].items()}
        beside = tuple(map(_file, content["beside"]))
        listing = Listing(shards, beside, dict(content["left_out"]), dict(content["settings"]))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{where} is no list of shards ({type(error).__name__}: {error}), as `vitlab shard` writes it: fetch or "
            f"write the set again"
        ) from error
    return listing


def listing_of(path: Path) -> Listing:
    """From an `index.json`. Raises `ValueError`."""
    try:
        data = read_regular(path, JSON_BYTES)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): fetch or write the set again") from error
    return read_listing(data, str(path))


def _file(content: dict[str, Any]) -> File:
    file = File(str(content["file"]), int(content["bytes"]), str(content["sha256"]), int(content["records"]))
    if not re.fullmatch(r"\w[^/\\\x00-\x1f]*", file.file):
        raise UserError(f"{file.file!r} is no plain name of a file")
    return file


def class_names(path: Path) -> tuple[str, ...]:
    """The names in `classes.json`, or none where there is no such file."""
    if not path.exists():
        return ()
    try:
        names = read_json(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): write a list of class names") from error
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path} must be a list of class names in label order, not {str(names)[:60]}")
    return tuple(names)


# ------------------------------------------------------------------------------------------------ whole sets


def summary(folder: Path) -> dict[str, Any]:
    """What a finished set holds: images, tars and bytes of each split, and how many images could not be read."""
    listing = listing_of(folder / INDEX)
    splits = {
        split: {
            "images": sum(file.records for file in files),
            "shards": len(files),
            "bytes": sum(file.bytes for file in files),
            "unreadable": listing.left_out.get(split, 0),
        }
        for split, files in listing.shards.items()
    }
    return {"folder": str(folder), "splits": splits, "settings": listing.settings}


def check_shards(folder: Path | str, report: Report = lambda done, of: None) -> dict[str, Any]:
    """Compares every file of a set with `index.json`; returns what is wrong with each, none for none.

    `report` hears bytes. Raises `ValueError` where there is no `index.json`.
    """
    folder = Path(folder)
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} has no {INDEX}: give a folder that `vitlab shard` wrote, as shards:PATH")
    listing = listing_of(folder / INDEX)
    total, done = sum(file.bytes for file in listing.files), 0
    wrong: dict[str, str] = {}
    for file in listing.files:
        path = folder / file.file
        if not path.is_file():
            wrong[file.file] = "is missing"
        elif (size := path.stat().st_size) != file.bytes:
            wrong[file.file] = f"has {size} bytes, not {file.bytes}"
        elif (found := File.of(path).sha256) != file.sha256:
            wrong[file.file] = f"has the sha256 {found}, not {file.sha256}"
        done += file.bytes
        report(done, total)
    listed = {file.file for file in listing.files}
    wrong |= {path.name: "is not listed" for path in sorted(folder.glob("*.tar")) if path.name not in listed}
    return {"folder": str(folder), "files": len(listing.files), "bytes": total, "wrong": wrong}


def summary_as_text(found: dict[str, Any]) -> str:
    """A summary in a few lines, for people."""
    lines = [
        f"{split}: {each['images']:,} images in {each['shards']} shards, {each['bytes'] / 1e6:,.1f} MB"
        + (f"; {each['unreadable']} could not be read" if each["unreadable"] else "")
        for split, each in found["splits"].items()
    ]
    return "\n".join([*lines, f"use it as shards:{found['folder']}"])


def check_as_text(found: dict[str, Any]) -> str:
    """What `check_shards` found in a few lines, for people."""
    if not found["wrong"]:
        return f"all {found['files']} files of {found['folder']} are as {INDEX} says"
    lines = [f"{name} {what}" for name, what in found["wrong"].items()]
    return "\n".join([*lines, f"{found['folder']} is not as {INDEX} says: fetch or write the set again"])
