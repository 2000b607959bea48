"""Several labels: every number is scikit-learn's; thresholds of the highest F1 on held-out images."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, precision_recall_fscore_support

from vitlab.errors import UserError
from vitlab.evaluation.multi_label import (
    MIN_POSITIVES,
    choose_thresholds,
    decide_labels,
    label_rows,
    label_summary,
    mean_average_precision,
    stored_thresholds,
    to_labels,
)

K = 6
CLASSES = tuple("abcdef")


def made(n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Labels and logits with equal ones among them; label 0 is on all images, 1 on none, 2 on few."""
    rng = np.random.default_rng(0)
    labels = rng.random((n, K)) < [1, 0, 0, 0.3, 0.5, 0.8]
    labels[: MIN_POSITIVES - 1, 2] = True
    logits = (1.5 * labels + rng.normal(size=(n, K))).round(1) - 1
    return labels, logits.astype(np.float32)


def set_by(logits: np.ndarray, thresholds: list[float] | None) -> np.ndarray:
    return decide_labels(torch.from_numpy(logits), thresholds).numpy()


def test_rows_are_those_of_scikit_learn() -> None:
    labels, logits = made()
    thresholds = [0.3, 0.9999, 0.5, 0.4, 0.6, 0.2]
    predicted = set_by(logits, thresholds)
    rows = label_rows(CLASSES, labels, predicted, logits, thresholds)
    undefined: Any = np.nan
    precision, recall, f1, _ = precision_recall_fscore_support(labels, predicted, zero_division=undefined)
    average = [average_precision_score(labels[:, c], logits[:, c]) if labels[:, c].any() else np.nan for c in range(K)]
    expected = {"precision": precision, "recall": recall, "f1": f1, "average_precision": average}
    for name, values in expected.items():
        np.testing.assert_allclose(np.array([row[name] for row in rows], float), values, err_msg=name)
    assert [row["images"] for row in rows] == labels.sum(axis=0).tolist()
    present = [c for c in range(K) if labels[:, c].any()]
    assert mean_average_precision(labels, logits) == pytest.approx(np.mean(np.array(average)[present]))
    assert label_summary(rows, thresholds)["f1"] == pytest.approx(np.mean(np.array(f1)[present]))
    assert rows[1]["recall"] is rows[1]["average_precision"] is None
    back = to_labels(predicted)
    np.testing.assert_array_equal(back.multi_hot(np.arange(len(labels)), K), predicted)


def test_thresholds_have_the_highest_f1_of_all() -> None:
    """Rare labels share that of all decisions; all images get a label that all have, also those seen later."""
    labels, logits = made()
    thresholds = choose_thresholds(labels, logits)
    predicted = set_by(logits, thresholds)
    tried = np.append(np.unique(logits), np.inf)
    for c in (0, 3, 4, 5):
        best = max(f1_score(labels[:, c], logits[:, c] >= t) for t in tried)
        assert f1_score(labels[:, c], predicted[:, c]) == pytest.approx(best)
    assert thresholds[0] < 1 / (1 + np.exp(-logits[:, 0].min()))
    assert thresholds[1] == thresholds[2]
    best = max(f1_score(labels.ravel(), logits.ravel() >= t) for t in tried)
    assert f1_score(labels.ravel(), set_by(logits, [thresholds[2]] * K).ravel()) == pytest.approx(best)
    assert choose_thresholds(np.zeros_like(labels), logits) == [0.5] * K


def test_a_threshold_lies_between_two_probabilities() -> None:
    """And separates what float32 alone tells apart."""
    labels = np.arange(40)[:, None] >= 20
    thresholds = choose_thresholds(labels, np.where(labels, 2.0, -1.0).astype(np.float32))
    sure, unsure = (1 / (1 + np.exp(-logit)) for logit in (2.0, -1.0))
    assert thresholds == pytest.approx([(sure + unsure) / 2])
    close = np.where(labels, np.float32(0.25), np.nextafter(np.float32(0.25), np.float32(0))).astype(np.float32)
    same = torch.from_numpy(close).sigmoid().unique().numel() == 1
    assert set_by(close, choose_thresholds(labels, close)).sum() == (40 if same else 20)


@pytest.mark.parametrize("thresholds", [[0.5], [0.5, 1.5], [0.5, "0.5"], [0.5, float("nan")], 0.5, [True, False]])
def test_invalid_thresholds_are_refused(thresholds: object) -> None:
    assert stored_thresholds({"label_thresholds": [0.5, 1]}, 2) == [0.5, 1]
    assert stored_thresholds({}, 2) is None
    with pytest.raises(UserError, match="2 numbers"):
        stored_thresholds({"label_thresholds": thresholds}, 2)
