"""Nested parts of a split: how much data a model learns from (Sec. 4.3, Fig. 4)."""

import numpy as np
from jaxtyping import Int

from vitlab.data.dataset import Dataset
from vitlab.errors import UserError
from vitlab.rng import Stream, philox


def part_of(dataset: Dataset, share: float, seed: int) -> Dataset:
    """The given share of each class of a whole split, in its order, and at least one image of each.

    A part lies in every larger one of the same seed. Of several labels a image's first counts. Raises ValueError for
    a share outside (0, 1].

    Deviation: the paper's parts of JFT are plain random ones. Shares of each class keep small parts as balanced as
    the whole, and no class is missing from any.
    """
    if not 0 < share <= 1:
        raise UserError(f"part is {share}; it is a share of each class of the split, in (0, 1], or None for all.")
    return dataset.take(np.flatnonzero(ranks(dataset.labels, seed) < sizes(dataset.labels, share)))


def ranks(labels: Int[np.ndarray, " n"], seed: int) -> Int[np.ndarray, " n"]:
    """Each image's place in its class, shuffled by `seed`: 0 is in every part.

    A image's draw depends on the seed and its place in the split alone: the same in every version of NumPy.
    """
    draws = philox(seed, Stream.SUBSET).random_raw(len(labels))
    order = np.lexsort((draws, labels))  # class by class, shuffled within each
    counts = np.bincount(labels)
    found = np.empty(len(labels), np.int64)
    found[order] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    return found


def sizes(labels: Int[np.ndarray, " n"], share: float) -> Int[np.ndarray, " n"]:
    """For each image, how many of its class a part of this share has: more with a larger share, never fewer."""
    counts = np.maximum(np.rint(share * np.bincount(labels)), 1).astype(np.int64)
    return counts[labels]
