"""Training and evaluation transforms: uint8 images -> float32 [B, 3, H, W] in [-1, 1], as in the paper's code.

All randomness of an example is a function of (seed, epoch, index): batches, workers and ranks do not matter.
"""

import dataclasses
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from vitlab.data import crops
from vitlab.data.crops import Images, Size, pair, planar
from vitlab.errors import UserError
from vitlab.preprocessing import Preprocessing
from vitlab.rng import Stream, example_uniforms, philox

Crop = Literal["inception", "random", "pad", "none"]

STRIP = 16  # A resized image with this many times the pixels of its center is not computed as a whole.
ATTEMPTS = 100  # TensorFlow's max_attempts; after them the whole image is taken


@dataclasses.dataclass(frozen=True)
class TrainTransform:
    """Crop, flip, optional RandAugment, value range.

    crop: "inception", a random box of `min_area`..1 of the area (Sec. 4.1's code: 0.05), resized to `image_size`;
    "random", the image squashed to `resize`, then a random window of `image_size`; "pad", the image squashed to
    `image_size` and shifted by up to `pad` pixels, black coming in; "none", the image squashed to `image_size`.
    flip: mirror half of the images. randaugment_layers, randaugment_magnitude: as for `randaugment`.
    fast: resize crops with antialiasing, to whole gray levels, from JPEGs decoded at 1/2, 1/4 or 1/8 of their size
    where a crop is far larger than `image_size`.
    """

    image_size: Size
    crop: Crop = "inception"
    min_area: float = 0.05
    resize: Size | None = None
    pad: int = 4
    flip: bool = True
    randaugment_layers: int = 0
    randaugment_magnitude: int = 0
    fast: bool = False

    def __post_init__(self) -> None:
        if (self.crop == "random") != (self.resize is not None):
            raise UserError(f"resize goes with crop='random' only: got crop={self.crop!r}, resize={self.resize}")
        if self.resize is not None and np.any(np.less(pair(self.resize), pair(self.image_size))):
            raise UserError(f"resize={self.resize} must be at least image_size={self.image_size}")

    def apply(
        self, images: Images, seed: int, epoch: int | np.ndarray, indices: np.ndarray
    ) -> Float[Tensor, "B 3 S T"]:
        """Augments the images `indices` of a set, each at its own `epoch` (one number, or int64 [B])."""
        return to_range(self.augment(images, seed, epoch, indices))

    def augment(
        self, images: Images, seed: int, epoch: int | np.ndarray, indices: np.ndarray
    ) -> Float[Tensor, "B 3 S T"] | UInt8[Tensor, "B 3 S T"]:
        """As `apply`, with values in [0, 255]; uint8 if `fast` or after RandAugment.

        JPEGs are decoded only here. Raises `ImageError` for corrupt ones.
        """
        epochs = np.broadcast_to(epoch, np.shape(indices))
        count = 1 + 4 * (ATTEMPTS if self.crop == "inception" else 1)  # the flip, then the box or the window
        u = example_uniforms(seed, epochs, indices, count)
        boxes, full, shifts = self._windows(crops.sizes(images), u[:, 1:])
        mirrored, out = (u[:, 0] < 0.5) & self.flip, pair(self.image_size)
        if self.fast and not isinstance(images, Tensor):
            result = crops.resize_crops(images, boxes, full, shifts, mirrored, out)
        else:
            ys, xs = (crops.positions(boxes[:, i], boxes[:, 2 + i], full[i], shifts[:, i], out[i]) for i in (0, 1))
            result = crops.sample(images, ys, np.where(mirrored[:, None], xs[:, ::-1], xs))
        if self.randaugment_layers:
            result = randaugment(result, self.randaugment_layers, self.randaugment_magnitude, seed, epochs, indices)
        return result

    def _windows(self, sizes: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, tuple[int, int], np.ndarray]:
        """For images of `sizes`: a box of each is squashed to a full size, of which a window is taken.

        Boxes (y, x, h, w), int64 [B, 4]; the full size (H', W'), the same for all; the windows' first pixels in it,
        int64 [B, 2], which may be outside.
        """
        out = pair(self.image_size)
        if self.crop == "inception":
            return crops.inception_boxes(sizes, u.reshape(len(u), -1, 4), self.min_area), out, np.zeros_like(sizes)
        if self.crop == "random":
            full = pair(self.resize or self.image_size)
            shifts = [crops.integers(u[:, i], full[i] - out[i] + 1) for i in (0, 1)]
        else:
            full, reach = out, self.pad if self.crop == "pad" else 0
            shifts = [crops.integers(u[:, i], 2 * reach + 1) - reach for i in (0, 1)]
        return np.concatenate([np.zeros_like(sizes), sizes], axis=1), full, np.stack(shifts, axis=1)


def randaugment(
    images: Float[Tensor, "B 3 S T"] | UInt8[Tensor, "B 3 S T"],
    layers: int,
    magnitude: int,
    seed: int,
    epochs: np.ndarray,
    indices: np.ndarray,
) -> UInt8[Tensor, "B 3 S T"]:
    """torchvision's RandAugment (Cubuk et al., 2020), seeded for each example by (seed, epoch, index).

    layers: operations on each image; magnitude: 0 to 30, the strongest. Gray comes in at the borders.

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
        if isinstance(images, Tensor):
            return to_range(self._resize(images))
        return to_range(torch.cat([self._resize(torch.from_numpy(p)[None]) for p in images]))

    def _resize(self, images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B 3 S T"]:
        how, (h, w), sides = self.preprocessing, pair(self.image_size), images.shape[1:3]
        if how.resize is None:
            full = h, w
        elif not how.keep_aspect:
            full = how.resize, how.resize
        elif how.is_google:
            scale = how.resize / min(sides)
            full = round(sides[0] * scale), round(sides[1] * scale)
        else:
            full = int(how.resize * sides[0] / min(sides)), int(how.resize * sides[1] / min(sides))
        rest = full[0] - h, full[1] - w
        y, x = (round(pixels / 2) if how.crop_offset == "round" else pixels // 2 for pixels in rest)
        if not how.is_google:
            return _resize_pillow(images, full, (y, x, h, w), how.interpolation)
        if how.resize is None:
            return resize_bilinear(planar(images), (h, w))
        if how.keep_aspect:
            center = resize_area(planar(images), full, (y, x, h, w))
        else:
            center = resize_bilinear(planar(images), full)[:, :, y : y + h, x : x + w]
        return center.floor()  # big_vision's resize truncates to whole numbers


def _resize_pillow(
    images: UInt8[Tensor, "B H W 3"], size: tuple[int, int], window: tuple[int, int, int, int], interpolation: str
) -> Float[Tensor, "B 3 S T"]:
    """Pillow's resize to `size`, and of that the window (y, x, height, width).

    Of a long strip only the window is computed, which may differ by a gray level or two: Pillow's boxes are float32.
    """
    y, x, h, w = window
    if images.shape[1:3] == size:
        return planar(images[:, y : y + h, x : x + w])
    box = None
    if size[0] * size[1] > STRIP * h * w:
        down, across = images.shape[1] / size[0], images.shape[2] / size[1]
        box = (x * across, y * down, min((x + w) * across, images.shape[2]), min((y + h) * down, images.shape[1]))
        size, y, x = (h, w), 0, 0
    resized = np.empty((len(images), h, w, 3), np.uint8)
    for center, image in zip(resized, images.cpu().numpy(), strict=True):
        large = Image.fromarray(image).resize((size[1], size[0]), Image.Resampling[interpolation.upper()], box)
        center[:] = np.asarray(large)[y : y + h, x : x + w]
    return planar(torch.from_numpy(resized).to(images.device))


def resize_bilinear(images: Float[Tensor, "B 3 H W"], size: tuple[int, int]) -> Float[Tensor, "B 3 S T"]:
    """TF2's `tf.image.resize`: half-pixel centers, no antialiasing."""
    if images.shape[2:] == size:
        return images
    return F.interpolate(images, size, mode="bilinear", align_corners=False, antialias=False)


def resize_area(
    images: Float[Tensor, "B 3 H W"], size: tuple[int, int], window: tuple[int, int, int, int] | None = None
) -> Float[Tensor, "B 3 S T"]:
    """TF2's method "area": every new pixel is the mean over the exact, fractional area that it covers.

    window: (y, x, height, width), the only part of the new image that is computed.
    """
    y, x, h, w = window or (0, 0, *size)
    rows, columns = (_AreaBins(*given) for given in zip(images.shape[2:], size, (y, x), (h, w), strict=True))
    part = images[:, :, rows.source, columns.source].double()
    return columns.means(rows.means(part).mT).mT.float()


class _AreaBins:
    """`count` of the `size` equal stretches of an axis, from number `start` on, and `source`, the part they cover."""

    def __init__(self, extent: int, size: int, start: int, count: int) -> None:
        # TensorFlow's edges are float32, which shows where the mean is a whole number and is truncated afterwards.
        self.scale = float(np.float32(extent / size))
        self.numbers = start, start + count + 1
        first, last = (min(int(np.float32(i * self.scale)), extent - 1) for i in (start, start + count))
        self.source = slice(first, last + 1)

    def means(self, x: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B 3 S W"]:
        """Of `x`, which is `source` of axis 2: differences of the interpolated running sum."""
        extent = x.shape[2]
        numbers = torch.arange(*self.numbers, dtype=torch.float32, device=x.device)
        edges = ((numbers * self.scale).double() - self.source.start).clamp(max=extent)
        pixel = edges.long().clamp(max=extent - 1)
        sums = F.pad(x.cumsum(2), (0, 0, 1, 0))[:, :, pixel] + x[:, :, pixel] * (edges - pixel)[:, None]
        within_one = pixel[:-1] == edges[1:].ceil().long() - 1
        return torch.where(within_one[:, None], x[:, :, pixel[:-1]], sums.diff(dim=2) / self.scale)


def to_range(images: Float[Tensor, "*S"] | UInt8[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """[0, 255] -> [-1, 1], in the order of Google's arithmetic."""
    return (images - 127.5).div_(127.5)


def to_pixels(images: Float[Tensor, "B 3 H W"]) -> UInt8[np.ndarray, "B H W 3"]:
    """[-1, 1] -> the nearest of 0..255."""
    return ((images.permute(0, 2, 3, 1) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu().numpy()


def mixup(
    images: Float[Tensor, "B 3 H W"],
    labels: Float[Tensor, "B K"],
    alpha: float,
    generator: np.random.Generator,
) -> tuple[Float[Tensor, "B 3 H W"], Float[Tensor, "B K"]]:
    """mixup with one weight a >= 1/2, of Beta(alpha, alpha), for the batch and the neighbor as partner (big_vision)."""
    a = generator.beta(alpha, alpha)
    a = max(a, 1 - a)
    return a * images + (1 - a) * images.roll(1, 0), a * labels + (1 - a) * labels.roll(1, 0)
