"""timm's checkpoints, read and written without timm.

    model.safetensors   the parameters, by the names of timm's modules
    config.json         the architecture's name, what its builder is given besides (`model_args`), and the images it
                        expects (`pretrained_cfg`: size, mean, std)

Three of timm's families compute what a model here can: `VisionTransformer` (`vit_*`, `deit*`, `flexivit_*`, DINO and
DINOv2, with class token, mean or attention pooling), the same on a BiT stem (`vit_*_r26_s32_*` and the like), and
`resnetv2_*_bit`. In all of them LayerNorm's eps is 1e-6 and GELU exact unless the name or `model_args` says otherwise.
"""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.io import check_regular, read_json
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig
from vitlab.preprocessing import Preprocessing
from vitlab.weights.adapt import fold_normalization
from vitlab.weights.folder import CARD, WEIGHTS, check_classes
from vitlab.weights.shapes import check_shapes, some
from vitlab.weights.timm_names import BACKBONE, GROUP_NORM_EPS, WEIGHT_EPS, timm_layout
from vitlab.weights.timm_write import write_timm

__all__ = ["card_timm", "read_timm", "write_timm"]

logger = logging.getLogger(__name__)

SUPPORTED = "plain Vision Transformers, those on a BiT stem, and BiT's ResNets"
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""The mean and deviation that timm takes images to be normalized by where a config.json says nothing."""

HEADS = {
    192: 3, 256: 4, 320: 5, 384: 6, 512: 8, 640: 10, 768: 12, 832: 13, 896: 14, 1024: 16, 1152: 16, 1280: 16,
    1408: 16, 1536: 16, 1664: 16,
}  # fmt: skip
"""Width -> heads, which no tensor tells: 64 numbers for each, and 16 heads from 1024 on."""
OTHER_HEADS = {"vit_base_patch16_gap_224": 16, "test_vit": 2, "test_vit2": 2}
"""Architectures that have other numbers of heads."""

TANH = re.compile(r"vit_(base_patch32|large_patch16|so400m_patch16|giantopt_patch16)_siglip_(gap_)?(\d+)")
"""Architectures whose GELU is the tanh approximation; of `large_patch16` the one for 512 pixels alone."""
TANH_SHAPES = {(768, 32), (1152, 16), (1536, 16)}
"""Width and patch of the same architectures, by which a bare file without a class token is known."""

COMMON_ARGS = {"drop_rate", "drop_path_rate", "global_pool", "in_chans", "num_classes"}
VIT_ARGS = COMMON_ARGS | {
    "act_layer", "attn_drop_rate", "class_token", "depth", "dynamic_img_pad", "dynamic_img_size", "embed_dim",
    "fc_norm", "final_norm", "img_size", "init_values", "mlp_ratio", "no_embed_class", "norm_layer", "num_heads",
    "patch_drop_rate", "patch_size", "pool_include_prefix", "pos_drop_rate", "pos_embed", "pre_norm", "proj_bias",
    "proj_drop_rate", "qk_norm", "qkv_bias", "reg_tokens", "strict_img_size", "weight_init",
}  # fmt: skip
RESNET_ARGS = COMMON_ARGS | {"channels", "layers", "stem_chs", "width_factor", "zero_init_last"}
"""The `model_args` that are read, that the tensors show, or that matter to training alone. Any other may change what
is computed."""

# A file with a tensor of such a name holds a model that computes something else; the first that fits.
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


@dataclass(frozen=True)
class Card:
    """What a config.json tells; without one, nothing is known and images are taken to be in [-1, 1]."""

    architecture: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    """`model_args`, what the architecture's builder is given."""
    pool: str | None = None
    image_hw: tuple[int, int] | None = None
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    classes: tuple[str, ...] = ()
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    original: bool = False
    """A bare file of DINOv2's authors."""


def read_timm(path: Path | str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the parameters, by our names, of a checkpoint of timm's, DINO's or DINOv2's.

    `path` is a folder with config.json and model.safetensors, or a bare .safetensors file. The sizes are the
    tensors' own; the number of heads follows from `model_args`, the architecture or the width. The mean and deviation
    that config.json names are folded into the patch embedding; for a bare file they are 0.5 (images in [-1, 1]), or
    ImageNet's where DINOv2's mask token shows that it is the original. What timm has and a ViT here has not becomes
    its exact equal: position rows of registers are added to the registers, missing biases of q, k and v are zeros.

    Raises ValueError for a damaged file, for a model that computes something else, naming what shows it, and for
    every tensor that does not fit.
    """
    path = Path(path)
    card = _read_card(path / CARD) if path.is_dir() else Card()
    tensors = _read_tensors(path / WEIGHTS if path.is_dir() else path)
    where = f"{path} ({card.architecture})" if card.architecture else str(path)
    if "mask_token" in tensors and not path.is_dir():
        card = Card(mean=IMAGENET["mean"], std=IMAGENET["std"], original=True)
    tensors = _respelled(tensors)
    _check_kind(where, tensors)
    if "patch_embed.proj.weight" in tensors:
        config = _infer_vit(where, tensors, card)
        tensors = _completed(tensors, config)
    else:
        config = _infer_resnet(where, tensors, card)
    if config.num_classes and card.classes:
        check_classes({"classes": card.classes}, config, str(path / CARD))
    layout = timm_layout(config)
    check_shapes(
        f"{where} looks like a model of timm with {config.num_parameters:,} parameters",
        {name: slot.shape for name, slot in layout.items()},
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
    )
    parts: dict[str, list[Tensor]] = {}
    for name, slot in layout.items():
        is_convolution = name == "head.fc.weight"
        parts.setdefault(slot.ours, []).append(tensors[name][..., 0, 0] if is_convolution else tensors[name])
    state = {ours: part[0] if len(part) == 1 else torch.cat(part) for ours, part in parts.items()}
    return config, fold_normalization(state, card.mean, card.std)


def card_timm(path: Path | str) -> dict[str, Any]:
    """What config.json tells users of the model: `preprocessing`, and `classes`, where they have names. Nothing for a
    bare file."""
    if not Path(path).is_dir():
        return {}
    card = _read_card(Path(path) / CARD)
    found: dict[str, Any] = {"preprocessing": card.preprocessing.to_card()}
    return found | ({"classes": list(card.classes)} if card.classes else {})


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        check_regular(path)
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors ({error}); get the file again.") from error


def _read_card(path: Path) -> Card:
    try:
        said = read_json(path)
        inner = said.get("pretrained_cfg", said)  # older files say all in one
        args = said.get("model_args") or {}
        size = args.get("img_size") or inner.get("input_size", (3, 224, 224))[1:]
        height, width = (size, size) if isinstance(size, int) else size
        names = said.get("label_names") or inner.get("label_names") or ()
        return Card(
            architecture=str(said["architecture"]),
            args=args,
            pool=args.get("global_pool", said.get("global_pool")),
            image_hw=(int(height), int(width)),
            mean=tuple(map(float, inner.get("mean", IMAGENET["mean"]))),
            std=tuple(map(float, inner.get("std", IMAGENET["std"]))),
            classes=tuple(names.values() if isinstance(names, dict) else names),
            preprocessing=_preprocessing(said, inner, args, path),
        )
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}); get the folder again.") from error
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{path} is no config.json of timm's ({error!r}); get the folder again.") from error


def _preprocessing(
    said: Mapping[str, Any], inner: Mapping[str, Any], args: Mapping[str, Any], path: Path
) -> Preprocessing:
    """What `timm.data.resolve_data_config(pretrained_cfg=inner, use_test_size=True)` makes of a config.

    A size that the patch does not divide becomes the largest that it does, for timm's patches leave the rest out.
    """
    size = inner.get("test_input_size") or inner.get("input_size") or (3, 224, 224)
    patch = args.get("patch_size") or (re.search(r"_patch(\d+)_", str(said["architecture"])) or (0, 1))[1]
    height, width = (int(side) // int(patch) * int(patch) for side in size[1:])
    mode, crop = inner.get("crop_mode") or "center", inner.get("test_crop_pct") or inner.get("crop_pct") or 0.875
    resize = math.floor(min(height, width) / crop)
    if mode not in ("center", "squash") or resize < max(height, width):
        logger.warning(
            "%s: images are squashed to size, because crop_mode=%r with crop_pct=%s cannot be done", path, mode, crop
        )
        mode, resize = "squash", min(height, width)
    return Preprocessing(
        image_size=height if height == width else (height, width),
        resize=None if mode == "squash" and resize == min(height, width) else resize,
        keep_aspect=mode == "center",
        interpolation=inner.get("interpolation") or "bicubic",
        mean=tuple(map(float, inner.get("mean") or IMAGENET["mean"])),
        std=tuple(map(float, inner.get("std") or IMAGENET["std"])),
    )


def _respelled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by the names of today's timm; DINOv2's, and the hidden layer of timm before 0.6, have others."""
    others = {"register_tokens": "reg_token", "pre_logits.fc.weight": "pre_logits.weight",
              "pre_logits.fc.bias": "pre_logits.bias"}  # fmt: skip
    return {others.get(name, name): tensor for name, tensor in tensors.items() if name != "mask_token"}


def _check_kind(where: str, tensors: Mapping[str, Tensor]) -> None:
    found = None
    for pattern, what in OTHER_KINDS:
        found = found or next(((name, what) for name in tensors if re.search(pattern, name)), None)
    shapes = [tensors[name].shape for name in (f"blocks.0.mlp.fc{i}.weight" for i in (1, 2)) if name in tensors]
    if found is None and [len(shape) for shape in shapes] == [2, 2] and shapes[0][0] == 2 * shapes[1][1]:
        found = "blocks.0.mlp.fc1.weight", "gated MLPs whose two halves are packed in one matrix (SwiGLU)"
    if found:
        raise UserError(f"{where} holds a model with {found[1]} ({found[0]}); supported are {SUPPORTED}.")


def _infer_vit(where: str, tensors: Mapping[str, Tensor], card: Card) -> ViTConfig:
    optional = {name: 3 for name in ("reg_token", "pos_embed") if name in tensors}
    _need(where, tensors, {"patch_embed.proj.weight": 4, "blocks.0.mlp.fc1.weight": 2, **optional})
    width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    _check_args(where, card, VIT_ARGS)
    hybrid = any(name.startswith(BACKBONE) for name in tensors)
    stem = _infer_body(where, tensors, "v1", BACKBONE) if hybrid else None
    registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
    size, class_position = _infer_size(where, tensors, card, patch * (stem.stride if stem else 1), registers)
    depth = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    for name, found in (("depth", depth), ("embed_dim", width), ("patch_size", patch)):
        if card.args.get(name, found) not in (found, [found, found]):
            raise UserError(
                f"{where}: config.json says {name}={card.args[name]} and the tensors are for {found}; some are "
                f"missing, or it belongs to another file. Get both again."
            )
    heads, pool = _infer_heads(where, width, card), _infer_pool(where, tensors, card)
    gelu = _infer_gelu(where, tensors, card)
    # The original DINOv2 resamples without antialiasing, and with registers with it.
    plain = card.original and not registers
    try:
        return ViTConfig(
            image_size=size[0] if size[0] == size[1] else size,
            patch_size=patch,
            width=width,
            depth=depth,
            heads=heads,
            mlp_dim=tensors["blocks.0.mlp.fc1.weight"].shape[0],
            num_classes=_rows(tensors, "head.weight"),
            pool=pool,
            representation_size=_rows(tensors, "pre_logits.weight") or None,
            position="1d" if "pos_embed" in tensors else "none",
            position_interpolation="bicubic" if plain else "bicubic_antialias",
            gelu=gelu,
            stem=stem,
            layer_scale=card.args.get("init_values", 1e-5) if "blocks.0.ls1.gamma" in tensors else None,
            registers=registers,
            class_position=class_position,
            distilled="dist_token" in tensors,
        )
    except ValueError as error:
        raise UserError(f"{where} holds no model that can be built: {error}") from error


def _check_args(where: str, card: Card, known: set[str]) -> None:
    """Raises ValueError for `model_args` that may change what is computed, and are not known here."""
    required = {"output_stride": 32, "in_chans": 3}
    wrong = {
        name: value
        for name, value in card.args.items()
        if value is not None and (value != required[name] if name in required else name not in known)
    }
    if wrong:
        raise UserError(
            f"{where}: config.json has model_args that are not supported: "
            f"{some([f'{name}={value!r}' for name, value in wrong.items()])}. Supported are {', '.join(sorted(known))}."
        )


def _infer_resnet(where: str, tensors: Mapping[str, Tensor], card: Card) -> ResNetConfig:
    _need(where, tensors, {"stem.conv.weight": 4})
    _check_args(where, card, RESNET_ARGS)
    if card.pool not in (None, "avg"):
        raise UserError(f"{where} pools by global_pool={card.pool!r}; a ResNet here takes the mean ('avg') alone.")
    height, width = card.image_hw or (224, 224)
    return ResNetConfig(
        image_size=height if height == width else (height, width),
        body=_infer_body(where, tensors, "v2", ""),
        num_classes=_rows(tensors, "head.fc.weight"),
    )


def _rows(tensors: Mapping[str, Tensor], name: str) -> int:
    """Outputs of a dense layer; 0 where there is none."""
    return tensors[name].shape[0] if name in tensors and tensors[name].ndim else 0


def _need(where: str, tensors: Mapping[str, Tensor], wanted: Mapping[str, int]) -> None:
    """Raises ValueError unless the tensors that sizes are read from are there, with so many axes."""
    for name, ndim in wanted.items():
        if name not in tensors or tensors[name].ndim != ndim or not tensors[name].numel():
            found = f"of shape {tuple(tensors[name].shape)}" if name in tensors else "missing"
            raise UserError(
                f"{where} is no model of timm that can be read: {name} is {found}, where a tensor of {ndim} axes is "
                f"needed. It holds {some(sorted(tensors)) or 'nothing'}; supported are {SUPPORTED}."
            )


def _infer_body(where: str, tensors: Mapping[str, Tensor], version: str, prefix: str) -> ResNetBody:
    root = f"{prefix}stem.conv.weight" if f"{prefix}stem.conv.weight" in tensors else f"{prefix}conv.weight"
    _need(where, tensors, {root: 4})
    pattern = re.escape(prefix) + r"stages\.(\d{1,4})\.blocks\.(\d{1,4})\."
    units = {match.groups() for name in tensors if (match := re.match(pattern, name))}
    stages = sorted({stage for stage, _ in units}, key=int)
    try:
        return ResNetBody(
            layers=tuple(sum(stage == each for stage, _ in units) for each in stages),
            width=tensors[root].shape[0],
            version="v1" if version == "v1" else "v2",
            weight_eps=WEIGHT_EPS,
            weight_eps_on="variance",
            group_norm_eps=GROUP_NORM_EPS,
        )
    except ValueError as error:
        raise UserError(f"{where} holds no model that can be built: {error}") from error


def _infer_size(
    where: str, tensors: Mapping[str, Tensor], card: Card, stride: int, registers: int
) -> tuple[tuple[int, int], bool]:
    """Image size from the rows of the position table, and whether class (and distillation) token have one."""
    placed = ("cls_token" in tensors) + ("dist_token" in tensors)
    if "pos_embed" not in tensors:
        if card.image_hw is None or card.args.get("pos_embed") not in ("", "none"):
            raise UserError(
                f"{where} holds no position table (pos_embed). Models with rotary positions (DINOv3, EVA-02) are not "
                f"supported; one without any says so in config.json, by pos_embed='none' in model_args."
            )
        return card.image_hw, True
    rows = tensors["pos_embed"].shape[1]
    options = sorted({0, placed, placed + registers})
    if card.image_hw is not None:
        before = rows - math.prod(-(-side // stride) for side in card.image_hw)
        if before in options:
            return card.image_hw, before > 0 or not placed
    squares = [before for before in options if rows > before and math.isqrt(rows - before) ** 2 == rows - before]
    if len(squares) != 1:
        size = f"{card.image_hw[0]}x{card.image_hw[1]}" if card.image_hw else "unknown"
        raise UserError(
            f"{where} has a position table of {rows} rows, and the image size they are for is {size}; with "
            f"{some([str(each) for each in options])} of them for other tokens the rest forms "
            f"{'more than one square' if squares else 'no square'}. Give a folder whose config.json says it, by "
            f"img_size in model_args."
        )
    side = math.isqrt(rows - squares[0]) * stride
    if card.image_hw is not None:
        logger.warning(
            "%s says %dx%d pixels and its positions are for %dx%d, which the patches cover; images are brought to that",
            where, *card.image_hw, side, side,
        )  # fmt: skip
    return (side, side), squares[0] > 0 or not placed


def _infer_heads(where: str, width: int, card: Card) -> int:
    heads = card.args.get("num_heads") or OTHER_HEADS.get(card.architecture.split(".")[0]) or HEADS.get(width)
    if heads is None:
        raise UserError(
            f"{where} has tokens of width {width}, and no tensor tells the number of attention heads. Give a folder "
            f"whose config.json says it, by num_heads in model_args; without it these widths are known: "
            f"{', '.join(map(str, HEADS))}."
        )
    return heads


def _infer_pool(where: str, tensors: Mapping[str, Tensor], card: Card) -> Literal["token", "gap", "map"]:
    """Our name for how tokens become one; raises ValueError for a way that a model here does not have."""
    has_class, has_map = "cls_token" in tensors, "attn_pool.latent" in tensors
    pool = card.pool if card.pool is not None else "map" if has_map else "token" if has_class else "avg"
    over_all = bool(card.args.get("pool_include_prefix"))
    ok = {
        "token": has_class,
        # Registers count in timm's mean or attention where it is told so; here in the attention alone.
        "avg": not has_class and not ("reg_token" in tensors and over_all),
        "map": not has_class and not ("reg_token" in tensors and not over_all),
    }
    if not isinstance(pool, str) or not ok.get(pool):
        raise UserError(
            f"{where} pools by global_pool={pool!r} with{'' if has_class else 'out'} a class token, and registers "
            f"{'counted' if over_all else 'not counted'}; supported are 'token' with a class token, and without one "
            f"'avg', where registers do not count, and 'map', where they do."
        )
    return "token" if pool == "token" else "map" if pool == "map" else "gap"


def _infer_gelu(where: str, tensors: Mapping[str, Tensor], card: Card) -> Literal["tanh", "erf"]:
    act, norm = card.args.get("act_layer"), card.args.get("norm_layer")
    if act not in (None, "gelu", "gelu_tanh") or norm not in (None, "layernorm"):
        raise UserError(
            f"{where} has act_layer={act!r} and norm_layer={norm!r}; supported are 'gelu' and 'gelu_tanh', and "
            f"'layernorm'."
        )
    match = TANH.match(card.architecture)
    named = match is not None and (match[1] != "large_patch16" or match[3] == "512")
    if not card.architecture and "cls_token" not in tensors:
        width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
        large_512 = (width, patch) == (1024, 16) and "pos_embed" in tensors and tensors["pos_embed"].shape[1] == 32**2
        named = (width, patch) in TANH_SHAPES or large_512
    return "tanh" if act == "gelu_tanh" or (act is None and named) else "erf"


def _completed(tensors: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """The tensors of the same function as ours has them: registers without rows, q, k and v with biases."""
    tensors, before = dict(tensors), config.num_position_prefix
    if "pos_embed" in tensors:
        table = tensors["pos_embed"]
        if config.registers and table.shape[1] > before + config.num_patches:
            after = before + config.registers
            tensors["reg_token"] = tensors["reg_token"].float() + table[:, before:after].float()
            tensors["pos_embed"] = torch.cat([table[:, :before], table[:, after:]], dim=1)
    if not any(name.endswith(".attn.qkv.bias") for name in tensors):
        like = tensors["patch_embed.proj.weight"]
        for layer in range(config.depth):
            tensors[f"blocks.{layer}.attn.qkv.bias"] = like.new_zeros(3 * config.width)
    return tensors
