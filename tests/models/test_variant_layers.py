import pytest
import torch
from torch import nn

from vitlab.models import Rotary, Variant, ViTConfig
from vitlab.models.variant_layers import activate, layer_norm, rotary_table, rotate


def test_a_layer_norm_has_the_variants_eps() -> None:
    config = ViTConfig(width=24, variant=Variant(layer_norm_eps=1e-3))
    norm = layer_norm(config, width=8)
    assert isinstance(norm, nn.LayerNorm)
    assert (norm.eps, norm.normalized_shape) == (1e-3, (8,))
    assert isinstance(layer_norm(config, exists=False), nn.Identity)


@pytest.mark.parametrize("variant", [Variant(), Variant(gelu="erf"), Variant(gelu="quick"), Variant(swiglu=True)])
def test_activations(variant: Variant) -> None:
    """Of large inputs all are the inputs, of negative ones zero; the gate of SwiGLU comes first."""
    values = activate(torch.tensor([[[20.0, -40.0, 3.0, 2.0]]]), variant)[0, 0]
    expected = [60.0, 0.0] if variant.swiglu else [20.0, 0.0, 3.0, 2.0]
    torch.testing.assert_close(values, torch.tensor(expected), atol=0.07, rtol=0)


@pytest.mark.parametrize("rotary", [Rotary(), Rotary(1e4, "index", (8, 8), 1.0)])
def test_rotated_products_depend_on_the_offset_alone(rotary: Rotary) -> None:
    table = rotary_table((3, 4), 8, rotary)
    x = torch.randn(8).expand(1, 1, 13, 8)
    rotated = rotate(x, table, 1)[0, 0]
    assert torch.equal(rotated[0], x[0, 0, 0])  # the class token
    grid = rotated[1:].unflatten(0, (3, 4))
    right = (grid[:, :-1] * grid[:, 1:]).sum(-1)
    torch.testing.assert_close(right, right[:1, :1].expand(3, 3))
    assert not torch.isclose(right[0, 0], x[0, 0, 0].square().sum())
