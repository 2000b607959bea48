"""Losses against plain formulas, and mixup seen through them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vitlab.data.loader import Batch
from vitlab.train.objectives import Classification, classification_loss

B, K = 6, 4
LABELS = torch.tensor([0, 3, 1, 1, 2, 0])


@pytest.fixture
def logits() -> Tensor:
    return 3 * torch.randn(B, K)


def one_hot(labels: Tensor) -> Tensor:
    return torch.eye(K)[labels]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("soft", [False, True])
def test_losses(logits: Tensor, smoothing: float, soft: bool) -> None:
    """Means over images, smoothed by s. Softmax: -sum_k t_k log p_k, where targets become (1 - s) t + s / K. Sigmoid:
    -sum_k t_k log p_k + (1 - t_k) log(1 - p_k), where they are 1 - s and s."""
    targets = torch.rand(B, K).softmax(dim=1) if soft else LABELS
    plain = targets if soft else one_hot(LABELS)
    log_p = logits - logits.exp().sum(dim=1, keepdim=True).log()
    expected = -(((1 - smoothing) * plain + smoothing / K) * log_p).sum() / B
    torch.testing.assert_close(classification_loss(logits, targets, "softmax", smoothing), expected)
    plain = plain * (1 - smoothing) + (1 - plain) * smoothing
    p = 1 / (1 + (-logits).exp())
    expected = -(plain * p.log() + (1 - plain) * (1 - p).log()).sum() / B
    torch.testing.assert_close(classification_loss(logits, targets, "sigmoid", smoothing), expected)


SETS = [[0], [3, 1], [1], [1, 2, 0], [2], [0, 3]]
HOT = torch.tensor([[k in labels for k in range(K)] for labels in SETS])


def several() -> Batch:
    return Batch(torch.randn(B, 3, 2, 2), torch.tensor([s[0] for s in SETS]), torch.arange(B), targets=HOT)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_several_labels(logits: Tensor, smoothing: float) -> None:
    """Sigmoid: every label is a yes. Softmax: k labels are 1/k each."""
    p = 1 / (1 + (-logits).exp())
    log_p = logits - logits.exp().sum(dim=1, keepdim=True).log()
    yes, softmax = 0.0, 0.0
    for i, labels in enumerate(SETS):
        for k in range(K):
            t = 1 - smoothing if k in labels else smoothing
            yes -= float(t * p[i, k].log() + (1 - t) * (1 - p[i, k]).log()) / B
            t = (1 - smoothing) * (k in labels) / len(labels) + smoothing / K
            softmax -= float(t * log_p[i, k]) / B
    assert float(classification_loss(logits, HOT, "sigmoid", smoothing)) == pytest.approx(yes, rel=1e-5)
    assert float(classification_loss(logits, HOT, "softmax", smoothing)) == pytest.approx(softmax, rel=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_any_of_the_labels_is_right(kind: Any) -> None:
    objective = Classification(K, kind)
    images, targets = objective.prepare_batch(several(), np.random.default_rng(0))
    predicted = torch.tensor([0, 1, 0, 2, 2, 1])  # right, right (the second), wrong, right, right, wrong
    logits = 5 * one_hot(predicted)
    loss, accuracy = objective.loss(lambda _: logits, images, targets)
    assert float(accuracy) == pytest.approx(4 / 6)
    torch.testing.assert_close(loss, classification_loss(logits, HOT, kind))
    unlabeled = targets.clone()
    unlabeled[:2] = False  # no prediction is right
    assert float(objective.loss(lambda _: logits, images, unlabeled)[1]) == pytest.approx(2 / 6)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_mixup_of_several_labels(logits: Tensor, kind: Any) -> None:
    """Softmax's loss is the mix of the losses; a sigmoid's targets mix yes and no. The larger share counts."""
    objective = Classification(K, kind, mixup=0.4)
    given = several()
    images, targets = objective.prepare_batch(given, np.random.default_rng(7))
    share = np.random.default_rng(7).beta(0.4, 0.4)
    share = max(share, 1 - share)
    hot = HOT / HOT.sum(dim=1, keepdim=True) if kind == "softmax" else HOT.float()
    torch.testing.assert_close(targets, share * hot + (1 - share) * hot.roll(1, 0))
    mixed = objective.loss(lambda _: logits, images, targets)[0]
    if kind == "softmax":
        parts = [classification_loss(logits, sets) for sets in (HOT, HOT.roll(1, 0))]
        torch.testing.assert_close(mixed, share * parts[0] + (1 - share) * parts[1])
    least = targets.masked_fill(targets == 0, 2).argmin(dim=1)  # a label of the other image
    for predicted, expected in ((targets.argmax(dim=1), 1.0), (least, 0.0)):
        _, accuracy = objective.loss(lambda _, predicted=predicted: one_hot(predicted), images, targets)
        assert float(accuracy) == expected
