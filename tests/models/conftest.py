"""Every kind of model at a shrunken size: a test that takes `kind` or `model` runs over all of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, Rotary, ViTConfig
from vitlab.models.resnet import ResNet
from vitlab.models.variant import override
from vitlab.models.vit import ViT, build_model


def vit(**settings: Any) -> ViTConfig:
    """A grid of 3 x 4, so that no axis can be taken for the other."""
    small: dict[str, Any] = {"patch_size": 8, "width": 16, "depth": 2, "heads": 4, "mlp_dim": 24, "num_classes": 5}
    return override(ViTConfig(), **{"image_size": (24, 32), **small, **settings})


def hybrid(layers: tuple[int, ...], patch_size: int = 1, **settings: Any) -> ViTConfig:
    return vit(**{"stem": ResNetBody(layers=layers, width=32), "patch_size": patch_size, **settings})


def resnet(image_size: tuple[int, int] = (24, 32), num_classes: int = 5, **body: Any) -> ResNetConfig:
    body = {"layers": (1, 2), "width": 32, **body}
    return ResNetConfig(image_size=image_size, num_classes=num_classes, body=ResNetBody(**body))


BIT: dict[str, Any] = {"version": "v2", "weight_eps": 1e-10, "weight_eps_on": "variance", "group_norm_eps": 1e-5}
ODD = (37, 45)

KINDS: dict[str, ModelConfig] = {
    # heads
    "token": vit(),
    "gap": vit(pool="gap", heads=1, gelu="erf"),
    "map": vit(pool="map"),
    "pre-logits of two": vit(pool="token+gap", representation_size=7),
    "no head": vit(num_classes=0, representation_size=7),
    # positions, and where they enter
    "none": vit(position="none"),
    "1d every": vit(position_at="every"),
    "2d every": vit(position="2d", position_at="every"),
    "2d of patches": vit(position="2d", pool="gap"),
    "relative every": vit(position="relative", position_at="every", pool="gap"),
    "relative, registers": vit(position="relative", position_at="shared", registers=2),
    "sincos2d": vit(position="sincos2d", pool="map"),
    "sincos2d shared": vit(position="sincos2d", position_at="shared", class_position=False),
    "2d, class token without": vit(position="2d", class_position=False, registers=1),
    "rotary, registers": vit(position="none", rotary=Rotary(), registers=2, pool="gap"),
    "rotary and a table": vit(rotary=Rotary(10_000.0, "index", (2, 5), 1.0), mlp_norm=True, attention_norm=True),
    "dynamic, two channels": vit(dynamic_image_size=True, in_chans=2),
    # axial attention
    "axial": vit(encoder="axial"),
    "axial, registers": vit(encoder="axial", pool="map", registers=2, position="none"),
    # hybrids
    "root, odd": hybrid((), patch_size=3, image_size=(33, 45)),
    "hybrid, odd": hybrid((1, 1), image_size=ODD),
    # later ViTs
    "registers": vit(registers=3, pool="gap"),
    "stochastic depth": vit(stochastic_depth=0.5, depth=3),
    "dropout": vit(dropout=0.3, representation_size=7),
    "distilled, registers": vit(distilled=True, registers=2),
    "distilled, no head": vit(distilled=True, num_classes=0, class_position=False),
    "DINOv2": vit(registers=2, class_position=False, layer_scale=0.1, pool="token+gap", gelu="erf"),
    "CLIP": vit(pre_norm=True, gelu="quick", layer_norm_eps=1e-5),
    "SwiGLU": vit(swiglu=True, layer_scale=0.1, pool="map"),
    "no last norm": vit(final_norm="none"),
    "mean and its norm": vit(pool="gap", final_norm="mean", registers=1, representation_size=7),
    # ResNets
    "v1": resnet(),
    "v1, root": resnet(layers=()),
    "v2, odd": resnet(ODD, **BIT),
    "v2, -inf": resnet(**{**BIT, "pool_padding": "-inf"}),
    "v2, no head": resnet(ODD, 0, version="v2", weight_eps_on="variance", group_norm_eps=1e-4, min_group_size=8),
    "axial v2": resnet(ODD, mixing="axial", **BIT),
}
TRACED = {"relative, registers"}
"""Those that are compiled at every run of the tests, besides the ResNets of test_resnet.py; the rest with `slow`."""
BLOCKS = {"token", "map", "relative every", "rotary and a table", "axial, registers", "hybrid, odd"}
BLOCKS |= {"stochastic depth", "dropout", "SwiGLU", "v1", "v2, odd", "axial v2"}
"""Those whose blocks differ, and with them what is computed inside; others differ before or after."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`vit_kind`, `resnet_kind`: every configuration of the class; `kind`: of both; `block_kind`: those of `BLOCKS`."""
    of = {"vit_kind": ViTConfig, "resnet_kind": ResNetConfig, "block_kind": ModelConfig, "kind": ModelConfig}
    for name, cls in of.items():
        if name in metafunc.fixturenames:
            labels = BLOCKS if name == "block_kind" else KINDS
            chosen = {label: config for label, config in KINDS.items() if isinstance(config, cls) and label in labels}
            late = chosen.keys() - TRACED if "traceable" in metafunc.fixturenames else set()
            marks = {label: [pytest.mark.slow] if label in late else [] for label in chosen}
            metafunc.parametrize(name, [pytest.param(chosen[key], id=key, marks=marks[key]) for key in chosen])
            return  # a file may restrict `kind`


def noisy(config: ModelConfig) -> ViT | ResNet:
    """The model with noise on every parameter: none is left at zero, so that none can be lost unnoticed."""
    model = build_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture
def model(kind: ModelConfig) -> ViT | ResNet:
    return noisy(kind)


@pytest.fixture
def images(kind: ModelConfig) -> Tensor:
    return torch.rand(2, kind.in_chans, *kind.image_hw) * 2 - 1


@pytest.fixture
def small() -> Callable[..., Any]:
    """A small ViT with these settings and with noise on every parameter."""
    return lambda **settings: noisy(vit(**settings))


@pytest.fixture
def small_resnet() -> Callable[..., Any]:
    return lambda **settings: noisy(resnet(**settings))


@pytest.fixture
def traceable(unchecked: None) -> None:
    """Nothing compiled before, and none of the tests' type checks, which cannot be compiled."""
    torch.compiler.reset()
