"""The input of a model: a batch of normalized RGB images. Anything else raises an error that says what to do."""

from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.config import check_divisible
from vitlab.models.resnet_config import ResNetBody


def check_images(
    images: Tensor, image_hw: tuple[int, int] | None = None, patch_size: int = 1, stem: ResNetBody | None = None
) -> Tensor:
    """The `images` as they are, if a model can take them: [B, 3, H, W], floating point, of `image_hw` pixels unless it
    is None. Raises UserError otherwise."""
    if images.ndim != 4 or images.shape[1] != 3:
        raise UserError(
            f"the images have the shape {list(images.shape)}; a model takes [batch, 3, height, width]. For a single "
            f"image: images[None]; for channels last: images.permute(0, 3, 1, 2); for gray: images.expand(-1, 3, -1, "
            f"-1)."
        )
    if not images.is_floating_point():
        raise UserError(
            f"the images are {images.dtype}; a model takes floating-point values, normalized as in its training. "
            f"For pixels of 0 to 255 and values in [-1, 1]: images.float() / 127.5 - 1."
        )
    height, width = images.shape[-2:]
    if image_hw is not None and (height, width) != image_hw:
        check_divisible((height, width), patch_size, stem)
        raise UserError(
            f"the model was built for {image_hw[0]}x{image_hw[1]} pixels and the images have {height}x{width}; resize "
            f"them, or load the model with image_size={(height, width) if height != width else height}, which "
            f"interpolates its position embeddings."
        )
    return images
