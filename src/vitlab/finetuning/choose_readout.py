"""The block and the pooling of a fine-tuning job, chosen before its plan: a model that is cut there is also faster."""

import contextlib
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.data.splits import stratified_subset
from vitlab.evaluation.readouts import candidates, choose_readout, images_to_choose, is_enough
from vitlab.finetuning.budget import Measure
from vitlab.finetuning.held_out import left_out_groups
from vitlab.finetuning.job import FinetuneJob
from vitlab.finetuning.plan import Task
from vitlab.finetuning.representations import FrozenCheckpoint
from vitlab.models.config import ViTConfig
from vitlab.runs.run import evaluation_options
from vitlab.train.clock import Clock
from vitlab.train.distributed import World

MAX_FRACTION = 0.05
"""Largest fraction of the time left for the representations; fitting the heads may take as much again."""


def with_chosen_readout(job: FinetuneJob, task: Task, measure: Measure, clock: Clock | None) -> FinetuneJob:
    """The job with the block and the pooling of least leave-one-out loss, if it may choose them and there is time.

    Candidates are compared on a part of the training images, at the small size that the plan measures first.
    """
    model = job.config.model
    if not job.config.head or "model.depth" not in job.open_settings or not candidates(model):
        return job
    assert isinstance(model, ViTConfig)
    pool: Any = None if "model.pool" in job.open_settings else model.pool  # the user's
    small = task.small_config
    wanted = count = min(images_to_choose(model.num_classes), len(job.splits.train))
    if clock is not None:
        seconds = measure(small, False).forward(small.model)
        limit = MAX_FRACTION * job.context.world.broadcast_object(clock.left)
        count = min(count, math.floor(limit / seconds))
        while count > 0 and _fit_seconds(len(candidates(model, pool)), count, model.num_classes) > limit:
            count //= 2
    train, groups = job.splits.train, None
    if count > 0:
        train = stratified_subset(train, count / len(train), job.config.seed)
        groups = left_out_groups(train, np.arange(len(train)))
    if not is_enough(count, model.num_classes, groups):
        too_few = f"{count:,} training images, or their groups, are too few to choose"
        job.log(f"all blocks are kept: {'there is no time to choose' if count < wanted else too_few}")
        return job
    frozen = FrozenCheckpoint.load(dataclasses.replace(job, config=small))
    choice = choose_readout(
        frozen.model,
        train,
        evaluation_options(small, job.context.device),
        preprocessing=small.data.preprocessing(small.model.image_size),
        pool=pool,
        groups=groups,
        balance=small.balance,
        world=job.context.world,
    )
    assert choice is not None
    job.log(choice.describe())
    config = dataclasses.replace(job.config, model=choice.chosen.config(model))
    return dataclasses.replace(job.decide("losses on images left out", config), layers=choice.to_record())


def _fit_seconds(num_candidates: int, images: int, classes: int) -> float:
    """Seconds to fit the heads of the candidates. Measured for ViT-S with 12 candidates and 1,000 images, on two cores:
    2.1 s for 10 classes, 6.3 s for 500."""
    return num_candidates * (0.2 + 7e-10 * images**2 * classes)


def saved_choice(workdir: Path, world: World) -> dict[str, Any] | None:
    """How an interrupted job chose block and pooling (`FinetuneJob.layers`), as rank 0 reads it; None if it did not."""

    def read() -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # opening the folder reports what is wrong
            return json.loads((workdir / "config.json").read_bytes())["layers"]
        return None

    return world.broadcast_object(read)
