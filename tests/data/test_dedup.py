"""Near-duplicates: what the hash bears, what the distance tells apart, and the whole search on planted copies."""

import io
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.data import dedup
from vitlab.data.datasets import load_dataset
from vitlab.data.dedup import (
    LARGEST,
    RADIUS,
    SIDE,
    THRESHOLD,
    alike,
    both_ways,
    candidates,
    distances,
    find_duplicates,
    hashes,
    mirrored,
    near,
    thumbnail,
)
from vitlab.data.pictures import Entry
from vitlab.data.sources import Dataset

Change = Callable[[np.ndarray], np.ndarray]


def photograph(seed: int, height: int = 120, width: int = 150) -> np.ndarray:
    """Soft shapes of many sizes, as photographs have them."""
    random = np.random.default_rng(seed)
    total = np.zeros((height, width, 3))
    for side in (3, 6, 12, 24):
        layer = Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8))
        total += np.asarray(layer.resize((width, height), Image.Resampling.BICUBIC), float) / side**0.7
    return np.interp(total, (total.min(), total.max()), (10, 245)).astype(np.uint8)


def jpeg(quality: int) -> Change:
    def change(picture: np.ndarray) -> np.ndarray:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "JPEG", quality=quality)
        return np.asarray(Image.open(file))

    return change


def resized(scale: float) -> Change:
    return lambda p: np.asarray(Image.fromarray(p).resize((round(p.shape[1] * scale), round(p.shape[0] * scale))))


def cropped(share: float) -> Change:
    """Off the top and the left, the hardest place."""
    return lambda p: p[round(share * p.shape[0]) :, round(share * p.shape[1]) :]


CHANGES: dict[str, Change] = {
    "half the size": resized(0.5),
    "larger": resized(1.4),
    "JPEG 90": jpeg(90),
    "JPEG 30": jpeg(30),
    "darker": lambda p: (p * 0.7).astype(np.uint8),
    "less contrast": lambda p: (p * 0.6 + 60).astype(np.uint8),
    "grey": lambda p: np.asarray(Image.fromarray(p).convert("L").convert("RGB")),
    "cropped by 2 %": cropped(0.02),
    "cropped by 4 %": cropped(0.04),
    "cropped by 6 %": cropped(0.06),
}


def thumbs_of(pictures: list[np.ndarray]) -> np.ndarray:
    return np.stack([thumbnail(picture) for picture in pictures])


def memory(pictures: list[np.ndarray], name: str = "memory") -> Dataset:
    labels = np.zeros(len(pictures), np.int64)
    return Dataset(name, "train", ("all",), labels, pixels=np.stack(pictures))


# ---------------------------------------------------------------------------------------------- hashes


def test_hash_is_of_the_low_frequencies() -> None:
    """One wave sets one bit, its negative none; which bit is its place in the order of lengths."""
    place = (np.arange(SIDE) + 0.5) / SIDE
    ys, xs = dedup._lowest(64)
    assert (int(ys[0]), int(xs[0]), int(ys[1]), int(xs[1])) == (0, 1, 1, 0)
    for bit in (0, 1, 5, 63):
        wave = np.cos(np.pi * ys[bit] * place)[:, None] * np.cos(np.pi * xs[bit] * place)
        # Rounding to whole grey values would give other frequencies a sign: the matrix is tested on its own.
        found = dedup._views()[0] @ wave @ dedup._views()[0].T
        assert np.argmax(np.abs(found[ys, xs])) == bit
        assert np.sum(np.abs(found[ys, xs]) > 1e-9) == 1


def test_hash_is_the_same_in_grey_and_under_contrast() -> None:
    pictures = [photograph(i) for i in range(8)]
    grey = [CHANGES["grey"](picture) for picture in pictures]
    np.testing.assert_array_equal(hashes(thumbs_of(pictures)), hashes(thumbs_of(grey)))
    thumbs = thumbs_of(pictures) // 2 * 2
    np.testing.assert_array_equal(hashes(thumbs), hashes(thumbs // 2 + 40))


@pytest.mark.parametrize("kind", CHANGES)
def test_few_bits_change(kind: str) -> None:
    pictures = [photograph(i) for i in range(40)]
    own, theirs = hashes(thumbs_of(pictures)), hashes(thumbs_of([CHANGES[kind](picture) for picture in pictures]))
    bits = np.min([np.bitwise_count(own[a] ^ theirs[b]) for a, b in dedup.COMPARED], axis=0)
    assert bits.max() <= (RADIUS if "crop" in kind else 8)
    others = np.bitwise_count(own[0] ^ np.roll(theirs[0], 1))
    assert others.mean() == pytest.approx(32, abs=3)


def test_candidates_are_all_pairs_within_the_radius() -> None:
    """Against a plain double loop, over block edges, with exact and near hits planted."""
    random = np.random.default_rng(0)
    train = random.integers(0, 2**64, (2, 8200), np.uint64, endpoint=False)
    test = random.integers(0, 2**64, (2, 19), np.uint64, endpoint=False)
    train[0, 8199], train[1, 0], train[0, 5] = test[0, 18], test[0, 3] ^ 0b1011, test[1, 4]
    train[1, 77] = test[1, 9]  # two centres: is not compared
    i, j, bits = candidates(train, test, radius=14)
    found = {(int(a), int(b)): int(c) for a, b, c in zip(i, j, bits, strict=True)}
    expected = {}
    for b in range(19):
        least = np.min([np.bitwise_count(train[y] ^ test[x, b]) for x, y in ((0, 0), (0, 1), (1, 0))], axis=0)
        expected |= {(int(a), b): int(least[a]) for a in np.flatnonzero(least <= 14)}
    assert found == expected
    assert (found[8199, 18], found[0, 3], found[5, 4]) == (0, 3, 0)
    assert len(candidates(train[:, :3], test[:, :0])[0]) == 0


# ------------------------------------------------------------------------------------------- distances


def test_distance_is_that_of_normalised_pixels() -> None:
    thumbs = thumbs_of([photograph(i) for i in range(4)])
    everyone = np.arange(4)
    np.testing.assert_allclose(distances(thumbs, thumbs, everyone, everyone), 0, atol=2e-3)
    np.testing.assert_allclose(distances(thumbs, thumbs // 2 + 50, everyone, everyone), 0, atol=0.03)
    # Noise of a tenth of the signal's deviation, on every pixel: about a tenth, less what is smoothed.
    random = np.random.default_rng(0)
    noisy = (thumbs + random.normal(0, 0.1 * thumbs.std(axis=(1, 2), keepdims=True), thumbs.shape)).clip(0, 255)
    found = distances(thumbs, noisy.astype(np.uint8), everyone, everyone)
    assert np.all((found > 0.02) & (found < 0.1))
    assert np.all(distances(thumbs, thumbs, everyone, (everyone + 1) % 4) > 0.5)


def test_alignment_undoes_a_crop_from_either_side() -> None:
    pictures = [photograph(i, 200, 200) for i in range(30)]
    whole, everyone = thumbs_of(pictures), np.arange(30)
    for share in (0.03, 0.08):
        cut = thumbs_of([cropped(share)(picture) for picture in pictures])
        plain = ((whole.astype(float) - cut) ** 2).mean(axis=(1, 2)) ** 0.5 / whole.std(axis=(1, 2))
        assert np.median(plain) > 1.5 * distances(whole, cut, everyone, everyone).max()  # without alignment
        assert distances(whole, cut, everyone, everyone).max() < 0.1
        assert distances(cut, whole, everyone, everyone).max() < 0.12


def test_what_is_not_alike_is_dropped_and_copies_are_kept() -> None:
    pictures = [photograph(i) for i in range(30)]
    whole, everyone = thumbs_of(pictures), np.arange(30)
    assert alike(whole, thumbs_of([cropped(0.05)(p) for p in pictures]), everyone, everyone).mean() > 0.95
    assert alike(whole, whole, everyone, np.roll(everyone, 1)).mean() < 0.05


# ----------------------------------------------------------------------------------------------- search


@pytest.mark.parametrize("turned", [False, True])
def test_planted_copies_are_found_and_nothing_else(turned: bool) -> None:
    pictures = [photograph(i) for i in range(60)]
    looks = both_ways(thumbs_of(pictures))
    for change in CHANGES.values():
        copies = [change(picture) for picture in pictures]
        pairs = list(near(thumbs_of([p[:, ::-1].copy() if turned else p for p in copies]), looks))
        assert {(pair.train, pair.test, pair.flipped) for pair in pairs} == {(i, i, turned) for i in range(60)}


def test_search_over_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places hold over shard edges and around what is left out; a symmetric picture is one pair."""
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


def test_thumbnails_are_kept_and_made_again_when_pictures_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedup, "SHARD", 3)
    files = [tmp_path / f"{i}.png" for i in range(7)]
    for i, file in enumerate(files):
        Image.fromarray(photograph(i)).save(file)
    files[5].write_bytes(b"no picture")
    train = Dataset("disk", "train", ("a",), np.zeros(7, np.int64), entries=[Entry(str(file)) for file in files])
    test = memory([photograph(6), photograph(2)])
    cache = tmp_path / "cache"
    first = find_duplicates(train, test, cache=cache)
    assert {(p.train, p.test) for p in first.pairs} == {(2, 1), (6, 0)}
    assert list(first.train.unreadable) == [5]
    assert "not a picture" in first.train.unreadable[5]
    assert len(list(cache.iterdir())) == 4

    read: list[int] = []
    original = Dataset.picture
    monkeypatch.setattr(Dataset, "picture", lambda self, index: read.append(index) or original(self, index))
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


# ---------------------------------------------------------------------------------------- real pictures


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
        pairs = list(near(thumbs_of([change(picture) for picture in entries]), looks, LARGEST))
        found = {pair.test for pair in pairs if pair.train == pair.test and pair.distance <= THRESHOLD}
        wrong += sum(pair.train != pair.test and pair.distance <= THRESHOLD for pair in pairs)
        assert len(found) / len(entries) >= least.get(kind, 0.97), kind
    assert wrong == 0


def load_entries(folder: Path, count: int) -> list[np.ndarray]:
    """The first test pictures, read from their shard without decoding the others."""
    from vitlab.data.shards import shard_splits

    dataset = shard_splits(folder, f"shards:{folder}")[1]("test")
    return [dataset.picture(i) for i in itertools.islice(range(len(dataset)), count)]


def test_a_set_by_name_is_searched() -> None:
    """Digits differ in little: the test part holds no copy of the training part at a strict threshold."""
    train, test = (load_dataset("digits", split).take(np.arange(100)) for split in ("train", "test"))
    assert find_duplicates(train, test, limit=0.01).pairs == []
    assert {(p.train, p.test) for p in find_duplicates(train, train.take(np.arange(5)), limit=0.01).pairs} == {
        (i, i) for i in range(5)
    }


def test_mirror() -> None:
    thumbs = thumbs_of([photograph(0)])
    np.testing.assert_array_equal(mirrored(thumbs)[0], thumbs[0][:, ::-1])
    np.testing.assert_array_equal(mirrored(mirrored(thumbs)), thumbs)
