"""The predictions for a whole data set in a CSV file, for spreadsheets and to be read back."""

import csv
import io
from pathlib import Path

import numpy as np

from vitlab.data.dataset import Dataset, Labels
from vitlab.data.exclude import image_id
from vitlab.errors import UserError
from vitlab.evaluate.accuracy import Evaluation
from vitlab.io import replacing_file

COLUMNS = ("image", "truth", "answer", "confidence", "right", "top5", "loss", "labels", "prediction", "index")
"""truth, answer: names of the label and the predicted class; labels, prediction: their numbers. Several labels are
joined by | and spaces. index: the image's position in the data set."""


def write_predictions(path: Path, evaluation: Evaluation, dataset: Dataset) -> None:
    """Writes the predictions for the images of `dataset`; the file is complete or does not appear."""
    sets = evaluation.label_sets or Labels(evaluation.labels, np.arange(len(evaluation.labels) + 1))
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for row, index in enumerate(evaluation.indices.tolist()):
        labels = sets.of(row).tolist()
        prediction = int(evaluation.predictions[row])
        table.writerow((
            image_id(dataset, index),
            "|".join(evaluation.classes[label] for label in labels),
            evaluation.classes[prediction],
            str(evaluation.confidences[row]),
            int(evaluation.right[row]),
            int(evaluation.in_top5[row]),
            str(evaluation.losses[row]),
            " ".join(map(str, labels)),
            prediction,
            index,
        ))  # fmt: skip
    with replacing_file(path) as file:
        file.write(text.getvalue().encode(errors="surrogateescape"))  # file names may hold any bytes


def read_predictions(path: Path, classes: tuple[str, ...]) -> tuple[Evaluation, list[str]]:
    """The evaluation that `write_predictions` wrote, without its counts of other images; and the images' names.

    Raises UserError for any other file, and for other classes.
    """
    try:
        text = path.read_bytes().decode(errors="surrogateescape")
        head, *lines = csv.reader(io.StringIO(text, newline=""))
        head = ["image" if name == "picture" else name for name in head]  # its name in earlier versions
        if tuple(head) != COLUMNS:
            raise ValueError(f"its columns are {','.join(head)[:60]!r}")
        columns: dict[str, tuple[str, ...]] = dict(zip(head, zip(*lines, strict=True), strict=True))

        def numbers(name: str, dtype: type) -> np.ndarray:
            return np.array([float(cell) if dtype is np.float32 else int(cell) for cell in columns[name]], dtype)

        predictions = numbers("prediction", np.int64)
        if [classes[prediction] for prediction in predictions] != list(columns["answer"]):
            raise ValueError("its classes are not the model's")
        sets = Labels.of_lists([[int(label) for label in cell.split()] for cell in columns["labels"]])
        evaluation = Evaluation(
            classes, numbers("index", np.int64), sets.firsts, predictions, numbers("confidence", np.float32),
            numbers("loss", np.float32), numbers("right", np.bool_), numbers("top5", np.bool_), skipped=0,
            label_sets=sets if len(sets.values) > len(lines) else None,
        )  # fmt: skip
    except (ValueError, IndexError, csv.Error) as error:
        raise UserError(
            f"{path} is not a table of predictions ({error}); remove it, and the run is shown without it."
        ) from error
    return evaluation, list(columns["image"])
