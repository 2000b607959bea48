from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vitlab.models import ModelConfig, ViTConfig
from vitlab.models.vit import build_model


def counted(config: ModelConfig, **options: Any) -> int:
    """The operations that torch counts for two images."""
    images = torch.randn(2, config.in_chans, *config.image_hw, **options)
    model = build_model(config).requires_grad_(False).to(images.device)
    with FlopCounterMode(display=False) as counter:
        model(images)
    return counter.get_total_flops()


def test_counted_operations_are_those_that_run(kind: ModelConfig) -> None:
    """By products where gradients are needed."""
    assert 2 * 2 * kind.forward_macs == counted(kind, requires_grad=True)


def test_counted_operations_are_those_of_fused_attention(block_kind: ModelConfig) -> None:
    """Where gradients are not needed; torch 2.11 counts it on no CPU."""
    assert 2 * 2 * block_kind.forward_macs == counted(block_kind, device="meta")


def test_dropped_patches_are_not_counted_in_training() -> None:
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 16, "depth": 2, "heads": 2, "mlp_dim": 24}
    config = ViTConfig(**sizes, patch_dropout=0.5)  # 8 of 16 patches
    counter = FlopCounterMode(display=False)
    with counter:
        build_model(config).requires_grad_(False).train()(torch.randn(2, 3, 32, 32, requires_grad=True))
    assert 2 * 2 * config.training_macs == counter.get_total_flops()
    assert config.training_macs < config.forward_macs == ViTConfig(**sizes).training_macs
