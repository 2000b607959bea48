"""Google's preprocessing as closely as float32 allows; augmentation as a function of the example."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms.v2 import RandAugment

from vitlab.data import crops, transforms
from vitlab.data.transforms import EvalTransform, TrainTransform, mixup, randaugment, resize_area, to_range
from vitlab.preprocessing import Preprocessing
from vitlab.rng import Stream, philox

rng = np.random.default_rng(0)
CROPS = ("inception", "random", "pad", "none")
SMALL = rng.integers(0, 256, (12, 16, 16, 3)).astype(np.uint8)


def train_transform(crop: str, size: int = 16, **options: object) -> TrainTransform:
    return TrainTransform(size, crop=crop, resize=size + 4 if crop == "random" else None, **options)  # pyright: ignore[reportArgumentType]


# ------------------------------------------------------------------------------------- parity with Google


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


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("flip", [False, True])
def test_training_crop_matches_vit_jax(
    golden: dict[str, np.ndarray], name: str, flip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if f"{name}/vit_jax train 224 box {'flip' if flip else 'noflip'}" not in golden:
        assert flip  # the fixture holds the mirrored answer for one image
        return
    box = json.loads(str(golden["meta"]))[name]["fixed_box_y_x_h_w"]
    monkeypatch.setattr(crops, "inception_boxes", lambda *_: np.array([box]))
    monkeypatch.setattr(transforms, "example_uniforms", lambda *_: np.full((1, 401), 0.0 if flip else 0.9))
    images = TrainTransform(224).apply([golden[f"{name}/decode"]], 0, 0, np.array([0]))
    close(images, golden[f"{name}/vit_jax train 224 box {'flip' if flip else 'noflip'}"])


def whole_area(images: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Area averaging as a product with the shares of each old pixel in each new one, between edges in float32."""

    def shares(extent: int, new: int) -> np.ndarray:
        scale = np.float32(extent / new)
        edges = np.minimum(np.arange(new + 1, dtype=np.float32) * scale, extent).astype(np.float64)
        least, most = (
            np.maximum.outer(edges[:-1], np.arange(extent)),
            np.minimum.outer(edges[1:], np.arange(extent) + 1),
        )
        overlap = np.maximum(most - least, 0) / float(scale)
        inside = np.ceil(edges[1:]) - np.floor(edges[:-1]) == 1  # within one pixel it is that pixel
        overlap[inside] = overlap[inside] > 0
        return overlap

    rows, columns = (torch.from_numpy(shares(old, new)) for old, new in zip(images.shape[2:], size, strict=True))
    return (rows @ images.double() @ columns.T).float()


@pytest.mark.parametrize("shape", [(24, 24), (37, 50), (91, 20), (8, 300), (256, 131)])
def test_the_center_is_that_of_the_whole_image(shape: tuple[int, int]) -> None:
    image = rng.integers(0, 256, (*shape, 3)).astype(np.uint8)
    planes = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    scale = 24 / min(shape)
    full = (round(shape[0] * scale), round(shape[1] * scale))
    y, x = (full[0] - 18) // 2, (full[1] - 22) // 2
    resized = resize_area(planes, full)
    np.testing.assert_allclose(resized, whole_area(planes, full), atol=1e-4)
    assert torch.equal(resize_area(planes, full, (y, x, 18, 22)), resized[:, :, y : y + 18, x : x + 22])
    expected = to_range(resized[:, :, y : y + 18, x : x + 22].floor())
    assert torch.equal(EvalTransform((18, 22), Preprocessing.google((18, 22), 24)).apply([image]), expected)


def test_value_range_matches_vit_jax(golden: dict[str, np.ndarray]) -> None:
    gray = torch.from_numpy(golden["value_range/in"].astype(np.float32)).permute(2, 0, 1)[None]
    np.testing.assert_array_equal(to_range(gray)[0].permute(1, 2, 0), golden["value_range/vit_jax"])


# -------------------------------------------------------------------------------------------- randomness


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("layers", [0, 2])
def test_an_example_does_not_depend_on_its_batch(crop: str, layers: int) -> None:
    transform = train_transform(crop, randaugment_layers=layers, randaugment_magnitude=15)
    indices, epochs = np.arange(12) + 5, np.repeat([0, 1], 6)
    whole = transform.apply(torch.from_numpy(SMALL), 3, epochs, indices)
    assert whole.shape == (12, 3, 16, 16)
    assert whole.dtype == torch.float32
    assert whole.abs().max() <= 1.00001
    for rows in ([4], [9, 2, 7], list(range(11, -1, -1))):
        part = transform.apply(torch.from_numpy(SMALL[rows]), 3, epochs[rows], indices[rows])
        np.testing.assert_array_equal(part, whole[rows])
    if not layers:
        np.testing.assert_allclose(transform.apply(list(SMALL), 3, epochs, indices), whole, atol=1e-3)


@pytest.mark.parametrize("magnitude", [0, 10, 30])
def test_randaugment_is_torchvisions_with_a_seed_for_each_example(magnitude: int) -> None:
    images = torch.from_numpy(SMALL).permute(0, 3, 1, 2).contiguous().float()
    state, epochs, indices = torch.get_rng_state(), np.repeat([0, 1], 6), np.tile([7, 8, 9], 4)
    changed = randaugment(images, 2, magnitude, 3, epochs, indices)
    assert torch.equal(torch.get_rng_state(), state)  # a resumed run draws from it
    assert torch.equal(images, torch.from_numpy(SMALL).permute(0, 3, 1, 2).float())
    with torch.random.fork_rng():
        torch.manual_seed(philox(3, Stream.RANDAUGMENT, 1, 8).random_raw())
        expected = RandAugment(2, magnitude, fill=128)(images[7].to(torch.uint8))
    assert torch.equal(changed[7], expected)
    same = randaugment(images[:1].expand(40, -1, -1, -1), 2, 10, 3, np.zeros(40, int), np.arange(40))
    assert len({image.numpy().tobytes() for image in same}) > 20


def test_images_of_many_sizes() -> None:
    images = [rng.integers(0, 256, (h, w, 3)).astype(np.uint8) for h, w in ((1, 1), (5, 40), (33, 8), (300, 200))]
    rectangular = (TrainTransform((8, 24)), TrainTransform((8, 24), crop="random", resize=(10, 30)))
    for transform in (*rectangular, *(train_transform(crop, 24) for crop in CROPS)):
        result = transform.apply(images, 0, 0, np.arange(4))
        assert result.shape == (4, 3, 8 if transform in rectangular else 24, 24)
        assert result.abs().max() <= 1.00001
    assert EvalTransform((8, 24)).apply(torch.from_numpy(SMALL)).shape == (12, 3, 8, 24)


# ------------------------------------------------------------------------------------------ other crops


def test_pad_shifts_and_brings_in_black() -> None:
    image = rng.integers(1, 256, (16, 16, 3)).astype(np.uint8)
    images = torch.from_numpy(np.repeat(image[None], 400, 0))
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
    windows = {
        (y, x, f): padded[y : y + 16, x : x + 16][:, :: -1 if f else 1]
        for y in range(9)
        for x in range(9)
        for f in (False, True)
    }
    seen = set()
    for crop in TrainTransform(16, crop="pad", pad=4).apply(images, 0, 0, np.arange(400)):
        pixels = (crop.permute(1, 2, 0) * 127.5 + 127.5).round().numpy()
        seen |= {key for key, window in windows.items() if np.array_equal(window, pixels)}
    assert len(seen) > 130  # of 162, all different: 400 draws see 92 % of them on average


def test_none_with_the_same_size_is_the_image() -> None:
    images = TrainTransform(16, crop="none", flip=False).apply(torch.from_numpy(SMALL), 0, 0, np.arange(12))
    np.testing.assert_allclose(images, EvalTransform(16).apply(torch.from_numpy(SMALL)), atol=1e-4)
    np.testing.assert_allclose(images.permute(0, 2, 3, 1) * 127.5 + 127.5, SMALL, atol=0.01)


def test_half_of_the_images_are_mirrored() -> None:
    image = torch.from_numpy(SMALL[:1]).expand(1000, -1, -1, -1)
    images = TrainTransform(16, crop="none").apply(image, 0, 0, np.arange(1000))
    upright = to_range(image[0].permute(2, 0, 1).float())
    mirrored = [bool((image - upright).abs().max() > 0.01) for image in images]
    assert 440 < sum(mirrored) < 560
    np.testing.assert_allclose(images[mirrored.index(True)].flip(2), upright, atol=1e-4)


def test_random_is_a_window_of_the_squashed_image() -> None:
    image = rng.integers(0, 256, (30, 50, 3)).astype(np.uint8)
    squashed = EvalTransform(20, Preprocessing.google()).apply([image])[0]
    images = TrainTransform(16, crop="random", resize=20, flip=False).apply([image] * 60, 0, 0, np.arange(60))
    windows = squashed.unfold(1, 16, 1).unfold(2, 16, 1).permute(1, 2, 0, 3, 4).reshape(25, 3, 16, 16)
    distance = (images[:, None] - windows[None]).abs().amax((2, 3, 4))
    assert (distance.min(1).values < 1e-4).all()
    assert len(distance.argmin(1).unique()) > 15


# --------------------------------------------------------------------------------------------------- mixup


def test_mixup() -> None:
    images, labels = torch.rand(4, 3, 8, 8), torch.eye(4)
    mixed, soft = mixup(images, labels, 0.2, np.random.default_rng(0))
    a = soft[0, 0].item()
    assert 0.5 <= a < 1
    np.testing.assert_allclose(soft, a * labels + (1 - a) * labels[[3, 0, 1, 2]], atol=1e-6)
    np.testing.assert_allclose(mixed, a * images + (1 - a) * images[[3, 0, 1, 2]], atol=1e-6)


# ------------------------------------------------------------------------------------------ wrong settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop": "random"}, "resize goes with crop='random'"),
        ({"crop": "pad", "resize": 40}, "resize goes with crop='random'"),
        ({"crop": "random", "resize": 31}, "resize=31 must be at least image_size=32"),
    ],
)
def test_invalid_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainTransform(32, **settings)
    with pytest.raises(ValueError, match="resize=200 must be at least image_size=224"):
        EvalTransform(224, Preprocessing(resize=200))


# ---------------------------------------------------------------------------------------------- antialiasing


def test_images_are_shrunk_with_antialiasing() -> None:
    """Stripes one pixel wide become gray; looked up at single points, they would stay stripes."""
    stripes = np.zeros((300, 240, 3), np.uint8)
    stripes[:, ::2] = 255
    assert EvalTransform(24).apply([stripes]).abs().max() < 0.05
    assert EvalTransform(24, Preprocessing(24, 30)).apply([stripes]).abs().max() < 0.05
    google = EvalTransform(48, Preprocessing.google()).apply([stripes])
    assert google.std() > 0.5


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"])
def test_the_center_is_that_of_pillows_resize(interpolation: Any) -> None:
    image = rng.integers(0, 256, (61, 90, 3)).astype(np.uint8)
    offsets: list[tuple[Any, int]] = [("round", 10), ("floor", 9)]
    for offset, x in offsets:  # 19 pixels are left over
        prepared = Preprocessing(40, 40, interpolation=interpolation, crop_offset=offset)
        full = Image.fromarray(image).resize((59, 40), Image.Resampling[interpolation.upper()])
        expected = to_range(torch.from_numpy(np.array(full)[:, x : x + 40]).permute(2, 0, 1).float())
        for images in ([image], torch.from_numpy(image[None])):
            assert torch.equal(EvalTransform(40, prepared).apply(images)[0], expected)


def test_another_size_keeps_the_proportion() -> None:
    image = rng.integers(0, 256, (64, 64, 3)).astype(np.uint8)
    assert torch.equal(
        EvalTransform(16, Preprocessing(32, 40)).apply([image]),
        EvalTransform(16, Preprocessing(16, 20)).apply([image]),
    )


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is created."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor):
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("google", [True, False])
@pytest.mark.parametrize("shape", [(1, 30_000), (30_000, 1)])
def test_of_a_strip_only_the_center_is_computed(
    shape: tuple[int, int], google: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resized to 64 pixels across, it would have 123 million."""
    strip = np.repeat(rng.integers(0, 256, 30_000).astype(np.uint8), 3).reshape(*shape, 3)
    resized: list[int] = []
    resize = Image.Image.resize

    def record(image: Image.Image, size: tuple[int, int], *options: Any) -> Image.Image:
        resized.append(size[0] * size[1])
        return resize(image, size, *options)

    monkeypatch.setattr(Image.Image, "resize", record)
    with Largest() as largest:
        preprocessing = Preprocessing.google(56, 64) if google else Preprocessing(56, 64)
        images = EvalTransform(56, preprocessing).apply([strip])
    assert largest.bytes < 1_000_000
    assert resized == ([] if google else [56 * 56])
    assert images.shape == (1, 3, 56, 56)
    values = ((images[0, 0] + 1) * 127.5).round()
    low, high = sorted(int(strip.reshape(-1, 3)[i, 0]) for i in (14_999, 15_000))
    assert low <= values.min()
    assert values.max() <= high
