"""What a study costs, told before it is run: images, compute and hours of every point."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vitlab.config import DataConfig
from vitlab.data.registry import DATASETS
from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.studies.engine import Plan
from vitlab.studies.study import Point, Scale, exaflops, updates

IMAGES = {"shards:jft300m": 303_000_000, "shards:imagenet21k": 14_197_122, "folder:imagenet": 1_281_167}
"""Training images of the paper's sets that the user brings (Sec. 4.1)."""
TFLOPS: dict[Scale, float] = {"tiny": 0.03, "gpu": 100.0, "paper": 400.0}
"""Useful TFLOP/s taken for granted: of one CPU core with small models (measured: docs/reproduce.md), of one H100 with
small and with large ones (assumed; 400 is 40 % of its peak)."""


def cost(plan: Plan, tflops: float | None = None) -> dict[str, Any]:
    """Every point with its parameters, steps, images seen, exaFLOPs and hours, and their sums.

    Raises ValueError where the number of images decides the length of a run and is not known.
    """
    rate = TFLOPS[plan.scale] if tflops is None else tflops
    if not rate > 0:
        raise UserError(f"tflops is {rate}; give the device's useful TFLOP/s, more than 0.")
    by_name = {point.name: point for point in plan.points}
    points = [_row(point, by_name, rate) | {"finished": plan.finished(point.name)} for point in plan.points]
    sums = {name: sum(row[name] for row in points) for name in ("images", "exaflops", "hours")}
    open_hours = sum(row["hours"] for row in points if not row["finished"])
    return {
        "study": plan.study.name,
        "scale": plan.scale,
        "tflops": rate,
        "points": points,
        "sum": sums | {"points": len(points), "open_hours": open_hours},
    }


def _row(point: Point, by_name: Mapping[str, Point], tflops: float) -> dict[str, Any]:
    examples, model = images(point.config.data), model_of(point, by_name)
    config = dataclasses.replace(point.config, model=model)
    work, steps = exaflops(config, examples), updates(config, examples)
    return {
        "point": point.name,
        "parameters": model.num_parameters,
        "steps": steps,
        "images": steps * config.batch_size,
        "exaflops": work,
        "hours": work * 1e18 / (tflops * 1e12) / 3600,
    }


def model_of(point: Point, by_name: Mapping[str, Point]) -> ModelConfig:
    """What the point runs, with a head for its data's classes; a fine-tuning runs the model of the point that it starts
    from, at its own size."""
    config = point.config
    if point.start is None:
        model = config.model
    else:
        start = model_of(by_name[point.start], by_name)
        model = dataclasses.replace(start, image_size=config.model.image_size)
        if isinstance(model, ViTConfig):  # pre-training's hidden head layer is dropped
            model = dataclasses.replace(model, representation_size=None)
    classes = len(config.data.classes or ()) or _classes(config.data.name)
    return dataclasses.replace(model, num_classes=classes) if classes and config.masking is None else model


def _classes(name: str) -> int | None:
    info = DATASETS.get(name)
    return (info.num_classes or len(info.classes) or None) if info else None


def images(data: DataConfig) -> int:
    """About how many images a training split has, from the table alone: nothing is read.

    Raises ValueError for a set that is not in the table.
    """
    if data.name in IMAGES:
        whole = IMAGES[data.name]
    elif (info := DATASETS.get(data.name)) and info.splits:
        splits = info.splits
        whole = ({"trainval": splits.get("train", 0) + splits.get("val", 0)} | dict(splits)).get(data.train_split, 0)
    else:
        raise UserError(
            f"how many images {data.name} has is not known before it is read; the cost can be told for "
            f"{', '.join([*IMAGES, *(name for name, info in DATASETS.items() if info.splits)])}."
        )
    share = len(data.classes) / (_classes(data.name) or len(data.classes)) if data.classes else 1.0
    return max(1, round(whole * share * (data.part or 1.0)))


def rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The points for a table, to three digits."""
    return [
        {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in row.items()}
        for row in found["points"]
    ]


def summary(found: Mapping[str, Any]) -> str:
    """The sum, to be read by a person."""
    total, unit = found["sum"], "core" if found["scale"] == "tiny" else "device"
    return (
        f"{total['points']} points: {total['images']:,} images, {total['exaflops']:.3g} exaFLOPs of training, "
        f"{total['hours']:.3g} hours of one {unit} at {found['tflops']:g} TFLOP/s ({total['open_hours']:.3g} of them "
        f"still to do)"
    )
