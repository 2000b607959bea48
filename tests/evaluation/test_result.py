"""The metrics of known predictions, with one label per image; `test_summary.py` has several."""

import numpy as np
import pytest

from vitlab.evaluation.result import Evaluation


def test_metrics_of_known_predictions() -> None:
    """Two images of a, one of them wrong, and one of b, in classes of which c has no image."""
    labels, predictions = np.array([0, 0, 1]), np.array([0, 1, 1])
    numbers = (np.arange(3), labels, predictions, np.array([0.9, 0.6, 0.8]), np.array([0.1, 1.7, 0.3]))
    evaluation = Evaluation(("a", "b", "c"), *numbers, predictions == labels, np.ones(3, bool), skipped=1, full_size=9)
    assert evaluation.confusion.tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 0]]
    record = evaluation.record()
    assert record["per_class"] == [
        {"class": "a", "images": 2, "recall": 0.5, "precision": 1.0},
        {"class": "b", "images": 1, "recall": 1.0, "precision": 0.5},
        {"class": "c", "images": 0, "recall": None, "precision": None},
    ]
    assert evaluation.metrics() == pytest.approx({"accuracy": 2 / 3, "loss": 0.7})
    assert (record["balanced_accuracy"], record["images"], record["skipped"], record["full_size"]) == (0.75, 3, 1, 9)
    assert "left_out" not in record
    assert evaluation.with_thresholds([0.5, 0.5, 0.5]) is evaluation  # without scores no label is set
    names = ("accuracy", "accuracy_interval", "balanced_accuracy", "expected_calibration_error", "images")
    assert evaluation.metadata() == {f"test_{name}": record[name] for name in names}
