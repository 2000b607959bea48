"""Images under attention, and images for a page: plain arrays, no axes (Fig. 6, Fig. 14)."""

import io

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from vitlab.inspect.figures import ramp

TINY = 64
"""Longer side of images whose every pixel is shown as it is."""


def levels(maps: Float[np.ndarray, "*n h w"]) -> Float[np.ndarray, "*n h w"]:
    """Maps of attention as they are shown, each for itself: its lowest value is 0, the 95th of a hundred and above 1.

    Some models gather notes in a few patches anywhere, on which up to a hundred times the attention of the rest lies;
    stretched to these, a map would show nothing else. But 1 stands for a sixteenth of the highest at least, so that a
    map with all its weight in one place does not show its rounding errors.
    """
    low, high = (edge(maps, axis=(-2, -1), keepdims=True) for edge in (np.min, np.max))
    top = np.maximum(np.quantile(maps, 0.95, axis=(-2, -1), keepdims=True) - low, (high - low) / 16)
    return ((maps - low) / np.maximum(top, 1e-12)).clip(0, 1)


def lit(image: UInt8[np.ndarray, "H W 3"], attention: Float[np.ndarray, "h w"]) -> UInt8[np.ndarray, "H W 3"]:
    """The image in the light of its attention: black where there is least, itself where there is most (Fig. 6)."""
    return (image * _stretched(levels(attention), image.shape[:2])[..., None]).round().astype(np.uint8)


def rollout(
    image: UInt8[np.ndarray, "H W 3"], attention: Float[np.ndarray, "h w"], side: int = 192
) -> UInt8[np.ndarray, "H2 W2 4"]:
    """The image, a clear gap, and the image under its attention (Fig. 6); `side` is the longer side of each."""
    left = fit(image, side, enlarge=True)
    right = overlay(left, attention)
    height, width = left.shape[:2]
    sheet = np.zeros((height, 2 * width + side // 24, 4), dtype=np.uint8)
    for start, part in ((0, left), (sheet.shape[1] - width, right)):
        sheet[:, start : start + width] = np.pad(part, ((0, 0), (0, 0), (0, 1)), constant_values=255)
    return sheet


def overlay(image: UInt8[np.ndarray, "H W 3"], attention: Float[np.ndarray, "h w"]) -> UInt8[np.ndarray, "H W 3"]:
    """The image in the colors of its attention: dark blue where there is least, yellow where there is most.

    The map's `levels`, smoothed over the patches; the lightness is the image's too.
    """
    level = _stretched(levels(attention), image.shape[:2])
    heat = ramp(256)[(255 * level).round().astype(np.uint8)] / 255
    gray = np.asarray(Image.fromarray(image).convert("L"), dtype=float)[..., None] / 255
    return (255 * (heat * (0.45 + 0.55 * gray) + 0.25 * gray).clip(0, 1)).astype(np.uint8)


def _stretched(level: Float[np.ndarray, "h w"], size: tuple[int, ...]) -> Float[np.ndarray, "H W"]:
    """Levels of patches, smoothly over a image of `size` (height, width), inside [0, 1]."""
    image = Image.fromarray(level.astype(np.float32))
    return np.asarray(image.resize((size[1], size[0]), Image.Resampling.BICUBIC)).clip(0, 1)


def fit(image: UInt8[np.ndarray, "H W 3"], side: int, enlarge: bool = False) -> UInt8[np.ndarray, "H2 W2 3"]:
    """The image with its longer side made `side`: smoothly, but one of up to 64 pixels is enlarged in plain blocks.

    Without `enlarge` a smaller image stays as it is.
    """
    height, width = image.shape[:2]
    scale = side / max(height, width)
    if scale >= 1 and not enlarge:
        return image
    size = (max(round(width * scale), 1), max(round(height * scale), 1))
    resample = Image.Resampling.NEAREST if scale > 1 and max(height, width) <= TINY else Image.Resampling.LANCZOS
    return np.asarray(Image.fromarray(image).resize(size, resample))


def encoded(image: UInt8[np.ndarray, "H W C"]) -> bytes:
    """An RGB or RGBA image as a file: pixel for pixel as PNG up to 64 pixels, else as WebP, a tenth of the size."""
    out = io.BytesIO()
    if max(image.shape[:2]) <= TINY:
        Image.fromarray(image).save(out, format="PNG")
    else:
        Image.fromarray(image).save(out, format="WEBP", quality=88)
    return out.getvalue()
