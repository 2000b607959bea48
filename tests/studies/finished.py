"""Finished studies without training: results with given metrics, or those that docs/studies records."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitlab.studies import STUDIES
from vitlab.studies.cost import model_of
from vitlab.studies.point import Point, Result, Scale
from vitlab.studies.report import build_report, study_panels
from vitlab.studies.spec import Study
from vitlab.studies.statistics import Results

RECORDED = Path(__file__).parents[2] / "docs" / "studies"


def finished(
    study: Study,
    accuracy: Callable[[Point], float],
    held_out: Callable[[Point], float] | None = None,
    scale: Scale = "tiny",
    examples: int = 30_000,
) -> Results:
    """Every point with this accuracy, few-shot accuracy and (unless given) held-out accuracy; it grows to them."""
    points = study.points(scale)
    by_name = {point.name: point for point in points}
    runs = []
    for point in points:
        value, val = accuracy(point), (held_out or accuracy)(point)
        records = [
            {"step": step, "fewshot_5shot": value * step / 20, "val_accuracy": val * step / 20} for step in (10, 20)
        ]
        figures = {"accuracy": value, "loss": 2.5, "constant_loss": 4.25}
        figures |= {"fewshot_5shot": value, "fewshot_10shot": value}
        images = round(examples * (point.config.data.part or 1))
        runs.append(Result(point, figures, records, images, model_of(point, by_name)))
    return Results(tuple(runs))


def noise(point: Point, size: float = 1e-3) -> float:
    """A difference between the seeds that all points of a seed share."""
    return size * (point.config.seed - 1)


def report(study: Study, results: Results, scale: Scale = "tiny") -> dict[str, Any]:
    return build_report(study, scale, results, study_panels(study, results))


def recorded(name: str) -> tuple[dict[str, Any], Results]:
    """The recorded study.json, and its results; metrics.jsonl, which is not recorded, holds the final metrics."""
    text = (RECORDED / name / "study.json").read_text().replace("colour", "color")
    study = json.loads(text)
    by_name = {point.name: point for point in STUDIES[name].points(study["scale"])}
    runs = []
    for row in study["points"]:
        point, figures = by_name[row["name"]], row["figures"]
        records = [{"step": 1, **figures, "val_accuracy": figures.get("accuracy", 0.0)}]
        runs.append(Result(point, figures, records, row["examples"], model_of(point, by_name)))
    return study, Results(tuple(runs))
