"""The paper's models by name: Table 1, Sec. 4.1, App. D.6. Importing this does not import torch.

To add a model: an entry of `MODELS`.
"""

import dataclasses
import fnmatch
import typing

from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, ResNetConfig, ViTConfig
from vitlab.models.resnet_config import ResNetBody
from vitlab.models.variant import all_settings, override
from vitlab.settings import nearest

if typing.TYPE_CHECKING:
    import torch

    from vitlab.models.vit import Model

_TI = ViTConfig(width=192, depth=12, heads=3, mlp_dim=768)
_S = ViTConfig(width=384, depth=12, heads=6, mlp_dim=1536)
_B = ViTConfig(width=768, depth=12, heads=12, mlp_dim=3072)
_L = ViTConfig(width=1024, depth=24, heads=16, mlp_dim=4096)
_H = ViTConfig(width=1280, depth=32, heads=16, mlp_dim=5120)
_BIT = ResNetBody(version="v2", weight_eps=1e-10, weight_eps_on="variance", group_norm_eps=1e-5)

SIZES = ("width", "depth", "heads", "mlp_dim", "patch_size", "encoder", "stem")
"""What a name says of a ViT."""
STAGES = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
"""Layers of a ResNet -> units in each stage."""


def _hybrid(config: ViTConfig, layers: tuple[int, ...], patch_size: int = 1) -> ViTConfig:
    return dataclasses.replace(config, stem=ResNetBody(layers), patch_size=patch_size)


def _resnet(layers: int, factor: int, **changes: typing.Any) -> ResNetConfig:
    return ResNetConfig(body=dataclasses.replace(_BIT, layers=STAGES[layers], width=64 * factor, **changes))


MODELS: dict[str, ModelConfig] = {
    # Table 1 gives B, L and H; Ti and S are the later sizes of the same family.
    **{
        f"ViT-{size}/{patch}": dataclasses.replace(config, patch_size=patch)
        for size, config in (("Ti", _TI), ("S", _S), ("B", _B), ("L", _L), ("H", _H))
        for patch in (8, 14, 16, 32)
    },
    # Hybrids (Sec. 3.1): the number after the slash is the stride in pixels, except for R+ViT-Ti/16 with stride 32.
    # The /16 of R50 leave stage 4 out and move its 3 units to stage 3, so that there are as many layers.
    "R50+ViT-B/16": _hybrid(_B, (3, 4, 9)),
    "R50+ViT-B/32": _hybrid(_B, STAGES[50]),
    "R50+ViT-L/16": _hybrid(_L, (3, 4, 9)),
    "R50+ViT-L/32": _hybrid(_L, STAGES[50]),
    "R26+ViT-S/32": _hybrid(_S, STAGES[26]),
    "R26+ViT-B/32": _hybrid(_B, STAGES[26]),
    "R+ViT-Ti/16": _hybrid(_TI, (), patch_size=8),
    # ResNets (BiT): R50x3 has 50 layers, three times as wide.
    **{
        f"R{layers}x{factor}": _resnet(layers, factor)
        for layers, factors in ((26, (1,)), (50, (1, 2, 3)), (101, (1, 3)), (152, (1, 2, 4)), (200, (3,)))
        for factor in factors
    },
    # Axial attention (App. D.6).
    "Axial-ViT-B/16": dataclasses.replace(_B, encoder="axial"),
    "Axial-ViT-B/32": dataclasses.replace(_B, encoder="axial", patch_size=32),
    "AxialResNet50": _resnet(50, 1, mixing="axial"),
}


def get_config(name: str, **overrides: typing.Any) -> ModelConfig:
    """The configuration called `name` (`ViT-B/16`), with fields, also of `Variant`, overridden by keyword. Raises
    UserError for an unknown name or field, naming the nearest valid ones."""
    if name not in MODELS:
        raise UserError(f"unknown model {name!r}; {nearest(name, MODELS)}. `vitlab list models` shows all.")
    known = sorted(vars(MODELS[name]).keys() | all_settings(MODELS[name]).keys())
    for key in overrides:
        if key not in known:
            raise UserError(f"unknown model setting {key!r}; {nearest(key, known)}.")
    return override(MODELS[name], **overrides)


def list_models(pattern: str = "*") -> list[str]:
    """Names of the models that match a shell pattern, e.g. `ViT-B*`."""
    return [name for name in MODELS if fnmatch.fnmatchcase(name, pattern)]


def name_of(config: ModelConfig) -> str:
    """The paper's name for a model of these sizes, or else its kind and stride."""
    fields = ("body",) if isinstance(config, ResNetConfig) else SIZES
    for name, known in MODELS.items():
        if all(getattr(config, field) == getattr(known, field, None) for field in fields):
            return name
    if isinstance(config, ResNetConfig):
        return "ResNet"
    kind = "Axial ViT" if config.encoder == "axial" else "Hybrid" if config.stem else "ViT"
    return f"{kind}/{config.stride}"


def create_model(name: str, *, generator: "torch.Generator | None" = None, **overrides: typing.Any) -> "Model":
    """The model called `name`, freshly initialized as Google's code does; keywords override its configuration.

    `generator` draws the weights, by default torch's. Raises UserError for an unknown name or setting.
    """
    from vitlab.models.vit import build_model

    return build_model(get_config(name, **overrides), generator=generator)
