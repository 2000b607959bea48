"""The configuration of a timm model from its tensors, and from what its config.json adds."""

import logging
import math
import re
from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from vitlab.errors import UserError
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig
from vitlab.weights.layout import count_units, num_rows, preview, require_shape
from vitlab.weights.timm_card import BACKBONE, GROUP_NORM_EPS, WEIGHT_EPS, Card

logger = logging.getLogger(__name__)

HEADS = {
    **{width: width // 64 for width in (192, 256, 320, 384, 512, 640, 768, 832, 896)},
    **dict.fromkeys((1024, 1152, 1280, 1408, 1536, 1664), 16),
}
"""Width -> heads, which is in no tensor."""
OTHER_HEADS = {"vit_base_patch16_gap_224": 16, "test_vit": 2, "test_vit2": 2}
"""Architectures that have other numbers of heads."""
TANH = re.compile(r"vit_(base_patch32|large_patch16|so400m_patch16|giantopt_patch16)_siglip_(gap_)?(\d+)")
"""Architectures with the tanh approximation of GELU; of `large_patch16` the one for 512 pixels alone."""
TANH_SHAPES = {(768, 32), (1152, 16), (1536, 16)}
"""Width and patch size of the same architectures, to recognize a bare file without a class token."""

COMMON_ARGS = {"drop_rate", "drop_path_rate", "global_pool", "in_chans", "num_classes"}
_VIT_ARGS = (
    "act_layer attn_drop_rate class_token depth dynamic_img_pad dynamic_img_size embed_dim fc_norm final_norm img_size "
    "init_values mlp_ratio no_embed_class norm_layer num_heads patch_drop_rate patch_size pool_include_prefix "
    "pos_drop_rate pos_embed pre_norm proj_bias proj_drop_rate qk_norm qkv_bias reg_tokens strict_img_size weight_init"
)
VIT_ARGS = COMMON_ARGS | set(_VIT_ARGS.split())
RESNET_ARGS = COMMON_ARGS | {"channels", "layers", "stem_chs", "width_factor", "zero_init_last"}
"""The `model_args` that are read, that the tensors show, or that affect training alone. Any other may change what is
computed, and is refused."""

SUPPORTED = "plain Vision Transformers, those on a BiT stem, and BiT's ResNets"
OTHER_KINDS = (
    (r"\.mlp\.(w1|w2|w3|w12|fc1_g|fc1_x)\.", "gated MLPs (SwiGLU)"),
    (r"\.attn\.[qk]_norm\.", "normalized queries and keys"),
    (r"\.(attn|mlp)\.norm\.", "a LayerNorm inside attention or MLP, as BEiT-3 and EVA-02"),
    (r"rel_pos|relative_position", "relative position biases"),
    (r"rope", "rotary position embeddings"),
    (r"\.attn\.q_bias$", "separate biases of queries and values, as BEiT and EVA"),
    (r"\.(attns|ffns|in_proj|mlp_out_proj)\.", "attention and MLP side by side in a block"),
    (r"\.lambda_", "differential attention"),
    (r"\.running_mean$", "BatchNorm"),
    (r"(stem|backbone)\.conv1\.", "a ResNet with another stem than BiT's"),
    (r"^norm_pre\.", "a LayerNorm in front of the first block, as CLIP"),
    (r"^fc_norm\.", "a LayerNorm after the mean over tokens, where a ViT here has it in front"),
)
"""Pattern of a tensor's name -> what an unsupported model has; the first that matches."""


def infer_config(where: str, tensors: Mapping[str, Tensor], card: Card) -> ModelConfig:
    """The model of the tensors, by today's names of timm. Raises UserError for one that computes something else."""
    _check_kind(where, tensors)
    return (_infer_vit if "patch_embed.proj.weight" in tensors else _infer_resnet)(where, tensors, card)


def _check_kind(where: str, tensors: Mapping[str, Tensor]) -> None:
    matches = ((name, what) for pattern, what in OTHER_KINDS for name in tensors if re.search(pattern, name))
    match = next(matches, None)
    shapes = [tensors[name].shape for name in (f"blocks.0.mlp.fc{i}.weight" for i in (1, 2)) if name in tensors]
    if match is None and [len(shape) for shape in shapes] == [2, 2] and shapes[0][0] == 2 * shapes[1][1]:
        match = "blocks.0.mlp.fc1.weight", "gated MLPs whose two halves are packed in one matrix (SwiGLU)"
    if match:
        raise UserError(f"{where} holds a model with {match[1]} ({match[0]}); supported are {SUPPORTED}.")


def _check_args(where: str, card: Card, known: set[str]) -> None:
    """Raises UserError for `model_args` that may change what is computed."""
    required = {"output_stride": 32, "in_chans": 3}
    wrong = [
        f"{name}={value!r}"
        for name, value in card.args.items()
        if value is not None and (value != required[name] if name in required else name not in known)
    ]
    if wrong:
        raise UserError(f"{where}: unsupported model_args: {preview(wrong)}. Supported: {', '.join(sorted(known))}.")


def _infer_vit(where: str, tensors: Mapping[str, Tensor], card: Card) -> ViTConfig:
    width, _, patch, _ = require_shape(where, tensors, "patch_embed.proj.weight", 4)
    mlp_dim, _ = require_shape(where, tensors, "blocks.0.mlp.fc1.weight", 2)
    registers = require_shape(where, tensors, "reg_token", 3)[1] if "reg_token" in tensors else 0
    _check_args(where, card, VIT_ARGS)
    hybrid = any(name.startswith(BACKBONE) for name in tensors)
    stem = _infer_body(where, tensors, "v1", BACKBONE) if hybrid else None
    size, class_position = _infer_size(where, tensors, card, patch * (stem.stride if stem else 1), registers)
    depth = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    for name, value in (("depth", depth), ("embed_dim", width), ("patch_size", patch)):
        if card.args.get(name, value) not in (value, [value, value]):
            raise UserError(
                f"{where}: config.json says {name}={card.args[name]} and the tensors are for {value}; get both again."
            )
    heads = card.args.get("num_heads") or OTHER_HEADS.get(card.architecture.split(".")[0]) or HEADS.get(width)
    if heads is None:
        raise UserError(
            f"{where} has tokens of width {width}, and no tensor gives the number of attention heads. Give a folder "
            f"with num_heads in the model_args of its config.json. Known widths: {', '.join(map(str, HEADS))}."
        )
    # The original DINOv2 resamples without antialiasing, but with it where it has registers.
    interpolation = "bicubic" if card.original and not registers else "bicubic_antialias"
    pool, gelu = _infer_pool(where, tensors, card), _infer_gelu(where, tensors, card)
    try:
        return ViTConfig(
            image_size=size[0] if size[0] == size[1] else size,
            patch_size=patch,
            width=width,
            depth=depth,
            heads=heads,
            mlp_dim=mlp_dim,
            num_classes=num_rows(tensors, "head.weight"),
            pool=pool,
            representation_size=num_rows(tensors, "pre_logits.weight") or None,
            position="1d" if "pos_embed" in tensors else "none",
            position_interpolation=interpolation,
            gelu=gelu,
            stem=stem,
            layer_scale=card.args.get("init_values", 1e-5) if "blocks.0.ls1.gamma" in tensors else None,
            registers=registers,
            class_position=class_position,
            distilled="dist_token" in tensors,
        )
    except ValueError as error:
        raise UserError(f"{where} holds an invalid model: {error}") from error


def _infer_resnet(where: str, tensors: Mapping[str, Tensor], card: Card) -> ResNetConfig:
    body = _infer_body(where, tensors, "v2", "")
    _check_args(where, card, RESNET_ARGS)
    if card.pool not in (None, "avg"):
        raise UserError(f"{where} has global_pool={card.pool!r}; a ResNet supports only 'avg'.")
    height, width = card.image_hw or (224, 224)
    size = height if height == width else (height, width)
    return ResNetConfig(image_size=size, body=body, num_classes=num_rows(tensors, "head.fc.weight"))


def _infer_body(where: str, tensors: Mapping[str, Tensor], version: Literal["v1", "v2"], prefix: str) -> ResNetBody:
    root = f"{prefix}conv.weight" if f"{prefix}conv.weight" in tensors else f"{prefix}stem.conv.weight"
    width = require_shape(where, tensors, root, 4)[0]
    pattern = re.compile(re.escape(prefix) + r"stages\.(\d{1,4})\.blocks\.(\d{1,4})\.")
    units = {(match[1], match[2]) for name in tensors if (match := pattern.match(name))}
    try:
        return ResNetBody(
            layers=count_units(units),
            width=width,
            version=version,
            weight_eps=WEIGHT_EPS,
            weight_eps_on="variance",
            group_norm_eps=GROUP_NORM_EPS,
        )
    except ValueError as error:
        raise UserError(f"{where} holds an invalid model: {error}") from error


def _infer_size(
    where: str, tensors: Mapping[str, Tensor], card: Card, stride: int, registers: int
) -> tuple[tuple[int, int], bool]:
    """Image size from the rows of the position table, and whether class (and distillation) token have one."""
    if "pos_embed" not in tensors:
        if card.image_hw is None or card.args.get("pos_embed") not in ("", "none"):
            raise UserError(
                f"{where} holds no position table (pos_embed). Models with rotary positions (DINOv3, EVA-02) are not "
                f"supported; one without any has pos_embed='none' in the model_args of its config.json."
            )
        return card.image_hw, True
    rows = require_shape(where, tensors, "pos_embed", 3)[1]
    before = ("cls_token" in tensors) + ("dist_token" in tensors)
    options = sorted({0, before, before + registers})
    if card.image_hw is not None:
        extra = rows - math.prod(-(-side // stride) for side in card.image_hw)
        if extra in options:
            return card.image_hw, extra > 0 or not before
    squares = [extra for extra in options if rows > extra and math.isqrt(rows - extra) ** 2 == rows - extra]
    if len(squares) != 1:
        raise UserError(
            f"{where} has a position table of {rows} rows, from which no image size follows (with {options} of them "
            f"for other tokens); give a folder with img_size in the model_args of its config.json."
        )
    side = math.isqrt(rows - squares[0]) * stride
    if card.image_hw is not None:
        text = "%s: images of %s pixels are brought to %dx%d, the size of the position table"
        logger.warning(text, where, "x".join(map(str, card.image_hw)), side, side)
    return (side, side), squares[0] > 0 or not before


def _infer_pool(where: str, tensors: Mapping[str, Tensor], card: Card) -> Literal["token", "gap", "map"]:
    has_class, has_map = "cls_token" in tensors, "attn_pool.latent" in tensors
    pool = card.pool if card.pool is not None else "map" if has_map else "token" if has_class else "avg"
    over_all = bool(card.args.get("pool_include_prefix"))
    supported = {
        "token": has_class,
        # timm's mean and attention may include registers; here only the attention does.
        "avg": not has_class and not ("reg_token" in tensors and over_all),
        "map": not has_class and not ("reg_token" in tensors and not over_all),
    }
    if not isinstance(pool, str) or not supported.get(pool):
        raise UserError(
            f"{where} has global_pool={pool!r} with{'' if has_class else 'out'} a class token and "
            f"pool_include_prefix={over_all}; supported are 'token' with a class token, and without one 'avg' over "
            f"the patches alone, and 'map' over all tokens."
        )
    return "token" if pool == "token" else "map" if pool == "map" else "gap"


def _infer_gelu(where: str, tensors: Mapping[str, Tensor], card: Card) -> Literal["tanh", "erf"]:
    act, norm = card.args.get("act_layer"), card.args.get("norm_layer")
    if act not in (None, "gelu", "gelu_tanh") or norm not in (None, "layernorm"):
        raise UserError(
            f"{where} has act_layer={act!r} and norm_layer={norm!r}; supported are 'gelu', 'gelu_tanh' and 'layernorm'."
        )
    match = TANH.match(card.architecture)
    is_tanh = match is not None and (match[1] != "large_patch16" or match[3] == "512")
    if not card.architecture and "cls_token" not in tensors:
        width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
        large_512 = (width, patch) == (1024, 16) and "pos_embed" in tensors and tensors["pos_embed"].shape[1] == 32**2
        is_tanh = (width, patch) in TANH_SHAPES or large_512
    return "tanh" if act == "gelu_tanh" or (act is None and is_tanh) else "erf"
