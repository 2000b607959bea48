import json
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig
from vitlab.models.resnet import Body, StdConv
from vitlab.models.variant import override
from vitlab.settings import from_dict, to_dict


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"heads": 5}, "heads=5 does not divide width=768"),
        ({"image_size": 0}, "image_size is 0"),
        ({"image_size": 225}, r"patches of 16x16.*the nearest: 224, 240\."),
        ({"image_size": (224, 100)}, r"the nearest: 96, 112, 224, 240\."),
        ({"image_size": 5}, r"the nearest: 16\."),
        ({"image_size": 200, "patch_size": 8, "stem": ResNetBody(())}, r"the nearest: 192, 224\."),
        ({"image_size": 1, "patch_size": 2, "stem": ResNetBody((2, 2))}, r"the nearest: 16\."),
        ({"image_size": (224, 224, 3)}, "image_size is .* allowed: int or"),
        ({"width": "768"}, "width is '768'; allowed: int"),
        ({"depth": True}, "depth is True; allowed: int"),
        ({"dropout": 1.0}, r"dropout is 1.0; allowed: finite float >= 0 and < 1"),
        ({"layer_scale": float("nan")}, "layer_scale is nan; allowed: finite float or None"),
        ({"pool": "mean"}, "pool is 'mean'; allowed: 'token', 'gap', 'map', 'token\\+gap'"),
        ({"stem": (3, 4, 9)}, r"stem is \(3, 4, 9\); allowed: ResNetBody or None"),
        ({"position": "relative"}, "give position_at='every' or 'shared'"),
        ({"position": "relative", "position_at": "shared", "encoder": "axial"}, "encoder='full'"),
        ({"stochastic_depth": 0.1, "encoder": "axial"}, "encoder=.full."),
        ({"position": "sincos2d", "position_at": "every"}, "'sincos2d' has nothing to learn"),
        ({"position": "2d", "width": 765, "heads": 3}, "a width that 2 divides, not 765"),
        ({"position": "sincos2d", "width": 6, "heads": 1}, "a width that 4 divides, not 6"),
        ({"distilled": True, "pool": "gap"}, "distilled=True requires pool='token'"),
        ({"distilled": True, "representation_size": 768}, "no representation_size"),
    ],
)
def test_invalid_settings_name_the_allowed_ones(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        override(ViTConfig(), **settings)


def test_a_config_goes_through_json(kind: ModelConfig) -> None:
    assert from_dict(ModelConfig, json.loads(json.dumps(to_dict(kind)))) == kind  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("side", [7, 32, 33])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_products_with_borders_are_those_that_meet_a_zero(version: Literal["v1", "v2"], side: int) -> None:
    """Against a convolution of ones: where the filter lies beyond the map, its sum lacks a one."""
    body, hw = ResNetBody((1, 2), 32, version), (side, side + 4)
    zeros = []

    def count(conv: StdConv, inputs: tuple[Tensor]) -> None:
        (maps,) = inputs
        ones = StdConv(1, 1, conv.weight.shape[-1], conv.stride, body)
        ones.standardized = lambda: torch.ones_like(ones.weight)
        sums = ones(torch.ones_like(maps[:1, :1]))
        zeros.append(conv.weight[..., 0, 0].numel() * int((ones.weight.numel() - sums).sum()))

    whole = Body(body, hw)
    for module in whole.modules():
        if isinstance(module, StdConv):
            module.register_forward_pre_hook(count)
    whole(torch.zeros(1, 3, *hw))
    config = ResNetConfig(image_size=hw, body=body)
    assert sum(zeros) == body.padding_macs(hw) == config.forward_macs - config.macs_without_padding > 0
