"""The metrics of known predictions, and the record as text."""

import numpy as np
import pytest

from vitlab.data.dataset import Labels
from vitlab.evaluation.calibration import MIN_CALIBRATED
from vitlab.evaluation.result import Evaluation, format_evaluation, headline


def several(thresholds: list[float] | None) -> Evaluation:
    """Four images that all have label a, which has the highest score, and of which two have b: no wrong prediction."""
    zeros, scores = np.zeros(4, np.int64), np.array([[3, 1], [3, -1], [3, 2], [3, 0.5]], np.float32)
    sets = Labels.of_lists([[0], [0, 1], [0, 1], [0]])
    right = np.ones(4, bool)
    confidences = np.full(4, 0.95, np.float32)
    numbers = (np.arange(4), zeros, zeros, confidences, confidences, right, right, 0, sets)
    return Evaluation(("a", "b"), *numbers, scores=scores).with_thresholds(thresholds)


@pytest.mark.parametrize(("thresholds", "source"), [([0.5, 0.8], "held-out"), (None, "0.5 for every label")])
def test_a_label_that_all_images_have_is_no_headline(thresholds: list[float] | None, source: str) -> None:
    evaluation = several(thresholds)
    record = evaluation.record()
    precision = (1 + (1 + 2 / 4) / 2) / 2
    assert record["mean_average_precision"] == pytest.approx(precision)
    assert headline(record) == f"mean average precision {precision:.2%}"
    head, _, row, last, note = format_evaluation(record).splitlines()
    assert head.split() == ["class", "images", "average", "precision", "threshold", "precision", "recall", "f1"]
    assert row.split()[:4] == ["b", "2", "75.0%", f"{thresholds[1] if thresholds else 0.5:.3f}"]
    assert last.startswith(f"4 images · {headline(record)} · ")
    assert "100.00%" not in last
    assert source in note
    assert evaluation.wrong_labels.tolist() == ([0, 1, 0, 0] if thresholds else [1, 1, 0, 1])
    assert record["exact_match"] == (0.75 if thresholds else 0.25)
    assert headline({"accuracy": 0.5}) == "accuracy 50.00%"


@pytest.mark.parametrize("count", [MIN_CALIBRATED - 1, MIN_CALIBRATED])
def test_the_calibration_error_needs_enough_images(count: int) -> None:
    zeros, right = np.zeros(count, np.int64), np.ones(count, bool)
    confidences = np.full(count, 0.75, np.float32)
    record = Evaluation(("a", "b"), np.arange(count), zeros, zeros, confidences, confidences, right, right, 0).record()
    assert record.get("expected_calibration_error") == (0.25 if count == MIN_CALIBRATED else None)
