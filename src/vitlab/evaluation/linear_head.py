"""The least-squares classifier of Sec. 4.1 as the head of a model, where the fine-tuning of your own images starts.

`least_squares_head` fits it (`fewshot.Ridge` has the algebra) and chooses its penalty l2 and the scale of its logits.
"""

import bisect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32, Float64, Int
from torch import Tensor

from vitlab.errors import UserError
from vitlab.evaluation.calibration import Calibrator, choose_rejection
from vitlab.evaluation.fewshot import BIAS, Ridge
from vitlab.evaluation.multi_label import choose_thresholds, mean_average_precision
from vitlab.models.vit import Model
from vitlab.train.objectives import LossKind, classification_loss
from vitlab.weights.json_fields import THRESHOLDS

L2_GRID = tuple(10.0 ** (power / 2) for power in range(11))
"""From 1 to 10^5."""
LOGIT_SCALES = tuple(2.0 ** (power / 4) for power in range(-8, 33))
"""Factors from scores to logits, from 1/4 to 256."""
LOSS_ROWS = 4096
"""Training images, evenly spaced, on which the losses are compared."""
MAX_ELEMENTS = 2**26
"""Elements of the fit's largest matrix, half a GiB in float64; there are several."""
MAX_CLASSES = 10_000
"""With two images of each, such a matrix is 1.6 GB."""


@dataclass(frozen=True)
class LinearHead:
    """Weights of a head, and its metrics on held-out images: each training image by the head for all others, or each
    group of images, or the user's val."""

    weight: Float32[np.ndarray, "K D"]
    bias: Float32[np.ndarray, " K"]
    l2: float
    accuracy: float
    """Fraction of images whose highest score is (one of) their label(s)."""
    loss: float
    """Cross-entropy; with several labels per image, binary for each class. With the weights of the classes."""
    balanced_accuracy: float | None = None
    """Mean over the classes of this fraction; of one label per image."""
    reject_below: float | None = None
    """Probability from which 95% of the predictions are right, if there is one (`choose_rejection`); of one label per
    image."""
    masses: list[float] | None = None
    """For prediction sets (`Calibrator`); of one label per image."""
    mean_average_precision: float | None = None
    """With several labels per image."""
    label_thresholds: list[float] | None = None
    """The probability from which each of several labels is set (`choose_thresholds`)."""

    def logits(self, x: Float[np.ndarray, "n D"]) -> Float[np.ndarray, "n K"]:
        return x @ self.weight.T + self.bias

    @torch.no_grad()
    def copy_to(self, model: Model) -> None:
        """Makes it the head of `model`, of both heads of a distilled one."""
        for head in (model.head, getattr(model, "head_distilled", None)):
            if head is not None:
                head.weight.copy_(torch.from_numpy(self.weight))
                head.bias.copy_(torch.from_numpy(self.bias))


def least_squares_head(
    x: Float[np.ndarray, "V n D"],
    labels: Int[np.ndarray, " n"] | Bool[np.ndarray, "n K"],
    num_classes: int,
    groups: Int[np.ndarray, " n"] | None = None,
    fit_all: bool = True,
    class_weights: Float[np.ndarray, " K"] | None = None,
) -> LinearHead:
    """The head for these representations, with the l2 and the scale of least leave-one-out loss.

    x: of V views of each image, the first as in evaluation. Scores of least squares lie around -1 and 1; the scale
    makes logits of them. `labels` is as in `Ridge`; `groups` are left out one by one, as in its `leave_one_out`.
    fit_all: False fits the weights, with the same l2 and scale, to the images with a negative group alone.
    class_weights: an image counts as much as its label (`balanced_weights`); of one label per image.
    Raises UserError for fewer than two images or groups.
    """
    views = len(x)
    _check_images(x.shape[1], groups)
    weights = None if class_weights is None else class_weights[labels]

    def fit(rows: Any) -> Ridge:
        given = None if weights is None else np.tile(weights[rows], views)
        return Ridge(x[:, rows].reshape(-1, x.shape[2]), np.concatenate([labels[rows]] * views), num_classes, given)

    ridge = fit(slice(None))
    left_out = _choose_penalty(ridge, labels, views, groups, weights)
    l2, scale = left_out.l2, left_out.scale
    metrics = _held_out_metrics(left_out)
    if groups is not None and not fit_all:
        ridge = fit(groups < 0)
    solution: Float64[np.ndarray, "D1 K"] = scale * ridge.weights(l2)
    weight = solution[:-1] / ridge.std[:, None]
    bias = BIAS * solution[-1] - ridge.mean @ weight
    return LinearHead(weight.T.astype(np.float32), bias.astype(np.float32), l2=l2, loss=left_out.loss, **metrics)


@dataclass(frozen=True)
class LeaveOneOut:
    """The scores of images by heads that have not seen them, with the l2 and the scale of least loss."""

    l2: float
    scale: float
    loss: float
    rows: Int[np.ndarray, " r"]
    """The images."""
    logits: Tensor
    """[r, K], float64."""
    targets: Tensor
    """As `labels` of `Ridge`."""
    weights: Tensor | None = None
    """[r], of the losses; None: all 1."""

    def losses(self) -> Float64[np.ndarray, " r"]:
        """The loss of each image, times its weight."""
        if self.targets.ndim == 1:
            losses = F.cross_entropy(self.logits, self.targets, reduction="none")
            return (losses if self.weights is None else self.weights * losses).numpy()
        targets = self.targets.to(self.logits.dtype)
        return F.binary_cross_entropy_with_logits(self.logits, targets, reduction="none").sum(dim=1).numpy()

    def correct(self) -> Bool[np.ndarray, " r"]:
        """Whether the highest score of each image is (one of) its label(s)."""
        best = self.logits.argmax(dim=1)
        hits = best == self.targets if self.targets.ndim == 1 else self.targets.gather(1, best[:, None])[:, 0]
        return hits.numpy()


def leave_one_out(
    x: Float[np.ndarray, "n D"],
    labels: Int[np.ndarray, " n"] | Bool[np.ndarray, "n K"],
    num_classes: int,
    groups: Int[np.ndarray, " n"] | None = None,
    class_weights: Float[np.ndarray, " K"] | None = None,
    every: bool = False,
) -> LeaveOneOut:
    """What `least_squares_head` measures on the images that it leaves out; `every` one, or up to LOSS_ROWS. Raises
    UserError as it does."""
    _check_images(len(x), groups)
    weights = None if class_weights is None else class_weights[labels]
    return _choose_penalty(Ridge(x, labels, num_classes, weights), labels, 1, groups, weights, every)


def _check_images(images: int, groups: Int[np.ndarray, " n"] | None) -> None:
    if images < 2:
        raise UserError(f"least squares requires two training images or more, not {images}; add images.")
    if groups is not None and (groups == groups[0]).all():
        raise UserError(f"all {images} training images are in one group, so none can be left out; give other groups.")


def _choose_penalty(
    ridge: Ridge,
    labels: Int[np.ndarray, " n"] | Bool[np.ndarray, "n K"],
    views: int,
    groups: Int[np.ndarray, " n"] | None,
    weights: Float[np.ndarray, " n"] | None = None,
    every: bool = False,
) -> LeaveOneOut:
    """The l2, and the scale of the logits, of least loss on the images left out. weights: of their losses."""
    scored = np.arange(len(labels)) if groups is None else np.flatnonzero(groups >= 0)
    rows = scored[:: -(-len(scored) // LOSS_ROWS)]
    targets = torch.from_numpy(labels[rows])
    counted = None if weights is None else torch.from_numpy(weights[rows])

    def left_out_scores(l2: float) -> Tensor:
        return torch.from_numpy(ridge.leave_one_out(l2, views, groups))

    best = {l2: _best_scale(left_out_scores(l2)[rows], targets, counted) for l2 in L2_GRID}
    l2 = min(best, key=lambda l2: best[l2][0])
    loss, scale = best[l2]
    if every:
        rows, targets = scored, torch.from_numpy(labels[scored])
        counted = None if weights is None else torch.from_numpy(weights[scored])
    return LeaveOneOut(l2, scale, loss, rows, left_out_scores(l2)[rows] * scale, targets, counted)


def _best_scale(scores: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[float, float]:
    """The least loss, and its scale; by bisection, as the loss is convex in the scale."""
    kind: LossKind = "softmax" if targets.ndim == 1 else "sigmoid"

    def loss(index: int) -> float:
        if weights is not None:
            return float((weights * F.cross_entropy(scores * LOGIT_SCALES[index], targets, reduction="none")).mean())
        return float(classification_loss(scores * LOGIT_SCALES[index], targets, kind))

    best = bisect.bisect_left(range(len(LOGIT_SCALES) - 1), True, key=lambda index: loss(index) <= loss(index + 1))
    return loss(best), LOGIT_SCALES[best]


def _held_out_metrics(left_out: LeaveOneOut) -> dict[str, Any]:
    """The metrics of a LinearHead besides the loss."""
    logits, correct = left_out.logits, left_out.correct()
    accuracy = float(correct.mean())
    if left_out.targets.ndim == 1:
        confidences = logits.softmax(dim=1).amax(dim=1)
        labels = left_out.targets.numpy()
        recalls = [correct[labels == label].mean() for label in np.unique(labels)]
        metrics = {"accuracy": accuracy, "balanced_accuracy": float(np.mean(recalls))}
        masses = Calibrator.fit(logits.numpy(), labels, temper=False).masses
        return metrics | {"reject_below": choose_rejection(confidences.numpy(), correct), "masses": list(masses)}
    hot, scores = left_out.targets.numpy(), logits.numpy().astype(np.float32)
    precision = mean_average_precision(hot, scores)
    return {"accuracy": accuracy, "mean_average_precision": precision, THRESHOLDS: choose_thresholds(hot, scores)}
