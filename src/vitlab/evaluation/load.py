"""What an evaluation starts with: the checkpoint on its device, and a data set with its classes, batch by batch.

In float32 the model computes as its checkpoint does, up to rounding. In bfloat16 weights and activations have 8
significant bits; logits and features are cast to float32. Results say which it was.
"""

import collections
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitlab.config.data import ReadConfig
from vitlab.data.classes import canonical, require_two_classes
from vitlab.data.dataset import Dataset
from vitlab.data.decode import Levels
from vitlab.data.imagenet import has_imagenet_classes, predicts_imagenet
from vitlab.data.loader import Batch, eval_batches
from vitlab.data.registry import DATASETS, check_source, load_dataset, require_disjoint
from vitlab.data.splits import warn_of_shared_groups
from vitlab.data.transforms import EvalTransform, TrainTransform
from vitlab.display import ProgressDisplay
from vitlab.errors import UserError, first_ten, quoted
from vitlab.evaluation.options import LoaderOptions, ModelOptions, SplitOptions
from vitlab.models.config import check_rgb
from vitlab.models.vit import Model, evaluation_mode
from vitlab.train.compile_cache import compile_cache, cpp_compiler
from vitlab.train.distributed import SINGLE, World
from vitlab.train.precision import choose_device, frozen_dtype, keep_freed_memory, prepare_for_inference
from vitlab.weights import Checkpoint, load_checkpoint

logger = logging.getLogger(__name__)


def load_for_evaluation(
    checkpoint: str | Path,
    options: ModelOptions,
    *,
    require_head: bool = False,
    pack: bool = True,
    adaptation: Mapping[str, Any] | None = None,
    world: World = SINGLE,
) -> Checkpoint:
    """A checkpoint in evaluation mode on the device of this process.

    Its weights are cast to `options.precision`, as `frozen_dtype` resolves it. Its linear layers are packed where that
    is faster, unless `pack` is False: `compile_inference` cannot follow packed layers. adaptation: as in
    `load_checkpoint`.
    Raises UserError for a missing device and, with `require_head`, for a model without a head.
    """
    device = choose_device(world.device(options.device))
    if device.type == "cpu":
        keep_freed_memory()  # every batch allocates blocks of the same sizes
    size, interpolation = options.image_size, options.interpolation
    loaded = load_checkpoint(checkpoint, image_size=size, interpolation=interpolation, **(adaptation or {}))
    check_rgb(loaded.model.config)
    if require_head and loaded.model.head is None:
        raise UserError(f"{checkpoint} has no head and predicts no classes; fine-tune it first (`vitlab finetune`).")
    prepare_for_inference(loaded.model, device, frozen_dtype(options.precision, device), pack)
    return loaded


def compile_inference(model: Model, batch_size: int, log: Callable[[str], None] = lambda _: None) -> None:
    """Compiles `model.forward_features` for this many images. Other batches, such as a smaller last one, run as before.

    Raises UserError where torch finds no compiler.
    """
    if cpp_compiler() is None:
        raise UserError("compile=True requires a C++ compiler: install g++, or name another one in CXX.")
    log(f"the first full batch of {batch_size} images is compiled, which takes half a minute or more")
    publish = functools.cache(compile_cache().publish)  # once
    eager = model.forward_features
    compiled = torch.compile(model.forward_features, dynamic=False)

    def forward_features(images: Tensor) -> Tensor:
        if len(images) != batch_size:
            return eager(images)
        tokens = compiled(images)
        publish()
        return tokens

    model.forward_features = forward_features


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's weights; the CPU where it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def computed_in(model: nn.Module) -> str:
    """The type of the model's weights, such as `float32`."""
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def evaluation_batches(
    model: nn.Module,
    dataset: Dataset,
    transform: EvalTransform | TrainTransform,
    options: LoaderOptions,
    *,
    epoch: int = 0,
    description: str = "evaluation",
    num_uniforms: int = 0,
    indices: np.ndarray | None = None,
    world: World = SINGLE,
) -> Iterator[Iterator[Batch]]:
    """A context with `model` in evaluation mode; yields the batches of this rank, on the model's device.

    Unreadable images are skipped, and batches that are empty without them. Rank 0 shows the progress as `description`.
    Each rank takes its shard of the images, or those with `indices`. `epoch` and `num_uniforms` are as in
    `eval_batches`.
    """
    indices = np.arange(world.rank, len(dataset), world.world_size) if indices is None else indices
    batches = eval_batches(
        dataset,
        transform,
        batch_size=options.batch_size,
        epoch=epoch,
        indices=indices,
        workers=options.workers,
        on_error=options.on_error,
        device=device_of(model),
        num_uniforms=num_uniforms,
    )

    def nonempty() -> Iterator[Batch]:
        done = 0
        for batch in batches:
            if len(batch.labels):
                yield batch
            done += len(batch.labels) + batch.skipped
            progress.update(done)

    progress = ProgressDisplay(description, len(indices), quiet=not world.is_rank_0)
    with evaluation_mode(model), progress:
        yield nonempty()


def gather_in_order(columns: dict[str, np.ndarray], dataset: Dataset, world: World) -> dict[str, np.ndarray]:
    """The columns of all ranks, sorted by their `indices`. Raises UserError if there are none."""
    gathered = world.all_gather(columns)
    if not len(gathered["indices"]):
        raise nothing_readable(dataset)
    order = np.argsort(gathered["indices"])
    return {name: values[order] for name, values in gathered.items()}


def nothing_readable(dataset: Dataset) -> UserError:
    return UserError(f"none of the {len(dataset)} images of {dataset.name} ({dataset.split}) could be read.")


def match_classes(images: Dataset, metadata: dict[str, Any], outputs: int, name: str, checkpoint: str) -> Dataset:
    """`images` with the class names and numbers of the checkpoint. Raises UserError for classes that it does not have.

    Classes are matched by name, in any Unicode form, and without names by position, which is logged; the test sets of
    ImageNet fit any checkpoint with ImageNet's 1,000 classes.
    """
    names = tuple(metadata.get("classes") or ())
    if names == images.classes:
        return images
    if has_imagenet_classes(name):
        if outputs == DATASETS[name].num_classes and predicts_imagenet(names, metadata.get("dataset")):
            return dataclasses.replace(images, classes=names) if names else images
        raise UserError(
            f"{checkpoint} predicts {outputs:,} classes {first_ten(names)}, and {name} needs the 1,000 of ImageNet: "
            f"take a checkpoint fine-tuned on ImageNet, or fine-tune this one (`vitlab finetune`)."
        )
    if not names:
        if outputs == len(images.classes):
            order = first_ten([f"{number} {label}" for number, label in enumerate(images.classes)])
            logger.warning("%s has no class names: classes are matched by position (%s)", checkpoint, order)
        return images
    known = set(map(canonical, names))
    if unknown := [label for label in images.classes if canonical(label) not in known]:
        raise UserError(
            f"{checkpoint} knows the classes {first_ten(names)} and not {first_ten(unknown)}, which {quoted(name)} "
            f"has; evaluate it on data with some of its classes, or fine-tune it on this data (`vitlab finetune`)."
        )
    return _renumber_classes(images, names, checkpoint)


def _renumber_classes(images: Dataset, classes: tuple[str, ...], checkpoint: str) -> Dataset:
    """`images` with the checkpoint's `classes`. Raises UserError where the checkpoint has a name twice."""
    index = {canonical(name): number for number, name in enumerate(classes)}
    counts = collections.Counter(map(canonical, classes))
    if repeated := sorted({name for name in images.classes if counts[canonical(name)] > 1}):
        raise UserError(f"{checkpoint} has several outputs called {first_ten(repeated)}; give them different names.")
    if (present := len(images.classes)) < len(classes):
        text = "%s has %d of the model's %d classes; predictions are over all of them, and one of the others is wrong"
        logger.warning(text, quoted(images.name), present, len(classes))
    new = np.array([index[canonical(name)] for name in images.classes])
    sets = None if images.label_sets is None else images.label_sets.renumber(new)
    return dataclasses.replace(images, classes=classes, labels=new[images.labels], label_sets=sets)


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
