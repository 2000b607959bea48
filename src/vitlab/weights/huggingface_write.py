"""A model written as Hugging Face reads it: the folder that `vitlab.weights.huggingface` describes."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from vitlab.errors import UserError
from vitlab.io import replacing_folder
from vitlab.models import ModelConfig, ResNetConfig, ViTConfig
from vitlab.models.vit import Model, ViT
from vitlab.preprocessing import Preprocessing
from vitlab.weights.folder import CARD, WEIGHTS, check_classes, check_replaceable
from vitlab.weights.huggingface_names import BIT_NORM_EPS, BIT_WEIGHT_EPS, HEADS, IMAGES, huggingface_layout


def write_huggingface(model: Model, folder: Path | str, extra: dict[str, Any]) -> None:
    """Writes what `AutoModelForImageClassification.from_pretrained(folder)` turns into a model of equal answers, or
    `AutoModel` where there is no head: all of the folder or nothing. Images are prepared for [-1, 1].

    `extra` may hold `classes` and `preprocessing` (see `vitlab.weights.folder`); other entries have no place there.
    Raises ValueError for a model that Hugging Face's code would compute otherwise.
    """
    folder, classes = Path(folder), extra.get("classes")
    check_classes(extra, model.config)
    check_replaceable(folder, (CARD, WEIGHTS, IMAGES))
    kind, config, state = _resnet_as_theirs(model) if isinstance(model.config, ResNetConfig) else _vit_as_theirs(model)
    prefix = f"{kind}." if config.num_classes else ""
    arrays = {}
    for ours, (names, _) in huggingface_layout(kind, config).items():
        for name, part in zip(names, state.pop(ours).chunk(len(names)), strict=True):
            arrays[name if name.split(".")[0] in HEADS else prefix + name] = part.clone()
    assert not state
    if kind.startswith("dinov2"):  # their classes look for it
        arrays[f"{prefix}embeddings.mask_token"] = torch.zeros_like(arrays[f"{prefix}embeddings.cls_token"][0])
    card = _resnet_card(config) if isinstance(config, ResNetConfig) else _vit_card(kind, config)
    if config.num_classes:
        labels = list(classes) if classes else [f"LABEL_{i}" for i in range(config.num_classes)]
        card["id2label"] = {str(i): label for i, label in enumerate(labels)}
        card["label2id"] = {label: i for i, label in enumerate(labels)}
    with replacing_folder(folder) as aside:
        safetensors.torch.save_file(arrays, aside / WEIGHTS, metadata={"format": "pt"})
        (aside / WEIGHTS).chmod(aside.stat().st_mode & 0o666)  # safetensors lets only the owner read
        for name, content in ((CARD, card), (IMAGES, _images(config, extra))):
            (aside / name).write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _check(config: Any, checks: tuple[tuple[str, Any, str], ...]) -> None:
    """Raises ValueError for the first of (setting, whether they can say it, what they do instead) that they cannot."""
    for name, fits, theirs in checks:
        if not fits:
            raise UserError(
                f"the model has {name}={getattr(config, name)!r}, which Hugging Face's code cannot compute: {theirs}. "
                f"`--to vitlab` keeps every setting, `--to timm` more of them."
            )


def _vit_as_theirs(model: Model) -> tuple[str, ViTConfig, dict[str, Tensor]]:
    """The kind, and a model that it can be, with the parameters that make its answers those of `model`.

    Fixed and composed positions become a table. Where LayerScale or registers ask for DINOv2, a head that sees the
    class token alone also sees the mean over patches, with weights of zero; a missing LayerScale is one of 1.
    """
    assert isinstance(model, ViT)
    config, head = model.config, model.config.num_classes > 0
    modern = config.pool == "token+gap" or config.layer_scale is not None
    lone = config.registers == 1 and not modern and not config.distilled  # DeiT's, without the teacher's head
    modern = modern or config.registers > int(lone)
    kind = "deit" if config.distilled or lone else "dinov2" if modern else "vit"
    _check(
        config,
        (
            ("stem", config.stem is None, "its ViTs cut patches from images"),
            ("encoder", config.encoder == "full", "its ViTs attend among all tokens"),
            ("pool", config.pool in ("token", "token+gap"), "its ViTs have a class token, which the head sees"),
            ("position", config.position != "relative", "its ViTs add positions to the tokens"),
            ("position_at", config.position_at == "stem", "its ViTs add positions once, before the encoder"),
            ("distilled", not config.distilled or not modern, "its DeiT has neither LayerScale nor registers"),
            ("num_classes", head or not config.distilled, "without heads its DeiT looks at the class token alone"),
            (
                "representation_size",
                not (config.representation_size and (head or modern)),
                "it has no such layer there",
            ),
            ("mlp_dim", not modern or config.mlp_dim % config.width == 0, "its DINOv2's is a multiple of the width"),
            ("image_size", not modern or len(set(config.image_hw)) == 1, "its DINOv2's positions are for squares"),
        ),
    )
    state = {name: tensor for name, tensor in _state(model).items() if not name.startswith("position.")}
    state["position.table"] = _position_table(model, config.num_prefix_tokens - (0 if lone else config.registers))
    config = dataclasses.replace(config, position="1d", class_position=True)
    if modern:
        kind = "dinov2_with_registers" if config.registers else kind
        if head and config.pool == "token":
            state["head.weight"] = F.pad(state["head.weight"], (0, config.width))
        if config.layer_scale is None:
            ones = torch.ones_like(state["norm.weight"])
            state |= {f"blocks.{i}.branch{each}.scale": ones for i in range(config.depth) for each in (1, 2)}
        scale = 1.0 if config.layer_scale is None else config.layer_scale
        config = dataclasses.replace(config, layer_scale=scale, pool="token+gap" if head else "token")
    return kind, config, state


@torch.no_grad()
def _position_table(model: ViT, prefix: int) -> Float[Tensor, "1 T D"]:
    """Rows of the first `prefix` tokens and of the patches."""
    rows = model.position.absolute()
    if rows is None:
        rows = model.norm.weight.new_zeros(model.config.num_tokens, model.config.width)
    return torch.cat([rows[:prefix], rows[model.config.num_prefix_tokens :]]).cpu()[None]


def _resnet_as_theirs(model: Model) -> tuple[str, ResNetConfig, dict[str, Tensor]]:
    """As `_vit_as_theirs`. Their standardization has another epsilon, which all weights k times as large undo: both
    (k w - k mean) / sqrt(k^2 variance + k^2 eps) are the same."""
    config = model.config
    assert isinstance(config, ResNetConfig)
    body = config.body
    _check(
        body,
        (
            ("layers", len(body.layers) > 0, "its BiT has stages"),
            ("mixing", body.mixing == "conv", "its BiT has convolutions"),
            ("pool_padding", body.pool_padding == "zero", "its BiT pads with zeros"),
            ("group_norm_eps", body.group_norm_eps == BIT_NORM_EPS, f"its BiT has {BIT_NORM_EPS}"),
            ("weight_eps_on", body.weight_eps_on == "variance", "its BiT adds epsilon to the variance"),
            ("weight_eps", body.weight_eps > 0, f"its BiT has {BIT_WEIGHT_EPS}"),
        ),
    )
    factor = math.sqrt(BIT_WEIGHT_EPS / body.weight_eps)
    state = {name: tensor * factor if tensor.ndim == 4 else tensor for name, tensor in _state(model).items()}
    return "bit", config, state


def _state(model: Model) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def _vit_card(kind: str, config: ViTConfig) -> dict[str, Any]:
    proper = {"vit": "ViT", "deit": "DeiT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}[kind]
    suffix = "ForImageClassification" + ("WithTeacher" if config.distilled else "") if config.num_classes else "Model"
    card: dict[str, Any] = {
        "architectures": [proper + suffix],
        "model_type": kind,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "hidden_act": {"erf": "gelu", "tanh": "gelu_pytorch_tanh"}[config.gelu],
        "layer_norm_eps": config.layer_norm_eps,
        "image_size": config.image_size if isinstance(config.image_size, int) else list(config.image_size),
        "patch_size": config.patch_size,
        "num_channels": 3,
        "qkv_bias": True,
    }
    if kind.startswith("dinov2"):
        card |= {"mlp_ratio": config.mlp_dim // config.width, "layerscale_value": config.layer_scale}
        card |= {"num_register_tokens": config.registers} if config.registers else {}
    else:
        card["intermediate_size"] = config.mlp_dim
        card |= {"pooler_output_size": config.representation_size} if config.representation_size else {}
    return card


def _resnet_card(config: ResNetConfig) -> dict[str, Any]:
    body, v2 = config.body, config.body.version == "v2"
    return {
        "architectures": ["BitForImageClassification" if config.num_classes else "BitModel"],
        "model_type": "bit",
        "num_channels": 3,
        "embedding_size": body.width,
        "hidden_sizes": [4 * body.width * 2**stage for stage in range(len(body.layers))],
        "depths": list(body.layers),
        "layer_type": "preactivation" if v2 else "bottleneck",
        "hidden_act": "relu",
        "global_padding": None if v2 else "SAME",
        "embedding_dynamic_padding": not v2,
        "num_groups": 32,
        "width_factor": 1,
        "output_stride": max(32, body.stride),
    }


def _images(config: ModelConfig, extra: dict[str, Any]) -> dict[str, Any]:
    """Their image processor's settings. It always resizes with antialiasing, and has no area averaging."""
    prepared = Preprocessing.read(extra, "extra", config.image_size)
    assert prepared.image_size is not None
    sides = prepared.image_size if isinstance(prepared.image_size, tuple) else (prepared.image_size,) * 2
    crop_size = size = dict(zip(("height", "width"), sides, strict=True))
    if prepared.resize is not None:
        size = {"shortest_edge": prepared.resize}
        size = size if prepared.keep_aspect else dict.fromkeys(("height", "width"), prepared.resize)
    resample = Image.Resampling["BILINEAR" if prepared.is_google else prepared.interpolation.upper()]
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": size,
        "resample": int(resample),
        "do_center_crop": prepared.resize is not None,
        "crop_size": crop_size,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
