"""The result of an evaluation: predictions of every image, their metrics, the record for result.json, and its text."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from vitlab.data.dataset import Labels
from vitlab.display import format_table, preformatted
from vitlab.errors import quoted
from vitlab.evaluation.calibration import (
    COVERAGE,
    MIN_CALIBRATED,
    Calibration,
    Calibrator,
    accuracy_interval,
    calibrate,
    divide_logits,
)
from vitlab.evaluation.multi_label import decide_labels, label_rows, label_summary, mean_average_precision, to_labels
from vitlab.weights.json_fields import THRESHOLDS

ROWS = 4096
"""Images whose probabilities are computed at a time."""
METADATA = ("images", "accuracy", "accuracy_interval", "balanced_accuracy", "expected_calibration_error")
"""The entries of a record that are also metadata of the checkpoint."""
MULTI_LABEL_METADATA = ("images", "mean_average_precision", "f1", "exact_match")
"""The same with `predicted_sets`, where accuracy is of the highest label alone."""


@dataclass(frozen=True)
class Evaluation:
    """Predictions for the n readable images of a data set, in its order. An image has

    1. one label;
    2. or several labels, any of which is right (ImageNet-ReaL): `label_sets`;
    3. or several labels, all of which are to be predicted (a `Dataset.multi_label`): `label_sets`, `scores` and
       `predicted_sets`. With more than MAX_SCORES scores such a data set has the record of the second kind.
    """

    classes: tuple[str, ...]
    indices: Int[np.ndarray, " n"]
    """Positions of the images in the data set."""
    labels: Int[np.ndarray, " n"]
    """The first label of each image."""
    predictions: Int[np.ndarray, " n"]
    confidences: Float[np.ndarray, " n"]
    """Probability of the prediction: by softmax; of a `Dataset.multi_label` by sigmoid."""
    losses: Float[np.ndarray, " n"]
    """Softmax cross-entropy, where each of k labels has the target 1/k. Of a `Dataset.multi_label`: binary
    cross-entropy, summed over classes."""
    correct: Bool[np.ndarray, " n"]
    """Whether the prediction is any of the labels."""
    in_top5: Bool[np.ndarray, " n"]
    """Whether any of the labels is among the five highest logits."""
    skipped: int
    """Unreadable images."""
    label_sets: Labels | None = None
    """All labels of each image; None if each has one."""
    left_out: int = 0
    """Images of the source that have no label among the classes."""
    full_size: int | None = None
    """Images of the complete split, if some are missing in the data set."""
    computed_in: str = "float32"
    """Type of the model's weights."""
    scores: Float[np.ndarray, "n K"] | None = None
    """The logits of a `Dataset.multi_label` with up to MAX_SCORES of them. They are not in `predictions.csv`."""
    thresholds: Sequence[float] | None = None
    """The probability from which each label is set; None: 0.5."""
    predicted_sets: Labels | None = None
    """The labels that are set for each image, by `scores` and `thresholds`."""

    logits: Float[np.ndarray, "n K"] | None = None
    """Of images with one label, if they are kept; not divided by a temperature. Not in `predictions.csv`."""
    calibrator: Calibrator | None = None
    """What `losses` and `confidences` were calibrated by; None: they are of the plain logits."""
    calibration_record: Mapping[str, Any] = field(default_factory=dict)
    """temperature: the divisor of the logits. uncalibrated_error: the expected calibration error without it; None of
    few images. coverage: the expected and the measured fraction of prediction sets with the label, and their mean
    size."""

    def with_calibrator(self, calibrator: Calibrator | None) -> "Evaluation":
        """The same with the losses and confidences of divided logits; unchanged if `calibrator` or `logits` is None."""
        if calibrator is None or self.logits is None:
            return self
        losses, confidences, covered, sizes = (np.empty(len(self.labels), np.float32) for _ in range(4))
        for start in range(0, len(self.labels), ROWS):  # float64 copies of all logits may not fit in memory
            part = slice(start, start + ROWS)
            labels = self.labels[part]
            losses[part], probabilities = divide_logits(self.logits[part], labels, calibrator.temperature or 1.0)
            sets = calibrator.sets(probabilities, COVERAGE)
            confidences[part] = probabilities.max(axis=1)
            covered[part], sizes[part] = sets[np.arange(len(sets)), labels], sets.sum(axis=1)
        coverage = {"measured": float(covered.mean()), "mean_size": float(sizes.mean())}
        record: dict[str, Any] = {"coverage": {"expected": COVERAGE} | coverage}
        if calibrator.temperature is not None:
            error = self.calibration.error if len(self.labels) >= MIN_CALIBRATED else None
            record |= {"temperature": calibrator.temperature, "uncalibrated_error": error}
        given: dict[str, Any] = {"losses": losses, "confidences": confidences, "calibration_record": record}
        return dataclasses.replace(self, calibrator=calibrator, **given)

    def with_thresholds(self, thresholds: Sequence[float] | None) -> "Evaluation":
        """The same with the labels that these thresholds set; unchanged if `scores` is None."""
        if self.scores is None:
            return self
        predicted = decide_labels(torch.from_numpy(self.scores), thresholds).numpy()
        return dataclasses.replace(self, thresholds=thresholds, predicted_sets=to_labels(predicted))

    @property
    def all_labels(self) -> Labels:
        """`label_sets`, or the one label of each image."""
        return self.label_sets or Labels(self.labels, np.arange(len(self.labels) + 1))

    def multi_hot(self, labels: Labels) -> Bool[np.ndarray, "n K"]:
        """Which labels each image has in `all_labels` or `predicted_sets`."""
        return labels.multi_hot(np.arange(len(self.labels)), len(self.classes))

    @property
    def wrong_labels(self) -> Int[np.ndarray, " n"]:
        """For each image, how many labels of `predicted_sets` are missing or too many."""
        assert self.predicted_sets is not None
        return (self.multi_hot(self.all_labels) != self.multi_hot(self.predicted_sets)).sum(axis=1)

    @property
    def accuracy(self) -> float:
        """Top-1 accuracy."""
        return float(self.correct.mean())

    @property
    def calibration(self) -> Calibration:
        """Accuracy by confidence, in 15 bins."""
        return calibrate(self.confidences, self.correct)

    @property
    def confusion(self) -> Int[np.ndarray, "K K"]:
        """Counts of images by label (row) and prediction (column), for images with one label."""
        assert self.label_sets is None, "which of several labels was confused is unknown"
        counts = np.zeros((len(self.classes), len(self.classes)), dtype=np.int64)
        np.add.at(counts, (self.labels, self.predictions), 1)
        return counts

    def per_class(self) -> list[dict[str, Any]]:
        """For each class: images, recall and precision.

        If images have several labels, `accuracy` replaces recall: the fraction of the class's images whose prediction
        is any of their labels, not necessarily this one. With `predicted_sets` the rows are those of `label_rows`.
        """
        if self.predicted_sets is not None:
            hot, predicted_hot = self.multi_hot(self.all_labels), self.multi_hot(self.predicted_sets)
            return label_rows(self.classes, hot, predicted_hot, self.scores, self.thresholds)
        labels = self.all_labels
        correct_labels = labels.values[np.repeat(self.correct, labels.counts)]
        columns = (labels.values, correct_labels, self.predictions, self.predictions[self.correct])
        counts = [np.bincount(column, minlength=len(self.classes)).tolist() for column in columns]
        recall = "recall" if self.label_sets is None else "accuracy"
        return [
            {
                "class": name,
                "images": images,
                recall: correct / images if images else None,
                "precision": hits / predicted if predicted else None,
            }
            for name, images, correct, predicted, hits in zip(self.classes, *counts, strict=True)
        ]

    def metrics(self) -> dict[str, float]:
        """accuracy, loss; with more than five classes top5; with `scores` mean_average_precision."""
        metrics = {"accuracy": self.accuracy, "loss": float(self.losses.mean())}
        if self.scores is not None:
            metrics["mean_average_precision"] = mean_average_precision(self.multi_hot(self.all_labels), self.scores)
        if len(self.classes) > 5:
            metrics["top5"] = float(self.in_top5.mean())
        return metrics

    def record(self) -> dict[str, Any]:
        """The metrics and what they were measured on, as plain data:

        - always: `metrics`, images, skipped, computed_in and `per_class`; if there are any, left_out and full_size
        - without `predicted_sets`: accuracy_interval (95%) and, of MIN_CALIBRATED images or more,
          expected_calibration_error (`Calibration`); with a calibrator also `calibration_record`
        - with `predicted_sets`: f1 and thresholds (`label_summary`), and exact_match, the fraction of images with
          exactly the right labels
        - if each image has one label: balanced_accuracy, the mean recall of the classes with images
        """
        per_class = self.per_class()
        record = self.metrics() | {"images": len(self.labels), "skipped": self.skipped, "computed_in": self.computed_in}
        if self.predicted_sets is None:
            record["accuracy_interval"] = list(accuracy_interval(int(self.correct.sum()), len(self.correct)))
            if len(self.labels) >= MIN_CALIBRATED:
                record["expected_calibration_error"] = self.calibration.error
            record |= self.calibration_record
        else:
            record |= label_summary(per_class, self.thresholds)
            record["exact_match"] = float((self.wrong_labels == 0).mean())
        if self.label_sets is None:
            record["balanced_accuracy"] = float(np.mean([row["recall"] for row in per_class if row["images"]]))
        if self.left_out:
            record["left_out"] = self.left_out
        if self.full_size is not None:
            record["full_size"] = self.full_size
        return record | {"per_class": per_class}

    def metadata(self) -> dict[str, Any]:
        """The main numbers as metadata of the checkpoint: `test_accuracy`, `test_images`, ...; `thresholds`; the
        `temperature`, which is part of the head; and `coverage_masses` for prediction sets."""
        names = METADATA
        if self.predicted_sets is not None:
            names = ("images",) if self.scores is None else MULTI_LABEL_METADATA
        metadata: dict[str, Any] = {f"test_{name}": value for name, value in self.record().items() if name in names}
        if (calibrator := self.calibrator) is not None:
            metadata |= {} if calibrator.temperature is None else {"temperature": calibrator.temperature}
            metadata["coverage_masses"] = list(calibrator.masses)
        return metadata if self.thresholds is None else metadata | {THRESHOLDS: list(self.thresholds)}

    def as_table(self) -> str:
        return format_evaluation(self.record())

    def _repr_html_(self) -> str:
        return preformatted(self.as_table())


def headline(record: Mapping[str, Any]) -> str:
    """The main metric of a record as text: mean average precision, if there is one, or accuracy."""
    # One label that all images have would make the accuracy 100%.
    precision = record.get("mean_average_precision")
    return f"accuracy {record['accuracy']:.2%}" if precision is None else f"mean average precision {precision:.2%}"


def format_evaluation(record: Mapping[str, Any]) -> str:
    """`Evaluation.record()` as text: a table of the classes with images or predictions, then the metrics."""
    rows = [row for row in record["per_class"] if row["images"] or row["precision"] is not None]
    if "f1" in record:  # of predicted sets
        columns = ("class", "images", "average_precision", "threshold", "precision", "recall", "f1")
        shown = ("mean_average_precision", "f1", "exact_match", "loss")
        metrics, last = [], f"\nthresholds: {record['thresholds']}"
    else:
        columns = ("class", "images", "recall", "accuracy", "precision")
        shown = ("balanced_accuracy", "loss", "top5")
        low, high = record["accuracy_interval"]
        metrics, last = [f"accuracy {record['accuracy']:.2%} (95% interval {low:.2%} to {high:.2%})"], ""
    present = [name for name in shown if record.get(name) is not None]
    metrics += [f"{name.replace('_', ' ')} {record[name]:{'.4f' if name == 'loss' else '.2%'}}" for name in present]
    names = [name for name in columns if rows and name in rows[0]]
    table = format_table([{name.replace("_", " "): _cell(name, row[name]) for name in names} for row in rows])
    total = f" of {record['full_size']:,}" if "full_size" in record else ""
    tested = sum(row["images"] > 0 for row in rows)
    classes = len(record["per_class"])
    of_classes = f" of {tested} of the {classes} classes" if tested < classes else ""
    notes = {"skipped": "could not be read", "left_out": "have no label here"}
    parts = [f"{record['images']:,}{total} images{of_classes}", *metrics]
    parts += [f"{record[name]} {note}" for name, note in notes.items() if record.get(name)]
    if record.get("computed_in", "float32") != "float32":
        parts.append(f"computed in {record['computed_in']}")
    return f"{table}\n{' · '.join(parts)}{last}"


def _cell(column: str, value: Any) -> str | int:
    """`images` remains a number: the table aligns it and separates its thousands."""
    if column == "class":
        return quoted(value)
    if column == "threshold":
        return f"{value:.3f}"
    if column == "images":
        return value
    return "-" if value is None else f"{value:.1%}"
