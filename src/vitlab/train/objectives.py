"""What a run minimizes, and the model that it trains for it.

`prepare_batch(batch, rng)` draws the randomness of a whole batch once (mixup, or which patches are masked);
`loss(model, images, targets)` returns the mean loss and accuracy of any part of it. The loop weighs micro-batches by
their size, so accumulation changes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlab.config import MaskingConfig, TrainConfig
from vitlab.data.dataset import Dataset
from vitlab.data.loader import Batch
from vitlab.data.transforms import mixup
from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.models.vit import Model, build_model
from vitlab.train.masking import MaskedPatch, MaskedViT

LossKind = Literal["softmax", "sigmoid"]


def create_training_model(
    config: ModelConfig, masking: MaskingConfig | None, generator: torch.Generator | None = None
) -> Model | MaskedViT:
    """A new model, within a MaskedViT for masked patch prediction."""
    if masking is None:
        return build_model(config, generator=generator)
    assert isinstance(config, ViTConfig)
    return MaskedViT(config, masking, generator=generator)


@dataclass(frozen=True)
class Classification:
    """Softmax or sigmoid cross-entropy on K classes, one or several per image, with label smoothing and mixup."""

    num_classes: int
    kind: LossKind = "softmax"
    label_smoothing: float = 0.0
    mixup: float = 0.0
    class_weights: Float[Tensor, " K"] | None = None
    """Weight of each class (`balanced_weights`); None: all count 1."""
    num_uniforms = 0
    """Uniform numbers that the loader draws for each example."""

    def prepare_batch(self, batch: Batch, rng: np.random.Generator) -> tuple[Float[Tensor, "B 3 H W"], Tensor]:
        """(images, targets) after mixup. Targets are classes [B]; bool [B, K] for several labels; float [B, K] with
        mixup."""
        targets = batch.labels if batch.targets is None else batch.targets
        if not self.mixup:
            return batch.images, targets
        return mixup(batch.images, class_targets(targets, self.num_classes, self.kind), self.mixup, rng)

    def loss(
        self, model: Callable[..., Tensor], images: Float[Tensor, "B 3 H W"], targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(mean loss, top-1 accuracy), 0-d. Of several labels any is correct, of none no prediction; with mixup, any of
        largest weight."""
        logits = model(images).float()
        predicted = logits.detach().argmax(dim=1)
        if targets.ndim == 1:
            correct = predicted == targets
        else:
            largest = targets.amax(dim=1)
            correct = (targets.gather(1, predicted[:, None])[:, 0] == largest) & (largest > 0)
        weights = None if self.class_weights is None else self.class_weights.to(logits.device)
        return classification_loss(logits, targets, self.kind, self.label_smoothing, weights), correct.float().mean()


Objective = Classification | MaskedPatch


def create_objective(config: TrainConfig, labels: Int[np.ndarray, " n"] | None = None) -> Objective:
    """The objective of the run. `labels` of all training images are required for `balance`."""
    if config.masking is None:
        classes, weights = config.model.num_classes, None
        if config.balance and labels is not None:
            weights = torch.from_numpy(balanced_weights(labels, classes)).float()
        return Classification(classes, config.loss, config.label_smoothing, config.mixup, weights)
    assert isinstance(config.model, ViTConfig)
    return MaskedPatch(config.masking, config.model)


def blank_batch(objective: Objective, images: Float[Tensor, "B 3 H W"]) -> Batch:
    """A batch of these images, all of class 0, to measure a step with."""
    labels = images.new_zeros(len(images), dtype=torch.int64)
    uniforms = images.new_full((len(images), objective.num_uniforms), 0.5, dtype=torch.float64)
    return Batch(images, labels, labels, uniforms=uniforms if objective.num_uniforms else None)


def class_targets(
    targets: Int[Tensor, " B"] | Bool[Tensor, "B K"], classes: int, kind: LossKind
) -> Float[Tensor, "B K"]:
    """Float targets: 1 for every label of an image; for a softmax, 1/k for each of k labels (Mahajan et al. 2018), and
    0 without any."""
    if targets.ndim == 1:
        return F.one_hot(targets, classes).float()
    labels = targets.float()
    return labels / labels.sum(dim=1, keepdim=True).clamp(min=1) if kind == "softmax" else labels


def check_balance(config: TrainConfig, dataset: Dataset) -> None:
    """Raises UserError for `balance` of images with several labels."""
    if config.balance and dataset.label_sets is not None:
        raise UserError(
            f"balance=True counts the one label of each image, and images of {dataset.name} have several; leave it out."
        )


def balanced_weights(labels: Int[np.ndarray, " n"], classes: int) -> Float[np.ndarray, " K"]:
    """Weights of the classes, inverse to their number of images; their mean over the images is 1."""
    counts = np.bincount(labels, minlength=classes)
    return np.divide(len(labels) / np.count_nonzero(counts), counts, out=np.zeros(classes), where=counts > 0)


def classification_loss(
    logits: Float[Tensor, "B K"],
    targets: Int[Tensor, " B"] | Bool[Tensor, "B K"] | Float[Tensor, "B K"],
    kind: LossKind = "softmax",
    label_smoothing: float = 0.0,
    class_weights: Float[Tensor, " K"] | None = None,
) -> Float[Tensor, ""]:
    """Mean over images of the cross-entropy between targets and logits.

    targets: classes; or, bool, all labels of each image (see `class_targets`); or weights of classes. Softmax:
    smoothing spreads its fraction evenly over all classes. Sigmoid, as in Google's pre-training: binary cross-entropies
    are summed over classes, and smoothing s makes the targets 1 - s and s.

    class_weights: an image counts as much as its label; with mixup, as the mean of its labels by their weight.
    """
    weights = None
    if class_weights is not None:
        if targets.ndim == 1:
            weights = class_weights[targets][:, None]
        else:
            weights = (targets * class_weights).sum(dim=1, keepdim=True)
            weights = weights / targets.sum(dim=1, keepdim=True).clamp(min=1e-6)
    if targets.dtype == torch.bool or (targets.ndim == 1 and kind == "sigmoid"):
        targets = class_targets(targets, logits.shape[1], kind).to(logits.dtype)
    if kind == "softmax":
        if weights is None:
            return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
        losses = F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="none")
        return (weights[:, 0] * losses).mean()
    targets = targets * (1 - 2 * label_smoothing) + label_smoothing
    return F.binary_cross_entropy_with_logits(logits, targets, weights, reduction="sum") / logits.shape[0]
