"""Boxes as TensorFlow draws them; crops of JPEGs as of decoded images; the fast resize close to the exact one."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitlab.data.crops import inception_boxes, resize_crops
from vitlab.data.decode import Jpeg, decode_image, plain_jpeg
from vitlab.data.transforms import TrainTransform

rng = np.random.default_rng(0)
PHOTOGRAPHS = Path(sklearn.__file__).parent / "datasets" / "images"
CROPS: dict[str, Any] = {
    "inception": {},
    "random": {"crop": "random", "resize": 72},
    "pad": {"crop": "pad"},
    "none": {"crop": "none"},
}


@pytest.fixture(scope="module")
def jpegs() -> list[Jpeg]:
    """Two photographs of 640 x 427: as they are; smaller and progressive; in coarser color; gray."""
    images = []
    for name in ("china.jpg", "flower.jpg"):
        data = (PHOTOGRAPHS / name).read_bytes()
        image = Image.open(io.BytesIO(data))
        images.append(plain_jpeg(data))
        for size, options in (((333, 250), {"progressive": True}), ((100, 61), {"subsampling": 2}), ((91, 300), {})):
            buffer = io.BytesIO()
            image.resize(size).convert("RGB" if options else "L").save(buffer, "JPEG", quality=90, **options)
            images.append(plain_jpeg(buffer.getvalue()))
    assert None not in images
    return images


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """Decibels, of values in [0, 255]."""
    return 10 * np.log10(255**2 / max(float(((a.float() - b.float()) ** 2).mean()), 1e-10))


def resized(image: np.ndarray, size: tuple[int, int], antialias: bool = True) -> torch.Tensor:
    planes = torch.from_numpy(image.astype(np.float32)).permute(2, 0, 1)[None]
    return F.interpolate(planes, size, mode="bilinear", antialias=antialias)


def one_crop(image: np.ndarray | Jpeg, box: list[int], size: tuple[int, int]) -> torch.Tensor:
    return resize_crops([image], np.array([box]), size, np.array([[0, 0]]), np.array([False]), size)


# ------------------------------------------------------------------------------------------- crops of JPEGs


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("fast", [False, True])
def test_a_jpeg_gives_the_crop_of_the_decoded_image(jpegs: list[Jpeg], crop: str, fast: bool) -> None:
    """To the bit: whichever rows of it are decoded. At this size nothing is decoded smaller."""
    transform = TrainTransform(64 if crop == "random" else 72, fast=fast, **CROPS[crop])
    whole, indices = [decode_image(image.data) for image in jpegs], np.arange(8)
    for epoch in range(3):
        assert torch.equal(transform.apply(jpegs, 1, epoch, indices), transform.apply(whole, 1, epoch, indices))


@pytest.mark.parametrize("crop", CROPS)
def test_fast_crops_that_grow_differ_by_rounding_alone(jpegs: list[Jpeg], crop: str) -> None:
    options = CROPS[crop] | ({"resize": 160} if crop == "random" else {})
    images, indices = jpegs[2::4] * 4, np.arange(8)  # of 100 x 61 pixels
    exact, fast = (TrainTransform((96, 144), fast=f, **options).augment(images, 1, 0, indices) for f in (False, True))
    assert fast.dtype == torch.uint8
    assert (exact - fast.float()).abs().max() <= 1.01
    assert psnr(exact, fast) > 55


def test_fast_crops_that_shrink_are_averaged(jpegs: list[Jpeg]) -> None:
    image = decode_image(jpegs[0].data)
    crop = one_crop(image, [20, 31, 300, 405], (200, 150))
    assert psnr(resized(image[20:320, 31:436], (200, 150)), crop) > 55
    assert psnr(resized(image[20:320, 31:436], (200, 150), antialias=False), crop) < 40  # what Google's code does


@pytest.mark.parametrize("size", [16, 32, 48])
def test_jpegs_decoded_smaller_stay_close(jpegs: list[Jpeg], size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are decoded at 1/2 to 1/8 of their size: 50 dB on average to the same resize of the whole image."""
    shrinks, rows = [], Jpeg.rows

    def watched(self: Jpeg, count: int, shrink: int = 1) -> np.ndarray:
        shrinks.append(shrink)
        return rows(self, count, shrink)

    images, whole = [jpegs[0], jpegs[4]] * 15, [decode_image(jpegs[0].data), decode_image(jpegs[4].data)] * 15
    monkeypatch.setattr(Jpeg, "rows", watched)
    ours, theirs = (TrainTransform(size, fast=True).augment(given, 0, 0, np.arange(30)) for given in (images, whole))
    decibels = [psnr(a, b) for a, b, shrink in zip(ours, theirs, shrinks, strict=True) if shrink > 1]
    assert len(decibels) > 5
    assert np.mean(decibels) > 50
    assert min(decibels) > 42


def test_an_image_decoded_smaller_has_no_padding(jpegs: list[Jpeg]) -> None:
    """427 rows are not a multiple of eight: the rows that a coder adds below the image are cut off."""
    crop = one_crop(jpegs[0], [0, 0, 427, 640], (16, 24))
    assert psnr(crop, one_crop(decode_image(jpegs[0].data), [0, 0, 427, 640], (16, 24))) > 45
    assert psnr(crop, resized(decode_image(jpegs[0].data)[:424], (16, 24))) > 45


@pytest.mark.parametrize("mirrored", [False, True])
def test_fast_windows_are_black_outside(mirrored: bool) -> None:
    image = rng.integers(1, 256, (8, 9, 3)).astype(np.uint8)
    for y, x in ((0, 0), (3, -2), (-8, 0), (8, 9), (-20, 1)):
        crop = resize_crops([image], np.array([[0, 0, 8, 9]]), (8, 9), np.array([[y, x]]), np.array([mirrored]), (8, 9))
        padded = np.pad(image, ((20, 20), (20, 20), (0, 0)))[20 + y :, 20 + x :][:8, :9]
        np.testing.assert_array_equal(crop[0].permute(1, 2, 0), padded[:, ::-1] if mirrored else padded)


# --------------------------------------------------------------------------------------- the Inception crop


@given(st.integers(1, 400), st.integers(1, 400), st.sampled_from([0.05, 0.3, 1.0]), st.integers(0, 2**32))
def test_inception_boxes_keep_their_bounds(height: int, width: int, min_area: float, seed: int) -> None:
    sizes = np.array([[height, width]] * 50)
    boxes = inception_boxes(sizes, np.random.default_rng(seed).random((50, 100, 4)), min_area)
    y, x, h, w = boxes.T
    assert ((y >= 0) & (x >= 0) & (h >= 1) & (w >= 1) & (y + h <= height) & (x + w <= width)).all()
    whole = (h == height) & (w == width)
    assert (whole | (h * w >= min_area * height * width)).all()
    assert (whole | (np.abs(w - h * 1.04) <= h * 0.29 + 1)).all()  # 0.75 to 1.33, and rounding


def test_inception_boxes_are_uniform_in_height() -> None:
    """Not in area, as torchvision's are: the mean height of a square image's crops differs."""
    sizes = np.full((20_000, 2), 1000)
    boxes = inception_boxes(sizes, np.random.default_rng(0).random((20_000, 100, 4)), 0.05)
    aspect = np.random.default_rng(1).uniform(0.75, 1.33, 1_000_000)
    low, high = np.sqrt(0.05e6 / aspect), np.minimum(np.sqrt(1e6 / aspect), np.minimum(1000, 1000 / aspect))
    assert boxes[:, 2].mean() == pytest.approx(((low + high) / 2).mean(), rel=0.01)
    assert (boxes[:, 0] + boxes[:, 2]).max() <= 1000


def test_impossible_boxes_become_the_whole_image() -> None:
    sizes = np.array([[1000, 3], [3, 1000], [50, 50]])  # 90 % of a thin strip is never near square
    boxes = inception_boxes(sizes, rng.random((3, 100, 4)), 0.9)
    np.testing.assert_array_equal(boxes[:2], [[0, 0, 1000, 3], [0, 0, 3, 1000]])
