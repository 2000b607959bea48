"""What a study costs before it runs: images, compute and hours of every run."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitlab.config import DataConfig
from vitlab.data.registry import DATASETS
from vitlab.display import format_table
from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.studies.runner import StudyPlan
from vitlab.studies.spec import Scale, StudyRun, exaflops, updates

IMAGES = {"shards:jft300m": 303_000_000, "shards:imagenet21k": 14_197_122, "folder:imagenet": 1_281_167}
"""Training images of the paper's data sets that the user provides (Sec. 4.1)."""
TFLOPS: dict[Scale, float] = {"tiny": 0.03, "small": 0.03, "paper": 400.0}
"""Assumed useful TFLOP/s: of one CPU core with small models (docs/records/studies.md), of one H100 with large ones
(400 is 40 % of its peak)."""


def cost(plan: StudyPlan, tflops: float | None = None) -> dict[str, Any]:
    """Every run with its parameters, steps, images seen, exaFLOPs and hours, and their sums.

    Raises UserError where the length of a run depends on an unknown number of images.
    """
    rate = TFLOPS[plan.scale] if tflops is None else tflops
    if not rate > 0:
        raise UserError(f"tflops is {rate}; give the device's useful TFLOP/s, above 0.")
    by_name = {run.name: run for run in plan.runs}
    runs = []
    for run in plan.runs:
        examples, model = images(run.config.data), model_of(run, by_name)
        config = replace(run.config, model=model)
        work, steps = exaflops(config, examples), updates(config, examples)
        row = {"point": run.name, "parameters": model.num_parameters, "steps": steps}
        row |= {"images": steps * config.batch_size, "exaflops": work, "hours": work * 1e6 / rate / 3600}
        runs.append(row | {"finished": plan.finished(run.name)})
    sums = {name: sum(row[name] for row in runs) for name in ("images", "exaflops", "hours")}
    open_hours = sum(row["hours"] for row in runs if not row["finished"])
    return {
        "study": plan.study,
        "scale": plan.scale,
        "tflops": rate,
        "points": runs,
        "sum": sums | {"points": len(runs), "open_hours": open_hours},
    }


def model_of(run: StudyRun, by_name: Mapping[str, StudyRun]) -> ModelConfig:
    """The model of a run, with a head for the classes of its data; a fine-tuning has `init_from`'s, resized."""
    config = run.config
    model = config.model
    if run.init_from is not None:
        model = replace(model_of(by_name[run.init_from], by_name), image_size=config.model.image_size)
        if isinstance(model, ViTConfig):  # fine-tuning drops the hidden layer of the head
            model = replace(model, representation_size=None)
    classes = len(config.data.classes or ()) or _classes(config.data.name)
    return replace(model, num_classes=classes) if classes and config.masking is None else model


def _classes(name: str) -> int | None:
    info = DATASETS.get(name)
    return info.num_classes if info else None


def images(data: DataConfig) -> int:
    """Approximate number of images of the training split, from the registry; raises UserError for other data sets."""
    if data.name in IMAGES:
        whole = IMAGES[data.name]
    elif (info := DATASETS.get(data.name)) and info.splits:
        trainval = info.splits.get("train", 0) + info.splits.get("val", 0)
        whole = ({"trainval": trainval} | dict(info.splits)).get(data.train_split, 0)
    else:
        known = ", ".join([*IMAGES, *(name for name, info in DATASETS.items() if info.splits)])
        raise UserError(f"the number of images of {data.name} is not known before it is read; it is for {known}.")
    fraction = len(data.classes) / (_classes(data.name) or len(data.classes)) if data.classes else 1.0
    return max(1, round(whole * fraction * (data.subset_fraction or 1.0)))


def as_text(report: Mapping[str, Any]) -> str:
    """A table of the runs, to three digits, and the sums as a sentence."""
    rows = [
        {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in row.items()}
        for row in report["points"]
    ]
    total = report["sum"]
    return (
        f"{format_table(rows)}\n{total['points']} runs: {total['images']:,} images, {total['exaflops']:.3g} exaFLOPs "
        f"of training, {total['hours']:.3g} hours of one {_unit(report['scale'])} at {report['tflops']:g} TFLOP/s "
        f"({total['open_hours']:.3g} of them still to do)"
    )


def summary(plan: StudyPlan) -> str:
    """The unfinished runs, and about how long they take where that is known."""
    text = f"{len(plan.unfinished_runs)} of {len(plan.runs)} runs to train"
    with contextlib.suppress(UserError):  # an unknown number of images
        text += f", about {cost(plan)['sum']['open_hours']:.1f} hours of one {_unit(plan.scale)}"
    return text if plan.scale == "tiny" else f"{text}; --scale tiny is a smoke test of minutes"


def _unit(scale: Scale) -> str:
    return "core" if scale in ("tiny", "small") else "device"
