"""Losses against plain formulas, and mixup seen through them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vitlab.config import TrainConfig
from vitlab.data.loader import Batch
from vitlab.models import ViTConfig
from vitlab.train.objectives import Classification, balanced_weights, classification_loss, create_objective

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


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_class_weights(logits: Tensor, kind: Any) -> None:
    """An image counts as much as its label; a micro-batch's part of the loss is the part of its images."""
    weights = torch.from_numpy(balanced_weights(LABELS.numpy(), K)).float()
    torch.testing.assert_close(weights, torch.tensor([0.75, 0.75, 1.5, 1.5]))
    rows = zip(logits[:, None], LABELS[:, None], weights[LABELS], strict=True)
    expected = [w * classification_loss(z, y, kind) for z, y, w in rows]
    loss = classification_loss(logits, LABELS, kind, class_weights=weights)
    torch.testing.assert_close(loss, torch.stack(expected).mean())
    parts = [classification_loss(logits[i : i + 3], LABELS[i : i + 3], kind, class_weights=weights) for i in (0, 3)]
    torch.testing.assert_close(loss, sum(parts) / 2)
    torch.testing.assert_close(classification_loss(logits, one_hot(LABELS), kind, class_weights=weights), loss)
    half = (one_hot(LABELS) + one_hot(LABELS.roll(1))) / 2  # mixup: the mean of the labels' weights
    mixed = torch.stack([classification_loss(z, t, kind) for z, t in zip(logits.split(1), half.split(1), strict=True)])
    counted = (weights[LABELS] + weights[LABELS.roll(1)]) / 2
    torch.testing.assert_close(classification_loss(logits, half, kind, class_weights=weights), (counted * mixed).mean())
    config = TrainConfig(model=ViTConfig(num_classes=K), steps=1, balance=True, loss=kind)
    objective = create_objective(config, LABELS.numpy())
    assert isinstance(objective, Classification)
    torch.testing.assert_close(objective.loss(lambda _: logits, torch.zeros(B, 3, 2, 2), LABELS)[0], loss)


def test_classes_without_images_have_no_weight() -> None:
    np.testing.assert_allclose(balanced_weights(np.array([0, 0, 0, 2]), 4), [2 / 3, 0, 2, 0])


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
