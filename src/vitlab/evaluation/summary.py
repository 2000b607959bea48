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


def format_evaluation(record: dict[str, Any]) -> str:
    """`Evaluation.record()` as text: a table of the classes with images or predictions, then the metrics."""

    def cell(name: str, value: Any) -> Any:
        if name == "class":
            return quoted(value)
        if name == "threshold":
            return f"{value:.3f}"
        return "-" if value is None else value if name == "images" else f"{value:.1%}"

    rows = [row for row in record["per_class"] if row["images"] or row["precision"] is not None]
    columns = ("class", "images", "recall", "accuracy", "precision")
    if multi_label := "f1" in record:
        columns = ("class", "images", "average_precision", "threshold", "precision", "recall", "f1")
    titles = {name: name.replace("_", " ") for name in columns}
    table = format_table([{titles[name]: cell(name, row[name]) for name in columns if name in row} for row in rows])
    tested, classes = sum(row["images"] > 0 for row in rows), len(record["per_class"])
    parts = [f"{record['images']:,}" + (f" of {record['full_size']:,}" if "full_size" in record else "") + " images"]
    if tested < classes:
        parts[0] += f" of {tested} of the {classes} classes"
    numbers = {"accuracy": ".2%", "balanced_accuracy": ".2%", "loss": ".4f", "top5": ".2%"}
    if "mean_average_precision" in record:
        numbers = {"mean_average_precision": ".2%", "f1": ".2%", "exact_match": ".2%", "loss": ".4f"}
    notes = {"skipped": "could not be read", "left_out": "have no label here"}
    present = {name: style for name, style in numbers.items() if record.get(name) is not None}
    parts += [f"{name.replace('_', ' ')} {record[name]:{style}}" for name, style in present.items()]
    if "accuracy" in numbers:
        parts[1] += " (95% interval {:.2%} to {:.2%})".format(*record["accuracy_interval"])
    parts += [f"{record[name]} {note}" for name, note in notes.items() if record.get(name)]
    if record.get("computed_in", "float32") != "float32":
        parts.append(f"computed in {record['computed_in']}")
    thresholds = f"\nthresholds: {record['thresholds']}" if multi_label else ""
    return f"{table}\n{' · '.join(parts)}{thresholds}"
