"""Sec. 3: the models. `MODELS` is the table of the paper's names; `create_model` builds one."""

import fnmatch
import typing

from vitlab.models.config import ModelConfig, ResNetConfig, ViTConfig
from vitlab.models.registry import MODELS, get_config
from vitlab.models.resnet_config import ResNetBody

if typing.TYPE_CHECKING:
    import torch

    from vitlab.models.vit import Model

__all__ = [
    "MODELS",
    "ModelConfig",
    "ResNetBody",
    "ResNetConfig",
    "ViTConfig",
    "build_model",
    "create_model",
    "get_config",
    "list_models",
]


def list_models(pattern: str = "*") -> list[str]:
    """Names of the models that match a shell pattern, e.g. `ViT-B*`."""
    return [name for name in MODELS if fnmatch.fnmatchcase(name, pattern)]


def create_model(name: str, *, generator: "torch.Generator | None" = None, **overrides: typing.Any) -> "Model":
    """The model called `name`, freshly initialized as Google's code does; keywords override its configuration.

    `generator` draws the weights; without one torch's default generator does.
    Raises ValueError for an unknown name or setting.
    """
    return build_model(get_config(name, **overrides), generator=generator)


def build_model(config: ModelConfig, *, generator: "torch.Generator | None" = None) -> "Model":
    """The model that `config` describes, freshly initialized."""
    from vitlab.models.resnet import ResNet
    from vitlab.models.vit import ViT

    if isinstance(config, ResNetConfig):
        return ResNet(config, generator=generator)
    return ViT(config, generator=generator)
