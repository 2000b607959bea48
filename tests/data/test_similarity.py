"""Near-duplicates: the changes that the hash and the distance tolerate."""

import numpy as np
import pytest
from copies import CHANGES, cropped, photograph, thumbs_of

from vitlab.data import similarity
from vitlab.data.similarity import RADIUS, SIDE, alike, candidates, distances, hashes

# ---------------------------------------------------------------------------------------------- hashes


def test_hash_is_of_the_low_frequencies() -> None:
    """One wave sets one bit, its negative none; the order of the bits is that of the lengths."""
    position = (np.arange(SIDE) + 0.5) / SIDE
    ys, xs = similarity._lowest(64)
    assert (int(ys[0]), int(xs[0]), int(ys[1]), int(xs[1])) == (0, 1, 1, 0)
    for bit in (0, 1, 5, 63):
        wave = np.cos(np.pi * ys[bit] * position)[:, None] * np.cos(np.pi * xs[bit] * position)
        # Rounding to whole gray values would give other frequencies a sign: the matrix is tested on its own.
        waves = similarity._views()[0] @ wave @ similarity._views()[0].T
        assert np.flatnonzero(np.abs(waves[ys, xs]) > 1e-9).tolist() == [bit]


def test_hash_is_the_same_in_gray_and_under_contrast() -> None:
    images = [photograph(i) for i in range(8)]
    gray = [CHANGES["gray"](image) for image in images]
    np.testing.assert_array_equal(hashes(thumbs_of(images)), hashes(thumbs_of(gray)))
    thumbs = thumbs_of(images) // 2 * 2
    np.testing.assert_array_equal(hashes(thumbs), hashes(thumbs // 2 + 40))


@pytest.mark.parametrize("kind", CHANGES)
def test_few_bits_change(kind: str) -> None:
    images = [photograph(i) for i in range(40)]
    before, after = hashes(thumbs_of(images)), hashes(thumbs_of([CHANGES[kind](image) for image in images]))
    bits = np.min([np.bitwise_count(before[a] ^ after[b]) for a, b in similarity.COMPARED], axis=0)
    assert bits.max() <= (RADIUS if "crop" in kind else 8)
    others = np.bitwise_count(before[0] ^ np.roll(after[0], 1))
    assert others.mean() == pytest.approx(32, abs=3)


def test_candidates_are_all_pairs_within_the_radius() -> None:
    """Against a plain double loop, over block edges, with exact and near hits planted."""
    random = np.random.default_rng(0)
    train = random.integers(0, 2**64, (2, 8200), np.uint64, endpoint=False)
    test = random.integers(0, 2**64, (2, 19), np.uint64, endpoint=False)
    train[0, 8199], train[1, 0], train[0, 5] = test[0, 18], test[0, 3] ^ 0b1011, test[1, 4]
    train[1, 77] = test[1, 9]  # two centers: is not compared
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


def test_distance_is_that_of_normalized_pixels() -> None:
    thumbs = thumbs_of([photograph(i) for i in range(4)])
    indices = np.arange(4)
    np.testing.assert_allclose(distances(thumbs, thumbs, indices, indices), 0, atol=2e-3)
    np.testing.assert_allclose(distances(thumbs, thumbs // 2 + 50, indices, indices), 0, atol=0.03)
    # Noise of a tenth of the signal's deviation, on every pixel: about a tenth, less what is smoothed.
    random = np.random.default_rng(0)
    noisy = (thumbs + random.normal(0, 0.1 * thumbs.std(axis=(1, 2), keepdims=True), thumbs.shape)).clip(0, 255)
    found = distances(thumbs, noisy.astype(np.uint8), indices, indices)
    assert np.all((found > 0.02) & (found < 0.1))
    assert np.all(distances(thumbs, thumbs, indices, (indices + 1) % 4) > 0.5)


def test_alignment_undoes_a_crop_from_either_side() -> None:
    images = [photograph(i, 200, 200) for i in range(30)]
    whole, indices = thumbs_of(images), np.arange(30)
    for share in (0.03, 0.08):
        cut = thumbs_of([cropped(share)(image) for image in images])
        plain = ((whole.astype(float) - cut) ** 2).mean(axis=(1, 2)) ** 0.5 / whole.std(axis=(1, 2))
        assert np.median(plain) > 1.5 * distances(whole, cut, indices, indices).max()  # without alignment
        assert distances(whole, cut, indices, indices).max() < 0.1
        assert distances(cut, whole, indices, indices).max() < 0.12


def test_only_similar_pairs_remain() -> None:
    images = [photograph(i) for i in range(30)]
    whole, indices = thumbs_of(images), np.arange(30)
    assert alike(whole, thumbs_of([cropped(0.05)(p) for p in images]), indices, indices).mean() > 0.95
    assert alike(whole, whole, indices, np.roll(indices, 1)).mean() < 0.05
