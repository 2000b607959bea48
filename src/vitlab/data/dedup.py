"""Near-duplicates of test images in a training set, which make a test easier than it seems (Sec. 4.1).

Similar images differ by size, compression, brightness, color, a crop by up to about 8 % of a side, or mirroring.
Rotated images and larger crops are not found. Thumbnails are compared: a hash proposes pairs (`candidates`,
`correlated`), which is cheap; the distance aligns the two images (`distances`). Without the alignment most crops by 4 %
and more are missed (docs/records/evaluation.md).
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8, UInt64
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.loader import available_cores
from vitlab.display import ProgressDisplay
from vitlab.errors import UserError

SIDE = 32  # pixels of a thumbnail's side
MIN_STD = 2.0  # least deviation of a thumbnail's gray values (0-255); below, it is blank: skipped and counted
SHARD = 16_384  # training images whose thumbnails are in memory together
CENTER = 0.94  # part of each side that an image's second hash covers, to match the first hash of a cropped copy
COMPARED = ((0, 0), (0, 1), (1, 0))  # the hashes of a test and of a training image: 0 of the whole, 1 of the center
RADIUS = 18  # most differing bits in the hashes of a proposed pair; measured by benchmarks/dedup.py
NUM_FREQUENCIES, MIN_CORRELATION = 20, 0.85  # number and least correlation of a proposed pair's lowest frequencies
THRESHOLD = 0.25  # largest distance of near-duplicates; measured by benchmarks/dedup.py
MAX_THRESHOLD = 0.5  # largest distance that can be asked for: above it, PYRAMID ends a comparison
PYRAMID = ((8, 4, 0.7), (16, 3, 0.5), (32, 3, np.inf))
"""How a pair is aligned: the side of the images, the number of steps, the largest distance with which it continues."""
REACH = 0.14  # largest shift (in halves of a side) or scaling of an alignment

Indices = Int64[np.ndarray, " n"]
View = tuple[bool, np.ndarray, np.ndarray]
"""Whether mirrored, thumbnails uint8 [M, S, S], and their frequencies [2, M, 64]."""


class Pair(NamedTuple):
    """A training image and a test image that look alike, by their indices."""

    train: int
    test: int
    distance: float
    bits: int  # of 64 that differ in their hashes
    flipped: bool  # whether one is the other mirrored


class Omitted(NamedTuple):
    """Indices of blank images, and of those that could not be read, with the reason."""

    blank: list[int]
    unreadable: dict[int, str]


class Duplicates(NamedTuple):
    """The pairs, the most similar first, and the images of either set that could not be compared."""

    pairs: list[Pair]
    train: Omitted
    test: Omitted


def find_duplicates(
    train: Dataset, test: Dataset, *, limit: float = THRESHOLD, max_candidates: int | None = None
) -> Duplicates:
    """All pairs of an image of `train` and one of `test` whose distance is at most `limit`. Raises UserError if a shard
    has more than `max_candidates` pairs of similar hashes; a pair takes about 0.1 ms."""
    train_omitted, test_omitted = Omitted([], {}), Omitted([], {})
    parts = list(_read_thumbnails(test, "test", test_omitted))
    test_indices, thumbs = map(np.concatenate, zip(*parts, strict=True))
    views = mirrored_views(thumbs)
    best: dict[tuple[int, int], Pair] = {}
    for indices, shard in _read_thumbnails(train, "train", train_omitted):
        for match in compare(shard, views, limit, max_candidates):
            key = int(indices[match.train]), int(test_indices[match.test])
            pair = match._replace(train=key[0], test=key[1])
            best[key] = min(best.get(key, pair), pair, key=lambda p: (p.distance, p.flipped))
    return Duplicates(sorted(best.values(), key=lambda p: (p.distance, p.test, p.train)), train_omitted, test_omitted)


def mirrored_views(thumbs: UInt8[np.ndarray, "M S S"]) -> list[View]:
    """Test thumbnails with their frequencies, as they are and mirrored."""
    mirrored = np.ascontiguousarray(thumbs[:, :, ::-1])
    return [(False, thumbs, frequencies(thumbs)), (True, mirrored, frequencies(mirrored))]


def compare(
    shard: UInt8[np.ndarray, "N S S"], views: list[View], limit: float = THRESHOLD, max_candidates: int | None = None
) -> Iterator[Pair]:
    """The pairs of a thumbnail of `shard` and one of `views` that are at most `limit` apart, by their indices there."""
    shard_frequencies = frequencies(shard)
    for flipped, thumbs, test_frequencies in views:
        train, test, bits = candidates(hashes(shard_frequencies), hashes(test_frequencies))
        similar = correlated(shard_frequencies, test_frequencies, train, test)
        train, test, bits = train[similar], test[similar], bits[similar]
        if max_candidates is not None and len(train) > max_candidates:
            raise UserError(f"{len(train):,} pairs of images look alike, which is too many to compare quickly.")
        distance = distances(thumbs, shard, test, train).astype(np.float64).round(4)
        for n in np.flatnonzero(distance <= limit).tolist():
            yield Pair(int(train[n]), int(test[n]), float(distance[n]), int(bits[n]), flipped)


def _read_thumbnails(
    dataset: Dataset, name: str, omitted: Omitted
) -> Iterator[tuple[Indices, UInt8[np.ndarray, "n S S"]]]:
    """Indices and thumbnails, at most SHARD at a time; `omitted` collects the others."""

    def read(index: int) -> np.ndarray:
        try:
            return thumbnail(dataset.image(index))
        except ImageError as error:
            omitted.unreadable[index] = error.reason
            return np.zeros((SIDE, SIDE), np.uint8)

    # Pillow decodes and scales outside of Python's lock.
    with ThreadPoolExecutor(available_cores()) as pool, ProgressDisplay(f"reading {name}", len(dataset)) as display:
        for start in range(0, len(dataset), SHARD):
            stop = min(start + SHARD, len(dataset))
            thumbs = np.stack(list(pool.map(read, range(start, stop))))
            blank = thumbs.std(axis=(1, 2), dtype=np.float32) < MIN_STD  # also for unreadable images
            omitted.blank.extend(i for i in (start + np.flatnonzero(blank)).tolist() if i not in omitted.unreadable)
            display.update(stop)
            yield start + np.flatnonzero(~blank), thumbs[~blank]


# --------------------------------------------------------------------------------------------- hashes


def thumbnail(image: UInt8[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "S S"]:
    """Gray values (Rec. 601) of the whole image, squashed to `SIDE` x `SIDE`, each new pixel a mean of old ones."""
    gray = Image.fromarray(image).convert("L")
    return np.asarray(gray if gray.size == (SIDE, SIDE) else gray.resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def lowest_frequencies() -> tuple[np.ndarray, np.ndarray]:
    """The 64 lowest frequencies (y, x) of a two-dimensional DCT, by their length, without the mean (0, 0)."""
    grid = [(y * y + x * x, y, x) for y in range(SIDE) for x in range(SIDE) if y or x]
    _, ys, xs = np.array(sorted(grid)[:64]).T
    return ys, xs


def dct_matrices() -> Float[np.ndarray, "2 F S"]:
    """Matrices from a thumbnail's axis to its low frequencies (DCT-II): of all of it, and of its center."""
    frequency = np.arange(lowest_frequencies()[0].max() + 1)
    position = (np.arange(SIDE) + 0.5) / SIDE
    dct = np.cos(np.pi * frequency[:, None] * position) * np.where(frequency == 0, 0.5**0.5, 1)[:, None]
    center = ((position - 0.5) * CENTER + 0.5) * SIDE - 0.5
    lookup = np.maximum(1 - np.abs(center[:, None] - np.arange(SIDE)), 0)  # linear interpolation
    return np.stack([dct, dct @ lookup])


def frequencies(thumbs: UInt8[np.ndarray, "N S S"]) -> Float[np.ndarray, "2 N 64"]:
    """The 64 lowest frequencies of each thumbnail, of all of it and of its center."""
    ys, xs = lowest_frequencies()
    values = np.empty((2, len(thumbs), 64))
    for view, matrix in enumerate(dct_matrices()):
        for start in range(0, len(thumbs), 4096):
            part = slice(start, start + 4096)
            values[view, part] = (matrix @ thumbs[part].astype(np.float64) @ matrix.T)[:, ys, xs]
    return values


def hashes(values: Float[np.ndarray, "2 N 64"]) -> UInt64[np.ndarray, "2 N"]:
    """The signs of the frequencies as bits. Brightness and contrast do not change them; compression changes few."""
    packed = np.packbits(values > 1e-6, axis=2)  # a missing frequency is 0, up to rounding
    return np.ascontiguousarray(packed).view(np.uint64)[:, :, 0]


def candidates(
    train: UInt64[np.ndarray, "2 N"], test: UInt64[np.ndarray, "2 M"]
) -> tuple[Indices, Indices, UInt8[np.ndarray, " n"]]:
    """Pairs (index in train, index in test, bits that differ) with hashes that differ in at most RADIUS bits. Every
    pair is compared, in blocks that stay in the processor's cache."""
    pairs = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8))]
    for first_train in range(0, train.shape[1], 8192):
        block = train[:, first_train : first_train + 8192]
        for first_test in range(0, test.shape[1], 8):
            tested = test[:, first_test : first_test + 8, None]
            bits = np.minimum.reduce([np.bitwise_count(tested[one] ^ block[other]) for one, other in COMPARED])
            row, column = (bits <= RADIUS).nonzero()
            if len(row):
                pairs.append((column + first_train, row + first_test, bits[row, column]))
    trains, tests, all_bits = map(np.concatenate, zip(*pairs, strict=True))
    return trains, tests, all_bits


def correlated(
    train: Float[np.ndarray, "2 N 64"], test: Float[np.ndarray, "2 M 64"], train_indices: Indices, test_indices: Indices
) -> Bool[np.ndarray, " n"]:
    """Which pairs of images remain: their lowest frequencies themselves, not only the signs, correlate. It has a
    hundredth of the cost of `distances`."""

    def normalized(values: np.ndarray) -> np.ndarray:
        lowest = values[:, :, :NUM_FREQUENCIES]
        return (lowest / np.maximum(np.linalg.norm(lowest, axis=2, keepdims=True), 1e-6)).astype(np.float32)

    train, test = normalized(train), normalized(test)
    similar = np.zeros(len(train_indices), bool)
    for one, other in COMPARED:
        for start in range(0, len(similar), 65_536):
            part = slice(start, start + 65_536)
            a, b = test[one][test_indices[part]], train[other][train_indices[part]]
            similar[part] |= np.einsum("nf,nf->n", a, b) >= MIN_CORRELATION
    return similar


# ------------------------------------------------------------------------------------------ distances


def distances(
    first: UInt8[np.ndarray, "N S S"], second: UInt8[np.ndarray, "M S S"], first_rows: Indices, second_rows: Indices
) -> Float[np.ndarray, " n"]:
    """The distance of the thumbnails of pairs, given by their rows: 0 the same, 1.41 unrelated, 2 a negative.

    The second of each pair is shifted and scaled along both axes until it fits the first; over the part that both show,
    both are normalized to mean 0 and std 1, and the distance is the root of their mean squared difference.
    Infinite if the two already differ at a quarter or half of the resolution (`PYRAMID`).
    """
    result = np.full(len(first_rows), np.inf, np.float32)
    for start in range(0, len(result), 2048):
        part = slice(start, start + 2048)
        a = torch.from_numpy(first[first_rows[part]]).float()
        b = torch.from_numpy(second[second_rows[part]]).float()
        pairs = torch.arange(start, start + len(a))
        distance = torch.empty(0)
        warp = torch.tensor([1.0, 0.0, 1.0, 0.0]).repeat(len(a), 1)  # scale and shift of y, then of x; the middle is 0
        for side, steps, most in PYRAMID:
            if not len(pairs):
                break
            correlation, warp = _align(_shrink(a, side), _shrink(b, side), warp, steps)
            distance = (2 * (1 - correlation)).clamp(min=0).sqrt()
            close = distance <= most
            a, b = a[close], b[close]
            pairs, warp, distance = pairs[close], warp[close], distance[close]
        result[pairs.numpy()] = distance.numpy()
    return result


def _shrink(x: Float[Tensor, "n S S"], side: int) -> Float[Tensor, "n side side"]:
    """At a lower resolution; at the same one a little smoother, which reduces the effect of compression."""
    if side < SIDE:
        return F.avg_pool2d(x, SIDE // side)
    kernel = torch.tensor([0.2, 0.6, 0.2])[None, None, :, None]
    padded = F.pad(x[:, None], (1, 1, 1, 1), mode="replicate")
    return F.conv2d(F.conv2d(padded, kernel), kernel.mT)[:, 0]


def _align(
    a: Float[Tensor, "n s s"], b: Float[Tensor, "n s s"], warp: Float[Tensor, "n 4"], steps: int
) -> tuple[Float[Tensor, " n"], Float[Tensor, "n 4"]]:
    """The best correlation of `a` and warped `b`, and its warp: Gauss-Newton, as Lucas and Kanade's."""
    best, best_warp = torch.full((len(a),), -1.0), warp
    low = torch.tensor([1 - REACH, -REACH, 1 - REACH, -REACH])
    for step in range(steps + 1):
        correlation, change = _fit(a, b, warp)
        better = correlation > best
        best, best_warp = torch.where(better, correlation, best), torch.where(better[:, None], warp, best_warp)
        if step < steps:
            warp = torch.minimum(torch.maximum(warp + change, low), low + 2 * REACH)
    return best, best_warp


def _fit(
    a: Float[Tensor, "n s s"], b: Float[Tensor, "n s s"], warp: Float[Tensor, "n 4"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, "n 4"]]:
    """The correlation of `a` with `b` under `warp`, where both are, and the change of `warp` that promises more.

    With b_w = `b` under `warp`, its derivatives b_y and b_x, and (y, x) a pixel's position in [-1, 1], to first order

        a = offset + gain * (b_w + change[0] y b_y + change[1] b_y + change[2] x b_x + change[3] b_x),

    a linear regression of `a` on six images. Pixels outside of `b` have no weight.
    """
    half = a.shape[1] / 2
    center = (torch.arange(a.shape[1]) + 0.5) / half - 1  # the positions of pixels
    lookup, inside = [], []
    for axis in (0, 1):
        position = warp[:, 2 * axis, None] * center + warp[:, 2 * axis + 1, None]
        inside.append((position.abs() <= 1).float())
        pixel = ((position + 1) * half - 0.5).clamp(0, a.shape[1] - 1)
        lookup.append((1 - (pixel[:, :, None] - torch.arange(a.shape[1])).abs()).clamp(min=0))  # linear interpolation
    rows, columns = lookup[0], lookup[1].mT
    b_y, b_x = (rows @ slope @ columns for slope in torch.gradient(b, spacing=1 / half, dim=(1, 2)))
    basis = torch.stack(
        [rows @ b @ columns, torch.ones_like(a), b_y * center[:, None], b_y, b_x * center, b_x], dim=3
    ).flatten(1, 2)
    weight = (inside[0][:, :, None] * inside[1][:, None, :]).flatten(1)
    area = weight.sum(1)
    target = a.flatten(1)
    target = target - ((weight * target).sum(1) / area)[:, None]
    basis[:, :, 0] -= ((weight * basis[:, :, 0]).sum(1) / area)[:, None]
    weighted = basis * weight[:, :, None]
    products = weighted.mT @ basis
    onto = (weighted.mT @ target[:, :, None])[:, :, 0]
    power = (weight * target**2).sum(1) * products[:, 0, 0]
    correlation = onto[:, 0] / power.clamp(min=1e-6).sqrt()
    damped = products + torch.diag_embed(1e-3 * products.diagonal(dim1=1, dim2=2) + 1e-3)
    solved = torch.linalg.solve(damped, onto)
    gain = solved[:, :1]
    change = torch.where(gain > 0.1, solved[:, 2:] / gain.clamp(min=0.1), 0)
    return correlation, change.clamp(-0.05, 0.05)
