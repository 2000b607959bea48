"""Data sets in WebDataset tars ("shards"): scanned once, and read where they lie.

What is known of a million images is a few arrays; no object is made for an image before it is needed, and the
processes that read images share those arrays or copy them whole.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import logging
import os
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.data.dataset import MAX_CLASSES, Dataset, Entries, Labels, Splits, numbered_classes
from vitlab.data.decode import IMAGE_SUFFIXES, Entry, ImageError
from vitlab.data.downloads import cache_folder
from vitlab.data.folder import SPLIT_FOLDERS, report_ignored, require_folder
from vitlab.data.shard_index import (
    CLASSES,
    INDEX,
    MAX_IMAGE_BYTES,
    File,
    Places,
    ShardIndex,
    class_names,
    labels_of,
    read_index,
    read_places,
    write_places,
)
from vitlab.display import track
from vitlab.errors import UserError
from vitlab.io import open_regular, replacing_file

logger = logging.getLogger(__name__)

OPEN_SHARDS = 256
"""Largest number of tars that a process keeps open."""
CACHE_FROM = 20_000
"""Splits of at least this many images are scanned once, and the result is cached."""


class OpenFile:
    """An open file, closed when nobody refers to it: not while it is read, though another thread lets go of it."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self.number, size, offset)


_opened = functools.lru_cache(OPEN_SHARDS)(OpenFile)


class ShardEntry(Entry):
    """An image in a tar. `file` is the tar's name, and `read_at` reads from the tar of that name."""

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
        rows = np.concatenate([self.rows, other.rows + len(self.places)])
        return self.of(Places.joined([self.places, other.places]), rows)

    def entry(self, index: int) -> ShardEntry:
        row, places = int(self.rows[index]), self.places
        shard, offset, size = int(places.shard[row]), int(places.offset[row]), int(places.size[row])
        entry = ShardEntry(os.path.join(self.folder, places.shards[shard]), places.member(row), offset, size)  # noqa: PTH118
        entry.read_at = self.read_at
        return entry

    def read_at(self, file: str, offset: int, size: int) -> bytes:
        """Bytes of the tar `file`, which stays open; from several threads and, after a fork, processes alike."""
        return _opened(file).read(offset, size)


# ------------------------------------------------------------------------------------------------ data sets


def shard_splits(path: Path, name: str) -> Splits:
    """WebDataset tars `train-*.tar`, `val-*.tar`, `test-*.tar` of `KEY.jpg|png|webp` and `KEY.cls` members.

    A `KEY.cls` holds the number of the image's class, or of several classes, with spaces or commas between them; or a
    `KEY.labels.json` does, as a list. Class names come from `classes.json` (a list, in label order) or are the numbers
    up to train's largest label. Where there is an `index.json`, as `vitlab shard` writes it, the tars must be those it
    lists, and are not scanned.
    """
    require_folder(path, "shards named train-*.tar (and val-*.tar, test-*.tar)")
    tars = {
        split: files
        for split, names in SPLIT_FOLDERS.items()
        if (files := sorted(file for n in names for file in path.glob(f"{n}-*.tar")))
    }
    missing = f"the folder {path} has no train-*.tar (its tars: {sorted(tar.name for tar in path.glob('*.tar'))})"
    if not tars:
        raise UserError(f"{missing}: name shards by split")
    index = read_index(path / INDEX) if (path / INDEX).exists() else None
    _opened.cache_clear()  # of files that were there before

    @functools.cache
    def find(split: str) -> tuple[ShardEntries, Labels]:
        if split not in tars:
            raise UserError(f"{missing}: name shards by split")
        places, labels = _indexed(path, split, tars[split], index) if index else _scanned(path, split, tars[split])
        return ShardEntries(str(path), places), labels

    return list(tars), lambda split: labeled(name, split, class_names(path / CLASSES), find)


def labeled(
    name: str, split: str, classes: tuple[str, ...], find: Callable[[str], tuple[ShardEntries, Labels]]
) -> Dataset:
    """A split of shards whose labels are among `classes`; without names, among as many as train has."""
    entries, labels = find(split)
    if not classes:
        train = labels if split == "train" else find("train")[1]
        classes = numbered_classes(int(train.values.max()), f"{name}, train,")
    if (top := labels.values.max()) >= len(classes):
        path = entries[int(np.searchsorted(labels.offsets, labels.values.argmax(), side="right")) - 1].path
        raise UserError(f"{path} has the label {top}, but train's classes are 0 to {len(classes) - 1}")
    label_sets = labels if labels.counts.max() > 1 else None
    return Dataset(name, split, classes, labels.firsts, entries=entries, label_sets=label_sets, folder=entries.folder)


def _indexed(path: Path, split: str, tars: Sequence[Path], index: ShardIndex) -> tuple[Places, Labels]:
    """A split as `index.json` lists it. Raises UserError where the files are others."""
    actual = {tar.name: tar.stat().st_size for tar in tars}
    listed = {file.file: file.bytes for file in index.shards.get(split, ())}
    wrong = sorted({file for file, _ in actual.items() ^ listed.items()})
    stored = read_places(path / f"{split}.index.npz")
    if wrong or stored is None or stored[0].shards != tuple(listed):
        raise UserError(
            f"{path / INDEX} does not match the files beside it ({', '.join(wrong[:3]) or f'{split}.index.npz'}): get "
            f"or write the data set again; or, if the tars are right, remove {INDEX}, and they are scanned"
        )
    return stored


def _scanned(path: Path, split: str, tars: Sequence[Path]) -> tuple[Places, Labels]:
    """A split without `index.json`: the cached result of a scan, if the tars are the same, or of a scan now."""
    stats = [(tar.name, tar.stat().st_size, tar.stat().st_mtime_ns) for tar in tars]
    key = hashlib.sha256(f"{path.absolute()}\0{split}\0{stats}".encode(errors="surrogateescape")).hexdigest()
    cached = cache_folder() / "shard-indexes" / f"{key[:32]}.npz"
    if stored := read_places(cached):
        return stored
    places, labels = scan(track(tars, len(tars), f"scanning {path}", "shards"))
    if len(places) >= CACHE_FROM:
        try:
            write_places(cached, places, labels)
        except OSError as error:
            logger.warning("%s: cannot cache the scan of %s shards (%s)", cached, len(tars), error.strerror)
    return places, labels


# -------------------------------------------------------------------------------------------------- scanning


def scan(tars: Iterable[Path]) -> tuple[Places, Labels]:
    """The images of some tars, and their labels. Raises UserError."""
    parts: list[Places] = []
    values, counts = [], []
    ignored: collections.Counter[str] = collections.Counter()
    folder = Path()
    for tar in tars:
        folder = tar.parent
        images, labels = _scan_tar(tar, ignored)
        if unpaired := sorted(images.keys() ^ labels.keys()):
            raise UserError(f"{tar}: {len(unpaired)} keys lack an image or a .cls, first {unpaired[0]!r}")
        parts.append(Places.of_shard(tar.name, list(images.values())))
        values.append(np.array([label for key in images for label in labels[key]], np.int64))
        counts.append(np.array([len(labels[key]) for key in images], np.int64))
    report_ignored(folder, ignored)
    if not any(map(len, parts)):
        raise UserError(f"no images in the tars in {folder}: expected KEY.jpg|png|webp with KEY.cls")
    return Places.joined(parts), labels_of(np.concatenate(values), np.concatenate(counts))


def _scan_tar(
    path: Path, ignored: collections.Counter[str]
) -> tuple[dict[str, tuple[str, int, int]], dict[str, list[int]]]:
    """Key -> name, offset and size of the image, and key -> labels. The tar is read once and never unpacked."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, dict[str, list[int]]] = {"cls": {}, "labels.json": {}}
    try:
        with open_regular(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            while member := tar.next():
                tar.members = []  # pyright: ignore[reportAttributeAccessIssue]  # or they would all stay in memory
                if not member.isfile():
                    continue
                folder, slash, base = member.name.rpartition("/")
                stem, _, kind = base.partition(".")
                key = folder + slash + stem
                if kind not in labels and f".{kind.lower()}" not in IMAGE_SUFFIXES:
                    ignored[f".{kind}"] += 1
                    continue
                if key in labels.get(kind, images):
                    raise UserError(f"{path} has more than one image or .cls of the key {key!r}: keys are unique")
                if member.size > MAX_IMAGE_BYTES:
                    raise UserError(
                        f"{path}/{member.name} has {member.size:,} bytes by its header; at most {MAX_IMAGE_BYTES:,}"
                    )
                if kind in labels:
                    file.seek(member.offset_data)
                    labels[kind][key] = _parse_labels(file.read(member.size), f"{path}/{member.name}")
                else:
                    images[key] = (member.name, member.offset_data, member.size)
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                raise tarfile.ReadError("it ends without the closing block")
    except UserError:
        raise
    except (tarfile.TarError, ValueError, OverflowError, MemoryError) as error:  # invalid numbers in headers
        raise UserError(f"the shard {path} is corrupt or cut off ({error}): get or write it again") from error
    return images, labels["cls"] | labels["labels.json"]


def _parse_labels(text: bytes, path: str) -> list[int]:
    """The class numbers in a `.cls` or `.labels.json`, each once."""
    words = text.strip().removeprefix(b"[").removesuffix(b"]").replace(b",", b" ").split()
    numbers = [int(word) if word.isdigit() and len(word) < 16 else -1 for word in words]
    if not numbers or not all(0 <= number < MAX_CLASSES for number in numbers):
        raise UserError(
            f"{path} must hold a class number, or several (3 17 42), each below {MAX_CLASSES:,}; not {text[:40]!r}"
        )
    return list(dict.fromkeys(numbers))


def write_index(
    folder: Path,
    tars: Mapping[str, Iterable[Path]],
    classes: Sequence[str] | None,
    images: Mapping[str, int] | None = None,
    settings: dict[str, Any] | None = None,
) -> ShardIndex:
    """Scans the tars of each split, and writes `SPLIT.index.npz`, `classes.json` and, last, `index.json` to `folder`.

    classes: the names, if there are any. images: how many each split has, with those that could not be read.
    """
    shards, left_out = {}, {}
    for split, paths in tars.items():
        files: list[File] = []
        places, labels = scan(_listed(paths, files))
        shards[split] = tuple(
            dataclasses.replace(file, records=count) for file, count in zip(files, places.records.tolist(), strict=True)
        )
        write_places(folder / f"{split}.index.npz", places, labels)
        if images:
            left_out[split] = images[split] - len(places)
    if classes is not None:
        with replacing_file(folder / CLASSES) as file:
            file.write(json.dumps(list(classes), ensure_ascii=False).encode())
    names = [*(f"{split}.index.npz" for split in tars), *([CLASSES] if classes is not None else [])]
    index = ShardIndex(shards, tuple(File.of(folder / name) for name in names), left_out, settings or {})
    index.write(folder / INDEX)
    return index


def _listed(paths: Iterable[Path], files: list[File]) -> Iterable[Path]:
    """The same paths; `files` collects what each is."""
    for path in paths:
        files.append(File.of(path))
        yield path
