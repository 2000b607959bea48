"""RandAugment: what each operation does, and that none waits for the device."""

import itertools
import math

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as V

from vitlab.data.randaugment import randaugment
from vitlab.data.transforms import resize_area

rng = np.random.default_rng(0)
SMALL = rng.integers(0, 256, (12, 16, 16, 3)).astype(np.uint8)


def operation(number: int, sign: float, image: np.ndarray, magnitude: int = 10) -> np.ndarray:
    """One chosen operation of the 16 on one image: float [H, W, 3]."""
    images = torch.from_numpy(image[None]).permute(0, 3, 1, 2).float()
    u = np.array([[[(number + 0.5) / 16, sign, 0.5, 0.5]]])
    return randaugment(images, u, magnitude)[0].permute(1, 2, 0).numpy()


def test_randaugment_operations() -> None:
    image = rng.integers(0, 256, (224, 224, 3)).astype(np.uint8)
    x = image.astype(float)
    np.testing.assert_array_equal(operation(2, 0, image), 255 - x)
    np.testing.assert_array_equal(operation(4, 0, image), image & 0xF0)
    np.testing.assert_array_equal(operation(5, 0, image, 5), np.where(x < 128, x, 255 - x))
    np.testing.assert_array_equal(operation(5, 0, image, 15), x)  # Google's threshold 384: nothing happens
    np.testing.assert_array_equal(operation(6, 0, image, 5), np.where(x < 128, np.minimum(x + 55, 255), x))
    np.testing.assert_allclose(operation(9, 0, image, 5), x, atol=1)  # brightness by 1.8 * 0.5 + 0.1 = 1
    right = operation(13, 0, image)
    np.testing.assert_array_equal(right[:, 100:], x[:, :-100])
    assert (right[:, :100] == 128).all()
    np.testing.assert_array_equal(operation(13, 0.9, image)[:, :-100], x[:, 100:])
    cut = operation(15, 0, image) == 128
    assert cut[73:151, 73:151].all()
    assert cut[:70].mean() < 0.01


@pytest.mark.parametrize("magnitude", [5, 15, 30])
def test_operations_that_are_torchvisions(magnitude: int) -> None:
    """A pixel whose place is nearly halfway between two may be either."""
    image = rng.integers(0, 256, (48, 64, 3)).astype(np.uint8)
    planes, r = torch.from_numpy(image).permute(2, 0, 1), magnitude / 10
    pixel, shear = r * 64 / 224, math.degrees(math.atan(0.3 * r))
    for number, sign in itertools.product((3, 11, 12, 13, 14), (0.0, 0.9)):
        by = 1 if sign == 0 else -1
        turned = {"angle": 0.0, "translate": [0.0, 0.0], "scale": 1.0, "shear": [0.0, 0.0], "fill": [128.0]}
        turned |= {
            3: {"angle": -30 * r * by}, 11: {"shear": [shear * by, 0.0], "center": [0.0, 0.0]},
            12: {"shear": [0.0, shear * by], "center": [0.0, 0.0]}, 13: {"translate": [100 * pixel * by, 0.0]},
            14: {"translate": [0.0, 100 * pixel * by]},
        }[number]  # fmt: skip
        expected = V.affine(planes, **turned).permute(1, 2, 0)
        assert (operation(number, sign, image, magnitude) != expected.numpy()).mean() < 1e-3
    sharp = V.adjust_sharpness(planes, 1.8 * r + 0.1).permute(1, 2, 0)
    np.testing.assert_allclose(operation(10, 0, image, magnitude), sharp, atol=1)


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor made of a list, or copied from one, waits for all that a GPU has to do."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("numbers of this process are copied to the device")

    images = torch.from_numpy(SMALL).permute(0, 3, 1, 2).float().repeat(10, 1, 1, 1)
    draws = rng.random((120, 1, 4))
    draws[:32, 0, 0], draws[:32, 0, 1] = np.repeat(np.arange(16) / 16, 2), np.tile([0.0, 0.9], 16)  # each at least once
    for name in ("tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, refuse)
    randaugment(images, draws, 9)
    resize_area(images, (5, 7))


@pytest.mark.parametrize("magnitude", [0, 7, 30])
def test_randaugment_takes_every_magnitude(magnitude: int) -> None:
    images = torch.from_numpy(SMALL).permute(0, 3, 1, 2).float().repeat(10, 1, 1, 1)
    out = randaugment(images, rng.random((120, 3, 4)), magnitude)
    assert out.min() >= 0
    assert out.max() <= 255
    assert (out != images).any((1, 2, 3)).double().mean() > 0.5
