"""Sec. 3: the models. `MODELS` is the table of the paper's names; `create_model` builds one."""

import fnmatch
import typing

from vitlab.models.config import MODELS, ViTConfig, forward_macs, get_config

if typing.TYPE_CHECKING:
    import torch

    from vitlab.models.vit import ViT

__all__ = ["MODELS", "ViTConfig", "create_model", "forward_macs", "get_config", "list_models"]


def list_models(pattern: str = "*") -> list[str]:
    """Names of the models that match a shell pattern, e.g. `ViT-B*`."""
    return [name for name in MODELS if fnmatch.fnmatchcase(name, pattern)]


def create_model(name: str, *, generator: "torch.Generator | None" = None, **overrides: typing.Any) -> "ViT":
    """The model called `name`, freshly initialised as Google's code does; keywords override its `ViTConfig`.

    `generator` draws the weights; without one torch's default generator does.
    Raises ValueError for an unknown name or setting.
    """
    from vitlab.models.vit import ViT

    return ViT(get_config(name, **overrides), generator=generator)
