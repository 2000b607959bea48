"""A frozen checkpoint whose representations are evaluated, cached on disk, or written to a file.

`fewshot_checkpoint` and `probe_checkpoint` evaluate them. `layer="auto"` takes the best of several blocks, as
`readouts.py` chooses it on training images.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.data import downloads
from vitlab.data.dataset import Dataset
from vitlab.data.registry import check_source, load_dataset
from vitlab.data.splits import stratified_subset
from vitlab.errors import UserError
from vitlab.evaluation.features import Features, features, frozen_preprocessing
from vitlab.evaluation.load import compile_inference, load_for_evaluation
from vitlab.evaluation.options import FeatureOptions
from vitlab.evaluation.readouts import (
    Readout,
    choose_readout,
    images_to_choose,
    is_enough,
    last_blocks,
    readout_features,
)
from vitlab.io import replacing_file, write_arrays
from vitlab.models.config import ViTConfig
from vitlab.models.vit import Model
from vitlab.preprocessing import Preprocessing
from vitlab.train.distributed import SINGLE, World

Log = Callable[[str], None]


@dataclass(frozen=True)
class FrozenModel:
    """The model of a checkpoint, and how images become its representations."""

    checkpoint: str | Path
    options: FeatureOptions
    model: Model
    readout: Readout | None
    """What represents an image; None: the model's pre-logits representation."""
    preprocessing: Preprocessing
    cache: Path
    log: Log
    world: World

    @classmethod
    def load(
        cls, checkpoint: str | Path, options: FeatureOptions, cache: Path | None, log: Log, world: World
    ) -> "FrozenModel":
        """Loads a checkpoint, and logs how images are prepared. cache: folder of features (default: in the user's
        cache)."""
        if options.compile and options.layer == "last4":
            raise UserError("compile=True has no effect with layer='last4'; leave one of the two out.")
        frozen = cls._load(checkpoint, options, cache or downloads.cache_folder() / "features", log, world)
        log(f"images: {frozen.preprocessing.describe()}")
        return frozen

    @classmethod
    def _load(
        cls, checkpoint: str | Path, options: FeatureOptions, cache: Path, log: Log, world: World
    ) -> "FrozenModel":
        """`load` without the log line."""
        compiled = options.compile and not isinstance(options.layer, str)  # `get_intermediate_layers` is never compiled
        loaded = load_for_evaluation(checkpoint, options, pack=not compiled, adaptation=options.adaptation, world=world)
        if compiled:
            compile_inference(loaded.model, options.batch_size, log)
        preprocessing = frozen_preprocessing(loaded.preprocessing, loaded.model.config.image_hw)
        readout = last_blocks(loaded.model.config) if options.layer == "last4" else None
        return cls(checkpoint, options, loaded.model, readout, preprocessing, cache, log, world)

    def features(self, dataset: Dataset) -> Features:
        """The features of a data set, computed or read from the cache."""
        settings: dict[str, Any] = {"preprocessing": self.preprocessing, "cache": self.cache, "world": self.world}
        if self.readout is None:
            return features(self.model, dataset, self.options, **settings)
        return readout_features(self.model, dataset, [self.readout], self.options, **settings)[self.readout]

    @property
    def width(self) -> int:
        """Dimensions of a representation."""
        config = self.model.config
        if self.readout is None or not isinstance(config, ViTConfig):
            return config.num_features
        return len(self.readout.columns()) * config.width

    def to_record(self) -> dict[str, Any]:
        """What represents an image, for records: the number of blocks and the pooling of a ViT."""
        config = self.model.config
        if self.readout is not None:
            return self.readout.to_record()
        return {"depth": config.depth, "pool": config.pool} if isinstance(config, ViTConfig) else {}

    def at_best_readout(self, train: Dataset) -> "FrozenModel":
        """The model at the block and pooling of least leave-one-out loss on these images, if `layer="auto"`; the
        checkpoint's own where nothing can be chosen. Any other `layer` is unchanged."""
        if self.options.layer != "auto":
            return self
        count, classes = len(train), len(train.classes)
        if (most := images_to_choose(classes)) < count:
            train = stratified_subset(train, most / count, seed=0)
        groups = None if train.groups is None else np.unique(train.groups, return_inverse=True)[1]
        choice = None
        if is_enough(len(train), classes, groups):
            settings: dict[str, Any] = {"preprocessing": self.preprocessing, "groups": groups, "world": self.world}
            settings |= {"pool": self.options.pool, "joined": not self.options.compile, "cache": self.cache}
            choice = choose_readout(self.model, train, self.options, **settings)
        if choice is None:
            why = (
                f"the model has one representation, or {count:,} images, their groups or {classes:,} classes forbid it"
            )
            self.log(f"no block is chosen: {why}")
            options = dataclasses.replace(self.options, layer=None)
        else:
            self.log(choice.describe())
            layer = choice.chosen.depth if choice.chosen.joined == 1 else "last4"
            options = dataclasses.replace(self.options, layer=layer, pool=choice.chosen.pool)
        return self._load(self.checkpoint, options, self.cache, self.log, self.world)


def write_features(
    checkpoint: str | Path,
    dataset: str,
    out: Path,
    split: str = "all",
    options: FeatureOptions = FeatureOptions(),
    *,
    root: str | None = None,
    cache: Path | None = None,
    log: Log = lambda _: None,
    world: World = SINGLE,
) -> dict[str, Any]:
    """Writes the representation, the path and the label of every readable image, for search and clustering.

    `out`.npz has `features` float32 [n, D], `files` [n], `labels` [n] (bool [n, K] with several labels per image) and
    `classes` [K]; `out`.parquet has a row for each image: `file`, `label` (its name; several are joined by |) and
    `features`. Returns `out`, the numbers of images, skipped images and dimensions, and `FrozenModel.to_record()`.
    Raises UserError for another suffix, and for bad settings, data or weights.
    """
    if out.suffix not in (".npz", ".parquet"):
        raise UserError(f"{out}: the suffix is {out.suffix!r}; give a file that ends in .npz or .parquet.")
    if out.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError("a .parquet file requires the package pyarrow: install vitlab's extra data, or give an .npz.")
    check_source(dataset, root)
    frozen = FrozenModel.load(checkpoint, options, cache, log, world)
    read: dict[str, Any] = {"root": root, "on_error": options.on_error, "read": options}
    read["levels"] = frozen.preprocessing.range
    with world.rank_0_first():
        images = load_dataset(dataset, split, **read)
        train = load_dataset(dataset, "train", **read) if options.layer == "auto" else images
    frozen = frozen.at_best_readout(train)
    computed = frozen.features(images)
    if world.is_rank_0:
        write = _write_npz if out.suffix == ".npz" else _write_parquet
        write(out, images, computed)
    count, width = computed.x.shape
    result = {"out": str(out), "images": count, "skipped": computed.skipped, "dimensions": width}
    return result | frozen.to_record()


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
