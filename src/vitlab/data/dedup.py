"""Near-duplicates of test images in a training set, which make a test easier than it seems (Sec. 4.1).

`similarity.py` compares two images. A set is read in shards of `SHARD` images, whose thumbnails are cached: an
interrupted search continues, and memory holds one shard of the training set and the thumbnails of the test set.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt8

from vitlab.data.dataset import Dataset, digest_images, read_arrays
from vitlab.data.decode import ImageError
from vitlab.data.similarity import SIDE, THRESHOLD, alike, candidates, distances, hashes, thumbnail
from vitlab.io import write_arrays

FLAT = 2.0
"""Thumbnails whose gray values (0-255) have a smaller deviation show nothing to compare: left out and counted."""
SHARD = 16_384
"""Images whose thumbnails are in one file, and in memory together."""

Report = Callable[[str, int, int], None]
"""Receives the stage of the search, how many images of it are done, and of how many."""
View = tuple[bool, np.ndarray, np.ndarray]
"""Whether mirrored, thumbnails uint8 [M, S, S], and their hashes uint64 [2, M]."""


class Pair(NamedTuple):
    """Images `train` and `test` (indices in their sets), `distance` apart, their hashes by `bits` of 64.

    flipped: whether one is the other mirrored.
    """

    train: int
    test: int
    distance: float
    bits: int
    flipped: bool


@dataclass(frozen=True, eq=False)
class Omitted:
    """Indices of images with nothing to compare (`flat`), and of those that could not be read, with the reason."""

    flat: list[int] = field(default_factory=list)
    unreadable: dict[int, str] = field(default_factory=dict)


class Duplicates(NamedTuple):
    """The pairs, the nearest first, and the images of either set that could not be compared."""

    pairs: list[Pair]
    train: Omitted
    test: Omitted


def find_duplicates(
    train: Dataset,
    test: Dataset,
    *,
    limit: float = THRESHOLD,
    cache: Path | None = None,
    workers: int = 0,
    report: Report = lambda *_: None,
) -> Duplicates:
    """All pairs of an image of `train` and one of `test` whose distance is at most `limit`.

    cache: folder for the thumbnails, from which the same call on the same images reads them. workers: threads that
    read images.
    """
    train_omitted, test_omitted = Omitted(), Omitted()
    parts = list(_shards(test, cache, "test", test_omitted, workers, report))
    test_indices, thumbs = map(np.concatenate, zip(*parts, strict=True))
    views = both_ways(thumbs)
    best: dict[tuple[int, int], Pair] = {}
    for indices, shard in _shards(train, cache, "train", train_omitted, workers, report):
        for near_pair in near(shard, views, limit):
            key = int(indices[near_pair.train]), int(test_indices[near_pair.test])
            pair = near_pair._replace(train=key[0], test=key[1])
            best[key] = min(best.get(key, pair), pair, key=lambda p: (p.distance, p.flipped))
    report("compared", len(train), len(train))
    return Duplicates(sorted(best.values(), key=lambda p: (p.distance, p.test, p.train)), train_omitted, test_omitted)


def both_ways(thumbs: UInt8[np.ndarray, "M S S"]) -> list[View]:
    """Test thumbnails with their hashes, as they are and mirrored: what `near` compares with."""
    mirrored = np.ascontiguousarray(thumbs[:, :, ::-1])
    return [(False, thumbs, hashes(thumbs)), (True, mirrored, hashes(mirrored))]


def near(shard: UInt8[np.ndarray, "N S S"], views: list[View], limit: float = THRESHOLD) -> Iterator[Pair]:
    """The pairs of a thumbnail of `shard` and one of `views` that are at most `limit` apart, by their indices there."""
    shard_hashes = hashes(shard)
    for flipped, thumbs, test_hashes in views:
        i, j, bits = candidates(shard_hashes, test_hashes)
        similar = alike(shard, thumbs, i, j)
        i, j, bits = i[similar], j[similar], bits[similar]
        distance = distances(thumbs, shard, j, i)
        for n in np.flatnonzero(distance <= limit).tolist():
            yield Pair(int(i[n]), int(j[n]), round(float(distance[n]), 4), int(bits[n]), flipped)


def _shards(
    dataset: Dataset, cache: Path | None, name: str, omitted: Omitted, workers: int, report: Report
) -> Iterator[tuple[Int64[np.ndarray, " n"], UInt8[np.ndarray, "n S S"]]]:
    """Indices and thumbnails of each shard, from the cache if possible; `omitted` collects the others."""
    stats: dict[str, bytes] = {}
    for start in range(0, len(dataset), SHARD):
        indices = range(start, min(start + SHARD, len(dataset)))
        key = digest_images(f"thumbnails 2, {SIDE}", dataset, indices, stats) if cache else ""
        file = cache and cache / f"{name}-{start // SHARD:05d}.npz"
        cached = read_arrays(file, "key", "thumbs", "unreadable") if file else None
        if cached and str(cached[0]) == key:
            thumbs, reasons = cached[1], json.loads(str(cached[2]))
        else:
            thumbs, reasons = _read_thumbnails(dataset, indices, workers)
            if file:
                unreadable = np.array(json.dumps(reasons))
                write_arrays(file, {"key": np.array(key), "thumbs": thumbs, "unreadable": unreadable})
        flat = thumbs.std(axis=(1, 2), dtype=np.float32) < FLAT  # also those of unreadable images
        omitted.unreadable.update((start + int(i), reason) for i, reason in reasons.items())
        omitted.flat.extend(start + i for i in np.flatnonzero(flat).tolist() if str(i) not in reasons)
        report(f"read {name}", indices.stop, len(dataset))
        yield start + np.flatnonzero(~flat), thumbs[~flat]


def _read_thumbnails(dataset: Dataset, indices: range, workers: int) -> tuple[np.ndarray, dict[str, str]]:
    """Thumbnails of the images `indices`, and for each, counted from 0, that could not be read, the reason."""
    reasons: dict[str, str] = {}

    def read(index: int) -> np.ndarray:
        try:
            return thumbnail(dataset.image(index))
        except ImageError as error:
            reasons[str(index - indices.start)] = error.reason
            return np.zeros((SIDE, SIDE), np.uint8)

    with ThreadPoolExecutor(max(1, workers)) as pool:  # Pillow decodes and scales outside of Python's lock
        return np.stack(list(pool.map(read, indices))), reasons
