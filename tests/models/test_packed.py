"""Packed linear layers compute what `nn.Linear` does."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from vitlab.models import ViTConfig
from vitlab.models.packed import PackedLinear, pack_linear
from vitlab.models.variant import Variant
from vitlab.models.vit import ViT, build_model

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")

CONFIG = ViTConfig(
    image_size=16, patch_size=4, width=24, depth=2, heads=2, mlp_dim=40, num_classes=5, pool="map", head_std=0.1
)
IMAGES = torch.linspace(-1, 1, 3 * 3 * 16 * 16).sin().reshape(3, 3, 16, 16)
VARIANTS: dict[str, Any] = {
    "tanh": {},
    "erf": {"gelu": "erf"},
    "quick": {"gelu": "quick"},
    "swiglu": {"swiglu": True},
    "mlp_norm": {"mlp_norm": True},
}


def both(dtype: torch.dtype = torch.float32, **variant: Any) -> tuple[ViT, ViT]:
    """A model, and the same with packed layers."""
    config = dataclasses.replace(CONFIG, variant=Variant(**variant))
    model: Any = build_model(config, generator=torch.Generator().manual_seed(0)).eval().to(dtype)
    packed = copy.deepcopy(model)
    pack_linear(packed)
    assert not any(type(layer) is nn.Linear for layer in packed.modules())
    return model, packed


HAS_BFLOAT16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
DTYPES = [torch.float32, *([torch.bfloat16] if HAS_BFLOAT16 else [])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_outputs(variant: str, dtype: torch.dtype) -> None:
    model, packed = both(dtype, **VARIANTS[variant])
    atol = 1e-5 if dtype == torch.float32 else 0.03
    with torch.inference_mode():
        expected, all_at_once = model(IMAGES).float(), packed(IMAGES).float()
        torch.testing.assert_close(all_at_once, expected, rtol=0, atol=atol)
        torch.testing.assert_close(packed(IMAGES[:1]).float(), all_at_once[:1], rtol=0, atol=atol)
    assert expected.std() > 0.1  # not all zeros
    is_fused = variant in ("tanh", "erf", "mlp_norm")
    mlp: Any = packed.blocks[0].mlp
    assert isinstance(mlp.activation, nn.Identity) == is_fused


def test_names_and_parameters_stay() -> None:
    model, packed = both()
    assert list(packed.state_dict()) == list(model.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(packed.state_dict().values(), model.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("gelu", [None, "tanh", "none"])
def test_gradients_are_those_of_linear(gelu: Any) -> None:
    layer = nn.Linear(6, 4)
    packed = PackedLinear(layer, gelu)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = packed(x)
    with torch.no_grad():
        torch.testing.assert_close(packed(x), y)
    expected = layer(x) if gelu is None else nn.functional.gelu(layer(x), approximate=gelu)
    assert torch.equal(y, expected)
    assert torch.autograd.grad(y.sum(), x)[0].abs().sum() > 0
