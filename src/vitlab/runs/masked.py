"""What a run of masked patch prediction writes: its weights, and reconstructions as images."""

import json
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
from vitlab.train.masking import MASK, MaskedViT, class_colors, draw_corruption, patch_colors, patch_targets
from vitlab.weights import save_model

PARTS = "masking.safetensors"
"""In a run's folder: what is not part of the plain ViT, `mask`, `predictor.weight` and `predictor.bias`."""
RECONSTRUCTIONS = "reconstructions.png"
GRAY = 128.0


def save_masked(model: MaskedViT, folder: Path, extra: dict[str, Any]) -> None:
    """Writes the plain ViT to `folder`/model, which every command takes, and the other parts as `PARTS`."""
    save_model(model.vit, folder / "model", extra=extra)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("vit.")}
    parts = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    metadata = {"masking": json.dumps(to_dict(model.masking), sort_keys=True)}  # one entry: their order is random
    write_bytes(folder / PARTS, safetensors.torch.save(parts, metadata=metadata))


@torch.inference_mode()
def reconstruct(
    model: MaskedViT, images: Float[Tensor, "n 3 H W"], plan: Int64[Tensor, "n m 2"]
) -> dict[str, UInt8[np.ndarray, "n H W 3"]]:
    """Reconstructs `images`, in [-1, 1] and on the model's device, corrupted as `plan` says.

    `corrupted` is the model's input: gray for the mask, else the patch whose embedding is there. In `predicted` and
    `target` the corrupted patches have the most likely colors, or the regression's, and the best prediction's.
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
        predicted = class_colors(predictions.argmax(dim=3))
        best = class_colors(targets)

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
    options = LoaderOptions(count, on_error="skip")
    num_uniforms = masking.num_uniforms(config.num_patches)
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
