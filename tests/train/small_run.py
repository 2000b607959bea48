"""What tests of training runs share: images, a run, its records, and the distance of two models."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitlab.config import TrainConfig
from vitlab.data.dataset import Dataset
from vitlab.data.registry import load_dataset
from vitlab.settings import to_dict
from vitlab.train.distributed import SINGLE, World
from vitlab.train.loop import Evaluate, train
from vitlab.train.objectives import create_training_model
from vitlab.train.workdir import Workdir


@functools.cache
def digits() -> Dataset:
    return load_dataset("digits", "train")


def initial_model(config: TrainConfig) -> Any:
    return create_training_model(config.model, config.masking, torch.Generator().manual_seed(0))


def run(
    config: TrainConfig,
    folder: Path,
    evaluate: Evaluate | None = None,
    data: Dataset | None = None,
    *,
    model: Any = None,
    world: World = SINGLE,
    **options: Any,
) -> Any:
    """Trains the same initial model as `config` says, or resumes the run in `folder`."""
    with Workdir(folder, to_dict(config), tensorboard=False, world=world) as workdir:
        return train(config, workdir, model or initial_model(config), data or digits(), evaluate, **options)


def records(folder: Path, key: str = "loss") -> dict[int, float]:
    """Step -> value, in the order of metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def largest_difference(one: dict[str, Any], two: dict[str, Any]) -> float:
    assert one.keys() == two.keys()
    return max(float(np.abs(np.asarray(one[name]) - np.asarray(two[name])).max()) for name in one)
