"""Evaluates a model or a checkpoint on a data set, every image counted exactly once."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitlab.config.data import ReadConfig
from vitlab.data.classes import warn_of_skipped_classes
from vitlab.data.dataset import Dataset
from vitlab.data.loader import Batch
from vitlab.data.registry import DATASETS, check_source, load_dataset
from vitlab.data.transforms import EvalTransform
from vitlab.errors import UserError
from vitlab.evaluation.load import (
    compile_inference,
    computed_in,
    evaluation_batches,
    gather_in_order,
    load_for_evaluation,
    match_classes,
)
from vitlab.evaluation.multi_label import stored_thresholds
from vitlab.evaluation.options import EvalOptions, LoaderOptions
from vitlab.evaluation.result import Evaluation
from vitlab.preprocessing import Preprocessing
from vitlab.train.distributed import SINGLE, World
from vitlab.train.objectives import LossKind, class_targets

EVAL_DEFAULTS = EvalOptions(batch_size=256)
MAX_SCORES = 2**27
"""Logits that are kept for several labels, of images times classes: 512 MiB."""
COLUMNS: dict[str, np.ndarray] = dict.fromkeys(("indices", "labels", "predictions"), np.empty(0, np.int64))
COLUMNS |= dict.fromkeys(("confidences", "losses"), np.empty(0, np.float32))
COLUMNS |= dict.fromkeys(("correct", "in_top5"), np.empty(0, np.bool_))
"""The fields of an Evaluation that have a number for each image, without any image."""


def evaluation_loss(dataset: Dataset) -> LossKind:
    """The loss that tests of this data set report, whatever training minimizes."""
    return "sigmoid" if dataset.multi_label else "softmax"


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    dataset: Dataset,
    image_size: tuple[int, int],
    options: LoaderOptions = EVAL_DEFAULTS,
    *,
    preprocessing: Preprocessing | None = None,
    keep_logits: bool = False,
    world: World = SINGLE,
) -> Evaluation:
    """Evaluates `model` on `dataset`; images are squashed to `image_size` unless `preprocessing` is given.

    keep_logits: the logits are part of the result, for images with one label and up to MAX_SCORES of them.

    Each rank computes its shard of the images and returns the whole.
    Raises UserError if the model's classes are not as many as the data set's, and if no image can be read.
    """
    results: list[dict[str, Tensor]] = []  # on the device until the end: no batch waits for the one before
    transform = EvalTransform(image_size, preprocessing or Preprocessing())
    columns = COLUMNS
    if dataset.multi_label and len(dataset) * len(dataset.classes) <= MAX_SCORES:
        columns = columns | {"scores": np.empty((0, len(dataset.classes)), np.float32)}
    if keep_logits and dataset.label_sets is None and len(dataset) * len(dataset.classes) <= MAX_SCORES:
        columns = columns | {"logits": np.empty((0, len(dataset.classes)), np.float32)}
    with evaluation_batches(model, dataset, transform, options, world=world) as batches:
        for batch in batches:
            logits = model(batch.images).float()
            if logits.shape[1] != len(dataset.classes):
                raise UserError(
                    f"the model predicts {logits.shape[1]} classes and {dataset.name} has {len(dataset.classes)}; "
                    f"fine-tune it on this data set first (`vitlab finetune`)."
                )
            result = _measure(logits, batch, evaluation_loss(dataset))
            results.append({name: result[name] for name in columns})
    local = {
        name: torch.cat([result[name] for result in results]).cpu().numpy() if results else empty
        for name, empty in columns.items()
    }
    measured: dict[str, Any] = gather_in_order(local, dataset, world)
    evaluation = Evaluation(
        dataset.classes,
        **measured,
        skipped=len(dataset) - len(measured["indices"]),
        label_sets=None if dataset.label_sets is None else dataset.label_sets.take(measured["indices"]),
        left_out=dataset.left_out,
        full_size=dataset.full_size,
        computed_in=computed_in(model),
    )
    return evaluation.with_thresholds(None)


def _measure(logits: Float[Tensor, "B K"], batch: Batch, kind: LossKind) -> dict[str, Tensor]:
    """COLUMNS, `scores` and `logits` of one batch."""
    targets = batch.labels if batch.targets is None else class_targets(batch.targets, logits.shape[1], kind)
    if kind == "softmax":
        probabilities = logits.softmax(dim=1)
        losses = F.cross_entropy(logits, targets, reduction="none")
    else:
        probabilities = logits.sigmoid()
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1)
    # By the logits: probabilities may round to several of 1. The prediction comes first, by its own argmax: `topk` may
    # order equal logits otherwise.
    prediction = logits.argmax(dim=1)
    best = torch.cat([prediction[:, None], logits.topk(min(5, logits.shape[1]), dim=1).indices], dim=1)
    correct = best == batch.labels[:, None] if batch.targets is None else batch.targets.gather(1, best)
    return {
        "indices": batch.indices,
        "labels": batch.labels,
        "predictions": prediction,
        "confidences": probabilities.gather(1, prediction[:, None])[:, 0],
        "losses": losses,
        "correct": correct[:, 0],
        "in_top5": correct[:, 1:].any(dim=1),
        "scores": logits,
        "logits": logits,
    }


def evaluate_checkpoint(
    checkpoint: str | Path,
    dataset: str | None = None,
    split: str = "test",
    options: EvalOptions = EVAL_DEFAULTS,
    *,
    root: str | None = None,
    resize: int | None = None,
    partial: bool = False,
    log: Callable[[str], None] = lambda _: None,
    world: World = SINGLE,
) -> Evaluation:
    """Evaluates a checkpoint on a data set, by default its metadata's, with its own preprocessing.

    `resize` overrides the resize of the checkpoint and of the data set (ObjectNet has one), `partial` is as in
    `load_dataset`; `log` receives a description of the preprocessing. Images that cannot be read are skipped and
    counted where the checkpoint's own run did so. Where the data has some of the checkpoint's classes only, predictions
    are over all of them. Raises UserError for a checkpoint without a head, and for data with classes that it does not
    know.
    """
    if dataset is not None:
        check_source(dataset, root)  # before anything is loaded
    loaded = load_for_evaluation(checkpoint, options, require_head=True, pack=not options.compile, world=world)
    metadata = loaded.metadata
    config = loaded.model.config
    thresholds = stored_thresholds(metadata, config.num_classes)
    name = dataset or metadata.get("dataset")
    if name is None:
        raise UserError(f"{checkpoint} does not say what it was trained on; name a data set with --dataset.")
    if resize is None and (info := DATASETS.get(name)) and info.eval_resize:
        before, after = info.eval_resize
        resize = round(max(config.image_hw) * before / after)
    preprocessing = loaded.preprocessing if resize is None else loaded.preprocessing.with_resize(resize)
    log(f"images: {preprocessing.describe()}")
    # Of its own data set the checkpoint knows the folder, the classes, and whether unreadable images were skipped.
    known = metadata if name == metadata.get("dataset") else {}
    if known.get("on_error") == "skip":
        options = dataclasses.replace(options, on_error="skip")
    with world.rank_0_first():
        images = load_dataset(
            name,
            split,
            root=root or known.get("root"),
            classes=known.get("classes") if known.get("class_indices") else None,
            on_error=options.on_error,
            partial=partial,
            levels=preprocessing.range,
            read=options if options.read_settings else ReadConfig.from_metadata(known),
            multi_label=bool(metadata.get("multi_label")),
        )
    images = match_classes(images, metadata, config.num_classes, name, str(checkpoint))
    if options.compile:
        compile_inference(loaded.model, options.batch_size, log)
    evaluation = evaluate(loaded.model, images, config.image_hw, options, preprocessing=preprocessing, world=world)
    if world.is_rank_0:
        warn_of_skipped_classes(images, evaluation.indices)
    return evaluation.with_thresholds(thresholds)
