"""A model in Hugging Face's terms: the kind of theirs that computes the same, its parameters, and its config.json."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.models import ModelConfig, ResNetConfig, ViTConfig
from vitlab.models.vit import Model, ViT
from vitlab.weights.layout import check_supported, cpu_state

BIT: dict[str, Any] = {"weight_eps": 1e-8, "weight_eps_on": "variance", "group_norm_eps": 1e-5}
"""Of their BiT; no setting changes them."""
CLASSES = {"vit": "ViT", "deit": "DeiT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}
GELU: dict[str, Literal["erf", "tanh"]] = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


def to_huggingface(model: Model) -> tuple[str, ModelConfig, dict[str, Tensor]]:
    """Kind, configuration and parameters of the same function. Raises UserError where they have none."""
    return _vit_to_huggingface(model) if isinstance(model, ViT) else _resnet_to_huggingface(model)


def _vit_to_huggingface(model: ViT) -> tuple[str, ViTConfig, dict[str, Tensor]]:
    """Fixed and composed positions become a table. Where LayerScale or registers require DINOv2, a head on the class
    token alone also reads the mean over patches, with weights of zero, and a missing LayerScale is one of 1."""
    config, head = model.config, model.config.num_classes > 0
    modern = config.pool == "token+gap" or config.layer_scale is not None
    deit_token = config.registers == 1 and not modern and not config.distilled  # DeiT's, without the teacher's head
    modern = modern or config.registers > int(deit_token)
    kind = "deit" if config.distilled or deit_token else "dinov2" if modern else "vit"
    supported: dict[str, tuple[Any, ...]] = {
        "stem": (None,),
        "encoder": ("full",),
        "pool": ("token", "token+gap"),
        "position": ("none", "1d", "2d", "sincos2d"),
        "position_at": ("stem",),
        "representation_size": (None,) if head or modern else (config.representation_size,),
    }
    if not head or modern:  # no mean of both tokens without heads, neither LayerScale nor registers in their DeiT
        supported["distilled"] = (False,)
    if modern:
        supported["mlp_dim"] = (max(config.mlp_dim // config.width, 1) * config.width,)
        supported["image_size"] = (config.image_hw[0], config.image_hw[:1] * 2)
    check_supported("Hugging Face's code", config, supported)
    state = {name: tensor for name, tensor in cpu_state(model).items() if not name.startswith("position.")}
    rows = model.position.absolute()
    if rows is None:
        rows = state["norm.weight"].new_zeros(config.num_tokens, config.width)
    rows, prefix = rows.detach().cpu(), config.num_prefix_tokens - (0 if deit_token else config.registers)
    state["position.table"] = torch.cat([rows[:prefix], rows[config.num_prefix_tokens :]])[None]
    config = dataclasses.replace(config, position="1d", class_position=True)
    if modern:
        kind = "dinov2_with_registers" if config.registers else kind
        if head and config.pool == "token":
            state["head.weight"] = F.pad(state["head.weight"], (0, config.width))
        if config.layer_scale is None:
            ones = torch.ones_like(state["norm.weight"])
            state |= {f"blocks.{i}.branch{part}.scale": ones for i in range(config.depth) for part in (1, 2)}
        scale = 1.0 if config.layer_scale is None else config.layer_scale
        config = dataclasses.replace(config, layer_scale=scale, pool="token+gap" if head else "token")
    return kind, config, state


def _resnet_to_huggingface(model: Model) -> tuple[str, ResNetConfig, dict[str, Tensor]]:
    """Their standardization has another eps, which all weights k times as large undo:
    (k w - k mean) / sqrt(k^2 variance + k^2 eps) is the same for every k."""
    config = model.config
    assert isinstance(config, ResNetConfig)
    body = config.body
    supported = {
        "layers": (body.layers or "one stage or more",),
        "mixing": ("conv",),
        "pool_padding": ("zero",),
        "group_norm_eps": (BIT["group_norm_eps"],),
        "weight_eps_on": ("variance",),
    }
    check_supported("Hugging Face's code", body, supported, "body.")
    factor = math.sqrt(BIT["weight_eps"] / body.weight_eps)
    state = {name: tensor * factor if tensor.ndim == 4 else tensor for name, tensor in cpu_state(model).items()}
    return "bit", config, state


def model_settings(kind: str, config: ModelConfig, classes: Sequence[str] | None) -> dict[str, Any]:
    """Their config.json."""
    settings = _resnet_settings(config) if isinstance(config, ResNetConfig) else _vit_settings(kind, config)
    if config.num_classes:
        labels = list(classes) if classes else [f"LABEL_{i}" for i in range(config.num_classes)]
        settings["id2label"] = {str(i): label for i, label in enumerate(labels)}
        settings["label2id"] = {label: i for i, label in enumerate(labels)}
    return settings


def _vit_settings(kind: str, config: ViTConfig) -> dict[str, Any]:
    suffix = "ForImageClassification" + ("WithTeacher" if config.distilled else "") if config.num_classes else "Model"
    settings: dict[str, Any] = {
        "architectures": [CLASSES[kind] + suffix],
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
        settings |= {"mlp_ratio": config.mlp_dim // config.width, "layerscale_value": config.layer_scale}
        settings |= {"num_register_tokens": config.registers} if config.registers else {}
    else:
        settings["intermediate_size"] = config.mlp_dim
        settings |= {"pooler_output_size": config.representation_size} if config.representation_size else {}
    return settings


def _resnet_settings(config: ResNetConfig) -> dict[str, Any]:
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
