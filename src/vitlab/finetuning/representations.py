"""Representations of a job's training images by the frozen checkpoint, which the least-squares head is fitted to.

`head.fit_head` calls `compute_plain` once, then `compute_view` for each augmented view. The model computes in the
precision of training. With a budget the images pass through it in parts, as many as there is time for.
"""

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from vitlab.data.downloads import cache_folder
from vitlab.evaluation.features import Features, features
from vitlab.evaluation.fewshot import sample_shots
from vitlab.finetuning.held_out import hold_out_indices
from vitlab.finetuning.job import FinetuneJob
from vitlab.finetuning.stages import HEAD_IMAGES, HEAD_SHOTS, head_images
from vitlab.models.vit import Model
from vitlab.rng import Stream, generator
from vitlab.runs.init_from_checkpoint import init_from_checkpoint
from vitlab.runs.run import evaluation_options
from vitlab.train.loop import train_transform
from vitlab.train.precision import frozen_dtype, prepare_for_inference

PARTS = 8
"""Most parts."""
MIN_PART = 64
"""Fewest images of a part."""
PART_SECONDS = 5.0
"""Fewest planned seconds of a part, and of work that is compared with its plan: starting takes a second or two."""


@dataclass(frozen=True)
class FrozenCheckpoint:
    """The model of the checkpoint, on the device of a job."""

    job: FinetuneJob
    model: Model

    @classmethod
    def load(cls, job: FinetuneJob) -> "FrozenCheckpoint":
        """Loads the model in the precision of training."""
        device = job.context.device
        model = init_from_checkpoint(job.checkpoint, job.config.model)
        prepare_for_inference(model, device, frozen_dtype(job.config.precision, device))
        return cls(job, model)

    def compute_plain(self) -> Features:
        """Representations without augmentation of the images that `select_images` returns, in the order of the training
        images; with a budget, of those that there is time for."""
        clock = self.job.clock
        preprocessing = self.job.config.data.preprocessing(self.model.config.image_size)
        parts = _split_in_parts(self.job, select_images(self.job))
        done: list[Features] = []
        for number, indices in enumerate(parts, 1):
            name = f"training images of the head, part {number} of {len(parts)}"
            if done and not clock.fits(name, len(indices) * clock.image_seconds, clock.seconds("test")):
                break
            done.append(self._compute(indices, "representations", preprocessing=preprocessing))
        x, labels, indices = (np.concatenate([getattr(part, f) for part in done]) for f in ("x", "labels", "indices"))
        order = np.argsort(indices)
        return Features(x[order], labels[order], indices[order], sum(part.skipped for part in done))

    def compute_view(self, plain: Features, number: int, num_views: int, flip: bool) -> Features:
        """Representations of an augmented view of the images of `plain`: view `number` of `num_views`."""
        transform = dataclasses.replace(train_transform(self.job.config.single()), flip=flip)
        description = f"representations of view {number} of {num_views}"
        return self._compute(plain.indices, description, augmentation=transform, epoch=number)

    def view_fits(self, plain: Features, number: int) -> bool:
        """Whether there is time for this view."""
        clock = self.job.clock
        return clock.fits(f"augmented view {number}", len(plain.indices) * clock.image_seconds, clock.after("head"))

    def _compute(self, indices: Int[np.ndarray, " m"], description: str, **options: Any) -> Features:
        """Representations of the training images with these indices; their duration is compared with the plan."""
        job, train, world = self.job, self.job.splits.train, self.job.context.world
        started, planned = time.monotonic(), len(indices) * job.clock.image_seconds
        loader = evaluation_options(job.config, job.context.device)
        images = train if len(indices) == len(train) else train.take(indices)
        cache = cache_folder() / "features"
        computed = features(self.model, images, loader, description=description, cache=cache, world=world, **options)
        if job.clock.budget is not None and planned >= PART_SECONDS:
            job.clock.budget.compare(planned, time.monotonic() - started)
        return dataclasses.replace(computed, indices=indices[computed.indices])


def select_images(job: FinetuneJob) -> Int[np.ndarray, " m"]:
    """The indices of the training images that the head is fitted to or scored on: all, or about as many as
    `stages.head_images` says, including those held out."""
    train, config = job.splits.train, job.config
    classes = len(train.classes)
    rest, held_out = np.arange(len(train)), np.empty(0, np.int64)
    if head_images(config, len(train), classes) == len(train):
        return rest
    if config.tried_rates:
        rest, held_out = hold_out_indices(train, config.held_out, config.seed)
    shots = max(HEAD_IMAGES // classes, HEAD_SHOTS)
    fitted = rest[sample_shots(train.labels[rest], classes, shots, config.seed)]
    return np.sort(np.concatenate([fitted, held_out]))


def _split_in_parts(job: FinetuneJob, images: Int[np.ndarray, " n"]) -> list[Int[np.ndarray, " part"]]:
    """These images in up to PARTS parts of the same size, each with its share of every class; without a budget, one.

    In the order that is cut into parts every class is spread evenly: image i of the n of a class comes after the
    fraction i/n of all. Two images of each class come first, since the first part is always taken.
    """
    train, clock = job.splits.train, job.clock
    classes = len(train.classes)
    count = int(len(images) * clock.image_seconds / PART_SECONDS)
    count = min(PARTS, len(images) // max(MIN_PART, 2 * classes), count)
    if count <= 1 or clock.budget is None:
        return [images]
    shuffled = generator(job.config.seed, Stream.PARTS).permutation(images)
    labels = train.labels[shuffled]
    by_class = np.argsort(labels, kind="stable")
    counts = np.bincount(labels, minlength=classes)
    number_in_class = np.arange(len(images)) - np.repeat(np.cumsum(counts) - counts, counts)
    fraction = np.where(number_in_class < 2, 0.0, number_in_class / counts[labels[by_class]])
    spread = shuffled[by_class[np.argsort(fraction, kind="stable")]]
    return [np.sort(part) for part in np.array_split(spread, count)]
