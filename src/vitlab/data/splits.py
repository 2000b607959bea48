"""How splits are drawn: stratified by class, and in whole groups where images belong together.

`registry.py` calls `stratified_split` for a set that lacks a split, with its row's `held_out` of datasets.toml: of
`folder:PATH` 10% each for val and test, by the seed of `load_dataset`. Fine-tuning and probes hold out images by it.
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence

import numpy as np

from vitlab.data.dataset import Dataset, with_image_names
from vitlab.errors import UserError, first_ten, quoted, warn_once
from vitlab.rng import Stream, philox

_TRAIN = -1  # the number of train among the splits of a `_GroupAssignment`; the others count from 0


def _shuffled_ranks(labels: np.ndarray, seed: int, stream: Stream) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays, int64 [n]: the indices of the images, ordered by class and shuffled within each by (seed, index); and
    the rank of each of them in its class."""
    order = np.lexsort((philox(seed, stream).random_raw(len(labels)), labels))
    counts = np.bincount(labels)
    return order, np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)


def stratified_split(
    labels: np.ndarray,
    fractions: Mapping[str, float],
    seed: int,
    stream: Stream = Stream.SPLIT,
    groups: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Sorted indices of "train" and of every split in `fractions`, which partition all indices.

    Each split gets its fraction of each class, rounded, and at least one image if there are enough for all splits. A
    split that is split again needs another `stream`. `groups`: the group of each image; each stays in one split.
    """
    if groups is not None:
        return _split_groups(labels, fractions, philox(seed, stream), groups)
    order, rank = _shuffled_ranks(labels, seed, stream)
    size = np.bincount(labels)[labels[order]]
    parts: dict[str, np.ndarray] = {}
    start = np.zeros_like(size)
    for name, fraction in fractions.items():
        stop = start + np.where(size > len(fractions), np.maximum(np.rint(fraction * size), 1), 0).astype(np.int64)
        stop = np.minimum(stop, size - 1)  # train keeps one, however large the fractions
        parts[name] = np.sort(order[(rank >= start) & (rank < stop)])
        start = stop
    return parts | {"train": np.sort(order[rank >= start])}


def _split_groups(
    labels: np.ndarray, fractions: Mapping[str, float], random: np.random.Philox, groups: np.ndarray
) -> dict[str, np.ndarray]:
    """`stratified_split` of whole groups, which may have images of several classes.

    1. In shuffled order, a group goes to the first split that it brings nearer to its fraction of each class, if any.
    2. A class with more groups than there are `fractions` is put into each split that lacks it, by its smallest group.

    Train keeps a group of each class.
    """
    group_of_image = np.unique(groups, return_inverse=True)[1]
    assignment = _GroupAssignment(labels, group_of_image, list(fractions.values()))
    shuffled = np.argsort(random.random_raw(len(assignment.split_of)), kind="stable").tolist()
    for group in filter(assignment.can_leave_train, shuffled):
        gaining = (split for split in range(len(fractions)) if assignment.gain(group, split) > 0)
        if (split := next(gaining, None)) is not None:
            assignment.move(group, split)
    by_size = sorted(shuffled, key=lambda group: assignment.counts[group].sum())
    for split in range(len(fractions)):
        for group in filter(assignment.can_leave_train, by_size):
            if assignment.adds_a_lacking_class(group, split):
                assignment.move(group, split)
    split_of_image = assignment.split_of[group_of_image]
    parts = {name: np.flatnonzero(split_of_image == split) for split, name in enumerate(fractions)}
    return parts | {"train": np.flatnonzero(split_of_image == _TRAIN)}


class _GroupAssignment:
    """The split of each group: at first _TRAIN, later the index of one of `fractions`."""

    def __init__(self, labels: np.ndarray, group_of_image: np.ndarray, fractions: Sequence[float]) -> None:
        pairs, counts = np.unique(np.stack([group_of_image, labels]), axis=1, return_counts=True)
        num_groups = len(np.unique(group_of_image))
        bounds = list(itertools.pairwise(np.searchsorted(pairs[0], np.arange(num_groups + 1))))
        self.split_of = np.full(num_groups, _TRAIN)
        self.classes = [pairs[1, start:stop] for start, stop in bounds]  # the classes of each group
        self.counts = [counts[start:stop] for start, stop in bounds]  # each group's images of each of its classes
        self.class_sizes = np.bincount(labels)
        self.groups_in_train = np.bincount(pairs[1])  # of each class, as the arrays below
        self.has_enough_groups = self.groups_in_train > len(fractions)
        self.missing = [np.where(self.has_enough_groups, f * self.class_sizes, 0.0) for f in fractions]
        """Images of each class that each split lacks; negative if it has more than its fraction."""
        self.is_present = np.zeros((len(fractions), len(self.class_sizes)), bool)  # the classes in each split

    def can_leave_train(self, group: int) -> bool:
        """Whether the group is in train, and is not the last one there of any of its classes."""
        return bool(self.split_of[group] == _TRAIN and (self.groups_in_train[self.classes[group]] > 1).all())

    def gain(self, group: int, split: int) -> float:
        """How much the move would decrease the squared differences between the split and its fraction of each class,
        each relative to the class's size."""
        classes, n = self.classes[group], self.counts[group]
        m = self.missing[split][classes]  # n more images change the square by m ** 2 - (m - n) ** 2 = n * (2 * m - n)
        return (n * (2 * m - n) / self.class_sizes[classes]).sum()

    def adds_a_lacking_class(self, group: int, split: int) -> bool:
        """Whether the group has a class that the split lacks, though there are groups enough for all splits."""
        return bool((self.has_enough_groups & ~self.is_present[split])[self.classes[group]].any())

    def move(self, group: int, split: int) -> None:
        """Moves the group from train to `split`."""
        classes = self.classes[group]
        self.split_of[group] = split
        self.groups_in_train[classes] -= 1
        self.missing[split][classes] -= self.counts[group]
        self.is_present[split, classes] = True


def stratified_subset(dataset: Dataset, fraction: float, seed: int) -> Dataset:
    """A fraction of each class of a whole split, in its order, and at least one image of each class (Sec. 4.3).

    A subset is contained in every larger one of the same seed. An image with several labels counts by its first.
    "trainval" gives a fraction of train and of the user's val. Groups are not kept whole: no test is drawn from them.
    Deviation: the paper's subsets of JFT are not stratified.
    """
    if not 0 < fraction <= 1:
        raise UserError(f"subset_fraction is {fraction}; give a fraction of each class in (0, 1], or None for all.")
    strata = dataset.labels if dataset.from_val is None else 2 * dataset.labels + dataset.from_val  # class and source
    order, rank = _shuffled_ranks(strata, seed, Stream.SUBSET)
    counts = np.maximum(np.rint(fraction * np.bincount(strata)), 1)
    return dataset.take(np.sort(order[rank < counts[strata[order]]]))


def group_by(dataset: Dataset, pattern: str) -> Dataset:
    """The data set with the `groups` that a regular expression finds in the paths of its images.

    The group is the text of the first capture group, or the whole match if there is none or it is empty. Paths are
    relative to the data set's folder. Raises UserError if the expression is not found in all of them.
    """
    dataset = with_image_names(dataset)
    prefix = f"{dataset.folder}/" if dataset.folder else ""
    paths = [dataset.path(i).removeprefix(prefix) for i in range(len(dataset))]
    matches = [re.search(pattern, path) for path in paths]
    if unmatched := [path for path, match in zip(paths, matches, strict=True) if match is None]:
        whole = f"(?:{pattern})" if re.compile(pattern).groups else f"({pattern})"
        with_others = f"^(?:.*?{whole}|.*)"
        raise UserError(
            f"group_by={pattern!r} is not found in {len(unmatched):,} of the {len(dataset):,} paths of "
            f"{quoted(dataset.name)} ({dataset.split}): {first_ten(unmatched)}; give an expression that is in all of "
            f"them ({with_others!r} makes each of the others a group of its own)"
        )
    groups = [(match.re.groups and match[1]) or match[0] for match in matches if match]
    return dataclasses.replace(dataset, groups=np.array(groups, dtype=object))


def warn_of_shared_groups(train: Dataset, test: Dataset) -> None:
    """Logs groups that have images in both splits, and those in both the user's own val and the rest of train."""
    _warn_of_common_groups(train.name, (train.split, test.split), train.groups, test.groups)
    if train.groups is not None and train.from_val is not None:
        from_train, from_val = train.groups[~train.from_val], train.groups[train.from_val]
        _warn_of_common_groups(train.name, ("train", "val"), from_train, from_val)


def _warn_of_common_groups(
    name: str, splits: tuple[str, str], first: np.ndarray | None, second: np.ndarray | None
) -> None:
    """Logs the groups that two splits share; `first` and `second` have the group of each of their images."""
    if first is not None and second is not None and (common := sorted(set(first) & set(second))):
        warn_once(
            f"{quoted(name)}: {len(common):,} groups have images in {splits[0]} and in {splits[1]}, and accuracy there "
            f"is not the accuracy on new groups: {first_ten(common)}"
        )
