"""The block and the pooling of a fine-tuning job, chosen before its plan: a model that is cut there is also faster."""

import contextlib
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.data.splits import stratified_subset
from vitlab.evaluation.layers import candidates, choose_layer, images_to_choose, is_enough
from vitlab.finetuning.budget import Measure
from vitlab.finetuning.held_out import left_out_groups
from vitlab.finetuning.job import FinetuneJob
from vitlab.finetuning.plan import Task
from vitlab.finetuning.representations import FrozenCheckpoint
from vitlab.models.config import ViTConfig
from vitlab.recipes.finetune import LAYER
from vitlab.runs.run import evaluation_options
from vitlab.train.clock import Clock
from vitlab.train.distributed import World

MAX_FRACTION = 0.05
"""Of a budget, for the representations; fitting the heads takes about as long."""


def with_chosen_layer(job: FinetuneJob, task: Task, measure: Measure, clock: Clock | None) -> FinetuneJob:
    """The job with the block and the pooling of least leave-one-out loss, if it may choose them and there is time.

    Choosing takes a small image size, as the plan's first measurement, and a part of the training images.
    """
    model = job.config.model
    if not job.config.head or not set(LAYER) <= job.open_settings or not candidates(model):
        return job
    assert isinstance(model, ViTConfig)
    small = task.sizes[3 * len(task.sizes) // 4]
    count = min(images_to_choose(model.num_classes), len(job.splits.train))
    if clock is not None:
        seconds = measure(small, False).forward(small.model)
        left = job.context.world.broadcast_object(clock.left)
        count = min(count, math.floor(MAX_FRACTION * left / seconds))
    if not is_enough(count, model.num_classes):
        job.log(f"all blocks are kept: {count:,} training images, or the time for them, are too few to choose")
        return job
    train = stratified_subset(job.splits.train, count / len(job.splits.train), job.config.seed)
    frozen = FrozenCheckpoint.load(dataclasses.replace(job, config=small))
    choice = choose_layer(
        frozen.model,
        train,
        evaluation_options(small, job.context.device),
        preprocessing=small.data.preprocessing(small.model.image_size),
        pool=job.pool,
        groups=left_out_groups(train, np.arange(len(train))),
        world=job.context.world,
    )
    assert choice is not None
    job.log(choice.describe())
    config = dataclasses.replace(job.config, model=choice.chosen.config(model))
    return dataclasses.replace(job.decide("losses on images left out", config), layers=choice.to_record())


def saved_choice(workdir: Path, world: World) -> dict[str, Any] | None:
    """The `layers` of an interrupted job, as rank 0 reads them; None if it has none."""

    def read() -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # opening the folder reports what is wrong
            return json.loads((workdir / "config.json").read_bytes())["layers"]
        return None

    return world.broadcast_object(read)
