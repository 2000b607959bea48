"""Sec. 4.1: pre-training of a newly initialized model, with labels or by masked patch prediction (App. B.1.2)."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from vitlab.config import TrainConfig
from vitlab.data.classes import require_two_classes
from vitlab.data.registry import check_source
from vitlab.runs.budget import fit_steps
from vitlab.runs.run import RunContext, RunResult, TrainingRun, excluded
from vitlab.runs.splits import load_splits, require_readable_classes, with_measured_range
from vitlab.train.clock import Clock
from vitlab.train.distributed import SINGLE, World
from vitlab.train.objectives import create_training_model
from vitlab.train.precision import choose_device
from vitlab.train.workdir import check_folder


def pretrain(
    config: TrainConfig,
    workdir: str | Path,
    *,
    budget: float | None = None,
    started: float | None = None,
    device: str = "auto",
    tensorboard: bool = True,
    log: Callable[[str], None] = lambda _: None,
    world: World = SINGLE,
) -> RunResult:
    """Trains a newly initialized model as `config` says, for the classes of its data set, then tests it.

    budget: seconds from `started` (by `time.monotonic()`; default: now) to the end of the test. The run takes as many
    steps as fit, at most those of `config`, and fewer where the machine becomes slower. The same call on the same
    folder resumes an interrupted run; the result of a finished run is read.
    """
    # What is invalid is an error before the data is read.
    context = RunContext(choose_device(world.device(device)), tensorboard, world)
    world.check_batch_size(config.batch_size)
    config.data.preprocessing(config.model.image_size)
    check_folder(Path(workdir))
    check_source(config.data.name, config.data.root)
    excluded(config.data)  # raises UserError if the list cannot be read
    if config.fewshot is not None and config.fewshot.dataset is not None:
        check_source(config.fewshot.dataset, config.fewshot.root)
    config = dataclasses.replace(config, data=with_measured_range(config.data, world))
    splits = load_splits(config.data, world, config.loss == "sigmoid")
    if config.masking is None:
        require_two_classes(splits.train)
        if config.data.on_error == "skip":
            require_readable_classes(splits.train, world)
        model = dataclasses.replace(config.model, num_classes=len(splits.train.classes))
        config = dataclasses.replace(config, model=model)
    generator = torch.Generator().manual_seed(config.seed)
    create_model = functools.partial(create_training_model, config.model, config.masking, generator)
    if budget is None:
        return TrainingRun(config, splits, create_model, "pretrain", context).run(workdir)
    config, reasons, limit = fit_steps(config, Path(workdir), splits, context, Clock(budget, started), log)
    settings = {"reasons": reasons}
    return TrainingRun(config, splits, create_model, "pretrain", context, settings=settings, limit=limit).run(workdir)
