"""The learning rate sweep of a fine-tuning job on a held-out part of the training split (App. B.1.1).

`run_job.py` calls `Sweep.run`. `RunStart` has what the runs of the sweep and the final runs start from.
"""

import dataclasses
import functools
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Int
from torch import nn

from vitlab.config import TrainConfig
from vitlab.evaluation.calibration import Calibrator, choose_rejection
from vitlab.evaluation.multi_label import choose_thresholds
from vitlab.evaluation.result import Evaluation
from vitlab.finetuning.head import FittedHead
from vitlab.finetuning.held_out import HELD_OUT, hold_out, hold_out_indices
from vitlab.finetuning.job import FinetuneJob
from vitlab.finetuning.scores import Score, average_weights, format_score, summary_metrics
from vitlab.finetuning.stages import ALPHAS
from vitlab.io import read_json
from vitlab.models.init import redraw_head
from vitlab.models.vit import Model, build_model
from vitlab.runs.init_from_checkpoint import init_from_checkpoint
from vitlab.runs.run import TrainingRun, evaluate_split, run_settings
from vitlab.runs.splits import Splits
from vitlab.train.clock import TimeLimit
from vitlab.train.objectives import balanced_weights
from vitlab.train.stopping import NonFiniteError
from vitlab.train.workdir import Workdir
from vitlab.weights import save_model
from vitlab.weights.json_fields import THRESHOLDS

CALIBRATOR = "calibrator"


@dataclass(frozen=True)
class RunStart:
    """What every run of a job starts from: its settings and its model."""

    job: FinetuneJob
    head: FittedHead | None
    """None without `config.head`."""

    @property
    def calibrates(self) -> bool:
        """Whether a calibrator is fitted to held-out images: not in the paper's protocol."""
        return self.head is not None

    def run_config(self, lr: float | None = None, seed: int | None = None) -> TrainConfig:
        """`FinetuneConfig.single`, with the augmentation that does not harm the least-squares head."""
        config = self.job.config.single(lr, seed)
        return config if self.head is None else dataclasses.replace(config, data=self.head.augmentation)

    def sweep_config(self, lr: float) -> TrainConfig:
        """The settings of a run of the sweep; warm-up and average span the same fraction of `sweep_steps`."""
        config = self.run_config(lr)
        steps = config.total_steps(len(self.job.splits.train))
        optim = config.optim
        decay = config.average_decay
        if (short := self.job.config.sweep_steps) is not None:
            optim = dataclasses.replace(optim, warmup_steps=optim.warmup_steps * short // steps)
            decay = decay and decay ** (steps / short)
            steps = short
        data = dataclasses.replace(config.data, eval_split=HELD_OUT)
        return dataclasses.replace(config, steps=steps, epochs=None, average_decay=decay, optim=optim, data=data)

    def create_model(self, seed: int, indices: Int[np.ndarray, " m"] | None = None) -> Model:
        """The model before its first step. `indices`: the training images of the run (default: all)."""
        config, generator = self.job.config, torch.Generator().manual_seed(seed)
        if config.from_scratch:
            model = build_model(config.model, generator=generator)
        else:
            positions = generator if config.fresh_positions else None
            model = init_from_checkpoint(self.job.checkpoint, config.model, positions)
        if config.head_std is not None:
            redraw_head(model, config.head_std, generator)
        if self.head is not None:
            self.head.start_head(indices).copy_to(model)
        return model


@dataclass(frozen=True)
class Sweep:
    """The runs of the sweep, one for each of `config.tried_rates`."""

    start: RunStart

    @functools.cached_property
    def splits(self) -> Splits:
        """The training split without its held-out part, and that part to evaluate on."""
        job = self.start.job
        rest, held_out = hold_out(job.splits.train, job.config.held_out, job.config.seed)
        return Splits(rest, held_out, held_out)

    def run(self, workdir: Path) -> list[Score]:
        """The scores of all learning rates, each with a folder in `workdir`."""
        clock, rates = self.start.job.clock, self.start.job.config.tried_rates
        scores = []
        for number, lr in enumerate(rates, 1):
            limit = clock.limit("sweep", later=1 - number / len(rates))
            scores.append(self.score(lr, sweep_folder(workdir, lr), limit))
        return scores

    def score(self, lr: float, path: Path, limit: TimeLimit | None = None) -> Score:
        """Trains at this learning rate in the folder `path`, unless that is finished, and evaluates.

        With a `head`, the average of weights with the lowest loss is scored, and `alpha` is its weight.
        If it may be the final run, its model is saved.
        """
        job = self.start.job
        config = self.start.sweep_config(lr)
        with self.open_folder(path, config) as folder:
            if not folder.finished:
                if not folder.checkpoints.exists():  # new; or finished, but its result is corrupt: it is trained again
                    folder.corrupt.clear()  # otherwise `train` raises
                folder.write_result({HELD_OUT: self._train_and_evaluate(config, folder, limit)})
            if folder.writes:
                shutil.rmtree(folder.checkpoints, ignore_errors=True)
            record = folder.read_result()[HELD_OUT]
        score = Score(lr, summary_metrics(record or {}))
        job.log(f"learning rate {lr:g}: {format_score(score.record)}")
        return score

    def open_folder(self, path: Path, config: TrainConfig, splits: Splits | None = None) -> Workdir:
        """The folder of a run of the sweep."""
        job = self.start.job
        settings = run_settings("finetune", job.init_id, splits or self.splits, config)
        settings |= {"held_out": job.config.held_out}
        return Workdir(path, settings, tensorboard=job.context.tensorboard, world=job.context.world)

    def _train_and_evaluate(
        self, config: TrainConfig, folder: Workdir, limit: TimeLimit | None
    ) -> dict[str, Any] | None:
        """The record of a run on the held-out images; None if it diverged."""
        job, splits = self.start.job, self.splits
        rest, _ = hold_out_indices(job.splits.train, job.config.held_out, job.config.seed)
        create_model = functools.partial(self.start.create_model, config.seed, rest)
        name = f"rate {config.optim.lr:g}"
        options: dict[str, Any] = {"description": name, "limit": limit, "keep_logits": self.start.calibrates}
        run = TrainingRun(config, splits, create_model, "finetune", job.context, **options)
        try:
            model, evaluation = run.train_and_evaluate(folder)
        except NonFiniteError as error:
            job.log(str(error))
            return None
        if evaluation is None:  # the training was over before
            evaluation = evaluate_split(config, model, splits.val, job.context.world, self.start.calibrates)
        head = None if self.start.head is None else self.start.head.create_classifier(rest)
        alpha = 1.0
        if head is not None:
            alpha, evaluation = self._choose_alpha(config, head, model, evaluation)
        if not math.isfinite(evaluation.metrics()["loss"]):  # the last update may diverge
            return None
        if folder.writes and (job.clock.budget is not None or not job.config.refit):  # it may be the final run
            final = model if head is None else average_weights(head, model, alpha)
            save_model(cast(Model, final), folder.path / "model")
        loss = _loss(config, evaluation)
        if evaluation.logits is not None:
            evaluation = evaluation.with_calibrator(Calibrator.fit(evaluation.logits, evaluation.labels))
        record = _record_with_thresholds(evaluation, splits.val.multi_label) | {"loss": loss}
        return record if head is None else record | {"alpha": alpha}

    def _choose_alpha(
        self, config: TrainConfig, head: Model, model: nn.Module, evaluation: Evaluation
    ) -> tuple[float, Evaluation]:
        """The weight of the trained `model` in its average with the head's, by the held-out loss, and the evaluation of
        that average. `evaluation` is of `model` itself, with the weight 1."""
        context = self.start.job.context
        evaluations = {1.0: evaluation}
        for alpha in ALPHAS:
            average = average_weights(head, model, alpha)
            evaluations[alpha] = evaluate_split(config, average, self.splits.val, context.world, self.start.calibrates)
        best = min(evaluations, key=lambda alpha: _loss(config, evaluations[alpha]))
        return best, evaluations[best]


def _loss(config: TrainConfig, evaluation: Evaluation) -> float:
    """The loss that choices are made by; with `balance` all classes count the same."""
    if not config.balance:
        return evaluation.metrics()["loss"]
    weights = balanced_weights(evaluation.labels, len(evaluation.classes))[evaluation.labels]
    return float((weights * evaluation.losses).mean())


def _record_with_thresholds(evaluation: Evaluation, multi_label: bool) -> dict[str, Any]:
    """The record of an evaluation on held-out images, and what it chooses: the threshold of each of several labels, or
    the confidence below which a prediction is rejected."""
    if evaluation.scores is not None:
        thresholds = choose_thresholds(evaluation.multi_hot(evaluation.all_labels), evaluation.scores)
        return evaluation.with_thresholds(thresholds).record() | {THRESHOLDS: thresholds}
    if multi_label:  # too many scores to keep
        return evaluation.record()
    record = evaluation.record() | {"reject_below": choose_rejection(evaluation.confidences, evaluation.correct)}
    return record if evaluation.calibrator is None else record | {CALIBRATOR: evaluation.calibrator._asdict()}


def sweep_folder(workdir: Path, lr: float) -> Path:
    """The folder of a learning rate."""
    return workdir / "sweep" / f"lr-{lr}"


def read_calibrator(folder: Path) -> Calibrator | None:
    """What a run of the sweep has fitted; None if it kept no logits."""
    saved = read_json(folder / "result.json")[HELD_OUT].get(CALIBRATOR)
    return None if saved is None else Calibrator(**saved)


def read_thresholds(folder: Path) -> list[float] | None:
    """The threshold of each of several labels that a run of the sweep has chosen; None if images have one label."""
    return read_json(folder / "result.json")[HELD_OUT].get(THRESHOLDS)
