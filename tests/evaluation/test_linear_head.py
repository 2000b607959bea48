"""The least-squares head: leave-one-out scores against refits, its logits, several labels."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score

from vitlab.evaluation.fewshot import BIAS, Ridge
from vitlab.evaluation.linear_head import LOGIT_SCALES, _best_scale, least_squares_head
from vitlab.models import ViTConfig
from vitlab.models.variant import override
from vitlab.models.vit import build_model


def data(n: int, width: int = 12, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, classes, n)
    return (rng.normal(size=(n, width)) + labels[:, None] * 0.7).astype(np.float32), labels


@pytest.mark.parametrize("n", [9, 40])  # fewer images than features, and more
@pytest.mark.parametrize("l2", [0.5, 300.0])
def test_leave_one_out_is_a_refit_without_the_image(n: int, l2: float) -> None:
    x, labels = data(n)
    ridge = Ridge(x, labels, 3)
    full = np.column_stack([(x - ridge.mean) / ridge.std, np.full(n, BIAS)])
    targets = np.where(np.eye(3)[labels] > 0, 1.0, -1.0)
    scores = ridge.leave_one_out(l2)
    for i in range(n):
        rest = np.delete(np.arange(n), i)
        gram = full[rest].T @ full[rest] + l2 * np.eye(full.shape[1])
        expected = full[i] @ np.linalg.solve(gram, full[rest].T @ targets[rest])
        np.testing.assert_allclose(scores[i], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [6, 30])
def test_all_views_of_an_image_are_left_out_together(n: int) -> None:
    x, labels = data(n)
    views = np.concatenate([x, x + 0.1 * np.random.default_rng(1).normal(size=x.shape)]).astype(np.float32)
    ridge = Ridge(views, np.concatenate([labels, labels]), 3)
    full = np.column_stack([(views - ridge.mean) / ridge.std, np.full(2 * n, BIAS)])
    targets = np.where(np.eye(3)[np.concatenate([labels, labels])] > 0, 1.0, -1.0)
    scores = ridge.leave_one_out(20.0, views=2)
    for i in range(n):
        rest = np.delete(np.arange(2 * n), [i, n + i])
        gram = full[rest].T @ full[rest] + 20.0 * np.eye(full.shape[1])
        np.testing.assert_allclose(scores[i], full[i] @ np.linalg.solve(gram, full[rest].T @ targets[rest]), rtol=1e-6)


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("n", [9, 60])  # groups smaller and larger than the number of features
def test_a_group_is_left_out_at_once(n: int, views: int) -> None:
    """Its scores are those of a refit without it; images of no group (-1) are in all fits, and have no scores."""
    x, labels = data(n)
    groups = np.array([-1, -1, *(i * 4 // n for i in range(n - 2))])
    groups[-1] = 7
    rows = np.concatenate([x + view * np.sin(x) for view in range(views)])
    ridge = Ridge(rows, np.tile(labels, views), 3)
    full = np.column_stack([(rows - ridge.mean) / ridge.std, np.full(n * views, BIAS)])
    targets = np.where(np.eye(3)[np.tile(labels, views)] > 0, 1.0, -1.0)
    scores = ridge.leave_one_out(20.0, views, groups)
    assert np.isnan(scores[:2]).all()
    for group in (0, 1, 2, 3, 7):
        rest = np.flatnonzero(np.tile(groups, views) != group)
        gram = full[rest].T @ full[rest] + 20.0 * np.eye(full.shape[1])
        expected = full[:n][groups == group] @ np.linalg.solve(gram, full[rest].T @ targets[rest])
        np.testing.assert_allclose(scores[groups == group], expected, rtol=1e-5, atol=1e-6)


def test_copies_are_no_images_of_their_own() -> None:
    """Labels of noise are learned by copies of the images, and by nothing where all copies are left out together."""
    x, _ = data(40, width=100)
    labels = np.random.default_rng(3).integers(0, 3, 40)
    copies = np.concatenate([x, x + np.float32(0.01)]), np.tile(labels, 2)
    groups = np.tile(np.arange(40), 2)
    fooled, honest = (least_squares_head(copies[0][None], copies[1], 3, each) for each in (None, groups))
    assert honest.accuracy < 0.5 < fooled.accuracy
    assert honest.loss > fooled.loss
    with pytest.raises(ValueError, match="all 80 training images are in one group"):
        least_squares_head(copies[0][None], copies[1], 3, np.zeros(80, np.int64))


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
    x, labels = data(60)
    head, ridge = least_squares_head(x[None], labels, 3), Ridge(x, labels, 3)
    ratios = head.logits(x) / ridge.scores(x, head.l2)
    np.testing.assert_allclose(ratios, np.full_like(ratios, ratios[0, 0]), rtol=1e-3)
    losses = [
        float(
            torch.nn.functional.cross_entropy(
                torch.from_numpy(ridge.leave_one_out(head.l2) * scale), torch.from_numpy(labels)
            )
        )
        for scale in (ratios[0, 0] / 1.5, ratios[0, 0], ratios[0, 0] * 1.5)
    ]
    assert losses[1] == pytest.approx(head.loss, rel=1e-4) == min(losses)


def test_digits() -> None:
    """Leave-one-out accuracy is that on other images, nearly."""
    order = np.random.default_rng(0).permutation(1797)
    images, labels = (np.asarray(part)[order] for part in load_digits(return_X_y=True))
    head = least_squares_head(images[None, :1000].astype(np.float32), labels[:1000], 10)
    correct = head.logits(images[1000:]).argmax(axis=1) == labels[1000:]
    assert head.accuracy > 0.9
    assert correct.mean() == pytest.approx(head.accuracy, abs=0.05)


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


def test_one_image_is_too_few() -> None:
    with pytest.raises(ValueError, match="two training images or more, not 1"):
        least_squares_head(np.zeros((1, 1, 4), np.float32), np.zeros(1, np.int64), 2)


def test_the_scale_is_the_best_of_all() -> None:
    x, labels = data(50)
    target = torch.from_numpy(labels)
    for l2 in (1.0, 1000.0):
        scores = torch.from_numpy(Ridge(x, labels, 3).leave_one_out(l2))
        losses = {scale: float(torch.nn.functional.cross_entropy(scores * scale, target)) for scale in LOGIT_SCALES}
        best = min(losses, key=losses.__getitem__)
        assert _best_scale(scores, target, l2) == (losses[best], l2, best)
        assert LOGIT_SCALES[0] < best < LOGIT_SCALES[-1]
