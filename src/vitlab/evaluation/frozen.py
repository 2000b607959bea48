"""A checkpoint as a frozen model: its features for few-shot evaluation, probes, and files that other tools read.

`load_frozen` returns the function that computes the features of a data set, or reads them from the cache.
"""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.config.data import ReadConfig
from vitlab.data import downloads
from vitlab.data.classes import require_two_classes
from vitlab.data.dataset import Dataset
from vitlab.data.decode import Levels
from vitlab.data.registry import check_source, load_dataset, require_disjoint
from vitlab.data.splits import warn_of_shared_groups
from vitlab.errors import UserError
from vitlab.evaluation.features import Features, features
from vitlab.evaluation.load import compile_inference, load_for_evaluation
from vitlab.evaluation.options import EvalOptions, SplitOptions
from vitlab.io import replacing_file, write_arrays
from vitlab.models.vit import Model
from vitlab.preprocessing import Preprocessing
from vitlab.train.distributed import SINGLE, World


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
        raise UserError("a .parquet file requires the package pyarrow: pip install 'vitlab[data]', or give an .npz.")
    check_source(dataset, root)
    _, preprocessing, features_of = load_frozen(checkpoint, options, cache, log, world)
    with world.rank_0_first():
        images = load_dataset(
            dataset, split, root=root, on_error=options.on_error, levels=preprocessing.range, read=options
        )
    computed = features_of(images)
    if world.is_rank_0 and out.suffix == ".npz":
        _write_npz(out, images, computed)
    elif world.is_rank_0:
        _write_parquet(out, images, computed)
    counts = {"images": len(computed.indices), "skipped": computed.skipped, "dimensions": computed.x.shape[1]}
    return {"out": str(out), **counts}


def _write_npz(out: Path, images: Dataset, computed: Features) -> None:
    labels = computed.labels
    if images.label_sets is not None:
        labels = images.label_sets.multi_hot(computed.indices, len(images.classes))
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
    train_split = splits.train_split or "train"
    # A val that is held out from train is trained on, unless it is what is tested.
    whole = splits.train_split is None and splits.test_split == "test"
    load = functools.partial(load_dataset, name, root=splits.root, on_error=on_error, levels=levels, read=read)
    with world.rank_0_first():
        train = load(train_split, whole_train=whole)
        test = load(splits.test_split, partial=splits.partial)
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
