import json
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, Rotary, ViTConfig
from vitlab.models.image_size import nearest_image_size
from vitlab.models.resnet import Body, StdConv
from vitlab.models.variant import override
from vitlab.settings import from_dict, to_dict


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"heads": 5}, "heads=5"),
        ({"image_size": 0}, "image_size is 0"),
        ({"image_size": (224, 100)}, r"the nearest: 96, 112, 224, 240\."),
        ({"image_size": 5}, r"the nearest: 16\."),
        ({"image_size": 200, "patch_size": 8, "stem": ResNetBody(())}, r"the nearest: 192, 224\."),
        ({"width": "768"}, "width is '768'"),
        ({"dropout": 1.0}, r"dropout is 1\.0"),
        ({"layer_scale": float("nan")}, "layer_scale is nan"),
        ({"pool": "mean"}, "'mean'; allowed: 'token'"),
        ({"position": "relative"}, "position_at='every'"),
        ({"stochastic_depth": 0.1, "encoder": "axial"}, "encoder='full'"),
        ({"patch_dropout": 0.5, "encoder": "axial"}, "patch_dropout"),
        ({"patch_dropout": 0.5, "rotary": Rotary()}, "patch_dropout"),
        ({"patch_dropout": 0.5, "position_at": "every"}, "patch_dropout"),
        ({"dynamic_image_size": True, "encoder": "axial"}, "dynamic_image_size"),
        ({"position": "sincos2d", "position_at": "every"}, "'sincos2d'"),
        ({"position": "2d", "width": 765, "heads": 3}, "765"),
        ({"position": "sincos2d", "width": 6, "heads": 1}, "not 6"),
        ({"distilled": True, "pool": "gap"}, "distilled=True"),
        ({"map_heads": 5}, "map_heads=5"),
        ({"stem": ResNetBody(()), "patch_size": 8, "in_chans": 1}, "in_chans=1"),
    ],
)
def test_invalid_settings_name_the_given_or_the_allowed_values(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        override(ViTConfig(), **settings)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"width": 40}, "a multiple of 32"),
        ({"width": 8, "min_group_size": 16}, "0 groups"),
        ({"width": 36, "min_group_size": 4}, "144 channels"),
        ({"layers": (3, 0, 6)}, r"\(3, 0, 6\)"),
        ({"layers": (1,) * 17}, "16 stages"),
        ({"weight_eps": -1.0}, "weight_eps is -1"),
        ({"mixing": "axial"}, "version='v2'"),
    ],
)
def test_invalid_settings_of_a_resnet(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ResNetBody(**settings)


def test_groups_have_at_least_so_many_channels() -> None:
    """BiT's 32 groups, unless that leaves fewer channels in each."""
    assert [ResNetBody(min_group_size=16).num_groups(count) for count in (32, 64, 512, 1024)] == [2, 4, 32, 32]
    assert ResNetBody().num_groups(64) == 32


def test_nearest_image_size() -> None:
    for size, patch, nearest in ((384, 14, 392), (384, 16, 384), (5, 14, 14)):
        assert nearest_image_size(size, patch) == nearest
    stem = ResNetBody((3, 4, 9))
    assert (nearest_image_size(230, 1, stem), nearest_image_size(230, 4, stem)) == (230, 256)  # of the stem's map


def test_a_config_goes_through_json(kind: ModelConfig) -> None:
    assert from_dict(ModelConfig, json.loads(json.dumps(to_dict(kind)))) == kind  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("side", [32, 33])
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
