"""Training and evaluation transforms: uint8 images -> float32 [B, 3, H, W] in [-1, 1], as in the paper's code.

All randomness of an example is a function of (seed, epoch, index): batches, workers and ranks do not matter. A training
crop is sampled bilinearly at a grid of positions (`_sample`); or, faster and for files only, it is a resized box
(`resize_crops`). JPEGs are decoded down to the last row that a crop needs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64, Shaped, UInt8
from torch import Tensor

from vitlab.data.decode import Jpeg
from vitlab.data.resize import resize_area, resize_pillow, to_device, to_planes
from vitlab.errors import UserError
from vitlab.preprocessing import Preprocessing, Size, pair
from vitlab.rng import Stream, example_uniforms, philox

Crop = Literal["inception", "random", "pad", "none"]
Images = UInt8[Tensor, "B H W 3"] | Sequence[np.ndarray | Jpeg]  # in memory, all of one size; or a list, of any sizes

ATTEMPTS = 100  # TensorFlow's max_attempts; after them the whole image is taken
ASPECT = (0.75, 1.33)  # width / height of the Inception crop: TensorFlow's default range
SPARE = 3  # a JPEG is decoded at half its size if the crop then still has this many times the side that it needs
_OUTSIDE = -2.0  # a sampling position whose two neighbors lie outside any image: black


@dataclasses.dataclass(frozen=True)
class TrainTransform:
    """Crop, flip, optional RandAugment. Settings other than `image_size` are named as in `DataConfig`."""

    image_size: Size
    crop: Crop = "inception"
    """inception: a random box of `min_area`..1 of the area (Sec. 4.1: 0.05), resized to `image_size`; random: the
    image squashed to `crop_resize`, then a random window; pad: the image squashed to `image_size` and shifted by up to
    `pad` pixels, black coming in; none: the image squashed to `image_size`."""
    min_area: float = 0.05
    crop_resize: Size | None = None
    pad: int = 4
    flip: bool = True
    """Mirrors half of the images."""
    randaugment_layers: int = 0
    randaugment_magnitude: int = 0
    fast_decode: bool = False
    """Crops are resized with antialiasing, to whole gray levels, from JPEGs decoded at 1/2, 1/4 or 1/8 of their size
    if a crop is far larger than `image_size`."""

    def __post_init__(self) -> None:
        if self.crop_resize is not None and np.any(np.less(pair(self.crop_resize), pair(self.image_size))):
            raise UserError(f"crop_resize={self.crop_resize} must be at least image_size={self.image_size}")

    def augment(
        self, images: Images, seed: int, epoch: int | np.ndarray, indices: np.ndarray
    ) -> Float[Tensor, "B 3 S T"] | UInt8[Tensor, "B 3 S T"]:
        """Augments the images `indices` of a set, each at its own `epoch` (one number, or int64 [B]).

        Values are in [0, 255]; uint8 if `fast_decode` or after RandAugment. JPEGs are decoded only here. Raises
        `ImageError` for corrupt ones.
        """
        epochs = np.broadcast_to(epoch, np.shape(indices))
        count = 1 + 4 * (ATTEMPTS if self.crop == "inception" else 1)  # the flip, then the box or the window
        u = example_uniforms(seed, epochs, indices, count)
        in_memory = isinstance(images, Tensor)
        sizes = np.array([images.shape[1:3]] * len(images) if in_memory else [image.shape[:2] for image in images])
        boxes, full, shifts = self._windows(sizes, u[:, 1:])
        mirrored = (u[:, 0] < 0.5) & self.flip
        size = pair(self.image_size)
        if self.fast_decode and not in_memory:
            crops = resize_crops(images, boxes, full, shifts, mirrored, size)
        else:
            ys, xs = (_positions(boxes[:, i], boxes[:, 2 + i], full[i], shifts[:, i], size[i]) for i in (0, 1))
            crops = _sample(images, ys, np.where(mirrored[:, None], xs[:, ::-1], xs))
        if self.randaugment_layers:
            crops = randaugment(crops, self.randaugment_layers, self.randaugment_magnitude, seed, epochs, indices)
        return crops

    def _windows(self, sizes: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, tuple[int, int], np.ndarray]:
        """The crops. A box of each image is squashed to the full size; there a window of `image_size` is taken.

            crop       box           full size    window
            inception  random        image_size   all
            random     whole image   crop_resize  random
            pad        whole image   image_size   shifted by up to `pad`, in part outside
            none       whole image   image_size   all

        Boxes (y, x, h, w), int64 [B, 4]; the full size (H', W'); the first pixel of each window there, int64 [B, 2].
        """
        size = pair(self.image_size)
        if self.crop == "inception":
            return inception_boxes(sizes, u.reshape(len(u), -1, 4), self.min_area), size, np.zeros_like(sizes)
        full = pair(self.crop_resize or self.image_size)
        pad = self.pad if self.crop == "pad" else 0
        shifts = [_uniform_integers(u[:, i], full[i] - size[i] + 2 * pad + 1) - pad for i in (0, 1)]
        return np.concatenate([np.zeros_like(sizes), sizes], axis=1), full, np.stack(shifts, axis=1)


def inception_boxes(
    sizes: Int64[np.ndarray, "B 2"], u: Float64[np.ndarray, "B A 4"], min_area: float
) -> Int64[np.ndarray, "B 4"]:
    """Random boxes (y, x, h, w), as TensorFlow's `sample_distorted_bounding_box` draws them in up to A attempts.

    sizes: heights and widths; u: uniform numbers. For an aspect ratio drawn from `ASPECT`, the height is uniform over
    all that give an area in [min_area, 1] inside the image. An example whose every attempt breaks the bounds by
    rounding gets its whole image. As in TensorFlow, the last row and column of offsets is not drawn.
    """
    boxes = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
    open_rows = np.arange(len(sizes))  # the examples without a box
    for attempt in range(u.shape[1]):
        size, draw = sizes[open_rows], u[open_rows, attempt]
        (height, width), area = size.T, size.prod(axis=1)
        aspect = ASPECT[0] + draw[:, 0] * (ASPECT[1] - ASPECT[0])
        low = np.rint(np.sqrt(min_area * area / aspect))  # the height with the least area
        high = np.rint(np.sqrt(area / aspect))  # with the largest; then the largest whose width and height fit
        high = np.where(np.rint(high * aspect) > width, np.floor((width + 0.5 - 1e-7) / aspect), high)
        high = np.minimum(np.where(np.rint(high * aspect) > width, high - 1, high), height)
        h = np.minimum(low + _uniform_integers(draw[:, 1], np.maximum(high - low, 0) + 1), high)
        h = np.where(h * np.rint(h * aspect) < min_area * area, h + 1, h)  # as the width is rounded
        h = np.where(h * np.rint(h * aspect) > area, h - 1, h)
        w = np.rint(h * aspect)
        valid = (h * w >= min_area * area) & (h * w <= area) & (w <= width) & (h <= height) & (h > 0) & (w > 0)
        y, x = _uniform_integers(draw[:, 2], height - h), _uniform_integers(draw[:, 3], width - w)
        boxes[open_rows[valid]] = np.stack([y, x, h, w], axis=1)[valid]
        open_rows = open_rows[~valid]
        if not len(open_rows):
            break
    return boxes


def _uniform_integers(u: np.ndarray, count: np.ndarray | int) -> np.ndarray:
    """Uniform integers 0..count-1 (0 where count < 1) from uniform numbers in [0, 1)."""
    return np.floor(u * np.maximum(count, 1)).astype(np.int64)


def _positions(
    start: np.ndarray, extent: np.ndarray, full: int, shift: np.ndarray, size: int
) -> Float64[np.ndarray, "B size"]:
    """Where an axis is sampled, at TF2's half-pixel centers: `extent` pixels from `start` on (the box) become `full`,
    and `size` of these from `shift` on are taken (the window)."""
    start, extent, resized = start[:, None], extent[:, None], shift[:, None] + np.arange(size)
    inside = np.clip(start + (resized + 0.5) * extent / full - 0.5, start, start + extent - 1)
    return np.where((resized >= 0) & (resized < full), inside, _OUTSIDE)


def _sample(images: Images, ys: np.ndarray, xs: np.ndarray) -> Float[Tensor, "B 3 S T"]:
    """Images at positions ys [B, S] x xs [B, T] (pixels), interpolated bilinearly: float32 in [0, 255]."""
    if isinstance(images, Tensor):
        y, x = (
            to_device(((2 * positions + 1) / side - 1).astype(np.float32), images.device)
            for positions, side in zip((ys, xs), images.shape[1:3], strict=True)
        )
        grid = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), dim=-1)
        planes = to_planes(images).float()
        return F.grid_sample(planes, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    crops = torch.empty(len(images), 3, ys.shape[1], xs.shape[1])
    for crop, image, y, x in zip(crops, images, ys, xs, strict=True):
        # Only what the positions touch is decoded and converted: a crop of a photograph is a small part of it.
        top, left = max(int(y.min()), 0), max(int(x.min()), 0)
        region = _region(image, (top, int(np.ceil(y.max())) + 1), (left, int(np.ceil(x.max())) + 1))
        crop.copy_(_sample(torch.from_numpy(region)[None], y[None] - top, x[None] - left)[0])
    return crops


def resize_crops(
    images: Sequence[np.ndarray | Jpeg],
    boxes: Int64[np.ndarray, "B 4"],
    full: tuple[int, int],
    shifts: Int64[np.ndarray, "B 2"],
    mirrored: np.ndarray,
    size: tuple[int, int],
) -> UInt8[Tensor, "B 3 S T"]:
    """Boxes squashed to `full`, and of that the windows of `size` from `shifts` on, as `_windows` returns them.

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
        region = torch.from_numpy(np.ascontiguousarray(_region(image, rows, columns, shrink)))
        resized = F.interpolate(region.permute(2, 0, 1)[None], full, mode="bilinear", antialias=True)[0]
        (top, left), (height, width) = shift, size
        y, x = max(top, 0), max(left, 0)  # the window may begin and end outside
        bottom, right = max(y, min(top + height, full[0])), max(x, min(left + width, full[1]))
        crop[:, y - top : bottom - top, x - left : right - left] = resized[:, y:bottom, x:right]
        if mirror:
            crop.copy_(crop.flip(2))
    return crops


def _region(
    image: np.ndarray | Jpeg, rows: tuple[int, int], columns: tuple[int, int], shrink: int = 1
) -> UInt8[np.ndarray, "h w 3"]:
    """Rows and columns of an image, from .. to, counted at 1 / `shrink` of its size; of a JPEG at that size."""
    (top, bottom), (left, right) = rows, columns
    if isinstance(image, Jpeg):
        return image.rows(bottom * shrink, shrink)[top:bottom, left:right]
    return image[top * shrink : bottom * shrink, left * shrink : right * shrink]


def randaugment(
    images: Shaped[Tensor, "B 3 S T"], layers: int, magnitude: int, seed: int, epochs: np.ndarray, indices: np.ndarray
) -> UInt8[Tensor, "B 3 S T"]:
    """torchvision's RandAugment (Cubuk et al., 2020), seeded for each example by (seed, epoch, index).

    layers: operations on each image; magnitude: 0 to 30, the strongest. Gray comes in at the edges.

    Deviation: big_vision's has two operations more, SolarizeAdd and Cutout, and other strengths at a magnitude.
    """
    from torchvision.transforms.v2 import RandAugment  # slow to import, and seldom needed

    change = RandAugment(layers, magnitude, fill=128)
    images = (images + 0.5).to(torch.uint8) if images.is_floating_point() else images
    with torch.random.fork_rng(devices=[]):
        for image, epoch, index in zip(images, epochs.tolist(), indices.tolist(), strict=True):
            # Not torch.manual_seed, which would also seed the GPUs, whose state is not restored.
            torch.default_generator.manual_seed(philox(seed, Stream.RANDAUGMENT, epoch, index).random_raw())
            image.copy_(change(image))
    return images


@dataclasses.dataclass(frozen=True)
class EvalTransform:
    """Prepares images for evaluation as `preprocessing` says, which is brought to `image_size` in proportion."""

    image_size: Size
    preprocessing: Preprocessing = dataclasses.field(default_factory=Preprocessing)

    def __post_init__(self) -> None:
        object.__setattr__(self, "preprocessing", self.preprocessing.at(self.image_size))

    def apply(self, images: Images) -> Float[Tensor, "B 3 S T"]:
        """Values in [-1, 1]. Images are in memory as one uint8 tensor, or decoded one by one."""
        return to_range(self.resize(images))

    def resize(self, images: Images) -> Float[Tensor, "B 3 S T"] | UInt8[Tensor, "B 3 S T"]:
        """Values in [0, 255], as uint8 where the resize gives whole numbers."""
        if isinstance(images, Tensor):
            return self._resize(images)
        return torch.cat([self._resize(torch.from_numpy(p)[None]) for p in images])

    def _resize(self, images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B 3 S T"] | UInt8[Tensor, "B 3 S T"]:
        preprocessing, (height, width) = self.preprocessing, pair(self.image_size)
        full = self._full_size(*images.shape[1:3])
        crop = pair(preprocessing.crop_size or self.image_size)
        margins = full[0] - crop[0], full[1] - crop[1]
        y, x = (round(m / 2) if preprocessing.crop_offset == "round" else m // 2 for m in margins)
        if not preprocessing.is_google:
            return resize_pillow(images, full, (y, x, height, width), preprocessing.interpolation)
        planes = to_planes(images).float()
        if preprocessing.resize is not None and preprocessing.keep_aspect:
            return resize_area(planes, full, (y, x, height, width)).to(torch.uint8)  # big_vision truncates
        # TF2's `tf.image.resize`: half-pixel centers
        resized = F.interpolate(planes, full, mode="bilinear", align_corners=False, antialias=False)
        return resized if preprocessing.resize is None else resized[:, :, y : y + height, x : x + width].to(torch.uint8)

    def _full_size(self, height: int, width: int) -> tuple[int, int]:
        """The size to which an image of `height` x `width` is resized before the crop."""
        preprocessing, shorter = self.preprocessing, min(height, width)
        if preprocessing.resize is None:
            return pair(preprocessing.crop_size or self.image_size)
        if not preprocessing.keep_aspect:
            return preprocessing.resize, preprocessing.resize
        if preprocessing.is_google:
            scale = preprocessing.resize / shorter
            return round(height * scale), round(width * scale)
        return int(preprocessing.resize * height / shorter), int(preprocessing.resize * width / shorter)


def to_range(images: Float[Tensor, "*S"] | UInt8[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """[0, 255] -> [-1, 1], in the order of Google's arithmetic."""
    return (images - 127.5).div_(127.5)


def to_pixels(images: Float[Tensor, "B 3 H W"]) -> UInt8[np.ndarray, "B H W 3"]:
    """[-1, 1] -> the nearest of 0..255."""
    return ((images.permute(0, 2, 3, 1) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu().numpy()


def mixup(
    images: Float[Tensor, "B 3 H W"], labels: Float[Tensor, "B K"], alpha: float, generator: np.random.Generator
) -> tuple[Float[Tensor, "B 3 H W"], Float[Tensor, "B K"]]:
    """mixup with one weight a >= 1/2, of Beta(alpha, alpha), for the batch and the neighbor as partner (big_vision)."""
    a = generator.beta(alpha, alpha)
    a = max(a, 1 - a)
    return a * images + (1 - a) * images.roll(1, 0), a * labels + (1 - a) * labels.roll(1, 0)
