"""Crops, resizes and the value range of the paper's code: uint8 pictures -> float32 [B, 3, H, W] in [-1, 1].

Every crop and every resize here is a choice of sampling positions, one row of them for each axis, followed by
one bilinear look-up; a picture set in memory is therefore augmented in a single vectorised operation on its
device. All randomness of an example is a function of (seed, epoch, index) alone: batches, workers and ranks
do not matter.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

Crop = Literal["inception", "random", "pad", "none"]
CROPS = ("inception", "random", "pad", "none")
Pictures = UInt8[Tensor, "B H W 3"] | Sequence[np.ndarray]  # one size, in memory; or one by one, of any sizes
Size = int | tuple[int, int]  # pixels; (H, W) unless square

ATTEMPTS = 100  # TensorFlow's max_attempts; after them the whole picture is taken
ASPECT = (0.75, 1.33)  # width / height of the Inception crop: TensorFlow's default range
FILL = 128.0  # grey that geometric RandAugment operations bring in
_OUTSIDE = -2.0  # a sampling position whose two neighbours lie outside any picture: black


# ---------------------------------------------------------------------------------------------- randomness


def example_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The generator of one example: Philox with key (seed, epoch), its counter from (0, 0, 0, index) on."""
    key, counter = np.array([seed, epoch], np.uint64), np.array([0, 0, 0, index], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def example_uniforms(seed: int, epochs: np.ndarray, indices: np.ndarray, count: int, stream: int = 0) -> np.ndarray:
    """The first `count` uniform numbers of every example's generator: float64 [B, count].

    Another `stream` has other numbers, its counters from (0, 0, stream, index) on; augmentation takes stream 0.
    One generator is moved from key to key, as building one per example costs ten times as much.
    """
    philox = np.random.Philox(key=np.array([seed, 0], np.uint64), counter=np.array([0, 0, stream, 0], np.uint64))
    generator, state = np.random.Generator(philox), philox.state
    rows = np.empty((len(indices), count))
    for row, epoch, index in zip(rows, epochs, indices, strict=True):
        state["state"]["key"][1], state["state"]["counter"][3] = epoch, index
        philox.state = state
        generator.random(out=row)
    return rows


# -------------------------------------------------------------------------------------------------- training


@dataclasses.dataclass(frozen=True)
class TrainTransform:
    """Crop, flip, optional RandAugment, value range.

    crop: "inception", a random box of `min_area`..1 of the area (Sec. 4.1's code: 0.05), resized to
    `image_size`; "random", the picture squashed to `resize`, then a random window of `image_size`; "pad", the
    picture squashed to `image_size` and shifted by up to `pad` pixels, black coming in; "none", the picture
    squashed to `image_size`. flip: mirror half of the pictures. RandAugment applies `randaugment_layers`
    operations (0 = off) at `randaugment_magnitude` (0 to 30).
    """

    image_size: Size
    crop: Crop = "inception"
    min_area: float = 0.05
    resize: Size | None = None
    pad: int = 4
    flip: bool = True
    randaugment_layers: int = 0
    randaugment_magnitude: int = 0

    def __post_init__(self) -> None:
        if self.crop not in CROPS:
            raise ValueError(f"crop must be one of {', '.join(CROPS)}, not {self.crop!r}")
        if (self.crop == "random") != (self.resize is not None):
            raise ValueError(
                f"resize goes with crop='random' and no other: got crop={self.crop!r}, resize={self.resize}"
            )
        if self.resize is not None and np.any(np.less(pair(self.resize), pair(self.image_size))):
            raise ValueError(f"resize={self.resize} must be at least image_size={self.image_size}")

    def apply(
        self, pictures: Pictures, seed: int, epoch: int | np.ndarray, indices: np.ndarray
    ) -> Float[Tensor, "B 3 S T"]:
        """Augment the pictures `indices` of a set, each at its own `epoch` (one number, or int64 [B])."""
        layers = self.randaugment_layers
        attempts = ATTEMPTS if self.crop == "inception" else 1
        epochs = np.broadcast_to(epoch, np.shape(indices))
        u = example_uniforms(seed, epochs, indices, 1 + 4 * layers + 4 * attempts)
        ys, xs = self._positions(_sizes(pictures), u[:, 1 + 4 * layers :])
        if self.flip:
            xs = np.where(u[:, :1] < 0.5, xs[:, ::-1], xs)
        images = sample(pictures, ys, xs)
        if layers:
            images = randaugment(images, u[:, 1 : 1 + 4 * layers].reshape(-1, layers, 4), self.randaugment_magnitude)
        return to_range(images)

    def _positions(self, sizes: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sampling positions along y and x, float64 [B, H'] and [B, W'], in pixels of pictures of `sizes`."""
        out = pair(self.image_size)
        if self.crop == "inception":
            boxes = inception_boxes(sizes, u.reshape(len(u), -1, 4), self.min_area)
            return _box_positions(boxes[:, 0], boxes[:, 2], out[0]), _box_positions(boxes[:, 1], boxes[:, 3], out[1])
        if self.crop == "random":
            full = pair(self.resize or self.image_size)
            spare = [r - s for r, s in zip(full, out, strict=True)]
            shifts = [_integers(u[:, i], spare[i] + 1) for i in (0, 1)]
        else:
            full, reach = out, self.pad if self.crop == "pad" else 0
            shifts = [_integers(u[:, i], 2 * reach + 1) - reach for i in (0, 1)]
        ys, xs = (_shift_positions(shifts[i], sizes[:, i], full[i], out[i]) for i in (0, 1))
        return ys, xs


def inception_boxes(sizes: np.ndarray, u: np.ndarray, min_area: float) -> np.ndarray:
    """Random boxes (y, x, h, w), int64 [B, 4], as TensorFlow's `sample_distorted_bounding_box` draws them.

    sizes: [B, 2] heights and widths; u: uniforms [B, attempts, 4]. For an aspect ratio drawn from `ASPECT`,
    the height is uniform over all that give an area in [min_area, 1] inside the picture. An example whose
    every attempt breaks the bounds by rounding gets its whole picture. As there, the last row and column of
    offsets is not drawn.
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
        h = low + _integers(draw[:, 1], np.maximum(high - low, 0) + 1)
        h = np.minimum(h, high)
        h = np.where(h * np.rint(h * aspect) < min_area * area, h + 1, h)
        h = np.where(h * np.rint(h * aspect) > area, h - 1, h)
        w = np.rint(h * aspect)
        good = (h * w >= min_area * area) & (h * w <= area) & (w <= width) & (h <= height) & (h > 0) & (w > 0)
        y, x = _integers(draw[:, 2], height - h), _integers(draw[:, 3], width - w)
        boxes[left[good]] = np.stack([y, x, h, w], axis=1)[good]
        left = left[~good]
        if not len(left):
            break
    return boxes


def _integers(u: np.ndarray, count: np.ndarray | int) -> np.ndarray:
    """Uniform integers 0..count-1 (0 where count < 1) from uniform numbers in [0, 1)."""
    return np.floor(u * np.maximum(count, 1)).astype(np.int64)


def _box_positions(start: np.ndarray, extent: np.ndarray, size: int) -> np.ndarray:
    """TF2's half-pixel centres when `extent` pixels from `start` on become `size`: float64 [B, size]."""
    start, extent = start[:, None], extent[:, None]
    return np.clip(start + (np.arange(size) + 0.5) * extent / size - 0.5, start, start + extent - 1)


def _shift_positions(shift: np.ndarray, extent: np.ndarray, full: int, size: int) -> np.ndarray:
    """Positions `shift`.. of an axis of `extent` pixels when it is resized to `full`: float64 [B, size]."""
    resized = shift[:, None] + np.arange(size)
    extent = extent[:, None]
    positions = np.clip((resized + 0.5) * extent / full - 0.5, 0, extent - 1)
    return np.where((resized >= 0) & (resized < full), positions, _OUTSIDE)


def sample(pictures: Pictures, ys: np.ndarray, xs: np.ndarray) -> Float[Tensor, "B 3 S T"]:
    """Look pictures up at positions ys [B, S] x xs [B, T] (pixels), bilinearly: float32 in [0, 255]."""
    if isinstance(pictures, Tensor):
        return _lookup(_planar(pictures), ys, xs)
    images = []
    for picture, y, x in zip(pictures, ys, xs, strict=True):
        # Only what the positions touch is converted: a crop of a photograph is a small part of it.
        top, left = max(int(y.min()), 0), max(int(x.min()), 0)
        part = picture[top : int(np.ceil(y.max())) + 1, left : int(np.ceil(x.max())) + 1]
        images.append(_lookup(_planar(torch.from_numpy(part)[None]), y[None] - top, x[None] - left))
    return torch.cat(images)


def _lookup(images: Float[Tensor, "B 3 H W"], ys: np.ndarray, xs: np.ndarray) -> Float[Tensor, "B 3 S T"]:
    y, x = (
        to_device(((2 * positions + 1) / side - 1).astype(np.float32), images.device)
        for positions, side in zip((ys, xs), images.shape[2:], strict=True)
    )
    grid = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), dim=-1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


# ------------------------------------------------------------------------------------------------ evaluation


@dataclasses.dataclass(frozen=True)
class EvalTransform:
    """Without `resize` the whole picture is squashed to `image_size` (Google's fine-tuning evaluation).

    With it, the smaller side is brought to `resize` by area averaging (`keep_aspect=False`: both sides,
    bilinearly, as in Google's few-shot evaluation) and the centre of `image_size` is cut out; values are
    whole numbers then.
    """

    image_size: Size
    resize: int | None = None
    keep_aspect: bool = True

    def __post_init__(self) -> None:
        if self.resize is not None and self.resize < max(pair(self.image_size)):
            raise ValueError(
                f"resize={self.resize} must be at least image_size={self.image_size}, which is cut from it"
            )

    def apply(self, pictures: Pictures) -> Float[Tensor, "B 3 S T"]:
        if isinstance(pictures, Tensor):
            return to_range(self._resize(_planar(pictures)))
        return to_range(torch.cat([self._resize(_planar(torch.from_numpy(p)[None])) for p in pictures]))

    def _resize(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B 3 S T"]:
        h, w = pair(self.image_size)
        if self.resize is None:
            return resize_bilinear(images, (h, w))
        if self.keep_aspect:
            scale = self.resize / min(images.shape[2:])
            images = resize_area(images, (round(images.shape[2] * scale), round(images.shape[3] * scale)))
        else:
            images = resize_bilinear(images, (self.resize, self.resize))
        y, x = (images.shape[2] - h) // 2, (images.shape[3] - w) // 2
        return images[:, :, y : y + h, x : x + w].floor()  # big_vision's resize truncates to whole numbers


def resize_bilinear(images: Float[Tensor, "B 3 H W"], size: tuple[int, int]) -> Float[Tensor, "B 3 S T"]:
    """TF2's `tf.image.resize`: half-pixel centres, no antialiasing."""
    if images.shape[2:] == size:
        return images
    return F.interpolate(images, size, mode="bilinear", align_corners=False, antialias=False)


def resize_area(images: Float[Tensor, "B 3 H W"], size: tuple[int, int]) -> Float[Tensor, "B 3 S T"]:
    """TF2's method "area": every new pixel is the mean over the exact, fractional area that it covers."""
    return _area_rows(_area_rows(images.double(), size[0]).mT, size[1]).mT.float()


def _area_rows(x: Float[Tensor, "B 3 H W"], size: int) -> Float[Tensor, "B 3 S W"]:
    """Means over `size` equal stretches of axis 2: differences of the interpolated running sum."""
    extent = x.shape[2]
    # TensorFlow's edges are float32, which shows where the mean is a whole number and is truncated afterwards.
    scale = torch.tensor(extent / size, dtype=torch.float32, device=x.device)
    edges = (torch.arange(size + 1, device=x.device) * scale).double().clamp(max=extent)
    pixel = edges.long().clamp(max=extent - 1)
    sums = F.pad(x.cumsum(2), (0, 0, 1, 0))[:, :, pixel] + x[:, :, pixel] * (edges - pixel)[:, None]
    within_one = pixel[:-1] == edges[1:].ceil().long() - 1
    return torch.where(within_one[:, None], x[:, :, pixel[:-1]], sums.diff(dim=2) / scale.double())


def _planar(pictures: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B 3 H W"]:
    return pictures.permute(0, 3, 1, 2).contiguous().float()


def to_range(images: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """[0, 255] -> [-1, 1], in the order of Google's arithmetic."""
    return (images - 127.5).div_(127.5)


def to_pixels(images: Float[Tensor, "B 3 H W"]) -> UInt8[np.ndarray, "B H W 3"]:
    """What a model sees, in [-1, 1], as pictures again: the nearest whole numbers."""
    return ((images.permute(0, 2, 3, 1) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu().numpy()


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor there, without waiting for what the device is doing."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def pair(size: Size) -> tuple[int, int]:
    """(H, W) of a size."""
    return (size, size) if isinstance(size, int) else size


def _sizes(pictures: Pictures) -> np.ndarray:
    """Heights and widths, int64 [B, 2]."""
    if isinstance(pictures, Tensor):
        return np.tile(pictures.shape[1:3], (len(pictures), 1))
    return np.array([picture.shape[:2] for picture in pictures])


# ------------------------------------------------------------------------------------- RandAugment and mixup

# Changes pictures uint8 [n, 3, H, W], given two uniform numbers for each, float64 [n, 2].
_Operation = Callable[[Tensor, np.ndarray], Tensor]


def randaugment(images: Float[Tensor, "B 3 H W"], u: np.ndarray, magnitude: int) -> Float[Tensor, "B 3 H W"]:
    """RandAugment as in big_vision: one of 16 operations a layer, all equally likely, at a fixed magnitude.

    images: values in [0, 255]; u: uniforms [B, layers, 4] (operation, sign, two for the place of the cutout).
    The pictures that drew the same operation are changed together, rounded to whole numbers before.
    """
    pixels = (images + 0.5).to(torch.uint8)
    table = _randaugment_table(magnitude / 10, images.shape[2], images.shape[3])
    for draw in u.swapaxes(0, 1):
        chosen = _integers(draw[:, 0], len(table))
        for operation, variants in enumerate(table):
            variant = _integers(draw[:, 1], len(variants))
            for number, change in enumerate(variants):
                rows = np.flatnonzero((chosen == operation) & (variant == number))
                if len(rows):
                    at = to_device(rows, pixels.device)
                    pixels[at] = change(pixels[at], draw[rows, 2:])
    return pixels.float()


def _randaugment_table(r: float, height: int, width: int) -> list[tuple[_Operation, ...]]:
    """The operations at strength r = magnitude / 10; those with a sign in both variants.

    Deviation: Google's pixel distances are meant for 224 pixels; here they scale with the picture's width.
    Deviation: contrast blends with the mean grey; Google's blends with (number of pixels) / 256, by an
    oversight.
    """
    from torchvision.transforms.v2 import functional as V  # slow to import, and only needed here

    pixel = r * width / 224
    enhance = 1.8 * r + 0.1
    threshold = int(256 * r)

    def shear(x: float, y: float) -> _Operation:
        degrees = [math.degrees(math.atan(x)), math.degrees(math.atan(y))]
        return lambda p, _: V.affine(p, 0.0, [0, 0], 1.0, degrees, fill=[FILL], center=[0, 0])

    def translate(x: float, y: float) -> _Operation:
        return lambda p, _: V.affine(p, 0.0, [x, y], 1.0, [0.0, 0.0], fill=[FILL])  # pyright: ignore[reportArgumentType]

    def rotate(degrees: float) -> _Operation:
        return lambda p, _: V.rotate(p, degrees, fill=[FILL])

    def solarize(p: Tensor, _: np.ndarray) -> Tensor:
        return torch.where(p < threshold, p, 255 - p) if threshold <= 255 else p

    def solarize_add(p: Tensor, _: np.ndarray) -> Tensor:
        return torch.where(p < 128, (p.int() + int(110 * r)).clamp(max=255).to(torch.uint8), p)

    def cutout(p: Tensor, place: np.ndarray) -> Tensor:
        half = int(40 * pixel)
        y, x = (
            np.abs(np.arange(side) + 0.5 - _integers(place[:, i : i + 1], side)) < half
            for i, side in enumerate((height, width))
        )
        hole = to_device(y[:, :, None] & x[:, None, :], p.device)
        return p.masked_fill(hole[:, None], int(FILL))

    return [
        (lambda p, _: V.autocontrast(p),),
        (lambda p, _: V.equalize(p),),
        (lambda p, _: V.invert(p),),
        (rotate(30 * r), rotate(-30 * r)),
        (lambda p, _: V.posterize(p, min(int(4 * r), 8)),),
        (solarize,),
        (solarize_add,),
        (lambda p, _: V.adjust_saturation(p, enhance),),
        (lambda p, _: V.adjust_contrast(p, enhance),),
        (lambda p, _: V.adjust_brightness(p, enhance),),
        (lambda p, _: V.adjust_sharpness(p, enhance),),
        (shear(0.3 * r, 0.0), shear(-0.3 * r, 0.0)),
        (shear(0.0, 0.3 * r), shear(0.0, -0.3 * r)),
        (translate(100 * pixel, 0.0), translate(-100 * pixel, 0.0)),
        (translate(0.0, 100 * pixel), translate(0.0, -100 * pixel)),
        (cutout,),
    ]


def mixup(
    images: Float[Tensor, "B 3 H W"],
    labels: Float[Tensor, "B K"],
    alpha: float,
    generator: np.random.Generator,
) -> tuple[Float[Tensor, "B 3 H W"], Float[Tensor, "B K"]]:
    """mixup with one weight a >= 1/2 for the batch and the neighbour as partner (big_vision's form).

    labels: one-hot or smoothed, float. `alpha` > 0 is the parameter of Beta(alpha, alpha).
    """
    a = generator.beta(alpha, alpha)
    a = max(a, 1 - a)
    return a * images + (1 - a) * images.roll(1, 0), a * labels + (1 - a) * labels.roll(1, 0)
