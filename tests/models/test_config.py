import dataclasses
import json
from typing import Any, Literal

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vitlab.models import (
    MODELS,
    ModelConfig,
    ResNetBody,
    ResNetConfig,
    ViTConfig,
    build_model,
    get_config,
)
from vitlab.models.config import check_divisible, nearest_image_size
from vitlab.models.resnet import Body, StdConv
from vitlab.settings import from_dict, to_dict


@pytest.mark.parametrize(
    ("name", "stride", "grid"),
    [
        ("R50+ViT-B/16", 16, (14, 14)),
        ("R50+ViT-B/32", 32, (7, 7)),
        ("R50+ViT-L/16", 16, (14, 14)),
        ("R50+ViT-L/32", 32, (7, 7)),
        ("R26+ViT-S/32", 32, (7, 7)),
        ("R26+ViT-B/32", 32, (7, 7)),
        ("R+ViT-Ti/16", 32, (7, 7)),  # not 16
        ("Axial-ViT-B/16", 16, (14, 14)),
        ("Axial-ViT-B/32", 32, (7, 7)),
        ("R152x2", None, (7, 7)),
        ("AxialResNet50", None, (7, 7)),
    ],
)
def test_patches_of_every_family(name: str, stride: int | None, grid: tuple[int, int]) -> None:
    config = MODELS[name]
    assert config.grid == grid
    if isinstance(config, ViTConfig):
        assert config.stride == stride


@pytest.mark.parametrize(
    ("image_size", "pool", "grid", "patches", "tokens"),
    [(224, "token", (14, 14), 196, 197), (224, "gap", (14, 14), 196, 196), ((32, 64), "token", (2, 4), 8, 9)],
)
def test_how_many_tokens(image_size: Any, pool: Any, grid: tuple[int, int], patches: int, tokens: int) -> None:
    config = ViTConfig(image_size=image_size, pool=pool)
    assert (config.grid, config.num_patches, config.num_tokens) == (grid, patches, tokens)
    assert config.num_prefix_tokens == tokens - patches


@pytest.mark.parametrize(
    ("image_size", "patch", "nearest"),
    [
        (225, 16, "224, 240"),
        (223, 16, "208, 224"),
        (224, 15, "210, 225"),
        ((224, 100), 16, "96, 112, 224, 240"),
        (5, 16, "16"),
        (0, 16, "16"),
    ],
)
def test_a_size_that_the_patch_does_not_divide_names_the_nearest(image_size: Any, patch: int, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf"cannot be cut into patches of {patch}x{patch}.*the nearest: {nearest}\."):
        ViTConfig(image_size=image_size, patch_size=patch)


@pytest.mark.parametrize(
    ("image_size", "layers", "patch", "nearest"),
    [(200, (), 8, "192, 224"), ((225, 64), (), 8, r"64, 96, 224, 256"), (1, (2, 2), 2, "16")],
)
def test_a_size_that_a_hybrid_cannot_cut_names_the_nearest(
    image_size: Any, layers: tuple[int, ...], patch: int, nearest: str
) -> None:
    with pytest.raises(ValueError, match=rf"patches of {patch}x{patch} \(of the stem's .*the nearest: {nearest}\."):
        ViTConfig(image_size=image_size, patch_size=patch, stem=ResNetBody(layers))
    ViTConfig(image_size=int(nearest.split(", ")[0]), patch_size=patch, stem=ResNetBody(layers))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"heads": 5}, r"heads=5 does not divide width=768; the nearest that do: \[3, 4, 6\]"),
        ({"width": 0}, "width is 0; it must be at least 1"),
        ({"depth": -1}, "depth is -1"),
        ({"heads": 0}, "heads is 0"),
        ({"mlp_dim": 0}, "mlp_dim is 0"),
        ({"patch_size": 0}, "patch_size is 0"),
        ({"num_classes": -1}, "num_classes is -1"),
        ({"representation_size": 0}, "representation_size is 0.*or None"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"stochastic_depth": 1.0}, r"stochastic_depth is 1.0; it must lie in \[0, 1\)"),
        ({"registers": -1}, "registers is -1; it must be 0"),
        ({"layer_norm_eps": -1.0}, "layer_norm_eps=-1.0 must be positive"),
        ({"layer_scale": float("nan")}, "layer_scale is nan; allowed: finite float or None"),
        ({"head_std": -0.1}, "head_std is -0.1; it must be 0 or more"),
        ({"position_std": -1.0}, "position_std is -1.0"),
        ({"position": "relative"}, "give position_at='every' or 'shared'"),
        ({"stochastic_depth": 0.1, "encoder": "axial"}, "goes with encoder=.full."),
        ({"position": "relative", "position_at": "shared", "encoder": "axial"}, "goes with encoder='full'"),
        ({"position": "none", "position_at": "every"}, "'none' has nothing to learn in every block"),
        ({"position": "sincos2d", "position_at": "every"}, "'sincos2d' has nothing to learn in every block"),
        ({"position": "2d", "width": 765, "heads": 3}, "width=765 is odd"),
        ({"position": "sincos2d", "width": 6, "heads": 1}, "a width that 4 divides, 8 at least; it is 6"),
        ({"distilled": True, "pool": "gap"}, "distilled=True needs pool='token'"),
        ({"distilled": True, "representation_size": 768}, "distilled=True needs .*no representation_size"),
    ],
)
def test_a_wrong_number_says_what_is_allowed(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ViTConfig(**settings)


def test_a_resnet_that_cannot_be_built_says_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="num_classes is -1"):
        ResNetConfig(num_classes=-1)
    with pytest.raises(ValueError, match="image_size is 0; each side must be at least 1"):
        ResNetConfig(image_size=0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pool": "mean"}, "pool is 'mean'; allowed: 'token', 'gap', 'map', 'token\\+gap'"),
        ({"stem": (3, 4, 9)}, r"stem is \(3, 4, 9\); allowed: ResNetBody or None"),
        ({"position_at": "all"}, "position_at is 'all'; allowed: 'stem', 'every', 'shared'"),
        ({"width": "768"}, "width is '768'; allowed: int"),
        ({"depth": True}, "depth is True; allowed: int"),
        ({"image_size": (224, 224, 3)}, "image_size is .* allowed: int or"),
        ({"dropout": None}, "dropout is None; allowed: finite float"),
    ],
)
def test_a_wrong_type_says_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the tests' own check would come first
    with pytest.raises(ValueError, match=said):
        ViTConfig(**settings)


def test_a_config_goes_through_json(kind: ModelConfig) -> None:
    assert from_dict(ModelConfig, json.loads(json.dumps(to_dict(kind)))) == kind  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("asked", "patch", "nearest"), [(384, 14, 392), (384, 16, 384), (224, 14, 224), (512, 14, 518), (5, 14, 14)]
)
def test_nearest_image_size(asked: int, patch: int, nearest: int) -> None:
    assert nearest_image_size(asked, patch) == nearest
    check_divisible((nearest, nearest), patch)


def test_nearest_image_size_of_a_hybrid() -> None:
    """Its patches are of the stem's map: one place of which is 16 pixels."""
    stem = ResNetBody((3, 4, 9))
    assert [nearest_image_size(side, 1, stem) for side in (224, 230)] == [224, 230]  # any size has a map
    assert nearest_image_size(230, 4, stem) == 256
    check_divisible((256, 256), 4, stem)


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        get_config("ViT-L/16").width = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "name", ["ViT-B/16", "R50+ViT-B/16", "R+ViT-Ti/16", "R50x1", "Axial-ViT-B/32", "AxialResNet50"]
)
def test_counted_operations_are_those_that_run(name: str) -> None:
    config = MODELS[name]
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        build_model(config).requires_grad_(False)(torch.empty(1, 3, *config.image_hw))
    assert 2 * config.forward_macs == counter.get_total_flops()


@pytest.mark.parametrize("side", [7, 32, 33])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_products_with_borders_are_those_that_meet_a_zero(version: Literal["v1", "v2"], side: int) -> None:
    """Against a convolution of ones: where the filter lies beyond the map, its sum lacks a one."""
    body, hw = ResNetBody((1, 2), 32, version), (side, side + 4)
    seen = []

    def meet(conv: StdConv, inputs: tuple[Tensor]) -> None:
        (maps,) = inputs
        ones = StdConv(1, 1, conv.weight.shape[-1], conv.stride, body)
        ones.standardized = lambda: torch.ones_like(ones.weight)
        found = ones(torch.ones_like(maps[:1, :1]))
        seen.append(conv.weight[..., 0, 0].numel() * int((ones.weight.numel() - found).sum()))

    whole = Body(body, hw)
    for module in whole.modules():
        if isinstance(module, StdConv):
            module.register_forward_pre_hook(meet)
    whole(torch.zeros(1, 3, *hw))
    assert sum(seen) == body.border_macs(hw) > 0
    assert ResNetConfig(image_size=hw, body=body).inner_macs == ResNetConfig(
        image_size=hw, body=body
    ).forward_macs - sum(seen)
