"""Images under attention: where it is highest can be seen, and nothing else of the image is lost."""

import io

import numpy as np
import pytest
from PIL import Image

from vitlab.inspect import overlays
from vitlab.inspect.figures import ramp

RANDOM = np.random.default_rng(0)


def noise(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, (*shape, 3), dtype=np.uint8)


def test_levels_are_each_map_s_own_and_one_patch_does_not_hide_the_rest() -> None:
    level = np.linspace(0.2, 0.4, 100).reshape(10, 10)
    np.testing.assert_allclose(overlays.levels(level).ravel()[:95], np.linspace(0, 99 / 94.05, 100)[:95], rtol=1e-6)
    np.testing.assert_allclose(overlays.levels(np.stack([level, 9 * level]))[1], overlays.levels(level))
    spiked = level.copy()
    spiked[0, 0] = 2.0
    assert np.abs(overlays.levels(spiked) - overlays.levels(level)).ravel()[1:].max() < 0.02
    alone = np.full((10, 10), 1e-6) * level
    alone[3, 3] = 1.0
    shown = overlays.levels(alone)
    assert shown[3, 3] == 1
    assert np.delete(shown.ravel(), 33).max() < 1e-4, "rounding errors beside one patch with everything"
    assert (overlays.levels(np.full((2, 2), 0.25)) == 0).all()


def test_masked_is_black_without_attention_and_the_image_at_the_maximum() -> None:
    image = np.full((60, 60, 3), 200, dtype=np.uint8)
    attention = np.zeros((3, 3))
    attention[1, 1] = attention[1, 2] = 0.5
    shown = overlays.masked(image, attention)
    assert (shown[30, 50] == 200).all()
    assert (shown[5, 5] <= 2).all()
    assert (ramp(2) == [[68, 1, 84], [253, 231, 37]]).all()


def test_overlay_is_yellow_where_attention_is_highest_and_blue_where_lowest() -> None:
    attention = np.full((4, 4), 0.2)
    attention[0, 3], attention[3, 0] = 0.9, 0.1
    seen = overlays.overlay(np.full((64, 64, 3), 128, dtype=np.uint8), attention).astype(int)
    red, green, blue = seen[2, 61]
    assert min(red, green) > blue + 80
    red, green, blue = seen[61, 2]
    assert blue > max(red, green)


def test_overlay_of_even_attention_is_even() -> None:
    seen = overlays.overlay(np.full((8, 8, 3), 9, dtype=np.uint8), np.full((2, 2), 0.25))
    assert (seen == seen[0, 0]).all()


def test_beside_centers_both_images_with_a_transparent_gap() -> None:
    both = overlays.beside(noise(8, 6), np.full((4, 8, 3), 9, np.uint8), gap=2)
    assert both.shape == (8, 18, 4)
    assert (both[2:6, 10:] == [9, 9, 9, 255]).all()
    assert both[:2, 10:].any() == both[:, 8:10].any() == both[:, :1].any() == np.False_


def test_fit_makes_large_images_smaller_and_leaves_small_ones() -> None:
    large = RANDOM.integers(0, 256, (300, 200, 3), dtype=np.uint8)
    assert overlays.fit(large, 192).shape == (192, 128, 3)
    assert overlays.fit(large[:8, :8], 192) is not None
    assert (overlays.fit(large[:8, :8], 192) == large[:8, :8]).all()
    assert overlays.fit(large[:8, :8], 192, enlarge=True).shape == (192, 192, 3)
    assert overlays.fit(large[:1], 50).shape == (1, 50, 3)


@pytest.mark.parametrize("channels", [3, 4])
def test_a_small_image_is_kept_exactly_and_a_large_one_nearly(channels: int) -> None:
    small = RANDOM.integers(0, 256, (64, 7, channels), dtype=np.uint8)
    assert (np.asarray(Image.open(io.BytesIO(overlays.encoded(small)))) == small).all()
    large = np.zeros((160, 200, channels), dtype=np.uint8)
    large[..., 0], large[..., -1] = np.linspace(0, 255, 200), 255
    large[:, :50] = 0  # with four channels: a clear part
    data = overlays.encoded(large)
    assert len(data) < 4000
    found = np.asarray(Image.open(io.BytesIO(data))).astype(int)
    assert found.shape == large.shape
    assert np.abs(found - large)[:, 64:].max() < 16
