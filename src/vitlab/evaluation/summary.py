"""The record of an evaluation as text."""

from collections.abc import Mapping
from typing import Any

from vitlab.display import format_table
from vitlab.errors import quoted


def headline(record: Mapping[str, Any]) -> str:
    """The main metric of a record as text: mean average precision of several labels, else accuracy."""
    # One label that all images have makes the accuracy 100 %.
    precision = record.get("mean_average_precision")
    return f"accuracy {record['accuracy']:.2%}" if precision is None else f"mean average precision {precision:.2%}"


def format_evaluation(record: Mapping[str, Any]) -> str:
    """`Evaluation.record()` as text: a table of the classes with images or predictions, then the metrics."""
    return _format_multi_label(record) if "f1" in record else _format_single_label(record)


def _format_single_label(record: Mapping[str, Any]) -> str:
    low, high = record["accuracy_interval"]
    accuracy = f"accuracy {record['accuracy']:.2%} (95% interval {low:.2%} to {high:.2%})"
    metrics = [accuracy, *_metrics(record, "balanced_accuracy", "loss", "top5")]
    return _format(record, ("class", "images", "recall", "accuracy", "precision"), metrics)


def _format_multi_label(record: Mapping[str, Any]) -> str:
    columns = ("class", "images", "average_precision", "threshold", "precision", "recall", "f1")
    metrics = _metrics(record, "mean_average_precision", "f1", "exact_match", "loss")
    return f"{_format(record, columns, metrics)}\nthresholds: {record['thresholds']}"


def _metrics(record: Mapping[str, Any], *names: str) -> list[str]:
    present = [name for name in names if record.get(name) is not None]
    return [f"{name.replace('_', ' ')} {record[name]:{'.4f' if name == 'loss' else '.2%'}}" for name in present]


def _format(record: Mapping[str, Any], columns: tuple[str, ...], metrics: list[str]) -> str:
    """The table with those of `columns` that the classes have, and below it the images, `metrics` and notes."""
    rows = [row for row in record["per_class"] if row["images"] or row["precision"] is not None]
    names = [name for name in columns if rows and name in rows[0]]
    table = format_table([{name.replace("_", " "): _cell(name, row[name]) for name in names} for row in rows])
    total = f" of {record['full_size']:,}" if "full_size" in record else ""
    tested = sum(row["images"] > 0 for row in rows)
    classes = len(record["per_class"])
    of_classes = f" of {tested} of the {classes} classes" if tested < classes else ""
    notes = {"skipped": "could not be read", "left_out": "have no label here"}
    parts = [f"{record['images']:,}{total} images{of_classes}", *metrics]
    parts += [f"{record[name]} {note}" for name, note in notes.items() if record.get(name)]
    if record.get("computed_in", "float32") != "float32":
        parts.append(f"computed in {record['computed_in']}")
    return f"{table}\n{' · '.join(parts)}"


def _cell(column: str, value: Any) -> str | int:
    """`images` remains a number: the table aligns it and separates its thousands."""
    if column == "class":
        return quoted(value)
    if column == "threshold":
        return f"{value:.3f}"
    if column == "images":
        return value
    return "-" if value is None else f"{value:.1%}"
