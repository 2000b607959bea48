"""The first stage of fine-tuning: the least-squares head on the frozen checkpoint (Sec. 4.1), and held-out images.

`job.py` takes the head as its first result, as the start of its runs, and to average with them. Representations are
computed in the precision of training, the test in float32.
"""

import bisect
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int

from vitlab.config import DataConfig, FinetuneConfig
from vitlab.data.dataset import Dataset
from vitlab.data.downloads import cache_folder
from vitlab.data.splits import stratified_split
from vitlab.errors import UserError
from vitlab.evaluation.accuracy import MAX_SCORES, evaluation_loss
from vitlab.evaluation.features import Features, features
from vitlab.evaluation.fewshot import sample_shots
from vitlab.evaluation.linear_head import MAX_CLASSES, MAX_ELEMENTS, LinearHead, least_squares_head
from vitlab.evaluation.multi_label import mean_average_precision
from vitlab.evaluation.result import headline
from vitlab.finetuning.job_clock import JobClock
from vitlab.finetuning.stages import HEAD_IMAGES, HEAD_SHOTS, head_images
from vitlab.models.vit import Model
from vitlab.rng import Stream, generator
from vitlab.runs.init_from_checkpoint import init_from_checkpoint
from vitlab.runs.run import RunContext, evaluate_split, evaluation_options, run_settings, write_run
from vitlab.runs.splits import Splits
from vitlab.train.loop import train_transform
from vitlab.train.objectives import classification_loss
from vitlab.train.precision import frozen_dtype
from vitlab.train.workdir import Workdir

PARTS, MIN_PART, PART_SECONDS = 8, 64, 5.0
"""With a budget, the training images pass through the model in parts, each with its share of every class. The head is
fitted to the parts that there was time for. A part has at least MIN_PART images and takes PART_SECONDS."""


@dataclass(frozen=True)
class JobInputs:
    """What the stages and runs of a fine-tuning job share."""

    checkpoint: str | Path
    init_id: str
    splits: Splits
    config: FinetuneConfig
    context: RunContext
    log: Callable[[str], None]
    clock: JobClock = field(default_factory=JobClock)


@dataclass(frozen=True)
class LinearStage(JobInputs):
    """The least-squares head of a job, for any of its training images. `augmented` chooses the augmentation by it."""

    def describe(self) -> None:
        """Fits the head and logs what it reaches without a test."""
        head = self.fit_head()
        fitted, count = len(self._rows()), len(self.splits.train)
        if fitted < count:
            self.log(f"least-squares head: fitted to {fitted:,} of the {count:,} training images")
        self.log(f"least-squares head: {self.chosen_on} {headline(vars(head))}")

    def test(self, path: Path) -> dict[str, Any]:
        """The result of the stage; read from its folder if it is finished."""
        config, world = self.config.single(), self.context.world
        settings = run_settings("finetune", self.init_id, self.splits, config) | {"trained": "head"}
        with Workdir(path, settings, tensorboard=False, world=world) as folder:
            if folder.finished:
                return folder.read_result()
            head = self.fit_head()
            model = self.classifier().to(self.context.device)
            test = evaluate_split(config, model, self.splits.test, world).with_thresholds(head.label_thresholds)
            self.log(f"least-squares head: test {headline(test.metrics())} ({len(test.labels):,} images)")
            data, views = self.augmented
            record: dict[str, Any] = {"l2": head.l2, "leave_one_out": head.accuracy, "leave_one_out_loss": head.loss}
            record |= {"chosen_on": self.chosen_on, "fitted_images": len(self._rows())}
            record |= {"reject_below": head.reject_below, "views": len(views), "crop": data.crop, "flip": data.flip}
            if head.mean_average_precision is not None:
                record["leave_one_out_mean_average_precision"] = head.mean_average_precision
            return write_run(config, folder, self.splits, model, test, self.init_id, least_squares=record)

    def score_held_out(self) -> dict[str, Any]:
        """Accuracy and loss on the held-out part of the sweep, by the head that is fitted without it."""
        train = self.splits.train
        rest, held_out = hold_out_indices(train, self.config.held_out, self.config.seed)
        rows = np.isin(self.plain.indices, held_out)
        logits = torch.from_numpy(self.fit_head(rest).logits(self.plain.x[rows]))
        labels = torch.from_numpy(_labels(train, self.plain.indices[rows]))
        loss = classification_loss(logits, labels, evaluation_loss(train))
        predictions = logits.argmax(dim=1)
        correct = predictions == labels if labels.ndim == 1 else labels.gather(1, predictions[:, None])
        score = {"accuracy": float(correct.double().mean()), "loss": float(loss), "images": int(rows.sum())}
        if train.multi_label and logits.numel() <= MAX_SCORES:
            score["mean_average_precision"] = mean_average_precision(labels.numpy(), logits.numpy())
        return score

    # The head.

    def fit_head(self, indices: Int[np.ndarray, " m"] | None = None) -> LinearHead:
        """The head for all training images, or for those with these indices."""
        _, views = self.augmented
        return self._fit([self.plain, *views], indices)

    def classifier(self, indices: Int[np.ndarray, " m"] | None = None) -> Model:
        """The checkpoint with this head."""
        model = init_from_checkpoint(self.checkpoint, self.config.model)
        self.fit_head(indices).copy_to(model)
        return model

    def fit_start(self, indices: Int[np.ndarray, " m"] | None = None) -> LinearHead:
        """The same without views: fine-tuning learns more from crops that the head has not seen."""
        return self.plain_head if indices is None else self._fit([self.plain], indices)

    @functools.cached_property
    def plain_head(self) -> LinearHead:
        """The head for the training images without augmentation."""
        return self._fit([self.plain])

    @property
    def chosen_on(self) -> str:
        """What l2 and scale, the views and the rejection threshold are chosen on."""
        train = self.splits.train
        return "val" if _has_val(train) else "leave-one-out" if train.groups is None else "leave-one-group-out"

    def _fit(self, views: list[Features], indices: Int[np.ndarray, " m"] | None = None) -> LinearHead:
        train = self.splits.train
        world = self.context.world
        rows = self._rows(indices)
        refit = indices is None or not _has_val(train)
        if not refit:  # l2 and scale are chosen on val, which `indices` leave out
            rows = self._rows()
        x = np.stack([view.x[rows] for view in views])
        labels = _labels(train, self.plain.indices[rows])
        groups = _left_out(train, self.plain.indices[rows])
        # By rank 0 for all: what rounding decides must be the same on every rank.
        fit = functools.cache(lambda: least_squares_head(x, labels, len(train.classes), groups, refit))
        shapes = {"weight": (0, x.shape[2]), "bias": (0,)}  # the other ranks have no rows
        numbers = world.broadcast_object(
            lambda: {f.name: getattr(fit(), f.name) for f in dataclasses.fields(LinearHead) if f.name not in shapes}
        )
        arrays = {n: getattr(fit(), n) if world.is_rank_0 else np.empty(shapes[n], np.float32) for n in shapes}
        return LinearHead(**world.all_gather(arrays), **numbers)

    def _rows(self, indices: Int[np.ndarray, " m"] | None = None) -> Int[np.ndarray, " r"]:
        """The rows of `plain` with these indices; as many of each class as memory allows, for any number of views."""
        known, classes = self.plain.indices, len(self.splits.train.classes)
        rows = np.arange(len(known)) if indices is None else np.flatnonzero(np.isin(known, indices))
        if len(rows) <= (limit := MAX_ELEMENTS // ((1 + self._num_views) * self._width)):
            return rows
        labels = self.splits.train.labels[known[rows]]
        counts = np.bincount(labels, minlength=classes)
        shots = bisect.bisect_right(range(1, counts.max() + 1), limit, key=lambda most: np.minimum(counts, most).sum())
        return np.sort(rows[sample_shots(labels, classes, max(shots, 2), self.config.seed)])

    # Representations of the training images.

    @functools.cached_property
    def plain(self) -> Features:
        """Representations of `_images` by the checkpoint as it is; with a budget, of those that there is time for."""
        clock = self.clock
        preprocessing = self.config.data.preprocessing(self._model.config.image_size)
        parts, done = self._parts(), []
        for number, indices in enumerate(parts, 1):
            seconds = len(indices) * clock.image_seconds
            name = f"part {number} of {len(parts)} of the head's images"
            if done and not clock.fits(name, seconds, clock.seconds("test")):
                break
            with clock.timed(seconds):
                done.append(self._features(indices, "representations", preprocessing=preprocessing))
        x, labels, indices = (np.concatenate([getattr(part, f) for part in done]) for f in ("x", "labels", "indices"))
        order = np.argsort(indices)
        return Features(x[order], labels[order], indices[order], sum(part.skipped for part in done))

    @functools.cached_property
    def _images(self) -> Int[np.ndarray, " m"]:
        """The training images that the head is fitted to or scored on, by index."""
        train, config = self.splits.train, self.config
        rest = np.arange(len(train))
        held_out = np.empty(0, np.int64)
        classes = len(train.classes)
        if head_images(config, len(train), classes) == len(train):
            return rest
        if config.tried_rates:
            rest, held_out = hold_out_indices(train, config.held_out, config.seed)
        shots = max(HEAD_IMAGES // classes, HEAD_SHOTS)
        chosen = rest[sample_shots(train.labels[rest], classes, shots, config.seed)]
        return np.sort(np.concatenate([chosen, held_out]))

    def _parts(self) -> list[Int[np.ndarray, " m"]]:
        """`_images` in PARTS of the same size, each with its part of every class; in one without a budget."""
        images, classes = self._images, len(self.splits.train.classes)
        seconds = len(images) * self.clock.image_seconds
        count = min(PARTS, len(images) // max(MIN_PART, 2 * classes), int(seconds / PART_SECONDS))
        if count <= 1 or not self.clock.limited:
            return [images]
        shuffled = generator(self.config.seed, Stream.PARTS).permutation(images)
        labels = self.splits.train.labels[shuffled]
        order = np.argsort(labels, kind="stable")
        counts = np.bincount(labels, minlength=classes)
        rank = np.arange(len(images)) - np.repeat(np.cumsum(counts) - counts, counts)
        fraction = np.where(rank < 2, 0.0, rank / counts[labels[order]])  # the first part has two of each class
        return [np.sort(part) for part in np.array_split(shuffled[order[np.argsort(fraction, kind="stable")]], count)]

    @functools.cached_property
    def augmented(self) -> tuple[DataConfig, list[Features]]:
        """The settings of the training images, and representations of up to `head_views` augmented views of each.

        Augmentation may change a label: a mirrored digit is another symbol. Of three, all of it, the same without
        flips, and none, training takes that with the lowest leave-one-out loss of the head with one view. The head
        takes all views, if they lower its loss.
        """
        data = self.config.data
        numbers = range(1, self._num_views + 1)
        is_augmented = data.flip or data.crop != "none" or data.randaugment_layers
        if not numbers or not is_augmented or not self._view_fits(1):
            return data, []
        compares = data.flip and len(numbers) > 1 and self._view_fits(2)
        flips = (False, True) if compares else (data.flip,)
        views = {flip: self._view(number, flip) for number, flip in zip(numbers, flips, strict=False)}
        losses = {flip: self._fit([self.plain, view]).loss for flip, view in views.items()}
        flip = min(losses, key=losses.__getitem__)
        if losses[flip] >= self.plain_head.loss:
            self.log("augmented training images make the least-squares head worse: none is augmented")
            off = {name: getattr(DataConfig, name) for name in ("randaugment_layers", "randaugment_magnitude")}
            return dataclasses.replace(data.without_crop(), flip=False, **off), []
        if data.flip and not flip:
            self.log("mirrored training images make the least-squares head worse: none is mirrored")
        kept = [view for mirrored, view in views.items() if flip or not mirrored]
        for number in numbers[len(views) :]:
            if not self._view_fits(number):
                break
            kept.append(self._view(number, flip))
        helps = self._fit([self.plain, *kept]).loss < self.plain_head.loss
        return dataclasses.replace(data, flip=flip), kept if helps else []

    def _view(self, number: int, flip: bool) -> Features:
        """Representations of an augmented view of each image."""
        transform = dataclasses.replace(train_transform(self.config.single()), flip=flip)
        description = f"representations of view {number} of {self._num_views}"
        with self.clock.timed(len(self.plain.indices) * self.clock.image_seconds):
            return self._features(self.plain.indices, description, augmentation=transform, epoch=number)

    def _view_fits(self, number: int) -> bool:
        seconds = len(self.plain.indices) * self.clock.image_seconds
        return self.clock.fits(f"augmented view {number}", seconds, self.clock.after("head"))

    @property
    def _num_views(self) -> int:
        """Augmented views: `head_views`, or as many as memory allows."""
        views = self.config.head_views or 0
        return views and max(min(views, MAX_ELEMENTS // (len(self.plain.x) * self._width) - 1), 0)

    @property
    def _width(self) -> int:
        """Elements of a training image in the matrices of least squares."""
        return max(len(self.splits.train.classes), self.plain.x.shape[1] + 1)

    def _features(self, indices: Int[np.ndarray, " m"], description: str, **options: Any) -> Features:
        """Representations of the training images with these indices."""
        loader = evaluation_options(self.config, self.context.device)
        cache, world = cache_folder() / "features", self.context.world
        train = self.splits.train if len(indices) == len(self.splits.train) else self.splits.train.take(indices)
        computed = features(self._model, train, loader, description=description, cache=cache, world=world, **options)
        return dataclasses.replace(computed, indices=indices[computed.indices])

    @functools.cached_property
    def _model(self) -> Model:
        device = self.context.device
        model = init_from_checkpoint(self.checkpoint, self.config.model)
        return model.to(device, frozen_dtype(self.config.precision, device))


def check_head(config: FinetuneConfig) -> None:
    """Raises UserError for more than MAX_CLASSES."""
    if config.head and config.model.num_classes > MAX_CLASSES:
        raise UserError(
            f"{config.model.num_classes:,} classes are too many for the least-squares head, at most {MAX_CLASSES:,}; "
            f"give --recipe custom, whose head starts at zero."
        )


def hold_out(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """The training split without `fraction` of each class, and that held-out split, chosen by `seed` (App. B.1.1).

    Groups are kept whole. If "trainval" contains the user's own val, this is held out, up to `fraction` of all images.
    Raises UserError where one of the two is empty.
    """
    rest, held_out = map(dataset.take, hold_out_indices(dataset, fraction, seed))
    if not len(rest) or not len(held_out):
        raise UserError(
            f"held_out={fraction:g} leaves {len(rest)} images of {dataset.name} to train on and {len(held_out)} to "
            f"evaluate on (a class needs at least two, of two groups if there are groups); give another fraction, or "
            f"one rate that is not compared (`--optim.lr 1e-4`)."
        )
    return rest, dataclasses.replace(held_out, split="held_out")


def hold_out_indices(dataset: Dataset, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the two parts of `hold_out`."""
    if not _has_val(dataset):
        parts = stratified_split(dataset.labels, {"held_out": fraction}, seed, Stream.HELD_OUT, dataset.groups)
        return parts["train"], parts["held_out"]
    assert dataset.from_val is not None
    val, most = np.flatnonzero(dataset.from_val), round(fraction * len(dataset))
    if most < len(val):
        val = val[stratified_split(dataset.labels[val], {"val": most / len(val)}, seed, Stream.HELD_OUT)["val"]]
    return np.flatnonzero(~dataset.from_val), val


def _has_val(dataset: Dataset) -> bool:
    """Whether some of these images are of the user's own val split."""
    return dataset.from_val is not None and bool(dataset.from_val.any())


def _left_out(dataset: Dataset, indices: np.ndarray) -> Int[np.ndarray, " n"] | None:
    """The number of the group with which each of these images is left out of the least-squares head (as in `Ridge`):
    all of the user's own val at once, and no other image; else each of `groups`; else, as None, each image."""
    if dataset.from_val is not None and (val := dataset.from_val[indices]).any():
        return np.where(val, 0, -1)
    return None if dataset.groups is None else np.unique(dataset.groups[indices], return_inverse=True)[1]


def _labels(dataset: Dataset, indices: np.ndarray) -> Int[np.ndarray, " n"] | Bool[np.ndarray, "n K"]:
    """The label of each of these images, or whether it has each of the classes where images have several."""
    if dataset.label_sets is None:
        return dataset.labels[indices]
    return dataset.label_sets.multi_hot(indices, len(dataset.classes))
