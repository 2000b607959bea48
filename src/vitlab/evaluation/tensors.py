"""Photos as the input of a model, and the features that it computes of them, for code of one's own.

model = vitlab.load_model("vit-s16")
vitlab.preprocess(model, "photo.jpg")  # [1, 3, 224, 224]
vitlab.features(model, ["a.jpg", "b.jpg"])  # [2, 384]
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast, get_args, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitlab.data.transforms import EvalTransform
from vitlab.errors import UserError
from vitlab.evaluation.sources import ImageSource, find_images, read_image
from vitlab.models.vit import ViT, evaluation_mode, unwrap

Images = ImageSource | Iterable[ImageSource]
"""One image or several, in any form that `vitlab.predict` takes."""


def preprocess(model: nn.Module, images: Images) -> Float[Tensor, "B 3 H W"]:
    """The input of `model` for images: [B, 3, H, W] in [-1, 1], resized and cropped as its checkpoint says.

    The preprocessing is `model.preprocessing`, which `load_model` sets. Without one, as for a new model, images are
    squashed to the model's size. Raises UserError for what is missing or not an image, ImageError for a file that
    cannot be decoded.
    """
    inner, sources = unwrap(model), _as_list(images)
    transform = EvalTransform(inner.config.image_hw, inner.preprocessing)
    levels = transform.preprocessing.range
    return torch.cat([transform.apply([read_image(source, name, levels)]) for name, source in find_images(sources)])


def _as_list(images: Images) -> list[Any]:
    if isinstance(images, get_args(ImageSource)):
        return [images]
    return [*cast(Iterable[ImageSource], images)]


@overload
def features(model: nn.Module, images: Images, layers: None = None, *, batch_size: int = 16) -> Tensor: ...
@overload
def features(
    model: nn.Module, images: Images, layers: int | Sequence[int], *, batch_size: int = 16
) -> tuple[Tensor, ...]: ...
def features(
    model: nn.Module, images: Images, layers: int | Sequence[int] | None = None, *, batch_size: int = 16
) -> Float[Tensor, "B Dr"] | tuple[Float[Tensor, "B N D"], ...]:
    """The representation of images that the head reads: [B, Dr], such as the class token (Eq. 4), on the CPU.

    layers: instead, the patch tokens [B, N, D] after each of these blocks,
    lowest first, after the last LayerNorm: a number is the last so many blocks, a list names them (0 is the first, -1
    the last). The model runs in evaluation mode, without gradients, `batch_size` images at once. Raises UserError for
    a layer that the model does not have.
    """
    inner = unwrap(model)
    if layers is not None and not isinstance(inner, ViT):
        raise UserError("a ResNet has no blocks of tokens; leave `layers` out.")
    weight = next(inner.parameters())
    parts: list[tuple[Tensor, ...]] = []
    with evaluation_mode(inner), torch.no_grad():
        for batch in preprocess(model, images).to(weight.device, weight.dtype).split(batch_size):
            if layers is not None and isinstance(inner, ViT):
                parts.append(inner.get_intermediate_layers(batch, layers))
            else:
                parts.append((inner.forward_head(inner.forward_features(batch), pre_logits=True),))
    joined = tuple(torch.cat(tensors).float().cpu() for tensors in zip(*parts, strict=True))
    return joined[0] if layers is None else joined
