"""The representations of a frozen model, cached on disk."""

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int

from vitlab.data import downloads
from vitlab.data.dataset import Dataset, digest_images, read_arrays
from vitlab.data.loader import Batch
from vitlab.data.registry import check_source, load_dataset, require_disjoint
from vitlab.data.transforms import EvalTransform
from vitlab.errors import UserError
from vitlab.evaluate.batches import evaluation_batches, nothing_readable
from vitlab.evaluate.options import LoaderOptions, SplitOptions
from vitlab.io import write_arrays
from vitlab.models.vit import Model
from vitlab.preprocessing import Preprocessing
from vitlab.settings import to_dict
from vitlab.train.distributed import SINGLE, World

ON_DEVICE = 64
"""Batches whose representations stay on the device: the next ones are queued meanwhile."""


@dataclass(frozen=True)
class Features:
    """The representations of the n readable images of a data set, in its order."""

    x: Float[np.ndarray, "n D"]
    labels: Int[np.ndarray, " n"]
    indices: Int[np.ndarray, " n"]
    """Positions of the images in the data set."""
    skipped: int
    """Unreadable images."""


def features(
    model: Model,
    dataset: Dataset,
    options: LoaderOptions = LoaderOptions(),
    *,
    preprocessing: Preprocessing | None = None,
    cache: Path | None = None,
    label: str = "features",
    world: World = SINGLE,
) -> Features:
    """The pre-logits representation of every image (Sec. 4.1), in float32.

    Images are squashed to the model's size unless `preprocessing` is given. With a folder `cache`, what was computed
    from the same weights, images and preprocessing is read from there; unreadable images are tried again. Each process
    computes a share, and returns the whole. `label` names the progress.
    Raises UserError for representations that are not finite, and if no image can be read.
    """
    if not len(dataset):
        raise UserError(f"{dataset.name} has no images in its split {dataset.split!r}.")
    image_hw = model.config.image_hw
    x = np.zeros((len(dataset), model.config.num_features), np.float32)
    known = np.zeros(len(dataset), bool)
    path = None
    if cache is not None:
        digest = _digest(model, EvalTransform(image_hw, preprocessing or Preprocessing()))
        path = cache / f"{digest_images(digest, dataset, range(len(dataset)), {})}.npz"
        if cached := _read(path, x.shape):
            known, x[cached[0]] = cached
    world.broadcast_object(lambda: None)  # all have read before rank 0 writes
    missing = np.flatnonzero(~known)
    # Processes take whole batches in turn, so that an image's batch, and with it every bit, is the same for any number.
    own = missing[np.arange(len(missing)) // options.batch_size % world.world_size == world.rank]
    rows = [own[:0]]
    if len(own):
        part = dataset if len(own) == len(dataset) else dataset.take(own)
        loop = evaluation_batches(model, part, image_hw, preprocessing, options, label=label, shard=False, world=world)
        with torch.inference_mode(), loop as batches:
            for indices, values in _compute(model, batches):
                rows.append(own[indices])
                x[own[indices]] = values
    new = np.concatenate(rows)
    gathered = world.all_gather({"rows": new, "x": x[new]})
    known[gathered["rows"]], x[gathered["rows"]] = True, gathered["x"]
    if not known.any():
        raise nothing_readable(dataset)
    if not (finite := np.isfinite(x).all(axis=1)).all():
        raise UserError(
            f"the representation of {dataset.path(int(np.argmin(finite)))} is not finite: the weights are corrupt, or "
            f"the training diverged. Take another checkpoint."
        )
    indices = np.flatnonzero(known)
    if path is not None and len(gathered["rows"]) and world.is_rank_0:
        write_arrays(path, {"known": known, "x": x[indices]})
    return Features(x[indices], dataset.labels[indices], indices, len(dataset) - len(indices))


def _compute(
    model: Model, batches: Iterator[Batch]
) -> Iterator[tuple[Int[np.ndarray, " n"], Float32[np.ndarray, "n D"]]]:
    """Indices and representations; those of ON_DEVICE batches leave the device together, so that few batches wait."""
    forward = (
        # a view of the class token would keep the memory of all tokens
        (batch.indices, model.forward_head(model.forward_features(batch.images), pre_logits=True).float().clone())
        for batch in batches
    )
    while group := list(itertools.islice(forward, ON_DEVICE)):
        indices, x = (torch.cat(tensors).cpu().numpy() for tensors in zip(*group, strict=True))
        yield indices, x


def _digest(model: Model, transform: EvalTransform) -> str:
    """SHA-256 of all that makes a representation out of an image: configuration, weights, preprocessing."""
    settings = {"model": to_dict(model.config), "transform": to_dict(transform), "version": 1}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _read(path: Path, shape: tuple[int, ...]) -> tuple[Bool[np.ndarray, " N"], Float32[np.ndarray, "n D"]] | None:
    """Which images are in the file, and their features; None where it is missing or corrupt."""
    arrays = read_arrays(path, "known", "x")
    if arrays is None:
        return None
    known, x = arrays
    if known.shape != shape[:1] or known.dtype != bool or x.dtype != np.float32:
        return None
    return (known, x) if x.shape == (known.sum(), *shape[1:]) else None


def cache_folder() -> Path:
    """Where commands cache features: `vitlab/features` in the user's cache folder. It may be deleted at any time."""
    return downloads.cache_folder() / "features"


def frozen_preprocessing(preprocessing: Preprocessing, image_hw: tuple[int, int]) -> Preprocessing:
    """The preprocessing of a frozen model: the checkpoint's; for Google's, that of its few-shot evaluation.

    That is big_vision's `resize(256)|central_crop(224)`, in proportion: both sides bilinear, without antialiasing.
    """
    if not preprocessing.is_google:
        return preprocessing.at(image_hw)
    resize = round(max(image_hw) * 256 / 224)
    return Preprocessing(image_hw, resize, keep_aspect=False, antialias=False, crop_offset="floor")


def load_train_and_test(
    name: str, splits: SplitOptions, on_error: str, world: World = SINGLE
) -> tuple[Dataset, Dataset]:
    """The split to learn from and the one to test on. Raises UserError where they cannot make a classifier."""
    check_source(name, splits.root)
    with world.rank_0_first():
        train = load_dataset(
            name, splits.train_split or "train", root=splits.root, on_error=on_error,
            whole_train=splits.train_split is None,
        )  # fmt: skip
        test = load_dataset(name, splits.test_split, root=splits.root, on_error=on_error, partial=splits.partial)
    if splits.train_split is not None:
        require_disjoint(train, test)
    check_train_and_test(train, test)
    return train, test


def check_train_and_test(train: Dataset, test: Dataset) -> None:
    """Raises UserError for splits of different classes, with several labels per image, or without images."""
    for dataset in (train, test):
        if dataset.label_sets is not None:
            raise UserError(f"{dataset.name} has several labels per image; few-shot and probes need one.")
        if not len(dataset):
            raise UserError(f"{dataset.name} has no images in its split {dataset.split!r}.")
    if train.classes != test.classes:
        raise UserError(f"{train.name} has other classes in {train.split} than in {test.split}.")


def check_features(x: Float[np.ndarray, "n D"], labels: Int[np.ndarray, " m"], num_classes: int) -> None:
    """Raises UserError for representations and labels that no classifier can be fitted to."""
    if not len(x) or len(x) != len(labels):
        raise UserError(f"{len(x)} representations and {len(labels)} labels: give one label each, and at least one.")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise UserError(f"the labels are {labels.min()} to {labels.max()}; {num_classes} classes go from 0 on.")
    if not (finite := np.isfinite(x).all(axis=1)).all():
        raise UserError(f"{(~finite).sum()} of {len(x)} representations are not finite; the weights are corrupt.")
