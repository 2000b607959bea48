"""predictions.csv of a run: the prediction for each test image."""

import csv
import io
from pathlib import Path

import numpy as np

from vitlab.data.dataset import Dataset, Labels
from vitlab.errors import UserError
from vitlab.evaluation.result import Evaluation
from vitlab.io import from_cell, write_csv

CSV_COLUMNS = (
    *("image", "label", "prediction", "confidence", "correct", "top5", "loss"),
    *("label_index", "prediction_index", "index"),
)
"""label, prediction: names of classes, and their indices. Several labels are joined by | and their indices by spaces.
index: the image's position in the data set. `as_cells` writes the names."""
SET_COLUMNS = ("set_labels", "set_label_index")
"""Further ones where each image has several labels to be predicted: those that are set by their thresholds."""


def write_predictions(path: Path, evaluation: Evaluation, dataset: Dataset) -> None:
    """Writes the predictions for the images of `dataset`; the file is complete or does not appear."""
    from vitlab.data.exclude import image_id  # not needed to train

    classes = evaluation.classes
    predictions = evaluation.predictions.tolist()
    label_indices, label_names = _as_cells(evaluation.all_labels, classes)
    columns = {
        "image": [image_id(dataset, index) for index in evaluation.indices.tolist()],
        "label": label_names,
        "prediction": [classes[prediction] for prediction in predictions],
        "confidence": map(str, evaluation.confidences),
        "correct": evaluation.correct.astype(int),
        "top5": evaluation.in_top5.astype(int),
        "loss": map(str, evaluation.losses),
        "label_index": label_indices,
        "prediction_index": predictions,
        "index": evaluation.indices,
    }
    names = CSV_COLUMNS
    if evaluation.predicted_sets is not None:
        names += SET_COLUMNS
        columns["set_label_index"], columns["set_labels"] = _as_cells(evaluation.predicted_sets, classes)
    write_csv(path, names, zip(*(columns[name] for name in names), strict=True))


def _as_cells(labels: Labels, classes: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The indices and the names of each image's labels."""
    lists = [labels.of_image(row).tolist() for row in range(len(labels))]
    names = ["|".join(classes[label] for label in labels) for labels in lists]
    return [" ".join(map(str, labels)) for labels in lists], names


def _of_cells(cells: np.ndarray) -> Labels:
    return Labels.of_lists([[int(label) for label in cell.split()] for cell in cells])


def read_predictions(path: Path, classes: tuple[str, ...]) -> tuple[Evaluation, list[str]]:
    """The evaluation that `write_predictions` wrote, without its counts of other images; and the images' names.

    Raises UserError for any other file, and for other classes.
    """
    try:
        text = path.read_bytes().decode(errors="surrogateescape")
        header, *lines = ([*map(from_cell, row)] for row in csv.reader(io.StringIO(text, newline="")))
        if tuple(header) not in (CSV_COLUMNS, CSV_COLUMNS + SET_COLUMNS):
            raise ValueError(f"its columns are {','.join(header)[:60]!r}")
        columns = dict(zip(header, map(np.array, zip(*lines, strict=True)), strict=True))
        predictions = columns["prediction_index"].astype(np.int64)
        if [classes[prediction] for prediction in predictions] != columns["prediction"].tolist():
            raise ValueError("its classes are not the model's")
        sets = _of_cells(columns["label_index"])
        evaluation = Evaluation(
            classes,
            columns["index"].astype(np.int64),
            sets.first_labels,
            predictions,
            columns["confidence"].astype(np.float32),
            columns["loss"].astype(np.float32),
            correct=columns["correct"].astype(np.int64) > 0,
            in_top5=columns["top5"].astype(np.int64) > 0,
            skipped=0,
            label_sets=sets if sets.is_multi_label else None,
            predicted_sets=_of_cells(columns["set_label_index"]) if "set_labels" in columns else None,
        )
    except (ValueError, IndexError, csv.Error) as error:
        raise UserError(
            f"{path} is not a table of predictions ({error}); remove it, and the run is shown without it."
        ) from error
    return evaluation, columns["image"].tolist()
