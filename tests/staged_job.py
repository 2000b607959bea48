"""A small job of both stages of fine-tuning."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from vitlab.config import DataConfig, FinetuneConfig, OptimConfig, TrainConfig
from vitlab.finetuning.protocol import sweep_and_finetune
from vitlab.finetuning.result import Finetuned


@pytest.fixture(scope="module")
def staged(config: TrainConfig) -> FinetuneConfig:
    """Three rates, each for eight of the twenty steps, on four other digits at the size of pre-training."""
    return FinetuneConfig(
        model=dataclasses.replace(config.model, image_size=8, width=8),
        data=DataConfig(classes=(3, 4, 5, 6), crop="none", flip=False, train_split="trainval", eval_split="test"),
        optim=OptimConfig(name="adam", lr=3e-3, clip_norm=1.0),
        steps=20,
        batch_size=16,
        precision="float32",
        log_every=4,
        checkpoint_every=5,
        learning_rates=(1e-3, 3e-3, 1e-2),
        sweep_steps=8,
        held_out=0.25,
        head="least_squares",
    )


def tune(checkpoint: Path, config: FinetuneConfig, folder: Path, **options: Any) -> Finetuned:
    return sweep_and_finetune(checkpoint, config, folder, device="cpu", tensorboard=False, **options)
