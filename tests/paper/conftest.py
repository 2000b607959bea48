"""A small model of the paper's plain kind, and a request to show it on two photos."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitlab
from vitlab.models.vit import ViT
from vitlab.paper.figures import Request

SIZES: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 4,
    "width": 32,
    "depth": 3,
    "heads": 4,
    "mlp_dim": 48,
    "num_classes": 5,
}


@pytest.fixture
def vit() -> ViT:
    return ViT(vitlab.ViTConfig(**SIZES, head_std=0.5, position_std=0.5)).eval()


@pytest.fixture
def request_of(vit: ViT, tmp_path: Path) -> Request:
    """A checkpoint and two photos."""
    vitlab.save_model(vit, tmp_path / "checkpoint")
    rng = np.random.default_rng(0)
    photos = []
    for number in range(2):
        Image.fromarray(rng.integers(0, 255, (30, 24, 3), np.uint8)).save(path := tmp_path / f"{number}.png")
        photos.append(str(path))
    return Request(str(tmp_path / "checkpoint"), photos, tmp_path / "out")
