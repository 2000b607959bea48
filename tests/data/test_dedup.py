"""Near-duplicates: the whole search, on planted copies and on real images."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from copies import CHANGES, photograph, thumbs_of
from PIL import Image

from vitlab.data import dedup
from vitlab.data.dataset import Dataset
from vitlab.data.decode import Entry
from vitlab.data.dedup import both_ways, find_duplicates, near
from vitlab.data.registry import load_dataset
from vitlab.data.similarity import LARGEST, THRESHOLD


def memory(images: list[np.ndarray], name: str = "memory") -> Dataset:
    labels = np.zeros(len(images), np.int64)
    return Dataset(name, "train", ("all",), labels, pixels=np.stack(images))


@pytest.mark.parametrize("turned", [False, True])
def test_planted_copies_are_found_and_nothing_else(turned: bool) -> None:
    images = [photograph(i) for i in range(60)]
    looks = both_ways(thumbs_of(images))
    for change in CHANGES.values():
        copies = [change(image) for image in images]
        pairs = list(near(thumbs_of([p[:, ::-1].copy() if turned else p for p in copies]), looks))
        assert {(pair.train, pair.test, pair.flipped) for pair in pairs} == {(i, i, turned) for i in range(60)}


def test_search_over_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places hold over shard edges and around what is left out; a symmetric image is one pair."""
    monkeypatch.setattr(dedup, "SHARD", 4)
    train = [photograph(i, 40, 40) for i in range(11)]
    symmetric = photograph(50, 40, 40)
    symmetric = ((symmetric.astype(int) + symmetric[:, ::-1]) // 2).astype(np.uint8)
    train[1], train[9] = np.full((40, 40, 3), 200, np.uint8), symmetric
    test = [
        train[10][:, ::-1],
        np.full((40, 40, 3), 7, np.uint8),
        train[4],
        photograph(99, 40, 40),
        symmetric,
        train[2],
    ]
    heard: list[tuple[str, int, int]] = []
    found = find_duplicates(memory(train), memory(test), report=lambda *words: heard.append(words))
    assert {(p.train, p.test, p.flipped) for p in found.pairs} == {
        (10, 0, True), (4, 2, False), (9, 4, False), (2, 5, False)
    }  # fmt: skip
    assert max(p.distance for p in found.pairs) < 0.01
    assert (found.train.flat, found.test.flat) == ([1], [1])
    assert heard[-1] == ("compared", 11, 11)
    assert [p.distance for p in found.pairs] == sorted(p.distance for p in found.pairs)


def test_thumbnails_are_kept_and_made_again_when_images_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "SHARD", 3)
    files = [tmp_path / f"{i}.png" for i in range(7)]
    for i, file in enumerate(files):
        Image.fromarray(photograph(i)).save(file)
    files[5].write_bytes(b"no image")
    train = Dataset("disk", "train", ("a",), np.zeros(7, np.int64), entries=[Entry(str(file)) for file in files])
    test = memory([photograph(6), photograph(2)])
    cache = tmp_path / "cache"
    first = find_duplicates(train, test, cache=cache)
    assert {(p.train, p.test) for p in first.pairs} == {(2, 1), (6, 0)}
    assert list(first.train.unreadable) == [5]
    assert "not an image" in first.train.unreadable[5]
    assert len(list(cache.iterdir())) == 4

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


def test_nothing_to_compare() -> None:
    blank = memory([np.full((20, 20, 3), 9, np.uint8)] * 2)
    found = find_duplicates(memory([photograph(1, 20, 20)]), blank)
    assert (found.pairs, found.test.flat) == ([], [0, 1])


# ---------------------------------------------------------------------------------------- real images


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("flowers102", {"cropped by 6 %": 0.97, "JPEG 30": 1.0, "half the size": 1.0}),
        # Half of 32 pixels is 16, which leaves less than compression does.
        ("cifar10", {"cropped by 6 %": 0.9, "JPEG 30": 0.95, "half the size": 0.7}),
    ],
)
def test_real_copies(name: str, least: dict[str, float], shared: Path) -> None:
    """A small form of `benchmarks/dedup.py`, which holds the numbers."""
    if not (shared / "data" / name).is_dir():
        pytest.skip(f"needs {shared.name}/data/{name}")
    entries = load_entries(shared / "data" / name, 100)
    looks = both_ways(thumbs_of(entries))
    wrong = 0
    for kind, change in CHANGES.items():
        pairs = list(near(thumbs_of([change(image) for image in entries]), looks, LARGEST))
        found = {pair.test for pair in pairs if pair.train == pair.test and pair.distance <= THRESHOLD}
        wrong += sum(pair.train != pair.test and pair.distance <= THRESHOLD for pair in pairs)
        assert len(found) / len(entries) >= least.get(kind, 0.97), kind
    assert wrong == 0


def load_entries(folder: Path, count: int) -> list[np.ndarray]:
    """The first test images, read from their shard without decoding the others."""
    from vitlab.data.shards import shard_splits

    dataset = shard_splits(folder, f"shards:{folder}")[1]("test")
    return [dataset.image(i) for i in itertools.islice(range(len(dataset)), count)]


def test_a_set_by_name_is_searched() -> None:
    """Digits differ in little: the test part holds no copy of the training part at a strict threshold."""
    train, test = (load_dataset("digits", split).take(np.arange(100)) for split in ("train", "test"))
    assert find_duplicates(train, test, limit=0.01).pairs == []
    assert {(p.train, p.test) for p in find_duplicates(train, train.take(np.arange(5)), limit=0.01).pairs} == {
        (i, i) for i in range(5)
    }
