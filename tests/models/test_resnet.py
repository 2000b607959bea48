"""Parts of the ResNet; its outputs are compared with Google's, timm's and Hugging Face's in tests/weights."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitlab.models import ResNetBody
from vitlab.models.resnet import Body, ResNet, StdConv


@pytest.mark.parametrize("eps_on", ["std", "variance"])
def test_standardized_weights_have_no_mean_and_one_deviation(eps_on: Any) -> None:
    eps = 1e-5
    conv = StdConv(6, 4, 3, 1, ResNetBody(weight_eps=eps, weight_eps_on=eps_on)).double()
    spread = torch.tensor([1.0, 1e-2, 1e-4, 1e-6], dtype=torch.float64)[:, None, None, None]
    with torch.no_grad():
        conv.weight.copy_(3 + spread * torch.randn(4, 6, 3, 3))
    for kernel, standardized in zip(conv.weight.detach().numpy(), conv.standardized().detach().numpy(), strict=True):
        mean, variance = kernel.mean(), kernel.var()
        scale = np.sqrt(variance + eps) if eps_on == "variance" else np.sqrt(variance) + eps
        np.testing.assert_allclose(standardized, (kernel - mean) / scale, rtol=1e-9, atol=1e-12)
    assert conv.standardized()[0].std(correction=0).item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("size", "side", "before", "after"),
    [(7, 224, 2, 3), (3, 28, 0, 1), (7, 225, 3, 3), (3, 113, 1, 1)],
)
def test_halving_convolutions_pad_as_tensorflow_does(size: int, side: int, before: int, after: int) -> None:
    conv = StdConv(1, 1, size, 2, ResNetBody())
    nn.init.normal_(conv.weight)
    maps, across = torch.randn(1, 1, side, 8), {7: (2, 3), 3: (0, 1)}[size]
    expected = F.conv2d(F.pad(maps, (*across, before, after)), conv.standardized(), stride=2)
    assert conv(maps).shape[-2:] == (-(-side // 2), 4)
    torch.testing.assert_close(conv(maps), expected)
    assert conv(maps.transpose(2, 3).contiguous()).shape[-2:] == (4, -(-side // 2))


def root(image_size: tuple[int, int], **settings: Any) -> Body:
    body = Body(ResNetBody(layers=(), width=32, **settings), image_size)
    nn.init.normal_(body.root.weight)
    if body.root_norm is not None:
        nn.init.normal_(body.root_norm.weight)
        nn.init.normal_(body.root_norm.bias)
    return body


@torch.no_grad()
@pytest.mark.parametrize("image_size", [(24, 32), (37, 45)])
def test_the_padding_of_the_pooling_affects_the_border_of_bit_alone(image_size: tuple[int, int]) -> None:
    """Zeros hide negative values there, of which there are none after the activation of `v1`."""
    images = torch.randn(2, 3, *image_size)
    for version in ("v1", "v2"):
        zero, infinite = root(image_size, version=version), root(image_size, version=version, pool_padding="-inf")
        infinite.load_state_dict(zero.state_dict())
        one, other = zero(images), infinite(images)
        assert one.isfinite().all()
        assert other.isfinite().all()
        assert torch.equal(one, other) == (version == "v1")
        assert torch.equal(one[:, :, 1:-1, 1:-1], other[:, :, 1:-1, 1:-1])
    assert (one >= other).all()
    hidden = one != other
    assert (one[hidden] == 0).all()
    assert (other[hidden] < 0).all()


@pytest.mark.usefixtures("traceable")
def test_compiled_for_a_cpu_maps_are_channels_last(small_resnet: Callable[..., ResNet]) -> None:
    """With the logits and gradients of the model that is not compiled, and without torch's GroupNorm: the model is
    compared with itself as torch.compile traces it, run node by node."""
    inputs, functions = [], set()

    class Recorder(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            functions.add(target)
            inputs.extend([args[0]] if target is torch.conv2d else [])
            return super().call_function(target, args, kwargs)

    model, images = small_resnet(min_group_size=8), torch.randn(3, 3, 24, 32)
    compiled = torch.compile(model, fullgraph=True, backend=lambda graph, _: Recorder(graph).run)
    results = []
    for forward in (model, compiled):
        logits = forward(images)
        results.append((logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))))
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5 * float(expected.detach().abs().max()))
    assert len(inputs) == 12
    assert all(maps.stride(1) == 1 for maps in inputs)
    assert not functions & {F.group_norm, torch.group_norm}
