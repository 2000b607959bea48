"""RandAugment (Cubuk et al., 2020) in big_vision's form, on batches, on the device where they are."""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitlab.data.crops import integers, to_device

FILL = 128.0  # gray that geometric operations bring in

# Changes images uint8 [n, 3, H, W], given two uniform numbers for each, float64 [n, 2].
_Operation = Callable[[Tensor, np.ndarray], Tensor]


def randaugment(images: Float[Tensor, "B 3 H W"], u: np.ndarray, magnitude: int) -> Float[Tensor, "B 3 H W"]:
    """RandAugment as in big_vision: one of 16 operations a layer, all equally likely, at a fixed magnitude.

    images: values in [0, 255]; u: uniforms [B, layers, 4] (operation, sign, two for the place of the cutout).
    The images that drew the same operation are changed together, rounded to whole numbers before.
    """
    pixels = (images + 0.5).to(torch.uint8)
    table = _operations(magnitude / 10, images.shape[2], images.shape[3])
    for draw in u.swapaxes(0, 1):
        chosen = integers(draw[:, 0], len(table))
        for operation, variants in enumerate(table):
            variant = integers(draw[:, 1], len(variants))
            for number, change in enumerate(variants):
                rows = np.flatnonzero((chosen == operation) & (variant == number))
                if len(rows):
                    at = to_device(rows, pixels.device)
                    pixels[at] = change(pixels[at], draw[rows, 2:])
    return pixels.float()


def _operations(r: float, height: int, width: int) -> list[tuple[_Operation, ...]]:
    """The operations at strength r = magnitude / 10; those with a sign in both variants.

    Deviation: Google's pixel distances are meant for 224 pixels; here they scale with the image's width.
    Deviation: contrast blends with the mean gray; Google's blends with (number of pixels) / 256, by an
    oversight.
    """
    from torchvision.transforms.v2 import functional as V  # slow to import, and only needed here

    pixel = r * width / 224
    enhance = 1.8 * r + 0.1
    threshold = int(256 * r)

    def moved(*matrix: float) -> _Operation:
        """Pixel (x, y), counted from the center, becomes the nearest to (a x + b y + c, d x + e y + f)."""
        halves = np.array([[width], [height]], np.float32) / 2
        (a, b, c), (d, e, f) = (np.array(matrix, np.float32).reshape(2, 3) / halves).tolist()

        def change(p: Tensor, _: np.ndarray) -> Tensor:
            # torchvision's `affine` copies lists to the device, and each copy waits for all the work under way there.
            x, y = (torch.arange(side, device=p.device) - (side - 1) / 2 for side in (width, height))
            y = y[:, None]
            grid = torch.stack([a * x + b * y + c, d * x + e * y + f], dim=-1)
            found = F.grid_sample(p - FILL, grid.expand(len(p), -1, -1, -1), mode="nearest", align_corners=False)
            return (found + FILL).to(torch.uint8)

        return change

    def rotate(degrees: float) -> _Operation:
        cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
        return moved(cos, -sin, 0.0, sin, cos, 0.0)

    def shear(x: float, y: float) -> _Operation:
        return moved(1.0, x, x * height / 2, y, 1.0, y * width / 2)  # the top and the left edge stay

    def translate(x: float, y: float) -> _Operation:
        return moved(1.0, 0.0, -x, 0.0, 1.0, -y)

    def solarize(p: Tensor, _: np.ndarray) -> Tensor:
        return torch.where(p < threshold, p, 255 - p) if threshold <= 255 else p

    def solarize_add(p: Tensor, _: np.ndarray) -> Tensor:
        return torch.where(p < 128, (p.int() + int(110 * r)).clamp(max=255).to(torch.uint8), p)

    def cutout(p: Tensor, place: np.ndarray) -> Tensor:
        half = int(40 * pixel)
        y, x = (
            np.abs(np.arange(side) + 0.5 - integers(place[:, i : i + 1], side)) < half
            for i, side in enumerate((height, width))
        )
        hole = to_device(y[:, :, None] & x[:, None, :], p.device)
        return p.masked_fill(hole[:, None], int(FILL))

    def sharpen(p: Tensor, _: np.ndarray) -> Tensor:
        if min(height, width) < 3:
            return p
        weights = torch.full((3, 1, 3, 3), 1 / 13, device=p.device)
        weights[:, :, 1, 1].fill_(5 / 13)
        sharp = p.float()
        inner = sharp[:, :, 1:-1, 1:-1]
        inner.add_(F.conv2d(sharp, weights, groups=3).round() - inner, alpha=1 - enhance)
        return sharp.clamp(0, 255).to(torch.uint8)

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
        (sharpen,),
        (shear(0.3 * r, 0.0), shear(-0.3 * r, 0.0)),
        (shear(0.0, 0.3 * r), shear(0.0, -0.3 * r)),
        (translate(100 * pixel, 0.0), translate(-100 * pixel, 0.0)),
        (translate(0.0, 100 * pixel), translate(0.0, -100 * pixel)),
        (cutout,),
    ]
