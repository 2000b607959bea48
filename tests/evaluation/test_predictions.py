"""predictions.csv: written, read back whole, and other files refused."""

import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vitlab.data.dataset import Dataset, Labels
from vitlab.errors import UserError
from vitlab.evaluation.predictions import CSV_COLUMNS, SET_COLUMNS, read_predictions, write_predictions
from vitlab.evaluation.result import Evaluation

CLASSES = ("a, b", '=say "c"', "d|e\nf")  # `=` is what spreadsheets compute
SETS = Labels.of_lists([[0], [1, 2], [2], [0, 1, 2], [1], [2, 0], [0]])


def made(sets: Labels | None = None) -> tuple[Evaluation, Dataset]:
    rng = np.random.default_rng(0)
    confidences, losses = rng.random((2, 7)).astype(np.float32)
    losses[3] = np.nan
    labels = sets.first_labels if sets else rng.integers(0, 3, 7)
    predictions, right, in_top5 = rng.integers(0, 3, 7), rng.random(7) < 0.5, rng.random(7) < 0.9
    indices = np.array([0, 1, 2, 4, 5, 6, 8])
    evaluation = Evaluation(CLASSES, indices, labels, predictions, confidences, losses, right, in_top5, 2, sets, 5)
    return evaluation, Dataset("made", "test", CLASSES, np.zeros(9, np.int64), pixels=np.zeros((9, 2, 2, 3), np.uint8))


@pytest.mark.parametrize(("sets", "predicted"), [(None, None), (SETS, None), (SETS, SETS.take(np.arange(7)[::-1]))])
def test_predictions_are_read_back_whole(sets: Labels | None, predicted: Labels | None, tmp_path: Path) -> None:
    evaluation, dataset = made(sets)
    evaluation = dataclasses.replace(evaluation, predicted_sets=predicted)
    write_predictions(tmp_path / "p.csv", evaluation, dataset)
    back, names = read_predictions(tmp_path / "p.csv", CLASSES)
    assert names == [f"made/test[{i}]" for i in evaluation.indices]
    for field in dataclasses.fields(Evaluation):
        mine, other = (
            getattr(each, field.name) for each in (dataclasses.replace(back, skipped=2, left_out=5), evaluation)
        )
        if isinstance(mine, Labels):
            mine, other = mine.values, other.values
        np.testing.assert_array_equal(mine, other, err_msg=field.name)
    for name in ("confidences", "losses"):
        assert getattr(back, name).dtype == np.float32
    assert ",=" not in (tmp_path / "p.csv").read_text()
    with (tmp_path / "p.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert tuple(head) == (CSV_COLUMNS if predicted is None else CSV_COLUMNS + SET_COLUMNS)
    assert [row[2].replace("'=", "=") for row in rows] == [CLASSES[label] for label in evaluation.predictions]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace("label", "marks", 1),
        lambda text: text.replace(",0\n", ",zero\n", 1),
        lambda text: text + "cut,off",
        lambda _: "",
        lambda text: text.replace("a, b", "another class"),
    ],
)
def test_other_files_are_errors(spoil: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    write_predictions(path, *made())
    path.write_text(spoil(path.read_text()))
    with pytest.raises(UserError, match=r"p\.csv is not a table of predictions"):
        read_predictions(path, CLASSES)
