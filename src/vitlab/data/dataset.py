"""Labeled images, and where they lie: sets of them, and image folders.

A image is uint8 [H, W, 3], as `images.py` reads it.
"""

import collections
import dataclasses
import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from vitlab.data.decode import IMAGE_SUFFIXES, Entry, ImageError
from vitlab.data.vtab.gray import GrayEntry
from vitlab.errors import UserError, quoted

logger = logging.getLogger(__name__)

MEMORY_SIDE = 64  # pixels: sets of one size up to this side are decoded once, if they stay below ...
MEMORY_BYTES = 2**30  # ... this many bytes
MEMORY_FILES = 200_000  # and, from files, this many images: at every start they take 40 microseconds each or more
Request = tuple[np.ndarray, np.ndarray]  # epochs and dataset indices of one batch, int64 [B] each
MAX_CLASSES = 2**20  # that have no names: a larger label is a slip, and a list of them all would fill the memory
SPLIT_FOLDERS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Labels:
    """Several labels for each image: those of image i are `values[offsets[i] : offsets[i + 1]]`.

    values: int64 [M]; offsets: int64 [N + 1].
    """

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of_lists(cls, lists: Sequence[Sequence[int]]) -> "Labels":
        values = np.fromiter((label for labels in lists for label in labels), np.int64)
        return cls(values, np.cumsum([0, *map(len, lists)], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> np.ndarray:
        """How many labels each image has, int64 [N]."""
        return np.diff(self.offsets)

    @property
    def firsts(self) -> np.ndarray:
        """The first label of each image, int64 [N]; every image has one."""
        return self.values[self.offsets[:-1]]

    def of(self, index: int) -> np.ndarray:
        """The labels of one image."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def take(self, indices: np.ndarray) -> "Labels":
        """The labels of the images `indices`, in that order."""
        counts = self.counts[indices]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        shift = np.repeat(self.offsets[:-1][indices] - offsets[:-1], counts)
        return Labels(self.values[shift + np.arange(offsets[-1])], offsets)

    def renumber(self, new: np.ndarray) -> "Labels":
        """Every label c becomes `new[c]`; those that become -1 are dropped, so that a image may end without any."""
        values = new[self.values]
        kept = np.concatenate([[0], np.cumsum(values >= 0)])
        return Labels(values[values >= 0], kept[self.offsets])

    def join(self, other: "Labels") -> "Labels":
        offsets = np.concatenate([self.offsets, self.offsets[-1] + other.offsets[1:]])
        return Labels(np.concatenate([self.values, other.values]), offsets)

    def multi_hot(self, indices: np.ndarray, classes: int) -> np.ndarray:
        """Which of `classes` labels the images `indices` have, bool [B, K]."""
        taken = self.take(indices)
        hot = np.zeros((len(indices), classes), bool)
        hot[np.repeat(np.arange(len(indices)), taken.counts), taken.values] = True
        return hot


class Entries(Sequence[Entry]):
    """N images whose places lie in arrays, so that a million of them take no million objects.

    near: whether they lie on this machine; `order` and `read_ahead` are for those that do not.
    """

    near = True

    @abstractmethod
    def take(self, indices: np.ndarray) -> "Entries":
        """The images `indices`, in that order."""

    @abstractmethod
    def join(self, other: "Entries") -> "Entries":
        """These, then those of `other`, which are of the same kind."""

    @abstractmethod
    def entry(self, index: int) -> Entry:
        """The image `index`, which is from 0 to N - 1."""

    def order(self, seed: int, epoch: int) -> np.ndarray | None:
        """The order of an epoch, int64 [N], a function of nothing else; None where any is as good."""
        return None

    def read_ahead(self, requests: Iterator[Request]) -> Iterator[Request]:
        """The same requests, each when its images can be read."""
        return requests

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        places = range(len(self))[index]  # raises IndexError, and counts from the end
        return self.entry(places) if isinstance(places, int) else [self.entry(i) for i in places]


@dataclasses.dataclass
class Dataset:
    """N labeled images, in files (`entries`) or in memory (`pixels`).

    labels: int64 [N], indices into `classes`. pixels: uint8 [N, H, W, 3], or None when the set is not held in
    memory. failures: the images of `pixels` that could not be read; `image` raises them. label_sets: where
    images have several labels, all of them; `labels` is the first of each then, and an answer is right if it is
    any of them. left_out: images of the source that are not here as none of their labels is among the classes.
    folder: where the set's files lie, so that a image can be told by its path from there on. full_size: images of the
    whole split where some of them are not here.
    """

    name: str
    split: str
    classes: tuple[str, ...]
    labels: np.ndarray
    pixels: np.ndarray | None = None
    entries: Sequence[Entry] = ()
    failures: dict[int, ImageError] = dataclasses.field(default_factory=dict)
    label_sets: Labels | None = None
    left_out: int = 0
    folder: str = ""
    full_size: int | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        """What to call image `index` when talking to the user."""
        return self.entries[index].path if self.entries else f"{self.name}/{self.split}[{index}]"

    def image(self, index: int) -> np.ndarray:
        """uint8 [H, W, 3]. Raises `ImageError`."""
        if index in self.failures:
            raise self.failures[index]
        return self.entries[index].read() if self.pixels is None else self.pixels[index]

    def take(self, indices: np.ndarray) -> "Dataset":
        """The images `indices`, in that order."""
        if isinstance(self.entries, Entries):
            entries = self.entries.take(indices)
        else:
            entries = [self.entries[i] for i in indices.tolist()] if self.entries else ()
        return dataclasses.replace(
            self,
            labels=self.labels[indices],
            pixels=None if self.pixels is None else self.pixels[indices],
            entries=entries,
            failures={j: self.failures[i] for j, i in enumerate(indices.tolist()) if i in self.failures},
            label_sets=None if self.label_sets is None else self.label_sets.take(indices),
        )

    def in_memory(self, on_error: str) -> "Dataset":
        """The same set with `pixels`, if its images are small and of one size; else the set as it is.

        With `on_error="raise"` the first unreadable image is raised; with "skip" it is left to the loader.
        """
        if self.entries and isinstance(self.entries[0], GrayEntry):
            return self  # it is, in a third of the bytes or less
        far = isinstance(self.entries, Entries) and not self.entries.near
        if self.pixels is None and (far or len(self) > MEMORY_FILES):
            return self
        pixels, failures = None, {}
        for i in range(len(self) if self.pixels is None else 0):
            try:
                image = self.image(i)
            except ImageError as error:
                if on_error == "raise":
                    raise
                failures[i] = error
                continue
            if pixels is None:
                if max(image.shape) > MEMORY_SIDE or image.nbytes * len(self) > MEMORY_BYTES:
                    return self
                pixels = np.zeros((len(self), *image.shape), np.uint8)
            if image.shape != pixels.shape[1:]:
                return self
            pixels[i] = image
        return self if pixels is None else dataclasses.replace(self, pixels=pixels, failures=failures)


def join(first: Dataset, second: Dataset) -> Dataset:
    """The images of `first`, then those of `second`."""
    assert first.classes == second.classes
    assert not first.failures | second.failures, "sets are joined before their images are read"
    pixels = [p for p in (first.pixels, second.pixels) if p is not None]
    sets = [part.label_sets or Labels(part.labels, np.arange(len(part) + 1)) for part in (first, second)]
    several = first.label_sets is not None or second.label_sets is not None
    if isinstance(first.entries, Entries) and isinstance(second.entries, Entries):
        entries = first.entries.join(second.entries)
    else:
        entries = [*first.entries, *second.entries]
    return dataclasses.replace(
        first,
        labels=np.concatenate([first.labels, second.labels]),
        pixels=np.concatenate(pixels) if len(pixels) == 2 else None,
        entries=entries,
        label_sets=sets[0].join(sets[1]) if several else None,
        left_out=first.left_out + second.left_out,
    )


# A source that is split on disk: the splits that are there, and a function that reads one of them.
Splits = tuple[list[str], Callable[[str], Dataset]]


# ------------------------------------------------------------------------------------------- image folders


def folder_splits(path: Path, name: str) -> Splits:
    """`PATH/CLASS/**/image`, or the same below `train/`, `val/` and `test/`, or other names of `SPLIT_FOLDERS`.

    The classes are the sorted folder names (of `train/`, where there is one); all splits share them. One folder among
    others that is called like a split and holds images itself is a class.
    """
    require_folder(path, "class folders with images, or train/, val/ and test/ with class folders")
    found = _subfolders(path)
    called = {split: [path / n for n in found if n.lower() in names] for split, names in SPLIT_FOLDERS.items()}
    called = {split: folders for split, folders in called.items() if folders}
    splits = [folder for folders in called.values() for folder in folders]
    others = sorted(set(found).difference(folder.name for folder in splits))
    several = len(called) > 1 and any(_subfolders(folder) for folder in splits)
    if several or (splits and not others) or any(map(_holds_classes, splits)):
        for split, folders in called.items():
            if len(folders) > 1:
                names = " and ".join(quoted(str(folder)) for folder in folders)
                raise UserError(f"{names} are both the {split} split: put their images together, or rename one")
        if len(called) == 1 and any(images_below(path / other, collections.Counter()) for other in others):
            raise UserError(
                f"{splits[0]} holds folders, as a split with its classes does, and there are images in {others} "
                f"beside it. If all of them are classes, give {splits[0].name} another name; if not, move the others "
                f"away."
            )
        if others:
            logger.warning("%s: the folders %s are no splits and stay unread", quoted(str(path)), others)
        places = {split: folder for split, (folder,) in called.items()}
    else:
        places = {"train": path}  # plain class folders
    named = [places["train"]] if "train" in places else list(places.values())
    classes = tuple(sorted({folder for place in named for folder in _subfolders(place)}))
    if not classes:
        raise UserError(
            f"{quoted(str(named[0]))} has no class folders: expected {quoted(str(named[0]))}/CLASS/image.jpg"
        )

    # Of what is written with a model, much must be text: a byte of a name that is none is called \xe9.
    shown = tuple(name.encode(errors="surrogateescape").decode(errors="backslashreplace") for name in classes)

    def read(split: str) -> Dataset:
        if split not in places:
            raise UserError(
                f"the folder {path} has {sorted(place.name for place in places.values())} but no train: add "
                f"{path / 'train'}/CLASS/image.jpg, or ask for one of its splits ({', '.join([*places, 'all'])})"
            )
        return dataclasses.replace(read_class_folders(places[split], name, split, classes), classes=shown)

    return list(places), read


def read_class_folders(path: Path, name: str, split: str, classes: tuple[str, ...]) -> Dataset:
    there, shown = _subfolders(path), quoted(str(path))
    if strange := sorted(set(there) - set(classes)):
        raise UserError(f"{shown} has class folders that train lacks: {strange}; train's are {list(classes)}")
    if not there:
        lacking = "has no class folders" if any(path.iterdir()) else "is empty"
        raise UserError(f"{shown} {lacking}: add {shown}/CLASS/image.jpg, or remove it to cut {split} from train")
    entries: list[Entry] = []
    labels: list[int] = []
    ignored = collections.Counter("outside the class folders" for p in path.iterdir() if p.is_file())
    if missing := [folder for folder in classes if folder not in there]:
        named = ", ".join(map(repr, missing[:10])) + (", ..." if len(missing) > 10 else "")
        logger.warning("%s has no folder for %d of the %d classes: %s", shown, len(missing), len(classes), named)
    for label, folder in enumerate(classes):
        if folder not in there:
            continue
        images = images_below(path / folder, ignored)
        if not images:
            raise UserError(
                f"the class folder {quoted(str(path / folder))} holds no images: "
                f"add some ({', '.join(sorted(IMAGE_SUFFIXES))}) or remove the folder"
            )
        entries += map(Entry, images)
        labels += [label] * len(images)
    report_ignored(path, ignored)
    return Dataset(name, split, classes, np.array(labels, np.int64), entries=entries)


def images_below(folder: Path, ignored: collections.Counter[str]) -> list[str]:
    """All images in `folder` and below it, sorted by path; other files are counted by kind in `ignored`.

    Links are followed; hidden folders are not looked into. Raises ValueError where one cannot be listed.
    """
    files = []
    for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        folders[:] = [name for name in folders if name[0] != "." and not _leads_back(Path(parent, name), folder)]
        for file in (Path(parent, name) for name in names):
            if file.name.startswith("."):
                ignored["hidden"] += 1
            elif file.suffix.lower() in IMAGE_SUFFIXES:
                files.append(str(file))
            else:
                ignored[file.suffix.lower() or file.name] += 1
    return sorted(files)


def _leads_back(path: Path, top: Path) -> bool:
    """Whether `path`, below `top`, is a link to a folder that it lies in: following it would have no end."""
    if not path.is_symlink():
        return False
    target = path.resolve()
    return any(above.resolve().is_relative_to(target) for above in path.parents if above.is_relative_to(top))


def _raise(error: OSError) -> None:
    raise UserError(f"cannot list the folder {quoted(str(error.filename))}: {error.strerror}")


def report_ignored(path: Path, ignored: collections.Counter[str]) -> None:
    if ignored:
        kinds = ", ".join(f"{quoted(kind)} {count}" for kind, count in sorted(ignored.items()))
        logger.warning(
            "%s: %d files are no images to learn and left out (%s)", quoted(str(path)), ignored.total(), kinds
        )


def _subfolders(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _holds_classes(path: Path) -> bool:
    """Whether there are folders in it, and no images beside them."""
    visible = [p for p in path.iterdir() if not p.name.startswith(".")]
    return not any(p.suffix.lower() in IMAGE_SUFFIXES for p in visible) and any(p.is_dir() for p in visible)


def require_folder(path: Path, content: str) -> None:
    if not path.is_dir():
        state = "is a file" if path.exists() else "does not exist"
        raise UserError(f"the folder {quoted(str(path))} {state} (taken from {Path.cwd()}): give a folder of {content}")


def numbered_classes(top: int, where: str) -> tuple[str, ...]:
    """The classes of labels up to `top` that have no names: their numbers. Raises UserError for too many of them."""
    if top >= MAX_CLASSES:
        raise UserError(f"{where} has the label {top}; labels count classes from 0, and go up to {MAX_CLASSES - 1:,}")
    return tuple(str(i) for i in range(top + 1))
