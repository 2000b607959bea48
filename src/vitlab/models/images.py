"""What a model takes: a batch of RGB images, already normalized. Anything else raises an error that says what to do."""

import math

import torch
import torch.fx
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from vitlab.errors import UserError
from vitlab.models.config import check_divisible
from vitlab.models.resnet_config import ResNetBody

LARGEST = 32.0
"""No normalization makes larger values of pixels: 1 / std of the usual data sets is 5 at most."""


def check_images(
    images: Tensor, image_hw: tuple[int, int] | None = None, patch_size: int = 1, stem: ResNetBody | None = None
) -> Tensor:
    """The `images` as they are, if a model can take them: [B, 3, H, W], floating point, of `image_hw` pixels unless it
    is None. Their values are looked at where that costs next to nothing.

    Raises UserError otherwise.
    """
    return _checked(images, image_hw, patch_size, stem)


@torch.fx.wrap  # one node of a symbolic trace, which knows neither shape nor type
def _checked(images: Tensor, image_hw: tuple[int, int] | None, patch_size: int, stem: ResNetBody | None) -> Tensor:
    _check_shape(images)
    if not images.is_floating_point():
        raise UserError(
            f"the images are {images.dtype}; a model takes floating-point values, normalized as in its training. "
            f"For pixels of 0 to 255 and values in [-1, 1]: images.float() / 127.5 - 1."
        )
    if image_hw is not None and tuple(images.shape[-2:]) != image_hw:
        raise UserError(_wrong_size((images.shape[-2], images.shape[-1]), image_hw, patch_size, stem))
    if _is_readable(images):
        low, high = (value.item() for value in images.detach().aminmax())
        if LARGEST < high < math.inf and low > -high / 4:  # noise that grew is as large below zero
            raise UserError(
                f"the images have values from {low:.4g} to {high:.4g}; a model takes them normalized as in its "
                f"training. For pixels of 0 to 255 and values in [-1, 1]: images / 127.5 - 1."
            )
    return images


def _check_shape(images: Tensor) -> None:
    if images.ndim == 4 and images.shape[1] == 3:
        return
    shape = list(images.shape)
    if images.ndim == 3:
        advice = "for a single image, add the batch dimension: images[None]"
    elif images.ndim != 4:
        advice = "stack the images into one tensor"
    elif images.shape[1] == 1:
        advice = "for gray images, repeat the channel: images.expand(-1, 3, -1, -1)"
    elif images.shape[-1] == 3:
        advice = "move the channels to the front: images.permute(0, 3, 1, 2)"
    elif images.shape[1] == 4:
        advice = "leave out the alpha channel: images[:, :3]"
    else:
        advice = "give red, green and blue"
    raise UserError(f"the images have the shape {shape}; a model takes [batch, 3, height, width]: {advice}.")


def _is_readable(images: Tensor) -> bool:
    """Whether the values can be read here: on a CPU, where that waits for nothing, and in no kind of trace."""
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        and images.device.type == "cpu"
        and type(images) is Tensor
        and images.numel() > 0
        and _get_current_dispatch_mode() is None
        and not torch._C._functorch.is_functorch_wrapped_tensor(images)  # pyright: ignore[reportAttributeAccessIssue]
    )


def _wrong_size(given: tuple[int, int], expected: tuple[int, int], patch_size: int, stem: ResNetBody | None) -> str:
    check_divisible(given, patch_size, stem)
    return (
        f"the model was built for {expected[0]}x{expected[1]} pixels and the images have {given[0]}x{given[1]}; resize "
        f"them, or load the model with image_size={given if given[0] != given[1] else given[0]}, which interpolates "
        f"its position embeddings."
    )
