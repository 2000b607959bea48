"""A small finished run, for tests that only read it: import its fixtures in a conftest.py."""

from pathlib import Path

import pytest

from vitlab.config import DataConfig, OptimConfig, TrainConfig
from vitlab.models import ViTConfig
from vitlab.runs.pretrain import pretrain
from vitlab.runs.run import RunResult


@pytest.fixture(scope="session")
def config() -> TrainConfig:
    """Three classes of the digits at 8 pixels, with a hidden layer before the head as in pre-training."""
    return TrainConfig(
        model=ViTConfig(
            image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp_dim=16, num_classes=3, representation_size=12
        ),
        data=DataConfig(classes=(0, 1, 2), crop="none", flip=False),
        optim=OptimConfig(lr=5e-3),
        steps=15,
        batch_size=16,
        log_every=5,
        eval_every=10,
        precision="float32",
    )


@pytest.fixture(scope="session")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `pretrained`."""
    return tmp_path_factory.mktemp("pretrained") / "run"


@pytest.fixture(scope="session")
def pretrained(config: TrainConfig, workdir: Path) -> RunResult:
    return again(config, workdir)


def again(config: TrainConfig, folder: Path) -> RunResult:
    return pretrain(config, folder, device="cpu", tensorboard=False)
