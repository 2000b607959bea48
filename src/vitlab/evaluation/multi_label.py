"""Several labels for each image: average precision, thresholds chosen on held-out images, and the labels they set."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from vitlab.data.dataset import Labels
from vitlab.errors import UserError
from vitlab.weights.json_fields import THRESHOLDS

DEFAULT_THRESHOLD = 0.5
MIN_POSITIVES = 10
"""Minimum images of a label for a threshold of its own; rarer labels share one threshold of all labels together."""


def average_precisions(labels: Bool[np.ndarray, "n K"], scores: Float[np.ndarray, "n K"]) -> list[float | None]:
    """`sklearn.metrics.average_precision_score` of each label, None without images; all NaN if a score is not
    finite."""
    from sklearn.metrics import average_precision_score  # slow to import

    finite = np.isfinite(scores).all()
    return [
        None if not hot.any() else float(average_precision_score(hot, column)) if finite else np.nan
        for hot, column in zip(labels.T, scores.T, strict=True)
    ]


def mean_average_precision(labels: Bool[np.ndarray, "n K"], scores: Float[np.ndarray, "n K"]) -> float:
    """Mean of `average_precisions` over the labels that have images."""
    return _mean(average_precisions(labels, scores))


def choose_thresholds(labels: Bool[np.ndarray, "n K"], logits: Float32[np.ndarray, "n K"]) -> list[float]:
    """The probability from which each label is set. It has the highest F1 on these images, which must be held out.

    It lies halfway between two probabilities; of equal F1 the highest is taken. For few images of a label F1 says
    little: those with fewer than MIN_POSITIVES share the threshold of the highest F1 over all decisions.
    """
    probabilities = torch.from_numpy(logits).sigmoid().numpy()
    shared = _best_threshold(labels.ravel(), probabilities.ravel())
    return [
        _best_threshold(*columns) if columns[0].sum() >= MIN_POSITIVES else shared
        for columns in zip(labels.T, probabilities.T, strict=True)
    ]


def _best_threshold(labels: Bool[np.ndarray, " m"], probabilities: Float32[np.ndarray, " m"]) -> float:
    order = np.argsort(-probabilities, kind="stable")
    ranked, hits = probabilities[order], np.cumsum(labels[order])
    if not hits[-1]:
        return DEFAULT_THRESHOLD
    lower = np.append(ranked[1:], np.float32(0))
    f1 = 2 * hits / (np.arange(1, len(order) + 1) + hits[-1])
    best = np.argmax(np.where(ranked > lower, f1, -1.0))  # equal probabilities are set together
    middle = (ranked[best] + lower[best]) / 2
    return float(middle if middle > lower[best] else ranked[best])


def stored_thresholds(metadata: Mapping[str, Any], classes: int) -> list[float] | None:
    """The thresholds in a checkpoint's metadata, None without any. Raises UserError for invalid ones."""
    if (thresholds := metadata.get(THRESHOLDS)) is None:
        return None
    valid = isinstance(thresholds, list) and all(type(t) in (int, float) and 0 <= t <= 1 for t in thresholds)
    if not valid or len(thresholds) != classes:
        raise UserError(
            f"{THRESHOLDS} in the checkpoint's metadata must be a list of {classes} numbers from 0 to 1, one for each "
            f"label; correct it, or remove it: {DEFAULT_THRESHOLD} is then the threshold of every label."
        )
    return [float(threshold) for threshold in thresholds]


def decide_labels(logits: Float[Tensor, "n K"], thresholds: Sequence[float] | None) -> Bool[Tensor, "n K"]:
    """Which labels are set: those whose probability is at least the threshold, by default DEFAULT_THRESHOLD."""
    limits = torch.full((logits.shape[1],), DEFAULT_THRESHOLD) if thresholds is None else torch.tensor(thresholds)
    return logits.float().sigmoid() >= limits.to(logits.device, torch.float32)


def label_names(
    logits: Float[Tensor, "n K"], thresholds: Sequence[float] | None, classes: Sequence[str]
) -> list[tuple[str, ...]]:
    """The names of the labels that are set for each image, most probable first."""
    chosen = decide_labels(logits, thresholds).tolist()
    order = logits.argsort(dim=1, descending=True, stable=True).tolist()
    return [tuple(classes[int(c)] for c in row if hot[c]) for row, hot in zip(order, chosen, strict=True)]


def predicted_label_names(
    logits: Float[np.ndarray, "n K"], classes: Sequence[str], metadata: Mapping[str, Any]
) -> list[tuple[str, ...]] | None:
    """`label_names` by the thresholds in the metadata of a model of several labels; None for any other model."""
    if not metadata.get("multi_label"):
        return None
    return label_names(torch.from_numpy(logits), stored_thresholds(metadata, len(classes)), classes)


def describe_thresholds(thresholds: Sequence[float] | None) -> str:
    """Where they come from."""
    return "chosen on held-out images" if thresholds else f"none is stored, so {DEFAULT_THRESHOLD} for every label"


def to_labels(hot: Bool[np.ndarray, "n K"]) -> Labels:
    """The inverse of `Labels.multi_hot`."""
    return Labels(np.nonzero(hot)[1], np.concatenate([[0], np.cumsum(hot.sum(axis=1))]))


def label_rows(
    classes: Sequence[str],
    labels: Bool[np.ndarray, "n K"],
    predicted: Bool[np.ndarray, "n K"],
    scores: Float[np.ndarray, "n K"] | None,
    thresholds: Sequence[float] | None,
) -> list[dict[str, Any]]:
    """For each label: its images, average precision (with `scores`), threshold, and precision, recall and F1 at it;
    None where one is undefined."""
    precisions = [None] * len(classes) if scores is None else average_precisions(labels, scores)
    counts = (hot.sum(axis=0).tolist() for hot in (labels, predicted, labels & predicted))
    return [
        {
            "class": name,
            "images": images,
            "average_precision": precision,
            "threshold": threshold,
            "precision": hits / count if count else None,
            "recall": hits / images if images else None,
            "f1": 2 * hits / (images + count) if images + count else None,
        }
        for name, precision, threshold, images, count, hits in zip(
            classes, precisions, thresholds or [DEFAULT_THRESHOLD] * len(classes), *counts, strict=True
        )
    ]


def label_summary(rows: Sequence[Mapping[str, Any]], thresholds: Sequence[float] | None) -> dict[str, Any]:
    """Mean F1 over the labels that have images, and where the thresholds come from."""
    mean = _mean([row["f1"] for row in rows if row["images"]])
    return {"f1": mean, "thresholds": describe_thresholds(thresholds)}


def _mean(values: Sequence[float | None]) -> float:
    present = [value for value in values if value is not None]
    return float(np.mean(present)) if present else float("nan")
