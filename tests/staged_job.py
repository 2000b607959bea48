"""A small job of both stages of fine-tuning."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.config import DataConfig, FinetuneConfig, OptimConfig, TrainConfig
from vitlab.data.registry import load_dataset
from vitlab.finetuning.head import fit_head
from vitlab.finetuning.job import FinetuneJob
from vitlab.finetuning.protocol import sweep_and_finetune
from vitlab.finetuning.result import Finetuned
from vitlab.finetuning.sweep import RunStart
from vitlab.recipes.rules import adapt_config
from vitlab.runs.run import RunContext, RunResult
from vitlab.runs.splits import Splits


@pytest.fixture(scope="session")
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


def make_job(workdir: Path, pretrained: RunResult, config: FinetuneConfig) -> FinetuneJob:
    train, test = (load_dataset("digits", split, classes=(3, 4, 5, 6)) for split in ("trainval", "test"))
    data = dataclasses.replace(config.data, name="digits")
    adapted = adapt_config(pretrained.config.model, dataclasses.replace(config, data=data), 4)
    return FinetuneJob(workdir, "", Splits(train, test, test), adapted, RunContext(torch.device("cpu"), False), print)


@pytest.fixture(scope="session")
def start(
    workdir: Path, pretrained: RunResult, staged: FinetuneConfig, tmp_path_factory: pytest.TempPathFactory
) -> RunStart:
    """What the runs of `staged` start from, with its least-squares head."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return make_start(workdir, pretrained, staged)


def make_start(workdir: Path, pretrained: RunResult, config: FinetuneConfig) -> RunStart:
    job = make_job(workdir, pretrained, config)
    return RunStart(job, fit_head(job))
