"""The representations of a frozen model, cached on disk."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor, nn

from vitlab.data.classes import warn_of_skipped_classes
from vitlab.data.dataset import Dataset, read_arrays
from vitlab.data.identity import exact_fingerprint
from vitlab.data.transforms import EvalTransform, TrainTransform
from vitlab.errors import UserError
from vitlab.evaluation.load import evaluation_batches, gather_in_order
from vitlab.evaluation.options import LoaderOptions
from vitlab.evaluation.sources import SourceDataset
from vitlab.io import write_arrays
from vitlab.models.vit import Model, unwrap
from vitlab.preprocessing import Preprocessing
from vitlab.settings import to_dict
from vitlab.train.distributed import SINGLE, World

BY_IMAGE = 2048
"""Images that are computed before they are written, one file each."""


@dataclass(frozen=True)
class Features:
    """The representations of the n readable images of a data set, in its order."""

    x: Float[np.ndarray, "n D"]
    labels: Int[np.ndarray, " n"]
    indices: Int[np.ndarray, " n"]
    """Positions of the images in the data set."""
    skipped: int
    """Unreadable images."""


@dataclass(frozen=True)
class Representation:
    """What is computed of images instead of the pre-logits representation."""

    width: int
    compute: Callable[[Model, Tensor], Tensor]
    """[B, C, H, W] images -> [B, width]."""
    key: str
    """Names the computation in the cache."""


def features(
    model: nn.Module,
    dataset: Dataset,
    options: LoaderOptions = LoaderOptions(),
    *,
    preprocessing: Preprocessing | None = None,
    augmentation: TrainTransform | None = None,
    epoch: int = 0,
    cache: Path | None = None,
    description: str | None = None,
    representation: Representation | None = None,
    world: World = SINGLE,
) -> Features:
    """The pre-logits representation of every image (Sec. 4.1), or another `representation`, in float32.

    Images are squashed to the model's size unless `preprocessing` is given, or augmented by `augmentation` as in a
    training's `epoch`. The folder `cache` keeps representations by weights, images and preprocessing, if all images can
    be read.
    Each rank computes some, and returns all. `description` (default: the data set and its split) names the progress.
    Raises UserError for representations that are not finite, and if no image can be read.
    """
    model = unwrap(model)
    transform = augmentation or EvalTransform(model.config.image_hw, preprocessing or Preprocessing())
    if cache is not None and augmentation is None and isinstance(dataset, SourceDataset):
        folder = cache / "images" / digest(model, transform, epoch, representation.key if representation else "")
        settings: dict[str, Any] = {"preprocessing": preprocessing, "representation": representation, "world": world}
        return _features_by_image(dataset, folder, lambda missing: features(model, missing, options, **settings))
    compute = representation or Representation(model.config.num_features, _pre_logits, key="")
    path = cached = None
    if cache is not None:
        path = cache / f"{exact_fingerprint(digest(model, transform, epoch, compute.key), dataset)}.npz"
        cached = read_arrays(path, "x")  # None where it is missing or corrupt
    (hits,) = world.all_reduce(int(cached is not None))  # all have read before rank 0 writes
    if cached is not None and hits == world.world_size:
        (x,) = cached
        indices = np.arange(len(dataset))
    else:
        description = description or f"{dataset.name} {dataset.split}"
        indices, x = _compute(model, compute, dataset, transform, epoch, options, description, world)
        if not (finite := np.isfinite(x).all(axis=1)).all():
            raise UserError(
                f"the representation of {dataset.path(int(indices[np.argmin(finite)]))} is not finite: the weights are "
                f"corrupt, or the training diverged. Take another checkpoint."
            )
        if world.is_rank_0:
            warn_of_skipped_classes(dataset, indices)
        if path is not None and len(x) == len(dataset) and world.is_rank_0:
            write_arrays(path, {"x": x})
    return Features(x, dataset.labels[indices], indices, len(dataset) - len(indices))


def _features_by_image(dataset: SourceDataset, folder: Path, compute: Callable[[SourceDataset], Features]) -> Features:
    """Features of images that other data sets may share, one file in the `folder` for each."""
    paths = [folder / key[:2] / f"{key[2:]}.npz" for key in map(dataset.key, range(len(dataset)))]
    known = [read_arrays(path, "x") if path.is_file() else None for path in paths]  # None for a corrupt one
    missing = np.array([row for row, arrays in enumerate(known) if arrays is None], np.int64)
    rows = {row: arrays[0] for row, arrays in enumerate(known) if arrays is not None}
    if len(missing):
        for part in np.split(missing, range(BY_IMAGE, len(missing), BY_IMAGE)):  # a kill loses one
            for row, x in zip(part.tolist(), compute(dataset.take(part)).x, strict=True):
                rows[row] = x
                write_arrays(paths[row], {"x": x})
    x = np.stack([rows[row] for row in range(len(dataset))])
    return Features(x, dataset.labels, np.arange(len(dataset)), 0)


def _pre_logits(model: Model, images: Tensor) -> Tensor:
    return model.forward_head(model.forward_features(images), pre_logits=True)


def _compute(
    model: Model,
    representation: Representation,
    dataset: Dataset,
    transform: EvalTransform | TrainTransform,
    epoch: int,
    options: LoaderOptions,
    description: str,
    world: World,
) -> tuple[Int[np.ndarray, " n"], Float32[np.ndarray, "n D"]]:
    """Indices of the readable images, and their representations."""
    # Ranks take whole batches in turn, so that an image's batch, and with it every bit, is the same for any number.
    batch_size = int(world.all_gather({"size": np.array([options.batch_size])})["size"].min())
    options = dataclasses.replace(options, batch_size=batch_size)
    indices = np.arange(len(dataset))
    local = indices[indices // batch_size % world.world_size == world.rank]
    x = np.zeros((len(local), representation.width), np.float32)
    known = np.zeros(len(local), bool)
    if len(local):
        rank_batches = evaluation_batches(
            model, dataset, transform, options, epoch=epoch, indices=local, description=description, world=world
        )
        with torch.inference_mode(), rank_batches as batches:
            for batch in batches:
                representations = representation.compute(model, batch.images)
                rows = np.searchsorted(local, batch.indices.cpu().numpy())
                x[rows] = representations.float().cpu().numpy()
                known[rows] = True
    gathered = gather_in_order({"indices": local[known], "x": x[known]}, dataset, world)
    return gathered["indices"], gathered["x"]


def digest(model: Model, transform: EvalTransform | TrainTransform, epoch: int = 0, key: str = "") -> str:
    """SHA-256 of what a representation depends on besides the image: configuration, weights, preprocessing."""
    settings = {"model": to_dict(model.config), "transform": to_dict(transform), "epoch": epoch}
    digest = hashlib.sha256((json.dumps(settings, sort_keys=True) + key).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def frozen_preprocessing(preprocessing: Preprocessing, image_hw: tuple[int, int]) -> Preprocessing:
    """The preprocessing of a frozen model: the checkpoint's; for Google's, as in its few-shot evaluation.

    That is big_vision's `resize(256)|central_crop(224)`, in proportion: both sides bilinear, without antialiasing.
    """
    if not preprocessing.is_google:
        return preprocessing.at(image_hw)
    resize = round(max(image_hw) * 256 / 224)
    return Preprocessing(
        image_hw, resize, keep_aspect=False, antialias=False, crop_offset="floor", range=preprocessing.range
    )
