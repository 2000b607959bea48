"""Image sizes that can be cut into patches. Importing this does not import torch."""

import math

from vitlab.errors import UserError
from vitlab.models.resnet_config import ResNetBody

ImageSize = int | tuple[int, int]
MAX_PIXELS = 2**27


def check_divisible(image_hw: tuple[int, int], patch_size: int, stem: ResNetBody | None = None) -> None:
    """Raises UserError with the nearest good sizes unless `patch_size` divides both sides (of the stem's map)."""
    height, width = sides = stem.grid(image_hw) if stem else image_hw
    if height >= patch_size and width >= patch_size and height % patch_size == 0 and width % patch_size == 0:
        return
    stride = stem.stride if stem else 1
    good = sorted({max(side // patch_size + up, 1) * patch_size * stride for side in sides for up in (0, 1)})
    of_map = f" (of the stem's {height}x{width} feature map)" if stem else ""
    raise UserError(
        f"image size {image_hw[0]}x{image_hw[1]} cannot be cut into patches of {patch_size}x{patch_size}{of_map}; each "
        f"side must be a multiple of {patch_size * stride}, the nearest: {', '.join(map(str, good))}."
    )


def nearest_image_size(image_size: int, patch_size: int, stem: ResNetBody | None = None) -> int:
    """`image_size` if patches divide it, see `check_divisible`; else the nearest larger side that they do."""
    stride = patch_size * (stem.stride if stem else 1)
    side = (stem.grid((image_size, image_size)) if stem else (image_size,))[0]
    if side >= patch_size and side % patch_size == 0:
        return image_size
    return math.ceil(image_size / stride) * stride
