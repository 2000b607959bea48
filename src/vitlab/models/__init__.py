"""Sec. 3: the models. `MODELS` is the table of the paper's names; `create_model` builds one. Imports no torch."""

from vitlab.models.config import ModelConfig, ResNetConfig, Rotary, ViTConfig
from vitlab.models.registry import MODELS, create_model, get_config, list_models
from vitlab.models.resnet_config import ResNetBody

__all__ = [
    "MODELS",
    "ModelConfig",
    "ResNetBody",
    "ResNetConfig",
    "Rotary",
    "ViTConfig",
    "create_model",
    "get_config",
    "list_models",
]
