"""Hugging Face's folders, read and written without their code.

    config.json                the kind of model, `model_type`, and its settings
    model.safetensors          the parameters; for several files, `model.safetensors.index.json` lists them
    preprocessor_config.json   how images are prepared: see `vitlab.weights.huggingface_config`
    processor_config.json      the same, below `image_processor`, where transformers 5 has saved a whole processor

| `model_type` | becomes |
|---|---|
| `vit` | a ViT; a pooler, which only a model without a head has, is its pre-logits layer |
| `deit` with a teacher's head | a ViT with a distillation token |
| `deit` without | a ViT with a register: the distillation token plus its position, which no head reads |
| `dinov2`, `dinov2_with_registers` | a ViT with LayerScale and registers, which pools `token+gap` for its head |
| `dinov3_vit` | a ViT with RoPE, LayerScale and registers |
| `clip`, `clip_vision_model` | the image tower: a ViT with a LayerNorm before its blocks, its head the projection |
| `siglip`, `siglip_vision_model` | the image tower: a ViT with attention pooling |
| `vit_mae`, `vit_msn`, `ijepa` | a ViT; the decoder is left out |
| `bit` | a ResNet |

Rates of dropout and stochastic depth are not converted: they act elsewhere. `kind` is a `model_type`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models import ModelConfig, Rotary, ViTConfig
from vitlab.models.variant import override
from vitlab.models.vit import Model, ViT
from vitlab.settings import read_fields
from vitlab.weights.adapt import fold_normalization
from vitlab.weights.folder import CONFIG, README, WEIGHTS, check_classes, read_safetensors, read_settings, write_files
from vitlab.weights.huggingface_config import dinov2_mlp_ratio, infer_config, model_settings, read_classes
from vitlab.weights.huggingface_images import IMAGES, image_settings, read_images, read_mean_std, read_preprocessing
from vitlab.weights.huggingface_layout import FAMILIES, has_token_row, huggingface_layout, select_arrays, stored_arrays
from vitlab.weights.json_fields import HUGGINGFACE_MODEL, multi_label_metadata
from vitlab.weights.layout import check_arrays, check_supported, cpu_state, position_rows, read_state, write_state
from vitlab.weights.model_card import model_card
from vitlab.weights.unsupported import why_unsupported

INDEX = f"{WEIGHTS}.index.json"

# -------------------------------------------------------------------------------------------------------- reading


def read_huggingface(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the parameters, by our names and in the stored precision.

    Sizes follow from the arrays, other settings from config.json. Mean and std of the images are folded into the patch
    embedding, so that the model takes images in [-1, 1]; without preprocessor_config.json they are those of its family.
    Raises UserError for other models, for settings that are not supported, and for arrays that do not fit.
    """
    kind, settings = _read_config(folder)
    stored = _read_arrays(folder)
    arrays = select_arrays(kind, settings, stored)
    try:
        images = read_images(folder)
        mean, std = read_mean_std(images, kind)
        config = infer_config(kind, settings, arrays, images)
        if config.num_classes and "visual_projection.weight" not in stored:
            check_classes({"classes": read_classes(settings) or None}, config, "id2label")
    except ValueError as error:
        raise UserError(f"{folder} holds an invalid or unsupported model: {error}") from error
    layout = huggingface_layout(kind, config)
    check_arrays(f"{folder} looks like a {kind} of {config.num_parameters:,} parameters", layout, arrays)
    state = read_state(layout, arrays)
    if has_token_row(kind, config):
        cls, token, patches = state["position.table"].tensor_split([1, 2], dim=1)
        state["registers"] = state["registers"] + token
        state["position.table"] = torch.cat([cls, patches], dim=1)
    return config, fold_normalization(state, mean, std)


def metadata_huggingface(folder: Path) -> dict[str, Any]:
    """`preprocessing` where the folder has one, `classes` where they have names, `multi_label` of a sigmoid."""
    kind, settings = _read_config(folder)
    metadata = multi_label_metadata(settings)
    classes = read_classes(settings)
    if classes and classes != [f"LABEL_{i}" for i in range(len(classes))]:
        metadata["classes"] = classes
    if images := read_images(folder):
        patch_size = settings.get("vision_config", settings).get("patch_size")
        metadata["preprocessing"] = read_preprocessing(images, kind, folder).for_patches(patch_size or 1).to_metadata()
    return metadata


def _read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """`model_type` and all of config.json. Raises UserError for a family of other models."""
    settings = read_settings(folder / CONFIG)
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        reason = why_unsupported(str(kind))
        raise UserError(
            f"{folder} holds a Hugging Face model of type {kind!r}{reason and f': {reason}'}; supported: "
            f"{', '.join(FAMILIES)}."
        )
    return kind, read_fields(settings, HUGGINGFACE_MODEL, str(folder / CONFIG))


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


# -------------------------------------------------------------------------------------------------------- writing


def write_huggingface(model: Model, folder: Path | str, metadata: dict[str, Any]) -> None:
    """Writes a folder that `AutoModelForImageClassification.from_pretrained(folder)` turns into an equal model, or
    `AutoModel` where there is no head. Its images are in [-1, 1]. Of `metadata`, `classes` and `preprocessing` are
    written, and in README.md all that `model_card` reads. Raises UserError for a model that Hugging Face's code would
    compute otherwise, and for a folder with other files."""
    check_classes(metadata, model.config)
    if not isinstance(model, ViT):
        raise UserError("ResNets are not written for Hugging Face. Use save_model (`--to vitlab`).")
    kind, config, state = _to_huggingface(model)
    arrays = stored_arrays(kind, config, write_state(huggingface_layout(kind, config), state))
    settings = model_settings(kind, config, metadata)
    readme = model_card("huggingface", Path(folder), model.config, metadata)
    write_files(Path(folder), arrays, {CONFIG: settings, IMAGES: image_settings(config, metadata), README: readme})


def _to_huggingface(model: ViT) -> tuple[str, ViTConfig, dict[str, Tensor]]:
    """`model_type`, configuration and parameters of an equal Hugging Face model. Raises UserError if there is none.
    Where LayerScale or registers require DINOv2, a head on the class token alone also reads the mean over patches, with
    weights of zero, and a missing LayerScale is one of 1."""
    config = model.config
    kind = _kind(config)
    _check_representable(kind, config)
    state = {name: tensor for name, tensor in cpu_state(model).items() if not name.startswith("position.")}
    if kind == "clip_vision_model" and config.num_classes and state["head.bias"].any():
        raise UserError(
            "Hugging Face's CLIP has no classifier that reads the class token, only a projection without bias, and "
            "this head has one. Use another format: `--to timm` or `--to vitlab`."
        )
    if FAMILIES[kind].has_layer_scale and config.variant.layer_scale is None:
        ones = torch.ones_like(state["norm.weight"])
        state |= {f"blocks.{i}.branch{part}.scale": ones for i in range(config.depth) for part in (1, 2)}
        config = override(config, layer_scale=1.0)
    if kind.startswith("dinov2"):
        if config.num_classes and config.pool == "token":
            state["head.weight"] = F.pad(state["head.weight"], (0, config.width))
        config = dataclasses.replace(config, pool="token+gap" if config.num_classes else "token")
    if kind != "dinov3_vit":
        rows = position_rows(model, state)
        with_rows = config.num_prefix_tokens - (0 if has_token_row(kind, config) else config.variant.registers)
        state["position.table"] = torch.cat([rows[:with_rows], rows[config.num_prefix_tokens :]])[None]
        config = override(config, position="1d", class_position=True)
    return kind, config, state


def _check_representable(kind: str, config: ViTConfig) -> None:
    """Raises UserError for the first setting that no `model_type` has."""
    family, has_head = FAMILIES[kind], config.num_classes > 0
    has_registers = kind == "deit" or family.has_layer_scale
    supported: dict[str, tuple[Any, ...]] = {
        "pool": {"clip": ("gap",), "ijepa": ("gap",), "siglip_vision_model": ("map",)}.get(kind, ("token",)),
        "position": ("none",) if kind == "dinov3_vit" else ("none", "1d", "2d", "sincos2d"),
        "pre_norm": (family.pre_norm,),
        "final_norm": ("none",) if kind == "clip" else ("tokens",),
        "gelu": ("tanh", "erf", "quick"),
        "registers": (config.variant.registers,) if has_registers else (int(kind == "clip"),),
        # Headless Hugging Face models do not average the two tokens; only DeiT has a second head.
        "distilled": (True, False) if kind == "deit" and has_head else (False,),
        "representation_size": (config.representation_size,) if kind in ("vit", "deit") and not has_head else (None,),
    }
    if kind.startswith("dinov2"):
        supported["pool"] = ("token", "token+gap")
        nearest = max(config.mlp_dim // config.width, 1) * config.width
        supported["mlp_dim"] = (config.mlp_dim if dinov2_mlp_ratio(config) else nearest,)
        supported["image_size"] = (config.image_hw[0], config.image_hw[:1] * 2)
    if family.has_layer_scale:
        supported |= {"layer_scale": (config.variant.layer_scale,), "swiglu": (True, False)}
    if kind == "dinov3_vit":
        supported["rotary"] = (Rotary(config.variant.rotary.base),) if config.variant.rotary else ()
        supported["num_classes"] = (0,)  # their DINOv3 has no classifier
    if kind == "siglip_vision_model":
        supported |= {"map_heads": (None, config.heads), "num_classes": (0,)}  # their classifier reads the mean
    check_supported("Hugging Face's code", config, supported, ("layer_norm_eps", "class_position", "in_chans"))


def _kind(config: ViTConfig) -> str:
    """The `model_type` that can represent a ViT. A single register is written as the distillation token of a DeiT
    without a distillation head."""
    if config.variant.rotary:
        return "dinov3_vit"
    if config.variant.pre_norm:
        return "clip" if config.pool == "gap" and config.num_classes else "clip_vision_model"
    if config.pool in ("map", "gap"):
        return "siglip_vision_model" if config.pool == "map" else "ijepa"
    needs_dinov2 = config.pool == "token+gap" or config.variant.layer_scale is not None or config.variant.swiglu
    if needs_dinov2 or config.variant.registers > int(not config.variant.distilled):
        return "dinov2_with_registers" if config.variant.registers else "dinov2"
    return "deit" if config.variant.distilled or config.variant.registers else "vit"
