"""A model written as timm reads it: the folder that `vitlab.weights.timm` describes."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.io import replacing_folder
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig
from vitlab.models.vit import Model, ViT
from vitlab.preprocessing import Preprocessing
from vitlab.weights.folder import CARD, WEIGHTS, check_classes, check_replaceable, to_json
from vitlab.weights.timm_names import GROUP_NORM_EPS, WEIGHT_EPS, spell, timm_layout

NAMED = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge"}
PLAIN = (
    "tiny_patch16", "small_patch8", "small_patch16", "small_patch32", "base_patch8", "base_patch16", "base_patch32",
    "large_patch14", "large_patch16", "large_patch32", "huge_patch14",
)  # fmt: skip
"""Plain ViTs among timm's architectures; all build any size, so the nearest name is a courtesy."""
HYBRIDS: dict[tuple[int, ...], str] = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
"""Units of a stem -> an architecture that has it: its stem is the one thing that arguments do not change."""
RESNETS: dict[tuple[int, ...], tuple[int, int, int]] = {
    (3, 4, 6, 3): (50, 1, 3),
    (3, 4, 23, 3): (101, 1, 3),
    (3, 8, 36, 3): (152, 2, 4),
}
"""Units of a ResNet -> its layers and the two width factors that timm has architectures for."""


def write_timm(model: Model, folder: Path | str, extra: Mapping[str, Any]) -> None:
    """Writes a folder from which `timm.create_model("local-dir:FOLDER", pretrained=True)` builds an equal model.

    Its images are in [-1, 1], as here (mean and std 0.5). Of `extra`, `classes` becomes `label_names` and
    `preprocessing` how test images are brought to size. Positions of every kind that enter at the stem become
    the table they amount to; weights that are standardized are scaled so that timm's eps gives the same.

    Raises ValueError for a model that timm's cannot compute, naming the setting, and for a folder with other files.
    """
    folder = Path(folder)
    _check_writable(model.config)
    check_classes(dict(extra), model.config)
    check_replaceable(folder, (WEIGHTS, CARD))
    config, state = _in_timms_terms(model)
    tensors: dict[str, Tensor] = {}
    done: dict[str, int] = {}
    for name, slot in timm_layout(config).items():
        start = done.get(slot.ours, 0)
        done[slot.ours] = start + slot.shape[0]
        tensors[name] = state[slot.ours][start : done[slot.ours]].reshape(slot.shape).clone()
    card = to_json(timm_card(config, extra))
    with replacing_folder(folder) as aside:
        weights = aside / WEIGHTS
        safetensors.torch.save_file(tensors, weights, metadata={"format": "pt"})
        weights.chmod(aside.stat().st_mode & 0o666)  # safetensors lets only the owner read
        (aside / CARD).write_text(card, encoding="utf-8")


def _check_writable(config: ModelConfig) -> None:
    """Raises ValueError at the first setting that no argument of timm's can say."""
    vit = isinstance(config, ViTConfig)
    body = config.stem if vit else config.body
    wanted: list[tuple[str, Any, Collection[Any]]] = []
    if vit:
        wanted += [
            ("encoder", config.encoder, ("full",)),
            ("position", config.position, ("none", "1d", "2d", "sincos2d")),
            ("position_at", "stem" if config.position == "none" else config.position_at, ("stem",)),
            ("pool", config.pool, ("token", "gap", "map")),
            ("representation_size", config.representation_size, (None,)),
            ("layer_norm_eps", config.layer_norm_eps, (1e-6,)),
        ]
        if config.distilled:
            wanted += [("registers", config.registers, (0,)), ("stem", config.stem, (None,))]
    if body is not None:
        wanted += [
            ("version", body.version, ("v1" if vit else "v2",)),
            ("mixing", body.mixing, ("conv",)),
            ("layers", body.layers, tuple(HYBRIDS if vit else RESNETS)),
            ("width", body.width, (64,) if vit else (body.width,)),
            ("pool_padding", body.pool_padding, ("zero",)),
            ("group_norm_eps", body.group_norm_eps, (GROUP_NORM_EPS,)),
            ("weight_eps", body.weight_eps, (body.weight_eps or WEIGHT_EPS,)),
        ]
    for name, given, allowed in wanted:
        if given not in allowed:
            raise UserError(
                f"the model has {name}={given!r}, which timm cannot say: its models have "
                f"{' or '.join(map(repr, allowed))}. Use save_model, which keeps every setting."
            )


def _in_timms_terms(model: Model) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The same function with what timm has: one position table, its own eps in the standardization of weights."""
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    body = model.config.body if isinstance(model.config, ResNetConfig) else model.config.stem
    if body is not None:
        for name in state:
            if re.match(r"(stem|body)\..*(root|conv\d|shortcut)\.weight$", name):
                state[name] = _restandardized(state[name], body)
    if not isinstance(model, ViT):
        return model.config, state
    config, table = model.config, model.position.absolute()
    if table is None and not config.distilled:
        return config, state
    state = {name: tensor for name, tensor in state.items() if not name.startswith("position.")}
    table = state["embedding.weight"].new_zeros(config.num_tokens, config.width) if table is None else table
    table = table.detach().cpu()
    # timm gives a row to all tokens in front of the patches or to none, and to none alone with registers in DINOv2.
    every = config.distilled or (config.class_position and not config.registers)
    if not every:
        if config.has_class_token:
            state["cls"] = state["cls"] + table[0]  # the sum that Eq. 1 forms
        table = table[config.num_prefix_tokens :]
    state["position.table"] = table[None]
    return replace(config, position="1d", class_position=every), state


def _restandardized(weight: Tensor, body: ResNetBody) -> Tensor:
    """Weights that become, standardized with timm's eps, what these become with the body's."""
    eps, exact = body.weight_eps, weight.double()
    if body.weight_eps_on == "variance":
        return (exact * math.sqrt(WEIGHT_EPS / eps)).to(weight.dtype)
    variance, mean = torch.var_mean(exact, dim=(1, 2, 3), correction=0, keepdim=True)
    return ((exact - mean) * (WEIGHT_EPS / (2 * variance.sqrt() * eps + eps**2)).sqrt()).to(weight.dtype)


def timm_card(config: ModelConfig, extra: Mapping[str, Any]) -> dict[str, Any]:
    """timm's config.json."""
    vit = isinstance(config, ViTConfig)
    architecture, args = _vit_args(config) if vit else _resnet_args(config.body)
    root = "stem.conv" if not vit else "patch_embed.proj" if config.stem is None else spell("stem.root.", config)
    heads: Any = ["head", "head_dist"] if vit and config.distilled else "head" if vit else "head.fc"
    height, width = config.image_hw
    # timm's models take images of one size, and always resize with antialiasing; it has no area averaging.
    prepared = Preprocessing.read(extra, "extra", config.image_size).at(config.image_size)
    resize, side = prepared.resize, min(height, width)
    crop = side / resize if resize else 1.0
    if resize and math.floor(side / crop) != resize:  # timm rounds this down
        crop = side / (resize + 0.5)
    card: dict[str, Any] = {
        "architecture": architecture,
        "num_classes": config.num_classes,
        "num_features": config.num_features,
        "global_pool": args["global_pool"] if vit else "avg",
        "model_args": args,
        "pretrained_cfg": {
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
            "first_conv": root.removesuffix("."),
            "classifier": heads,
        },
    }
    if extra.get("classes") is not None:
        card["label_names"] = list(extra["classes"])
    return card


def _vit_args(config: ViTConfig) -> tuple[str, dict[str, Any]]:
    """An architecture's name and every argument that makes it this ViT."""
    near = f"{NAMED.get(config.width)}_patch{config.patch_size}"
    name = f"vit_{near if near in PLAIN else 'base_patch16'}_224"
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
