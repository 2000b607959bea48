"""Images under attention maps, and images encoded for a page: plain arrays without axes (Fig. 6, Fig. 14)."""

import io

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from vitlab.inspect.figures import ramp

TINY = 64
"""Images whose longer side is at most this are enlarged without smoothing and encoded without loss."""


def levels(maps: Float[np.ndarray, "*n h w"]) -> Float[np.ndarray, "*n h w"]:
    """Attention maps scaled to [0, 1], each by itself: its minimum is 0, its 95th percentile and above 1.

    Some models attend to a few background patches up to a hundred times more than to the rest; scaled to their maximum,
    a map would show nothing else. But 1 is at least a sixteenth of the maximum, so that a map with all its weight on
    one patch does not show rounding errors.
    """
    low, high = (edge(maps, axis=(-2, -1), keepdims=True) for edge in (np.min, np.max))
    top = np.maximum(np.quantile(maps, 0.95, axis=(-2, -1), keepdims=True) - low, (high - low) / 16)
    return ((maps - low) / np.maximum(top, 1e-12)).clip(0, 1)


def to_uint8(colors: Float[np.ndarray, "h w 3"]) -> UInt8[np.ndarray, "h w 3"]:
    return (255 * colors.clip(0, 1)).round().astype(np.uint8)


def masked(image: UInt8[np.ndarray, "H W 3"], attention: Float[np.ndarray, "h w"]) -> UInt8[np.ndarray, "H W 3"]:
    """The image multiplied by its attention: black at the minimum, unchanged at the maximum (Fig. 6)."""
    return (image * _resized(levels(attention), image.shape[:2])[..., None]).round().astype(np.uint8)


def overlay(image: UInt8[np.ndarray, "H W 3"], attention: Float[np.ndarray, "h w"]) -> UInt8[np.ndarray, "H W 3"]:
    """The image in the colors of its attention, from dark blue to yellow: the map's `levels`, smoothed over patches,
    with the lightness of the image."""
    level = _resized(levels(attention), image.shape[:2])
    heat = ramp(256)[(255 * level).round().astype(np.uint8)] / 255
    gray = np.asarray(Image.fromarray(image).convert("L"), dtype=float)[..., None] / 255
    return (255 * (heat * (0.45 + 0.55 * gray) + 0.25 * gray).clip(0, 1)).astype(np.uint8)


def _resized(level: Float[np.ndarray, "h w"], size: tuple[int, ...]) -> Float[np.ndarray, "H W"]:
    image = Image.fromarray(level.astype(np.float32))
    return np.asarray(image.resize((size[1], size[0]), Image.Resampling.BICUBIC)).clip(0, 1)


def fit(image: UInt8[np.ndarray, "H W 3"], side: int, enlarge: bool = False) -> UInt8[np.ndarray, "H2 W2 3"]:
    """The image resized to a longer side of `side`; a smaller image stays as it is without `enlarge`."""
    height, width = image.shape[:2]
    scale = side / max(height, width)
    if scale >= 1 and not enlarge:
        return image
    size = (max(round(width * scale), 1), max(round(height * scale), 1))
    resample = Image.Resampling.NEAREST if scale > 1 and max(height, width) <= TINY else Image.Resampling.LANCZOS
    return np.asarray(Image.fromarray(image).resize(size, resample))


def beside(
    left: UInt8[np.ndarray, "H W 3"], right: UInt8[np.ndarray, "h w 3"], gap: int
) -> UInt8[np.ndarray, "H2 W2 4"]:
    """Both images on one canvas, each centered in its half, on a transparent ground."""
    height, width = (max(image.shape[axis] for image in (left, right)) for axis in (0, 1))
    canvas = np.zeros((height, 2 * width + gap, 4), np.uint8)
    for image, start in ((left, 0), (right, width + gap)):
        y, x = (height - image.shape[0]) // 2, start + (width - image.shape[1]) // 2
        canvas[y : y + image.shape[0], x : x + image.shape[1]] = np.pad(
            image, ((0, 0), (0, 0), (0, 1)), constant_values=255
        )
    return canvas


def encoded(image: UInt8[np.ndarray, "H W C"]) -> bytes:
    """An RGB or RGBA image as a file: PNG up to TINY pixels, else WebP, a tenth of the size."""
    out = io.BytesIO()
    if max(image.shape[:2]) <= TINY:
        Image.fromarray(image).save(out, format="PNG", optimize=True)
    else:
        Image.fromarray(image).save(out, format="WEBP", quality=88)
    return out.getvalue()
