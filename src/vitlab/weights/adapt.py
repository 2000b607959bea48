"""A trained model at another image size and for another task (Sec. 3.2), as `load_model` asks for."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.config import ImageSize, ModelConfig, Pool, ResNetConfig, ViTConfig
from vitlab.models.position import interpolate_offsets, resize_positions
from vitlab.models.readout import change_readout
from vitlab.models.variant import Interpolation, override

MAX_PATCHES = 2**16
"""Most patches of a resized model: 4096 pixels in patches of 16."""


def adapt(
    config: ModelConfig,
    state: dict[str, Tensor],
    *,
    image_size: ImageSize | None = None,
    num_classes: int | None = None,
    reset_head: bool = False,
    pre_logits: Literal["keep", "drop"] = "keep",
    head_bias: float = 0.0,
    interpolation: Interpolation | None = None,
    in_chans: int | None = None,
    depth: int | None = None,
    pool: Pool | None = None,
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and parameters for another image size or task; the options are as in `load_model`.

    An `interpolation` becomes the configuration's; the class token's position row is unchanged. Raises UserError for a
    size that the patch does not divide or that makes more than MAX_PATCHES; for dropping the layer under a trained
    head; for an `interpolation` of a ResNet; for `in_chans` of a model without a plain patch embedding of 3 channels;
    for a `depth` or a `pool` that the model cannot have, or that changes the input of a trained head.
    """
    if pre_logits not in ("keep", "drop"):
        raise UserError(f"pre_logits is {pre_logits!r}; allowed: 'keep', 'drop'.")
    state = dict(state)
    image_size = config.image_size if image_size is None else image_size
    num_classes = config.num_classes if num_classes is None else num_classes
    new = dataclasses.replace(config, image_size=image_size, num_classes=num_classes)
    _check_size(config, new)
    reset_head = reset_head or num_classes != config.num_classes
    if pre_logits == "drop":
        new = _drop_pre_logits(new, state, trained_classes=0 if reset_head else config.num_classes)
    if interpolation is not None:
        if not isinstance(new, ViTConfig):
            raise UserError(f"interpolation={interpolation!r} is for position embeddings, and a ResNet has none.")
        new = override(new, position_interpolation=interpolation)
    if in_chans is not None and in_chans != config.in_chans:
        new = _change_channels(new, state, in_chans)
    _resize(config, new, state)
    if depth is not None or pool is not None:
        new = _apply_readout(new, state, depth, pool, reset_head)
    if reset_head:
        new = dataclasses.replace(new, head_bias=head_bias)
        _reset_head(new, state)
    return new, state


def _check_size(config: ModelConfig, new: ModelConfig) -> None:
    """Raises UserError for a larger image than memory and time allow, which a checkpoint's metadata may request."""
    trained, resized = (
        each.num_patches if isinstance(each, ViTConfig) else math.prod(each.image_hw) // 32**2 for each in (config, new)
    )
    if resized > max(MAX_PATCHES, trained):
        raise UserError(
            f"image_size={new.image_size}, of the checkpoint's preprocessing or given, makes {resized:,} patches of an "
            f"image; allowed: {MAX_PATCHES:,}. Give a smaller image_size."
        )


def _drop_pre_logits(config: ModelConfig, state: dict[str, Tensor], trained_classes: int) -> ModelConfig:
    """Removes the hidden layer before the head from `state`; returns the configuration. trained_classes: outputs of
    the head that would stay; 0 without one. Raises UserError if there is one."""
    if not isinstance(config, ViTConfig) or not config.representation_size:
        return config
    if trained_classes:
        raise UserError(
            f"pre_logits='drop' removes the layer that the head of {trained_classes} classes was trained on; add "
            f"reset_head=True for a new head, or num_classes=0 for none."
        )
    del state["pre_logits.weight"], state["pre_logits.bias"]
    return dataclasses.replace(config, representation_size=None)


def _apply_readout(
    config: ModelConfig, state: dict[str, Tensor], depth: int | None, pool: Pool | None, reset_head: bool
) -> ViTConfig:
    """Cuts `state` to the first blocks and moves class token and registers, in place; returns the configuration. The
    last LayerNorm stays. Raises UserError if a trained head stays on another input."""
    new = change_readout(config, depth, pool)
    assert isinstance(config, ViTConfig)
    if new != config and config.num_classes and not reset_head:
        raise UserError(
            f"depth={depth}, pool={pool!r} changes the input of the trained head; add reset_head=True for a new head, "
            f"or num_classes=0 for none."
        )
    for name in [name for name in state if name.startswith("blocks.") and int(name.split(".")[1]) >= new.depth]:
        del state[name]
    if config.position_at == "every":
        state.update({name: state[name][: new.depth] for name in state if name.startswith("position.")})
    if config.has_class_token and not new.has_class_token:
        _class_token_to_register(config, state)
    elif new.has_class_token and not config.has_class_token:
        state["cls"], state["registers"] = state["registers"].tensor_split([1], dim=1)
        if not new.variant.registers:
            del state["registers"]
    return new


def _class_token_to_register(config: ViTConfig, state: dict[str, Tensor]) -> None:
    """Makes the class token, with its position embedding, the first register, in place."""
    token = state.pop("cls")
    name = {"1d": "position.table", "2d": "position.prefix"}.get(config.position)
    if name is not None and config.variant.class_position:
        row, state[name] = state[name].tensor_split([1], dim=1)
        token = token + row
        if not state[name].shape[1]:
            del state[name]
    state["registers"] = torch.cat([token, state["registers"]], dim=1) if "registers" in state else token


def _change_channels(config: ModelConfig, state: dict[str, Tensor], channels: int) -> ViTConfig:
    """Changes the patch filters [D, 3, P, P] to `channels`, in place, as timm does; returns the configuration. For one
    channel: their sum, which on gray images computes what they compute on RGB; for others they repeat, times 3 /
    channels."""
    if not isinstance(config, ViTConfig) or config.stem or config.in_chans != 3:
        raise UserError(f"in_chans={channels} is for ViTs that cut 3 channels into patches; leave it out.")
    weight = state["embedding.weight"]
    if channels == 1:
        weight = weight.sum(dim=1, keepdim=True)
    else:
        weight = weight.repeat(1, -(-channels // 3), 1, 1)[:, :channels] * (3 / channels)
    state["embedding.weight"] = weight
    return dataclasses.replace(config, in_chans=channels)


def _resize(config: ModelConfig, new: ModelConfig, state: dict[str, Tensor]) -> None:
    """Interpolates what depends on the grid, in place: position embeddings, relative encodings of an axial ResNet."""
    if isinstance(config, ViTConfig) and isinstance(new, ViTConfig) and new.grid != config.grid:
        state.update(resize_positions(state, config, new.grid, new.variant.position_interpolation))
    if isinstance(config, ResNetConfig) and isinstance(new, ResNetConfig) and config.body.mixing == "axial":
        for name in [name for name in state if name.endswith("_offsets")]:
            stage, number = map(int, name.split(".")[2:4])
            unit = config.body.units()[sum(config.body.layers[:stage]) + number]
            axis = 1 if name.endswith("row_offsets") else 0  # within a row, positions are as many as columns
            old_side, side = unit.grid(config.image_hw)[axis], unit.grid(new.image_hw)[axis]
            state[name] = interpolate_offsets(state[name][None], (old_side, 1), (side, 1))[0]


def _reset_head(config: ModelConfig, state: dict[str, Tensor]) -> None:
    """Replaces the heads in `state` by new ones, in place: zero weights, biases `head_bias`; none without classes."""
    like = state["norm.bias"] if "norm.bias" in state else next(iter(state.values()))
    has_two_heads = isinstance(config, ViTConfig) and config.variant.distilled
    for head in ("head", "head_distilled"):
        state.pop(f"{head}.weight", None)
        state.pop(f"{head}.bias", None)
        if config.num_classes and (head == "head" or has_two_heads):
            state[f"{head}.weight"] = like.new_zeros(config.num_classes, config.num_features)
            state[f"{head}.bias"] = like.new_full((config.num_classes,), config.head_bias)


def fold_normalization(state: dict[str, Tensor], mean: Sequence[float], std: Sequence[float]) -> dict[str, Tensor]:
    """Parameters that compute on images in [-1, 1] what `state`'s compute on (image in [0, 1] - mean) / std.

    Deviation: other code normalizes the images. The patch embedding is linear and touches no padding, so this is the
    same but for rounding, and every model takes what the paper's take. Raises UserError for a convolutional stem, whose
    padding and standardized weights allow no such change.
    """
    if all(math.isclose(value, 0.5, abs_tol=1e-4) for value in (*mean, *std)):
        return state
    if "embedding.weight" not in state or any(name.startswith("stem.") for name in state):
        raise UserError(
            f"the checkpoint requires images normalized by mean {list(mean)} and std {list(std)}; that can be folded "
            f"into a plain ViT's patch embedding, not into a ResNet. Only mean and std of 0.5 are supported there."
        )
    weight = state["embedding.weight"].double()
    if not len(mean) == len(std) == weight.shape[1] or not all(value > 0 for value in std):
        raise UserError(
            f"mean {list(mean)} and std {list(std)} must be {weight.shape[1]} numbers each, one of each channel, std "
            f"positive."
        )
    center, scale = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (mean, std))
    bias = state["embedding.bias"].double() + (weight * ((0.5 - center) / scale)).sum(dim=(1, 2, 3))
    return {**state, "embedding.weight": (weight / (2 * scale)).float(), "embedding.bias": bias.float()}
