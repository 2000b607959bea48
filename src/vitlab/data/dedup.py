"""Near-duplicates of test images in a training set, which would make a test easier than it seems (Sec. 4.1).

What is alike, `vitlab.data.similarity` says. A set is read in shards of `SHARD` images, whose thumbnails are kept on
disk: an interrupted search goes on, and memory holds one shard of the training set, whatever its size, and the
thumbnails of the test set.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, UInt8

from vitlab.data.cache import digest_images, read_arrays
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.similarity import SIDE, THRESHOLD, alike, candidates, distances, hashes, mirrored, thumbnail
from vitlab.io import write_arrays

FLAT = 2.0
"""Thumbnails whose gray values (0-255) deviate by less have nothing to compare, and are left out and counted."""
SHARD = 16_384
"""Images whose thumbnails are one file, and are in memory together."""

Report = Callable[[str, int, int], None]
"""Hears what is being done, how many images of it are done, and of how many."""


class Pair(NamedTuple):
    """Images `train` and `test` of their sets (places), `distance` apart, their hashes by `bits` of 64."""

    train: int
    test: int
    distance: float
    bits: int
    flipped: bool
    """Whether the one is the other mirrored."""


Look = tuple[bool, np.ndarray, np.ndarray]
"""Whether mirrored, thumbnails uint8 [M, S, S], and their hashes uint64 [2, M]."""


@dataclass(frozen=True, eq=False)
class Side:
    """What became of a set's images."""

    images: int
    flat: list[int] = field(default_factory=list)
    """Places of the images that show nothing to compare (`FLAT`)."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """Places of those that could not be read, and why."""


@dataclass(frozen=True, eq=False)
class Duplicates:
    """The pairs that are near each other, the nearest first, and what could not be compared."""

    pairs: list[Pair]
    train: Side
    test: Side


def find_duplicates(
    train: Dataset,
    test: Dataset,
    *,
    limit: float = THRESHOLD,
    cache: Path | None = None,
    workers: int = 0,
    report: Report = lambda *_: None,
) -> Duplicates:
    """All pairs of a image of `train` and one of `test` whose distance is at most `limit`.

    cache: folder for the thumbnails; the same call on the same images reads them from there. workers: threads that
    read images.
    """
    there, parts = Side(len(test)), []
    for start, thumbs in _shards(test, cache, "test", there, workers, report):
        parts.append((start + np.arange(len(thumbs)), thumbs))
    usable = [(places[keep], thumbs[keep]) for places, thumbs in parts for keep in [_usable(there, places)]]
    places, thumbs = (np.concatenate(each) for each in zip(*usable, strict=True))
    looks = both_ways(thumbs)
    best: dict[tuple[int, int], Pair] = {}
    here = Side(len(train))
    for start, shard in _shards(train, cache, "train", here, workers, report):
        keep = np.flatnonzero(_usable(here, start + np.arange(len(shard))))
        for pair in near(shard[keep], looks, limit):
            where = int(start + keep[pair.train]), int(places[pair.test])
            found = pair._replace(train=where[0], test=where[1])
            best[where] = min(best.get(where, found), found, key=lambda p: (p.distance, p.flipped))
        report("compared", min(start + SHARD, len(train)), len(train))
    return Duplicates(sorted(best.values(), key=lambda p: (p.distance, p.test, p.train)), here, there)


def both_ways(thumbs: UInt8[np.ndarray, "M S S"]) -> list[Look]:
    """Test thumbnails with their hashes, as they are and mirrored: what `near` compares with."""
    return [(flipped, x, hashes(x)) for flipped, x in ((False, thumbs), (True, mirrored(thumbs)))]


def near(shard: UInt8[np.ndarray, "N S S"], looks: list[Look], limit: float = THRESHOLD) -> Iterator[Pair]:
    """The pairs of a thumbnail of `shard` and one of `looks` that are at most `limit` apart, by their places there."""
    own = hashes(shard)
    for flipped, thumbs, theirs in looks:
        i, j, bits = candidates(own, theirs)
        left = alike(shard, thumbs, i, j)
        i, j, bits = i[left], j[left], bits[left]
        distance = distances(thumbs, shard, j, i)
        for n in np.flatnonzero(distance <= limit).tolist():
            yield Pair(int(i[n]), int(j[n]), round(float(distance[n]), 4), int(bits[n]), flipped)


def _usable(side: Side, places: np.ndarray) -> Bool[np.ndarray, " n"]:
    return ~np.isin(places, [*side.flat, *side.unreadable])


def _shards(
    dataset: Dataset, cache: Path | None, name: str, side: Side, workers: int, report: Report
) -> Iterator[tuple[int, UInt8[np.ndarray, "n S S"]]]:
    """First place and thumbnails of each shard, from the cache where they are there; `side` hears what is amiss."""
    stats: dict[str, bytes] = {}
    for start in range(0, len(dataset), SHARD):
        places = range(start, min(start + SHARD, len(dataset)))
        key = digest_images(f"thumbnails 2, {SIDE}", dataset, places, stats) if cache else ""
        file = cache and cache / f"{name}-{start // SHARD:05d}.npz"
        kept = read_arrays(file, "key", "thumbs", "unreadable") if file else None
        if kept and str(kept[0]) == key:
            thumbs, reasons = kept[1], json.loads(str(kept[2]))
        else:
            thumbs, reasons = _thumbnails(dataset, places, workers)
            if file:
                write_arrays(
                    file, {"key": np.array(key), "thumbs": thumbs, "unreadable": np.array(json.dumps(reasons))}
                )
        side.unreadable.update((start + int(i), reason) for i, reason in reasons.items())
        flat = thumbs.std(axis=(1, 2), dtype=np.float32) < FLAT
        side.flat.extend(start + i for i in np.flatnonzero(flat).tolist() if str(i) not in reasons)
        report(f"{name}: read", places.stop, len(dataset))
        yield start, thumbs


def _thumbnails(dataset: Dataset, places: range, workers: int) -> tuple[np.ndarray, dict[str, str]]:
    """Thumbnails of the images at `places`, and the reason why for each, counted from 0, that could not be read."""
    reasons: dict[str, str] = {}

    def read(place: int) -> np.ndarray:
        try:
            return thumbnail(dataset.image(place))
        except ImageError as error:
            reasons[str(place - places.start)] = error.reason
            return np.zeros((SIDE, SIDE), np.uint8)

    with ThreadPoolExecutor(max(1, workers)) as pool:  # Pillow decodes and scales outside of Python's lock
        return np.stack(list(pool.map(read, places))), reasons
