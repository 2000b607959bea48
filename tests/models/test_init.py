import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig, create_model
from vitlab.models.init import init_weights, redraw_positions
from vitlab.models.resnet import ResNet
from vitlab.models.variant import override
from vitlab.models.vit import ViT, build_model

TRUNCATED = 0.87962566
"""Standard deviation of a normal distribution cut off at two standard deviations."""


def spread(tensor: Tensor, sd: float, error: float = 0.01) -> None:
    assert abs(tensor.std().item() / sd - 1) < error
    assert abs(tensor.mean().item()) < 5 * sd / math.sqrt(tensor.numel())


def truncated(tensor: Tensor, error: float = 0.01) -> None:
    """LeCun's: variance 1 / fan_in."""
    sd = math.sqrt(1 / tensor[0].numel())
    spread(tensor, sd, error)
    bound = 2 * sd / TRUNCATED
    assert 0.98 * bound < tensor.abs().max().item() <= bound * (1 + 1e-6)


def uniform(tensor: Tensor, bound: float, error: float = 0.01) -> None:
    """Xavier's, between the bounds."""
    spread(tensor, bound / math.sqrt(3), error)
    assert 0.995 * bound < tensor.abs().max().item() <= bound * (1 + 1e-6)


def normal(tensor: Tensor, sd: float, error: float) -> None:
    """Not cut off."""
    spread(tensor, sd, error)
    assert tensor.abs().max() > 2.5 * sd


def constant(tensor: Tensor, value: float) -> None:
    assert torch.equal(tensor, torch.full_like(tensor, value))


def test_a_vit_begins_as_googles() -> None:
    sizes: dict[str, Any] = {"image_size": 112, "depth": 2, "num_classes": 10, "representation_size": 300}
    later: dict[str, Any] = {"pool": "token+gap", "registers": 200, "layer_scale": 0.25, "head_bias": -10.0}
    left: dict[str, Tensor] = dict(create_model("ViT-S/16", **sizes, **later).named_parameters())
    truncated(left.pop("embedding.weight"))
    truncated(left.pop("pre_logits.weight"))
    normal(left.pop("position.table"), 0.02, 0.02)
    normal(left.pop("registers"), 1e-6, 0.02)
    constant(left.pop("head.bias"), -10.0)
    for name in ("cls", "head.weight", "embedding.bias", "pre_logits.bias"):
        constant(left.pop(name), 0.0)
    for block in ("blocks.0", "blocks.1"):
        qkv, out = left.pop(f"{block}.attention.qkv.weight"), left.pop(f"{block}.attention.out.weight")
        for matrix in (*qkv.split(384), out):
            uniform(matrix, math.sqrt(6 / (2 * 384)))
        for dense in ("qkv", "out"):
            constant(left.pop(f"{block}.attention.{dense}.bias"), 0.0)
        for dense in ("fc1", "fc2"):
            uniform(left.pop(f"{block}.mlp.{dense}.weight"), math.sqrt(6 / (5 * 384)))
            spread(left.pop(f"{block}.mlp.{dense}.bias"), 1e-6, 0.15)
        for branch in ("branch1", "branch2"):
            constant(left.pop(f"{block}.{branch}.scale"), 0.25)
    for norm in ("blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "norm"):
        constant(left.pop(f"{norm}.weight"), 1.0)
        constant(left.pop(f"{norm}.bias"), 0.0)
    assert not left


@pytest.mark.parametrize(
    ("settings", "redrawn"),
    [
        ({"position": "1d", "class_position": False, "registers": 2}, {"position.table"}),
        ({"position": "2d"}, {"position.rows", "position.columns"}),
        ({"position": "relative", "position_at": "every"}, {"position.table"}),
    ],
)
def test_positions_of_the_grid_are_drawn_anew(settings: dict[str, Any], redrawn: set[str]) -> None:
    """All numbers of them, with `position_std` and by the generator alone; all else is unchanged."""
    sizes: dict[str, Any] = {"image_size": 64, "patch_size": 8, "width": 64, "depth": 2, "heads": 2, "mlp_dim": 8}
    config = override(ViTConfig(), num_classes=2, position_std=0.5, **sizes, **settings)
    ends = []
    for seed in (0, 0, 1):
        model = build_model(config, generator=torch.Generator().manual_seed(7))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        redraw_positions(model, config, torch.Generator().manual_seed(seed))
        after = model.state_dict()
        assert {name for name in after if not torch.equal(after[name], before[name])} == redrawn
        prefix = config.num_position_prefix if config.position == "1d" else 0
        for name in redrawn:
            assert torch.equal(after[name][:, :prefix], before[name][:, :prefix])
            assert (after[name][:, prefix:] != before[name][:, prefix:]).all()
            spread(after[name][:, prefix:], 0.5, 0.1)
        ends.append({name: after[name].clone() for name in redrawn})
    same, again, other = ends
    assert all(torch.equal(same[name], again[name]) and not torch.equal(same[name], other[name]) for name in redrawn)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_resnet_begins_as_googles(version: Any) -> None:
    """The last norm of a bottleneck is zero where its branch ends with it."""
    model = ResNet(ResNetConfig(body=ResNetBody((1, 1), version=version), num_classes=5, head_bias=-1.0))
    seen = set()
    for name, parameter in model.named_parameters():
        *_, kind, part = name.split(".")
        seen.add(kind)
        if name.startswith("head"):
            constant(parameter, 0.0 if part == "weight" else -1.0)
        elif "norm" in kind:
            one = part == "weight" and not (kind == "norm3" and version == "v1")
            constant(parameter, 1.0 if one else 0.0)
        else:
            truncated(parameter, 0.03)
    convolutions = {"root", "conv1", "conv2", "conv3", "shortcut", "norm1", "norm2", "norm3", "head"}
    assert seen == convolutions | ({"root_norm", "shortcut_norm"} if version == "v1" else {"norm"})


def test_weights_are_drawn_anew_in_place(kind: ModelConfig) -> None:
    """All of them: the generator alone decides."""
    expected = build_model(kind, generator=torch.Generator().manual_seed(7)).state_dict()
    model = build_model(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    init_weights(model, kind, torch.Generator().manual_seed(7))
    assert all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())


def test_a_parameter_without_a_rule_is_seen() -> None:
    model = ViT(ViTConfig(image_size=16, width=8, depth=1, heads=2, mlp_dim=8))
    model.register_parameter("stray", nn.Parameter(torch.zeros(3)))
    with pytest.raises(AssertionError, match="stray"):
        init_weights(model, model.config)
