from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vitlab.models import ModelConfig, ViTConfig
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


def test_dropped_patches_are_not_counted_in_training() -> None:
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 16, "depth": 2, "heads": 2, "mlp_dim": 24}
    config = ViTConfig(**sizes, patch_dropout=0.5)  # 8 of 16 patches
    counter = FlopCounterMode(display=False)
    with counter:
        build_model(config).requires_grad_(False).train()(torch.randn(2, 3, 32, 32, requires_grad=True))
    assert 2 * 2 * config.training_macs == counter.get_total_flops()
    assert config.training_macs < config.forward_macs == ViTConfig(**sizes).training_macs
