"""Accuracy and loss of a model on a data set, every image counted exactly once."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vitlab.config.data import ReadConfig
from vitlab.data.classes import warn_of_skipped_classes
from vitlab.data.dataset import Dataset, Labels
from vitlab.data.loader import Batch
from vitlab.data.registry import DATASETS, check_source, load_dataset
from vitlab.data.transforms import EvalTransform
from vitlab.display import preformatted
from vitlab.errors import UserError
from vitlab.evaluation.calibration import Calibration, accuracy_interval, calibrate
from vitlab.evaluation.load import (
    compile_inference,
    evaluation_batches,
    gather_in_order,
    load_for_evaluation,
    match_classes,
)
from vitlab.evaluation.multi_label import (
    label_rows,
    label_summary,
    mean_average_precision,
    set_labels,
    stored_thresholds,
    to_labels,
)
from vitlab.evaluation.options import EvalOptions, LoaderOptions
from vitlab.evaluation.summary import format_evaluation
from vitlab.preprocessing import Preprocessing
from vitlab.train.distributed import SINGLE, World
from vitlab.train.objectives import LossKind, class_targets
from vitlab.weights.json_fields import THRESHOLDS

EVAL_DEFAULTS = EvalOptions(batch_size=256)
MAX_SCORES = 2**27
"""Logits that are kept for several labels, of images times classes: 512 MiB."""


@dataclass(frozen=True)
class Evaluation:
    """Predictions for the n readable images of a data set, in its order."""

    classes: tuple[str, ...]
    indices: Int[np.ndarray, " n"]
    """Positions of the images in the data set."""
    labels: Int[np.ndarray, " n"]
    """The first label of each image."""
    predictions: Int[np.ndarray, " n"]
    confidences: Float[np.ndarray, " n"]
    """Probability of the prediction: by softmax, by the sigmoid of a `Dataset.multi_label`."""
    losses: Float[np.ndarray, " n"]
    """Softmax cross-entropy, each of k labels having the target 1/k; binary, summed over classes, of a
    `Dataset.multi_label`."""
    correct: Bool[np.ndarray, " n"]
    """Whether the prediction is any of the labels."""
    in_top5: Bool[np.ndarray, " n"]
    """Whether any of the labels is among the five highest logits."""
    skipped: int
    """Unreadable images."""
    label_sets: Labels | None = None
    """All labels of each image, where images have several."""
    left_out: int = 0
    """Images of the source that have no label among the classes."""
    full_size: int | None = None
    """Images of the complete split, where the data set lacks some of them."""
    computed_in: str = "float32"
    """Type of the model's weights."""
    scores: Float[np.ndarray, "n K"] | None = None
    """The logits, of a `Dataset.multi_label` with up to MAX_SCORES of them; not in `predictions.csv`."""
    thresholds: Sequence[float] | None = None
    """The probability from which each label is set, of `scores`; None: 0.5."""
    predicted_sets: Labels | None = None
    """The labels that are set for each image, where there are `scores`."""

    def with_thresholds(self, thresholds: Sequence[float] | None) -> "Evaluation":
        """The same with the labels that these thresholds set, where there are `scores`."""
        if self.scores is None:
            return self
        predicted = set_labels(torch.from_numpy(self.scores), thresholds).numpy()
        return dataclasses.replace(self, thresholds=thresholds, predicted_sets=to_labels(predicted))

    def multi_hot(self, labels: Labels) -> Bool[np.ndarray, "n K"]:
        """Which labels each image has in `all_labels` or `predicted_sets`."""
        return labels.multi_hot(np.arange(len(self.labels)), len(self.classes))

    @property
    def wrong_labels(self) -> Int[np.ndarray, " n"]:
        """How many labels each image misses or has too many, by `predicted_sets`."""
        assert self.predicted_sets is not None
        return (self.multi_hot(self.all_labels) != self.multi_hot(self.predicted_sets)).sum(axis=1)

    @property
    def all_labels(self) -> Labels:
        """`label_sets`, or the one label of each image."""
        return self.label_sets or Labels(self.labels, np.arange(len(self.labels) + 1))

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

    def metrics(self) -> dict[str, float]:
        """Accuracy, loss, with more than five classes top-5 accuracy, and with `scores` mean average precision."""
        metrics = {"accuracy": self.accuracy, "loss": float(self.losses.mean())}
        if self.scores is not None:
            metrics["mean_average_precision"] = mean_average_precision(self.multi_hot(self.all_labels), self.scores)
        return metrics | ({"top5": float(self.in_top5.mean())} if len(self.classes) > 5 else {})

    def record(self) -> dict[str, Any]:
        """The metrics and what they were measured on, as plain data.

        Also the accuracy's 95 % interval, the expected calibration error (`Calibration`), and where each image has one
        label the balanced accuracy: the mean recall of the classes with images. Of `predicted_sets` instead the mean
        F1 of the labels, and `exact_match`: the fraction of images for which they are the labels.
        """
        per_class = self.per_class()
        record = self.metrics() | {"images": len(self.labels), "skipped": self.skipped, "computed_in": self.computed_in}
        if self.predicted_sets is not None:
            record |= label_summary(per_class, self.thresholds)
            record["exact_match"] = float((self.wrong_labels == 0).mean())
        else:
            record["accuracy_interval"] = list(accuracy_interval(int(self.correct.sum()), len(self.correct)))
            record["expected_calibration_error"] = self.calibration.error
        if self.label_sets is None:
            record["balanced_accuracy"] = float(np.mean([row["recall"] for row in per_class if row["images"]]))
        if self.left_out:
            record["left_out"] = self.left_out
        if self.full_size is not None:
            record["full_size"] = self.full_size
        return record | {"per_class": per_class}

    def metadata(self) -> dict[str, Any]:
        """The main numbers as metadata of the checkpoint: `test_accuracy`, `test_images`, ...; and `thresholds`."""
        names = ("accuracy", "accuracy_interval", "mean_average_precision", "balanced_accuracy")
        names += ("expected_calibration_error", "images")
        if self.predicted_sets is not None:  # of the highest label alone, accuracy says little
            names = ("mean_average_precision", "images") + (() if self.scores is None else ("f1", "exact_match"))
        metadata: dict[str, Any] = {f"test_{name}": value for name, value in self.record().items() if name in names}
        return metadata if self.thresholds is None else metadata | {THRESHOLDS: list(self.thresholds)}

    def as_table(self) -> str:
        return format_evaluation(self.record())

    def _repr_html_(self) -> str:
        return preformatted(self.as_table())

    def per_class(self) -> list[dict[str, Any]]:
        """For each class: images, recall and precision.

        Where images have several labels, `accuracy` replaces recall: the fraction of the class's images whose
        prediction is any of their labels, not necessarily this one. Of `predicted_sets`: as in `label_rows`.
        """
        if self.predicted_sets is not None:
            hot = self.multi_hot(self.all_labels)
            predicted = self.multi_hot(self.predicted_sets)
            return label_rows(self.classes, hot, predicted, self.scores, self.thresholds)
        labels = self.all_labels
        correct = labels.values[np.repeat(self.correct, labels.counts)]
        columns = (labels.values, correct, self.predictions, self.predictions[self.correct])
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


def evaluation_loss(dataset: Dataset) -> LossKind:
    """The loss that tests of this data set report, whatever training minimizes."""
    return "sigmoid" if dataset.multi_label else "softmax"


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    dataset: Dataset,
    image_size: tuple[int, int],
    options: LoaderOptions = EVAL_DEFAULTS,
    *,
    preprocessing: Preprocessing | None = None,
    world: World = SINGLE,
) -> Evaluation:
    """Evaluates `model` on `dataset`; images are squashed to `image_size` unless `preprocessing` is given.

    Each rank computes its shard of the images and returns the whole.
    Raises UserError if the model's classes are not as many as the data set's, and if no image can be read.
    """
    results: list[dict[str, Tensor]] = []  # on the device until the end: no batch waits for the one before
    transform = EvalTransform(image_size, preprocessing or Preprocessing())
    columns = _COLUMNS
    if dataset.multi_label and len(dataset) * len(dataset.classes) <= MAX_SCORES:
        columns = columns | {"scores": np.empty((0, len(dataset.classes)), np.float32)}
    with evaluation_batches(model, dataset, transform, options, world=world) as batches:
        for batch in batches:
            logits = model(batch.images).float()
            if logits.shape[1] != len(dataset.classes):
                raise UserError(
                    f"the model predicts {logits.shape[1]} classes and {dataset.name} has {len(dataset.classes)}; "
                    f"fine-tune it on this data set first (`vitlab finetune`)."
                )
            result = _measure(logits, batch, evaluation_loss(dataset))
            results.append({name: result[name] for name in columns})
    local = {
        name: torch.cat([result[name] for result in results]).cpu().numpy() if results else empty
        for name, empty in columns.items()
    }
    measured: dict[str, Any] = gather_in_order(local, dataset, world)
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    evaluation = Evaluation(
        dataset.classes,
        **measured,
        skipped=len(dataset) - len(measured["indices"]),
        label_sets=None if dataset.label_sets is None else dataset.label_sets.take(measured["indices"]),
        left_out=dataset.left_out,
        full_size=dataset.full_size,
        computed_in=str(dtype).removeprefix("torch."),
    )
    return evaluation.with_thresholds(None)


_COLUMNS = dict.fromkeys(("indices", "labels", "predictions"), np.empty(0, np.int64))
_COLUMNS |= dict.fromkeys(("confidences", "losses"), np.empty(0, np.float32))
_COLUMNS |= dict.fromkeys(("correct", "in_top5"), np.empty(0, np.bool_))


def _measure(logits: Float[Tensor, "B K"], batch: Batch, kind: LossKind) -> dict[str, Tensor]:
    """`_COLUMNS` and `scores` of one batch."""
    targets = batch.labels if batch.targets is None else class_targets(batch.targets, logits.shape[1], kind)
    if kind == "softmax":
        probabilities = logits.softmax(dim=1)
        losses = F.cross_entropy(logits, targets, reduction="none")
    else:
        probabilities = logits.sigmoid()
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1)
    # By the logits: probabilities may round to several of 1. The prediction comes first, by its own argmax: `topk` may
    # order equal logits otherwise.
    prediction = logits.argmax(dim=1)
    best = torch.cat([prediction[:, None], logits.topk(min(5, logits.shape[1]), dim=1).indices], dim=1)
    correct = best == batch.labels[:, None] if batch.targets is None else batch.targets.gather(1, best)
    return {
        "indices": batch.indices,
        "labels": batch.labels,
        "predictions": prediction,
        "confidences": probabilities.gather(1, prediction[:, None])[:, 0],
        "losses": losses,
        "correct": correct[:, 0],
        "in_top5": correct[:, 1:].any(dim=1),
        "scores": logits,
    }


def evaluate_checkpoint(
    checkpoint: str | Path,
    dataset: str | None = None,
    split: str = "test",
    options: EvalOptions = EVAL_DEFAULTS,
    *,
    root: str | None = None,
    resize: int | None = None,
    partial: bool = False,
    log: Callable[[str], None] = lambda _: None,
    world: World = SINGLE,
) -> Evaluation:
    """Evaluates a checkpoint on a data set, by default its metadata's, with its own preprocessing.

    `resize` overrides the resize of the checkpoint and of the data set (ObjectNet has one), `partial` is as in
    `load_dataset`; `log` receives a description of the preprocessing. Images that cannot be read are skipped and
    counted where the checkpoint's own run did so. Where the data has some of the checkpoint's classes only, predictions
    are over all of them. Raises UserError for a checkpoint without a head, and for data with classes that it does not
    know.
    """
    if dataset is not None:
        check_source(dataset, root)  # before anything is loaded
    loaded = load_for_evaluation(checkpoint, options, require_head=True, world=world)
    metadata, image_hw = loaded.metadata, loaded.model.config.image_hw
    thresholds = stored_thresholds(metadata, loaded.model.config.num_classes)
    name = dataset or metadata.get("dataset")
    if name is None:
        raise UserError(f"{checkpoint} does not say what it was trained on; name a data set with --dataset.")
    if resize is None and (info := DATASETS.get(name)) and info.eval_resize:
        side, center = info.eval_resize
        resize = round(max(image_hw) * side / center)
    preprocessing = loaded.preprocessing if resize is None else loaded.preprocessing.with_resize(resize)
    log(f"images: {preprocessing.describe()}")
    # Of its own data set the checkpoint knows the folder, the classes, and whether unreadable images were skipped.
    known = metadata if name == metadata.get("dataset") else {}
    root = root or known.get("root")
    classes = known.get("classes") if known.get("class_indices") else None
    options = dataclasses.replace(options, on_error="skip") if known.get("on_error") == "skip" else options
    with world.rank_0_first():
        images = load_dataset(
            name,
            split,
            root=root,
            classes=classes,
            on_error=options.on_error,
            partial=partial,
            levels=preprocessing.range,
            read=options if options.read_settings else ReadConfig.from_metadata(known),
            multi_label=bool(metadata.get("multi_label")),
        )
    images = match_classes(images, metadata, loaded.model.config.num_classes, name, str(checkpoint))
    if options.compile:
        compile_inference(loaded.model, options.batch_size, log)
    evaluation = evaluate(loaded.model, images, image_hw, options, preprocessing=preprocessing, world=world)
    if world.is_rank_0:
        warn_of_skipped_classes(images, evaluation.indices)
    return evaluation.with_thresholds(thresholds)
