"""Sets in WebDataset tars ("shards"): found, looked through once, and read in place.

What is known of a million images is a few arrays; no object is made for a image before it is asked for, and the
processes that read images share those arrays or copy them whole.
"""

import array
import collections
import functools
import hashlib
import logging
import os
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, BinaryIO, cast

import numpy as np

from vitlab.data.dataset import MAX_CLASSES, Dataset, Entries, Labels, Splits, numbered_classes
from vitlab.data.decode import IMAGE_SUFFIXES, Entry, ImageError
from vitlab.data.downloads import cache_folder
from vitlab.data.folder import SPLIT_FOLDERS, report_ignored, require_folder
from vitlab.data.shard_index import (
    CLASSES,
    INDEX,
    MAX_IMAGE_BYTES,
    Listing,
    Places,
    class_names,
    listing_of,
    read_places,
    write_places,
)
from vitlab.errors import UserError
from vitlab.io import check_regular, open_regular, parse_json

logger = logging.getLogger(__name__)

OPEN_SHARDS = 256
"""Most tars that a process keeps open."""
KEPT = 20_000
"""Splits of so many images or more are looked through once, and what was found is kept in the cache folder."""
MAX_LABEL_BYTES, MAX_HEADER_BYTES = 2**20, 2**14
"""Largest member of a tar that holds labels, and largest header that names a member."""
TOLD = 30.0
"""Seconds between two lines that say how far the looking through has come."""


# ------------------------------------------------------------------------------------------------- in place


class OpenFile:
    """An open file, closed when nobody has it any more: not while it is read, though another thread lets go of it."""

    def __init__(self, path: str) -> None:
        check_regular(path)
        self.number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe that took its place would not block

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self.number, size, offset)


_opened = functools.lru_cache(OPEN_SHARDS)(OpenFile)


def read_at(path: str, offset: int, size: int) -> bytes:
    """Bytes of a file that stays open for the next time; from several threads and, after a fork, processes alike."""
    return _opened(path).read(offset, size)


class ShardEntry(Entry):
    """A image in a tar. `file` is what the tar is called, and `read_at` reads from the tar that is called so."""

    read_at: Callable[[str, int, int], bytes]

    def data(self) -> bytes:
        try:
            return self.read_at(self.file, self.offset, self.size)
        except OSError as error:
            raise ImageError(self.path, error.strerror or str(error)) from error


class ShardEntries(Entries):
    """The images `rows`, int64 [N], of all that lie in the tars of `folder`."""

    def __init__(self, folder: str, places: Places, rows: np.ndarray | None = None) -> None:
        self.folder, self.places = folder, places
        self.rows = np.arange(len(places)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, places: Places, rows: np.ndarray) -> "ShardEntries":
        """Other images of the same folder."""
        return ShardEntries(self.folder, places, rows)

    def take(self, indices: np.ndarray) -> "ShardEntries":
        return self.of(self.places, self.rows[indices])

    def join(self, other: Entries) -> "ShardEntries":
        assert isinstance(other, ShardEntries)
        assert self.folder == other.folder
        if self.places is other.places:
            return self.of(self.places, np.concatenate([self.rows, other.rows]))
        rows = np.concatenate([self.rows, other.rows + len(self.places)])
        return self.of(Places.joined([self.places, other.places]), rows)

    def entry(self, index: int) -> ShardEntry:
        row, places = int(self.rows[index]), self.places
        shard, offset, size = int(places.shard[row]), int(places.offset[row]), int(places.size[row])
        entry = ShardEntry(os.path.join(self.folder, places.shards[shard]), places.member(row), offset, size)  # noqa: PTH118
        entry.read_at = self.read_at
        return entry

    def read_at(self, file: str, offset: int, size: int) -> bytes:
        """Bytes of the tar that is called `file`."""
        return read_at(file, offset, size)


# --------------------------------------------------------------------------------------------------- finding


def shard_splits(path: Path, name: str) -> Splits:
    """WebDataset tars `train-*.tar`, `val-*.tar`, `test-*.tar` of `KEY.jpg|png|webp` and `KEY.cls` members.

    A `KEY.cls` holds the number of the image's class, or of several classes, with spaces or commas between them; or a
    `KEY.labels.json` does, as a list. Class names come from `classes.json` (a list, in label order) or are the numbers
    up to train's largest label. Where there is an `index.json`, as `vitlab shard` writes it, the tars must be those it
    lists, and are not looked through.
    """
    require_folder(path, "shards named train-*.tar (and val-*.tar, test-*.tar)")
    tars = {
        split: files
        for split, names in SPLIT_FOLDERS.items()
        if (files := sorted(file for n in names for file in path.glob(f"{n}-*.tar")))
    }
    for tar in (tar for files in tars.values() for tar in files):
        check_regular(tar)
    there = sorted(tar.name for tar in path.glob("*.tar"))
    lacking = f"the folder {path} has no train-*.tar (its tars: {there}): name shards by split"
    if not tars:
        raise UserError(lacking)
    listing = listing_of(path / INDEX) if (path / INDEX).exists() else None
    _opened.cache_clear()  # what lies there now counts

    @functools.cache
    def find(split: str) -> tuple[Places, Labels]:
        if split not in tars:
            raise UserError(lacking)
        return _listed(path, split, tars[split], listing) if listing else _looked_through(path, split, tars[split])

    def read(split: str) -> Dataset:
        return labeled(name, split, class_names(path / CLASSES), find, lambda p: ShardEntries(str(path), p))

    return list(tars), read


def labeled(
    name: str,
    split: str,
    classes: tuple[str, ...],
    find: Callable[[str], tuple[Places, Labels]],
    entries: Callable[[Places], ShardEntries],
) -> Dataset:
    """A split of shards whose labels are among `classes`; without names, of as many as train has."""
    places, labels = find(split)
    found = entries(places)
    if not classes:
        known = labels if split == "train" else find("train")[1]
        classes = numbered_classes(int(known.values.max()), f"{name}, train,")
    if (top := labels.values.max()) >= len(classes):
        where = found[int(np.searchsorted(labels.offsets, labels.values.argmax(), side="right")) - 1].path
        raise UserError(f"{where} has the label {top}, but train's classes are 0 to {len(classes) - 1}")
    several = labels if labels.counts.max() > 1 else None
    return Dataset(name, split, classes, labels.firsts, entries=found, label_sets=several, folder=found.folder)


def _listed(path: Path, split: str, tars: Sequence[Path], listing: Listing) -> tuple[Places, Labels]:
    """A split as `index.json` has it. Raises `ValueError` where the files are others."""
    there = {tar.name: tar.stat().st_size for tar in tars}
    listed = {file.file: file.bytes for file in listing.shards.get(split, ())}
    if there != listed:
        wrong = sorted(file for file, _ in there.items() ^ listed.items())
        raise UserError(
            f"{path / INDEX} does not fit the shards beside it ({', '.join(wrong[:3])}{', ...' if wrong[3:] else ''}): "
            f"fetch or write the set again; if the tars are right, remove {INDEX}, and they are looked through"
        )
    found = read_places(path / f"{split}.index.npz")
    if found is None or found[0].shards != tuple(listed):
        raise UserError(
            f"{path / f'{split}.index.npz'} is missing or damaged: fetch or write it again; or remove {INDEX}, and the "
            f"tars are looked through"
        )
    return found[0], found[1]


def _looked_through(path: Path, split: str, tars: Sequence[Path]) -> tuple[Places, Labels]:
    """A split without `index.json`: looked through now, or what is kept of it if its files are still the same."""
    stats = [tar.stat() for tar in tars]
    stamps = np.array([(stat.st_size, stat.st_mtime_ns) for stat in stats], np.int64)
    key = hashlib.sha256(f"{path.absolute()}\0{split}".encode(errors="surrogateescape")).hexdigest()
    kept = cache_folder() / "shard-indexes" / f"{key[:32]}.npz"
    if kept.exists() and (found := read_places(kept, "stamps")):
        places, labels, (before,) = found
        if places.shards == tuple(tar.name for tar in tars) and np.array_equal(before, stamps):
            return places, labels
    places, labels = look_through(tars)
    if len(places) >= KEPT:
        try:
            write_places(kept, places, labels, stamps=stamps)
        except OSError as error:
            logger.warning("%s: cannot keep what was found in %s shards (%s)", kept, len(tars), error.strerror)
    return places, labels


# ------------------------------------------------------------------------------------------- looking through


def look_through(tars: Sequence[Path]) -> tuple[Places, Labels]:
    """The images of some tars, and their labels. Raises `ValueError`."""
    records: list[int] = []
    numbers, sizes, lengths = array.array("q"), array.array("q"), array.array("q")
    values, counts = array.array("q"), array.array("q")
    letters = bytearray()
    ignored: collections.Counter[str] = collections.Counter()
    told = time.monotonic()
    for done, tar in enumerate(tars):
        if time.monotonic() - told > TOLD:
            told = time.monotonic()
            logger.warning("%s: looking through the shards, %d of %d", tar.parent, done, len(tars))
        images, labels = _look_through_one(tar, ignored)
        if unpaired := sorted(images.keys() ^ labels.keys()):
            raise UserError(f"{tar}: {len(unpaired)} keys lack a image or a .cls, first {unpaired[0]!r}")
        records.append(len(images))
        for key, (member, offset, size) in images.items():
            encoded = member.encode(errors="surrogateescape")
            letters += encoded
            for column, number in ((lengths, len(encoded)), (numbers, offset), (sizes, size)):
                column.append(number)
            values.extend(labels[key])
            counts.append(len(labels[key]))
    report_ignored(tars[0].parent, ignored)
    if not numbers:
        raise UserError(f"no images in {', '.join(map(str, tars))}: expected KEY.jpg|png|webp with KEY.cls")
    offset, size, length, value, count = (
        np.array(column, np.int64) for column in (numbers, sizes, lengths, values, counts)
    )
    places = Places.of_lists(
        [tar.name for tar in tars], records, offset, size, np.frombuffer(bytes(letters), np.uint8), length
    )
    return places, Labels(value, np.concatenate([[0], np.cumsum(count, dtype=np.int64)]))


def _look_through_one(
    path: Path, ignored: collections.Counter[str]
) -> tuple[dict[str, tuple[str, int, int]], dict[str, list[int]]]:
    """Key -> name, place and size of the image, and key -> labels. The tar is read once and never unpacked."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, dict[str, list[int]]] = {kind: {} for kind in _LABELS}
    try:
        with open_regular(path) as file, tarfile.open(fileobj=cast(IO[bytes], _Headers(file)), mode="r:") as tar:
            while member := tar.next():
                tar.members = []  # pyright: ignore[reportAttributeAccessIssue]  # or they would all be kept
                if not member.isfile():
                    continue
                folder, slash, base = member.name.rpartition("/")
                stem, _, kind = base.partition(".")
                key = folder + slash + stem
                if kind not in _LABELS and f".{kind.lower()}" not in IMAGE_SUFFIXES:
                    ignored[f".{kind}"] += 1
                    continue
                if key in (labels[kind] if kind in _LABELS else images):
                    raise UserError(f"{path} has more than one image or .cls of the key {key!r}: keys are unique")
                most = MAX_LABEL_BYTES if kind in _LABELS else MAX_IMAGE_BYTES
                if member.size > most:
                    raise UserError(f"{path}/{member.name} is said to have {member.size:,} bytes; at most {most:,}")
                if kind in _LABELS:
                    file.seek(member.offset_data)
                    labels[kind][key] = _LABELS[kind](file.read(member.size), f"{path}/{member.name}")
                else:
                    images[key] = (member.name, member.offset_data, member.size)
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                raise tarfile.ReadError("it ends without the closing block")
    except UserError:
        raise
    except (tarfile.TarError, ValueError, OverflowError) as error:  # the others for numbers that are none, or too large
        raise UserError(f"the shard {path} is damaged or cut off ({error}): fetch or write it again") from error
    return images, labels["cls"] | labels["labels.json"]


class _Headers:
    """A tar as `tarfile` sees it: it reads headers from it, which may promise to be of any length."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._file = file.seek, file.tell, file

    def read(self, size: int) -> bytes:
        if size > MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size:,} bytes; at most {MAX_HEADER_BYTES:,}")
        return self._file.read(size)


def _labels(text: bytes, path: str) -> list[int]:
    """The class numbers in `text`, each once."""
    words = text.replace(b",", b" ").split()
    if not words or not all(word.isdigit() and len(word) < 16 and int(word) < MAX_CLASSES for word in words):
        raise UserError(
            f"{path} must hold a class number (0, 1, 2, ...), or several: 3 17 42; not {text[:40]!r}; each is below "
            f"{MAX_CLASSES:,}"
        )
    return list(dict.fromkeys(map(int, words)))


def _labels_of_list(text: bytes, path: str) -> list[int]:
    try:
        numbers = parse_json(text, path)
    except UserError:
        numbers = None
    numbers = numbers if isinstance(numbers, list) else []
    if not numbers or not all(type(n) is int and 0 <= n < MAX_CLASSES for n in numbers):
        raise UserError(
            f"{path} must hold a list of class numbers, [3, 17, 42], not {text[:40]!r}; each is below {MAX_CLASSES:,}"
        )
    return list(dict.fromkeys(numbers))


_LABELS = {"cls": _labels, "labels.json": _labels_of_list}
"""The members that hold labels, and how each is read; a list counts before a `.cls`."""
