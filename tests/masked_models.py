"""A small model of masked patch prediction, one with the same prediction for every patch, and images of one gray."""

from typing import Any

import numpy as np
import torch

from vitlab.config import MaskingConfig
from vitlab.data.dataset import Dataset
from vitlab.models import ViTConfig
from vitlab.train.masking import MaskedViT

MODEL = ViTConfig(
    image_size=16, patch_size=4, width=32, depth=2, heads=2, mlp_dim=32, num_classes=0, pool="gap", position_std=1.0
)


def flat(levels: list[int]) -> Dataset:
    """Images of one gray each."""
    pixels = np.array(levels, np.uint8)[:, None, None, None] * np.ones((1, 16, 16, 3), np.uint8)
    return Dataset("flat", "test", ("a",), np.zeros(len(levels), np.int64), pixels)


def constant(target: Any, bias: torch.Tensor) -> MaskedViT:
    """A model with the same prediction for every patch."""
    model = MaskedViT(MODEL, MaskingConfig(target))
    with torch.no_grad():
        model.predictor.weight.zero_()
        model.predictor.bias.copy_(bias)
    return model
