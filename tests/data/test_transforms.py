"""Google's preprocessing as closely as float32 allows; augmentation as a function of the example; crops of JPEGs."""

import io
import itertools
import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import encode
from PIL import Image
from torchvision.transforms.v2 import RandAugment

from vitlab.data import transforms
from vitlab.data.decode import Jpeg, decode_image, plain_jpeg
from vitlab.data.transforms import (
    EvalTransform,
    TrainTransform,
    inception_boxes,
    mixup,
    randaugment,
    resize_crops,
    to_pixels,
    to_range,
)
from vitlab.preprocessing import Preprocessing
from vitlab.rng import Stream, philox

rng = np.random.default_rng(0)
CROPS = ("inception", "random", "pad", "none")
SMALL = rng.integers(0, 256, (12, 16, 16, 3)).astype(np.uint8)


def train_transform(crop: str, size: int = 16, **options: object) -> TrainTransform:
    crop_resize = size + 4 if crop == "random" else None
    return TrainTransform(size, crop=crop, crop_resize=crop_resize, **options)  # pyright: ignore[reportArgumentType]


def augment(transform: TrainTransform, *args: Any) -> torch.Tensor:
    """What the loader gives: augmented images in [-1, 1]."""
    return to_range(transform.augment(*args))


@pytest.fixture(scope="module")
def golden(shared: Path) -> dict[str, np.ndarray]:
    with np.load(shared / "golden" / "preprocess.npz") as file:
        return dict(file)


IMAGES = ("china_jpg", "synth_png", "cifar_like_png")


def close(ours: torch.Tensor, theirs: np.ndarray, *, off: float = 0.0) -> None:
    """Equal to float32's rounding; a share `off` of the values may differ by one gray level, where both truncate."""
    error = np.abs(ours[0].permute(1, 2, 0).numpy() - theirs)
    assert (error > 2e-4).mean() <= off
    assert error.max() <= (1.001 / 127.5 if off else 2e-4)


@pytest.mark.parametrize("name", IMAGES)
def test_evaluation_matches_vit_jax(golden: dict[str, np.ndarray], name: str) -> None:
    size = 224 if name == "china_jpg" else 384
    image = golden[f"{name}/decode"]
    for given_as in ([image], torch.from_numpy(image[None])):
        close(EvalTransform(size, Preprocessing.google()).apply(given_as), golden[f"{name}/vit_jax test {size}"])


@pytest.mark.parametrize(("name", "off"), [("china_jpg", 1e-3), ("synth_png", 0.05), ("cifar_like_png", 1e-3)])
def test_evaluation_matches_big_vision(golden: dict[str, np.ndarray], name: str, off: float) -> None:
    """synth_png has flat areas, whose whole-number means TensorFlow's float32 sums put on either side."""
    image = golden[f"{name}/decode"]
    smaller = EvalTransform(224, Preprocessing.google(224, 256)).apply([image])
    close(smaller, golden[f"{name}/eval: resize_small(256)|central_crop(224)|value_range(-1,1)"], off=off)
    fewshot = Preprocessing(224, 256, keep_aspect=False, antialias=False, crop_offset="floor")
    squashed = EvalTransform(224, fewshot).apply([image])
    close(squashed, golden[f"{name}/fewshot: resize(256)|central_crop(224)|value_range(-1,1)"], off=off)


def test_training_crops_match_vit_jax(golden: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {key: crop for key, crop in golden.items() if "/vit_jax train 224 box" in key}
    assert len(expected) == 5  # of three images, and of two mirrored
    for key, crop in expected.items():
        name = key.partition("/")[0]
        box = json.loads(str(golden["meta"]))[name]["fixed_box_y_x_h_w"]
        draw = 0.9 if key.endswith("noflip") else 0.0
        monkeypatch.setattr(transforms, "inception_boxes", lambda *_, box=box: np.array([box]))
        monkeypatch.setattr(transforms, "example_uniforms", lambda *_, draw=draw: np.full((1, 401), draw))
        close(augment(TrainTransform(224), [golden[f"{name}/decode"]], 0, 0, np.array([0])), crop)


def test_value_range_matches_vit_jax(golden: dict[str, np.ndarray]) -> None:
    gray = torch.from_numpy(golden["value_range/in"].astype(np.float32)).permute(2, 0, 1)[None]
    np.testing.assert_array_equal(to_range(gray)[0].permute(1, 2, 0), golden["value_range/vit_jax"])


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("layers", [0, 2])
def test_an_example_does_not_depend_on_its_batch(crop: str, layers: int) -> None:
    transform = train_transform(crop, randaugment_layers=layers, randaugment_magnitude=15)
    indices, epochs = np.arange(12) + 5, np.repeat([0, 1], 6)
    whole = augment(transform, torch.from_numpy(SMALL), 3, epochs, indices)
    assert (whole.shape, whole.dtype) == ((12, 3, 16, 16), torch.float32)
    assert whole.abs().max() <= 1.00001
    for rows in ([4], [9, 2, 7], list(range(11, -1, -1))):
        part = augment(transform, torch.from_numpy(SMALL[rows]), 3, epochs[rows], indices[rows])
        np.testing.assert_array_equal(part, whole[rows])
    if not layers:
        np.testing.assert_allclose(augment(transform, list(SMALL), 3, epochs, indices), whole, atol=1e-3)


def test_randaugment_is_torchvisions_with_a_seed_for_each_example() -> None:
    images = torch.from_numpy(SMALL).permute(0, 3, 1, 2).contiguous().float()
    state, epochs, indices = torch.get_rng_state(), np.repeat([0, 1], 6), np.tile([7, 8, 9], 4)
    changed = randaugment(images, 2, 10, 3, epochs, indices)
    assert torch.equal(torch.get_rng_state(), state)  # a resumed run draws from it
    assert torch.equal(images, torch.from_numpy(SMALL).permute(0, 3, 1, 2).float())
    with torch.random.fork_rng():
        torch.manual_seed(philox(3, Stream.RANDAUGMENT, 1, 8).random_raw())
        expected = RandAugment(2, 10, fill=128)(images[7].to(torch.uint8))
    assert torch.equal(changed[7], expected)
    same = randaugment(images[:1].expand(40, -1, -1, -1), 2, 10, 3, np.zeros(40, int), np.arange(40))
    assert len({image.numpy().tobytes() for image in same}) > 20


def test_images_of_many_sizes() -> None:
    images = [rng.integers(0, 256, (h, w, 3)).astype(np.uint8) for h, w in ((1, 1), (5, 40), (33, 8), (300, 200))]
    rectangular = (TrainTransform((8, 24)), TrainTransform((8, 24), crop="random", crop_resize=(10, 30)))
    for transform in (*rectangular, *(train_transform(crop, 24) for crop in CROPS)):
        result = augment(transform, images, 0, 0, np.arange(4))
        assert result.shape == (4, 3, 8 if transform in rectangular else 24, 24)
        assert result.abs().max() <= 1.00001
    with pytest.raises(ValueError, match="crop_resize=31"):
        TrainTransform(32, crop="random", crop_resize=31)


def test_pad_shifts_mirrors_and_brings_in_black() -> None:
    image = rng.integers(1, 256, (16, 16, 3)).astype(np.uint8)
    images = torch.from_numpy(np.repeat(image[None], 400, 0))
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
    places = itertools.product(range(9), range(9), (1, -1))
    windows = {padded[y : y + 16, x : x + 16][:, ::step].tobytes(): step for y, x, step in places}
    crops = to_pixels(augment(TrainTransform(16, crop="pad", pad=4), images, 0, 0, np.arange(400)))
    steps = [windows[crop.tobytes()] for crop in crops]
    assert len({crop.tobytes() for crop in crops}) > 130  # of 162: 400 draws see 92% of them on average
    assert 150 < steps.count(-1) < 250


def test_random_is_a_window_of_the_squashed_image() -> None:
    image = rng.integers(0, 256, (30, 50, 3)).astype(np.uint8)
    squashed = EvalTransform(20, Preprocessing.google()).apply([image])[0]
    images = augment(TrainTransform(16, crop="random", crop_resize=20, flip=False), [image] * 60, 0, 0, np.arange(60))
    windows = squashed.unfold(1, 16, 1).unfold(2, 16, 1).permute(1, 2, 0, 3, 4).reshape(25, 3, 16, 16)
    distance = (images[:, None] - windows[None]).abs().amax((2, 3, 4))
    assert (distance.min(1).values < 1e-4).all()
    assert len(distance.argmin(1).unique()) > 15


def test_mixup() -> None:
    images, labels = torch.rand(4, 3, 8, 8), torch.eye(4)
    mixed, soft = mixup(images, labels, 0.2, np.random.default_rng(0))
    a = soft[0, 0].item()
    assert 0.5 <= a < 1
    np.testing.assert_allclose(soft, a * labels + (1 - a) * labels[[3, 0, 1, 2]], atol=1e-6)
    np.testing.assert_allclose(mixed, a * images + (1 - a) * images[[3, 0, 1, 2]], atol=1e-6)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"])
def test_the_center_is_that_of_pillows_resize(interpolation: Any) -> None:
    image = rng.integers(0, 256, (61, 90, 3)).astype(np.uint8)
    full = np.array(Image.fromarray(image).resize((59, 40), Image.Resampling[interpolation.upper()]))
    offsets: list[tuple[Any, int]] = [("round", 10), ("floor", 9)]
    for offset, x in offsets:  # 19 pixels are left over
        prepared = Preprocessing(40, 40, interpolation=interpolation, crop_offset=offset)
        expected = to_range(torch.from_numpy(full[:, x : x + 40]).permute(2, 0, 1).float())
        for images in ([image], torch.from_numpy(image[None])):
            assert torch.equal(EvalTransform(40, prepared).apply(images)[0], expected)


@pytest.mark.parametrize("google", [True, False])
@pytest.mark.parametrize("shape", [(1, 30_000), (30_000, 1)])
def test_of_a_strip_only_the_center_is_computed(shape: tuple[int, int], google: bool) -> None:
    """Resized to 64 pixels across, it would have 123 million, or 4 GB in the sums of area averaging."""
    strip = np.repeat(rng.integers(0, 256, 30_000).astype(np.uint8), 3).reshape(*shape, 3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    preprocessing = Preprocessing.google(56, 64) if google else Preprocessing(56, 64)
    images = EvalTransform(56, preprocessing).apply([strip])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes
    assert images.shape == (1, 3, 56, 56)
    values = ((images[0, 0] + 1) * 127.5).round()
    low, high = sorted(int(strip.reshape(-1, 3)[i, 0]) for i in (14_999, 15_000))
    assert low <= values.min() <= values.max() <= high


PHOTOGRAPHS = Path(sklearn.__file__).parent / "datasets" / "images"


@pytest.fixture(scope="module")
def jpegs() -> list[Jpeg]:
    """Two photographs of 640 x 427: as they are; smaller and progressive; in coarser color; gray."""
    images = []
    for name in ("china.jpg", "flower.jpg"):
        data = (PHOTOGRAPHS / name).read_bytes()
        image = Image.open(io.BytesIO(data))
        images.append(plain_jpeg(data))
        for size, options in (((333, 250), {"progressive": True}), ((100, 61), {"subsampling": 2}), ((91, 300), {})):
            small = image.resize(size).convert("RGB" if options else "L")
            images.append(plain_jpeg(encode(small, "JPEG", quality=90, **options)))
    assert None not in images
    return images


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("fast", [False, True])
def test_a_jpeg_gives_the_crop_of_the_decoded_image(jpegs: list[Jpeg], crop: str, fast: bool) -> None:
    """To the bit: whichever rows of it are decoded. At this size nothing is decoded smaller."""
    transform = train_transform(crop, 72, fast_decode=fast)
    whole, indices = [decode_image(image.data) for image in jpegs], np.arange(8)
    for epoch in range(3):
        assert torch.equal(augment(transform, jpegs, 1, epoch, indices), augment(transform, whole, 1, epoch, indices))


@pytest.mark.parametrize("size", [16, 48])
def test_jpegs_decoded_smaller_stay_close(jpegs: list[Jpeg], size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are decoded at 1/2 to 1/8 of their size: 50 dB on average to the same resize of the whole image."""
    shrinks, rows = [], Jpeg.rows

    def watched(self: Jpeg, count: int, shrink: int = 1) -> np.ndarray:
        shrinks.append(shrink)
        return rows(self, count, shrink)

    images, whole = [jpegs[0], jpegs[4]] * 15, [decode_image(jpegs[0].data), decode_image(jpegs[4].data)] * 15
    monkeypatch.setattr(Jpeg, "rows", watched)
    transform = TrainTransform(size, fast_decode=True)
    ours, theirs = (transform.augment(given, 0, 0, np.arange(30)).float() for given in (images, whole))
    errors = ((ours - theirs) ** 2).mean((1, 2, 3))[torch.tensor(shrinks) > 1]
    decibels = 10 * (255**2 / errors.clip(1e-10)).log10()
    assert len(decibels) > 5
    assert decibels.mean() > 50
    assert decibels.min() > 42


@pytest.mark.parametrize("mirrored", [False, True])
def test_fast_windows_are_black_outside(mirrored: bool) -> None:
    image = rng.integers(1, 256, (8, 9, 3)).astype(np.uint8)
    for y, x in ((0, 0), (3, -2), (-8, 0), (8, 9), (-20, 1)):
        crop = resize_crops([image], np.array([[0, 0, 8, 9]]), (8, 9), np.array([[y, x]]), np.array([mirrored]), (8, 9))
        padded = np.pad(image, ((20, 20), (20, 20), (0, 0)))[20 + y :, 20 + x :][:8, :9]
        np.testing.assert_array_equal(crop[0].permute(1, 2, 0), padded[:, ::-1] if mirrored else padded)


@settings(max_examples=30)
@given(st.integers(1, 400), st.integers(1, 400), st.sampled_from([0.05, 0.3, 1.0]), st.integers(0, 2**32))
def test_inception_boxes_keep_their_bounds(height: int, width: int, min_area: float, seed: int) -> None:
    sizes = np.array([[height, width]] * 20)
    boxes = inception_boxes(sizes, np.random.default_rng(seed).random((20, 100, 4)), min_area)
    y, x, h, w = boxes.T
    assert ((y >= 0) & (x >= 0) & (h >= 1) & (w >= 1) & (y + h <= height) & (x + w <= width)).all()
    whole = (h == height) & (w == width)
    assert (whole | (h * w >= min_area * height * width)).all()
    assert (whole | (np.abs(w - h * 1.04) <= h * 0.29 + 1)).all()  # 0.75 to 1.33, and rounding


def test_inception_boxes_are_uniform_in_height() -> None:
    """Not in area, as torchvision's are: the mean height of a square image's crops differs."""
    boxes = inception_boxes(np.full((20_000, 2), 1000), np.random.default_rng(0).random((20_000, 100, 4)), 0.05)
    aspect = np.random.default_rng(1).uniform(0.75, 1.33, 1_000_000)
    low, high = np.sqrt(0.05e6 / aspect), np.minimum(np.sqrt(1e6 / aspect), np.minimum(1000, 1000 / aspect))
    assert boxes[:, 2].mean() == pytest.approx(((low + high) / 2).mean(), rel=0.01)
