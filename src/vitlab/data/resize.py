"""Images resized to the values of Pillow and of TensorFlow's method "area"; and tensors from images and arrays."""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

Window = tuple[int, int, int, int]  # y, x, height, width
STRIP = 16  # a resized image with this many times the pixels of its window is not computed as a whole


def resize_pillow(
    images: UInt8[Tensor, "B H W 3"], size: tuple[int, int], window: Window, interpolation: str
) -> UInt8[Tensor, "B 3 S T"]:
    """The part `window` of images that Pillow resizes to `size`.

    Of a long strip only the window is computed, which may differ by a gray level or two: Pillow's boxes are float32.
    """
    y, x, height, width = window
    sides = images.shape[1:3]
    if sides == size:
        return to_planes(images[:, y : y + height, x : x + width])
    box = None
    if size[0] * size[1] > STRIP * height * width:
        down, across = sides[0] / size[0], sides[1] / size[1]
        box = (x * across, y * down, min((x + width) * across, sides[1]), min((y + height) * down, sides[0]))
        size, y, x = (height, width), 0, 0  # the box becomes the window, and nothing else is resized
    cut = np.empty((len(images), height, width, 3), np.uint8)
    for target, image in zip(cut, images.cpu().numpy(), strict=True):
        resized = Image.fromarray(image).resize((size[1], size[0]), Image.Resampling[interpolation.upper()], box)
        target[:] = np.asarray(resized)[y : y + height, x : x + width]
    return to_planes(torch.from_numpy(cut).to(images.device))


def resize_area(
    images: Float[Tensor, "B 3 H W"], size: tuple[int, int], window: Window | None = None
) -> Float[Tensor, "B 3 S T"]:
    """TF2's method "area": every new pixel is the mean over the exact, fractional area that it covers. window: the only
    part of the new image that is computed; default: all."""
    y, x, h, w = window or (0, 0, *size)
    axes = zip(images.shape[2:], size, (y, x), (h, w), strict=True)
    (rows, row_edges, row_scale), (columns, column_edges, column_scale) = (_area_edges(*axis) for axis in axes)
    means = _area_means(images[:, :, rows, columns].double(), row_edges, row_scale)
    return _area_means(means.mT, column_edges, column_scale).mT.float()


def _area_edges(extent: int, size: int, start: int, count: int) -> tuple[slice, np.ndarray, float]:
    """The place of new pixels among the old ones, along an axis where `extent` old pixels become `size`.

    Of `count` new pixels from `start` on: the old pixels that they cover; their `count` + 1 edges, counted from the
    first of these; their width. 3 pixels that become 2 have slice(0, 3), [0, 1.5, 3], 1.5; the second of the 2 alone
    has slice(1, 3), [0.5, 2], 1.5.
    """
    # TensorFlow's edges are float32, which shows where the mean is a whole number and is truncated afterwards.
    scale = np.float32(extent / size)
    edges = np.minimum((np.arange(start, start + count + 1, dtype=np.float32) * scale).astype(np.float64), extent)
    first, last = (min(int(edges[i]), extent - 1) for i in (0, -1))
    return slice(first, last + 1), edges - first, float(scale)


def _area_means(x: Tensor, edges: np.ndarray, width: float) -> Tensor:
    """Means of float64 [B, 3, H, W] between edges of axis 2: differences of the interpolated running sum."""
    first = np.minimum(edges.astype(np.int64), x.shape[2] - 1)  # the pixel that an edge is in
    # The mean within one pixel is its value, exactly; a difference of sums is rounded.
    is_one_pixel = first[:-1] == np.ceil(edges[1:]).astype(np.int64) - 1
    pixel, fraction, is_copied = (to_device(array, x.device) for array in (first, edges - first, is_one_pixel))
    sums = F.pad(x.cumsum(2), (0, 0, 1, 0))[:, :, pixel] + x[:, :, pixel] * fraction[:, None]  # up to each edge
    return torch.where(is_copied[:, None], x[:, :, pixel[:-1]], sums.diff(dim=2) / width)


def to_planes(images: UInt8[Tensor, "B H W 3"]) -> UInt8[Tensor, "B 3 H W"]:
    """The colors as planes, contiguous."""
    return images.permute(0, 3, 1, 2).contiguous()


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on `device`, without waiting for the work there."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
