"""predictions.csv of a run: the prediction for each test image."""

import csv
import io
from pathlib import Path

import numpy as np

from vitlab.data.dataset import Dataset, Labels
from vitlab.errors import UserError
from vitlab.evaluation.accuracy import Evaluation
from vitlab.io import from_cell, write_csv

CSV_COLUMNS = (
    *("image", "label", "prediction", "confidence", "correct", "top5", "loss"),
    *("label_index", "prediction_index", "index"),
)
"""label, prediction: names of classes, and their indices. Several labels are joined by | and their indices by spaces.
index: the image's position in the data set. Names are written as by `as_cells`."""


def write_predictions(path: Path, evaluation: Evaluation, dataset: Dataset) -> None:
    """Writes the predictions for the images of `dataset`; the file is complete or does not appear."""
    from vitlab.data.exclude import image_id  # not needed to train

    classes, predictions = evaluation.classes, evaluation.predictions.tolist()
    labels = [evaluation.all_labels.of(row).tolist() for row in range(len(predictions))]
    columns = {
        "image": [image_id(dataset, index) for index in evaluation.indices.tolist()],
        "label": ["|".join(classes[label] for label in several) for several in labels],
        "prediction": [classes[prediction] for prediction in predictions],
        "confidence": map(str, evaluation.confidences),
        "correct": evaluation.correct.astype(int),
        "top5": evaluation.in_top5.astype(int),
        "loss": map(str, evaluation.losses),
        "label_index": [" ".join(map(str, several)) for several in labels],
        "prediction_index": predictions,
        "index": evaluation.indices,
    }
    write_csv(path, CSV_COLUMNS, zip(*(columns[name] for name in CSV_COLUMNS), strict=True))


def read_predictions(path: Path, classes: tuple[str, ...]) -> tuple[Evaluation, list[str]]:
    """The evaluation that `write_predictions` wrote, without its counts of other images; and the images' names.

    Raises UserError for any other file, and for other classes.
    """
    try:
        text = path.read_bytes().decode(errors="surrogateescape")
        header, *lines = ([*map(from_cell, row)] for row in csv.reader(io.StringIO(text, newline="")))
        if tuple(header) != CSV_COLUMNS:
            raise ValueError(f"its columns are {','.join(header)[:60]!r}")
        columns = dict(zip(CSV_COLUMNS, map(np.array, zip(*lines, strict=True)), strict=True))
        predictions = columns["prediction_index"].astype(np.int64)
        if [classes[prediction] for prediction in predictions] != columns["prediction"].tolist():
            raise ValueError("its classes are not the model's")
        sets = Labels.of_lists([[int(label) for label in cell.split()] for cell in columns["label_index"]])
        evaluation = Evaluation(
            classes,
            columns["index"].astype(np.int64),
            sets.firsts,
            predictions,
            columns["confidence"].astype(np.float32),
            columns["loss"].astype(np.float32),
            correct=columns["correct"].astype(np.int64) > 0,
            in_top5=columns["top5"].astype(np.int64) > 0,
            skipped=0,
            label_sets=sets if sets.several else None,
        )
    except (ValueError, IndexError, csv.Error) as error:
        raise UserError(
            f"{path} is not a table of predictions ({error}); remove it, and the run is shown without it."
        ) from error
    return evaluation, columns["image"].tolist()
