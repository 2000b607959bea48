"""How every parameter begins: Google's initializers (Flax's), in one table by the parameter's name."""

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.models.config import LEARNED_POSITIONS, ModelConfig, ViTConfig

Initializer = Callable[[Tensor, torch.Generator | None], object]


class _Uninitialized(nn.Linear):
    def reset_parameters(self) -> None:
        pass


def linear(inputs: int, outputs: int) -> nn.Linear:
    """An `nn.Linear` with uninitialized parameters: `init_weights` draws them all. `skip_init` would do the same by way
    of the meta device, whose operations import for seconds."""
    layer: Any = _Uninitialized(inputs, outputs)
    layer.__class__ = nn.Linear  # `quantize_dynamic` replaces by exact type
    return layer


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig, generator: torch.Generator | None = None) -> None:
    """Draws every parameter of `config`'s model in place, in the model's order."""
    if next(model.parameters()).is_meta:
        return  # shapes without numbers; the first normal draw on this device would import for seconds
    table = _initializers(config)
    for name, parameter in model.named_parameters():
        initialize = next((rule for pattern, rule in table if re.search(pattern, name)), None)
        assert initialize is not None, f"no initial value for {name}"
        initialize(parameter, generator)


@torch.no_grad()
def redraw_positions(model: nn.Module, config: ViTConfig, generator: torch.Generator | None = None) -> None:
    """Draws the position embeddings of the grid anew, in place, as `init_weights` does. The class token's row stays: it
    has no position in the image."""
    assert config.position in LEARNED_POSITIONS, f"position={config.position!r} has nothing to draw"
    prefix = config.num_position_prefix if config.position == "1d" else 0  # of the 2-D kind it is apart
    for name, parameter in model.named_parameters():
        if name.startswith("position.") and name != "position.prefix":
            _normal(config.position_std)(parameter[:, prefix:], generator)


@torch.no_grad()
def scale_head(model: Any, factor: float) -> None:
    """Multiplies the logits of a model, by its heads' weights and biases."""
    for head in (model.head, getattr(model, "head_distilled", None)):
        if head is not None:
            head.weight.mul_(factor)
            head.bias.mul_(factor)


@torch.no_grad()
def redraw_head(model: nn.Module, std: float, generator: torch.Generator | None = None) -> None:
    """Draws the weights of the head anew, in place, with this standard deviation."""
    for name, parameter in model.named_parameters():
        if name in ("head.weight", "head_distilled.weight"):
            _normal(std)(parameter, generator)


def _initializers(config: ModelConfig) -> list[tuple[str, Initializer]]:
    """Pattern of a parameter's name -> how it is drawn; the first that fits."""
    vit = isinstance(config, ViTConfig)
    body = config.stem if vit else config.body
    stages = body is not None and body.version == "v1"
    return [
        (r"^head(_distilled)?\.weight$", _normal(config.head_std if vit else 0.0)),
        (r"^head(_distilled)?\.bias$", _constant(config.head_bias)),
        (r"^(cls|distillation)$", _constant(0.0)),
        (r"^registers$", _normal(1e-6)),
        (r"^position\.", _normal(config.position_std if vit else 0.0)),
        (r"(^|\.)probe$", _xavier),
        (r"(^|\.)qkv\.weight$", _xavier_thirds),
        (r"(^|\.)(out|fc1|fc2)\.weight$", _xavier),
        (r"(^|\.)(fc1|fc2)\.bias$", _normal(1e-6)),
        (r"_offsets$", _unit_rows),
        (r"(^|\.)(embedding|pre_logits|root|conv\d|shortcut)\.weight$", _lecun_normal),
        (r"\.scale$", _constant((config.variant.layer_scale if vit else None) or 0.0)),
        # The branch of a post-activation bottleneck adds nothing at the start.
        *([(r"stages\..*\.norm3\.weight$", _constant(0.0))] if stages else []),
        (r"norm\d?\.weight$", _constant(1.0)),
        (r"\.bias$", _constant(0.0)),
    ]


def _constant(value: float) -> Initializer:
    return lambda tensor, generator: nn.init.constant_(tensor, value)


def _normal(std: float) -> Initializer:
    if std == 0:  # draws nothing, so that what comes after does not depend on it
        return _constant(0.0)
    return lambda tensor, generator: nn.init.normal_(tensor, std=std, generator=generator)


def _xavier(tensor: Tensor, generator: torch.Generator | None) -> None:
    nn.init.xavier_uniform_(tensor if tensor.ndim == 2 else tensor.flatten(0, -2), generator=generator)


def _xavier_thirds(tensor: Tensor, generator: torch.Generator | None) -> None:
    """q, k and v separately, each a D x D matrix."""
    for matrix in tensor.chunk(3):
        nn.init.xavier_uniform_(matrix, generator=generator)


def _unit_rows(tensor: Tensor, generator: torch.Generator | None) -> None:
    nn.init.normal_(tensor, std=tensor.shape[-1] ** -0.5, generator=generator)


def _lecun_normal(tensor: Tensor, generator: torch.Generator | None) -> None:
    """Variance 1 / fan_in after truncation at +-2 sd, which alone would leave 0.8796 of the sd."""
    std = math.sqrt(1.0 / tensor[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std, generator=generator)
