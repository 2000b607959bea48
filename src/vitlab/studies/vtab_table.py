"""Table 9 and Fig. 2: the means of a VTAB result, as a table and as a figure, next to the paper's.

A mean is the plain one over the tasks, all 19 or a group's; there is none while a task is missing.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.data.vtab.tasks import GROUPS
from vitlab.display import format_table
from vitlab.inspection import figures, plots
from vitlab.io import write_bytes
from vitlab.panels import Panel, Series
from vitlab.runs.vtab import MEANS

PAPER = ("ViT-H/14, JFT", "ViT-L/16, JFT", "ViT-L/16, I21k")
TABLE9 = {
    "caltech101": (95.3, 95.4, 90.8),
    "cifar100": (85.5, 81.9, 84.1),
    "dtd": (75.2, 74.3, 74.1),
    "flowers102": (99.7, 99.7, 99.3),
    "pets": (97.2, 96.7, 92.7),
    "sun397": (65.0, 63.5, 61.0),
    "svhn": (88.9, 87.4, 80.9),
    "patch_camelyon": (83.3, 83.6, 82.5),
    "eurosat": (96.7, 96.5, 95.6),
    "resisc45": (91.4, 89.7, 85.2),
    "diabetic_retinopathy": (76.6, 77.1, 75.3),
    "clevr_count": (91.7, 86.4, 70.3),
    "clevr_distance": (63.8, 63.1, 56.1),
    "dmlab": (53.1, 49.7, 41.9),
    "dsprites_location": (79.4, 74.5, 74.7),
    "dsprites_orientation": (63.3, 60.5, 64.9),
    "kitti_distance": (84.5, 82.2, 79.9),
    "smallnorb_azimuth": (33.2, 36.2, 30.5),
    "smallnorb_elevation": (51.2, 51.1, 41.7),
}
"""Accuracies in percent of the models of PAPER."""


def printed_mean(model: int, group: str) -> float:
    """The mean of a model of PAPER over the tasks of a group, in percent."""
    return sum(TABLE9[name][model] for name in MEANS[group]) / len(MEANS[group])


def as_table(result: Mapping[str, Any]) -> str:
    """The tasks and the means next to Table 9's, and what is missing."""
    rows = []
    for name, row in result["tasks"].items():
        note = f"{row['skipped']} could not be read" if row["skipped"] else ""
        rows.append(_row(row["task"], row["group"], f"{row['images']:,}", row["accuracy"], TABLE9[name], note))
    for group, names in MEANS.items():
        mean = _mean(result, group)
        count = len(result["tasks"].keys() & set(names))
        note = f"{count} of its {len(names)} tasks are there" if mean is None else ""
        rows.append(_row(f"mean of {group}", "", "", mean, [printed_mean(i, group) for i in range(len(PAPER))], note))
    lines = [f"missing: {name}: {reason}" for name, reason in result["missing"].items()]
    return "\n".join([format_table(rows), *lines, f"scored on: {result['scored_on']}"])


def _row(
    task: str, group: str, images: str, accuracy: float | None, printed: Sequence[float], note: str
) -> dict[str, str]:
    ours = {"task": task, "group": group, "images": images, "accuracy": "" if accuracy is None else f"{accuracy:.2%}"}
    return ours | {model: f"{value:.1f}" for model, value in zip(PAPER, printed, strict=True)} | {"": note}


def _mean(result: Mapping[str, Any], group: str) -> float | None:
    """The mean of a group, or of all 19 tasks, which are no group; None while a task is missing."""
    return result["groups"].get(group, result["mean"])


def draw(result: Mapping[str, Any], name: str, path: Path) -> None:
    """Writes Fig. 2 of the test splits as a PNG, once a group is complete."""
    if result["scored_on"] == "test" and (panel := figure2(result, name)) is not None:
        write_bytes(path, figures.png(plots.panels([panel])))


def figure2(result: Mapping[str, Any], name: str) -> Panel | None:
    """Fig. 2: the means of the groups that are complete, of the checkpoint `name` and of the paper's models.

    None where no group is complete.
    """
    means = {group: mean for group in ("all 19", *GROUPS) if (mean := _mean(result, group)) is not None}
    if not means:
        return None
    ours = Series(name, range(len(means)), list(means.values()))
    return Panel("VTAB-1k", "", "mean accuracy", [ours, *printed_series(means, " (Table 9)")], ticks=list(means))


def printed_series(groups: Collection[str], suffix: str = "") -> list[Series]:
    """The means of these groups for each model of PAPER."""
    return [
        Series(f"{model}{suffix}", range(len(groups)), [printed_mean(i, group) / 100 for group in groups])
        for i, model in enumerate(PAPER)
    ]
