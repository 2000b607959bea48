"""Hugging Face's folders, read and written without their code.

    config.json                the kind of model, `model_type`, and its settings
    model.safetensors          the parameters; for several files, `model.safetensors.index.json` lists them
    preprocessor_config.json   how images are prepared: see `vitlab.weights.huggingface_config`

| `model_type` | becomes |
|---|---|
| `vit` | a ViT; a pooler, which only a model without a head has, is its pre-logits layer |
| `deit` with a teacher's head | a ViT with a distillation token |
| `deit` without | a ViT with a register: the distillation token plus its position, which no head reads |
| `dinov2`, `dinov2_with_registers` | a ViT with LayerScale and registers, which pools `token+gap` for its head |
| `dinov3_vit` | a ViT with rotary positions, LayerScale and registers; read, not written, as all below |
| `clip`, `clip_vision_model` | the image tower: a ViT with a LayerNorm before its blocks, its head the projection |
| `siglip`, `siglip_vision_model` | the image tower: a ViT with attention pooling |
| `vit_mae`, `vit_msn`, `ijepa` | a ViT; the decoder is left out |
| `bit` | a ResNet |

Rates of dropout and stochastic depth are not converted: they act elsewhere.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, Rotary, ViTConfig
from vitlab.models.image_size import hw
from vitlab.models.vit import Model, ViT
from vitlab.weights.adapt import fold_normalization
from vitlab.weights.folder import CARD, WEIGHTS, check_classes, read_safetensors, read_settings, write_files
from vitlab.weights.huggingface_config import (
    GELU,
    IMAGES,
    check_setting,
    check_sizes,
    image_settings,
    model_settings,
    read_classes,
    read_images,
    read_normalization,
    read_preprocessing,
    read_size,
    to_size,
)
from vitlab.weights.huggingface_layout import (
    HEADS,
    NAMING,
    Naming,
    has_token_row,
    huggingface_layout,
    select_arrays,
)
from vitlab.weights.layout import (
    check_arrays,
    check_supported,
    count_units,
    cpu_state,
    read_state,
    require_shape,
    write_state,
)
from vitlab.weights.model_card import README, model_card

INDEX = f"{WEIGHTS}.index.json"
TOWERS = ("clip", "clip_vision_model", "siglip", "siglip_vision_model")
EPS = {"clip": 1e-5, "clip_vision_model": 1e-5, "dinov3_vit": 1e-5}
EPS |= dict.fromkeys(("siglip", "siglip_vision_model", "dinov2", "dinov2_with_registers", "vit_msn"), 1e-6)
"""LayerNorm's eps where config.json has none; of others 1e-12."""
# -------------------------------------------------------------------------------------------------------- reading


def read_huggingface(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the parameters, by our names and in the stored precision.

    Sizes follow from the arrays, other settings from config.json. Mean and std of the images are folded into the patch
    embedding, so that the model takes images in [-1, 1]; a folder without preprocessor_config.json has those of its
    family's papers: ImageNet's for DeiT and DINOv2, 0.5 for others.

    Raises ValueError for other kinds of models, for settings that would be computed otherwise here, and for arrays
    that do not fit, naming every one.
    """
    card = read_settings(folder / CARD)
    kind = card.get("model_type")
    if not isinstance(kind, str) or kind not in NAMING:
        naflex = " (NaFlex, which takes images of every proportion as sequences)" if "siglip2" in str(kind) else ""
        raise UserError(
            f"{folder} holds a Hugging Face model of type {kind!r}{naflex}; supported: {', '.join(NAMING)}."
        )
    stored = _read_arrays(folder)
    arrays = select_arrays(kind, stored)
    try:
        images = read_images(folder)
        mean, std = read_normalization(images, kind)
        if kind == "bit":
            config = _infer_resnet(card, arrays, images)
        elif kind in TOWERS:
            config = _infer_tower(kind, card, arrays)
        else:
            config = _infer_vit(kind, card, arrays)
        if config.num_classes and "visual_projection.weight" not in stored:
            check_classes({"classes": read_classes(card) or None}, config, "id2label")
    except ValueError as error:
        raise UserError(f"{folder} holds an invalid or unsupported model: {error}") from error
    layout = huggingface_layout(kind, config)
    check_arrays(f"{folder} looks like a {kind} of {config.num_parameters:,} parameters", layout, arrays)
    state = read_state(layout, arrays)
    if has_token_row(kind, config):
        cls, token, patches = state["position.table"].tensor_split([1, 2], dim=1)
        state["registers"], state["position.table"] = state["registers"] + token, torch.cat([cls, patches], dim=1)
    return config, fold_normalization(state, mean, std)


def card_huggingface(folder: Path) -> dict[str, Any]:
    """`preprocessing` where the folder has one, and `classes` where they have names."""
    settings = read_settings(folder / CARD)
    images, classes = read_images(folder), read_classes(settings)
    card: dict[str, Any] = {}
    if classes and classes != [f"LABEL_{i}" for i in range(len(classes))]:
        card["classes"] = classes
    if images:
        prepared = read_preprocessing(images, settings.get("model_type", ""), folder)
        patch_size = settings.get("vision_config", settings).get("patch_size")
        card["preprocessing"] = prepared.for_patches(patch_size or 1).to_card()
    return card


def _read_arrays(folder: Path) -> dict[str, Tensor]:
    """The arrays of one file, or of all that an index lists."""
    files: list[Any] = [WEIGHTS]
    if not (folder / WEIGHTS).is_file():
        if not (folder / INDEX).is_file():
            raise UserError(
                f"{folder} holds no {WEIGHTS}. Get the model's safetensors (a pickle such as pytorch_model.bin can run "
                f"any code and is never loaded), or write them with Hugging Face's save_pretrained."
            )
        listed = read_settings(folder / INDEX).get("weight_map")
        files = list(listed.values()) if isinstance(listed, dict) and listed else [""]
        for name in files:
            if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
                raise UserError(f"{folder / INDEX} lists {name!r}, which is not a file of the folder; get it again.")
    arrays: dict[str, Tensor] = {}
    for name in sorted(set(files)):
        arrays |= read_safetensors(folder / name)
    return arrays


def _infer_vit(kind: str, card: dict[str, Any], arrays: dict[str, Tensor]) -> ViTConfig:
    """The configuration; adds zero biases of q, k and v to `arrays` where the model has none."""
    naming, dinov2, dinov3 = NAMING[kind], kind.startswith("dinov2"), kind == "dinov3_vit"
    gated = dinov3 and bool(card.get("use_gated_mlp", False))
    swiglu = gated or (dinov2 and bool(card.get("use_swiglu_ffn", False)))
    if gated:
        check_setting(card, "hidden_act", "gelu", "silu")
    head = next((name for name in HEADS if f"{name}.weight" in arrays), None)
    pooler = "pooler.dense.weight" in arrays and not head
    if pooler:
        check_setting(card, "pooler_act", "tanh", "tanh")
    width, channels, patch_size, _ = _shape(arrays, naming.names["embedding"], 4)
    depth = count_blocks(naming, arrays)
    if not check_setting(card, "qkv_bias", True, True, False):
        for i, name in ((i, name) for i in range(depth) for name in naming.qkv):
            arrays.setdefault(f"{naming.blocks}{i}.{name}.bias", torch.zeros(width))
    sizes = {"num_hidden_layers": depth, "hidden_size": width, "patch_size": patch_size, "num_channels": channels}
    check_sizes(card, sizes)
    distilled = kind == "deit" and head in HEADS[1:]
    fc2 = "mlp.weights_out" if dinov2 and swiglu else naming.names.get("mlp.fc2", "mlp.fc2")
    registers = "embeddings.distillation_token" if kind == "deit" and not distilled else "embeddings.register_tokens"
    size = to_size(card.get("image_size", ViTConfig.image_size))
    if dinov2 and isinstance(size, tuple):
        raise UserError(f"{CARD} says image_size={size}, and DINOv2's positions are for square images.")
    return ViTConfig(
        image_size=size,
        in_chans=channels,
        patch_size=patch_size,
        width=width,
        depth=depth,
        heads=card.get("num_attention_heads", 6 if dinov3 else 12),
        mlp_dim=_shape(arrays, f"{naming.blocks}0.{fc2}", 2)[1],
        num_classes=_shape(arrays, head, 2)[0] if head else 0,
        pool="token+gap" if dinov2 and head else "token" if kind != "ijepa" else "gap",
        representation_size=_shape(arrays, "pooler.dense", 2)[0] if pooler else None,
        position="none" if dinov3 else "1d",
        position_interpolation="bicubic_antialias" if kind == "dinov2_with_registers" else "bicubic",
        rotary=Rotary(base=float(card.get("rope_theta", 100.0))) if dinov3 else None,
        gelu=GELU[check_setting(card, "hidden_act", "gelu", *GELU)] if not gated else "erf",
        swiglu=swiglu,
        layer_norm_eps=card.get("layer_norm_eps", EPS.get(kind, 1e-12)),
        layer_scale=card.get("layerscale_value", 1.0) if dinov2 or dinov3 else None,
        registers=require_shape(CARD, arrays, registers, 3)[1] if registers in arrays else 0,
        distilled=distilled,
    )


def _infer_tower(kind: str, card: dict[str, Any], arrays: dict[str, Tensor]) -> ViTConfig:
    """The configuration of the image tower of CLIP or SigLIP; drops the arrays from `arrays` that its output skips.

    With a classifier, both classify the mean over patches: CLIP's without its last LayerNorm, where the class token
    takes part in attention alone, so it is a register here; SigLIP's without its attention pooling.
    """
    clip, naming = kind.startswith("clip"), NAMING[kind]
    classifies = "ForImageClassification" in str(card.get("architectures"))
    card = card.get("vision_config", card)
    width, channels, patch_size, _ = _shape(arrays, naming.names["embedding"], 4)
    sizes = {"num_hidden_layers": count_blocks(naming, arrays), "hidden_size": width, "patch_size": patch_size}
    check_sizes(card, sizes | {"num_channels": channels})
    size = to_size(card.get("image_size", 224))
    covered = [side // patch_size * patch_size for side in hw(size)] if size else None  # what convolutions see
    unused = "post_layernorm." if clip else "head."
    for name in [name for name in arrays if classifies and name.startswith(unused)]:
        del arrays[name]
    if clip and classifies:
        _, rows, _ = require_shape("the file", arrays, naming.names["position.table"], 3)
        cls, patches = arrays[naming.names["position.table"]].split([1, rows - 1], dim=1)
        arrays[naming.names["registers"]] = arrays[naming.names["registers"]] + cls
        arrays[naming.names["position.table"]] = patches
    return ViTConfig(
        image_size=to_size(covered),
        in_chans=channels,
        patch_size=patch_size,
        width=width,
        depth=sizes["num_hidden_layers"],
        heads=card.get("num_attention_heads", 12),
        mlp_dim=_shape(arrays, f"{naming.blocks}0.mlp.fc1", 2)[0],
        num_classes=_shape(arrays, "classifier", 2)[0] if "classifier.weight" in arrays else 0,
        pool="gap" if classifies else "token" if clip else "map" if "head.probe" in arrays else "gap",
        position_interpolation="bicubic",
        gelu=GELU[check_setting(card, "hidden_act", "quick_gelu" if clip else "gelu_pytorch_tanh", *GELU)],
        layer_norm_eps=card.get("layer_norm_eps", EPS[kind]),
        pre_norm=clip,
        final_norm="none" if clip and classifies else "tokens",
        registers=int(clip and classifies),
    )


def count_blocks(naming: Naming, arrays: dict[str, Tensor]) -> int:
    return len({name.removeprefix(naming.blocks).split(".")[0] for name in arrays if name.startswith(naming.blocks)})


def _infer_resnet(card: dict[str, Any], arrays: dict[str, Tensor], images: dict[str, Any]) -> ResNetConfig:
    v2 = check_setting(card, "layer_type", "preactivation", "preactivation", "bottleneck") == "preactivation"
    check_setting(card, "global_padding", None, *((None,) if v2 else ("SAME", "same")))
    check_setting(card, "embedding_dynamic_padding", False, not v2)
    for name, value in {"hidden_act": "relu", "num_groups": 32, "width_factor": 1}.items():
        check_setting(card, name, value, value)
    parts = [name.split(".") for name in arrays if name.startswith("encoder.stages.")]
    layers = count_units({(part[2], part[4]) for part in parts})
    width = _shape(arrays, "embedder.convolution", 4)[0]
    body = ResNetBody(
        layers,
        width,
        version="v2" if v2 else "v1",
        weight_eps=1e-8,
        weight_eps_on="variance",
        group_norm_eps=1e-5,  # no setting changes these
    )
    check_sizes(card, {"depths": list(body.layers)})
    check_setting(card, "output_stride", 32, *(2**i for i in range(16) if 2**i >= body.stride))
    num_classes = _shape(arrays, "classifier.1", 2)[0] if "classifier.1.weight" in arrays else 0
    return ResNetConfig(image_size=read_size(images) or ResNetConfig.image_size, body=body, num_classes=num_classes)


def _shape(arrays: dict[str, Tensor], layer: str, ndim: int) -> tuple[int, ...]:
    return require_shape("the file", arrays, f"{layer}.weight", ndim)


# -------------------------------------------------------------------------------------------------------- writing


def write_huggingface(model: Model, folder: Path | str, card: dict[str, Any]) -> None:
    """Writes a folder from which `AutoModelForImageClassification.from_pretrained(folder)` builds an equal model, or
    `AutoModel` where there is no head. Its images are in [-1, 1].

    Of `card`, `classes` and `preprocessing` are written, and in README.md all that `model_card` reads. Raises
    ValueError for a model that Hugging Face's code would compute otherwise, and for a folder with other files.
    """
    check_classes(card, model.config)
    if not isinstance(model, ViT):
        raise UserError("ResNets are not written for Hugging Face. Use save_model (`--to vitlab`).")
    kind, config, state = _to_huggingface(model)
    prefix = f"{kind}." if config.num_classes else ""
    arrays = {
        name if name.split(".")[0] in HEADS else prefix + name: array
        for name, array in write_state(huggingface_layout(kind, config), state).items()
    }
    if kind.startswith("dinov2"):  # required by their classes
        arrays[f"{prefix}embeddings.mask_token"] = torch.zeros_like(arrays[f"{prefix}embeddings.cls_token"][0])
    settings = model_settings(kind, config, card.get("classes"))
    readme = model_card("huggingface", Path(folder), model.config, card)
    write_files(Path(folder), arrays, {CARD: settings, IMAGES: image_settings(config, card), README: readme})


def _to_huggingface(model: ViT) -> tuple[str, ViTConfig, dict[str, Tensor]]:
    """Kind, configuration and parameters of the same function. Raises UserError where they have none.

    Fixed and composed positions become a table. Where LayerScale or registers require DINOv2, a head on the class
    token alone also reads the mean over patches, with weights of zero, and a missing LayerScale is one of 1.
    """
    config, has_head = model.config, model.config.num_classes > 0
    is_dinov2 = config.pool == "token+gap" or config.layer_scale is not None
    deit_token = (
        config.registers == 1 and not is_dinov2 and not config.distilled
    )  # DeiT's, without the teacher's has_head
    is_dinov2 = is_dinov2 or config.registers > int(deit_token)
    kind = "deit" if config.distilled or deit_token else "dinov2" if is_dinov2 else "vit"
    supported: dict[str, tuple[Any, ...]] = {
        "pool": ("token", "token+gap"),
        "position": ("none", "1d", "2d", "sincos2d"),
        "gelu": ("tanh", "erf"),
        "distilled": (True, False),
        "representation_size": (None,) if has_head or is_dinov2 else (config.representation_size,),
    }
    if (
        not has_head or is_dinov2
    ):  # no mean of both tokens without heads, neither LayerScale nor registers in their DeiT
        supported["distilled"] = (False,)
    if is_dinov2:
        supported["mlp_dim"] = (max(config.mlp_dim // config.width, 1) * config.width,)
        supported["image_size"] = (config.image_hw[0], config.image_hw[:1] * 2)
    free = ("layer_norm_eps", "layer_scale", "registers", "class_position", "in_chans")
    check_supported("Hugging Face's code", config, supported, free)
    state = {name: tensor for name, tensor in cpu_state(model).items() if not name.startswith("position.")}
    rows = model.position.absolute()
    if rows is None:
        rows = state["norm.weight"].new_zeros(config.num_tokens, config.width)
    rows, prefix = rows.detach().cpu(), config.num_prefix_tokens - (0 if deit_token else config.registers)
    state["position.table"] = torch.cat([rows[:prefix], rows[config.num_prefix_tokens :]])[None]
    config = dataclasses.replace(config, position="1d", class_position=True)
    if is_dinov2:
        kind = "dinov2_with_registers" if config.registers else kind
        if has_head and config.pool == "token":
            state["head.weight"] = F.pad(state["head.weight"], (0, config.width))
        if config.layer_scale is None:
            ones = torch.ones_like(state["norm.weight"])
            state |= {f"blocks.{i}.branch{part}.scale": ones for i in range(config.depth) for part in (1, 2)}
        scale = 1.0 if config.layer_scale is None else config.layer_scale
        config = dataclasses.replace(config, layer_scale=scale, pool="token+gap" if has_head else "token")
    return kind, config, state
