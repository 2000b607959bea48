"""The learning rate sweep (App. B.1.1) on a held-out part of the training split, and the runs after it."""

import dataclasses
import functools
import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.data.dataset import Dataset, stratified_split
from vitlab.display import format_duration
from vitlab.errors import UserError
from vitlab.models.config import ViTConfig
from vitlab.models.init import redraw_head
from vitlab.models.vit import Model, build_model
from vitlab.pipelines.init_from_checkpoint import init_from_checkpoint
from vitlab.pipelines.pretrain import Execution, Splits, evaluate_split, run, run_settings, train_and_evaluate
from vitlab.rng import Stream
from vitlab.train.loop import NonFiniteError
from vitlab.train.microbatch import StepCost, measure_step
from vitlab.train.workdir import Workdir
from vitlab.weights import load_metadata, load_model, save_model

Log = Callable[[str], None]
SHORT = 120.0
"""Seconds up to which no shorter settings are suggested."""


@dataclass(frozen=True)
class FinetuneJob:
    """The checkpoint, splits and settings shared by all runs of a fine-tuning job."""

    checkpoint: str | Path
    init_id: str
    splits: Splits
    config: FinetuneConfig
    execution: Execution
    log: Log

    @functools.cached_property
    def sweep_splits(self) -> Splits:
        """The training split without its held-out part, and that part to evaluate on."""
        rest, held_out = hold_out(self.splits.train, self.config.held_out, self.config.seed)
        return Splits(rest, held_out, held_out)

    def measure_step(self) -> StepCost:
        """The cost of a micro-batch, measured by rank 0."""
        self.log("measuring how long a micro-batch takes")
        config, world = self.config, self.execution.world

        def measure() -> dict[str, Any]:
            model = build_model(config.model, generator=torch.Generator().manual_seed(0))
            return dataclasses.asdict(measure_step(config.single(), model, self.execution.device, world.world_size))

        return StepCost(**world.broadcast_object(measure))

    def create_model(self, seed: int) -> Model:
        """The model that a run starts from."""
        config, generator = self.config, torch.Generator().manual_seed(seed)
        if config.from_scratch:
            model = build_model(config.model, generator=generator)
        else:
            positions = generator if config.fresh_positions else None
            model = init_from_checkpoint(self.checkpoint, config.model, positions)
        if config.head_std is not None:
            redraw_head(model, config.head_std, generator)
        return model

    def train_and_test(self, config: TrainConfig, path: Path, description: str | None = None) -> dict[str, Any]:
        """The result of a run on all of train, tested; read from its folder if it is finished."""
        settings = run_settings("finetune", self.init_id, self.splits.train, config)
        with Workdir(path, settings, tensorboard=False, world=self.execution.world) as folder:
            if folder.finished:
                return folder.read_result()
        create_model = functools.partial(self.create_model, config.seed)
        execution, init_id = self.execution, self.init_id
        return run(config, path, self.splits, create_model, "finetune", execution, init_id, description).result

    def score_learning_rate(self, lr: float, path: Path) -> dict[str, Any]:
        """The metrics of a learning rate on the held-out split; the accuracy is None if it diverged."""
        splits, execution = self.sweep_splits, self.execution
        split = splits.val.split
        config = self.sweep_config(lr, split)
        settings = run_settings("finetune", self.init_id, splits.train, config) | {"held_out": self.config.held_out}
        with Workdir(path, settings, tensorboard=execution.tensorboard, world=execution.world) as folder:
            if not folder.finished:
                folder.write_result({split: self._train_and_evaluate(config, folder)})
                if folder.writes:
                    shutil.rmtree(folder.checkpoints, ignore_errors=True)
            record = folder.read_result()[split]
        score = {"learning_rate": lr, "accuracy": None} | (summary_metrics(record) if record else {})
        self.log(f"learning rate {lr:g}: {format_score(score)}")
        return score

    def _train_and_evaluate(self, config: TrainConfig, folder: Workdir) -> dict[str, Any] | None:
        """The record of a run of the sweep on the held-out split; None if it diverged."""
        splits, execution = self.sweep_splits, self.execution
        create_model, description = functools.partial(self.create_model, config.seed), f"rate {config.optim.lr:g}"
        try:
            model, evaluation = train_and_evaluate(config, folder, splits, create_model, execution, description)
        except NonFiniteError as error:
            self.log(str(error))
            return None
        if evaluation is None:
            evaluation = evaluate_split(config, model, splits.val, execution.world)
        # The last update may diverge.
        return evaluation.record() if math.isfinite(evaluation.metrics()["loss"]) else None

    def sweep_config(self, lr: float, split: str) -> TrainConfig:
        """A run of the sweep: in a shortened one, warm-up and average span the same fraction of the steps."""
        config = self.config.single(lr)
        steps, optim, decay = config.total_steps(len(self.splits.train)), config.optim, config.average_decay
        if (short := self.config.sweep_steps) is not None:
            optim = dataclasses.replace(optim, warmup_steps=optim.warmup_steps * short // steps)
            steps, decay = short, decay and decay ** (steps / short)
        data = dataclasses.replace(config.data, eval_split=split)
        return dataclasses.replace(config, steps=steps, epochs=None, average_decay=decay, optim=optim, data=data)

    def sweep_and_runs(self, workdir: Path) -> dict[str, Any]:
        """Sweep and runs, each in its own folder; returns the content of `workdir`/result.json."""
        config, scores, records = self.config, [], []
        settings = run_settings("finetune", self.init_id, self.splits.train, config)
        with Workdir(workdir, settings, tensorboard=False, world=self.execution.world) as folder:
            if folder.finished:
                return folder.read_result()
            folder.truncate_logs(-1)  # one line per finished run, the same at every start
            for lr in config.learning_rates if len(config.learning_rates) > 1 else ():
                scores.append(self.score_learning_rate(lr, workdir / "sweep" / f"lr-{lr}"))
                folder.log_metrics(len(scores), scores[-1])
            best = best_learning_rate(scores) if scores else config.optim.lr
            seeds = [config.seed + number for number in range(config.runs)]
            for number, seed in enumerate(seeds):
                single = config.single(best, seed)
                records.append(self.train_and_test(single, workdir / f"run-{number}", f"run {number}")["test"])
                metrics = {"learning_rate": best, "seed": seed, **summary_metrics(records[-1])}
                folder.log_metrics(len(scores) + len(records), metrics)
            if folder.writes:
                save_model(load_model(workdir / "run-0"), workdir / "model", extra=load_metadata(workdir / "run-0"))
            accuracies = [record["accuracy"] for record in records]
            result = {
                "learning_rate": best,
                "sweep": scores,
                "runs": [
                    {"seed": seed, **summary_metrics(record)} for seed, record in zip(seeds, records, strict=True)
                ],
                "accuracy_mean": statistics.fmean(accuracies),
                "accuracy_sd": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                "test": records[0],
            }
            folder.write_result(result | self.splits.record)
            return folder.read_result()


def best_learning_rate(scores: Sequence[Mapping[str, Any]]) -> float:
    """The learning rate with the highest mean average precision, if scores have it, else accuracy.

    Ties: lowest loss, then smallest learning rate.
    """
    finite = [score for score in scores if score["accuracy"] is not None]
    if not finite:
        rates = ", ".join(f"{score['learning_rate']:g}" for score in scores)
        raise NonFiniteError(f"the training diverged at every learning rate ({rates}); try smaller ones.")

    def rank(score: Mapping[str, Any]) -> tuple[float, float, float]:
        return score.get("mean_average_precision", score["accuracy"]), -score["loss"], -score["learning_rate"]

    return max(finite, key=rank)["learning_rate"]


def hold_out(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """The training split without `fraction` of each class, and that held-out split, chosen by `seed` (App. B.1.1).

    Raises UserError where one of the two is empty.
    """
    parts = stratified_split(dataset.labels, {"held_out": fraction}, seed, Stream.HELD_OUT)
    rest, held_out = (dataset.take(parts[name]) for name in ("train", "held_out"))
    if not len(rest) or not len(held_out):
        raise UserError(
            f"held_out={fraction:g} leaves {len(rest)} images of {dataset.name} to train on and {len(held_out)} to "
            f"evaluate on (a class needs at least two); give another fraction, or one rate and no sweep "
            f"(`--learning-rates 0.01`)."
        )
    return rest, dataclasses.replace(held_out, split="held_out")


def summary_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    """The main metrics of an evaluation's record."""
    names = ("accuracy", "loss", "mean_average_precision", "top5", "images")
    return {name: record[name] for name in names if name in record}


def format_score(score: Mapping[str, Any]) -> str:
    """The metrics of a learning rate as text."""
    if score["accuracy"] is None:
        return "diverged"
    precision = score.get("mean_average_precision")
    text = f"{score['accuracy']:.2%} of {score['images']} held-out images right, loss {score['loss']:.4f}"
    return text if precision is None else f"{text}, mean average precision {precision:.2%}"


def format_estimate(
    config: FinetuneConfig, cost: StepCost, train_images: int, test_images: int, held_out_images: int, device: str
) -> str:
    """What a fine-tuning job with these complete settings will take, as lines of text: size, memory and time.

    held_out_images: images of the training split that score the learning rates; 0 without a sweep.
    """

    def duration(seconds: float) -> str:
        return format_duration(seconds) if seconds < math.inf else "unknown"

    def seconds(config: FinetuneConfig) -> tuple[float, float]:
        """Of the sweep, and of the final runs with their tests."""
        steps, train_seconds = config.total_steps(train_images), config.batch_size * cost.train_seconds
        one_rate = (config.sweep_steps or steps) * train_seconds + held_out_images * cost.eval_seconds
        one_run = steps * train_seconds + test_images * cost.eval_seconds
        return len(config.learning_rates) * one_rate if held_out_images else 0.0, config.runs * one_run

    model, steps = config.model, config.total_steps(train_images)
    sweep_seconds, run_seconds = seconds(config)
    total = sweep_seconds + run_seconds
    epochs, size = steps * config.batch_size / train_images, "x".join(map(str, model.image_hw))
    rows = {
        "model": f"{model.num_parameters / 1e6:.1f}M parameters, {size} px, on {device}",
        "data": f"{train_images:,} training and {test_images:,} test images, {model.num_classes:,} classes",
        "measured": cost.describe(),
        "search": f"{len(config.learning_rates)} learning rates x {config.sweep_steps or steps:,} steps of "
        f"{config.batch_size} images, scored on {held_out_images:,} images: {duration(sweep_seconds)}",
        "training": f"{config.runs} x {steps:,} steps of {config.batch_size} images ({epochs:.1f} epochs), then the "
        f"test: {duration(run_seconds)}",
        "total": f"about {duration(total)}",
    }
    shorter = []
    if held_out_images:
        shorter.append(f"--optim.lr {config.optim.lr:g}, without a search: {duration(run_seconds)}")
    else:
        del rows["search"]
    if (half := steps // 2) > 0:
        sweep_steps = config.sweep_steps and max(config.sweep_steps * half // steps, 1)
        fewer = dataclasses.replace(config, steps=half, epochs=None, sweep_steps=sweep_steps)
        shorter.append(f"--steps {half}: {duration(sum(seconds(fewer)))}")
    if isinstance(model, ViTConfig) and (side := min(model.image_hw) * 3 // 4 // model.stride * model.stride) >= 64:
        ratio = dataclasses.replace(model, image_size=side).forward_macs / model.forward_macs
        shorter.append(f"--image-size {side}: about {duration(ratio * total)}")
    if SHORT < total < math.inf:
        rows["shorter"] = " | ".join(shorter)
    return "\n".join(f"  {name:9} {text}" for name, text in rows.items())
