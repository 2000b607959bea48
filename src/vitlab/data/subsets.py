"""Parts of a data set: its splits, stratified where the source lacks them; nested parts (Sec. 4.3); some classes."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Int, Int64

from vitlab.data.dataset import Dataset, join
from vitlab.data.decode import Entry
from vitlab.errors import UserError, quoted
from vitlab.rng import Stream, philox

logger = logging.getLogger(__name__)

CUSTOM_HELD_OUT = {"val": 0.1, "test": 0.1}
"""Share of train that stands in for a split that such a set lacks."""


def shuffled_ranks(
    labels: Int[np.ndarray, " n"], seed: int, stream: Stream
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """The images ordered by class, shuffled within each by (seed, index), and their ranks in their class."""
    order = np.lexsort((philox(seed, stream).random_raw(len(labels)), labels))
    counts = np.bincount(labels)
    return order, np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)


def stratified_split(
    labels: np.ndarray, shares: Mapping[str, float], seed: int, stream: Stream = Stream.SPLIT
) -> dict[str, np.ndarray]:
    """Sorted indices of "train" and of every split in `shares`, which partition all indices.

    Each class gives each split its share, rounded, and at least one image if it has enough for all splits. A part that
    is split again needs another `stream`.
    """
    order, rank = shuffled_ranks(labels, seed, stream)
    size = np.bincount(labels)[labels[order]]
    parts: dict[str, np.ndarray] = {}
    start = np.zeros_like(size)
    for name, share in shares.items():
        stop = start + np.where(size > len(shares), np.maximum(np.rint(share * size), 1), 0).astype(np.int64)
        stop = np.minimum(stop, size - 1)  # train keeps one, however large the shares
        parts[name] = np.sort(order[(rank >= start) & (rank < stop)])
        start = stop
    return parts | {"train": np.sort(order[rank >= start])}


def choose_custom_split(
    name: str, present: Sequence[str], read: Callable[[str], Dataset], split: str, seed: int, whole_train: bool
) -> Dataset:
    """A split of the user's data set: val without test is the test; any other missing split is cut from train."""
    if whole_train and split == "train" and "val" not in present:
        split = "trainval"
    stored, held_out = split, CUSTOM_HELD_OUT
    if val_is_test(name, present, warn=split in ("test", "trainval")):
        stored, held_out = {"test": "val", "trainval": "train"}.get(split, split), {}
    elif split == "trainval" and "test" in present and "val" not in present:
        stored, held_out = "train", {}  # in its order
    return dataclasses.replace(choose_split(present, read, stored, held_out, seed), split=split)


def choose_split(
    present: Sequence[str],
    read: Callable[[str], Dataset],
    split: str,
    held_out: Mapping[str, float],
    seed: int,
) -> Dataset:
    """The requested split, cut from train if the source lacks it."""
    if split == "all":  # uncut, so a source without train has it too
        whole = functools.reduce(join, (_numbered(read(s)) for s in ("train", "val", "test") if s in present))
        return dataclasses.replace(whole, split=split)
    missing = {s: share for s, share in held_out.items() if s not in present}
    if split == "trainval" and "val" not in missing:
        train, val = (choose_split(present, read, s, held_out, seed) for s in ("train", "val"))
        return dataclasses.replace(join(train, val), split=split)
    if split in present and (split != "train" or not missing):
        return _numbered(read(split))
    train = _numbered(read("train"))
    parts = stratified_split(train.labels, missing, seed)
    chosen = np.concatenate([parts["train"], parts["val"]]) if split == "trainval" else parts[split]
    if ":" in train.name:  # the user's data set; the table has what is cut from the others
        absent, size = " and no ".join(sorted(missing)), f"{len(chosen)} of its {len(train)} images"
        warn_once(
            f"{quoted(train.name)} has no {absent} split: cut from train, stratified, seed {seed}; {split} has {size}"
        )
    return dataclasses.replace(train.take(chosen), split=split)


def _numbered(dataset: Dataset) -> Dataset:
    """A set without files, with names for its images that do not change in subsets."""
    if dataset.entries:
        return dataset
    names = [Entry(f"{dataset.name}/{dataset.split}[{i}]", size=0) for i in range(len(dataset))]
    return dataclasses.replace(dataset, entries=names)


@functools.cache
def warn_once(text: str) -> None:
    """A data set is loaded split by split; what holds for the whole set is logged once."""
    logger.warning(text)


def val_is_test(name: str, present: Sequence[str], warn: bool = True) -> bool:
    """Whether val stands in for the test split that the user's data set lacks, which is logged."""
    if "val" not in present or "test" in present:
        return False
    if warn:
        warn_once(f"{quoted(name)} has val and no test split: val is the test, and is not trained on")
    return True


def part_of(dataset: Dataset, share: float, seed: int) -> Dataset:
    """The given share of each class of a whole split, in its order, and at least one image of each class.

    A part is contained in every larger one of the same seed. Of several labels of an image the first counts.
    Deviation: the paper's parts of JFT are not stratified.
    """
    if not 0 < share <= 1:
        raise UserError(f"part is {share}; it is a share of each class of the split, in (0, 1], or None for all.")
    order, rank = shuffled_ranks(dataset.labels, seed, Stream.SUBSET)
    counts = np.maximum(np.rint(share * np.bincount(dataset.labels)), 1)
    return dataset.take(np.sort(order[rank < counts[dataset.labels[order]]]))


def keep_classes(dataset: Dataset, classes: tuple[int, ...]) -> Dataset:
    """The images of these classes, which are renumbered in the order given; an image stays if it has any of them."""
    count = len(dataset.classes)
    if not classes or len(set(classes)) < len(classes) or not all(0 <= c < count for c in classes):
        raise UserError(f"classes must be different numbers from 0 to {count - 1} of {dataset.name}, not {classes}")
    new = np.full(count, -1)
    new[list(classes)] = np.arange(len(classes))
    labels = dataset.all_labels.renumber(new)
    indices = np.flatnonzero(labels.counts)
    labels = labels.take(indices)
    return dataclasses.replace(
        dataset.take(indices),
        classes=tuple(dataset.classes[c] for c in classes),
        labels=labels.firsts.astype(np.int64),
        label_sets=None if dataset.label_sets is None else labels,
    )
