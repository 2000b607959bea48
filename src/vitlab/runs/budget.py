"""Fits the number of steps of a run to a time budget."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from vitlab.config import TrainConfig
from vitlab.display import format_duration
from vitlab.errors import UserError
from vitlab.recipes.resolve import Reason, changes, with_settings
from vitlab.runs.cost import measure_cost
from vitlab.runs.run import RunContext, load_reasons
from vitlab.runs.splits import Splits
from vitlab.train.clock import PLANNED_FRACTION, Clock, TimeLimit

MIN_STEPS = 10
"""Fewest steps of a run with a budget."""


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
    eval_seconds = cost.evaluate(config.model)
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
