"""The `Dataset` type: N labeled images, in files or in memory; and subsets of it. An image is uint8 [H, W, 3], RGB."""

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int64

from vitlab.data.decode import Entry, ImageError, Levels
from vitlab.io import NPZ_ERRORS, reading_npz

MEMORY_SIDE, MEMORY_BYTES, MEMORY_FILES = 64, 2**30, 200_000
"""Small images of one size are decoded once: up to this side in pixels, so many bytes and so many files."""

BatchIndices = tuple[np.ndarray, np.ndarray]  # epochs and dataset indices of one batch, int64 [B] each


@dataclasses.dataclass(frozen=True, eq=False)
class Labels:
    """Any number of labels for each image: image i has `values[offsets[i] : offsets[i + 1]]`."""

    values: np.ndarray  # int64 [M]
    offsets: np.ndarray  # int64 [N + 1]

    @classmethod
    def of_lists(cls, lists: Sequence[Sequence[int]]) -> "Labels":
        values = np.fromiter((label for labels in lists for label in labels), np.int64)
        return cls(values, np.cumsum([0, *map(len, lists)], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> Int64[np.ndarray, " N"]:
        return np.diff(self.offsets)

    @property
    def first_labels(self) -> Int64[np.ndarray, " N"]:
        """The first label of each image, 0 where it has none."""
        first_labels = np.zeros(len(self), np.int64)
        labeled = self.counts > 0
        first_labels[labeled] = self.values[self.offsets[:-1][labeled]]
        return first_labels

    @property
    def is_multi_label(self) -> bool:
        """Whether any image has several labels, or none."""
        return bool((self.counts != 1).any())

    def of_image(self, index: int) -> np.ndarray:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def take(self, indices: np.ndarray) -> "Labels":
        """The labels of the images `indices`, in that order."""
        counts = self.counts[indices]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        shift = np.repeat(self.offsets[:-1][indices] - offsets[:-1], counts)
        return Labels(self.values[shift + np.arange(offsets[-1])], offsets)

    def renumber(self, new: np.ndarray) -> "Labels":
        """Every label c becomes `new[c]`; those that become -1 are dropped, and an image may be left without any."""
        values = new[self.values]
        remaining = np.concatenate([[0], np.cumsum(values >= 0)])
        return Labels(values[values >= 0], remaining[self.offsets])

    def join(self, other: "Labels") -> "Labels":
        """These, then `other`'s."""
        offsets = np.concatenate([self.offsets, self.offsets[-1] + other.offsets[1:]])
        return Labels(np.concatenate([self.values, other.values]), offsets)

    def multi_hot(self, indices: np.ndarray, classes: int) -> Bool[np.ndarray, "B K"]:
        """Which of `classes` labels each of the images `indices` has."""
        labels = self.take(indices)
        hot = np.zeros((len(indices), classes), bool)
        hot[np.repeat(np.arange(len(indices)), labels.counts), labels.values] = True
        return hot


class Entries(ABC):
    """N images whose locations are stored in arrays, so that a million images do not need a million objects."""

    rows: np.ndarray
    """int64 [N], which of the stored images they are."""
    is_local = True
    """Whether they are on this machine; `order` and `read_ahead` are for those that are not."""
    identity = ""
    """The SHA-256 of their index, or its start, if they are not on this machine."""

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: np.ndarray) -> "Entries":
        """The entries of the images `indices`, in that order."""
        part = copy.copy(self)
        part.rows = self.rows[indices]
        return part

    @abstractmethod
    def join(self, other: "Entries") -> "Entries":
        """These, then `other`'s, which must have the same type."""

    @abstractmethod
    def __getitem__(self, index: int) -> Entry:
        """The image `index`. Raises IndexError."""

    def __iter__(self) -> Iterator[Entry]:
        return map(self.__getitem__, range(len(self)))

    def order(self, seed: int, epoch: int) -> np.ndarray | None:
        """The order of an epoch, int64 [N], a function of its arguments alone; None for the loader's order."""
        return None

    def read_ahead(self, batches: Iterator[BatchIndices]) -> Iterator[BatchIndices]:
        """The same batches, each as soon as its images can be read."""
        return batches


@dataclasses.dataclass
class Dataset:
    """N labeled images, in files (`entries`) or in memory (`pixels`)."""

    name: str
    split: str
    classes: tuple[str, ...]
    labels: np.ndarray
    """int64 [N], indices into `classes`; the first of `label_sets` where there are several, 0 where there is none."""
    pixels: np.ndarray | None = None
    """uint8 [N, H, W, 3], or None if the set is not in memory."""
    entries: Sequence[Entry] | Entries = ()
    """The files of the images. A set in memory has their names alone, or no entries."""
    failures: dict[int, ImageError] = dataclasses.field(default_factory=dict)
    """The images of `pixels` that could not be read; `image` raises them."""
    label_sets: Labels | None = None
    """All labels of each image, if some images have several or none. A prediction is right if it is any of them."""
    labels_are_alternatives: bool = False
    """Whether any of an image's labels is right, as in ImageNet-ReaL and ObjectNet; else all are to be predicted."""
    left_out: int = 0
    """Images of the source that are not here because none of their labels is among the classes."""
    folder: str = ""
    """Where the files are: an image is named by its path below it."""
    full_size: int | None = None
    """Images of the complete split, if some are missing here."""
    levels: Levels | None = None
    """The values in the files that are black and white, as for `decode_image`."""
    groups: np.ndarray | None = None
    """A text for each image. Images with the same one (of a patient, of a video) stay together wherever a split is
    drawn."""
    from_val: np.ndarray | None = None
    """bool [N] for the split "trainval": which images are from the user's own val split."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def all_labels(self) -> Labels:
        """`label_sets`, or the one label of each image."""
        return self.label_sets or Labels(self.labels, np.arange(len(self) + 1))

    @property
    def multi_label(self) -> bool:
        """Whether all of several labels are to be predicted: by `loss="sigmoid"`, with mean average precision."""
        return self.label_sets is not None and not self.labels_are_alternatives

    @property
    def is_remote(self) -> bool:
        """Whether the images are read from an address."""
        return isinstance(self.entries, Entries) and not self.entries.is_local

    def path(self, index: int) -> str:
        """The name of image `index` in messages."""
        return self.entries[index].path if self.entries else f"{self.name}/{self.split}[{index}]"

    def image(self, index: int) -> np.ndarray:
        """uint8 [H, W, 3]. Raises `ImageError`."""
        if index in self.failures:
            raise self.failures[index]
        return self.entries[index].read(self.levels) if self.pixels is None else self.pixels[index]

    def take(self, indices: np.ndarray) -> "Dataset":
        """The images `indices`, in that order."""
        numbers = indices.tolist()
        if isinstance(self.entries, Entries):
            entries = self.entries.take(indices)
        else:
            entries = [self.entries[i] for i in numbers] if self.entries else ()
        failures = {new: self.failures[i] for new, i in enumerate(numbers) if i in self.failures}
        sets = None if self.label_sets is None else self.label_sets.take(indices)
        names = ("labels", "pixels", "groups", "from_val")
        arrays = {name: array[indices] for name in names if (array := getattr(self, name)) is not None}
        return dataclasses.replace(self, entries=entries, failures=failures, label_sets=sets, **arrays)

    def read_if_small(self, on_error: str) -> "Dataset":
        """The same set with `pixels`, if its images are small and of one size (`MEMORY_SIDE`); else the set as it is.

        With `on_error="raise"` the first unreadable image is raised; with "skip" it is left to the loader.
        """
        if self.pixels is not None or self.is_remote or len(self) > MEMORY_FILES:
            return self
        pixels, failures = None, {}
        for i in range(len(self)):
            try:
                image = self.image(i)
            except ImageError as error:
                if on_error == "raise":
                    raise
                failures[i] = error
                continue
            if pixels is None and max(image.shape) <= MEMORY_SIDE and image.nbytes * len(self) <= MEMORY_BYTES:
                pixels = np.zeros((len(self), *image.shape), np.uint8)
            if pixels is None or image.shape != pixels.shape[1:]:
                return self
            pixels[i] = image
        return self if pixels is None else dataclasses.replace(self, pixels=pixels, failures=failures)


def join(first: Dataset, second: Dataset) -> Dataset:
    """The images of `first`, then of `second`."""
    assert first.classes == second.classes
    assert not first.failures | second.failures, "sets are joined before their images are read"
    if isinstance(first.entries, Entries) and isinstance(second.entries, Entries):
        entries = first.entries.join(second.entries)
    else:
        entries = [*first.entries, *second.entries]
    has_sets = first.label_sets is not None or second.label_sets is not None
    sets = first.all_labels.join(second.all_labels) if has_sets else None
    arrays: dict[str, np.ndarray | None] = {}
    for name in ("labels", "pixels", "groups"):
        one, two = getattr(first, name), getattr(second, name)
        arrays[name] = None if one is None or two is None else np.concatenate([one, two])
    return dataclasses.replace(
        first, entries=entries, label_sets=sets, left_out=first.left_out + second.left_out, **arrays
    )


def with_image_names(dataset: Dataset, source: str = "", indices: np.ndarray | None = None) -> Dataset:
    """Names the images of a set in memory by `source` (default: set and split) and their `indices` there, so that an
    image has the same name in every subset."""
    if dataset.entries:
        return dataset
    source = source or f"{dataset.name}/{dataset.split}"
    numbers = range(len(dataset)) if indices is None else indices
    return dataclasses.replace(dataset, entries=[Entry(f"{source}[{i}]", size=0) for i in numbers])


SplitReader = tuple[list[str], Callable[[str], Dataset]]
"""A source that is split on disk: the splits that are there, and a function that reads one of them."""


def read_arrays(path: Path, *names: str) -> list[np.ndarray] | None:
    """The arrays `names` of an .npz; None if the file or one of them is missing or corrupt."""
    try:
        with reading_npz(path) as arrays:
            assert arrays.zip is not None  # it is open
            return None if arrays.zip.testzip() else [arrays[name] for name in names]
    except NPZ_ERRORS:
        return None
