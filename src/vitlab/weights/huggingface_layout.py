"""Hugging Face's models: one table of their arrays' names, for reading and for writing, and of their defaults. `kind`
is a `model_type`. Between a file and `huggingface_layout` come `select_arrays` and its inverse `stored_arrays`."""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vitlab.models import ModelConfig, Variant, ViTConfig
from vitlab.weights.layout import Layout, Slot, renamed_layout

DISTILLED_HEADS = ("cls_classifier", "distillation_classifier")
HEADS = ("classifier", *DISTILLED_HEADS, "visual_projection")
"""Parts outside the body. The names of the body begin with its kind in files with a head."""
HALF = [0.5] * 3, [0.5] * 3
IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
OPENAI = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
"""Mean and std of images."""
_SWIGLU = {"mlp.fc1": ("mlp.weights_in",), "mlp.fc2": ("mlp.weights_out",)}


class Family(NamedTuple):
    """One `model_type`: how its arrays are named, and its values of settings that config.json leaves out."""

    names: dict[str, str]
    """Our name of a part, without block, `.weight` and `.bias` -> theirs; all others are the same."""
    blocks: str = "encoder.layer."
    qkv: tuple[str, ...] = ("attention.attention.query", "attention.attention.key", "attention.attention.value")
    prefix: str = ""
    """In front of the names of the body in some files; "" is the kind and a dot."""
    ignored: str = r"embeddings\.mask_token$"
    """Pattern of arrays that only pre-training or another tower uses."""
    heads: int = 12
    activation: str = "gelu"
    eps: float = 1e-12
    """LayerNorm's."""
    mean_std: tuple[list[float], list[float]] = HALF
    """Default of a folder without preprocessor_config.json."""
    processor: str = "ViT"
    """The image processor of a folder that names none."""
    pool: Literal["token", "gap", "map", "token+gap"] = "token"
    """What the head reads."""
    skips: str = ""
    """Beginning of the names that a classifier on an image tower skips."""
    pre_norm: bool = False
    swiglu: dict[str, tuple[str, ...]] = _SWIGLU
    """Names that differ with a SwiGLU, which the next setting shows."""
    swiglu_setting: str = ""

    @property
    def is_image_tower(self) -> bool:
        """Whether it is CLIP's, which has a `pre_norm`, or SigLIP's."""
        return self.skips != ""

    @property
    def has_layer_scale(self) -> bool:
        """Whether it is DINOv2 or DINOv3."""
        return "branch1.scale" in self.names


_VIT = {
    "cls": "embeddings.cls_token",
    "distillation": "embeddings.distillation_token",
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
    "head_distilled": "distillation_classifier",
}
_SCALES = {"branch1.scale": "layer_scale1.lambda1", "branch2.scale": "layer_scale2.lambda1"}
_DINOV2 = {**{ours: _VIT[ours] for ours in _VIT if ours not in ("norm1", "norm2", "mlp.fc1", "mlp.fc2")}, **_SCALES}
_DINOV3 = {
    **{ours: _VIT[ours] for ours in ("cls", "registers", "head")},
    **_SCALES,
    "embedding": "embeddings.patch_embeddings",
    "attention.out": "attention.o_proj",
    "mlp.fc1": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
}
_CLIP = {
    "cls": "embeddings.class_embedding",
    "registers": "embeddings.class_embedding",
    "position.table": "embeddings.position_embedding.weight",
    "embedding": "embeddings.patch_embedding",
    "pre_norm": "pre_layrnorm",
    "norm1": "layer_norm1",
    "attention.out": "self_attn.out_proj",
    "norm2": "layer_norm2",
    "norm": "post_layernorm",
    "map.probe": "head.probe",
    "map.attention.qkv": "head.attention.in_proj",
    "map.attention.out": "head.attention.out_proj",
    "map.norm": "head.layernorm",
    "map.mlp.fc1": "head.mlp.fc1",
    "map.mlp.fc2": "head.mlp.fc2",
    "head": "classifier",
}
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OTHER_TOWER = r"text_model\.|text_projection\.|logit_(scale|bias)$|embeddings\.position_ids$"
_TOWER = Family(_CLIP, "encoder.layers.", _PROJECTIONS, "vision_model.", _OTHER_TOWER)
_CLIP_TOWER = _TOWER._replace(
    activation="quick_gelu", eps=1e-5, mean_std=OPENAI, processor="CLIP", skips="post_layernorm.", pre_norm=True
)
_SIGLIP_TOWER = _TOWER._replace(activation="gelu_pytorch_tanh", eps=1e-6, processor="Siglip", pool="map", skips="head.")
_BIT = {
    "body.root": "embedder.convolution",
    "body.root_norm": "embedder.norm",
    "shortcut": "downsample.conv",
    "shortcut_norm": "downsample.norm",
    "head": "classifier.1",
}
_DINOV2_FAMILY = Family(
    _DINOV2, eps=1e-6, mean_std=IMAGENET, processor="Bit", pool="token+gap", swiglu_setting="use_swiglu_ffn"
)
FAMILIES = {
    "vit": Family(_VIT),
    "deit": Family({**_VIT, "registers": "embeddings.distillation_token"}, mean_std=IMAGENET, processor="DeiT"),
    "vit_mae": Family(_VIT, prefix="vit.", ignored=r"decoder\.|embeddings\.mask_token$", mean_std=IMAGENET),
    "vit_msn": Family(_VIT, prefix="vit.", eps=1e-6, mean_std=IMAGENET),
    "ijepa": Family(_VIT, mean_std=IMAGENET, pool="gap"),
    "dinov2": _DINOV2_FAMILY,
    "dinov2_with_registers": _DINOV2_FAMILY,
    "dinov3_vit": Family(
        _DINOV3,
        "layer.",
        ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        heads=6,
        eps=1e-5,
        mean_std=IMAGENET,
        processor="DINOv3ViT",
        swiglu={"mlp.fc1": ("mlp.gate_proj", "mlp.up_proj")},
        swiglu_setting="use_gated_mlp",
    ),
    "clip": _CLIP_TOWER,
    "clip_vision_model": _CLIP_TOWER,
    "siglip": _SIGLIP_TOWER,
    "siglip_vision_model": _SIGLIP_TOWER,
    "bit": Family(_BIT, processor="Bit"),
}
"""By `model_type`."""
PARAMETER = re.compile(
    r"(blocks\.(?P<block>\d+)\.|body\.stages\.(?P<stage>\d+)\.(?P<unit>\d+)\.)?(?P<part>.+?)(?P<leaf>\.weight|\.bias)?"
)
"""A name of ours: `blocks.3.mlp.fc1.bias` has block 3, part `mlp.fc1` and leaf `.bias`."""


def huggingface_layout(kind: str, config: ModelConfig) -> Layout:
    """Every array of a model, by its name without the prefix of its kind."""
    variant = config.variant if isinstance(config, ViTConfig) else Variant()

    def rename(ours: str) -> dict[str, int]:
        match = PARAMETER.fullmatch(ours)
        assert match
        where = ""
        if match["block"]:
            where = f"{FAMILIES[kind].blocks}{match['block']}."
        elif match["stage"]:
            where = f"encoder.stages.{match['stage']}.layers.{match['unit']}."
        part, leaf = match["part"], match["leaf"] or ""
        leaf = leaf.replace(".", "_") if part == "map.attention.qkv" else leaf
        return {f"{where}{name}{leaf}": 1 for name in part_names(kind, part, variant)}

    layout = renamed_layout(config, rename)
    if has_token_row(kind, config):
        table = "embeddings.position_embeddings"
        _, rows, width = layout[table].shape
        layout[table] = Slot((1, rows + 1, width), "position.table")
    return layout


def part_names(kind: str, part: str, variant: Variant) -> tuple[str, ...]:
    """The parts in the file that hold a part of ours, in the order of its rows."""
    family = FAMILIES[kind]
    if part == "attention.qkv":
        return family.qkv
    if part == "head" and variant.distilled:
        return ("cls_classifier",)
    if variant.swiglu and part in family.swiglu:
        return family.swiglu[part]
    return (family.names.get(part, part),)


def has_token_row(kind: str, config: ModelConfig) -> bool:
    """Whether the position table has a row for a distillation token that no head reads: a register here."""
    return kind == "deit" and isinstance(config, ViTConfig) and config.variant.registers > 0


def reads_mean(kind: str, settings: Mapping[str, Any]) -> bool:
    """Whether config.json is of a classifier on an image tower, which reads the mean over patches."""
    return FAMILIES[kind].is_image_tower and "ForImageClassification" in str(settings.get("architectures"))


def select_arrays(kind: str, settings: Mapping[str, Any], arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays of the image model in a file, by their names without prefix, in the shapes of `huggingface_layout`;
    biases of q, k and v that the model does not have are zeros."""
    family = FAMILIES[kind]
    arrays = {name.removeprefix(family.prefix or f"{kind}."): array for name, array in arrays.items()}
    arrays = {name: array for name, array in arrays.items() if not re.match(family.ignored, name)}
    if family.is_image_tower:
        arrays = _complete_tower(arrays)
    if reads_mean(kind, settings):
        arrays = _select_for_mean(kind, arrays)
    registers = arrays.get(_VIT["registers"])
    if kind == "dinov3_vit" and registers is not None and not registers.numel():
        del arrays[_VIT["registers"]]
    if kind == "dinov3_vit" or not settings.get("vision_config", settings).get("qkv_bias", True):
        for name in [name for name in arrays if name.endswith(tuple(f"{part}.weight" for part in family.qkv))]:
            arrays.setdefault(name.replace(".weight", ".bias"), arrays[name].new_zeros(arrays[name].shape[:1]))
    return arrays


def stored_arrays(kind: str, config: ViTConfig, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `select_arrays`: the arrays as their code stores them, with all that it requires."""
    family = FAMILIES[kind]
    if family.is_image_tower:
        arrays = _store_tower(kind, arrays)
    if family.has_layer_scale:
        token = arrays["embeddings.cls_token"]
        unused = {"embeddings.mask_token": torch.zeros_like(token if kind == "dinov3_vit" else token[0])}
        if kind == "dinov3_vit":
            unused[_VIT["registers"]] = token.new_zeros(1, 0, config.width)
        arrays = unused | arrays
    prefix = (family.prefix or f"{kind}.") if config.num_classes else ""
    return {name if name.split(".")[0] in HEADS else prefix + name: array for name, array in arrays.items()}


def _complete_tower(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """An image tower with CLIP's missing leading dimensions, and biases of zero; a projection is the head."""
    arrays = dict(arrays)
    if (projection := arrays.pop("visual_projection.weight", None)) is not None:
        arrays |= {"classifier.weight": projection, "classifier.bias": projection.new_zeros(projection.shape[:1])}
    if (token := arrays.get(_CLIP["cls"])) is not None:
        arrays[_CLIP["cls"]] = token[None, None]
    if (table := arrays.get(_CLIP["position.table"])) is not None:
        arrays[_CLIP["position.table"]] = table[None]
    if (weight := arrays.get(f"{_CLIP['embedding']}.weight")) is not None:
        arrays.setdefault(f"{_CLIP['embedding']}.bias", weight.new_zeros(weight.shape[:1]))
    return arrays


def _store_tower(kind: str, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_complete_tower`, and for `clip`, a classifier here, of `_select_for_mean`."""
    arrays = dict(arrays)
    table = arrays[_CLIP["position.table"]][0]
    if FAMILIES[kind].pre_norm:
        arrays[_CLIP["cls"]] = arrays[_CLIP["cls"]][0, 0]
        del arrays[f"{_CLIP['embedding']}.bias"]
    if kind == "clip":
        width = table.shape[1]
        table = torch.cat([table.new_zeros(1, width), table])
        arrays |= {"post_layernorm.weight": table.new_ones(width), "post_layernorm.bias": table.new_zeros(width)}
    arrays[_CLIP["position.table"]] = table
    if kind == "clip_vision_model" and "classifier.weight" in arrays:
        arrays["visual_projection.weight"] = arrays.pop("classifier.weight")
        del arrays["classifier.bias"]
    return arrays


def _select_for_mean(kind: str, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """An image tower without what a classifier skips: CLIP's last LayerNorm or SigLIP's attention pooling. CLIP's class
    token is a register here, which has no row in the position table: its row is added to it."""
    arrays = {name: array for name, array in arrays.items() if not name.startswith(FAMILIES[kind].skips)}
    table = arrays.get(_CLIP["position.table"])
    if FAMILIES[kind].pre_norm and table is not None and table.ndim == 3 and _CLIP["cls"] in arrays:
        arrays[_CLIP["cls"]] = arrays[_CLIP["cls"]] + table[:, :1]
        arrays[_CLIP["position.table"]] = table[:, 1:]
    return arrays
