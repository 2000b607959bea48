"""Tables 2 and 5: fine-tuning results next to the paper's on the same data sets, a row for each checkpoint.

Deviation: the paper prints a column for each model; here it is a row, for as many checkpoints as there are.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.checksums import find_corrupt_files
from vitlab.display import format_table
from vitlab.errors import UserError
from vitlab.io import read_json
from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.models.image_size import nearest_image_size
from vitlab.recipes.finetune import TABLE4
from vitlab.settings import from_dict, read_fields

NAMES = {
    "imagenet": "ImageNet",
    "imagenet_real": "ReaL",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "pets": "Pets",
    "flowers102": "Flowers",
    "vtab": "VTAB",
}
"""Data set -> its column."""
CORE_DAYS = "TPUv3-core-days"


class FinishedRun(NamedTuple):
    """A fine-tuned checkpoint, and its accuracy in percent, with the standard deviation over several runs."""

    checkpoint: str
    dataset: str
    accuracy: str
    folder: Path


class PaperTable(NamedTuple):
    """A table of the paper: its columns and the rows that it prints, in percent."""

    source: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[str]]
    imagenet: Mapping[str, Any]
    """Image size and Polyak averaging on ImageNet."""


def _rows(text: str) -> dict[str, list[str]]:
    """Parses lines of "name: value value ..."."""
    lines = [line.split(": ") for line in text.strip().splitlines()]
    return {name.strip(): values.split() for name, values in lines}


TABLES = {
    "table2": PaperTable(
        "Table 2: fine-tuned at 384 pixels, on ImageNet at 512 (H/14: 518) with Polyak averaging; three runs",
        ("ImageNet", "ReaL", "CIFAR-10", "CIFAR-100", "Pets", "Flowers", "VTAB", CORE_DAYS),
        _rows("""
            ViT-H/14, JFT: 88.55±0.04 90.72±0.05 99.50±0.06 94.55±0.04 97.56±0.03 99.68±0.02 77.63±0.23 2.5k
            ViT-L/16, JFT: 87.76±0.03 90.54±0.03 99.42±0.03 93.90±0.05 97.32±0.11 99.74±0.00 76.28±0.46 0.68k
            ViT-L/16, I21k: 85.30±0.02 88.62±0.05 99.15±0.03 93.25±0.05 94.67±0.15 99.61±0.02 72.72±0.21 0.23k
            BiT-L, R152x4: 87.54±0.02 90.54 99.37±0.06 93.51±0.08 96.62±0.23 99.63±0.03 76.29±1.70 9.9k
            Noisy Student, EfficientNet-L2: 88.4/88.5* 90.55 - - - - - 12.3k
        """),
        {"image_size": 512, "average_decay": 0.9999},
    ),
    "table5": PaperTable(
        "Table 5: fine-tuned at 384 pixels, without Polyak averaging",
        ("CIFAR-10", "CIFAR-100", "ImageNet", "ReaL", "Flowers", "Pets"),
        _rows("""
            ViT-B/16, ImageNet: 98.13 87.13 77.91 83.57 89.49 93.81
            ViT-B/32, ImageNet: 97.77 86.31 73.38 79.56 85.43 92.04
            ViT-L/16, ImageNet: 97.86 86.35 76.53 82.19 89.66 93.64
            ViT-L/32, ImageNet: 97.94 87.07 71.16 77.83 86.36 91.35
            ViT-B/16, I21k: 98.95 91.67 83.97 88.35 99.38 94.43
            ViT-B/32, I21k: 98.79 91.97 81.28 86.63 99.11 93.02
            ViT-L/16, I21k: 99.16 93.44 85.15 88.40 99.61 94.73
            ViT-L/32, I21k: 99.13 93.04 80.99 85.65 99.19 93.09
            ViT-H/14, I21k: 99.27 93.82 85.13 88.70 99.51 94.82
            ViT-B/16, JFT: 99.00 91.87 84.15 88.85 99.56 95.80
            ViT-B/32, JFT: 98.61 90.49 80.73 86.27 99.27 93.40
            ViT-L/16, JFT: 99.38 94.04 87.12 89.99 99.56 97.11
            ViT-L/32, JFT: 99.19 92.52 84.37 88.28 99.45 95.83
            ViT-H/14, JFT: 99.50 94.55 88.04 90.33 99.68 97.56
        """),
        {"image_size": 384, "average_decay": None},
    ),
}


def layout(name: str, folders: Iterable[Path]) -> dict[str, Any]:
    """The table `name` with a row for each checkpoint of the finished runs in `folders`, then the paper's.

    Each folder was written by `vitlab finetune` or `vitlab vtab`. A file, for the ReaL column, holds what `vitlab
    evaluate RUN --dataset imagenet_real --json` prints. Raises UserError for a folder without a result, a data set that
    is not in the table, another protocol than the table's, and two results of one checkpoint on one data set.
    """
    table = TABLES[name]
    ours: dict[str, dict[str, str]] = {}
    for folder in folders:
        run = _read_evaluation(folder) if folder.is_file() else _read_run(folder)
        column = _column(run.dataset)
        if column not in table.columns:
            columns = ", ".join(column for column in table.columns if column != CORE_DAYS)
            raise UserError(f"{folder} is a result on {run.dataset}; {name} has {columns}.")
        row = ours.setdefault(run.checkpoint, {})
        if column in row:
            raise UserError(f"{folder} is a second result of {run.checkpoint} on {column}; give one folder for each.")
        _check_protocol(run.folder, name, column)
        row[column] = run.accuracy
    printed = {model: dict(zip(table.columns, row, strict=True)) for model, row in table.rows.items()}
    rows = [{"model": model, "": "here", **row} for model, row in ours.items()]
    rows += [{"model": model, "": "paper", **row} for model, row in printed.items()]
    return {"source": table.source, "rows": [dict.fromkeys(("model", "", *table.columns), "") | row for row in rows]}


def _column(dataset: str) -> str:
    return NAMES.get(dataset.rpartition("/")[2].rpartition(":")[2], dataset)


def _read_run(folder: Path) -> FinishedRun:
    """The result of a run of `vitlab finetune`, the mean over its runs, or of `vitlab vtab`."""
    files = ("config.json", "result.json")
    if not all((folder / file).is_file() for file in files) or find_corrupt_files(folder, files):
        raise UserError(f"{folder} has no finished run; give folders of `vitlab finetune` or `vitlab vtab`.")
    settings, result = (json.loads((folder / file).read_bytes()) for file in files)
    checkpoint = str(settings.get("start")).partition(" sha256:")[0]
    if settings["command"] == "vtab":
        if settings["select"]:
            raise UserError(f"{folder} was scored on the 200 images of --select; the table has the test parts.")
        if result["mean"] is None:
            raise UserError(f"{folder} has no mean of the 19 tasks of VTAB: {len(result['missing'])} are missing.")
        return FinishedRun(checkpoint, "vtab", f"{100 * result['mean']:.2f}", folder)
    if settings["command"] != "finetune":
        raise UserError(f"{folder} is a run of `vitlab {settings['command']}`; give runs of finetune or vtab.")
    accuracy = f"{100 * result.get('accuracy_mean', result['test']['accuracy']):.2f}"
    if sd := result.get("accuracy_sd"):
        accuracy += f"±{100 * sd:.2f}"
    return FinishedRun(checkpoint, settings["data"]["name"], accuracy, folder)


def _read_evaluation(file: Path) -> FinishedRun:
    """The result that `vitlab evaluate --json` printed for the model of a run, which is the folder."""
    fields = {"checkpoint": str, "dataset": str, "split": str, "accuracy": float}
    record = read_fields(read_json(file), fields, str(file))
    if any(record.get(name) is None for name in fields):
        raise UserError(f"{file} is not what `vitlab evaluate RUN --dataset imagenet_real --json > {file}` writes.")
    if record["split"] != "test" or "full_size" in record:
        raise UserError(f"{file} has a part of the test images; the table has all of them.")
    run = _read_run(Path(record["checkpoint"]))
    return run._replace(dataset=record["dataset"], accuracy=f"{100 * record['accuracy']:.2f}")


def _check_protocol(folder: Path, table: str, column: str) -> None:
    """Raises UserError for a run that was not fine-tuned as the column's runs (Table 4; `PaperTable.imagenet`)."""
    settings = json.loads((folder / "config.json").read_bytes())
    is_vtab = settings["command"] == "vtab"
    tuned_on = "VTAB" if is_vtab else _column(settings["data"]["name"])
    expected = "ImageNet" if column == "ReaL" else column
    if tuned_on != expected:
        raise UserError(f"{folder} was fine-tuned on {tuned_on}; the {column} of {table} has runs on {expected}.")
    dataset = next(dataset for dataset, name in NAMES.items() if name == tuned_on)
    _, _, steps, _ = TABLE4["vtab:TASK" if is_vtab else dataset]
    required: dict[str, Any] = {"steps": steps, "batch_size": 512, "image_size": 384, "average_decay": None}
    if dataset == "imagenet":
        required |= TABLES[table].imagenet
    model = from_dict(ModelConfig, settings["model"])
    if isinstance(model, ViTConfig):
        required["image_size"] = nearest_image_size(required["image_size"], model.patch_size, model.stem)
    actual = {name: settings.get(name) for name in required}
    actual["image_size"] = (settings["image_size"] or 384) if is_vtab else model.image_size
    if wrong := [f"{name} is {actual[name]}, not {value}" for name, value in required.items() if actual[name] != value]:
        recipe = {"flowers102": "flowers"}.get(dataset, dataset)
        command = "vitlab vtab CHECKPOINT" if is_vtab else f"vitlab finetune CHECKPOINT --recipe {recipe}"
        if dataset == "imagenet" and table == "table5":
            command += " --image-size 384 --average-decay None"
        raise UserError(f"{folder} does not follow the protocol of {table}: {'; '.join(wrong)}. `{command}` does.")


def as_text(table: Mapping[str, Any]) -> str:
    """The table for a terminal."""
    return f"{format_table(table['rows'])}\n{table['source']}."
