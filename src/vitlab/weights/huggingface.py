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
| `bit` | a ResNet; read, not written |

Rates of dropout and stochastic depth are not converted: they act elsewhere.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig
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
from vitlab.weights.layout import (
    Layout,
    Slot,
    check_arrays,
    check_supported,
    count_units,
    cpu_state,
    read_state,
    renamed_layout,
    require_shape,
    write_state,
)
from vitlab.weights.model_card import README, model_card

INDEX = f"{WEIGHTS}.index.json"
HEADS = ("classifier", "cls_classifier", "distillation_classifier")
"""Parts outside the body. The names of the body begin with its kind in files with a head."""

_VIT = {
    "cls": "embeddings.cls_token",
    "distillation": "embeddings.distillation_token",
    "registers": "embeddings.register_tokens",
    "position.table": "embeddings.position_embeddings",
    "embedding": "embeddings.patch_embeddings.projection",
    "norm1": "layernorm_before",
    "attention.out": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "norm": "layernorm",
    "pre_logits": "pooler.dense",
    "head": "classifier",
    "head_distilled": "distillation_classifier",
}
_DINOV2 = {
    **{ours: theirs for ours, theirs in _VIT.items() if ours not in ("norm1", "norm2", "mlp.fc1", "mlp.fc2")},
    "branch1.scale": "layer_scale1.lambda1",
    "branch2.scale": "layer_scale2.lambda1",
}
NAMES: dict[str, dict[str, str]] = {
    "vit": _VIT,
    "deit": {**_VIT, "registers": "embeddings.distillation_token"},
    "dinov2": _DINOV2,
    "dinov2_with_registers": _DINOV2,
    "bit": {
        "body.root": "embedder.convolution",
        "body.root_norm": "embedder.norm",
        "shortcut": "downsample.conv",
        "shortcut_norm": "downsample.norm",
        "head": "classifier.1",
    },
}
"""Kind -> our name of a part, without block, `.weight` and `.bias` -> theirs; all others are the same."""
PARAMETER = re.compile(
    r"(blocks\.(?P<block>\d+)\.|body\.stages\.(?P<stage>\d+)\.(?P<unit>\d+)\.)?(?P<part>.+?)(?P<leaf>\.weight|\.bias)?"
)


def huggingface_layout(kind: str, config: ModelConfig) -> Layout:
    """Every array of a model, by its name without the kind in front."""

    def rename(ours: str) -> dict[str, int]:
        match = PARAMETER.fullmatch(ours)
        assert match
        where = ""
        if match["block"]:
            where = f"encoder.layer.{match['block']}."
        elif match["stage"]:
            where = f"encoder.stages.{match['stage']}.layers.{match['unit']}."
        part, leaf = match["part"], match["leaf"] or ""
        names = [NAMES[kind].get(part, part)]
        if part == "attention.qkv":
            names = [f"attention.attention.{name}" for name in ("query", "key", "value")]
        if part == "head" and isinstance(config, ViTConfig) and config.distilled:
            names = ["cls_classifier"]
        return {f"{where}{name}{leaf}": 1 for name in names}

    layout = renamed_layout(config, rename)
    if _has_token_row(kind, config):
        table = "embeddings.position_embeddings"
        _, rows, width = layout[table].shape
        layout[table] = Slot((1, rows + 1, width), "position.table")
    return layout


def _has_token_row(kind: str, config: ModelConfig) -> bool:
    """Whether the position table has a row for a distillation token that no head reads: a register here."""
    return kind == "deit" and isinstance(config, ViTConfig) and config.registers > 0


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
    if not isinstance(kind, str) or kind not in NAMES:
        raise UserError(f"{folder} holds a Hugging Face model of type {kind!r}; supported: {', '.join(NAMES)}.")
    arrays = {name.removeprefix(f"{kind}."): array for name, array in _read_arrays(folder).items()}
    arrays.pop("embeddings.mask_token", None)  # of no use after pre-training
    try:
        images = read_images(folder)
        mean, std = read_normalization(images, kind)
        config = _infer_resnet(card, arrays, images) if kind == "bit" else _infer_vit(kind, card, arrays)
        if config.num_classes:
            check_classes({"classes": read_classes(card) or None}, config, "id2label")
    except ValueError as error:
        raise UserError(f"{folder} holds an invalid or unsupported model: {error}") from error
    layout = huggingface_layout(kind, config)
    check_arrays(f"{folder} looks like a {kind} of {config.num_parameters:,} parameters", layout, arrays)
    state = read_state(layout, arrays)
    if _has_token_row(kind, config):
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
        card["preprocessing"] = read_preprocessing(images, settings.get("model_type", ""), folder).to_card()
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
    dinov2 = kind.startswith("dinov2")
    if dinov2:
        check_setting(card, "use_swiglu_ffn", False, False)
    head = next((name for name in HEADS if f"{name}.weight" in arrays), None)
    pooler = "pooler.dense.weight" in arrays and not head
    if pooler:
        check_setting(card, "pooler_act", "tanh", "tanh")
    width, _, patch_size, _ = _shape(arrays, "embeddings.patch_embeddings.projection", 4)
    depth = len({name.split(".")[2] for name in arrays if name.startswith("encoder.layer.")})
    if not check_setting(card, "qkv_bias", True, True, False):
        for i, name in ((i, name) for i in range(depth) for name in ("query", "key", "value")):
            arrays.setdefault(f"encoder.layer.{i}.attention.attention.{name}.bias", torch.zeros(width))
    check_sizes(card, {"num_hidden_layers": depth, "hidden_size": width, "patch_size": patch_size})
    distilled = kind == "deit" and head in HEADS[1:]
    registers = "embeddings.distillation_token" if kind == "deit" and not distilled else "embeddings.register_tokens"
    size = to_size(card.get("image_size", ViTConfig.image_size))
    if dinov2 and isinstance(size, tuple):
        raise UserError(f"{CARD} says image_size={size}, and DINOv2's positions are for square images.")
    return ViTConfig(
        image_size=size,
        patch_size=patch_size,
        width=width,
        depth=depth,
        heads=card.get("num_attention_heads", 12),
        mlp_dim=_shape(arrays, f"encoder.layer.0.{NAMES[kind].get('mlp.fc1', 'mlp.fc1')}", 2)[0],
        num_classes=_shape(arrays, head, 2)[0] if head else 0,
        pool="token+gap" if dinov2 and head else "token",
        representation_size=_shape(arrays, "pooler.dense", 2)[0] if pooler else None,
        position_interpolation="bicubic_antialias" if kind == "dinov2_with_registers" else "bicubic",
        gelu=GELU[check_setting(card, "hidden_act", "gelu", *GELU)],
        layer_norm_eps=card.get("layer_norm_eps", 1e-6 if dinov2 else 1e-12),
        layer_scale=card.get("layerscale_value", 1.0) if dinov2 else None,
        registers=require_shape(CARD, arrays, registers, 3)[1] if registers in arrays else 0,
        distilled=distilled,
    )


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
    free = ("layer_norm_eps", "layer_scale", "registers", "class_position")
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
