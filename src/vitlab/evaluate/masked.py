"""Masked patch prediction judged and looked at: how well hidden patches are told, beside the best constant answer, and
images of what is told.

What is hidden of a image depends on its place in its split alone: every run and every moment of it is judged alike.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from PIL import Image, ImageDraw
from torch import Tensor

from vitlab.config import MaskingConfig
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.loader import eval_batches
from vitlab.data.transforms import EvalTransform
from vitlab.errors import UserError
from vitlab.io import replacing_file
from vitlab.models.vit import ViT, evaluation_mode
from vitlab.preprocessing import Preprocessing
from vitlab.rng import Stream, example_uniforms
from vitlab.settings import from_dict, to_dict
from vitlab.train.distributed import SINGLE, World
from vitlab.train.masking import (
    COLORS,
    MASK,
    MaskedViT,
    cells_of,
    class_colors,
    corruption,
    judge,
    patch_colors,
    wanted,
)
from vitlab.weights import load_model, save_model

PARTS = "masking.safetensors"
"""The file of a run's folder with what is not part of the plain ViT: `mask`, `predictor.weight`, `predictor.bias`."""
SHEET = "reconstructions.png"
GRAY = 128.0


# ------------------------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class MaskedEvaluation:
    """What is told of the corrupted patches of a whole data set.

    The constant answer is the best of all that look at no image: of the classes it gives their shares among these
    very patches, of the regression their mean, cell by cell. Its loss is the entropy of the shares in nats, or the
    variance.
    """

    images: int
    patches: int
    """Corrupted patches, of all three kinds."""
    loss: float
    constant_loss: float
    accuracy: float | None
    """Share of cells whose class is told right; None for the regression."""
    constant_accuracy: float | None
    """Share of the most frequent class."""
    skipped: int
    """Images that could not be read."""

    def figures(self) -> dict[str, float]:
        """The headline numbers."""
        named = {name: getattr(self, name) for name in ("loss", "constant_loss", "accuracy", "constant_accuracy")}
        return {name: value for name, value in named.items() if value is not None}

    def record(self) -> dict[str, Any]:
        """All figures as plain data."""
        return self.figures() | {"images": self.images, "patches": self.patches, "skipped": self.skipped}

    def as_table(self) -> str:
        """The figures, to be read by a person."""
        lines = [f"loss {self.loss:.4f} (the best constant answer: {self.constant_loss:.4f})"]
        if self.accuracy is not None:
            lines.append(f"accuracy {self.accuracy:.2%} (the most frequent class: {self.constant_accuracy:.2%})")
        lines.append(f"{self.patches:,} corrupted patches of {self.images:,} images")
        if self.skipped:
            lines.append(f"{self.skipped} could not be read")
        return " · ".join(lines)


@torch.inference_mode()
def evaluate_masked(
    model: MaskedViT,
    dataset: Dataset,
    *,
    preprocessing: Preprocessing | None = None,
    batch_size: int = 256,
    workers: int = 0,
    on_error: str = "raise",
    device: str | torch.device = "cpu",
    world: World = SINGLE,
) -> MaskedEvaluation:
    """Runs `model` over `dataset`, its images prepared as by `evaluate`.

    Of several ranks each takes its share, `batch_size` images at a time, and every one returns the whole.
    """
    config, masking = model.config, model.masking
    tally = _Tally(masking, cells_of(masking, config.patch_size) ** 2, device)
    batches = eval_batches(
        dataset, EvalTransform(config.image_hw, preprocessing or Preprocessing()),
        batch_size=batch_size * world.world_size, rank=world.rank, world_size=world.world_size, workers=workers,
        on_error=on_error, device=device,
        draws=masking.draws(config.num_patches),
    )  # fmt: skip
    with evaluation_mode(model):
        for batch in batches:
            world.check_peers()
            tally.skipped += batch.skipped
            if not len(batch.labels):
                continue
            assert batch.draws is not None
            plan = corruption(masking, batch.draws, config.num_patches)
            tally.add(model(batch.images, plan), wanted(masking, config.patch_size, batch.images, plan))
    found = tally.result(world)
    if found is None:
        raise UserError(f"none of the {len(dataset)} images of {dataset.name} ({dataset.split}) could be read.")
    return found


class _Tally:
    """Sums over patches, and what the best constant answer needs, for each of c cells.

    They stay on the device until the end: no batch waits for the one before.
    """

    def __init__(self, masking: MaskingConfig, cells: int, device: str | torch.device) -> None:
        self.masking = masking
        self.images = self.patches = self.skipped = 0
        self.told = torch.zeros(2, dtype=torch.float64, device=device)  # loss, right answers
        self.counts = torch.zeros(cells, COLORS, dtype=torch.int64, device=device)
        self.moments = torch.zeros(2, cells, 3, dtype=torch.float64, device=device)  # sums, sums of squares

    def add(self, predictions: Float[Tensor, "B n O"], answers: Tensor) -> None:
        self.images += len(answers)
        self.patches += answers.shape[0] * answers.shape[1]
        self.told += torch.stack([each.double().sum() for each in judge(self.masking, predictions, answers)])
        if self.masking.target == "regression":
            values = answers.double()
            self.moments += torch.stack([values.sum(dim=(0, 1)), values.square().sum(dim=(0, 1))])
        else:
            classes = answers.flatten(0, 1).T
            self.counts.scatter_add_(1, classes, torch.ones_like(classes))

    def result(self, world: World) -> MaskedEvaluation | None:
        """Of all ranks' patches; None where there are none."""
        own = {name: getattr(self, name).cpu().numpy() for name in ("told", "counts", "moments")}
        own["seen"] = np.array([self.images, self.patches, self.skipped])
        whole = world.all_gather({name: values[None] for name, values in own.items()})
        told, counts, moments, (images, patches, skipped) = (whole[name].sum(axis=0) for name in own)
        if not images:
            return None
        loss, right = told / (patches * len(counts))
        accuracy = most = None
        if self.masking.target == "regression":
            mean, square = moments / patches
            constant = (square - mean**2).mean()
        else:
            shares = counts / patches
            logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
            constant = -(shares * logs).sum(axis=1).mean()
            accuracy, most = float(right), float(shares.max(axis=1).mean())
        return MaskedEvaluation(
            int(images), int(patches), float(loss), float(constant), accuracy, most, int(skipped)
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- on the disk


def save_masked(model: MaskedViT, folder: Path, extra: dict[str, Any]) -> None:
    """Leaves the plain ViT in `folder`/model, which every command takes, and the other parts beside it."""
    save_model(model.vit, folder / "model", extra=extra)
    parts = {name: tensor.detach().cpu().contiguous() for name, tensor in _parts(model).items()}
    about = {"masking": json.dumps(to_dict(model.masking), sort_keys=True)}  # of several, the order would be random
    with replacing_file(folder / PARTS) as file:
        file.write(safetensors.torch.save(parts, metadata=about))


def load_masked(folder: Path | str) -> MaskedViT:
    """The whole model of a finished run of masked patch prediction, in float32 and in evaluation mode.

    Raises ValueError where the folder holds none.
    """
    path = Path(folder) / PARTS
    if not path.is_file():
        raise UserError(f"{folder} is no finished run of masked patch prediction: it has no {PARTS}.")
    vit = load_model(Path(folder) / "model")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            masking = from_dict(MaskingConfig, json.loads((file.metadata() or {})["masking"]))
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
    except (safetensors.SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is damaged, or of something else ({error!r}); take another copy.") from error
    if not isinstance(vit, ViT):
        raise UserError(f"{folder}/model is a ResNet, and {PARTS} belongs to a ViT.")
    model = MaskedViT(vit.config, masking)
    expected = {name: tensor.shape for name, tensor in _parts(model).items()}
    if {name: tensor.shape for name, tensor in found.items()} != expected:
        raise UserError(f"{path} does not fit the model beside it; take another copy of both.")
    model.vit.load_state_dict(vit.state_dict())
    model.load_state_dict(found, strict=False)
    return model.eval()


def _parts(model: MaskedViT) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("vit.")}


# ------------------------------------------------------------------------------------------------------ reconstructions


@dataclass(frozen=True, eq=False)
class Reconstructions:
    """Images, and what is told of them, in [0, 255]."""

    images: UInt8[np.ndarray, "n H W 3"]
    corrupted: UInt8[np.ndarray, "n H W 3"]
    """What the model gets to see: gray for the mask, else the patch whose embedding stands there."""
    predicted: UInt8[np.ndarray, "n H W 3"]
    """Each corrupted patch in the most likely colors, or the regression's; the others as they are."""
    wanted: UInt8[np.ndarray, "n H W 3"]
    """The same with the right answers: the best that could be told."""


@torch.inference_mode()
def reconstruct(model: MaskedViT, images: Float[Tensor, "n 3 H W"], plan: Int64[Tensor, "n m 2"]) -> Reconstructions:
    """What `model` makes of `images`, in [-1, 1] and on its device, when they are corrupted as `plan` says."""
    patch = model.config.patch_size
    patches = patch_colors(images, patch, patch)
    places, sources = plan.unbind(2)
    rows = torch.arange(len(plan), device=plan.device)[:, None]
    shown = torch.where((sources == MASK)[..., None, None], torch.full_like(patches[:, :1], GRAY),
                        patches[rows, sources.clamp(min=0)])  # fmt: skip
    answers = wanted(model.masking, patch, images, plan)
    predictions = model(images, plan).float().unflatten(2, (answers.shape[2], -1))
    regression = model.masking.target == "regression"
    told = predictions * 127.5 + 127.5 if regression else class_colors(predictions.argmax(dim=3))
    right = answers * 127.5 + 127.5 if regression else class_colors(answers)

    def painted(new: Float[Tensor, "n m c 3"]) -> UInt8[np.ndarray, "n H W 3"]:
        canvas = patches.clone()
        canvas[rows, places] = _enlarged(new, patch)
        return _assembled(canvas, model.config.grid)

    return Reconstructions(_assembled(patches, model.config.grid), painted(shown), painted(told), painted(right))


def _enlarged(cells: Float[Tensor, "n m c 3"], patch: int) -> Float[Tensor, "n m p 3"]:
    """The side x side cells of each patch as the colors of its P x P pixels."""
    side = round(cells.shape[2] ** 0.5)
    flat = cells.flatten(0, 1).unflatten(1, (side, side)).permute(0, 3, 1, 2)
    pixels = F.interpolate(flat, (patch, patch), mode="nearest-exact")
    return pixels.permute(0, 2, 3, 1).flatten(1, 2).unflatten(0, cells.shape[:2])


def _assembled(patches: Float[Tensor, "n N p 3"], grid: tuple[int, int]) -> UInt8[np.ndarray, "n H W 3"]:
    side = round(patches.shape[2] ** 0.5)
    placed = patches.unflatten(2, (side, side)).unflatten(1, grid).transpose(2, 3)  # [n, h, P, w, P, 3]
    return placed.flatten(3, 4).flatten(1, 2).round().clamp(0, 255).to(torch.uint8).cpu().numpy()


def write_reconstructions(
    model: MaskedViT, dataset: Dataset, folder: Path, *, preprocessing: Preprocessing | None = None, count: int = 8
) -> Path:
    """Draws `count` images, evenly spread over `dataset`, as `folder`/reconstructions.png; returns its path.

    They are corrupted as in `evaluate_masked`. Those that cannot be read are left out.
    """
    config, masking = model.config, model.masking
    places, decoded = [], []
    for index in np.unique(np.arange(count) * len(dataset) // count).tolist():
        try:
            decoded.append(dataset.image(index))
        except ImageError:
            continue
        places.append(index)
    path, device = folder / SHEET, model.mask.device
    if not decoded:
        raise UserError(f"none of {count} images of {dataset.name} ({dataset.split}) could be read.")
    indices = np.array(places, np.int64)
    numbers = example_uniforms(
        0, np.zeros_like(indices), indices, masking.draws(config.num_patches), Stream.EXAMPLE_DRAWS
    )
    plan = corruption(masking, torch.from_numpy(numbers).to(device), config.num_patches)
    images = EvalTransform(config.image_hw, preprocessing or Preprocessing()).apply(decoded).to(device)
    with replacing_file(path) as file:
        _sheet(reconstruct(model, images, plan)).save(file, format="PNG")
    return path


def _sheet(found: Reconstructions, least: int = 112, gap: int = 6, title: int = 16) -> Image.Image:
    """One row a image; small images are enlarged by a whole number, to `least` pixels across or so."""
    names = [field.name for field in dataclasses.fields(found)]
    columns: Sequence[UInt8[np.ndarray, "n H W 3"]] = [getattr(found, name) for name in names]
    count, height, width, _ = columns[0].shape
    scale = max(1, round(least / width))
    down, across = height * scale + gap, width * scale + gap
    sheet = Image.new("RGB", (len(columns) * across + gap, title + count * down + gap), "white")
    draw = ImageDraw.Draw(sheet)
    for column, (name, images) in enumerate(zip(names, columns, strict=True)):
        left = gap + column * across
        draw.text((left, 2), name, fill="black")
        for row, image in enumerate(images):
            large = Image.fromarray(image).resize((width * scale, height * scale), Image.Resampling.NEAREST)
            sheet.paste(large, (left, title + gap + row * down))
    return sheet
