import dataclasses
import math
from typing import Any

import pytest
import timm
import torch

from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.weights.timm_names import timm_layout

SMALL: dict[str, Any] = {"image_size": 64, "patch_size": 8, "width": 16, "depth": 2, "heads": 4, "mlp_dim": 23}
ROOT = ResNetBody(layers=())

KINDS: dict[str, tuple[str, ModelConfig]] = {
    # label: an architecture of timm's, and a model of ours whose every parameter one of that kind has
    "token": ("vit_tiny_patch16_224", ViTConfig(**SMALL)),
    "no head": ("vit_tiny_patch16_224", ViTConfig(**SMALL, num_classes=0)),
    "map": ("vit_base_patch16_siglip_224", ViTConfig(**SMALL, pool="map")),
    "registers": ("vit_small_patch14_reg4_dinov2", ViTConfig(**SMALL, registers=4, layer_scale=0.1)),
    "distilled": ("deit_tiny_distilled_patch16_224", ViTConfig(**SMALL, distilled=True)),
    "root": ("vit_tiny_r_s16_p8_224", ViTConfig(**SMALL, stem=ROOT)),
    "hybrid": (
        "vit_small_r26_s32_224",
        ViTConfig(**{**SMALL, "patch_size": 1}, stem=dataclasses.replace(ROOT, layers=(2, 2, 2, 2))),
    ),
    "bit": ("resnetv2_50x1_bit", ResNetConfig(body=ResNetBody(width=32, version="v2"))),
    "bit, no head": ("resnetv2_50x1_bit", ResNetConfig(num_classes=0, body=ResNetBody(width=32, version="v2"))),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[str, ModelConfig]:
    return KINDS[request.param]


def test_every_parameter_of_ours_is_held_once(kind: tuple[str, ModelConfig]) -> None:
    config = kind[1]
    with torch.device("meta"):
        expected = {name: tensor.numel() for name, tensor in build_model(config).state_dict().items()}
    held = dict.fromkeys(expected, 0)
    for slot in timm_layout(config).values():
        held[slot.ours] += math.prod(slot.shape)
    assert held == expected


def test_names_are_timm_s(kind: tuple[str, ModelConfig]) -> None:
    name, config = kind
    args: dict[str, Any] = {"depth": config.depth} if isinstance(config, ViTConfig) else {}
    with torch.device("meta"):
        theirs = timm.create_model(name, num_classes=config.num_classes, **args).state_dict()
    layout = timm_layout(config)
    assert layout.keys() == theirs.keys()
    assert {each: len(slot.shape) for each, slot in layout.items()} == {each: theirs[each].ndim for each in theirs}
