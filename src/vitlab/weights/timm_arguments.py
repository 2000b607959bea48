"""timm's config.json of a model of ours: the architecture and the arguments from which timm builds an equal one.
`write_timm` calls `check_representable` and `timm_settings`; `timm_config.py` reads such a file."""

import logging
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from vitlab.models import ModelConfig, ResNetConfig, ViTConfig
from vitlab.models.variant import all_settings
from vitlab.preprocessing import Preprocessing
from vitlab.weights.folder import processed_size
from vitlab.weights.json_fields import multi_label_settings
from vitlab.weights.layout import check_supported
from vitlab.weights.timm_architectures import ACTIVATIONS, rotary_args, written_eps
from vitlab.weights.timm_config import GROUP_NORM_EPS

logger = logging.getLogger(__name__)

RESNETS: dict[tuple[int, ...], tuple[str, int]] = {
    (3, 4, 6, 3): ("resnetv2_50x1_bit", 1),
    (3, 4, 23, 3): ("resnetv2_101x1_bit", 1),
    (3, 8, 36, 3): ("resnetv2_152x2_bit", 2),
}
"""Units of a ResNet -> an architecture with them, and its width factor."""
EQUAL = {
    "patch_size": "patch_size",
    "embed_dim": "width",
    "depth": "depth",
    "num_heads": "heads",
    "dynamic_img_size": "dynamic_image_size",
}
"""timm's arguments -> our settings of the same values."""
EQUAL_IN_EVA = {
    "scale_attn_inner": "attention_norm",
    "scale_mlp": "mlp_norm",
    "swiglu_mlp": "swiglu",
    "init_values": "layer_scale",
    "num_reg_tokens": "registers",
    "use_pre_transformer_norm": "pre_norm",
}
"""More of them in the EVA family."""


def timm_settings(config: ModelConfig, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model."""
    # timm's models take images of one size, and always resize with antialiasing; it has no area averaging.
    prepared = Preprocessing.read(metadata, "extra", config.image_size).at(config.image_size)
    height, width = processed_size(prepared, config)
    if prepared.resize and height != width:
        text = "timm resizes for %d x %d pixels otherwise than %s: the same at most for images of that aspect ratio"
        logger.warning(text, height, width, prepared.describe())
    if isinstance(config, ViTConfig):
        architecture, args = _vit_args(config)
        args["img_size"] = [height, width]
        heads = ["head", "head_dist"] if config.variant.distilled else "head"
        layers: dict[str, Any] = {"pool_size": None, "first_conv": "patch_embed.proj", "classifier": heads}
    else:
        architecture, factor = RESNETS[config.body.layers]
        stem = config.body.width // factor
        args = {"channels": [4 * stem * 2**stage for stage in range(len(config.body.layers))], "stem_chs": stem}
        layers = {"pool_size": list(config.grid), "first_conv": "stem.conv", "classifier": "head.fc"}
    if config.in_chans != 3:
        layers["first_conv"] = None  # timm adapts the filters of this layer from RGB
    pretrained_cfg = {
        "custom_load": False,
        "input_size": [config.in_chans, height, width],
        "fixed_input_size": isinstance(config, ViTConfig),
        "interpolation": "bilinear" if prepared.is_google else prepared.interpolation,
        "crop_pct": _crop_pct(min(height, width), prepared.resize),
        "crop_mode": "center" if prepared.resize and prepared.keep_aspect else "squash",
        "mean": [0.5] * config.in_chans,
        "std": [0.5] * config.in_chans,
        "num_classes": config.num_classes,
        **layers,
    }
    classes = metadata.get("classes")
    return {
        "architecture": architecture,
        "num_classes": config.num_classes,
        "num_features": config.num_features,
        "global_pool": args.get("global_pool", "avg"),
        "model_args": args,
        "pretrained_cfg": pretrained_cfg,
        **({} if classes is None else {"label_names": list(classes)}),
        **multi_label_settings(metadata),
    }


def _crop_pct(side: int, resize: int | None) -> float:
    """`crop_pct` of a crop of `side` pixels: 0.875 for 224 of 256. timm resizes to floor(side / crop_pct), which can be
    one pixel less than `resize`: 224 / (224 / 354) is 353.999. Then the result is that of `resize` + 0.5."""
    if not resize:
        return 1.0
    crop = side / resize
    return crop if math.floor(side / crop) == resize else side / (resize + 0.5)


def is_eva(config: ModelConfig) -> TypeGuard[ViTConfig]:
    """Whether timm's arguments make this model from the EVA family alone."""
    names = ("rotary", "swiglu", "attention_norm", "mlp_norm", "map_heads")
    return isinstance(config, ViTConfig) and any(getattr(config.variant, name) for name in names)


def _architecture_kind(config: ViTConfig) -> str:
    return "eva" if is_eva(config) else "distilled" if config.variant.distilled else "vit"


def _vit_args(config: ViTConfig) -> tuple[str, dict[str, Any]]:
    """The name of an architecture, and every argument but the size of images that makes it this ViT."""
    variant, settings, kind = config.variant, all_settings(config), _architecture_kind(config)
    ratio = config.mlp_dim / config.width  # timm rounds the product down
    equal = EQUAL | (EQUAL_IN_EVA if kind == "eva" else {})
    args = {theirs: settings[ours] for theirs, ours in equal.items()} | {
        "mlp_ratio": ratio if int(config.width * ratio) == config.mlp_dim else (config.mlp_dim + 0.5) / config.width,
        "class_token": config.has_class_token,
        "no_embed_class": not variant.class_position,
        "global_pool": "avg" if config.pool == "gap" else config.pool,
    }
    if config.in_chans != 3:
        args["in_chans"] = config.in_chans
    if kind == "eva":
        args["attn_type"] = "rope"  # the one with biases of keys
        args |= {"qkv_bias": True, "qkv_fused": True, "use_abs_pos_emb": config.position != "none"}
        args["use_post_transformer_norm"] = variant.final_norm == "tokens"
        args["use_fc_norm"] = variant.final_norm == "mean"
        if config.pool == "map":
            args["attn_pool_num_heads"] = variant.map_heads or config.heads
        return written_eps(kind)[variant.layer_norm_eps], args | rotary_args(variant.rotary)
    args["fc_norm"] = variant.final_norm == "mean"
    args["final_norm"] = variant.final_norm != "none"
    args["pre_norm"] = variant.pre_norm
    args["act_layer"] = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == variant.gelu)
    if config.position == "none":
        args["pos_embed"] = "none"
    if variant.registers:
        args |= {"reg_tokens": variant.registers, "pool_include_prefix": config.pool == "map"}
    if variant.layer_scale is not None:
        args["init_values"] = variant.layer_scale
    return written_eps(kind)[variant.layer_norm_eps], args


def check_representable(config: ModelConfig) -> None:
    """Raises UserError for the first setting that no argument of timm's sets. A setting must have a value that is
    `supported`, or its default; one in `free`, or in `FREE` of layout.py, may have any."""
    if isinstance(config, ResNetConfig):
        supported: dict[str, tuple[Any, ...]] = {"version": ("v2",), "layers": tuple(RESNETS)}
        supported |= {"weight_eps_on": ("variance",), "group_norm_eps": (GROUP_NORM_EPS,)}
        check_supported("timm", config.body, supported, ("weight_eps",), "body.")
        return
    variant, kind = config.variant, _architecture_kind(config)
    # The EVA family's GELU is exact. timm's attention pooling has neither SwiGLU nor a norm in its MLP.
    supported = {
        "position": ("none", "1d", "2d", "sincos2d"),
        "pool": ("token", "gap") if variant.swiglu or variant.mlp_norm else ("token", "gap", "map"),
        "layer_norm_eps": tuple(written_eps(kind)),
        "final_norm": ("tokens", "mean", "none"),
        "gelu": ("erf",) if kind == "eva" and not variant.swiglu else ("tanh", "erf", "quick"),
        "distilled": (False,) if kind == "eva" else (True, False),
    }
    free = {"in_chans", "pre_norm", "layer_scale", "class_position"}
    free |= {"rotary", "map_heads", "swiglu", "attention_norm", "mlp_norm"}  # they make it one of the EVA family
    if not variant.distilled:
        free.add("registers")
    if config.position == "none":  # it enters nowhere
        free.add("position_at")
    check_supported("timm", config, supported, free)
