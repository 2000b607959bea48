"""Sec. 4.1: pre-training of a newly initialized model, with labels or by masked patch prediction (App. B.1.2)."""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path

import torch

from vitlab.config import TrainConfig
from vitlab.data.classes import require_two_classes
from vitlab.data.registry import check_source
from vitlab.display import format_duration
from vitlab.errors import UserError
from vitlab.recipes.resolve import Reason, changes, with_settings
from vitlab.runs.cost import measure_cost
from vitlab.runs.run import RunContext, RunResult, TrainingRun, excluded, load_reasons
from vitlab.runs.splits import Splits, load_splits, require_readable_classes, with_measured_range
from vitlab.train.clock import PLANNED_FRACTION, Clock, TimeLimit
from vitlab.train.distributed import SINGLE, World
from vitlab.train.objectives import check_balance, create_training_model
from vitlab.train.precision import choose_device
from vitlab.train.workdir import check_folder

MIN_STEPS = 10
"""Fewest steps of a run with a budget."""


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
        check_balance(config, splits.train)
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


def fit_steps(
    config: TrainConfig, workdir: Path, splits: Splits, context: RunContext, clock: Clock, log: Callable[[str], None]
) -> tuple[TrainConfig, tuple[Reason, ...], TimeLimit | None]:
    """Returns `config` with the steps that fit, the reasons, and the time limit.

    The steps are at most those of `config`; the warm-up is in proportion. An interrupted run keeps its number of steps,
    and a finished one has no limit. Raises UserError where MIN_STEPS do not fit.
    """
    world = context.world
    saved = load_reasons(workdir, world)
    resumed = with_settings(config, {reason.setting: reason.value for reason in saved})
    if world.broadcast_object(lambda: (workdir / "result.json").exists()):
        return resumed, saved, None
    cost = measure_cost(config, splits.train, context)
    eval_seconds = cost.forward(config.model)
    train_seconds = config.batch_size * cost.train(config.model)
    val_images = 0 if splits.val is splits.test else len(splits.val)
    test_seconds = (len(splits.test) + val_images) * eval_seconds  # with the last evaluation
    limit = TimeLimit(clock, train_seconds, after=test_seconds)
    if saved:
        log(f"resuming the plan in {workdir}: {resumed.steps:,} steps")
        return resumed, saved, limit
    step_seconds = train_seconds  # with its share of the evaluations
    if config.eval_every:
        step_seconds += len(splits.val) * eval_seconds / config.eval_every
    recipe_steps = config.total_steps(len(splits.train))
    min_steps = min(MIN_STEPS, recipe_steps)
    min_seconds = min_steps * step_seconds + test_seconds
    left = world.broadcast_object(clock.left)
    if min_seconds > PLANNED_FRACTION * left:
        minutes = math.ceil((min_seconds / PLANNED_FRACTION + clock.seconds - left) / 60)
        raise UserError(
            f"{min_steps} steps of {config.batch_size:,} images and the test take {format_duration(min_seconds)} or "
            f"more here; give --budget {minutes}m, a smaller --batch-size, or a smaller model."
        )
    steps = min(recipe_steps, int((PLANNED_FRACTION * left - test_seconds) / step_seconds))
    optim = dataclasses.replace(config.optim, warmup_steps=config.optim.warmup_steps * steps // recipe_steps)
    planned = dataclasses.replace(config, steps=steps, epochs=None, optim=optim)
    epochs = steps * config.batch_size / len(splits.train)
    log(
        f"plan: {steps:,} of the recipe's {recipe_steps:,} steps ({epochs:.1f} epochs), "
        f"{format_duration(steps * step_seconds)}, then the test, {format_duration(test_seconds)}"
    )
    return planned, tuple(Reason(name, value, "the time budget") for name, value in changes(config, planned)), limit
