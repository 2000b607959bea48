"""Crops of images: which box of an image, and how it becomes a crop of a given size.

A crop is a row of sampling positions for each axis and one bilinear look-up; or, faster and for images from files
only, a resized box. Of a JPEG only the rows that a crop needs are decoded.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64, UInt8
from torch import Tensor

from vitlab.data.decode import Jpeg

Images = UInt8[Tensor, "B H W 3"] | Sequence[np.ndarray | Jpeg]  # in memory, all of one size; or a list, of any sizes
Size = int | tuple[int, int]  # pixels; (H, W) unless square

ASPECT = (0.75, 1.33)  # width / height of the Inception crop: TensorFlow's default range
SPARE = 3  # A JPEG is decoded at half its size only where the crop then still has this many times the pixels it needs.
_OUTSIDE = -2.0  # a sampling position whose two neighbors lie outside any image: black


def inception_boxes(
    sizes: Int64[np.ndarray, "B 2"], u: Float64[np.ndarray, "B A 4"], min_area: float
) -> Int64[np.ndarray, "B 4"]:
    """Random boxes (y, x, h, w), as TensorFlow's `sample_distorted_bounding_box` draws them in up to A attempts.

    sizes: heights and widths; u: uniform numbers. For an aspect ratio drawn from `ASPECT`, the height is uniform over
    all that give an area in [min_area, 1] inside the image. An example whose every attempt breaks the bounds by
    rounding gets its whole image. As in TensorFlow, the last row and column of offsets is not drawn.
    """
    boxes = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
    left = np.arange(len(sizes))
    for attempt in range(u.shape[1]):
        size, draw = sizes[left], u[left, attempt]
        (height, width), area = size.T, size.prod(axis=1)
        aspect = ASPECT[0] + draw[:, 0] * (ASPECT[1] - ASPECT[0])
        low = np.rint(np.sqrt(min_area * area / aspect))
        high = np.rint(np.sqrt(area / aspect))
        high = np.where(np.rint(high * aspect) > width, np.floor((width + 0.5 - 1e-7) / aspect), high)
        high = np.minimum(np.where(np.rint(high * aspect) > width, high - 1, high), height)
        h = low + integers(draw[:, 1], np.maximum(high - low, 0) + 1)
        h = np.minimum(h, high)
        h = np.where(h * np.rint(h * aspect) < min_area * area, h + 1, h)
        h = np.where(h * np.rint(h * aspect) > area, h - 1, h)
        w = np.rint(h * aspect)
        good = (h * w >= min_area * area) & (h * w <= area) & (w <= width) & (h <= height) & (h > 0) & (w > 0)
        y, x = integers(draw[:, 2], height - h), integers(draw[:, 3], width - w)
        boxes[left[good]] = np.stack([y, x, h, w], axis=1)[good]
        left = left[~good]
        if not len(left):
            break
    return boxes


def integers(u: np.ndarray, count: np.ndarray | int) -> np.ndarray:
    """Uniform integers 0..count-1 (0 where count < 1) from uniform numbers in [0, 1)."""
    return np.floor(u * np.maximum(count, 1)).astype(np.int64)


def positions(
    start: np.ndarray, extent: np.ndarray, full: int, shift: np.ndarray, size: int
) -> Float64[np.ndarray, "B size"]:
    """TF2's half-pixel centers where `extent` pixels from `start` on become `full`: `size` of them from `shift` on."""
    start, extent, resized = start[:, None], extent[:, None], shift[:, None] + np.arange(size)
    inside = np.clip(start + (resized + 0.5) * extent / full - 0.5, start, start + extent - 1)
    return np.where((resized >= 0) & (resized < full), inside, _OUTSIDE)


def sample(images: Images, ys: np.ndarray, xs: np.ndarray) -> Float[Tensor, "B 3 S T"]:
    """Images at positions ys [B, S] x xs [B, T] (pixels), interpolated bilinearly: float32 in [0, 255]."""
    if isinstance(images, Tensor):
        return _lookup(planar(images), ys, xs)
    crops = torch.empty(len(images), 3, ys.shape[1], xs.shape[1])
    for crop, image, y, x in zip(crops, images, ys, xs, strict=True):
        # Only what the positions touch is decoded and converted: a crop of a photograph is a small part of it.
        top, left = max(int(y.min()), 0), max(int(x.min()), 0)
        part = _part(image, (top, int(np.ceil(y.max())) + 1), (left, int(np.ceil(x.max())) + 1))
        crop.copy_(_lookup(planar(torch.from_numpy(part)[None]), y[None] - top, x[None] - left)[0])
    return crops


def resize_crops(
    images: Sequence[np.ndarray | Jpeg],
    boxes: Int64[np.ndarray, "B 4"],
    full: tuple[int, int],
    shifts: Int64[np.ndarray, "B 2"],
    mirrored: np.ndarray,
    size: tuple[int, int],
) -> UInt8[Tensor, "B 3 S T"]:
    """Boxes (y, x, h, w) squashed to `full`, and of that the windows of `size` from `shifts` on.

    Deviation: bilinear with antialiasing, as Pillow and torchvision resize; TF2's resize looks up single points. A box
    that at 1/2, 1/4 or 1/8 of the image's size is still `SPARE` times `full` has its edges rounded to that grid, so
    that a JPEG is decoded at that size.
    """
    crops = torch.zeros(len(images), 3, *size, dtype=torch.uint8)
    for crop, image, box, shift, mirror in zip(crops, images, boxes.tolist(), shifts.tolist(), mirrored, strict=True):
        shrink = next(s for s in (8, 4, 2, 1) if s == 1 or min(box[2] / full[0], box[3] / full[1]) >= s * SPARE)
        rows, columns = (
            (round(box[i] / shrink), min(round((box[i] + box[2 + i]) / shrink), image.shape[i] // shrink))
            for i in (0, 1)
        )
        part = torch.from_numpy(np.ascontiguousarray(_part(image, rows, columns, shrink)))
        resized = F.interpolate(part.permute(2, 0, 1)[None], full, mode="bilinear", antialias=True)[0]
        (y, down), (x, right) = ((max(s, 0), max(s, 0, min(s + size[i], full[i]))) for i, s in enumerate(shift))
        crop[:, y - shift[0] : down - shift[0], x - shift[1] : right - shift[1]] = resized[:, y:down, x:right]
        if mirror:
            crop.copy_(crop.flip(2))
    return crops


def _part(
    image: np.ndarray | Jpeg, rows: tuple[int, int], columns: tuple[int, int], shrink: int = 1
) -> UInt8[np.ndarray, "h w 3"]:
    """Rows and columns of an image, from .. to, counted at 1 / `shrink` of its size; of a JPEG at that size."""
    (top, bottom), (left, right) = rows, columns
    if isinstance(image, Jpeg):
        return image.rows(bottom * shrink, shrink)[top:bottom, left:right]
    return image[top * shrink : bottom * shrink, left * shrink : right * shrink]


def _lookup(images: Float[Tensor, "B 3 H W"], ys: np.ndarray, xs: np.ndarray) -> Float[Tensor, "B 3 S T"]:
    y, x = (
        to_device(((2 * positions + 1) / side - 1).astype(np.float32), images.device)
        for positions, side in zip((ys, xs), images.shape[2:], strict=True)
    )
    grid = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), dim=-1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def planar(images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B 3 H W"]:
    """The same values as float32, channels first."""
    return images.permute(0, 3, 1, 2).contiguous().float()


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on `device`, without waiting for the work there."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def pair(size: Size) -> tuple[int, int]:
    """(H, W) of a size."""
    return (size, size) if isinstance(size, int) else size


def sizes(images: Images) -> Int64[np.ndarray, "B 2"]:
    """Heights and widths."""
    if isinstance(images, Tensor):
        return np.tile(images.shape[1:3], (len(images), 1))
    return np.array([image.shape[:2] for image in images])
