"""Outputs of Google's code on random weights, and small models without zeros."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from vitlab.models import ViTConfig
from vitlab.models.variant import override
from vitlab.models.vit import ViT

sys.path.insert(0, str(Path(__file__).parent))  # for `peers`


@dataclass(frozen=True)
class Golden:
    checkpoint: Path
    arrays: dict[str, np.ndarray]
    tolerance: dict[str, float]

    def images(self, key: str = "images") -> Tensor:
        return torch.from_numpy(self.arrays[key]).permute(0, 3, 1, 2).contiguous()

    def check(self, key: str, ours: Tensor) -> None:
        """Largest error over the root mean square of the whole output, against the file's tolerance."""
        whole, _, cut = key.partition("[")
        theirs = self.arrays[key].astype(np.float64)
        mine = ours.detach().double().numpy()
        mine = mine[: int(cut[1:-1])] if cut else mine
        assert mine.shape == theirs.shape
        error = np.abs(mine - theirs).max() / np.sqrt((theirs**2).mean())
        assert error <= self.tolerance.get(whole, max(self.tolerance.values())), f"{key}: {error:.1e}"


@pytest.fixture
def golden(shared: Path) -> Callable[[str], Golden]:
    def load(name: str) -> Golden:
        folder = shared / "golden" / "models"
        with np.load(folder / f"{name}.io.npz") as archive:
            arrays = dict(archive)
        return Golden(folder / f"{name}.ckpt.npz", arrays, json.loads(str(arrays["meta"]))["tol_nerr"])

    return load


@pytest.fixture
def tiny() -> Callable[..., ViT]:
    """A small ViT whose every parameter is random, so that none can be lost or swapped unnoticed."""

    def build(**settings: object) -> ViT:
        small = {"image_size": 12, "patch_size": 4, "width": 8, "depth": 2, "heads": 2, "mlp_dim": 12}
        model = ViT(override(ViTConfig(), **{**small, "num_classes": 5, **settings}))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        return model.eval()

    return build
