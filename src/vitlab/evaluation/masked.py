"""Evaluation of masked patch prediction: metrics next to the best constant prediction's.

The corruption of an image depends only on its position in its split, so that all evaluations measure the same patches.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vitlab.data.dataset import Dataset
from vitlab.data.transforms import EvalTransform
from vitlab.evaluation.load import evaluation_batches, nothing_readable
from vitlab.evaluation.options import LoaderOptions
from vitlab.preprocessing import Preprocessing
from vitlab.train.distributed import SINGLE, World
from vitlab.train.masking import COLORS, MaskedViT, cells_per_side, draw_corruption, patch_losses, patch_targets


@dataclass(frozen=True)
class MaskedEvaluation:
    """Metrics of the corrupted patches of a whole data set.

    The best constant prediction is the same for every image: for classes their frequencies among these very patches,
    whose loss is the entropy in nats; for the regression their mean, cell by cell, whose loss is the variance.
    """

    images: int
    patches: int
    """Corrupted patches, of all three kinds."""
    loss: float
    constant_loss: float
    accuracy: float | None
    """Fraction of cells whose predicted class is correct; None for the regression."""
    constant_accuracy: float | None
    """Frequency of the most frequent class."""
    skipped: int
    """Unreadable images."""

    def metrics(self) -> dict[str, float]:
        names = ("loss", "constant_loss", "accuracy", "constant_accuracy")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def record(self) -> dict[str, Any]:
        """The metrics and what they were measured on, as plain data."""
        return self.metrics() | {"images": self.images, "patches": self.patches, "skipped": self.skipped}


def format_masked(record: dict[str, Any]) -> str:
    """`MaskedEvaluation.record()` as text."""
    values = {name: math.nan if value is None else value for name, value in record.items()}  # JSON has no NaN
    text = "loss {loss:.4f} (the best constant prediction: {constant_loss:.4f})"
    if "accuracy" in values:
        text += " · accuracy {accuracy:.2%} (the most frequent class: {constant_accuracy:.2%})"
    text += " · {patches:,} corrupted patches of {images:,} images"
    if values["skipped"]:
        text += " · {skipped} could not be read"
    return text.format(**values)


@torch.inference_mode()
def evaluate_masked(
    model: MaskedViT,
    dataset: Dataset,
    options: LoaderOptions = LoaderOptions(batch_size=256),
    *,
    preprocessing: Preprocessing | None = None,
    world: World = SINGLE,
) -> MaskedEvaluation:
    """Evaluates `model` on `dataset`, as `evaluate` does a classifier."""
    config, masking = model.config, model.masking
    device = model.mask.device
    cells = cells_per_side(masking, config.patch_size) ** 2
    # Sums over patches, on the device until the end: no batch waits for the one before.
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # loss, correct cells
    counts = torch.zeros(cells, COLORS, dtype=torch.int64, device=device)
    moments = torch.zeros(2, cells, 3, dtype=torch.float64, device=device)  # sums, sums of squares
    images = 0
    transform = EvalTransform(config.image_hw, preprocessing or Preprocessing())
    num_uniforms = masking.num_uniforms(config.num_patches)
    with evaluation_batches(model, dataset, transform, options, num_uniforms=num_uniforms, world=world) as batches:
        for batch in batches:
            assert batch.uniforms is not None
            plan = draw_corruption(masking, batch.uniforms, config.num_patches)
            targets = patch_targets(masking, config.patch_size, batch.images, plan)
            images += len(targets)
            losses = patch_losses(masking, model(batch.images, plan).float(), targets)
            totals += torch.stack([values.double().sum() for values in losses])
            if masking.target == "regression":
                values = targets.double()
                moments += torch.stack([values.sum(dim=(0, 1)), values.square().sum(dim=(0, 1))])
            else:
                classes = targets.flatten(0, 1).T
                counts.scatter_add_(1, classes, torch.ones_like(classes))
    local = {"totals": totals, "counts": counts, "moments": moments}
    sums = world.all_gather({name: tensor.cpu().numpy()[None] for name, tensor in local.items()})
    (images,) = world.all_reduce(images)
    if not images:
        raise nothing_readable(dataset)
    patches = images * masking.corrupted(config.num_patches)
    loss, correct = sums["totals"].sum(axis=0) / (patches * cells)
    accuracy = most_frequent = None
    if masking.target == "regression":
        mean, square = sums["moments"].sum(axis=0) / patches
        constant_loss = (square - mean**2).mean()
    else:
        frequencies = sums["counts"].sum(axis=0) / patches
        logs = np.log(frequencies, out=np.zeros_like(frequencies), where=frequencies > 0)
        constant_loss = -(frequencies * logs).sum(axis=1).mean()
        accuracy = float(correct)
        most_frequent = float(frequencies.max(axis=1).mean())
    skipped = len(dataset) - images
    return MaskedEvaluation(images, patches, float(loss), float(constant_loss), accuracy, most_frequent, skipped)
