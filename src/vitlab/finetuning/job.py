"""A fine-tuning job: the least-squares head, the learning rate sweep (App. B.1.1) on a held-out part of the training
split, the final runs, the tests and the result. `protocol.py` plans it and calls `run_stages`."""

import dataclasses
import functools
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Int
from torch import nn

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.data.splits import stratified_subset
from vitlab.evaluation.calibration import choose_rejection
from vitlab.evaluation.multi_label import choose_thresholds
from vitlab.finetuning.head import JobInputs, LinearStage, hold_out, hold_out_indices
from vitlab.finetuning.job_clock import JobClock
from vitlab.finetuning.scores import Choice, average_weights, best_score, format_score, summarize, summary_metrics
from vitlab.finetuning.stages import ALPHAS
from vitlab.io import read_json
from vitlab.models.init import redraw_head
from vitlab.models.vit import Model, build_model
from vitlab.recipes.resolve import Reason, changes
from vitlab.runs.init_from_checkpoint import init_from_checkpoint
from vitlab.runs.run import TrainingRun, evaluate_split, run_settings, write_run
from vitlab.runs.splits import Splits
from vitlab.train.microbatch import choose_microbatch
from vitlab.train.precision import frozen_dtype
from vitlab.train.stopping import NonFiniteError
from vitlab.train.workdir import METRICS, Workdir, read_log
from vitlab.weights import load_metadata, load_model, save_model
from vitlab.weights.json_fields import THRESHOLDS

Log = Callable[[str], None]
MIN_SWEEP, MIN_FINAL = 0.5, 0.6
"""Fractions of the planned steps of the sweep and of a final run that must fit; otherwise they are left out."""


@dataclass(frozen=True)
class FinetuneJob(JobInputs):
    """A fine-tuning job: the least-squares head, the sweep and the final runs."""

    reasons: tuple[Reason, ...] = ()
    """Why the settings that the recipe left open have their values."""

    def run_stages(self, workdir: Path, make_report: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """All stages, each run in its own folder, and the report of `make_report()`; returns `workdir`/result.json."""
        settings = run_settings("finetune", self.init_id, self.splits, self.config) | {"reasons": self.reasons}
        with Workdir(workdir, settings, tensorboard=False, world=self.context.world) as folder:
            self.log(f"settings: {workdir / 'config.json'}")
            if not folder.finished:
                self.clock.open(folder)
                folder.truncate_logs(-1)  # one line per finished run, the same at every start
                folder.write_result(self._with_saved_microbatch(folder)._choose_and_test(folder))
            folder.write_report(make_report)
            return folder.read_result()

    def _with_saved_microbatch(self, folder: Workdir) -> "FinetuneJob":
        """The job with the micro-batch of its first start, so that all of its runs have the same."""
        if (measured := self.context.microbatch) is None:
            return self
        unused = nn.Identity()  # a model is only needed where none is measured
        size = choose_microbatch(self.config.single(), folder, unused, self.context.device, measured)
        return dataclasses.replace(self, context=dataclasses.replace(self.context, microbatch=size))

    def _choose_and_test(self, folder: Workdir) -> dict[str, Any]:
        """All choices first, then the tests: no test image, and no time of a test, decides anything."""
        config, clock = self.config, self.clock
        choice = self._choose(folder)
        runs = self._final_runs(folder, choice)
        linear = None
        one_test = clock.seconds("test") / (config.runs + 1)
        if config.head is not None and (not runs or clock.fits("test of the head alone", one_test, after=0.0)):
            linear = self.linear.test(folder.path / "linear")
        chosen = "run-0" if runs else "linear"
        alpha = choice.alpha(config) if runs else 0.0
        if folder.writes:
            metadata = load_metadata(folder.path / chosen)
            chosen_by = linear["least_squares"] if linear and not runs else choice.tuned or {}
            if chosen_by.get("reject_below") is not None:
                metadata["reject_below"] = chosen_by["reject_below"]
            if runs and config.head:
                metadata["alpha"] = alpha
            save_model(load_model(folder.path / chosen), folder.path / "model", extra=metadata)
        result: dict[str, Any] = {"learning_rate": choice.learning_rate(config), "sweep": choice.scores}
        if linear is not None:
            metrics = linear["least_squares"] | summary_metrics(linear["test"])
            result["linear"] = {**metrics, "held_out": choice.held_out}
        if config.head is not None:
            result |= {"chosen": chosen, "alpha": alpha}
        if clock.left_out:
            result["left_out"] = clock.left_out
        records = list(runs.values()) or ([linear["test"]] if linear else [])
        return result | summarize(records, list(runs)) | self.splits.record

    def _choose(self, folder: Workdir) -> Choice:
        """Fits the head and tries the learning rates."""
        config, clock = self.config, self.clock
        if config.head is not None and not (folder.path / "linear" / "result.json").exists():
            self.linear.describe()
        enough = MIN_SWEEP * clock.seconds("sweep" if config.tried_rates else "final") + clock.seconds("score")
        if not config.runs or (config.head and not clock.fits("fine-tuning", enough, clock.seconds("test"))):
            return Choice()
        if not (scores := self.sweep(folder.path)):
            return Choice({"learning_rate": config.optim.lr})
        for number, score in enumerate(scores, 1):
            folder.log(METRICS, number, score)
        held_out = self.linear.score_held_out() if config.head is not None else None
        helps = held_out is None or self._helps(scores, held_out)
        return Choice(best_score(scores) if helps else None, scores, held_out)

    def _helps(self, scores: Sequence[Mapping[str, Any]], linear: Mapping[str, Any]) -> bool:
        """Whether fine-tuning is better than the head alone, by the loss on the held-out part."""
        self.log(f"least-squares head: {format_score(linear)}")
        finite = any(score["accuracy"] is not None for score in scores)
        helps = finite and best_score(scores)["loss"] < linear["loss"]
        if not helps:
            worse = "makes the least-squares head worse" if finite else "diverged at every learning rate"
            self.log(f"fine-tuning {worse}: the head is the result")
        return helps

    # The sweep.

    def sweep(self, workdir: Path) -> list[dict[str, Any]]:
        """The scores of all learning rates."""
        rates = self.config.tried_rates
        return [
            self.score_learning_rate(lr, sweep_folder(workdir, lr), later=1 - number / len(rates))
            for number, lr in enumerate(rates, 1)
        ]

    def score_learning_rate(self, lr: float, path: Path, later: float = 0.0) -> dict[str, Any]:
        """The metrics of a learning rate on the held-out split; the accuracy is None if it diverged.

        later: fraction of the sweep that follows. With a `head`, the metrics belong to the average of weights with the
        lowest loss, and `alpha` says which. Where it may be the final run, its model is saved.
        """
        splits, context = self.sweep_splits, self.context
        split = splits.val.split
        config = self.sweep_config(lr)
        settings = run_settings("finetune", self.init_id, splits, config) | {"held_out": self.config.held_out}
        with Workdir(path, settings, tensorboard=context.tensorboard, world=context.world) as folder:
            if not folder.finished:
                if not folder.checkpoints.exists():  # a finished run has deleted them: it is trained again
                    folder.corrupt.clear()
                folder.write_result({split: self._train_and_evaluate(config, folder, later)})
            if folder.writes:
                shutil.rmtree(folder.checkpoints, ignore_errors=True)
            record = folder.read_result()[split]
        score = {"learning_rate": lr, "accuracy": None} | (summary_metrics(record) if record else {})
        self.log(f"learning rate {lr:g}: {format_score(score)}")
        return score

    def _train_and_evaluate(self, config: TrainConfig, folder: Workdir, later: float) -> dict[str, Any] | None:
        """The record of a run of the sweep on the held-out split; None if it diverged."""
        splits, context = self.sweep_splits, self.context
        rest, _ = hold_out_indices(self.splits.train, self.config.held_out, self.config.seed)
        create_model = functools.partial(self.create_model, config.seed, rest)
        limit = self.clock.limit("sweep", later)
        run = TrainingRun(
            config, splits, create_model, "finetune", context, description=f"rate {config.optim.lr:g}", limit=limit
        )
        try:
            model, evaluation = run.train_and_evaluate(folder)
        except NonFiniteError as error:
            self.log(str(error))
            return None
        if evaluation is None:
            evaluation = evaluate_split(config, model, splits.val, context.world)
        record = {}
        head = None if self.config.head is None else self.linear.classifier(rest)
        if head is not None:
            dtype = frozen_dtype(config.precision, context.device)
            evaluations = {1.0: evaluation}
            for alpha in ALPHAS:
                average = average_weights(head, model, alpha).to(dtype)
                evaluations[alpha] = evaluate_split(config, average, splits.val, context.world)
            record["alpha"] = min(evaluations, key=lambda alpha: evaluations[alpha].metrics()["loss"])
            evaluation = evaluations[record["alpha"]]
        if not math.isfinite(evaluation.metrics()["loss"]):  # the last update may diverge
            return None
        if folder.writes and (self.clock.limited or not self.config.refit):  # it may be the final run
            kept = model if head is None else average_weights(head, model, record["alpha"])
            save_model(cast(Model, kept), folder.path / "model")
        if evaluation.scores is not None:
            record[THRESHOLDS] = choose_thresholds(evaluation.multi_hot(evaluation.all_labels), evaluation.scores)
            evaluation = evaluation.with_thresholds(record[THRESHOLDS])
        elif not splits.val.multi_label:
            record["reject_below"] = choose_rejection(evaluation.confidences, evaluation.correct)
        return evaluation.record() | record

    def sweep_config(self, lr: float) -> TrainConfig:
        """A run of the sweep; warm-up and average span the same fraction of `sweep_steps`."""
        config = self.run_config(lr)
        steps = config.total_steps(len(self.splits.train))
        optim = config.optim
        decay = config.average_decay
        if (short := self.config.sweep_steps) is not None:
            optim = dataclasses.replace(optim, warmup_steps=optim.warmup_steps * short // steps)
            steps, decay = short, decay and decay ** (steps / short)
        data = dataclasses.replace(config.data, eval_split=self.sweep_splits.val.split)
        return dataclasses.replace(config, steps=steps, epochs=None, average_decay=decay, optim=optim, data=data)

    @functools.cached_property
    def sweep_splits(self) -> Splits:
        """The training split without its held-out part, and that part to evaluate on."""
        rest, held_out = hold_out(self.splits.train, self.config.held_out, self.config.seed)
        return Splits(rest, held_out, held_out)

    # The final runs.

    def _final_runs(self, folder: Workdir, choice: Choice) -> dict[int, dict[str, Any]]:
        """Seed -> record of the test. Where the time is short, the run of the sweep is the only one."""
        config, clock, workdir = self.config, self.clock, folder.path
        if (tuned := choice.tuned) is None:
            return {}
        lr = tuned["learning_rate"]
        thresholds = self._thresholds(sweep_folder(workdir, lr)) if choice.scores else None
        enough = MIN_FINAL * clock.seconds("final") / config.runs
        records: dict[int, dict[str, Any]] = {}
        for number in range(config.runs):
            seed = config.seed + number
            has_model = bool(number or choice.scores)
            if config.refit and (not has_model or clock.fits(f"final run {number}", enough, clock.seconds("test"))):
                result = self.train_and_test(
                    self.run_config(lr, seed),
                    workdir / f"run-{number}",
                    f"run {number}",
                    choice.alpha(config),
                    thresholds,
                    later=1 - (number + 1) / config.runs,
                )
            elif not number:
                result = self.test_trained(workdir, tuned)
            else:
                break
            records[seed] = result["test"]
            metrics = {"learning_rate": lr, "seed": seed, **summary_metrics(records[seed])}
            folder.log(METRICS, len(choice.scores) + len(records), metrics)
        return records

    def train_and_test(
        self,
        config: TrainConfig,
        path: Path,
        description: str | None = None,
        alpha: float = 1.0,
        thresholds: Sequence[float] | None = None,
        settings: Mapping[str, Any] | None = None,
        later: float = 0.0,
    ) -> dict[str, Any]:
        """The result of a run on all of train, tested; read from its folder if it is finished.

        alpha: weight of the trained model in its average with the least-squares head's. thresholds: of each of several
        labels. settings: more for config.json. later: fraction of the final runs that follows.
        """
        head = functools.cache(self.linear.classifier)  # not fitted for a finished run
        averages = self.config.head is not None and alpha < 1
        run = TrainingRun(
            config,
            self.splits,
            functools.partial(self.create_model, config.seed),
            "finetune",
            self.context,
            init_id=self.init_id,
            description=description,
            thresholds=thresholds,
            settings=settings,
            limit=self.clock.limit("final", later),
            finish=lambda model: average_weights(head(), model, alpha) if averages else model,
        )
        return run.run(path).result

    def test_trained(self, workdir: Path, score: Mapping[str, Any]) -> dict[str, Any]:
        """The result of the sweep's run with this score as the final run, tested."""
        config = self.sweep_config(score["learning_rate"])
        source = sweep_folder(workdir, config.optim.lr)
        splits = dataclasses.replace(self.sweep_splits, test=self.splits.test, unreadable=self.splits.unreadable)
        settings = run_settings("finetune", self.init_id, splits, config) | {"held_out": self.config.held_out}
        context = self.context
        with Workdir(workdir / "run-0", settings, tensorboard=context.tensorboard, world=context.world) as folder:
            if folder.finished:
                return folder.read_result()
            folder.truncate_logs(-1)
            for record in read_log(source / METRICS):
                folder.log(METRICS, record.pop("step"), record)
            model = load_model(source / "model").to(context.device)
            test = evaluate_split(config, model, splits.test, context.world)
            test = test.with_thresholds(self._thresholds(source))
            return write_run(config, folder, splits, model, test, self.init_id)

    def _thresholds(self, folder: Path) -> list[float] | None:
        """The threshold of each of several labels that the sweep's run in this folder has chosen; None without any."""
        return read_json(folder / "result.json")[self.sweep_splits.val.split].get(THRESHOLDS)

    # What every run starts from.

    def run_config(self, lr: float | None = None, seed: int | None = None) -> TrainConfig:
        """`FinetuneConfig.single`, with the augmentation that does not harm the least-squares head."""
        config = self.config.single(lr, seed)
        return config if self.config.head is None else dataclasses.replace(config, data=self.linear.augmented[0])

    def create_model(self, seed: int, indices: Int[np.ndarray, " m"] | None = None) -> Model:
        """The model that a run starts from; `indices`: its training images, if it does not have all."""
        config, generator = self.config, torch.Generator().manual_seed(seed)
        if config.from_scratch:
            model = build_model(config.model, generator=generator)
        else:
            positions = generator if config.fresh_positions else None
            model = init_from_checkpoint(self.checkpoint, config.model, positions)
        if config.head_std is not None:
            redraw_head(model, config.head_std, generator)
        if config.head == "least_squares":
            self.linear.fit_start(indices).copy_to(model)
        return model

    @functools.cached_property
    def linear(self) -> LinearStage:
        """The least-squares head of `config.head`."""
        return LinearStage(**{field.name: getattr(self, field.name) for field in dataclasses.fields(JobInputs)})

    # For the plan, before the job starts.

    def decide(self, why: str, config: FinetuneConfig) -> "FinetuneJob":
        """The job with `config`, whose changes have this reason."""
        new = tuple(Reason(name, value, why) for name, value in changes(self.config, config))
        old = tuple(reason for reason in self.reasons if reason.setting not in {name for name, *_ in new})
        return dataclasses.replace(self, config=config, reasons=old + new)

    def head_loss(self, config: FinetuneConfig, count: int) -> float:
        """The leave-one-out loss of the least-squares head at the image size of `config`, for about `count` images."""
        train = stratified_subset(self.splits.train, count / len(self.splits.train), config.seed)
        splits = dataclasses.replace(self.splits, train=train)
        job = dataclasses.replace(self, config=config, splits=splits, clock=JobClock())
        loss = job.linear.plain_head.loss
        size = "x".join(map(str, config.model.image_hw))
        self.log(f"{size} px: {job.linear.chosen_on} loss {loss:.3f} of the least-squares head for {len(train)} images")
        return loss


def sweep_folder(workdir: Path, lr: float) -> Path:
    """The folder of a learning rate."""
    return workdir / "sweep" / f"lr-{lr}"
