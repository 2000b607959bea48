"""timm's config.json (architecture, `model_args`, and in `pretrained_cfg` its images), and the configuration of a timm
model from it and from the model's tensors. `timm.py` calls `TimmConfig.read` and `infer_config`."""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitlab.errors import UserError, first_ten
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, Variant, ViTConfig
from vitlab.preprocessing import Preprocessing
from vitlab.settings import read_fields
from vitlab.weights.folder import read_settings
from vitlab.weights.huggingface_layout import IMAGENET
from vitlab.weights.json_fields import NAMES, TIMM, multi_label_metadata
from vitlab.weights.layout import as_size, check_sizes, count_units, num_rows, require_shape
from vitlab.weights.original_names import Tensors
from vitlab.weights.timm_architectures import ACTIVATIONS, HEADS, ROTARY, SIGLIP, SUPPORTED, named_args, rotary_of
from vitlab.weights.timm_layout import BACKBONE

logger = logging.getLogger(__name__)

WEIGHT_EPS = 1e-8
"""Epsilon of the weight standardization in timm's stems and ResNets; no argument changes it."""
GROUP_NORM_EPS = 1e-5
"""Epsilon of their GroupNorms; no argument changes it."""
HeightWidth = tuple[int, int]
Args = Mapping[str, Any]
# The `model_args` that are read, that the tensors show, or that affect training alone. Any other is refused.
_COMMON_ARGS = ("drop_rate", "drop_path_rate", "global_pool", "in_chans", "num_classes")
RESNET_ARGS = {*_COMMON_ARGS, "channels", "layers", "stem_chs", "width_factor", "zero_init_last"}
VIT_ARGS = {
    *_COMMON_ARGS,
    *("img_size", "strict_img_size", "dynamic_img_size", "dynamic_img_pad", "patch_size"),
    *("embed_dim", "depth", "num_heads", "mlp_ratio", "attn_pool_num_heads", "attn_pool_mlp_ratio"),
    *("class_token", "reg_tokens", "num_reg_tokens", "pool_include_prefix"),
    *("no_embed_class", "pos_embed", "use_abs_pos_emb", "use_rot_pos_emb", *ROTARY),
    *("norm_layer", "qk_norm", "pre_norm", "fc_norm", "final_norm", "scale_attn_inner", "scale_mlp"),
    *("use_fc_norm", "use_pre_transformer_norm", "use_post_transformer_norm"),
    *("act_layer", "attn_type", "init_values", "proj_bias", "qkv_bias", "qkv_fused", "swiglu_mlp"),
    *("attn_drop_rate", "patch_drop_rate", "pos_drop_rate", "proj_drop_rate", "weight_init"),
}
ALLOWED = {"output_stride": (32,), "rope_type": ("cat", "dinov3"), "attn_type": ("eva", "rope")}
"""Arguments -> their only values that are read."""


@dataclass(frozen=True)
class TimmConfig:
    """The content of a config.json. The defaults are for a bare file, whose images are in [-1, 1]."""

    architecture: str = ""
    args: Args = field(default_factory=dict)
    pool: str | None = None
    image_hw: HeightWidth | None = None
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    classes: tuple[str, ...] = ()
    multi_label: Mapping[str, Any] = field(default_factory=dict)
    """`multi_label` and its thresholds, as `multi_label_metadata` returns them."""
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    eps: float | None = None
    """LayerNorm's; None is the architecture's."""
    antialias: bool = True
    """Whether positions are resampled with antialiasing."""

    @classmethod
    def read(cls, path: Path) -> "TimmConfig":
        settings = read_settings(path, TIMM)
        try:
            pretrained_cfg = settings.get("pretrained_cfg", settings)  # older files have everything on one level
            architecture, args = str(settings["architecture"]), settings.get("model_args") or {}
            size = args.get("img_size") or pretrained_cfg.get("input_size", (3, 224, 224))[1:]
            height, width = (size, size) if isinstance(size, int) else size
            names = settings.get("label_names") or pretrained_cfg.get("label_names") or ()
            listed = {"label_names": list(names.values() if isinstance(names, dict) else names)}
            classes = read_fields(listed, {"label_names": NAMES}, str(path))["label_names"]
            return cls(
                architecture=architecture,
                args=args,
                pool=args.get("global_pool", settings.get("global_pool")),
                image_hw=(int(height), int(width)),
                mean=tuple(map(float, pretrained_cfg.get("mean", IMAGENET[0]))),
                std=tuple(map(float, pretrained_cfg.get("std", IMAGENET[1]))),
                classes=tuple(map(str, classes)),
                multi_label=multi_label_metadata(settings),
                preprocessing=_read_preprocessing(architecture, pretrained_cfg, args, path),
            )
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise UserError(f"{path} is not a config.json of timm ({error!r}); get the folder again.") from error


def _read_preprocessing(architecture: str, pretrained_cfg: Mapping[str, Any], args: Args, path: Path) -> Preprocessing:
    """The result of `timm.data.resolve_data_config(pretrained_cfg=pretrained_cfg, use_test_size=True)`. timm's patches
    leave out the rest of a size that they do not divide."""
    cfg = {name: value for name, value in pretrained_cfg.items() if value}
    named = re.search(r"_patch(\d+)_", architecture)
    patch = args.get("patch_size") or (named[1] if named else 1)
    patch = patch[0] if isinstance(patch, list) else patch
    height, width = map(int, cfg.get("test_input_size", cfg.get("input_size", (3, 224, 224)))[1:])
    mode, crop = cfg.get("crop_mode", "center"), cfg.get("test_crop_pct", cfg.get("crop_pct", 0.875))
    resize = math.floor(min(height, width) / crop)
    is_squash = mode == "squash" and resize == min(height, width)  # to the size itself
    is_crop = not is_squash and mode in ("center", "squash") and resize >= max(height, width)  # of a larger image
    if not (is_squash or is_crop):
        logger.warning("%s: images are squashed to size: crop_mode=%r, crop_pct=%s is not supported", path, mode, crop)
    elif height != width and not is_squash:
        text = "%s: timm resizes for %d x %d pixels in another way: the same at most for images of that aspect ratio"
        logger.warning(text, path, height, width)
    return Preprocessing(
        image_size=as_size(height, width),
        resize=resize if is_crop else None,
        keep_aspect=mode == "center" and is_crop,
        interpolation=cfg.get("interpolation", "bicubic"),
        mean=tuple(map(float, cfg.get("mean", IMAGENET[0]))),
        std=tuple(map(float, cfg.get("std", IMAGENET[1]))),
    ).for_patches(int(patch))


def infer_config(where: str, tensors: Tensors, settings: TimmConfig) -> ModelConfig:
    """The model of the tensors, by today's names of timm. Raises UserError for one that computes something else; what
    only its tensors show (a norm, a gate) is left to `check_arrays`."""
    infer, known = (_infer_vit, VIT_ARGS) if "patch_embed.proj.weight" in tensors else (_infer_resnet, RESNET_ARGS)
    unsupported = [
        f"{name}={value!r}"
        for name, value in settings.args.items()
        if value is not None and (value not in ALLOWED[name] if name in ALLOWED else name not in known)
    ]
    try:
        if unsupported:
            raise UserError(f"unsupported model_args: {first_ten(unsupported)}. Supported: {', '.join(sorted(known))}.")
        return infer(tensors, settings)
    except ValueError as error:
        raise UserError(f"{where}: {error} {SUPPORTED}") from error


def _infer_vit(tensors: Tensors, settings: TimmConfig) -> ViTConfig:
    width, channels, patch, _ = require_shape("it", tensors, "patch_embed.proj.weight", 4)
    hidden, _ = require_shape("it", tensors, "blocks.0.mlp.fc1.weight", 2)
    _, mlp_dim = require_shape("it", tensors, "blocks.0.mlp.fc2.weight", 2)
    registers = require_shape("it", tensors, "reg_token", 3)[1] if "reg_token" in tensors else 0
    stem = _infer_body(tensors, "v1", BACKBONE) if any(name.startswith(BACKBONE) for name in tensors) else None
    args = model_args(tensors, settings)
    image_hw, class_position = _infer_size(tensors, settings, args, patch * (stem.stride if stem else 1), registers)
    depth = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    in_chans = 3 if stem else channels
    check_sizes(args, {"depth": depth, "embed_dim": width, "patch_size": patch, "in_chans": in_chans})
    pool = _infer_pool(tensors, settings.pool, args)
    heads = _infer_heads(width, args)
    eva_has_none = args.get("use_fc_norm") is False and args.get("use_post_transformer_norm") is False
    has_no_norm = not args.get("final_norm", not eva_has_none)  # EVA has the two arguments instead
    variant = Variant(
        gelu=_infer_gelu(args),
        swiglu=hidden == 2 * mlp_dim,
        layer_norm_eps=settings.eps or args.get("eps", 1e-6),
        attention_norm="blocks.0.attn.norm.weight" in tensors,
        mlp_norm="blocks.0.mlp.norm.weight" in tensors,
        pre_norm="norm_pre.weight" in tensors,
        final_norm="none" if has_no_norm else "mean" if pool == "gap" and "fc_norm.weight" in tensors else "tokens",
        layer_scale=args.get("init_values", 1e-5) if "blocks.0.ls1.gamma" in tensors else None,
        registers=registers + (pool != "token" and "cls_token" in tensors),
        distilled="dist_token" in tensors,
        class_position=class_position,
        rotary=rotary_of(args)[0],
        position_interpolation="bicubic_antialias" if settings.antialias else "bicubic",
        map_heads=args.get("attn_pool_num_heads") if pool == "map" else None,
    )
    return ViTConfig(
        image_size=as_size(*image_hw),
        dynamic_image_size=bool(args.get("dynamic_img_size")),
        in_chans=in_chans,
        patch_size=patch,
        width=width,
        depth=depth,
        heads=heads,
        mlp_dim=mlp_dim,
        num_classes=num_rows(tensors, "head.weight"),
        pool=pool,
        representation_size=num_rows(tensors, "pre_logits.weight") or None,
        position="1d" if "pos_embed" in tensors else "none",
        stem=stem,
        variant=variant,
    )


def model_args(tensors: Tensors, settings: TimmConfig) -> dict[str, Any]:
    """timm's arguments of a ViT: those that the name of its architecture implies, overridden by config.json's. Without
    a name, they are those of the architectures that the tensors resemble."""
    if settings.architecture:
        return {**named_args(settings.architecture), **settings.args}
    width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    hidden, mlp_dim = len(tensors["blocks.0.mlp.fc1.weight"]), tensors["blocks.0.mlp.fc2.weight"].shape[1]
    resembled = ["vit_base_patch16_clip_224"] if "norm_pre.weight" in tensors else []
    if hidden // mlp_dim == 2 and width == 1536:
        resembled.append("vit_giant_patch14_dinov2")
    if "cls_token" not in tensors and (width, patch) in SIGLIP:
        rows = tensors["pos_embed"].shape[1:2] if "pos_embed" in tensors else ()
        resembled.append(f"vit_{SIGLIP[width, patch]}_siglip_{512 if rows == (32**2,) else 256}")
    return {**named_args(*resembled), **settings.args}


def _infer_size(
    tensors: Tensors, settings: TimmConfig, args: Args, stride: int, registers: int
) -> tuple[HeightWidth, bool]:
    """The image size, and whether the class token (and the distillation token) has a row in the position table."""
    given_hw = settings.image_hw
    if given_hw is not None and not any(name.startswith(BACKBONE) for name in tensors):
        given_hw = (given_hw[0] // stride * stride, given_hw[1] // stride * stride)  # patches leave out the rest
    if "pos_embed" not in tensors:
        has_no_positions = args.get("pos_embed") in ("", "none") or args.get("use_abs_pos_emb") is False
        if given_hw is None or not (has_no_positions or args.get("use_rot_pos_emb")):
            raise UserError(
                "there is no position table (pos_embed). A model with rotary positions requires its folder, with the "
                "architecture in config.json; one without positions has pos_embed='none' in the model_args there."
            )
        return given_hw, True
    rows = require_shape("it", tensors, "pos_embed", 3)[1]
    class_tokens = ("cls_token" in tensors) + ("dist_token" in tensors)
    token_rows = sorted({0, class_tokens, class_tokens + registers})
    image_hw, num_token_rows = _fit_table(rows, token_rows, given_hw, stride)
    if given_hw not in (None, image_hw) and settings.architecture:
        logger.warning("images of %s pixels are resized to %d, as the position table", given_hw, image_hw[0])
    return image_hw, num_token_rows > 0 or not class_tokens  # True is the default


def _fit_table(rows: int, token_rows: list[int], given_hw: HeightWidth | None, stride: int) -> tuple[HeightWidth, int]:
    """The image size of a position table, and how many of its `rows` are for tokens before the patches, one of
    `token_rows`: for 197 rows, [0, 1] and stride 16 they are (224, 224) and 1. The size is `given_hw` if the rest of
    the rows are its patches, otherwise square."""
    if given_hw is not None:
        num_token_rows = rows - math.prod(-(-side // stride) for side in given_hw)
        if num_token_rows in token_rows:
            return given_hw, num_token_rows
    squares = [number for number in token_rows if rows > number and math.isqrt(rows - number) ** 2 == rows - number]
    if len(squares) != 1:
        raise UserError(
            f"the position table has {rows} rows, from which no image size follows (with {token_rows} of them for "
            f"other tokens){'' if given_hw is None else f', not the grid of {given_hw} pixels'}; give the size of its "
            f"training, image_size=(height, width) (`--image-size` of convert), or img_size in the model_args of a "
            f"config.json."
        )
    side = math.isqrt(rows - squares[0]) * stride
    return (side, side), squares[0]


def _infer_pool(tensors: Tensors, pool: str | None, args: Args) -> Literal["token", "gap", "map"]:
    """Our `pool` for timm's `global_pool`. timm's mean and attention may include the tokens before the patches; here
    only the attention does. Raises UserError for a pool that would read other tokens here."""
    has_class = "cls_token" in tensors
    has_prefix = has_class or "reg_token" in tensors
    is_eva = "use_rot_pos_emb" in args  # only that family has the argument
    includes_prefix = bool(args.get("pool_include_prefix"))
    if pool is None:  # fine-tuned models of MAE have the mean's norm
        is_token = has_class and "fc_norm.weight" not in tensors
        pool = "map" if "attn_pool.latent" in tensors else "token" if is_token else "avg"
    if pool == "token" and has_class:
        return "token"
    if pool == "avg" and not (has_prefix and includes_prefix):
        return "gap"
    if pool == "map" and (includes_prefix or is_eva or not has_prefix):  # EVA's attention always includes it
        return "map"
    raise UserError(
        f"global_pool is {pool!r} with{'' if has_class else 'out'} a class token and pool_include_prefix="
        f"{includes_prefix}; allowed: 'token' with a class token, 'avg' over patches alone, 'map' over all tokens."
    )


def _infer_heads(width: int, args: Args) -> int:
    heads = args.get("num_heads") or HEADS.get(width)
    if heads is None:
        raise UserError(
            f"the tokens have width {width}, and no tensor gives the number of attention heads. Give it as "
            f"`--assume.heads` of convert or assume={{'heads': ...}} of load_model, or as num_heads in the model_args "
            f"of a config.json. Known widths: {', '.join(map(str, HEADS))}."
        )
    return heads


def _infer_gelu(args: Args) -> Literal["tanh", "erf", "quick"]:
    act, norm = args.get("act_layer", "gelu"), args.get("norm_layer", "layernorm")
    if act not in ACTIVATIONS or norm != "layernorm":
        allowed = ", ".join(map(repr, ACTIVATIONS))
        raise UserError(f"act_layer={act!r}, norm_layer={norm!r}; allowed: {allowed}, and 'layernorm'.")
    return ACTIVATIONS[act]


def _infer_resnet(tensors: Tensors, settings: TimmConfig) -> ResNetConfig:
    if settings.pool not in (None, "avg"):
        raise UserError(f"global_pool is {settings.pool!r}; a ResNet supports only 'avg'.")
    size, body = as_size(*(settings.image_hw or (224, 224))), _infer_body(tensors, "v2", prefix="")
    return ResNetConfig(image_size=size, body=body, num_classes=num_rows(tensors, "head.fc.weight"))


def _infer_body(tensors: Tensors, version: Literal["v1", "v2"], prefix: str) -> ResNetBody:
    root = f"{prefix}conv.weight" if f"{prefix}conv.weight" in tensors else f"{prefix}stem.conv.weight"
    pattern = re.compile(re.escape(prefix) + r"stages\.(\d{1,4})\.blocks\.(\d{1,4})\.")
    return ResNetBody(
        layers=count_units({(match[1], match[2]) for name in tensors if (match := pattern.match(name))}),
        width=require_shape("it", tensors, root, 4)[0],
        version=version,
        weight_eps=WEIGHT_EPS,
        weight_eps_on="variance",
        group_norm_eps=GROUP_NORM_EPS,
    )
