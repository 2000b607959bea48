"""timm's checkpoints, read and written without timm, for `checkpoint.py`.

    model.safetensors   the parameters, by the names of timm's modules
    config.json         architecture, arguments and expected images: see `vitlab.weights.timm_config`

Three of timm's families compute what a model here can: ViTs (`vit_*`, `deit*`, `flexivit_*`, `eva*`, `beit3_*`: CLIP,
SigLIP, DINO to DINOv3, EVA-02, PE and others, with class token, mean or attention pooling), the same on a BiT stem
(`vit_*_r26_s32_*` and the like), and `resnetv2_*_bit`. docs/checkpoints.md lists them all.
"""

import dataclasses
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vitlab.errors import warn_once
from vitlab.models import ModelConfig, ViTConfig
from vitlab.models.image_size import ImageSize
from vitlab.models.variant import override
from vitlab.models.vit import Model, ViT
from vitlab.preprocessing import pair
from vitlab.weights.adapt import fold_normalization
from vitlab.weights.assumptions import Assumptions, assumed_preprocessing, warn_assumptions
from vitlab.weights.detect import OPEN_CLIP_CONFIG
from vitlab.weights.folder import (
    CONFIG,
    README,
    WEIGHTS,
    check_classes,
    read_safetensors,
    read_settings,
    read_shapes,
    write_files,
)
from vitlab.weights.json_fields import OPEN_CLIP
from vitlab.weights.layout import check_arrays, cpu_state, position_rows, read_state, write_state
from vitlab.weights.model_card import model_card
from vitlab.weights.original_names import OPENAI_IMAGES, Images, Origin, Tensors, to_timm_names
from vitlab.weights.timm_architectures import ACTIVATIONS, check_architecture, check_bare, rotary_of
from vitlab.weights.timm_arguments import check_representable, is_eva, timm_settings
from vitlab.weights.timm_config import WEIGHT_EPS, TimmConfig, infer_config, model_args
from vitlab.weights.timm_layout import eva_names, rename_eva, reorder_pairs, timm_layout

logger = logging.getLogger(__name__)

# -------------------------------------------------------------------------------------------------------- reading


def read_timm(
    path: Path | str, *, image_size: ImageSize | None = None, assume: Assumptions | None = None, name: str = ""
) -> tuple[ModelConfig, Tensors]:
    """The configuration and the parameters, by our names, of a checkpoint with timm's or other code's names.

    `path` is a folder with config.json and model.safetensors, of timm or of transformers' `TimmWrapper`, or a bare
    .safetensors file by any names of `vitlab.weights.original_names`. What a bare file does not say is `assume`'s, or
    else assumed by its names and logged; `image_size` is used if the position table fits it. Sizes follow from the
    tensors, the number of heads from `model_args`, the architecture or the width. `name` replaces the path in messages.
    Raises UserError for a corrupt file, for a model that computes something else, and for tensors that do not fit.
    """
    assume = assume or Assumptions()
    name = name or str(path)
    file = _open(Path(path), name, read_safetensors, image_size, assume)
    settings, tensors = file.settings, file.tensors
    config = infer_config(file.where, tensors, settings)
    if file.is_bare:
        prepared = assumed_preprocessing(file.origin, config, settings.mean, settings.std)
        warn_assumptions(name, file.origin, config, prepared, assume)
    elif file.origin.left_out:
        warn_once(f"{name}: {file.origin.describe_left_out()}.")
    if isinstance(config, ViTConfig):
        _, pair_order = rotary_of(model_args(tensors, settings))
        tensors = _with_class_token_as_register(tensors, config)
        tensors = _with_rows_in_registers(tensors, config)
        tensors = _with_all_biases(tensors, config)
        tensors = reorder_pairs(tensors, config, pair_order)
    if config.num_classes and settings.classes:
        check_classes({"classes": settings.classes}, config, str(Path(path) / CONFIG))
    layout = timm_layout(config)
    check_arrays(f"{file.where} looks like a model of {config.num_parameters:,} parameters", layout, tensors)
    state = read_state(layout, tensors, lambda name, tensor: tensor.flatten(1) if name == "head.fc.weight" else tensor)
    if isinstance(config, ViTConfig):
        state.setdefault("embedding.bias", state["embedding.weight"].new_zeros(config.width))
    return config, fold_normalization(state, settings.mean, settings.std)


def metadata_timm(
    path: Path | str, *, image_size: ImageSize | None = None, assume: Assumptions | None = None, name: str = ""
) -> dict[str, Any]:
    """`preprocessing`, which is assumed for a bare file; `classes` and `multi_label` if config.json has them."""
    path = Path(path)
    if not path.is_dir():
        file = _open(path, name or str(path), read_shapes, image_size, assume or Assumptions())
        config = infer_config(file.where, file.tensors, file.settings)
        prepared = assumed_preprocessing(file.origin, config, file.settings.mean, file.settings.std)
        return {"preprocessing": prepared.to_metadata()}
    settings = TimmConfig.read(path / CONFIG)
    classes = {"classes": list(settings.classes)} if settings.classes else {}
    return {"preprocessing": settings.preprocessing.to_metadata(), **classes, **settings.multi_label}


@dataclasses.dataclass(frozen=True)
class TimmFile:
    """A checkpoint whose tensors have timm's names."""

    where: str
    """How errors name it: by its path, and its architecture if that is known."""
    settings: TimmConfig
    tensors: Tensors
    origin: Origin
    is_bare: bool
    """Whether nothing but its tensors describes it."""


def _open(
    path: Path, name: str, read: Callable[[Path], Tensors], image_size: ImageSize | None, assume: Assumptions
) -> TimmFile:
    """The checkpoint in a folder, or in a file. Raises UserError for an architecture that computes something else."""
    if path.is_dir():
        settings = TimmConfig.read(path / CONFIG)
        where = check_architecture(name, settings.architecture)
        tensors, origin = to_timm_names(where, read(path / WEIGHTS), assume.prefix)
        is_bare = False
    else:  # the settings follow from the names of the tensors, and from what lies beside them
        tensors, origin = to_timm_names(name, read(path), assume.prefix)
        tensors, origin = _describe_open_clip(path, tensors, origin)
        settings = _described_config(origin, assume, image_size, "pos_embed" in tensors)
        where = check_architecture(name, settings.architecture)
        is_bare = not origin.described
    if not settings.architecture:
        check_bare(where, tensors.keys())
    return TimmFile(where, settings, rename_eva(tensors), origin, is_bare)


def _describe_open_clip(weights: Path, tensors: Tensors, origin: Origin) -> tuple[Tensors, Origin]:
    """The tensors by timm's names, and their origin, with what open_clip_config.json says where one lies beside the
    weights of an open_clip model. Raises UserError for an invalid one."""
    path = weights.parent / OPEN_CLIP_CONFIG
    if not path.is_file() or not (origin.code_base == "CLIP" or "visual." in origin.prefix):
        return tensors, origin
    settings = read_settings(path, OPEN_CLIP)
    model = settings.get("model_cfg", {})
    vision = model.get("vision_cfg", {})
    size = vision.get("image_size", 224)
    described: dict[str, Any] = {"image_size": tuple(size) if isinstance(size, list) else size}
    if origin.code_base == "CLIP":
        is_tanh = vision.get("act_kwargs", {}).get("approximate") == "tanh"
        has_mean = vision.get("pool_type") == "avg"
        described["heads"] = vision.get("width", 768) // vision.get("head_width", 64)
        described["gelu"] = "quick" if model.get("quick_gelu") else "tanh" if is_tanh else "erf"
        described["layer_norm_eps"] = vision.get("norm_kwargs", {}).get("eps", 1e-5)
        described["pool"] = "gap" if has_mean else "token"
        if has_mean and vision.get("final_ln_after_pool"):
            tensors = {re.sub(r"^norm\.", "fc_norm.", name): tensor for name, tensor in tensors.items()}
    else:  # the image tower is one of timm's
        described["architecture"] = vision.get("timm_model_name", "")
        described["pool"] = vision.get("timm_pool") or None
    images = _open_clip_images(settings.get("preprocess_cfg", {}), path)
    return tensors, dataclasses.replace(origin, images=images, described=described)


def _open_clip_images(settings: dict[str, Any], path: Path) -> Images:
    """How the config's `preprocess_cfg` prepares images."""
    mode = settings.get("resize_mode", "shortest")
    if mode not in ("shortest", "squash"):
        logger.warning("%s: images are squashed to size: resize_mode=%r is not supported", path, mode)
    mean, std = OPENAI_IMAGES.mean_std
    return Images(
        mean_std=(settings.get("mean", mean), settings.get("std", std)),
        crop=1.0 if mode == "shortest" else None,
        interpolation="bilinear" if settings.get("interpolation") == "bilinear" else "bicubic",
    )


def _described_config(origin: Origin, assume: Assumptions, image_size: ImageSize | None, has_table: bool) -> TimmConfig:
    """For a file without config.json: what `assume` gives, else open_clip_config.json says, else the names show."""
    known = {**origin.described, **assume.given()}
    mean, std = origin.images.mean_std
    size = known.get("image_size") or image_size or (None if has_table else origin.images.size)
    args = dict(origin.args)
    if "heads" in known:
        args["num_heads"] = known["heads"]
    if "gelu" in known:
        args["act_layer"] = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == known["gelu"])
    return TimmConfig(
        architecture=known.get("architecture", ""),
        args=args,
        pool="avg" if known.get("pool") == "gap" else known.get("pool"),
        image_hw=None if size is None else pair(size),
        mean=tuple(known.get("mean", mean)),
        std=tuple(known.get("std", std)),
        eps=known.get("layer_norm_eps", origin.eps),
        antialias=origin.antialias,
    )


def _with_class_token_as_register(tensors: Tensors, config: ViTConfig) -> Tensors:
    """A class token that no head reads becomes the first register."""
    if config.pool == "token" or "cls_token" not in tensors:
        return tensors
    registers = [tensors[name] for name in ("cls_token", "reg_token") if name in tensors]
    others = {name: tensor for name, tensor in tensors.items() if name != "cls_token"}
    return others | {"reg_token": torch.cat(registers, dim=1)}


def _with_rows_in_registers(tensors: Tensors, config: ViTConfig) -> Tensors:
    """Rows of the position table that are for registers are added to these, which have no positions here."""
    table, start = tensors.get("pos_embed"), config.num_position_prefix
    rows = 0 if table is None else table.shape[1] - start - config.num_patches
    if table is None or rows <= 0 or not config.variant.registers:
        return tensors
    registers = tensors["reg_token"].float().clone()
    registers[:, :rows] += table[:, start : start + rows].float()
    table = torch.cat([table[:, :start], table[:, start + rows :]], dim=1)
    return tensors | {"reg_token": registers, "pos_embed": table}


def _with_all_biases(tensors: Tensors, config: ViTConfig) -> Tensors:
    """Missing biases of queries, keys and values become zeros. EVA's files have those of queries and values alone."""
    if any(name.endswith(".attn.qkv.bias") for name in tensors):
        return tensors
    tensors = dict(tensors)
    zeros = tensors["patch_embed.proj.weight"].new_zeros(config.width)
    for i in range(config.depth):
        q, v = (tensors.pop(f"blocks.{i}.attn.{name}_bias", zeros) for name in "qv")
        tensors[f"blocks.{i}.attn.qkv.bias"] = torch.cat([q, zeros, v])
    return tensors


# -------------------------------------------------------------------------------------------------------- writing


def write_timm(model: Model, folder: Path | str, metadata: dict[str, Any]) -> None:
    """Writes a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` turns into an equal model.

    Its images are in [-1, 1] (mean and std 0.5). Of `metadata`, `classes` becomes `label_names`, `preprocessing` the
    settings of timm's transforms, and `multi_label` the `problem_type` of Hugging Face's code; README.md has all that
    `model_card` reads. Raises UserError for a model that timm's cannot represent, and for a folder with other files.
    """
    check_representable(model.config)
    check_classes(metadata, model.config)
    config, state = _to_timm(model)
    readme = model_card("timm", Path(folder), model.config, metadata)
    files = {CONFIG: timm_settings(config, metadata), README: readme}
    tensors = write_state(timm_layout(config), state)
    tensors = eva_names(tensors, config) if is_eva(config) else tensors
    write_files(Path(folder), tensors, files)


def _to_timm(model: Model) -> tuple[ModelConfig, Tensors]:
    """The model, rewritten so that timm's code computes the same with its one position table and its `WEIGHT_EPS`."""
    state = cpu_state(model)
    if isinstance(model, ViT):
        return _with_one_table(model, state)
    # All weights k times as large undo another eps: standardization by k^2 variance + k^2 eps is the same.
    factor = math.sqrt(WEIGHT_EPS / model.config.body.weight_eps)
    scaled = {name: (tensor.double() * factor).to(tensor.dtype) for name, tensor in state.items() if tensor.ndim == 4}
    return model.config, state | scaled


def _with_one_table(model: ViT, state: Tensors) -> tuple[ViTConfig, Tensors]:
    """The model with all that it adds to its tokens in one position table, as in timm."""
    config, variant = model.config, model.config.variant
    if model.position.added_rows() is None and not (variant.distilled or variant.pre_norm):
        return config, state
    table = position_rows(model, state)
    state = {name: tensor for name, tensor in state.items() if not name.startswith("position.")}
    # timm gives a row to all tokens in front of the patches or to none, and to none with registers (DINOv2).
    prefix_has_rows = variant.distilled or (variant.class_position and not variant.registers)
    if not prefix_has_rows:
        if config.has_class_token:
            state["cls"] = state["cls"] + table[0]  # the sum that Eq. 1 forms
        table = table[config.num_prefix_tokens :]
    state["position.table"] = table[None]
    return override(config, position="1d", class_position=prefix_has_rows), state
