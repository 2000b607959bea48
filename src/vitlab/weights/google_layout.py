"""Names and shapes of the arrays in Google's `.npz`, for ViTs, hybrids (Sec. 3.1) and ResNets (Sec. 4.1).

`google.py` reads and writes files by it. The name of an array is its path in the Flax model. Three spellings are used:

| spelling | the four parts of a block | position table |
|---|---|---|
| `stored`, the published files | numbered in one sequence | `Transformer/posembed_input/pos_embedding` |
| `linen`, the code that reads them | numbered by kind | the same |
| `big_vision` | as `linen` | `pos_embedding`, without a row for the class token; none for `sincos2d` |

| ResNet | spelling | a unit's first convolution | a GroupNorm's arrays |
|---|---|---|---|
| `v1` | `stored` | `block1/unit1/conv1/kernel` | `scale`, `bias`, (1, 1, 1, C) |
| | `linen`, `big_vision` | the same | `scale`, `bias`, (C) |
| `v2` | `stored`, BiT as published | `resnet/block1/unit01/a/standardized_conv2d/kernel` | `gamma`, `beta`, (C) |
| | `linen`, `big_vision` | `block1/unit01/conv1/kernel` | `scale`, `bias`, (1, 1, 1, C) |

Kernels are (in, out), in convolutions (height, width, in, out). In attention the heads are a separate dimension:
(D, k, Dh) for queries, keys and values, (k, Dh, D) for the output.
"""

import re
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig
from vitlab.weights.layout import Layout, Slot, parameter_shapes

Spelling = Literal["stored", "linen", "big_vision"]
_LINEN = ("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")
BLOCK_PARTS: dict[Spelling, tuple[str, str, str, str]] = {
    "stored": ("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3"),
    "linen": _LINEN,
    "big_vision": _LINEN,
}
"""The parts of a block: first norm, attention, second norm, MLP."""
TABLE = "Transformer/posembed_input/pos_embedding"
BIG_VISION_TABLE = "pos_embedding"


class ResNetNames(NamedTuple):
    """How one spelling names and shapes the arrays of a ResNet or of a hybrid's stem."""

    parts: dict[str, str]
    """Our name of a part -> Google's."""
    norm_weight: str
    norm_bias: str
    norm_ones: tuple[int, ...]
    """The dimensions before the channels in a GroupNorm's arrays."""
    has_conv_head: bool = False
    """Whether the head is a 1x1 convolution, and not a linear layer."""


_V1_PARTS = {
    "root": "conv_root",
    "root_norm": "gn_root",
    "unit": "block{}/unit{}/",
    **{f"conv{i}": f"conv{i}" for i in (1, 2, 3)},
    **{f"norm{i}": f"gn{i}" for i in (1, 2, 3)},
    "shortcut": "conv_proj",
    "shortcut_norm": "gn_proj",
    "norm": "norm-pre-head",
    "head": "head",
}
_BIT_PARTS = {
    "root": "resnet/root_block/standardized_conv2d",
    "unit": "resnet/block{}/unit{:02}/",
    **{f"conv{i}": f"{letter}/standardized_conv2d" for i, letter in enumerate("abc", 1)},
    **{f"norm{i}": f"{letter}/group_norm" for i, letter in enumerate("abc", 1)},
    "shortcut": "a/proj/standardized_conv2d",
    "norm": "resnet/group_norm",
    "head": "resnet/head/conv2d",
}
_V1 = ResNetNames(_V1_PARTS, "scale", "bias", norm_ones=())
_V1_STORED = _V1._replace(norm_ones=(1, 1, 1))
_V2 = _V1_STORED._replace(parts=_V1_PARTS | {"root": "root_block/conv_root", "unit": "block{}/unit{:02}/"})
_BIT = ResNetNames(_BIT_PARTS, "gamma", "beta", norm_ones=(), has_conv_head=True)
RESNET_NAMES: dict[str, dict[Spelling, ResNetNames]] = {
    "v1": {"stored": _V1_STORED, "linen": _V1, "big_vision": _V1},
    "v2": {"stored": _BIT, "linen": _V2, "big_vision": _V2},
}
"""By the ResNet's `version` and the spelling."""


def google_body(version: str, spelling: Spelling) -> ResNetBody:
    """The body that Google's code computes from arrays of these names, except for its sizes."""
    if version == "v1":
        return ResNetBody()
    padding = "zero" if spelling == "stored" else "-inf"  # of the pooling, in BiT's code and in big_vision
    return ResNetBody(
        version="v2", weight_eps=1e-10, weight_eps_on="variance", group_norm_eps=1e-5, pool_padding=padding
    )


def google_layout(config: ModelConfig, spelling: Spelling = "stored") -> Layout:
    """Every array of a model."""
    table = BIG_VISION_TABLE if spelling == "big_vision" else TABLE
    unchanged = {"cls": "cls", "map.probe": "MAPHead_0/probe", "position.table": table}  # in shape
    body = config.body if isinstance(config, ResNetConfig) else config.stem
    layout: Layout = {}
    for ours, shape in parameter_shapes(config).items():
        if ours in unchanged:
            layout[unchanged[ours]] = Slot(shape, ours)
        elif isinstance(config, ViTConfig) and not ours.startswith("stem."):
            layout |= _vit_arrays(config, spelling, ours, shape)
        else:
            assert body is not None
            layout |= _resnet_array(RESNET_NAMES[body.version][spelling], ours, shape)
    return layout


def _vit_arrays(config: ViTConfig, spelling: Spelling, ours: str, shape: tuple[int, ...]) -> Layout:
    """The array of one parameter, or the three of queries, keys and values, which are one parameter here."""
    module, _, leaf = ours.rpartition(".")
    theirs = _vit_module(module, spelling)
    width, heads = config.width, (config.heads, config.width // config.heads)
    if module.endswith("attention.qkv"):
        theirs = theirs.removesuffix("qkv")
        end, shape = ("kernel", (width, *heads)) if leaf == "weight" else ("bias", heads)
        names = enumerate(("query", "key", "value"))
        return {f"{theirs}{name}/{end}": Slot(shape, ours, (i * width, (i + 1) * width)) for i, name in names}
    if len(shape) == 1:
        return {f"{theirs}/{'bias' if leaf == 'bias' else 'scale'}": Slot(shape, ours)}
    shape = (*heads, width) if module.endswith("attention.out") else _kernel_shape(shape)
    return {f"{theirs}/kernel": Slot(shape, ours)}


def _vit_module(module: str, spelling: Spelling) -> str:
    """Google's name of a module of a ViT."""
    norm1, attention, norm2, mlp = BLOCK_PARTS[spelling]
    for pattern, replacement in (
        (r"^blocks\.(\d+)\.", r"Transformer/encoderblock_\1/"),
        (r"^map\.norm$", "MAPHead_0/LayerNorm_0"),
        (r"^map\.", "MAPHead_0/"),
        (r"^norm$", "Transformer/encoder_norm"),
        (r"\bnorm1$", norm1),
        (r"\bnorm2$", norm2),
        (r"\battention\.", f"{attention}/"),
        (r"\bmlp\.fc1$", f"{mlp}/Dense_0"),
        (r"\bmlp\.fc2$", f"{mlp}/Dense_1"),
    ):
        module = re.sub(pattern, replacement, module)
    return module


def _resnet_array(names: ResNetNames, ours: str, shape: tuple[int, ...]) -> Layout:
    """The array of one parameter, such as `body.stages.0.1.conv1.weight` of the second unit of the first stage."""
    module, _, leaf = ours.rpartition(".")
    *path, part = module.split(".")
    theirs = names.parts[part]
    if "stages" in path:
        stage, unit = map(int, path[-2:])
        theirs = names.parts["unit"].format(stage + 1, unit + 1) + theirs
    if "norm" in part:
        array = names.norm_weight if leaf == "weight" else names.norm_bias
        return {f"{theirs}/{array}": Slot((*names.norm_ones, *shape), ours)}
    if leaf == "bias":
        return {f"{theirs}/bias": Slot(shape, ours)}
    if part == "head" and names.has_conv_head:
        shape = (*shape, 1, 1)
    return {f"{theirs}/kernel": Slot(_kernel_shape(shape), ours)}


def _kernel_shape(weight_shape: tuple[int, ...]) -> tuple[int, ...]:
    """(out, in) -> (in, out); (out, in, height, width) -> (height, width, in, out)."""
    out_features, in_features, *window = weight_shape
    return (*window, in_features, out_features)


def to_ours(name: str, array: Tensor) -> Tensor:
    """A copy of the array that Google calls `name`, in the layout of our parameter. The cases are ordered: each is for
    arrays that no case above it is for."""
    if name.endswith("head/conv2d/kernel"):
        array = array.flatten(0, 2).T  # BiT's head, (1, 1, in, out) -> (out, in)
    elif name.endswith("/kernel") and array.ndim == 4:
        array = array.permute(3, 2, 0, 1)  # (h, w, in, out) -> (out, in, h, w)
    elif name.endswith("/out/kernel"):
        array = array.flatten(0, 1).T  # (k, Dh, D) -> (D, k Dh)
    elif name.endswith("/kernel"):
        array = array.flatten(1).T  # (D, k, Dh) -> (k Dh, D); (in, out) -> (out, in)
    elif name.endswith(("/bias", "/scale", "/beta", "/gamma")):
        array = array.flatten()  # (k, Dh) -> (k Dh); (1, 1, 1, C) -> (C)
    return array.clone(memory_format=torch.contiguous_format)


def to_google(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `to_ours`: the array of this shape that Google calls `name`."""
    if not name.endswith("/kernel"):
        return tensor.reshape(shape)
    return tensor.permute(2, 3, 1, 0) if tensor.ndim == 4 else tensor.T.reshape(shape)
