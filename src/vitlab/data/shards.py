"""Data sets in WebDataset tars ("shards"), read in place by offset.

Metadata is a few NumPy arrays, not one object per image, so DataLoader workers share it (fork) or pickle it cheaply
(spawn).
"""

import collections
import copy
import functools
import os
import tarfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from vitlab.data.classes import MAX_CLASSES, numbered_classes
from vitlab.data.contents import report_ignored
from vitlab.data.dataset import Dataset, Entries, Labels, SplitReader
from vitlab.data.decode import IMAGE_SUFFIXES, Entry, ImageError
from vitlab.data.folder import SPLIT_FOLDERS
from vitlab.data.limits import MAX_IMAGE_BYTES
from vitlab.data.shard_index import CLASSES, INDEX, File, Locations, ShardIndex, class_names, read_index, read_locations
from vitlab.display import ProgressDisplay
from vitlab.errors import UserError
from vitlab.io import open_regular

OPEN_SHARDS = 256  # tars that a process keeps open, at most


class OpenFile:
    """A file descriptor, closed when its last reference is dropped, so that LRU eviction in one thread cannot close it
    during a read in another."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.fd)

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self.fd, size, offset)


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

    def __init__(self, folder: str, locations: Locations) -> None:
        self.folder, self.locations = folder, locations
        self.rows = np.arange(len(locations))

    def join(self, other: Entries) -> "ShardEntries":
        assert isinstance(other, ShardEntries)
        assert self.folder == other.folder
        both = copy.copy(self)
        both.rows = np.concatenate([self.rows, other.rows + len(self.locations)])
        both.locations = Locations.joined([self.locations, other.locations])
        return both

    def __getitem__(self, index: int) -> ShardEntry:
        row, locations = int(self.rows[index]), self.locations
        file = os.path.join(self.folder, locations.shards[int(locations.shard[row])])  # noqa: PTH118
        entry = ShardEntry(file, locations.member(row), int(locations.offset[row]), int(locations.size[row]))
        entry.read_at = self.read_at
        return entry

    def read_at(self, file: str, offset: int, size: int) -> bytes:
        """Bytes of the tar `file`, which stays open. Safe in several threads and after a fork."""
        return _opened(file).read(offset, size)


def shard_splits(path: Path, name: str) -> SplitReader:
    """WebDataset tars `train-*.tar`, `val-*.tar`, `test-*.tar` of `KEY.jpg|png|webp` and `KEY.cls` members.

    A `KEY.cls` holds the number of the image's class, or of several classes, with spaces or commas between them; or a
    `KEY.labels.json` does, as a list, which may be empty. Class names come from `classes.json` (a list, in label order)
    or are the numbers up to train's largest label. With an `index.json`, as `vitlab shard` writes it, the tars
    must be those it lists, and are not scanned.
    """
    tars = {
        split: files
        for split, names in SPLIT_FOLDERS.items()
        if (files := sorted(file for n in names for file in path.glob(f"{n}-*.tar")))
    }
    if not tars:
        others = sorted(tar.name for tar in path.glob("*.tar"))
        raise UserError(f"the folder {path} has no train-*.tar (its tars: {others}): name shards by split")
    index = read_index(path / INDEX) if (path / INDEX).exists() else None
    _opened.cache_clear()  # of files that were there before

    @functools.cache
    def read_split(split: str) -> tuple[ShardEntries, Labels]:
        locations, labels = _indexed(path, split, tars[split], index) if index else scan(tars[split])
        return ShardEntries(str(path), locations), labels

    return list(tars), lambda split: create_split(name, split, list(tars), class_names(path / CLASSES), read_split)


def create_split(
    name: str,
    split: str,
    splits: Sequence[str],
    classes: tuple[str, ...],
    read_split: Callable[[str], tuple[ShardEntries, Labels]],
) -> Dataset:
    """The Dataset of one of `splits`, which has several labels per image where train or the split has. Without
    `classes` the number of classes is train's largest label + 1."""
    entries, labels = read_split(split)
    if "train" not in splits and not classes:
        raise UserError(f"{name} has no train split, whose labels number the classes: write their names to {CLASSES}")
    train = read_split("train")[1] if "train" in splits else labels
    if not classes and not len(train.values):
        raise UserError(f"no image of {name}, train, has a label: write the labels, or the class names to {CLASSES}")
    classes = classes or numbered_classes(int(train.values.max()), f"{name}, train,")
    if (top := labels.values.max(initial=-1)) >= len(classes):
        index = int(np.searchsorted(labels.offsets, labels.values.argmax(), side="right")) - 1
        raise UserError(f"{entries[index].path} has the label {top}, but train's classes are 0 to {len(classes) - 1}")
    sets = labels if labels.is_multi_label or train.is_multi_label else None
    return Dataset(name, split, classes, labels.first_labels, entries=entries, label_sets=sets, folder=entries.folder)


def _indexed(path: Path, split: str, tars: Sequence[Path], index: ShardIndex) -> tuple[Locations, Labels]:
    """A split as `index.json` lists it. Raises UserError where the files are others; the bytes of tars are not read."""
    arrays, files = path / f"{split}.index.npz", index.shards.get(split, ())
    wrong = {file for file, _ in {(t.name, t.stat().st_size) for t in tars} ^ {(f.file, f.bytes) for f in files}}
    if not arrays.is_file() or File.of(arrays) not in index.metadata:
        wrong.add(arrays.name)
    if wrong:
        raise UserError(
            f"{path / INDEX} does not match the files ({', '.join(sorted(wrong)[:3])}): get or write the "
            f"data set again; or, if the tars are right, remove {INDEX}, and they are scanned"
        )
    return read_locations(arrays, [file.file for file in files])


def scan(tars: Sequence[Path]) -> tuple[Locations, Labels]:
    """The images of tars in one folder, and their labels. Raises UserError."""
    folder = tars[0].parent
    parts: list[Locations] = []
    label_lists: list[list[int]] = []
    ignored: collections.Counter[str] = collections.Counter()
    with ProgressDisplay(f"scanning {folder}", len(tars), "shards") as display:
        for done, tar in enumerate(tars, start=1):
            images, labels = _scan_tar(tar, ignored)
            if unpaired := sorted(images.keys() ^ labels.keys()):
                raise UserError(f"{tar}: {len(unpaired)} keys lack an image or a .cls, first {unpaired[0]!r}")
            parts.append(Locations.of_shard(tar.name, list(images.values())))
            label_lists += (labels[key] for key in images)
            display.update(done)
    report_ignored(folder, ignored)
    if not label_lists:
        raise UserError(f"no images in the tars in {folder}: expected KEY.jpg|png|webp with KEY.cls")
    return Locations.joined(parts), Labels.of_lists(label_lists)


def _scan_tar(
    path: Path, ignored: collections.Counter[str]
) -> tuple[dict[str, tuple[str, int, int]], dict[str, list[int]]]:
    """Key -> name, offset and size of the image, and key -> labels."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, dict[str, list[int]]] = {"cls": {}, "labels.json": {}}
    try:
        with open_regular(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in _files_in(tar):
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
                raise tarfile.ReadError("the end-of-archive block is missing")
    except UserError:
        raise
    except (tarfile.TarError, ValueError, OverflowError, MemoryError) as error:  # invalid numbers in headers
        raise UserError(f"the shard {path} is corrupt or truncated ({error}): get or write it again") from error
    return images, labels["cls"] | labels["labels.json"]


def _files_in(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while member := tar.next():
        tar.members = []  # pyright: ignore[reportAttributeAccessIssue]  # else all stay in memory
        if member.size < 0:  # the next header would be this one, for ever
            raise tarfile.ReadError(f"{member.name} has {member.size:,} bytes by its header")
        if member.isfile():
            yield member


def _parse_labels(text: bytes, path: str) -> list[int]:
    """The class numbers in a `.cls` or `.labels.json`, each once; `[]` is none."""
    words = text.strip().removeprefix(b"[").removesuffix(b"]").replace(b",", b" ").split()
    numbers = [int(word) if word.isdigit() and len(word) < 16 else -1 for word in words]
    if (not numbers and text.strip() != b"[]") or not all(0 <= number < MAX_CLASSES for number in numbers):
        raise UserError(
            f"{path} must hold a class number, or several (3 17 42), each below {MAX_CLASSES:,}; not {text[:40]!r}"
        )
    return list(dict.fromkeys(numbers))
