"""The least-squares head: leave-one-out scores against refits, its logits, several labels."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from torch.nn.functional import cross_entropy

from vitlab.evaluation.fewshot import BIAS, Ridge
from vitlab.evaluation.linear_head import least_squares_head, leave_one_out
from vitlab.models import ViTConfig
from vitlab.models.variant import override
from vitlab.models.vit import build_model
from vitlab.train.objectives import balanced_weights


def data(n: int, width: int = 12, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, classes, n)
    return (rng.normal(size=(n, width)) + labels[:, None] * 0.7).astype(np.float32), labels


def refits(
    ridge: Ridge, rows: np.ndarray, labels: np.ndarray, l2: float, groups: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Scores of each row by a fit without its group; the standardization is that of all rows."""
    full = np.column_stack([(rows - ridge.mean) / ridge.std, np.full(len(rows), BIAS)])
    targets, scores = np.where(np.eye(3)[labels] > 0, 1.0, -1.0), np.full((len(rows), 3), np.nan)
    for group in set(groups[groups >= 0]):
        rest = groups != group
        weighted = full[rest] * weights[rest, None]
        gram = full[rest].T @ weighted + l2 * np.eye(full.shape[1])
        scores[~rest] = full[~rest] @ np.linalg.solve(gram, weighted.T @ targets[rest])
    return scores


@pytest.mark.parametrize("n", [9, 60])  # fewer images than features, and more
@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_leave_one_out_is_a_refit_without_the_image(n: int, views: int, weighted: bool) -> None:
    """All views of an image, or of a group, at once; images of no group (-1) are in all fits, and have no scores."""
    x, labels = data(n)
    rows, tiled = np.concatenate([x + view * np.sin(x) for view in range(views)]), np.tile(labels, views)
    groups = np.array([-1, -1, *(i * 4 // n for i in range(n - 3)), 7])
    weights = np.tile(np.random.default_rng(1).uniform(0.1, 3, n) if weighted else np.ones(n), views)
    ridge = Ridge(rows, tiled, 3, weights if weighted else None)
    for l2 in (0.5, 20.0, 300.0):
        for each in (None, groups):
            held_out = np.tile(np.arange(n) if each is None else each, views)
            expected = refits(ridge, rows, tiled, l2, held_out, weights)[:n]
            np.testing.assert_allclose(ridge.leave_one_out(l2, views, each), expected, rtol=1e-5, atol=1e-6)


def test_balance_finds_a_small_class() -> None:
    """120 images of one class and 4 of another, which overlap: by least squares alone the small one is never found."""
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], [120, 4])
    x = (rng.normal(size=(124, 6)) + 1.2 * labels[:, None]).astype(np.float32)
    weights = balanced_weights(labels, 2)
    plain, balanced = (least_squares_head(x[None], labels, 2, class_weights=each) for each in (None, weights))
    assert plain.accuracy > balanced.accuracy
    assert plain.balanced_accuracy is not None
    assert balanced.balanced_accuracy is not None
    assert balanced.balanced_accuracy > plain.balanced_accuracy + 0.15
    fit = leave_one_out(x, labels, 2, class_weights=weights)
    assert fit.losses().mean() == pytest.approx(balanced.loss)
    assert balanced.balanced_accuracy == pytest.approx(np.mean([fit.correct()[labels == k].mean() for k in (0, 1)]))
    equal = np.repeat([0, 1], 62)  # where classes are equal, nothing changes
    heads = [least_squares_head(x[None], equal, 2, class_weights=each) for each in (None, np.ones(2))]
    np.testing.assert_allclose(heads[0].weight, heads[1].weight, atol=1e-6)


def test_copies_are_no_images_of_their_own() -> None:
    """Labels of noise are learned by copies of the images, and by nothing where all copies are left out together."""
    x, _ = data(40, width=100)
    labels = np.random.default_rng(3).integers(0, 3, 40)
    copies = np.concatenate([x, x + np.float32(0.01)]), np.tile(labels, 2)
    groups = np.tile(np.arange(40), 2)
    fooled, honest = (least_squares_head(copies[0][None], copies[1], 3, each) for each in (None, groups))
    assert honest.accuracy < 0.5 < fooled.accuracy
    assert honest.loss > fooled.loss
    with pytest.raises(ValueError, match="one group"):
        least_squares_head(copies[0][None], copies[1], 3, np.zeros(80, np.int64))
    with pytest.raises(ValueError, match="two training images or more, not 1"):
        least_squares_head(np.zeros((1, 1, 4), np.float32), np.zeros(1, np.int64), 2)


def test_choices_on_a_val_and_weights_without_it() -> None:
    x, labels = data(90)
    groups = np.where(np.arange(90) < 60, -1, 0)
    with_val, without = (least_squares_head(x[None], labels, 3, groups, refit) for refit in (True, False))
    same = ("l2", "loss", "accuracy", "reject_below")
    assert [getattr(with_val, name) for name in same] == [getattr(without, name) for name in same]
    direct = Ridge(x[:60], labels[:60], 3)
    ratios = without.logits(x[60:]) / direct.scores(x[60:], without.l2)
    np.testing.assert_allclose(ratios, np.full_like(ratios, ratios[0, 0]), rtol=1e-3)
    correct = without.logits(x[60:]).argmax(axis=1) == labels[60:]
    assert with_val.accuracy == pytest.approx(correct.mean(), abs=0.07)  # standardized by all images
    assert not np.allclose(with_val.weight, without.weight)


def test_the_logits_are_scaled_scores() -> None:
    """By the factor of the least loss."""
    x, labels = data(60)
    head, ridge = least_squares_head(x[None], labels, 3), Ridge(x, labels, 3)
    ratios = head.logits(x) / ridge.scores(x, head.l2)
    np.testing.assert_allclose(ratios, np.full_like(ratios, ratios[0, 0]), rtol=1e-3)
    scores, targets = torch.from_numpy(ridge.leave_one_out(head.l2)), torch.from_numpy(labels)
    scales = ratios[0, 0] * np.array([1, 1 / 1.5, 1.5, 0.01, 100])
    best, *others = (float(cross_entropy(scores * scale, targets)) for scale in scales)
    assert best == pytest.approx(head.loss, rel=1e-4)
    assert best < min(others)


def test_several_labels() -> None:
    x, labels = data(80)
    sets = np.eye(3, dtype=bool)[labels] | (x[:, :1] > 1)  # class 1 and others
    head = least_squares_head(x[None], sets, 3)
    probabilities = 1 / (1 + np.exp(-head.logits(x)))
    assert ((probabilities > 0.5) == sets).mean() > 0.75
    assert 0.5 < head.accuracy <= 1
    assert head.reject_below is None  # which of several labels would be rejected?
    assert 0.75 < (head.mean_average_precision or 0) <= 1
    assert head.label_thresholds is not None
    decided = probabilities >= np.array(head.label_thresholds)
    assert f1_score(sets, decided, average="macro") > 0.8


@pytest.mark.parametrize("distilled", [False, True])
def test_it_becomes_the_head_of_a_model(distilled: bool) -> None:
    size: dict[str, Any] = {"width": 12, "depth": 1, "heads": 2, "mlp_dim": 8}
    model = build_model(override(ViTConfig(), image_size=8, patch_size=4, num_classes=3, distilled=distilled, **size))
    x, labels = data(60)
    head = least_squares_head(x[None], labels, 3)
    head.copy_to(model)
    for linear in (model.head, getattr(model, "head_distilled", None)):
        if linear is not None:
            np.testing.assert_allclose(linear(torch.from_numpy(x)).detach(), head.logits(x), rtol=1e-4, atol=1e-4)
