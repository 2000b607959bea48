"""Predictions written and read back."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vitlab.data.dataset import Dataset, Labels
from vitlab.errors import UserError
from vitlab.evaluate.accuracy import Evaluation, evaluate
from vitlab.evaluate.predictions import COLUMNS, read_predictions, write_predictions
from vitlab.pipelines.pretrain import PREDICTIONS, Outcome

CLASSES = ("a, b", 'say "c"', "d|e\nf")


def made(sets: Labels | None = None) -> tuple[Evaluation, Dataset]:
    rng = np.random.default_rng(0)
    n = 7
    labels = sets.firsts if sets else rng.integers(0, 3, n)
    losses = rng.random(n).astype(np.float32)
    losses[3] = np.nan
    evaluation = Evaluation(
        CLASSES, np.array([0, 1, 2, 4, 5, 6, 8]), labels, rng.integers(0, 3, n),
        rng.random(n).astype(np.float32), losses, rng.random(n) < 0.5, rng.random(n) < 0.9, 2, sets, 5,
    )  # fmt: skip
    return evaluation, Dataset("made", "test", CLASSES, np.zeros(9, np.int64), pixels=np.zeros((9, 2, 2, 3), np.uint8))


@pytest.mark.parametrize("sets", [None, Labels.of_lists([[0], [1, 2], [2], [0, 1, 2], [1], [2, 0], [0]])])
def test_read_back_whole(sets: Labels | None, tmp_path: Path) -> None:
    evaluation, dataset = made(sets)
    write_predictions(tmp_path / "p.csv", evaluation, dataset)
    back, names = read_predictions(tmp_path / "p.csv", CLASSES)
    assert names == [f"made/test[{i}]" for i in evaluation.indices]
    for name in ("indices", "labels", "predictions", "confidences", "losses", "right", "in_top5"):
        one, other = getattr(evaluation, name), getattr(back, name)
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
    assert back.classes == CLASSES
    if sets is None:
        assert back.label_sets is None
    else:
        assert back.label_sets is not None
        assert all((back.label_sets.of(i) == sets.of(i)).all() for i in range(len(sets)))


def test_the_column_of_earlier_versions(tmp_path: Path) -> None:
    write_predictions(tmp_path / "p.csv", *made())
    text = (tmp_path / "p.csv").read_text()
    (tmp_path / "p.csv").write_text(text.replace("image,", "picture,", 1))
    assert read_predictions(tmp_path / "p.csv", CLASSES)[1][0] == "made/test[0]"


def test_a_table_for_people(tmp_path: Path) -> None:
    evaluation, dataset = made()
    write_predictions(tmp_path / "p.csv", evaluation, dataset)
    with (tmp_path / "p.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert tuple(head) == COLUMNS
    assert [row[0] for row in rows] == [f"made/test[{i}]" for i in evaluation.indices]
    assert [row[1] for row in rows] == [CLASSES[label] for label in evaluation.labels]
    assert [row[2] for row in rows] == [CLASSES[label] for label in evaluation.predictions]
    assert [row[4] for row in rows] == [str(int(good)) for good in evaluation.right]


def test_a_run_leaves_them(pretrained: Outcome, workdir: Path) -> None:
    back, _ = read_predictions(workdir / PREDICTIONS, pretrained.test.classes)
    assert back.record() == pretrained.test.record()
    again = evaluate(pretrained.model, pretrained.splits.test, (8, 8))
    np.testing.assert_array_equal(back.confidences, again.confidences)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace("labels", "marks", 1),
        lambda text: text.replace(",0\n", ",zero\n", 1),
        lambda text: text + "cut,off",
        lambda _: "",
        lambda text: text.replace("a, b", "another class"),
    ],
)
def test_other_files_are_refused(spoil: Callable[[str], str], tmp_path: Path) -> None:
    evaluation, dataset = made()
    path = tmp_path / "p.csv"
    write_predictions(path, evaluation, dataset)
    path.write_text(spoil(path.read_text()))
    with pytest.raises(UserError, match=r"p\.csv is not a table of predictions"):
        read_predictions(path, CLASSES)
