"""How splits are drawn: stratified by class, and in whole groups where images belong together.

`registry.py` calls `stratified_split` for a set that lacks a split, with its row's `held_out` of datasets.toml: of
`folder:PATH` 10 % each for val and test, by the seed of `load_dataset`.
"""

import dataclasses
import functools
import itertools
import logging
import re
from collections.abc import Iterator, Mapping

import numpy as np

from vitlab.data.dataset import Dataset, with_image_names
from vitlab.errors import UserError, first_ten, quoted
from vitlab.rng import Stream, philox

logger = logging.getLogger(__name__)


def _shuffled_ranks(labels: np.ndarray, seed: int, stream: Stream) -> tuple[np.ndarray, np.ndarray]:
    """The images ordered by class, shuffled within each by (seed, index), and their ranks in their class: int64 [n]."""
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
    split that is split again needs another `stream`. Images of the same of `groups` are in one split (`_split_groups`).
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

    In shuffled order, a group goes to the first split that it brings nearer to its fraction of each class (by the sum
    of squared differences, relative to the class's size), else to train. A class with more groups than there are
    `fractions` is in each split, if need be by its smallest group; train keeps a group of each class.
    """
    names, group_of = np.unique(groups, return_inverse=True)
    pairs, counts = np.unique(np.stack([group_of, labels]), axis=1, return_counts=True)
    bounds = np.searchsorted(pairs[0], np.arange(len(names) + 1))
    classes = [pairs[1, start:stop] for start, stop in itertools.pairwise(bounds)]  # of each group
    images = [counts[start:stop] for start, stop in itertools.pairwise(bounds)]  # of each of these classes
    class_sizes = np.bincount(labels)
    groups_in_train = np.bincount(pairs[1])  # of each class
    enough = groups_in_train > len(fractions)
    order = np.argsort(random.random_raw(len(names)), kind="stable")
    split_of = np.full(len(names), -1)  # train
    missing = {i: np.where(enough, fraction * class_sizes, 0.0) for i, fraction in enumerate(fractions.values())}

    def move(group: int, split: int) -> None:
        split_of[group] = split
        groups_in_train[classes[group]] -= 1
        missing[split][classes[group]] -= images[group]

    def movable(candidates: np.ndarray) -> Iterator[int]:
        yield from (g for g in candidates.tolist() if split_of[g] < 0 and (groups_in_train[classes[g]] > 1).all())

    for group in movable(order):
        k, n = classes[group], images[group]
        # By how much the squares decrease: m ** 2 - (m - n) ** 2 = n * (2 * m - n), where m images are missing.
        gains = ((n * (2 * m[k] - n) / class_sizes[k]).sum() for m in missing.values())
        if (split := next((i for i, gain in enumerate(gains) if gain > 0), None)) is not None:
            move(group, split)
    by_size = order[np.argsort(np.array([n.sum() for n in images])[order], kind="stable")]
    for split in missing:
        present = {c for g in np.flatnonzero(split_of == split).tolist() for c in classes[g].tolist()}
        for group in movable(by_size):
            if any(enough[c] and c not in present for c in classes[group].tolist()):
                move(group, split)
                present.update(classes[group].tolist())
    parts = {name: np.flatnonzero(split_of[group_of] == i) for i, name in enumerate(fractions)}
    return parts | {"train": np.flatnonzero(split_of[group_of] < 0)}


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
    """Logs groups of images that are in both splits; and in the user's own val and the rest of train."""
    pairs = {(train.split, test.split): (train.groups, test.groups)}
    if train.groups is not None and train.from_val is not None:
        pairs["train", "val"] = train.groups[~train.from_val], train.groups[train.from_val]
    for (first, second), (first_groups, second_groups) in pairs.items():
        if first_groups is None or second_groups is None:
            continue
        if common := sorted(set(first_groups) & set(second_groups)):
            warn_once(
                f"{quoted(train.name)}: {len(common):,} groups have images in {first} and in {second}, and accuracy "
                f"there is not the accuracy on new groups: {first_ten(common)}"
            )


@functools.cache
def warn_once(text: str) -> None:
    """A data set is loaded split by split; what holds for the whole set is logged once."""
    logger.warning(text)
