"""Hugging Face's models: FAMILIES has a row for each `model_type`, from which `huggingface.py` and its parts read.

`huggingface_layout` names a model's arrays; `from_file` and `to_file` do what a change of names and rows cannot.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from vitlab.models import ModelConfig, Variant, ViTConfig
from vitlab.models.variant import Interpolation
from vitlab.weights.layout import Layout, Slot, renamed_layout

Arrays = dict[str, Tensor]
DISTILLED_HEADS = ("cls_classifier", "distillation_classifier")
HEADS = ("classifier", *DISTILLED_HEADS, "visual_projection")
"""Parts outside the body."""
HALF = [0.5] * 3, [0.5] * 3
"""Mean and std that bring images to [-1, 1]."""
IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
"""Mean and std of ImageNet's images."""
OPENAI = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
"""Mean and std of the images of OpenAI's CLIP."""


@dataclass(frozen=True, kw_only=True)
class Readout:
    """What a head reads, or a model without a head returns."""

    pool: Literal["token", "gap", "map", "token+gap"] = "token"
    final_norm: Literal["tokens", "none"] = "tokens"
    registers: int = 0
    """1 for a class token that is not read: it is a register here."""


TOKEN = Readout()
MEAN = Readout(pool="gap")


@dataclass(frozen=True, kw_only=True)
class Family:
    """All that this package knows of one `model_type`."""

    model_type: str
    class_name: str = ""
    """Beginning of the names of their classes; "" if models are read but not written."""

    # The names of its arrays.
    prefix: str
    """In front of all names of the body in files with a head."""
    names: dict[str, str]
    """Our name of a part, without block, `.weight` and `.bias` -> theirs. Parts that are not listed have our name."""
    blocks: str = "encoder.layer."
    qkv: tuple[str, str, str] = ("attention.attention.query", "attention.attention.key", "attention.attention.value")
    swiglu: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Our name of a part -> theirs, where a SwiGLU has others."""
    ignored: str = r"embeddings\.mask_token$"
    """Pattern of arrays that only pre-training or another tower uses."""
    placeholders: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Name -> shape, without the width, of arrays that their code requires and our models may lack."""

    # Defaults of settings that a folder leaves out.
    heads: int = 12
    activation: str = "gelu"
    layer_norm_eps: float = 1e-12
    mean_std: tuple[list[float], list[float]] = IMAGENET
    processor: str = "ViT"

    # Its structure.
    body: Readout = TOKEN
    """Of a model without a head or with a projection."""
    classifier: Readout = TOKEN
    """Of a model with any other head."""
    written_head: Literal["classifier", "projection", "none"] = "classifier"
    """The kind of head that models may be written with."""
    is_resnet: bool = False
    is_image_tower: bool = False
    """Whether it is the half of CLIP or SigLIP that reads images."""
    is_clip: bool = False
    """Whether it is CLIP's half, which has a LayerNorm before the blocks."""
    is_dinov2: bool = False
    """Whether position tables are square, and `mlp_ratio`, a whole number, gives the width of the MLPs."""
    is_dinov3: bool = False
    """Whether RoPE replaces the position table, and biases of queries, keys and values may be missing."""
    has_layer_scale: bool = False
    has_registers: bool = False
    has_distillation_token: bool = False
    """Whether there may be a second token, with a position. Without a teacher's head it is a register here."""
    has_pooler: bool = False
    """Whether models that are written without a head may have a pooler, our pre-logits layer."""
    swiglu_setting: str = ""
    """The setting which says that MLPs are SwiGLUs; "" if they never are."""
    interpolation: Interpolation = "bicubic"


# fmt: off
_VIT = {
    "cls": "embeddings.cls_token",
    "registers": "embeddings.register_tokens",
    "position.table": "embeddings.position_embeddings",
    "embedding": "embeddings.patch_embeddings.projection",
    "norm1": "layernorm_before",
    "attention.out": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "norm": "layernorm",
    "pre_logits": "pooler.dense",
    "head": "classifier",
}
_DEIT = _VIT | {
    "distillation": "embeddings.distillation_token",
    "registers": "embeddings.distillation_token",  # if no head reads it
    "head_distilled": "distillation_classifier",
}
_DINOV2 = _VIT | {
    **{part: part for part in ("norm1", "norm2", "mlp.fc1", "mlp.fc2")},
    "branch1.scale": "layer_scale1.lambda1", "branch2.scale": "layer_scale2.lambda1",
}
_DINOV3 = {
    "cls": "embeddings.cls_token",
    "registers": "embeddings.register_tokens",
    "embedding": "embeddings.patch_embeddings",
    "attention.out": "attention.o_proj",
    "branch1.scale": "layer_scale1.lambda1", "branch2.scale": "layer_scale2.lambda1",
    "mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj",
    "head": "classifier",
}
_TOWER = {
    "cls": "embeddings.class_embedding",
    "registers": "embeddings.class_embedding",  # if CLIP's classifier does not read it
    "position.table": "embeddings.position_embedding.weight",
    "embedding": "embeddings.patch_embedding",
    "pre_norm": "pre_layrnorm",
    "norm1": "layer_norm1",
    "attention.out": "self_attn.out_proj",
    "norm2": "layer_norm2",
    "norm": "post_layernorm",
    "map.probe": "head.probe", "map.norm": "head.layernorm",
    "map.attention.qkv": "head.attention.in_proj", "map.attention.out": "head.attention.out_proj",
    "map.mlp.fc1": "head.mlp.fc1", "map.mlp.fc2": "head.mlp.fc2",
    "head": "classifier",
}
_BIT = {
    "body.root": "embedder.convolution", "body.root_norm": "embedder.norm",
    "shortcut": "downsample.conv", "shortcut_norm": "downsample.norm",
    "head": "classifier.1",
}

# Arguments by line: names, defaults, structure.
_DINOV2_FAMILY = Family(
    model_type="dinov2", class_name="Dinov2", prefix="dinov2.", names=_DINOV2,
    swiglu={"mlp.fc1": ("mlp.weights_in",), "mlp.fc2": ("mlp.weights_out",)},
    placeholders={"embeddings.mask_token": (1,)},
    layer_norm_eps=1e-6, processor="Bit",
    classifier=Readout(pool="token+gap"), is_dinov2=True, has_layer_scale=True, swiglu_setting="use_swiglu_ffn",
)
_CLIP = Family(
    model_type="clip", class_name="CLIP", prefix="vision_model.", names=_TOWER, blocks="encoder.layers.",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ignored=r"text_model\.|text_projection\.|logit_(scale|bias)$|embeddings\.position_ids$",
    activation="quick_gelu", layer_norm_eps=1e-5, mean_std=OPENAI, processor="CLIP",
    classifier=Readout(pool="gap", final_norm="none", registers=1), is_image_tower=True, is_clip=True,
)
_SIGLIP = replace(
    _CLIP, model_type="siglip", class_name="",
    activation="gelu_pytorch_tanh", layer_norm_eps=1e-6, mean_std=HALF, processor="Siglip",
    body=Readout(pool="map"), classifier=MEAN, is_clip=False,
)
FAMILIES = {family.model_type: family for family in (
    Family(model_type="vit", class_name="ViT", prefix="vit.", names=_VIT, mean_std=HALF, has_pooler=True),
    Family(
        model_type="deit", class_name="DeiT", prefix="deit.", names=_DEIT, processor="DeiT",
        has_distillation_token=True, has_pooler=True,
    ),
    Family(model_type="vit_mae", prefix="vit.", names=_VIT, ignored=r"decoder\.|embeddings\.mask_token$"),
    Family(model_type="vit_msn", prefix="vit.", names=_VIT, layer_norm_eps=1e-6),
    Family(model_type="ijepa", class_name="IJepa", prefix="ijepa.", names=_VIT, body=MEAN, classifier=MEAN),
    _DINOV2_FAMILY,
    replace(
        _DINOV2_FAMILY, model_type="dinov2_with_registers", class_name="Dinov2WithRegisters",
        prefix="dinov2_with_registers.", has_registers=True, interpolation="bicubic_antialias",
    ),
    Family(
        model_type="dinov3_vit", class_name="DINOv3ViT", prefix="dinov3_vit.", names=_DINOV3, blocks="layer.",
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        swiglu={"mlp.fc1": ("mlp.gate_proj", "mlp.up_proj")},
        placeholders={"embeddings.mask_token": (1, 1), "embeddings.register_tokens": (1, 0)},
        heads=6, layer_norm_eps=1e-5, processor="DINOv3ViT",
        written_head="none", is_dinov3=True, has_layer_scale=True, has_registers=True, swiglu_setting="use_gated_mlp",
    ),
    _CLIP,
    replace(_CLIP, model_type="clip_vision_model", class_name="CLIPVision", written_head="projection"),
    _SIGLIP,
    replace(_SIGLIP, model_type="siglip_vision_model", class_name="SiglipVision", written_head="none"),
    Family(model_type="bit", prefix="bit.", names=_BIT, mean_std=HALF, processor="Bit", is_resnet=True),
)}
# fmt: on

_PARAMETER = re.compile(
    r"(blocks\.(?P<block>\d+)\.|body\.stages\.(?P<stage>\d+)\.(?P<unit>\d+)\.)?(?P<part>.+?)(?P<leaf>\.weight|\.bias)?"
)
"""A name of ours: `blocks.3.mlp.fc1.bias` has block 3, part `mlp.fc1` and leaf `.bias`."""


def huggingface_layout(family: Family, config: ModelConfig) -> Layout:
    """Every array of a model, by its name without the family's prefix."""
    variant = config.variant if isinstance(config, ViTConfig) else Variant()
    layout = renamed_layout(config, lambda ours: dict.fromkeys(_their_names(family, ours, variant), 1))
    if has_token_row(family, config):
        table = "embeddings.position_embeddings"
        _, rows, width = layout[table].shape
        layout[table] = Slot((1, rows + 1, width), "position.table")
    return layout


def _their_names(family: Family, ours: str, variant: Variant) -> list[str]:
    """The arrays that hold a parameter of ours, in the order of its rows."""
    match = _PARAMETER.fullmatch(ours)
    assert match
    unit, part, leaf = "", match["part"], match["leaf"] or ""
    if match["block"]:
        unit = f"{family.blocks}{match['block']}."
    elif match["stage"]:
        unit = f"encoder.stages.{match['stage']}.layers.{match['unit']}."
    if part == "map.attention.qkv":
        leaf = leaf.replace(".", "_")
    return [f"{unit}{name}{leaf}" for name in part_names(family, part, variant)]


def part_names(family: Family, part: str, variant: Variant) -> tuple[str, ...]:
    """Their parts that hold a part of ours, in the order of its rows."""
    if part == "attention.qkv":
        return family.qkv
    if part == "head" and variant.distilled:
        return ("cls_classifier",)
    if variant.swiglu and part in family.swiglu:
        return family.swiglu[part]
    return (family.names.get(part, part),)


def has_token_row(family: Family, config: ModelConfig) -> bool:
    """Whether the position table has a row for a distillation token that is a register here."""
    return family.has_distillation_token and isinstance(config, ViTConfig) and config.variant.registers > 0


def reads_mean(family: Family, settings: Mapping[str, Any]) -> bool:
    """Whether config.json is of a classifier on an image tower, which reads the mean over patches."""
    return family.is_image_tower and "ForImageClassification" in str(settings.get("architectures"))


# ------------------------------------------------------------------- from the arrays of a file to the layout, and back

CLASS_TOKEN = "embeddings.class_embedding"
POSITIONS = "embeddings.position_embedding.weight"
PATCHES = "embeddings.patch_embedding"
LEADING_DIMS = {CLASS_TOKEN: 2, POSITIONS: 1}
"""Array of an image tower -> how many dimensions of length 1 ours has in front."""


def from_file(family: Family, settings: Mapping[str, Any], arrays: Arrays) -> Arrays:
    """The arrays of the image model in a file with this config.json, as in the layout."""
    arrays = {name.removeprefix(family.prefix): array for name, array in arrays.items()}
    arrays = {name: array for name, array in arrays.items() if not re.match(family.ignored, name)}
    arrays = {name: array for name, array in arrays.items() if array.numel() or name not in family.placeholders}
    if family.is_image_tower:
        arrays = _complete_tower(arrays)
    if reads_mean(family, settings):
        arrays = _select_for_mean(family, arrays)
    if family.is_dinov3 or not settings.get("vision_config", settings).get("qkv_bias", True):
        for name in [name for name in arrays if name.endswith(tuple(f"{part}.weight" for part in family.qkv))]:
            arrays.setdefault(name.replace(".weight", ".bias"), arrays[name].new_zeros(arrays[name].shape[:1]))
    return arrays


def to_file(family: Family, settings: Mapping[str, Any], arrays: Arrays) -> Arrays:
    """The inverse of `from_file`, with all arrays that their code requires."""
    if reads_mean(family, settings):
        arrays = _complete_for_mean(arrays)
    if family.is_image_tower:
        arrays = _reduce_tower(family, arrays)
    for name, shape in family.placeholders.items():
        token = arrays["embeddings.cls_token"]
        arrays = {name: token.new_zeros(*shape, token.shape[-1])} | arrays
    heads = {name for name in arrays if name.split(".")[0] in HEADS}
    prefix = family.prefix if heads else ""
    return {name if name in heads else prefix + name: array for name, array in arrays.items()}


def _complete_tower(arrays: Arrays) -> Arrays:
    """An image tower with our leading dimensions and a bias of the patches; its head is the projection."""
    arrays = {name: array[(None,) * LEADING_DIMS.get(name, 0)] for name, array in arrays.items()}
    if (projection := arrays.pop("visual_projection.weight", None)) is not None:
        arrays |= {"classifier.weight": projection, "classifier.bias": projection.new_zeros(projection.shape[:1])}
    if (weight := arrays.get(f"{PATCHES}.weight")) is not None:
        arrays.setdefault(f"{PATCHES}.bias", weight.new_zeros(weight.shape[:1]))
    return arrays


def _reduce_tower(family: Family, arrays: Arrays) -> Arrays:
    """The inverse of `_complete_tower`."""
    arrays = {name: array[(0,) * LEADING_DIMS.get(name, 0)] for name, array in arrays.items()}
    if family.written_head == "projection" and "classifier.weight" in arrays:
        arrays["visual_projection.weight"] = arrays.pop("classifier.weight")
        del arrays["classifier.bias"]
    if family.is_clip:
        del arrays[f"{PATCHES}.bias"]
    return arrays


def _select_for_mean(family: Family, arrays: Arrays) -> Arrays:
    """An image tower without what a classifier skips: CLIP's last LayerNorm or SigLIP's attention pooling. CLIP's class
    token becomes a register, to which its row of the position table is added."""
    skipped = "post_layernorm." if family.is_clip else "head."
    arrays = {name: array for name, array in arrays.items() if not name.startswith(skipped)}
    token, table = arrays.get(CLASS_TOKEN), arrays.get(POSITIONS)
    if family.is_clip and token is not None and table is not None and table.ndim == 3:
        arrays |= {CLASS_TOKEN: token + table[:, :1], POSITIONS: table[:, 1:]}
    return arrays


def _complete_for_mean(arrays: Arrays) -> Arrays:
    """The inverse of `_select_for_mean` for CLIP. SigLIP's classifiers are not written."""
    table = arrays[POSITIONS]
    width = table.shape[-1]
    norm = {"post_layernorm.weight": table.new_ones(width), "post_layernorm.bias": table.new_zeros(width)}
    return arrays | norm | {POSITIONS: torch.cat([table.new_zeros(1, 1, width), table], dim=1)}
