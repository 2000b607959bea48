"""Near-duplicates: the changes that hash and distance tolerate, and the whole search, on planted and real copies."""

from pathlib import Path

import numpy as np
import pytest
from copies import CHANGES, photograph, thumbs_of

from vitlab.data import dedup
from vitlab.data.dataset import Dataset
from vitlab.data.dedup import MAX_THRESHOLD, RADIUS, THRESHOLD, candidates, compare, find_duplicates, mirrored_views
from vitlab.data.shards import shard_splits
from vitlab.errors import UserError

IMAGES = [photograph(i) for i in range(16)]


def memory(images: list[np.ndarray]) -> Dataset:
    return Dataset("memory", "train", ("all",), np.zeros(len(images), np.int64), pixels=np.stack(images))


def test_candidates_are_all_pairs_within_the_radius() -> None:
    """Against a plain double loop, over block edges, with exact and close hits planted."""
    random = np.random.default_rng(0)
    train = random.integers(0, 2**64, (2, 8200), np.uint64, endpoint=False)
    test = random.integers(0, 2**64, (2, 19), np.uint64, endpoint=False)
    train[0, 8199], train[1, 0], train[0, 5] = test[0, 18], test[0, 3] ^ 0b1011, test[1, 4]
    train[1, 77] = test[1, 9]  # two centers: not compared
    pairs = {(int(a), int(b)): int(c) for a, b, c in zip(*candidates(train, test), strict=True)}
    expected = {}
    for b in range(19):
        least = np.min([np.bitwise_count(train[y] ^ test[x, b]) for x, y in ((0, 0), (0, 1), (1, 0))], axis=0)
        expected |= {(int(a), b): int(least[a]) for a in np.flatnonzero(least <= RADIUS)}
    assert pairs == expected
    assert (pairs[8199, 18], pairs[0, 3], pairs[5, 4]) == (0, 3, 0)
    assert len(candidates(train[:, :3], test[:, :0])[0]) == 0


@pytest.mark.parametrize("flipped", [False, True])
def test_planted_copies_are_detected_and_nothing_else(flipped: bool) -> None:
    views = mirrored_views(thumbs_of(IMAGES))
    for change in CHANGES.values():
        copies = [change(image) for image in IMAGES]
        pairs = list(compare(thumbs_of([p[:, ::-1].copy() if flipped else p for p in copies]), views))
        assert {(pair.train, pair.test, pair.flipped) for pair in pairs} == {(i, i, flipped) for i in range(16)}


def test_too_many_candidates_are_an_error() -> None:
    images = [photograph(0, 40, 40)] * 4
    assert len(find_duplicates(memory(images), memory(images), max_candidates=32).pairs) == 16
    with pytest.raises(UserError, match="16 pairs of images look alike"):
        find_duplicates(memory(images), memory(images), max_candidates=15)


def test_search_over_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices are right over the edges of blocks and beyond blank images; a symmetric image is one pair."""
    monkeypatch.setattr(dedup, "MAX_THUMBNAILS", 4)
    train = [photograph(i, 40, 40) for i in range(11)]
    blank, symmetric = np.full((40, 40, 3), 200, np.uint8), photograph(50, 40, 40)
    symmetric = ((symmetric.astype(int) + symmetric[:, ::-1]) // 2).astype(np.uint8)
    train[1], train[9] = blank, symmetric
    test = [train[10][:, ::-1], blank // 2, train[4], photograph(99, 40, 40), symmetric, train[2]]
    search = find_duplicates(memory(train), memory(test))
    expected = {(10, 0, True), (4, 2, False), (9, 4, False), (2, 5, False)}
    assert {(p.train, p.test, p.flipped) for p in search.pairs} == expected
    assert max(p.distance for p in search.pairs) < 0.01
    assert [p.distance for p in search.pairs] == sorted(p.distance for p in search.pairs)
    assert (search.train.blank, search.test.blank) == ([1], [1])


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("flowers102", {"cropped by 6 %": 0.96, "JPEG 30": 1.0, "half the size": 1.0}),
        # Half of 32 pixels is 16, which leaves less than compression does.
        pytest.param("cifar10", {"cropped by 6 %": 0.9, "JPEG 30": 0.95, "half the size": 0.7}, marks=pytest.mark.slow),
    ],
)
def test_real_copies(name: str, least: dict[str, float], shared: Path) -> None:
    """A small form of `benchmarks/dedup.py`, which holds the numbers."""
    folder = shared / "data" / name
    if not folder.is_dir():
        pytest.skip(f"needs {shared.name}/data/{name}")
    dataset = shard_splits(folder, f"shards:{folder}")[1]("test")
    images = [dataset.image(i) for i in range(30)]
    views = mirrored_views(thumbs_of(images))
    for kind, change in CHANGES.items():
        pairs = compare(thumbs_of([change(image) for image in images]), views, MAX_THRESHOLD)
        confirmed = [pair for pair in pairs if pair.distance <= THRESHOLD]
        assert all(pair.train == pair.test for pair in confirmed)
        assert len({pair.test for pair in confirmed}) / len(images) >= least.get(kind, 0.97), kind
