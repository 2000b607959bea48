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
    world, train, model = context.world, splits.train, config.model
    saved = load_reasons(workdir, world)
    kept = with_settings(config, {reason.setting: reason.value for reason in saved})
    if world.broadcast_object(lambda: (workdir / "result.json").exists()):
        return kept, saved, None
    cost = measure_cost(config, train, context)
    step, evaluate = config.batch_size * cost.train(model), cost.evaluate(model)
    validation = 0 if splits.val is splits.test else len(splits.val)
    after = (len(splits.test) + validation) * evaluate
    limit = TimeLimit(clock, step, after)
    if saved:
        log(f"resuming the plan in {workdir}: {kept.steps:,} steps")
        return kept, saved, limit
    left = world.broadcast_object(clock.left)
    whole = config.total_steps(len(train))
    each = step + (len(splits.val) * evaluate / config.eval_every if config.eval_every else 0.0)  # with its evaluations
    fewest = min(MIN_STEPS, whole)
    needed = fewest * each + after
    if needed > PLANNED_FRACTION * left:
        minutes = math.ceil((needed / PLANNED_FRACTION + clock.seconds - left) / 60)
        raise UserError(
            f"{fewest} steps of {config.batch_size:,} images and the test take {format_duration(needed)} or more here; "
            f"give --budget {minutes}m, a smaller --batch-size, or a smaller model."
        )
    steps = min(whole, int((PLANNED_FRACTION * left - after) / each))
    optim = dataclasses.replace(config.optim, warmup_steps=config.optim.warmup_steps * steps // whole)
    planned = dataclasses.replace(config, steps=steps, epochs=None, optim=optim)
    epochs = steps * config.batch_size / len(train)
    log(
        f"plan: {steps:,} of the recipe's {whole:,} steps ({epochs:.1f} epochs), {format_duration(steps * each)}, then "
        f"the test, {format_duration(after)}"
    )
    return planned, tuple(Reason(name, value, "the time budget") for name, value in changes(config, planned)), limit
