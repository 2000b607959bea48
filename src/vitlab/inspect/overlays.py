"""Images under attention maps (Fig. 6, Fig. 14): as arrays, as files, and all maps of one image for the viewer."""

import io
import json
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from vitlab.inspect.capture import Capture

TINY = 64
"""Images whose longer side is at most this are enlarged without smoothing and encoded without loss."""
SIDE = 288
"""Longer side of an image under its maps in the viewer, in pixels."""
LEVELS = 32
"""Colors of a map in the viewer."""


def ramp(count: int) -> UInt8[np.ndarray, "count 3"]:
    """The colors of attention maps, from least (dark blue) to most (yellow)."""
    return (255 * matplotlib.colormaps["viridis"](np.linspace(0, 1, count))[:, :3]).round().astype(np.uint8)


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
    """The map's `levels`, smoothed over patches, in the colors of `ramp` with the lightness of the image."""
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
    canvas = Image.new("RGBA", (2 * width + gap, height))
    for image, start in ((left, 0), (right, width + gap)):
        corner = (start + (width - image.shape[1]) // 2, (height - image.shape[0]) // 2)
        canvas.paste(Image.fromarray(image), corner)
    return np.asarray(canvas)


def encoded(image: UInt8[np.ndarray, "H W C"]) -> bytes:
    """An RGB or RGBA image as a file: PNG up to TINY pixels, else WebP, a tenth of the size."""
    out = io.BytesIO()
    if max(image.shape[:2]) <= TINY:
        Image.fromarray(image).save(out, format="PNG", optimize=True)
    else:
        Image.fromarray(image).save(out, format="WEBP", quality=88)
    return out.getvalue()


def view(
    capture: Capture,
    index: int,
    name: str,
    image: UInt8[np.ndarray, "H W 3"],
    predictions: Sequence[tuple[str, float]],
    caption: str = "Input",
) -> dict[str, Any]:
    """The values of templates/viewer.html.j2 for one image of a capture.

    The maps are tiles of one PNG, the sprite, which static/viewer.js draws over the image; without the script the
    rollout is shown. image: as the model sees it. predictions: classes and probabilities, largest first; empty without
    a head.
    """
    maps = all_maps(capture, index)
    peaks = _peaks(maps, capture.image_distances[index])
    row, column, percent, _ = peaks[0]
    h, w = maps.shape[2:]
    static = overlay(fit(image, SIDE, enlarge=True), capture.rollout[index])
    return {
        "name": name,
        "caption": caption,
        "size": image.shape[:2],
        "predictions": predictions,
        "sprite": _sprite(maps),
        "grid": (h, w),
        "layers": json.dumps(capture.layers),
        "layer_count": maps.shape[0] - 1,
        "head_count": maps.shape[1] - 1,
        "peaks": json.dumps(peaks, separators=(",", ":")),
        "input": encoded(fit(image, SIDE)),
        "crisp": max(image.shape[:2]) <= TINY,
        "tokens": encoded(to_uint8(capture.components[index])),
        "static": encoded(static),
        "height": static.shape[0],
        "width": static.shape[1],
        "summary": f"Rollout: highest at patch row {row} of {h}, column {column} of {w}, with {percent} % of it.",
    }


def all_maps(capture: Capture, index: int) -> Float[np.ndarray, "R C h w"]:
    """All maps of an image as in the sprite: both rollouts in the first row, then a row for each layer with the mean
    over its heads, then each head."""
    layers, heads, h, w = capture.heads.shape[1:]
    maps = np.zeros((layers + 1, heads + 1, h, w), np.float32)
    maps[0, 0], maps[0, 1] = capture.rollout[index], capture.rollout_plain[index]
    maps[1:, 0], maps[1:, 1:] = capture.heads[index].mean(axis=1), capture.heads[index]
    return maps


def _peaks(maps: Float[np.ndarray, "R C h w"], distances: Float[np.ndarray, "L k"]) -> list[list[float | int]]:
    """Of each map: row and column of its highest patch, from 1, the share in percent, the mean distance in pixels."""
    pixels = np.pad(np.concatenate([distances.mean(axis=1, keepdims=True), distances], axis=1), ((1, 0), (0, 0)))
    flat = maps.reshape(pixels.size, -1)
    rows, columns = np.unravel_index(flat.argmax(axis=1), maps.shape[2:])
    peaks = zip(rows + 1, columns + 1, 100 * flat.max(axis=1), pixels.ravel(), strict=True)
    return [[int(row), int(column), round(float(p), 1), round(float(d), 1)] for row, column, p, d in peaks]


def _sprite(maps: Float[np.ndarray, "R C h w"]) -> bytes:
    """The `levels` of all maps, side by side, as a PNG of LEVELS colors."""
    steps = np.round((LEVELS - 1) * levels(maps)).astype(np.uint8)
    rows, columns, height, width = steps.shape
    image = Image.fromarray(steps.transpose(0, 2, 1, 3).reshape(rows * height, columns * width))
    image.putpalette(ramp(LEVELS).tobytes())
    out = io.BytesIO()
    image.save(out, format="PNG", optimize=True)
    return out.getvalue()
