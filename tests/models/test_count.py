import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vitlab.models import ModelConfig
from vitlab.models.vit import build_model


@pytest.mark.parametrize("grad", [True, False])
def test_counted_operations_are_those_that_run(kind: ModelConfig, grad: bool) -> None:
    """By products where gradients are needed, by fused attention otherwise, which torch 2.11 counts on no CPU."""
    counter = FlopCounterMode(display=False)
    device = "cpu" if grad else "meta"
    model = build_model(kind).requires_grad_(False).to(device)
    images = torch.randn(2, kind.in_chans, *kind.image_hw, device=device, requires_grad=grad)
    with counter:
        model(images)
    assert 2 * 2 * kind.forward_macs == counter.get_total_flops()
