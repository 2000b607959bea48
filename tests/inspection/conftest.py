"""A run on a folder of images, for the tests of its page."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.config import DataConfig, OptimConfig, TrainConfig
from vitlab.models import ViTConfig
from vitlab.runs.pretrain import pretrain


@pytest.fixture
def folder_run(tmp_path: Path) -> Path:
    """A run on a folder of images. The first test image is gone since, the rest is there."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("test", 3)):
        for name in ("dark", "bright"):
            (tmp_path / "set" / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 90, (90, 70, 3)) + (150 if name == "bright" else 0)
                Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "set" / split / name / f"{i}.png")
    model = ViTConfig(image_size=(8, 12), patch_size=4, width=8, depth=1, heads=2, mlp_dim=8)
    data = DataConfig(name=f"folder:{tmp_path / 'set'}", crop="none")
    config = TrainConfig(model=model, data=data, optim=OptimConfig(lr=1e-9), steps=1, batch_size=4, log_every=1)
    pretrain(config, tmp_path / "run", device="cpu", tensorboard=False)
    return tmp_path / "run"
