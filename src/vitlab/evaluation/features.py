"""The representations of a frozen model, cached on disk."""

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from torch import nn

from vitlab.config.data import ReadConfig
from vitlab.data import downloads
from vitlab.data.classes import require_two_classes, warn_of_skipped_classes
from vitlab.data.dataset import Dataset, read_arrays
from vitlab.data.decode import Levels
from vitlab.data.identity import digest_images
from vitlab.data.registry import check_source, load_dataset, require_disjoint
from vitlab.data.splits import warn_of_shared_groups
from vitlab.data.transforms import EvalTransform, TrainTransform
from vitlab.errors import UserError
from vitlab.evaluation.load import compile_inference, evaluation_batches, gather_in_order, load_for_evaluation
from vitlab.evaluation.options import EvalOptions, LoaderOptions, SplitOptions
from vitlab.io import replacing_file, write_arrays
from vitlab.models.vit import Model, unwrap
from vitlab.preprocessing import Preprocessing
from vitlab.settings import to_dict
from vitlab.train.distributed import SINGLE, World


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
    model: nn.Module,
    dataset: Dataset,
    options: LoaderOptions = LoaderOptions(),
    *,
    preprocessing: Preprocessing | None = None,
    augmentation: TrainTransform | None = None,
    epoch: int = 0,
    cache: Path | None = None,
    description: str | None = None,
    world: World = SINGLE,
) -> Features:
    """The pre-logits representation of every image (Sec. 4.1), in float32.

    Images are squashed to the model's size unless `preprocessing` is given, or augmented by `augmentation` as in a
    training's `epoch`. The folder `cache` keeps representations by weights, images and preprocessing; nothing is saved
    if an image cannot be read.
    Each rank computes some, and returns all. `description` (default: the data set and its split) names the progress.
    Raises UserError for representations that are not finite, and if no image can be read.
    """
    model = unwrap(model)
    transform = augmentation or EvalTransform(model.config.image_hw, preprocessing or Preprocessing())
    indices, x, path = np.arange(len(dataset)), None, None
    if cache is not None:
        path = cache / f"{digest_images(_digest(model, transform, epoch), dataset)}.npz"
        (x,) = read_arrays(path, "x") or [None]  # nothing where it is missing or corrupt
    (hits,) = world.all_reduce(int(x is not None))  # all have read before rank 0 writes
    if x is None or hits < world.world_size:
        shown = description or f"{dataset.name} {dataset.split}"
        indices, x = _compute(model, dataset, transform, epoch, options, shown, world)
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


def _compute(
    model: Model,
    dataset: Dataset,
    transform: EvalTransform | TrainTransform,
    epoch: int,
    options: LoaderOptions,
    description: str,
    world: World,
) -> tuple[Int[np.ndarray, " n"], Float32[np.ndarray, "n D"]]:
    """Indices of the readable images, and their representations."""
    # Ranks take whole batches in turn, so that an image's batch, and with it every bit, is the same for any number.
    (batch_size,) = world.all_gather({"size": np.array([options.batch_size])})["size"].min(keepdims=True).tolist()
    options = dataclasses.replace(options, batch_size=batch_size)
    indices = np.arange(len(dataset))
    local = indices[indices // options.batch_size % world.world_size == world.rank]
    x = np.zeros((len(local), model.config.num_features), np.float32)
    known = np.zeros(len(local), bool)
    if len(local):
        shown: dict[str, Any] = {"description": description, "world": world}
        loop = evaluation_batches(model, dataset, transform, options, epoch=epoch, indices=local, **shown)
        with torch.inference_mode(), loop as batches:
            for batch in batches:
                representations = model.forward_head(model.forward_features(batch.images), pre_logits=True)
                rows = np.searchsorted(local, batch.indices.cpu().numpy())
                x[rows] = representations.float().cpu().numpy()
                known[rows] = True
    gathered = gather_in_order({"indices": local[known], "x": x[known]}, dataset, world)
    return gathered["indices"], gathered["x"]


def _digest(model: Model, transform: EvalTransform | TrainTransform, epoch: int) -> str:
    """SHA-256 of what a representation depends on besides the image: configuration, weights, preprocessing."""
    config = to_dict(model.config)
    config |= config.pop("variant", {})  # as in earlier versions: their features stay
    settings = {"model": config, "transform": to_dict(transform), "version": 1}
    settings |= {"epoch": epoch, "version": 2} if isinstance(transform, TrainTransform) else {}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
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


def load_frozen(
    checkpoint: str | Path, options: EvalOptions, cache: Path | None, log: Callable[[str], None], world: World
) -> tuple[Model, Preprocessing, Callable[[Dataset], Features]]:
    """A checkpoint's model, its preprocessing, which is described to `log`, and a function that computes the features
    of a data set, or reads them from `cache` (default: the user's cache folder)."""
    loaded = load_for_evaluation(checkpoint, options, world=world)
    if options.compile:
        compile_inference(loaded.model, options.batch_size, log)
    preprocessing = frozen_preprocessing(loaded.preprocessing, loaded.model.config.image_hw)
    log(f"images: {preprocessing.describe()}")
    how: dict[str, Any] = {"preprocessing": preprocessing, "cache": cache or downloads.cache_folder() / "features"}
    return loaded.model, preprocessing, lambda dataset: features(loaded.model, dataset, options, **how, world=world)


def write_features(
    checkpoint: str | Path,
    dataset: str,
    out: Path,
    split: str = "all",
    options: EvalOptions = EvalOptions(),
    *,
    root: str | None = None,
    cache: Path | None = None,
    log: Callable[[str], None] = lambda _: None,
    world: World = SINGLE,
) -> dict[str, Any]:
    """Writes the representation, the path and the label of every readable image, for search and clustering.

    `out`.npz has `features` float32 [n, D], `files` [n], `labels` [n] (bool [n, K] of several) and `classes` [K];
    `out`.parquet has a row for each image: `file`, `label` (its name; several are joined by |) and `features`. Returns
    the numbers of images and of what is in a representation. Raises UserError for another suffix, and for bad settings,
    data or weights.
    """
    if out.suffix not in (".npz", ".parquet"):
        raise UserError(f"{out}: the suffix is {out.suffix!r}; give a file that ends in .npz or .parquet.")
    if out.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError("a .parquet file requires the package pyarrow: pip install 'vitlab[data]', or give an .npz.")
    check_source(dataset, root)
    _, preprocessing, features_of = load_frozen(checkpoint, options, cache, log, world)
    with world.rank_0_first():
        how: dict[str, Any] = {"on_error": options.on_error, "levels": preprocessing.range, "read": options}
        images = load_dataset(dataset, split, root=root, **how)
    written = features_of(images)
    files = [images.path(index) for index in written.indices.tolist()]
    if world.is_rank_0 and out.suffix == ".npz":
        multi_hot = images.label_sets and images.label_sets.multi_hot(written.indices, len(images.classes))
        labels = written.labels if multi_hot is None else multi_hot
        arrays = {"features": written.x, "files": np.array(files), "labels": labels}
        write_arrays(out, arrays | {"classes": np.array(images.classes)})
    elif world.is_rank_0:
        import pyarrow
        import pyarrow.parquet

        # Parquet is UTF-8; the names of files and folders may be any bytes.
        label_lists = map(images.all_labels.of_image, written.indices.tolist())
        names = ["|".join(images.classes[label] for label in labels) for labels in label_lists]
        files, names = ([text.encode(errors="backslashreplace").decode() for text in part] for part in (files, names))
        rows = pyarrow.FixedSizeListArray.from_arrays(written.x.ravel(), written.x.shape[1])
        with replacing_file(out) as file:
            table = pyarrow.table({"file": files, "label": names, "features": rows})
            pyarrow.parquet.write_table(table, file)
    return {"out": str(out), "images": len(files), "skipped": written.skipped, "dimensions": written.x.shape[1]}


def load_train_and_test(
    name: str,
    splits: SplitOptions,
    on_error: str,
    world: World = SINGLE,
    levels: Levels | None = None,
    read: ReadConfig = ReadConfig(),
) -> tuple[Dataset, Dataset]:
    """The training and the test split, with black and white at `levels`.

    Raises UserError where they cannot make a classifier.
    """
    check_source(name, splits.root)
    # A val that is held out from train is trained on, unless it is what is tested.
    whole = splits.train_split is None and splits.test_split == "test"
    train_split = splits.train_split or "train"
    with world.rank_0_first():
        how: dict[str, Any] = {"root": splits.root, "on_error": on_error, "levels": levels, "read": read}
        train = load_dataset(name, train_split, whole_train=whole, **how)
        test = load_dataset(name, splits.test_split, partial=splits.partial, **how)
    require_disjoint(train, test)
    warn_of_shared_groups(train, test)
    check_train_and_test(train, test)
    return train, test


def check_train_and_test(train: Dataset, test: Dataset) -> None:
    """Raises UserError for splits of different classes or one, with several labels per image, or without images."""
    for dataset in (train, test):
        if dataset.label_sets is not None:
            raise UserError(f"{dataset.name} has several labels per image; few-shot and probes need one.")
        if not len(dataset):
            raise UserError(f"{dataset.name} has no images in its split {dataset.split!r}.")
    require_two_classes(train)
    if train.classes != test.classes:
        raise UserError(f"{train.name} has other classes in {train.split} than in {test.split}.")
