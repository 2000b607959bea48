"""The first stage of a fine-tuning job: the least-squares head on the frozen checkpoint (Sec. 4.1).

`run_job.py` calls `fit_head`. Its result, a `FittedHead`, also decides how training images are augmented, is where the
final runs start from, and is averaged with them. Representations are computed in the precision of training, as all
tests are.
"""

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int

from vitlab.config import DataConfig, FinetuneConfig
from vitlab.data.dataset import Dataset
from vitlab.data.exclude import image_id
from vitlab.data.splits import stratified_subset
from vitlab.errors import UserError
from vitlab.evaluation.accuracy import MAX_SCORES, evaluation_loss
from vitlab.evaluation.calibration import Calibrator
from vitlab.evaluation.features import Features
from vitlab.evaluation.fewshot import sample_shots
from vitlab.evaluation.linear_head import MAX_CLASSES, MAX_ELEMENTS, LinearHead, least_squares_head, leave_one_out
from vitlab.evaluation.multi_label import mean_average_precision
from vitlab.evaluation.result import headline
from vitlab.evaluation.suspects import find_suspects, write_suspects
from vitlab.finetuning.held_out import has_val, hold_out_indices, left_out_groups, left_out_name
from vitlab.finetuning.job import FinetuneJob, JobClock
from vitlab.finetuning.representations import FrozenCheckpoint
from vitlab.models.vit import Model
from vitlab.runs.init_from_checkpoint import init_from_checkpoint
from vitlab.runs.run import evaluate_split, run_settings, write_run
from vitlab.train.distributed import World
from vitlab.train.objectives import balanced_weights, classification_loss
from vitlab.train.run_files import SUSPECTS
from vitlab.train.workdir import Workdir

UNEQUAL = 3
"""Ratio of the largest class to the smallest above which the job logs what `--balance` changes."""


@dataclass(frozen=True)
class HeadFitter:
    """Fits a head to any of the training images that have representations."""

    job: FinetuneJob
    plain: Features
    """Representations without augmentation."""

    def fit(
        self,
        views: Sequence[Features] = (),
        indices: Int[np.ndarray, " m"] | None = None,
        balance: bool | None = None,
    ) -> LinearHead:
        """Fits a head to `plain` and to `views`, augmented representations of the same images.

        indices: the training images to fit to (default: all with representations), such as the first array of
        `hold_out_indices`. balance: as `FinetuneConfig.balance` (default: the job's).

        If the user has a val split, `indices` exclude it from the weights alone: l2 and the scale of the logits are
        still chosen on it, so `least_squares_head` gets all images, with `fit_all=False`.
        """
        train, world = self.job.splits.train, self.job.context.world
        val_only_chooses = indices is not None and has_val(train)
        rows = self.choose_rows(None if val_only_chooses else indices)
        x = np.stack([features.x[rows] for features in (self.plain, *views)])
        labels = _labels(train, self.plain.indices[rows])
        groups = left_out_groups(train, self.plain.indices[rows])
        # By rank 0 for all: what rounding decides must be the same on every rank.
        head = None
        if world.is_rank_0:
            balance = self.job.config.balance if balance is None else balance
            weights = balanced_weights(labels, len(train.classes)) if balance else None
            options: dict[str, Any] = {"fit_all": not val_only_chooses, "class_weights": weights}
            head = least_squares_head(x, labels, len(train.classes), groups, **options)
        return _broadcast_head(head, x.shape[2], world)

    def choose_rows(self, indices: Int[np.ndarray, " m"] | None = None) -> Int[np.ndarray, " r"]:
        """The rows of `plain` with these indices (default: all); if they exceed MAX_ELEMENTS, equally many of each
        class."""
        known, train = self.plain.indices, self.job.splits.train
        rows = np.arange(len(known)) if indices is None else np.flatnonzero(np.isin(known, indices))
        limit = MAX_ELEMENTS // self._row_elements
        if len(rows) <= limit:
            return rows
        labels = train.labels[known[rows]]
        counts = np.bincount(labels)
        # The most images per class, `shots`, for which the sum of min(count, shots) over the classes is within `limit`.
        choices = range(1, counts.max() + 1)
        shots = bisect.bisect_right(choices, limit, key=lambda shots: np.minimum(counts, shots).sum())
        return np.sort(rows[sample_shots(labels, len(train.classes), max(shots, 2), self.job.config.seed)])

    def max_views(self, wanted: int) -> int:
        """`wanted` augmented views, or as many as memory allows."""
        return max(min(wanted, MAX_ELEMENTS // (len(self.plain.x) * self._row_elements) - 1), 0)

    @property
    def _row_elements(self) -> int:
        """Elements of an image in the matrices of least squares."""
        return max(len(self.job.splits.train.classes), self.plain.x.shape[1] + 1)


def _broadcast_head(head: LinearHead | None, width: int, world: World) -> LinearHead:
    """The head of rank 0, for representations of this width, on every rank; `head` is None on the others."""
    arrays = {"weight": np.empty((0, width), np.float32), "bias": np.empty(0, np.float32)}
    names = [field.name for field in dataclasses.fields(LinearHead) if field.name not in arrays]
    numbers = world.broadcast_object(lambda: {name: getattr(head, name) for name in names})
    if head is not None:
        arrays = {"weight": head.weight, "bias": head.bias}
    return LinearHead(**world.all_gather(arrays), **numbers)


@dataclass(frozen=True)
class FittedHead:
    """The result of the stage: two heads for all training images, and the same two for a run on a part of them.

    Runs start from the head without views (`plain_head`, `start_head`), because fine-tuning learns more from crops that
    the head has not seen. The head with views (`head`, `result_head`) is tested, and averaged with the trained models.
    """

    fitter: HeadFitter
    augmentation: DataConfig
    """The job's `data`, without the augmentation that makes the head worse."""
    views: Sequence[Features]
    """Augmented views that `head` is fitted to besides the plain representations; empty if they make it worse."""
    plain_head: LinearHead
    """The head for all images without views."""
    head: LinearHead
    """The head for all images with `views`."""
    balance: dict[str, Any] | None = None
    """What `--balance` changes (`_compare_balance`); None where classes have about the same number of images."""

    def start_head(self, indices: Int[np.ndarray, " m"] | None = None) -> LinearHead:
        """The head for these training images (default: all), without views."""
        return self.plain_head if indices is None else self.fitter.fit(indices=indices)

    def result_head(self, indices: Int[np.ndarray, " m"] | None = None) -> LinearHead:
        """The head for these training images (default: all), with views."""
        return self.head if indices is None else self.fitter.fit(self.views, indices)

    def create_classifier(self, indices: Int[np.ndarray, " m"] | None = None) -> Model:
        """The checkpoint with the head of `result_head`."""
        model = init_from_checkpoint(self.fitter.job.checkpoint, self.fitter.job.config.model)
        self.result_head(indices).copy_to(model)
        return model

    def log_metrics(self) -> None:
        """Logs the metrics of the head on images left out, and how many images it was fitted to."""
        job, fitted = self.fitter.job, len(self.fitter.choose_rows())
        if fitted < (count := len(job.splits.train)):
            job.log(f"least-squares head: fitted to {fitted:,} of the {count:,} training images")
        job.log(f"least-squares head: {left_out_name(job.splits.train)} {headline(vars(self.head))}")

    def write_suspects(self, folder: Path) -> None:
        """Writes `suspects.csv`: the training images whose label is probably wrong, by the head without views (rank
        0). Images of several labels have none."""
        job, fitter = self.fitter.job, self.fitter
        train = job.splits.train
        if not job.context.world.is_rank_0 or train.label_sets is not None or (folder / SUSPECTS).is_file():
            return
        rows = fitter.choose_rows()
        indices, x = fitter.plain.indices[rows], fitter.plain.x[rows]
        labels, classes = train.labels[indices], len(train.classes)
        weights = balanced_weights(labels, classes) if job.config.balance else None
        # Not `left_out_groups`: labels of train are checked too, so the user's val is not the only group left out.
        groups = None if train.groups is None else np.unique(train.groups[indices], return_inverse=True)[1]
        groups = None if groups is None or (groups == groups[0]).all() else groups
        fit = leave_one_out(x, labels, classes, groups, weights, every=True)
        known = indices[fit.rows].tolist()
        probabilities = fit.logits.softmax(dim=1).numpy()
        suspects = find_suspects(probabilities, labels[fit.rows], x[fit.rows], lambda row: train.image(known[row]))
        names = [image_id(train, index) for index in known]
        write_suspects(folder / SUSPECTS, suspects, names, train.classes)
        if suspects:
            job.log(
                f"labels to check, the most suspect first: {len(suspects):,} of {len(names):,} in {folder / SUSPECTS}"
            )

    def score_held_out(self) -> dict[str, Any]:
        """`summary_metrics` of the head that is fitted without the held-out images, on these."""
        train, plain, config = self.fitter.job.splits.train, self.fitter.plain, self.fitter.job.config
        rest, held_out = hold_out_indices(train, config.held_out, config.seed)
        is_held_out = np.isin(plain.indices, held_out)
        logits = torch.from_numpy(self.result_head(rest).logits(plain.x[is_held_out]))
        labels = torch.from_numpy(_labels(train, plain.indices[is_held_out]))
        weights = torch.from_numpy(balanced_weights(labels.numpy(), len(train.classes))) if config.balance else None
        loss = classification_loss(logits, labels, evaluation_loss(train), class_weights=weights)
        predictions = logits.argmax(dim=1)
        if labels.ndim == 1:
            correct = predictions == labels
        else:
            correct = labels.gather(1, predictions[:, None])  # [n, 1]: the prediction is one of the labels
        metrics = {"accuracy": float(correct.double().mean()), "loss": float(loss), "images": int(is_held_out.sum())}
        if train.multi_label and logits.numel() <= MAX_SCORES:
            metrics["mean_average_precision"] = mean_average_precision(labels.numpy(), logits.numpy())
        return metrics

    def test(self, path: Path) -> dict[str, Any]:
        """Tests the head and saves it in the folder `path`, unless that is finished; returns the content of
        result.json: in `least_squares` how it was fitted, in `test` the record of the test."""
        job, splits = self.fitter.job, self.fitter.job.splits
        config, world = job.config.single(), job.context.world
        settings = run_settings("finetune", job.init_id, splits, config) | {"trained": "head"}
        with Workdir(path, settings, tensorboard=False, world=world) as folder:
            if folder.finished:
                return folder.read_result()
            model = self.create_classifier().to(job.context.device)
            calibrator = None if self.head.masses is None else Calibrator(None, self.head.masses)
            test = evaluate_split(config, model, splits.test, world, keep_logits=True).with_calibrator(calibrator)
            test = test.with_thresholds(self.head.label_thresholds)
            job.log(f"least-squares head: test {headline(test.metrics())} ({len(test.labels):,} images)")
            return write_run(config, folder, splits, model, test, job.init_id, least_squares=self._fit_record())

    def _fit_record(self) -> dict[str, Any]:
        """How the head was fitted, for result.json."""
        head, data, train = self.head, self.augmentation, self.fitter.job.splits.train
        record: dict[str, Any] = {"l2": head.l2, "leave_one_out": head.accuracy, "leave_one_out_loss": head.loss}
        record |= {"chosen_on": left_out_name(train), "fitted_images": len(self.fitter.choose_rows())}
        record |= {"reject_below": head.reject_below, "views": len(self.views), "crop": data.crop, "flip": data.flip}
        if head.mean_average_precision is not None:
            record["leave_one_out_mean_average_precision"] = head.mean_average_precision
        if self.balance is not None:
            record["balance"] = self.balance
        return record


def fit_head(job: FinetuneJob) -> FittedHead:
    """Computes the representations, chooses the augmentation and fits the head; this may take minutes.

    Augmentation may change a label: a mirrored digit is another symbol. So training takes all of it, all but flips, or
    none: what gives the head with one view the lowest leave-one-out loss. The head takes up to `head_views` views, if
    they lower its loss.
    """
    checkpoint = FrozenCheckpoint.load(job)
    plain = checkpoint.compute_plain()
    fitter = HeadFitter(job, plain)
    num_views = fitter.max_views(job.config.head_views or 0)
    first_views = _compute_first_views(checkpoint, plain, num_views)
    view_losses = {flip: fitter.fit([view]).loss for flip, view in first_views.items()}
    plain_head = fitter.fit()
    balance = _compare_balance(fitter, plain_head)
    augmentation = _choose_augmentation(job, view_losses, plain_head.loss)
    # The head takes no view where `_choose_augmentation` has found none that helps.
    if not view_losses or min(view_losses.values()) >= plain_head.loss:
        return FittedHead(fitter, augmentation, [], plain_head, plain_head, balance)
    # Where training flips, the first view without flips is of use too; where it does not, the flipped one is dropped.
    views = [view for flip, view in first_views.items() if augmentation.flip or not flip]
    for number in range(len(first_views) + 1, num_views + 1):
        if not checkpoint.view_fits(plain, number):
            break
        views.append(checkpoint.compute_view(plain, number, num_views, augmentation.flip))
    head = fitter.fit(views)
    if head.loss >= plain_head.loss:
        views, head = [], plain_head
    return FittedHead(fitter, augmentation, views, plain_head, head, balance)


def _compare_balance(fitter: HeadFitter, head: LinearHead) -> dict[str, Any] | None:
    """Accuracies on images left out with and without `balance`, which are logged: `head` has the job's.

    None where no class has UNEQUAL times as many images as another, and for several labels per image.
    """
    job, train = fitter.job, fitter.job.splits.train
    counts = np.bincount(train.labels, minlength=len(train.classes))
    counts = counts[counts > 0]
    if train.multi_label or counts.max() <= UNEQUAL * counts.min():
        return None
    balanced = job.config.balance
    other = fitter.fit(balance=not balanced)
    heads = {"off": other if balanced else head, "on": head if balanced else other}
    names = ("accuracy", "balanced_accuracy")
    record: dict[str, Any] = {name: {key: getattr(each, name) for key, each in heads.items()} for name in names}
    changes = [f"{name.replace('_', ' ')} {values['off']:.1%} -> {values['on']:.1%}" for name, values in record.items()]
    verb = "changes" if balanced else "would change"
    job.log(
        f"classes have {counts.min():,} to {counts.max():,} images: --balance {verb} the head's {', '.join(changes)} "
        f"({left_out_name(train)})"
    )
    return record | {"images": [int(counts.min()), int(counts.max())]}


def _compute_first_views(checkpoint: FrozenCheckpoint, plain: Features, num_views: int) -> dict[bool, Features]:
    """The first augmented views, by whether images are flipped at random.

    If the job flips, and two of `num_views` fit: one without flips and one with. Otherwise one, flipped if the job
    flips. Empty if the job augments nothing, or no view fits.
    """
    data = checkpoint.job.config.data
    is_augmented = data.flip or data.crop != "none" or data.randaugment_layers
    if not num_views or not is_augmented or not checkpoint.view_fits(plain, 1):
        return {}
    compares_flips = data.flip and num_views > 1 and checkpoint.view_fits(plain, 2)
    flips = (False, True) if compares_flips else (data.flip,)
    return {flip: checkpoint.compute_view(plain, number, num_views, flip) for number, flip in enumerate(flips, 1)}


def _choose_augmentation(job: FinetuneJob, view_losses: dict[bool, float], plain_loss: float) -> DataConfig:
    """The job's `data` with the augmentation of least loss. `view_losses`: flip -> loss with the first such view."""
    data = job.config.data
    if not view_losses:
        return data
    flip = min(view_losses, key=view_losses.__getitem__)
    if view_losses[flip] >= plain_loss:
        job.log("augmented training images make the least-squares head worse: none is augmented")
        off = {name: getattr(DataConfig, name) for name in ("randaugment_layers", "randaugment_magnitude")}
        return dataclasses.replace(data.without_crop(), flip=False, **off)
    if data.flip and not flip:
        job.log("mirrored training images make the least-squares head worse: none is mirrored")
    return dataclasses.replace(data, flip=flip)


def head_loss(job: FinetuneJob, config: FinetuneConfig, count: int) -> float:
    """The leave-one-out loss of the head at the image size of `config`, for about `count` images: for the plan."""
    train = stratified_subset(job.splits.train, count / len(job.splits.train), config.seed)
    splits = dataclasses.replace(job.splits, train=train)
    trial = dataclasses.replace(job, config=config, splits=splits, clock=JobClock())
    loss = HeadFitter(trial, FrozenCheckpoint.load(trial).compute_plain()).fit().loss
    name, size = left_out_name(train), "x".join(map(str, config.model.image_hw))
    job.log(f"{size} px: {name} loss {loss:.3f} of the least-squares head for {len(train)} images")
    return loss


def check_head(config: FinetuneConfig) -> None:
    """Raises UserError for more than MAX_CLASSES."""
    if config.head and config.model.num_classes > MAX_CLASSES:
        raise UserError(
            f"{config.model.num_classes:,} classes are too many for the least-squares head, at most {MAX_CLASSES:,}; "
            f"give --recipe custom, whose head starts at zero."
        )


def _labels(dataset: Dataset, indices: np.ndarray) -> Int[np.ndarray, " n"] | Bool[np.ndarray, "n K"]:
    """The label of each of these images, or whether it has each of the classes if images have several."""
    if dataset.label_sets is None:
        return dataset.labels[indices]
    return dataset.label_sets.multi_hot(indices, len(dataset.classes))
