"""Images, compute and hours of a study's runs before they start; and the longest study for a time budget.

`vitlab study --dry-run` prints `study_compute`, `--budget` calls `fit_study`; `vitlab plan` counts images likewise.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from vitlab.config import DataConfig
from vitlab.data.registry import DATASETS
from vitlab.display import format_duration, format_table
from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.studies.runner import StudyPlan
from vitlab.studies.spec import Scale, Study, StudyRun, exaflops, updates
from vitlab.train.clock import PLANNED_FRACTION, Clock
from vitlab.train.microbatch import measure_step
from vitlab.train.objectives import create_training_model
from vitlab.train.precision import choose_device

PAPER_IMAGES = {"shards:jft300m": 303_000_000, "shards:imagenet21k": 14_197_122, "folder:imagenet": 1_281_167}
"""Training images of the paper's data sets that the user provides (Sec. 4.1)."""
TFLOPS: dict[Scale, float] = {"tiny": 0.03, "small": 0.03, "paper": 400.0}
"""Assumed TFLOP/s: of a core with small models (docs/records/studies.md), of an H100 with large ones (40% of peak)."""
DIVISORS = (1, 2, 4, 8, 16)
"""For a time budget the steps of all runs may be divided by one of these."""
MIN_SEEDS = 2
"""Minimum number of seeds in a time budget: a single seed has no interval."""


def study_compute(plan: StudyPlan, tflops: float | None = None) -> dict[str, Any]:
    """Every run with its parameters, steps, images seen, exaFLOPs and hours, and their sums.

    Raises UserError where the length of a run depends on an unknown number of images.
    """
    rate = TFLOPS[plan.scale] if tflops is None else tflops
    if not rate > 0:
        raise UserError(f"tflops is {rate}; give the device's useful TFLOP/s, above 0.")
    by_name = {run.name: run for run in plan.runs}
    rows = []
    for run in plan.runs:
        examples = num_training_images(run.config.data)
        config = replace(run.config, model=model_of(run, by_name))
        steps = updates(config, examples)
        compute = exaflops(config, examples)
        row = {"point": run.name, "parameters": config.model.num_parameters, "steps": steps}
        row |= {"images": steps * config.batch_size, "exaflops": compute, "hours": compute * 1e6 / rate / 3600}
        rows.append(row | {"finished": plan.finished(run.name)})
    sums = {name: sum(row[name] for row in rows) for name in ("images", "exaflops", "hours")}
    open_hours = sum(row["hours"] for row in rows if not row["finished"])
    return {
        "study": plan.study,
        "scale": plan.scale,
        "tflops": rate,
        "points": rows,
        "sum": sums | {"points": len(rows), "open_hours": open_hours},
    }


def model_of(run: StudyRun, by_name: Mapping[str, StudyRun]) -> ModelConfig:
    """The model of a run, with a head for the classes of its data; a fine-tuning has `init_from`'s, resized."""
    config = run.config
    model = config.model
    if run.init_from is not None:
        model = replace(model_of(by_name[run.init_from], by_name), image_size=config.model.image_size)
        if isinstance(model, ViTConfig):  # fine-tuning drops the hidden layer of the head
            model = replace(model, representation_size=None)
    num_classes = len(config.data.classes or ()) or _num_classes(config.data.name)
    return replace(model, num_classes=num_classes) if num_classes and config.masking is None else model


def _num_classes(dataset: str) -> int | None:
    info = DATASETS.get(dataset)
    return info.num_classes if info else None


def num_training_images(data: DataConfig) -> int:
    """Approximate number of images of the training split, from the registry; raises UserError for other data sets."""
    if data.name in PAPER_IMAGES:
        whole = PAPER_IMAGES[data.name]
    elif (info := DATASETS.get(data.name)) and info.splits:
        trainval = info.splits.get("train", 0) + info.splits.get("val", 0)
        whole = {"trainval": trainval, **info.splits}.get(data.train_split, 0)
    else:
        known = ", ".join([*PAPER_IMAGES, *(name for name, info in DATASETS.items() if info.splits)])
        raise UserError(f"the number of images of {data.name} is not known before it is read; it is for {known}.")
    fraction = len(data.classes) / (_num_classes(data.name) or len(data.classes)) if data.classes else 1.0
    return max(1, round(whole * fraction * (data.subset_fraction or 1.0)))


def format_compute(report: Mapping[str, Any]) -> str:
    """`study_compute` for a terminal: a table of the runs, to three digits, and the sums as a sentence."""
    rows = [
        {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in row.items()}
        for row in report["points"]
    ]
    total = report["sum"]
    whole, still = (format_duration(3600 * total[name]) for name in ("hours", "open_hours"))
    return (
        f"{format_table(rows)}\n{total['points']} runs: {total['images']:,} images, {total['exaflops']:.3g} exaFLOPs "
        f"of training, {whole} of one {_unit(report['scale'])} at {report['tflops']:g} TFLOP/s ({still} still to do)"
    )


def describe_open_runs(plan: StudyPlan) -> str:
    """How many runs are unfinished, and about how long they take where that is known."""
    text = f"{len(plan.unfinished_runs)} of {len(plan.runs)} runs to train"
    with contextlib.suppress(UserError):  # an unknown number of images
        hours = study_compute(plan)["sum"]["open_hours"]
        text += f", about {format_duration(3600 * hours)} of one {_unit(plan.scale)}"
    return text if plan.scale == "tiny" else f"{text}; --scale tiny is a smoke test of minutes"


def _unit(scale: Scale) -> str:
    return "core" if scale in ("tiny", "small") else "device"


def fit_study(study: Study, make_plan: Callable[..., StudyPlan], clock: Clock, workers: int, device: str) -> StudyPlan:
    """`make_plan(seeds=, divisor=)` with the most steps, and then the most seeds, that fit into the time of the clock.

    Runs with all of their steps are the same as without a budget, so that the whole study reuses them. Raises UserError
    where even the shortest study does not fit, and for data sets of an unknown size.
    """
    tflops = _measured_tflops(make_plan(seeds=1), device)
    seconds = math.inf
    for divisor, seeds in itertools.product(DIVISORS, range(study.seeds, min(MIN_SEEDS, study.seeds) - 1, -1)):
        plan = make_plan(seeds=seeds, divisor=divisor)
        used_workers = min(workers, max(len(plan.unfinished_runs), 1))
        seconds = study_compute(plan, tflops)["sum"]["open_hours"] * 3600 / used_workers
        if seconds <= PLANNED_FRACTION * clock.left():
            return plan
    minutes = math.ceil((seconds / PLANNED_FRACTION + clock.seconds - clock.left()) / 60)
    raise UserError(
        f"{study.name} takes {format_duration(60 * minutes)} or more here, with two seeds and a {DIVISORS[-1]}th of "
        f"the steps; give --budget {minutes}m, or --scale tiny, a smoke test."
    )


def _measured_tflops(plan: StudyPlan, device_name: str) -> float:
    """Useful TFLOP/s of one process with one thread, for the run with the most compute."""
    rows = study_compute(plan)["points"]
    _, run = max(zip(rows, plan.runs, strict=True), key=lambda pair: pair[0]["exaflops"])
    device, threads = choose_device(device_name), torch.get_num_threads()
    model = create_training_model(run.config.model, run.config.masking, torch.Generator().manual_seed(0))
    try:
        torch.set_num_threads(1)
        seconds = measure_step(run.config, model, device).train_seconds
    finally:
        torch.set_num_threads(threads)
    one_image = replace(run.config, steps=1, epochs=None, batch_size=1)
    return exaflops(one_image, 1) * 1e6 / seconds
