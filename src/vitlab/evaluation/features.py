"""The representations of a frozen model: cached on disk, or written to a file for search and clustering."""

import dataclasses
import functools
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

from vitlab.data import downloads
from vitlab.data.classes import warn_of_skipped_classes
from vitlab.data.dataset import Dataset, read_arrays
from vitlab.data.identity import exact_fingerprint
from vitlab.data.registry import check_source, load_dataset
from vitlab.data.transforms import EvalTransform, TrainTransform
from vitlab.errors import UserError
from vitlab.evaluation.load import compile_inference, evaluation_batches, gather_in_order, load_for_evaluation
from vitlab.evaluation.options import EvalOptions, LoaderOptions
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
    path = cached = None
    if cache is not None:
        path = cache / f"{exact_fingerprint(_digest(model, transform, epoch), dataset)}.npz"
        cached = read_arrays(path, "x")  # None where it is missing or corrupt
    (hits,) = world.all_reduce(int(cached is not None))  # all have read before rank 0 writes
    if cached is not None and hits == world.world_size:
        (x,) = cached
        indices = np.arange(len(dataset))
    else:
        description = description or f"{dataset.name} {dataset.split}"
        indices, x = _compute(model, dataset, transform, epoch, options, description, world)
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
    batch_size = int(world.all_gather({"size": np.array([options.batch_size])})["size"].min())
    options = dataclasses.replace(options, batch_size=batch_size)
    indices = np.arange(len(dataset))
    local = indices[indices // batch_size % world.world_size == world.rank]
    x = np.zeros((len(local), model.config.num_features), np.float32)
    known = np.zeros(len(local), bool)
    if len(local):
        rank_batches = evaluation_batches(
            model, dataset, transform, options, epoch=epoch, indices=local, description=description, world=world
        )
        with torch.inference_mode(), rank_batches as batches:
            for batch in batches:
                representations = model.forward_head(model.forward_features(batch.images), pre_logits=True)
                rows = np.searchsorted(local, batch.indices.cpu().numpy())
                x[rows] = representations.float().cpu().numpy()
                known[rows] = True
    gathered = gather_in_order({"indices": local[known], "x": x[known]}, dataset, world)
    return gathered["indices"], gathered["x"]


def _digest(model: Model, transform: EvalTransform | TrainTransform, epoch: int) -> str:
    """SHA-256 of what a representation depends on besides the image: configuration, weights, preprocessing."""
    settings = {"model": to_dict(model.config), "transform": to_dict(transform), "epoch": epoch}
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
    loaded = load_for_evaluation(checkpoint, options, pack=not options.compile, world=world)
    if options.compile:
        compile_inference(loaded.model, options.batch_size, log)
    preprocessing = frozen_preprocessing(loaded.preprocessing, loaded.model.config.image_hw)
    log(f"images: {preprocessing.describe()}")
    features_of = functools.partial(
        features,
        loaded.model,
        options=options,
        preprocessing=preprocessing,
        cache=cache or downloads.cache_folder() / "features",
        world=world,
    )
    return loaded.model, preprocessing, features_of


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
        raise UserError("a .parquet file requires the package pyarrow: install vitlab's extra data, or give an .npz.")
    check_source(dataset, root)
    _, preprocessing, features_of = load_frozen(checkpoint, options, cache, log, world)
    with world.rank_0_first():
        images = load_dataset(
            dataset, split, root=root, on_error=options.on_error, levels=preprocessing.range, read=options
        )
    computed = features_of(images)
    if world.is_rank_0:
        write = _write_npz if out.suffix == ".npz" else _write_parquet
        write(out, images, computed)
    count, width = computed.x.shape
    return {"out": str(out), "images": count, "skipped": computed.skipped, "dimensions": width}


def _write_npz(out: Path, images: Dataset, computed: Features) -> None:
    sets = images.label_sets
    labels = computed.labels if sets is None else sets.multi_hot(computed.indices, len(images.classes))
    files = np.array([images.path(index) for index in computed.indices.tolist()])
    arrays = {"features": computed.x, "files": files, "labels": labels, "classes": np.array(images.classes)}
    write_arrays(out, arrays)


def _write_parquet(out: Path, images: Dataset, computed: Features) -> None:
    import pyarrow
    import pyarrow.parquet

    def as_utf8(text: str) -> str:
        """Names of files and folders may be any bytes, and Parquet is UTF-8."""
        return text.encode(errors="backslashreplace").decode()

    indices = computed.indices.tolist()
    names = ["|".join(images.classes[label] for label in images.all_labels.of_image(index)) for index in indices]
    columns = {
        "file": [as_utf8(images.path(index)) for index in indices],
        "label": list(map(as_utf8, names)),
        "features": pyarrow.FixedSizeListArray.from_arrays(computed.x.ravel(), computed.x.shape[1]),
    }
    with replacing_file(out) as file:
        pyarrow.parquet.write_table(pyarrow.table(columns), file)
