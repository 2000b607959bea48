"""timm's config.json: the architecture's name, the arguments of its builder (`model_args`), and the images that it
expects (`pretrained_cfg`)."""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitlab.errors import UserError
from vitlab.models import ModelConfig, ResNetBody, ViTConfig
from vitlab.preprocessing import Preprocessing
from vitlab.weights.folder import read_settings

logger = logging.getLogger(__name__)

BACKBONE = "patch_embed.backbone."
"""In front of the names of a hybrid's stem."""
WEIGHT_EPS, GROUP_NORM_EPS = 1e-8, 1e-5
"""Of timm's stems and ResNets; no argument changes them."""
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""timm's default mean and std."""

PLAIN = re.compile(r"tiny_patch16|small_patch(8|16|32)|base_patch(8|16|32)|large_patch(14|16|32)|huge_patch14")
"""Plain ViTs among timm's architectures. Each builds any size; the nearest name is a courtesy."""
NAMED = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge"}
HYBRIDS: dict[tuple[int, ...], str] = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
"""Units of a stem -> an architecture that has it: the stem is the one part that no argument changes."""
RESNETS: dict[tuple[int, ...], tuple[int, int, int]] = {
    (3, 4, 6, 3): (50, 1, 3),
    (3, 4, 23, 3): (101, 1, 3),
    (3, 8, 36, 3): (152, 2, 4),
}
"""Units of a ResNet -> its layers and the two width factors that timm has architectures for."""


@dataclass(frozen=True)
class Card:
    """The content of a config.json. The defaults are for a bare file, whose images are in [-1, 1]."""

    architecture: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    pool: str | None = None
    image_hw: tuple[int, int] | None = None
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    classes: tuple[str, ...] = ()
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    original: bool = False
    """A bare file of DINOv2's authors."""

    @classmethod
    def read(cls, path: Path) -> "Card":
        card = read_settings(path)
        try:
            images = card.get("pretrained_cfg", card)  # older files have everything on one level
            args = card.get("model_args") or {}
            size = args.get("img_size") or images.get("input_size", (3, 224, 224))[1:]
            height, width = (size, size) if isinstance(size, int) else size
            names = card.get("label_names") or images.get("label_names") or ()
            return cls(
                architecture=str(card["architecture"]),
                args=args,
                pool=args.get("global_pool", card.get("global_pool")),
                image_hw=(int(height), int(width)),
                mean=tuple(map(float, images.get("mean", IMAGENET[0]))),
                std=tuple(map(float, images.get("std", IMAGENET[1]))),
                classes=tuple(names.values() if isinstance(names, dict) else names),
                preprocessing=_read_preprocessing(str(card["architecture"]), images, args, path),
            )
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise UserError(f"{path} is not a config.json of timm ({error!r}); get the folder again.") from error


def _read_preprocessing(
    architecture: str, images: Mapping[str, Any], args: Mapping[str, Any], path: Path
) -> Preprocessing:
    """The result of `timm.data.resolve_data_config(pretrained_cfg=images, use_test_size=True)`.

    A size that the patch does not divide becomes the largest that it does: timm's patches leave the rest out.
    """
    size = images.get("test_input_size") or images.get("input_size") or (3, 224, 224)
    patch = args.get("patch_size") or (re.search(r"_patch(\d+)_", architecture) or (0, 1))[1]
    height, width = (int(side) // int(patch) * int(patch) for side in size[1:])
    mode, crop = images.get("crop_mode") or "center", images.get("test_crop_pct") or images.get("crop_pct") or 0.875
    resize = math.floor(min(height, width) / crop)
    if mode not in ("center", "squash") or resize < max(height, width):
        logger.warning("%s: images are squashed to size: crop_mode=%r, crop_pct=%s is not supported", path, mode, crop)
        mode, resize = "squash", min(height, width)
    return Preprocessing(
        image_size=height if height == width else (height, width),
        resize=None if mode == "squash" and resize == min(height, width) else resize,
        keep_aspect=mode == "center",
        interpolation=images.get("interpolation") or "bicubic",
        mean=tuple(map(float, images.get("mean") or IMAGENET[0])),
        std=tuple(map(float, images.get("std") or IMAGENET[1])),
    )


def timm_card(config: ModelConfig, extra: Mapping[str, Any], first_conv: str) -> dict[str, Any]:
    """The config.json of a model; `extra` is its card, `first_conv` timm's name of its first layer."""
    vit = isinstance(config, ViTConfig)
    architecture, args = _vit_args(config) if vit else _resnet_args(config.body)
    heads: Any = ["head", "head_dist"] if vit and config.distilled else "head" if vit else "head.fc"
    height, width = config.image_hw
    # timm's models take images of one size, and always resize with antialiasing; it has no area averaging.
    prepared = Preprocessing.read(extra, "extra", config.image_size).at(config.image_size)
    resize, side = prepared.resize, min(height, width)
    crop = side / resize if resize else 1.0
    if resize and math.floor(side / crop) != resize:  # timm rounds this down
        crop = side / (resize + 0.5)
    images = {
        "custom_load": False,
        "input_size": [3, height, width],
        "fixed_input_size": vit,
        "interpolation": "bilinear" if prepared.is_google else prepared.interpolation,
        "crop_pct": crop,
        "crop_mode": "center" if resize and prepared.keep_aspect else "squash",
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "num_classes": config.num_classes,
        "pool_size": None if vit else list(config.grid),
        "first_conv": first_conv,
        "classifier": heads,
    }
    card: dict[str, Any] = {
        "architecture": architecture,
        "num_classes": config.num_classes,
        "num_features": config.num_features,
        "global_pool": args["global_pool"] if vit else "avg",
        "model_args": args,
        "pretrained_cfg": images,
    }
    if extra.get("classes") is not None:
        card["label_names"] = list(extra["classes"])
    return card


def _vit_args(config: ViTConfig) -> tuple[str, dict[str, Any]]:
    """The name of an architecture and every argument that makes it this ViT."""
    near = f"{NAMED.get(config.width)}_patch{config.patch_size}"
    name = f"vit_{near if PLAIN.fullmatch(near) else 'base_patch16'}_224"
    if config.distilled:
        name = "deit_base_distilled_patch16_224"
    elif config.stem is not None:
        name = HYBRIDS[config.stem.layers]
    ratio = config.mlp_dim / config.width  # timm rounds the product down
    exact = int(config.width * ratio) == config.mlp_dim
    args: dict[str, Any] = {
        "img_size": list(config.image_hw),
        "patch_size": config.patch_size,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": ratio if exact else (config.mlp_dim + 0.5) / config.width,
        "class_token": config.has_class_token,
        "no_embed_class": not config.class_position,
        "global_pool": {"token": "token", "gap": "avg", "map": "map"}[config.pool],
        "fc_norm": False,
        "act_layer": "gelu_tanh" if config.gelu == "tanh" else "gelu",
    }
    if config.position == "none":
        args["pos_embed"] = "none"
    if config.registers:
        args |= {"reg_tokens": config.registers, "pool_include_prefix": config.pool == "map"}
    if config.layer_scale is not None:
        args["init_values"] = config.layer_scale
    return name, args


def _resnet_args(body: ResNetBody) -> tuple[str, dict[str, Any]]:
    layers, *factors = RESNETS[body.layers]
    if body.width in (64 * factors[0], 64 * factors[1]):
        return f"resnetv2_{layers}x{body.width // 64}_bit", {}
    width = body.width // factors[0]
    channels = [4 * width * 2**stage for stage in range(len(body.layers))]
    return f"resnetv2_{layers}x{factors[0]}_bit", {"channels": channels, "stem_chs": width}
