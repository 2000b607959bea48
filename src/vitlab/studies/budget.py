"""A study in a given time: as many seeds as fit, and shorter runs where two seeds do not.

Runs of all steps are those of the study without a budget: a later, longer study goes on from them.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from vitlab.errors import UserError
from vitlab.studies.cost import cost
from vitlab.studies.runner import StudyPlan
from vitlab.studies.spec import Study, exaflops
from vitlab.train.clock import PLANNED_FRACTION, Clock
from vitlab.train.microbatch import measure_step
from vitlab.train.objectives import create_training_model
from vitlab.train.precision import choose_device

DIVISORS = (1, 2, 4, 8, 16)
"""The steps of all runs may be divided by one of these."""
MIN_SEEDS = 2
"""A single seed has no interval."""


def fit_study(
    study: Study, make_plan: Callable[[int, int], StudyPlan], clock: Clock, processes: int, device: str
) -> StudyPlan:
    """`make_plan(seeds, divisor)` with the most steps and then the most seeds that fit.

    Raises UserError where even the shortest study does not, and for data sets of an unknown size.
    """
    needed, tflops = math.inf, _measured_tflops(make_plan(1, 1), device)
    for plan in _plans(study, make_plan):
        needed = cost(plan, tflops)["sum"]["open_hours"] * 3600 / min(processes, max(len(plan.unfinished_runs), 1))
        if needed <= PLANNED_FRACTION * clock.left():
            return plan
    minutes = math.ceil((needed / PLANNED_FRACTION + clock.seconds - clock.left()) / 60)
    raise UserError(
        f"{study.name} takes {minutes} minutes or more here, with two seeds and a {DIVISORS[-1]}th of the steps; give "
        f"--budget {minutes}m, or --scale tiny, a smoke test."
    )


def _plans(study: Study, make_plan: Callable[[int, int], StudyPlan]) -> Iterator[StudyPlan]:
    """From the longest study to the shortest."""
    for divisor in DIVISORS:
        for seeds in range(study.seeds, min(MIN_SEEDS, study.seeds) - 1, -1):
            yield make_plan(seeds, divisor)


def _measured_tflops(plan: StudyPlan, device_name: str) -> float:
    """Useful TFLOP/s of one process with one thread, for the run with the most compute."""
    rows = cost(plan)["points"]
    run = plan.runs[max(range(len(rows)), key=lambda number: rows[number]["exaflops"])]
    device, threads = choose_device(device_name), torch.get_num_threads()
    model = create_training_model(run.config.model, run.config.masking, torch.Generator().manual_seed(0))
    try:
        torch.set_num_threads(1)
        seconds = measure_step(run.config, model, device).train_seconds
    finally:
        torch.set_num_threads(threads)
    one_image = replace(run.config, steps=1, epochs=None, batch_size=1)
    return exaflops(one_image, 1) * 1e6 / seconds
