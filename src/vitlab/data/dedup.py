"""Near-duplicates of test images in a training set, which make a test easier than it seems (Sec. 4.1).

Similar images differ by size, compression, brightness, color, a crop by up to about 8% of a side, or mirroring.
Rotated images and larger crops are not found. `vitlab duplicates` calls `find_duplicates`, which compares thumbnails:

1. `candidates` compares the hashes of all pairs, which is cheap; `correlated` chooses among the similar ones.
2. `distances` aligns the two thumbnails of a pair and measures their distance. Without the alignment most crops by 4%
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
from vitlab.data.workers import available_cores
from vitlab.display import ProgressDisplay
from vitlab.errors import UserError


class Level(NamedTuple):
    """A resolution at which a pair is aligned."""

    side: int  # of the thumbnails, in pixels
    steps: int
    max_distance: float  # a pair that is farther apart is not compared at the next level


SIDE = 32  # pixels of a thumbnail's side
MIN_STD = 2.0
"""Least standard deviation of a thumbnail's gray values (0-255). Below it the image is blank: skipped and counted."""
MAX_THUMBNAILS = 16_384  # training images whose thumbnails are in memory at a time
CENTER = 0.94  # part of each side that an image's second hash covers, to match the first hash of a cropped copy
COMPARED = ((0, 0), (0, 1), (1, 0))
"""(hash of a test image, hash of a training image) to compare: 0 is the whole image's, 1 its center's."""
RADIUS = 18  # most differing bits in the hashes of a candidate; measured by benchmarks/dedup.py
NUM_FREQUENCIES = 20  # how many of the lowest frequencies are correlated
MIN_CORRELATION = 0.85  # their least correlation in a pair that remains
THRESHOLD = 0.25  # largest distance of near-duplicates; measured by benchmarks/dedup.py
MAX_THRESHOLD = 0.5
"""Largest distance that can be asked for: PYRAMID ends the comparison of pairs that are farther apart."""
PYRAMID = (Level(8, 4, 0.7), Level(16, 3, 0.5), Level(32, 3, np.inf))
"""The levels at which a pair is aligned, one after the other."""
REACH = 0.14  # largest shift (in halves of a side) or scaling of an alignment

Indices = Int64[np.ndarray, " n"]
Warp = Float[Tensor, "n 4"]
"""How coordinates are warped: scale and shift of y, then of x. They run from -1 to 1, with 0 in the middle."""


class Pair(NamedTuple):
    """A training image and a test image that look alike, by their indices."""

    train: int
    test: int
    distance: float
    bits: int  # of 64 that differ in their hashes
    flipped: bool  # whether one is the other mirrored


class Omitted(NamedTuple):
    """The indices of images that could not be compared."""

    blank: list[int]
    unreadable: dict[int, str]  # index -> reason


class Duplicates(NamedTuple):
    """What `find_duplicates` returns."""

    pairs: list[Pair]  # the most similar first
    train: Omitted
    test: Omitted


class View(NamedTuple):
    """The test images as they are, or mirrored."""

    is_mirrored: bool
    thumbs: UInt8[np.ndarray, "M S S"]
    frequencies: Float[np.ndarray, "2 M 64"]


class Candidates(NamedTuple):
    """Pairs of images that may be near-duplicates: one element for each pair."""

    train: Indices
    test: Indices
    bits: UInt8[np.ndarray, " n"]  # that differ in their hashes


def find_duplicates(
    train: Dataset, test: Dataset, *, limit: float = THRESHOLD, max_candidates: int | None = None
) -> Duplicates:
    """All pairs of an image of `train` and one of `test` whose distance is at most `limit`. Raises UserError for more
    than `max_candidates` pairs in a block of training images; a pair takes about 0.1 ms."""
    train_omitted, test_omitted = Omitted([], {}), Omitted([], {})
    blocks = list(_read_thumbnails(test, "test", test_omitted))
    test_indices, test_thumbs = map(np.concatenate, zip(*blocks, strict=True))
    views = mirrored_views(test_thumbs)
    best: dict[tuple[int, int], Pair] = {}  # (training image, test image) -> as it is or mirrored, whichever is nearer
    for train_indices, thumbs in _read_thumbnails(train, "train", train_omitted):
        for match in compare(thumbs, views, limit, max_candidates):
            key = int(train_indices[match.train]), int(test_indices[match.test])
            pair = match._replace(train=key[0], test=key[1])
            best[key] = min(best.get(key, pair), pair, key=lambda p: (p.distance, p.flipped))
    return Duplicates(sorted(best.values(), key=lambda p: (p.distance, p.test, p.train)), train_omitted, test_omitted)


def mirrored_views(thumbs: UInt8[np.ndarray, "M S S"]) -> list[View]:
    """The views of test thumbnails: as they are, and mirrored."""
    mirrored = np.ascontiguousarray(thumbs[:, :, ::-1])
    return [View(False, thumbs, frequencies(thumbs)), View(True, mirrored, frequencies(mirrored))]


def compare(
    thumbs: UInt8[np.ndarray, "N S S"], views: list[View], limit: float = THRESHOLD, max_candidates: int | None = None
) -> Iterator[Pair]:
    """The pairs of a training thumbnail and one of `views` that are at most `limit` apart, by their indices there."""
    train_frequencies = frequencies(thumbs)
    for view in views:
        pairs = candidates(hashes(train_frequencies), hashes(view.frequencies))
        similar = correlated(train_frequencies, view.frequencies, pairs)
        pairs = Candidates(*(each[similar] for each in pairs))
        if max_candidates is not None and len(pairs.train) > max_candidates:
            raise UserError(f"{len(pairs.train):,} pairs of images look alike, which is too many to compare quickly.")
        distance = distances(thumbs, view.thumbs, pairs).astype(np.float64).round(4)
        for n in np.flatnonzero(distance <= limit).tolist():
            train, test, bits = (int(each[n]) for each in pairs)
            yield Pair(train, test, float(distance[n]), bits, view.is_mirrored)


def _read_thumbnails(
    dataset: Dataset, name: str, omitted: Omitted
) -> Iterator[tuple[Indices, UInt8[np.ndarray, "n S S"]]]:
    """Indices and thumbnails of images, at most MAX_THUMBNAILS at a time; `omitted` collects the other images."""

    def read(index: int) -> np.ndarray:
        try:
            return thumbnail(dataset.image(index))
        except ImageError as error:
            omitted.unreadable[index] = error.reason
            return np.zeros((SIDE, SIDE), np.uint8)

    # Pillow decodes and scales outside of Python's lock.
    with ThreadPoolExecutor(available_cores()) as pool, ProgressDisplay(f"reading {name}", len(dataset)) as display:
        for start in range(0, len(dataset), MAX_THUMBNAILS):
            stop = min(start + MAX_THUMBNAILS, len(dataset))
            thumbs = np.stack(list(pool.map(read, range(start, stop))))
            blank = thumbs.std(axis=(1, 2), dtype=np.float32) < MIN_STD  # also for unreadable images
            omitted.blank.extend(i for i in (start + np.flatnonzero(blank)).tolist() if i not in omitted.unreadable)
            display.update(stop)
            yield start + np.flatnonzero(~blank), thumbs[~blank]


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


def candidates(train: UInt64[np.ndarray, "2 N"], test: UInt64[np.ndarray, "2 M"]) -> Candidates:
    """Pairs of images with hashes that differ in at most RADIUS bits. Every pair is compared, in blocks that stay in
    the processor's cache."""
    blocks = [Candidates(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8))]
    for first_train in range(0, train.shape[1], 8192):
        train_block = train[:, first_train : first_train + 8192]
        for first_test in range(0, test.shape[1], 8):
            test_block = test[:, first_test : first_test + 8, None]
            bits = np.minimum.reduce([np.bitwise_count(test_block[a] ^ train_block[b]) for a, b in COMPARED])
            row, column = (bits <= RADIUS).nonzero()
            if len(row):
                blocks.append(Candidates(column + first_train, row + first_test, bits[row, column]))
    return Candidates(*map(np.concatenate, zip(*blocks, strict=True)))


def correlated(
    train: Float[np.ndarray, "2 N 64"], test: Float[np.ndarray, "2 M 64"], pairs: Candidates
) -> Bool[np.ndarray, " n"]:
    """Whether the lowest frequencies themselves correlate, not only their signs. Costs a hundredth of `distances`."""

    def normalized(values: np.ndarray) -> np.ndarray:
        lowest = values[:, :, :NUM_FREQUENCIES]
        return (lowest / np.maximum(np.linalg.norm(lowest, axis=2, keepdims=True), 1e-6)).astype(np.float32)

    train, test = normalized(train), normalized(test)
    similar = np.zeros(len(pairs.train), bool)
    for test_hash, train_hash in COMPARED:
        for start in range(0, len(similar), 65_536):
            part = slice(start, start + 65_536)
            a, b = test[test_hash][pairs.test[part]], train[train_hash][pairs.train[part]]
            similar[part] |= np.einsum("nf,nf->n", a, b) >= MIN_CORRELATION
    return similar


def distances(
    train: UInt8[np.ndarray, "N S S"], test: UInt8[np.ndarray, "M S S"], pairs: Candidates
) -> Float[np.ndarray, " n"]:
    """The distance of the thumbnails of each pair: 0 the same, 1.41 unrelated, 2 a negative.

    The training image is shifted and scaled along both axes until it fits the test image. Over the part that both show,
    both are normalized to mean 0 and std 1, and the distance is the root of their mean squared difference. It is
    infinite if a level of `PYRAMID` before the last ends the comparison.
    """
    result = np.full(len(pairs.train), np.inf, np.float32)
    for start in range(0, len(result), 2048):
        part = slice(start, start + 2048)
        a = torch.from_numpy(test[pairs.test[part]]).float()
        b = torch.from_numpy(train[pairs.train[part]]).float()
        remaining = torch.arange(start, start + len(a))
        distance = torch.empty(0)
        warp = torch.tensor([1.0, 0.0, 1.0, 0.0]).repeat(len(a), 1)
        for level in PYRAMID:
            if not len(remaining):
                break
            correlation, warp = _align(_shrink(a, level.side), _shrink(b, level.side), warp, level.steps)
            distance = (2 * (1 - correlation)).clamp(min=0).sqrt()
            close = distance <= level.max_distance
            a, b = a[close], b[close]
            remaining, warp, distance = remaining[close], warp[close], distance[close]
        result[remaining.numpy()] = distance.numpy()
    return result


def _shrink(x: Float[Tensor, "n S S"], side: int) -> Float[Tensor, "n side side"]:
    """At a lower resolution; at the same one a little smoother, which reduces the effect of compression."""
    if side < SIDE:
        return F.avg_pool2d(x, SIDE // side)
    kernel = torch.tensor([0.2, 0.6, 0.2])[None, None, :, None]
    padded = F.pad(x[:, None], (1, 1, 1, 1), mode="replicate")
    return F.conv2d(F.conv2d(padded, kernel), kernel.mT)[:, 0]


def _align(
    a: Float[Tensor, "n s s"], b: Float[Tensor, "n s s"], warp: Warp, steps: int
) -> tuple[Float[Tensor, " n"], Warp]:
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


def _fit(a: Float[Tensor, "n s s"], b: Float[Tensor, "n s s"], warp: Warp) -> tuple[Float[Tensor, " n"], Warp]:
    """The correlation of `a` with `b` under `warp`, where both are, and the change of `warp` that promises more.

    With b_w = `b` under `warp`, its derivatives b_y and b_x, and (y, x) a pixel's position in [-1, 1], to first order

        a = offset + gain * (b_w + change[0] y b_y + change[1] b_y + change[2] x b_x + change[3] b_x),

    a linear regression of `a` on six images. Pixels outside of `b` have no weight.
    """
    (b_w, b_y, b_x), weight = _warp(b, warp)
    position = _positions(a.shape[1])
    basis = torch.stack([b_w, torch.ones_like(a), b_y * position[:, None], b_y, b_x * position, b_x], dim=3)
    correlation, coefficients = _regress(a.flatten(1), basis.flatten(1, 2), weight.flatten(1))
    gain = coefficients[:, :1]
    change = torch.where(gain > 0.1, coefficients[:, 2:] / gain.clamp(min=0.1), 0)
    return correlation, change.clamp(-0.05, 0.05)


def _positions(side: int) -> Float[Tensor, " side"]:
    """The centers of pixels along a side, in [-1, 1]."""
    return (torch.arange(side) + 0.5) / (side / 2) - 1


def _warp(b: Float[Tensor, "n s s"], warp: Warp) -> tuple[list[Float[Tensor, "n s s"]], Float[Tensor, "n s s"]]:
    """Two results: `b` under `warp` with its derivatives along y and x; and 1 for the pixels inside of `b`, else 0."""
    side = b.shape[1]
    lookup, inside = [], []
    for axis in (0, 1):
        position = warp[:, 2 * axis, None] * _positions(side) + warp[:, 2 * axis + 1, None]
        inside.append((position.abs() <= 1).float())
        pixel = ((position + 1) * (side / 2) - 0.5).clamp(0, side - 1)
        lookup.append((1 - (pixel[:, :, None] - torch.arange(side)).abs()).clamp(min=0))  # linear interpolation
    rows, columns = lookup[0], lookup[1].mT
    images = (b, *torch.gradient(b, spacing=2 / side, dim=(1, 2)))
    return [rows @ image @ columns for image in images], inside[0][:, :, None] * inside[1][:, None, :]


def _regress(
    target: Float[Tensor, "n p"], basis: Float[Tensor, "n p 6"], weight: Float[Tensor, "n p"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, "n 6"]]:
    """The correlation of `target` with the first image of `basis`, and the coefficients of all six (weighted least
    squares, slightly damped). Changes `basis`: its first image gets mean 0."""
    area = weight.sum(1)
    target = target - ((weight * target).sum(1) / area)[:, None]
    basis[:, :, 0] -= ((weight * basis[:, :, 0]).sum(1) / area)[:, None]
    weighted = basis * weight[:, :, None]
    basis_products = weighted.mT @ basis
    target_products = (weighted.mT @ target[:, :, None])[:, :, 0]
    variances = (weight * target**2).sum(1) * basis_products[:, 0, 0]
    correlation = target_products[:, 0] / variances.clamp(min=1e-6).sqrt()
    damped = basis_products + torch.diag_embed(1e-3 * basis_products.diagonal(dim1=1, dim2=2) + 1e-3)
    return correlation, torch.linalg.solve(damped, target_products)
