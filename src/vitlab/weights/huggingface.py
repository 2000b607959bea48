"""Hugging Face's folders, read and written without their code. `checkpoint.py` finds the functions through `MODULES`.

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

Rates of dropout and stochastic depth are not converted: their models apply them at other places.
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
from vitlab.weights.huggingface_config import dinov2_mlp_widths, infer_config, model_settings, read_classes
from vitlab.weights.huggingface_images import IMAGES, image_settings, read_mean_std, read_preprocessing, read_processor
from vitlab.weights.huggingface_layout import FAMILIES, Family, from_file, has_token_row, huggingface_layout, to_file
from vitlab.weights.json_fields import HUGGINGFACE_MODEL, multi_label_metadata
from vitlab.weights.layout import check_arrays, check_supported, cpu_state, position_rows, read_state, write_state
from vitlab.weights.model_card import model_card
from vitlab.weights.timm_architectures import why_unsupported

INDEX = f"{WEIGHTS}.index.json"

# -------------------------------------------------------------------------------------------------------- reading


def read_huggingface(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the parameters, by our names and in the stored precision.

    Sizes follow from the arrays, other settings from config.json. Mean and std of the images are folded into the patch
    embedding, so that the model takes images in [-1, 1]; without preprocessor_config.json they are those of its family.
    Raises UserError for other models, for settings that are not supported, and for arrays that do not fit.
    """
    family, settings = _read_config(folder)
    stored = _read_arrays(folder)
    arrays = from_file(family, settings, stored)
    try:
        processor = read_processor(folder)
        mean, std = read_mean_std(processor, family)
        config = infer_config(family, settings, arrays, processor)
        if config.num_classes and "visual_projection.weight" not in stored:
            check_classes({"classes": read_classes(settings) or None}, config, "id2label")
    except ValueError as error:
        raise UserError(f"{folder} holds an invalid or unsupported model: {error}") from error
    layout = huggingface_layout(family, config)
    check_arrays(f"{folder} looks like a {family.model_type} of {config.num_parameters:,} parameters", layout, arrays)
    state = read_state(layout, arrays)
    if has_token_row(family, config):
        cls, token, patches = state["position.table"].tensor_split([1, 2], dim=1)
        state["registers"] = state["registers"] + token
        state["position.table"] = torch.cat([cls, patches], dim=1)
    return config, fold_normalization(state, mean, std)


def metadata_huggingface(folder: Path) -> dict[str, Any]:
    """`preprocessing` where the folder has one, `classes` where they have names, `multi_label` of a sigmoid."""
    family, settings = _read_config(folder)
    metadata = multi_label_metadata(settings)
    classes = read_classes(settings)
    if classes and classes != [f"LABEL_{i}" for i in range(len(classes))]:
        metadata["classes"] = classes
    if processor := read_processor(folder):
        patch_size = settings.get("vision_config", settings).get("patch_size") or 1
        metadata["preprocessing"] = read_preprocessing(processor, family, folder).for_patches(patch_size).to_metadata()
    return metadata


def _read_config(folder: Path) -> tuple[Family, dict[str, Any]]:
    """The family and all settings of config.json. Raises UserError for a family of other models."""
    settings = read_settings(folder / CONFIG)
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        reason = why_unsupported(str(model_type))
        of_type = f"of type {model_type!r}: {reason}" if reason else f"of type {model_type!r}"
        raise UserError(f"{folder} holds a Hugging Face model {of_type}; supported: {', '.join(FAMILIES)}.")
    return FAMILIES[model_type], read_fields(settings, HUGGINGFACE_MODEL, str(folder / CONFIG))


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
    family = _choose_family(model.config)
    _check_representable(family, model)
    config, state = _complete(family, model)
    settings = model_settings(family, config, metadata)
    arrays = to_file(family, settings, write_state(huggingface_layout(family, config), state))
    readme = model_card("huggingface", Path(folder), model.config, metadata)
    write_files(Path(folder), arrays, {CONFIG: settings, IMAGES: image_settings(config, metadata), README: readme})


def _choose_family(config: ViTConfig) -> Family:
    """The family nearest to a ViT. A single register becomes the distillation token of a DeiT without a head on it."""
    variant = config.variant
    is_dinov2 = config.pool == "token+gap" or variant.layer_scale is not None or variant.swiglu
    if variant.rotary:
        model_type = "dinov3_vit"
    elif variant.pre_norm:
        model_type = "clip" if config.pool == "gap" and config.num_classes else "clip_vision_model"
    elif config.pool == "map":
        model_type = "siglip_vision_model"
    elif config.pool == "gap":
        model_type = "ijepa"
    elif is_dinov2 or variant.registers > int(not variant.distilled):  # more than a DeiT may have
        model_type = "dinov2_with_registers" if variant.registers else "dinov2"
    else:
        model_type = "deit" if variant.distilled or variant.registers else "vit"
    return FAMILIES[model_type]


def _check_representable(family: Family, model: ViT) -> None:
    """Raises UserError for the first setting that no model of the family has. A setting must have a value that is
    `supported`, or its default; one in `free`, or in `FREE` of layout.py, may have any."""
    config, has_head = model.config, model.config.num_classes > 0
    readout = family.classifier if has_head and family.written_head == "classifier" else family.body
    free = {"layer_norm_eps", "class_position", "in_chans", "gelu"}
    if family.has_registers or family.has_distillation_token:
        free.add("registers")
    if family.has_distillation_token and has_head:  # without heads their code does not average two tokens
        free.add("distilled")
    if family.has_pooler and not has_head:
        free.add("representation_size")
    if family.has_layer_scale:
        free |= {"layer_scale", "swiglu"}
    supported: dict[str, tuple[Any, ...]] = {
        "pool": ("token", "token+gap") if family.is_dinov2 else (readout.pool,),
        "position": ("none",) if family.is_dinov3 else ("none", "1d", "2d", "sincos2d"),
        "pre_norm": (family.is_clip,),
        "final_norm": (readout.final_norm,),
        "registers": (readout.registers,),
        "distilled": (False,),
        "representation_size": (None,),
    }
    if family.is_dinov2:
        height = config.image_hw[0]
        widths = dinov2_mlp_widths(config)
        supported["mlp_dim"] = (min(widths, key=lambda width: abs(width - config.mlp_dim)),)  # itself, or the nearest
        supported["image_size"] = (height, (height, height))
    if config.variant.rotary:
        supported["rotary"] = (Rotary(config.variant.rotary.base),)
    if family.body.pool == "map":
        supported["map_heads"] = (None, config.heads)
    if family.written_head == "none":
        supported["num_classes"] = (0,)
    supported = {name: values for name, values in supported.items() if name not in free}
    check_supported("Hugging Face's code", config, supported, free)
    if has_head and family.written_head == "projection" and model.state_dict()["head.bias"].any():
        raise UserError(
            "Hugging Face's CLIP has no classifier that reads the class token, only a projection without bias, and "
            "this head has one. Use another format: `--to timm` or `--to vitlab`."
        )


def _complete(family: Family, model: ViT) -> tuple[ViTConfig, dict[str, Tensor]]:
    """Configuration and parameters of an equal model that has all parts of its family."""
    config = model.config
    state = {name: tensor for name, tensor in cpu_state(model).items() if not name.startswith("position.")}
    if family.has_layer_scale and config.variant.layer_scale is None:
        ones = torch.ones_like(state["norm.weight"])
        state |= {f"blocks.{i}.branch{part}.scale": ones for i in range(config.depth) for part in (1, 2)}
        config = override(config, layer_scale=1.0)
    if family.is_dinov2:
        if config.num_classes and config.pool == "token":  # the head reads the mean over patches with weights of zero
            state["head.weight"] = F.pad(state["head.weight"], (0, config.width))
        readout = family.classifier if config.num_classes else family.body
        config = dataclasses.replace(config, pool=readout.pool)
    if not family.is_dinov3:
        rows = position_rows(model, state)
        start = config.num_prefix_tokens
        registers = 0 if has_token_row(family, config) else config.variant.registers  # those without a row
        state["position.table"] = torch.cat([rows[: start - registers], rows[start:]])[None]
        config = override(config, position="1d", class_position=True)
    return config, state
