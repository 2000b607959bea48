"""Evaluation of masked patch prediction: metrics with those of the best constant prediction, and reconstructions.

The corruption of an image depends on its position in its split alone, so that all evaluations are of the same patches.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from PIL import Image, ImageDraw
from torch import Tensor

from vitlab.data.dataset import Dataset
from vitlab.data.transforms import EvalTransform
from vitlab.evaluation.load import evaluation_batches, nothing_readable
from vitlab.evaluation.options import LoaderOptions
from vitlab.io import replacing_file, write_bytes
from vitlab.preprocessing import Preprocessing
from vitlab.settings import to_dict
from vitlab.train.distributed import SINGLE, World
from vitlab.train.masking import (
    COLORS,
    MASK,
    MaskedViT,
    cells_per_side,
    class_colors,
    draw_corruption,
    patch_colors,
    patch_losses,
    patch_targets,
)
from vitlab.weights import save_model

PARTS = "masking.safetensors"
"""In a run's folder: what is not part of the plain ViT, `mask`, `predictor.weight` and `predictor.bias`."""
RECONSTRUCTIONS = "reconstructions.png"
GRAY = 128.0


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
    device, cells = model.mask.device, cells_per_side(masking, config.patch_size) ** 2
    # Sums over patches, on the device until the end: no batch waits for the one before.
    measured = torch.zeros(2, dtype=torch.float64, device=device)  # loss, correct cells
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
            losses = patch_losses(masking, model(batch.images, plan), targets)
            measured += torch.stack([values.double().sum() for values in losses])
            if masking.target == "regression":
                values = targets.double()
                moments += torch.stack([values.sum(dim=(0, 1)), values.square().sum(dim=(0, 1))])
            else:
                classes = targets.flatten(0, 1).T
                counts.scatter_add_(1, classes, torch.ones_like(classes))
    local = {"measured": measured, "counts": counts, "moments": moments}
    sums = world.all_gather({name: tensor.cpu().numpy()[None] for name, tensor in local.items()})
    (images,) = world.all_reduce(images)
    if not images:
        raise nothing_readable(dataset)
    patches = images * masking.corrupted(config.num_patches)
    loss, correct = sums["measured"].sum(axis=0) / (patches * cells)
    accuracy = most_frequent = None
    if masking.target == "regression":
        mean, square = sums["moments"].sum(axis=0) / patches
        constant_loss = (square - mean**2).mean()
    else:
        frequencies = sums["counts"].sum(axis=0) / patches
        logs = np.log(frequencies, out=np.zeros_like(frequencies), where=frequencies > 0)
        constant_loss = -(frequencies * logs).sum(axis=1).mean()
        accuracy, most_frequent = float(correct), float(frequencies.max(axis=1).mean())
    skipped = len(dataset) - images
    return MaskedEvaluation(images, patches, float(loss), float(constant_loss), accuracy, most_frequent, skipped)


# ------------------------------------------------------------------------------------------------------------ the files


def save_masked(model: MaskedViT, folder: Path, extra: dict[str, Any]) -> None:
    """Writes the plain ViT to `folder`/model, which every command takes, and the other parts as `PARTS`."""
    save_model(model.vit, folder / "model", extra=extra)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("vit.")}
    parts = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    metadata = {"masking": json.dumps(to_dict(model.masking), sort_keys=True)}  # one entry: their order is random
    write_bytes(folder / PARTS, safetensors.torch.save(parts, metadata=metadata))


# ------------------------------------------------------------------------------------------------------ reconstructions


@torch.inference_mode()
def reconstruct(
    model: MaskedViT, images: Float[Tensor, "n 3 H W"], plan: Int64[Tensor, "n m 2"]
) -> dict[str, UInt8[np.ndarray, "n H W 3"]]:
    """Reconstructs `images`, in [-1, 1] and on the model's device, corrupted as `plan` says.

    `corrupted` is the model's input: gray for the mask, else the patch whose embedding is there. In `predicted` and
    `target` the corrupted patches have the most likely colors, or the regression's, and those of the best prediction.
    """
    patch = model.config.patch_size
    patches = patch_colors(images, patch, patch)
    positions, sources = plan.unbind(2)
    rows = torch.arange(len(plan), device=plan.device)[:, None]
    masked = (sources == MASK)[..., None, None]
    corrupted = patches[rows, sources.clamp(min=0)].masked_fill(masked, GRAY)
    targets = patch_targets(model.masking, patch, images, plan)
    predictions = model(images, plan).float().unflatten(2, (targets.shape[2], -1))
    if model.masking.target == "regression":
        predicted, best = predictions * 127.5 + 127.5, targets * 127.5 + 127.5
    else:
        predicted, best = class_colors(predictions.argmax(dim=3)), class_colors(targets)

    def paint(cells: Float[Tensor, "n m c 3"]) -> UInt8[np.ndarray, "n H W 3"]:
        """The images with the colors of these cells in the corrupted patches."""
        side = round(cells.shape[2] ** 0.5)
        grid = cells.flatten(0, 1).unflatten(1, (side, side)).permute(0, 3, 1, 2)
        pixels = F.interpolate(grid, (patch, patch), mode="nearest-exact").permute(0, 2, 3, 1).flatten(1, 2)
        canvas = patches.clone()
        canvas[rows, positions] = pixels.unflatten(0, cells.shape[:2])
        return _assemble(canvas, model.config.grid)

    painted = {"corrupted": paint(corrupted), "predicted": paint(predicted), "target": paint(best)}
    return {"image": _assemble(patches, model.config.grid)} | painted


def _assemble(patches: Float[Tensor, "n N p 3"], grid: tuple[int, int]) -> UInt8[np.ndarray, "n H W 3"]:
    side = round(patches.shape[2] ** 0.5)
    image = patches.unflatten(2, (side, side)).unflatten(1, grid).transpose(2, 3)  # [n, h, P, w, P, 3]
    return image.flatten(3, 4).flatten(1, 2).round().clamp(0, 255).to(torch.uint8).cpu().numpy()


def write_reconstructions(
    model: MaskedViT, dataset: Dataset, folder: Path, *, preprocessing: Preprocessing | None = None, count: int = 8
) -> Path:
    """Draws `count` images, evenly spread over `dataset`, as `folder`/reconstructions.png; returns its path.

    They are corrupted as by `evaluate_masked`. Unreadable images are skipped.
    """
    config, masking = model.config, model.masking
    indices = np.unique(np.arange(count) * len(dataset) // count)
    transform = EvalTransform(config.image_hw, preprocessing or Preprocessing())
    options, num_uniforms = LoaderOptions(count, on_error="skip"), masking.num_uniforms(config.num_patches)
    batches_of = evaluation_batches(model, dataset, transform, options, num_uniforms=num_uniforms, indices=indices)
    with batches_of as batches:
        batch = next(batches, None)
        if batch is None or batch.uniforms is None:
            raise nothing_readable(dataset.take(indices))
        plan = draw_corruption(masking, batch.uniforms, config.num_patches)
        sheet = _draw_sheet(reconstruct(model, batch.images, plan))
    with replacing_file(folder / RECONSTRUCTIONS) as file:
        sheet.save(file, format="PNG")
    return folder / RECONSTRUCTIONS


def _draw_sheet(columns: dict[str, np.ndarray], width: int = 112, gap: int = 6, title: int = 16) -> Image.Image:
    """One row per image, one titled column per entry; small images are enlarged by an integer, to about `width`."""
    scale = max(1, round(width / columns["image"].shape[2]))
    margins = ((0, 0), (0, gap), (0, gap), (0, 0))
    enlarged = [images.repeat(scale, axis=1).repeat(scale, axis=2) for images in columns.values()]
    cells = [np.concatenate(list(np.pad(images, margins, constant_values=255))) for images in enlarged]
    sheet = np.pad(np.concatenate(cells, axis=1), ((title, 0), (gap, 0), (0, 0)), constant_values=255)
    image = Image.fromarray(sheet)
    for column, name in enumerate(columns):
        ImageDraw.Draw(image).text((gap + column * cells[0].shape[1], 2), name, fill="black")
    return image
