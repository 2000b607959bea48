"""The viewer of one image: its attention maps, tokens and predictions, as values of templates/viewer.html.j2."""

import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from vitlab.inspection import figures
from vitlab.inspection.capture import Capture

SIDE = 288
"""Longer side of the canvas, in pixels."""
COLORS = 32
"""Number of colors of a map."""


def view(
    capture: Capture,
    index: int,
    name: str,
    image: UInt8[np.ndarray, "H W 3"],
    predictions: Sequence[tuple[str, float]],
    caption: str = "Input",
    labels: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The values of the template for one image of a capture.

    The maps are tiles of one PNG, the sprite, which static/viewer.js draws over the image. Its first row has the two
    rollouts, each further row a layer: the mean over its heads, then every head. `peaks` has an item for each tile, row
    by row. image: as the model sees it. labels: those that are set, by a model of several labels per image.
    """
    heads = capture.heads[index]
    layer_count, head_count, h, w = heads.shape
    maps = np.zeros((layer_count + 1, head_count + 1, h, w), np.float32)
    maps[0, 0], maps[0, 1] = capture.rollout[index], capture.rollout_plain[index]
    maps[1:, 0], maps[1:, 1:] = heads.mean(axis=1), heads
    height, width = figures.fit(image, SIDE, enlarge=True).shape[:2]
    return {
        "name": name,
        "caption": caption,
        "pixels": image.shape[:2],
        "predictions": predictions,
        "labels": labels,
        "sprite": _sprite(maps),
        "grid": (h, w),
        "layers": json.dumps(capture.layers),
        "layer_count": layer_count,
        "head_count": head_count,
        "peaks": json.dumps(_peaks(maps, capture.image_distances[index]), separators=(",", ":")),
        "input": figures.encode(figures.fit(image, SIDE)),
        "crisp": max(image.shape[:2]) <= figures.TINY,
        "tokens": figures.encode(figures.to_uint8(capture.components[index])),
        "height": height,
        "width": width,
    }


def _peaks(maps: Float[np.ndarray, "R C h w"], distances: Float[np.ndarray, "L k"]) -> list[list[float | int]]:
    """For each map: row and column of its highest patch, from 1, its share in percent, the mean distance in pixels."""
    pixels = np.zeros(maps.shape[:2], np.float32)  # rollouts have no distance
    pixels[1:, 0], pixels[1:, 1:] = distances.mean(axis=1), distances
    flat = maps.reshape(pixels.size, -1)
    rows, columns = np.unravel_index(flat.argmax(axis=1), maps.shape[2:])
    peaks = zip(rows + 1, columns + 1, 100 * flat.max(axis=1), pixels.ravel(), strict=True)
    return [[int(row), int(column), round(float(p), 1), round(float(d), 1)] for row, column, p, d in peaks]


def _sprite(maps: Float[np.ndarray, "R C h w"]) -> bytes:
    """All maps side by side, each scaled by itself (`scale_maps`), as a PNG of COLORS colors."""
    steps = np.round((COLORS - 1) * figures.scale_maps(maps)).astype(np.uint8)
    rows, columns, height, width = steps.shape
    image = Image.fromarray(steps.transpose(0, 2, 1, 3).reshape(rows * height, columns * width))
    image.putpalette(figures.colormap(COLORS).tobytes())
    image.save(out := io.BytesIO(), format="PNG", optimize=True)
    return out.getvalue()
