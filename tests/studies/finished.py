"""Finished studies without training: results with given metrics, or those that docs/studies records."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitlab.models.config import ModelConfig
from vitlab.studies import STUDIES
from vitlab.studies.cost import model_of
from vitlab.studies.report import build_report
from vitlab.studies.spec import Point, Result, Results, Scale, Study

RECORDED = Path(__file__).parents[2] / "docs" / "studies"


@functools.cache
def points_and_models(name: str, scale: Scale) -> list[tuple[Point, ModelConfig]]:
    points = STUDIES[name].points(scale)
    by_name = {point.name: point for point in points}
    return [(point, model_of(point, by_name)) for point in points]


def finished(
    study: Study,
    accuracy: Callable[[Point], float],
    held_out: Callable[[Point], float] | None = None,
    scale: Scale = "tiny",
    examples: int = 30_000,
) -> Results:
    """Every point with this accuracy, few-shot accuracy and (unless given) held-out accuracy; it grows to them."""
    runs = []
    for point, model in points_and_models(study.name, scale):
        value, val = accuracy(point), (held_out or accuracy)(point)
        records = [
            {"step": step, "fewshot_5shot": value * step / 20, "val_accuracy": val * step / 20} for step in (10, 20)
        ]
        figures = {"accuracy": value, "loss": 2.5, "constant_loss": 4.25}
        figures |= {"fewshot_5shot": value, "fewshot_10shot": value}
        runs.append(Result(point, figures, records, round(examples * (point.config.data.part or 1)), model))
    return Results(tuple(runs))


def noise(point: Point, size: float = 1e-3) -> float:
    """A difference between the seeds that all points of a seed share."""
    return size * (point.config.seed - 1)


def report(
    study: Study, accuracy: Callable[[Point], float], held_out: Callable[[Point], float] | None = None, **settings: Any
) -> dict[str, Any]:
    """The report of points with these accuracies."""
    return build_report(study, settings.get("scale", "tiny"), finished(study, accuracy, held_out, **settings))


def verdicts(report: dict[str, Any]) -> list[str]:
    return [claim["verdict"] for claim in report["claims"]]


def recorded(name: str) -> tuple[dict[str, Any], Results]:
    """The recorded study.json, and its results; metrics.jsonl, which is not recorded, holds the final metrics."""
    study = json.loads((RECORDED / name / "study.json").read_text().replace("colour", "color"))
    known = {point.name: (point, model) for point, model in points_and_models(name, study["scale"])}
    runs = []
    for row in study["points"]:
        (point, model), figures = known[row["name"]], row["figures"]
        records = [{"step": 1, **figures, "val_accuracy": figures.get("accuracy", 0.0)}]
        runs.append(Result(point, figures, records, row["examples"], model))
    return study, Results(tuple(runs))
