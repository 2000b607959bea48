"""One image for templates/viewer.html.j2 and static/viewer.js: its predictions and all its maps (Fig. 6, Fig. 14).

The maps are tiles of one small PNG, the sprite, which the script draws over the image. Without the script the rollout
is shown.
"""

import io
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from vitlab.inspect import overlays
from vitlab.inspect.capture import Capture
from vitlab.inspect.figures import ramp

SIDE = 288
"""Longer side of an image under its maps, in pixels."""
LEVELS = 32
"""Colors of a map."""
CELLS = 4_000_000
"""Most cells of all maps of a page, which take 3 MB at most; more are pooled."""


def view(
    capture: Capture,
    index: int,
    name: str,
    image: UInt8[np.ndarray, "H W 3"],
    predictions: Sequence[tuple[str, float]],
    *,
    pool: int = 1,
    caption: str = "Input",
) -> dict[str, Any]:
    """The values of the template for one image of a capture.

    image: as the model sees it. predictions: classes and probabilities, largest first; empty without a head. pool: from
    `pooling`.
    """
    maps = all_maps(capture, index)
    peaks = _peaks(maps, capture.image_distances[index])
    row, column, share, _ = peaks[0]
    grid, sprite_maps = maps.shape[2:], _average(maps, pool)
    static = overlays.overlay(overlays.fit(image, SIDE, enlarge=True), capture.rollout[index])
    summary = f"Rollout: highest at patch row {row} of {grid[0]}, column {column} of {grid[1]}, with {share} % of it."
    return {
        "name": name,
        "caption": caption,
        "size": image.shape[:2],
        "predictions": predictions,
        "sprite": _sprite(sprite_maps),
        "rows": sprite_maps.shape[2],
        "columns": sprite_maps.shape[3],
        "grid": grid,
        "layers": json.dumps(capture.layers),
        "layer_count": maps.shape[0] - 1,
        "head_count": maps.shape[1] - 1,
        "peaks": json.dumps(peaks, separators=(",", ":")),
        "input": overlays.encoded(overlays.fit(image, SIDE)),
        "crisp": max(image.shape[:2]) <= overlays.TINY,
        "tokens": overlays.encoded(overlays.to_uint8(capture.components[index])),
        "static": overlays.encoded(static),
        "height": static.shape[0],
        "width": static.shape[1],
        "summary": summary,
    }


def pooling(images: int, layers: int, heads: int, grid: tuple[int, int]) -> int:
    """The smallest p for which the maps of all images, averaged over p x p patches, have at most CELLS cells."""
    maps = images * (layers + 1) * (heads + 1)
    sizes = range(1, max(grid) + 1)
    return next((p for p in sizes if maps * math.prod(-(-side // p) for side in grid) <= CELLS), max(grid))


def all_maps(capture: Capture, index: int) -> Float[np.ndarray, "R C h w"]:
    """All maps of an image as in the sprite: both rollouts in the first row, then a row for each layer with the mean
    over its heads, then each head."""
    layers, heads, h, w = capture.heads.shape[1:]
    maps = np.zeros((layers + 1, heads + 1, h, w), np.float32)
    maps[0, 0], maps[0, 1] = capture.rollout[index], capture.rollout_plain[index]
    maps[1:, 0], maps[1:, 1:] = capture.heads[index].mean(axis=1), capture.heads[index]
    return maps


def _peaks(
    maps: Float[np.ndarray, "R C h w"], distances: Float[np.ndarray, "L k"]
) -> list[tuple[int, int, float, float]]:
    """Of each map: row and column of its highest patch, from 1, the share in percent, the mean distance in pixels."""
    pixels = np.zeros(maps.shape[:2])
    pixels[1:, 0], pixels[1:, 1:] = distances.mean(axis=1), distances
    peaks: list[tuple[int, int, float, float]] = []
    for attention, distance in zip(maps.reshape(-1, *maps.shape[2:]), pixels.ravel(), strict=True):
        row, column = divmod(int(attention.argmax()), attention.shape[1])
        peaks.append((row + 1, column + 1, round(100 * float(attention.max()), 1), round(float(distance), 1)))
    return peaks


def _average(maps: Float[np.ndarray, "R C h w"], p: int) -> Float[np.ndarray, "R C h2 w2"]:
    """Means over p x p patches; over fewer at the right and bottom where p does not divide the grid."""
    for axis in (2, 3):
        starts = np.arange(0, maps.shape[axis], p)
        counts = np.diff([*starts, maps.shape[axis]])
        shape = [-1 if i == axis else 1 for i in range(4)]
        maps = np.add.reduceat(maps, starts, axis=axis) / counts.reshape(shape).astype(np.float32)
    return maps


def _sprite(maps: Float[np.ndarray, "R C h w"]) -> bytes:
    """The `overlays.levels` of all maps, side by side, as a PNG of LEVELS colors."""
    levels = np.round((LEVELS - 1) * overlays.levels(maps)).astype(np.uint8)
    rows, columns, height, width = levels.shape
    image = Image.fromarray(levels.transpose(0, 2, 1, 3).reshape(rows * height, columns * width))
    image.putpalette(ramp(LEVELS).tobytes())
    out = io.BytesIO()
    image.save(out, format="PNG", optimize=True)
    return out.getvalue()
