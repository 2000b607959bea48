"""The answers to every image of a data set as a table in a file: for a spreadsheet, and to be read back whole."""

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
"""truth, answer: names of classes, several with | between them; labels, prediction: their numbers; index: the
image's place in the data set."""


def write_predictions(path: Path, found: Evaluation, dataset: Dataset) -> None:
    """Writes `found`, the answers to the images of `dataset`, as CSV; whole or not at all."""
    sets = found.label_sets or Labels(found.labels, np.arange(len(found.labels) + 1))
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for row, index in enumerate(found.indices.tolist()):
        labels = sets.of(row).tolist()
        prediction = int(found.predictions[row])
        table.writerow((
            image_id(dataset, index),
            "|".join(found.classes[label] for label in labels),
            found.classes[prediction],
            str(found.confidences[row]),
            int(found.right[row]),
            int(found.in_top5[row]),
            str(found.losses[row]),
            " ".join(map(str, labels)),
            prediction,
            index,
        ))  # fmt: skip
    with replacing_file(path) as file:
        file.write(text.getvalue().encode(errors="surrogateescape"))  # names of files may hold bytes that are no text


def read_predictions(path: Path, classes: tuple[str, ...]) -> tuple[Evaluation, list[str]]:
    """What `write_predictions` wrote, but for the counts of images without an answer; and the images' names.

    Raises ValueError where the file is something else, or of other classes.
    """
    try:
        text = path.read_bytes().decode(errors="surrogateescape")
        head, *lines = csv.reader(io.StringIO(text, newline=""))
        if tuple(head) != COLUMNS:
            raise UserError(f"its head is {','.join(head)[:60]!r}")
        rows = [dict(zip(COLUMNS, line, strict=True)) for line in lines]
        labels = [[int(label) for label in row["labels"].split()] for row in rows]
        indices, predictions = (
            np.array([int(row[name]) for row in rows], np.int64) for name in ("index", "prediction")
        )
        right, top5 = (np.array([int(row[name]) for row in rows], bool) for name in ("right", "top5"))
        confidences, losses = (
            np.array([float(row[name]) for row in rows], np.float32) for name in ("confidence", "loss")
        )
        named = all(classes[int(row["prediction"])] == row["answer"] for row in rows)
    except (ValueError, IndexError, csv.Error) as error:
        raise UserError(
            f"{path} is not a table of predictions ({error}); remove it, and the run is shown without it."
        ) from error
    if not named:
        raise UserError(f"{path} is of other classes than the model's; remove it, and the run is shown without it.")
    sets = Labels.of_lists(labels)
    found = Evaluation(
        classes, indices, sets.firsts, predictions, confidences, losses, right, top5, skipped=0,
        label_sets=sets if len(sets.values) > len(rows) else None,
    )  # fmt: skip
    return found, [row["image"] for row in rows]
