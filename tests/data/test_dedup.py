"""Near-duplicates: the whole search, on planted copies and on real images."""

from pathlib import Path

import numpy as np
import pytest
from copies import CHANGES, photograph, thumbs_of
from PIL import Image

from vitlab.data import dedup
from vitlab.data.dataset import Dataset
from vitlab.data.decode import Entry
from vitlab.data.dedup import both_ways, find_duplicates, near
from vitlab.data.shards import shard_splits
from vitlab.data.similarity import LARGEST, THRESHOLD


def memory(images: list[np.ndarray]) -> Dataset:
    return Dataset("memory", "train", ("all",), np.zeros(len(images), np.int64), pixels=np.stack(images))


@pytest.mark.parametrize("flipped", [False, True])
def test_planted_copies_are_found_and_nothing_else(flipped: bool) -> None:
    images = [photograph(i) for i in range(30)]
    views = both_ways(thumbs_of(images))
    for change in CHANGES.values():
        copies = [change(image) for image in images]
        pairs = list(near(thumbs_of([p[:, ::-1].copy() if flipped else p for p in copies]), views))
        assert {(pair.train, pair.test, pair.flipped) for pair in pairs} == {(i, i, flipped) for i in range(30)}


def test_search_over_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices are right over shard edges and around blank images; a symmetric image is one pair."""
    monkeypatch.setattr(dedup, "SHARD", 4)
    train = [photograph(i, 40, 40) for i in range(11)]
    blank, symmetric = np.full((40, 40, 3), 200, np.uint8), photograph(50, 40, 40)
    symmetric = ((symmetric.astype(int) + symmetric[:, ::-1]) // 2).astype(np.uint8)
    train[1], train[9] = blank, symmetric
    test = [train[10][:, ::-1], blank // 2, train[4], photograph(99, 40, 40), symmetric, train[2]]
    reports: list[tuple[str, int, int]] = []
    search = find_duplicates(memory(train), memory(test), report=lambda *report: reports.append(report))
    expected = {(10, 0, True), (4, 2, False), (9, 4, False), (2, 5, False)}
    assert {(p.train, p.test, p.flipped) for p in search.pairs} == expected
    assert max(p.distance for p in search.pairs) < 0.01
    assert [p.distance for p in search.pairs] == sorted(p.distance for p in search.pairs)
    assert (search.train.flat, search.test.flat) == ([1], [1])
    assert reports[-1] == ("compared", 11, 11)


def test_thumbnails_are_cached_until_images_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "SHARD", 3)
    files = [tmp_path / f"{i}.png" for i in range(7)]
    for i, file in enumerate(files):
        Image.fromarray(photograph(i)).save(file)
    files[5].write_bytes(b"not an image")
    train = Dataset("disk", "train", ("a",), np.zeros(7, np.int64), entries=[Entry(str(file)) for file in files])
    test = memory([photograph(6), photograph(2)])
    cache = tmp_path / "cache"
    first = find_duplicates(train, test, cache=cache)
    assert {(p.train, p.test) for p in first.pairs} == {(2, 1), (6, 0)}
    assert list(first.train.unreadable) == [5]
    assert "not an image" in first.train.unreadable[5]

    read: list[int] = []
    original = Dataset.image
    monkeypatch.setattr(Dataset, "image", lambda self, index: read.append(index) or original(self, index))
    again = find_duplicates(train, test, cache=cache, workers=2)
    assert (again.pairs, again.train.unreadable, read) == (first.pairs, first.train.unreadable, [])

    Image.fromarray(photograph(6)).save(files[3])
    (cache / "train-00000.npz").write_bytes(b"cut off")
    changed = find_duplicates(train, test, cache=cache)
    assert sorted(read) == [0, 1, 2, 3, 4, 5]
    assert {(p.train, p.test) for p in changed.pairs} == {(2, 1), (3, 0), (6, 0)}


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("flowers102", {"cropped by 6 %": 0.96, "JPEG 30": 1.0, "half the size": 1.0}),
        # Half of 32 pixels is 16, which leaves less than compression does.
        ("cifar10", {"cropped by 6 %": 0.9, "JPEG 30": 0.95, "half the size": 0.7}),
    ],
)
def test_real_copies(name: str, least: dict[str, float], shared: Path) -> None:
    """A small form of `benchmarks/dedup.py`, which holds the numbers."""
    folder = shared / "data" / name
    if not folder.is_dir():
        pytest.skip(f"needs {shared.name}/data/{name}")
    dataset = shard_splits(folder, f"shards:{folder}")[1]("test")
    images = [dataset.image(i) for i in range(50)]
    views = both_ways(thumbs_of(images))
    for kind, change in CHANGES.items():
        pairs = near(thumbs_of([change(image) for image in images]), views, LARGEST)
        confirmed = [pair for pair in pairs if pair.distance <= THRESHOLD]
        assert all(pair.train == pair.test for pair in confirmed)
        assert len({pair.test for pair in confirmed}) / len(images) >= least.get(kind, 0.97), kind
