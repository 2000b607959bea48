"""The search for the learning rate (App. B.1.1) on a held-out part of the training split, and the runs after it."""

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
from torch import nn

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.data.dataset import Dataset
from vitlab.data.subsets import stratified_split
from vitlab.errors import UserError
from vitlab.models import build_model
from vitlab.models.init import redraw_head
from vitlab.models.vit import Model
from vitlab.pipelines.estimate import Estimate
from vitlab.pipelines.init_from_checkpoint import init_from_checkpoint
from vitlab.pipelines.pretrain import Execution, Splits, evaluate_split, run, run_settings, unreadable_record
from vitlab.rng import Stream
from vitlab.train.loop import NonFiniteError, train
from vitlab.train.microbatch import StepCost, measure_step
from vitlab.train.workdir import Workdir
from vitlab.weights import load_card, load_model, save_model

Log = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """What all runs of one fine-tuning share."""

    checkpoint: str | Path
    start: str
    splits: Splits
    config: FinetuneConfig
    execution: Execution
    log: Log

    @property
    def device(self) -> torch.device:
        return torch.device(self.execution.device)

    def estimate(self) -> Estimate:
        """What the whole will take, measured by rank 0."""
        self.log("measuring how long a micro-batch takes, and how much memory")
        config, splits, world = self.config, self.splits, self.execution.world

        def measure() -> dict[str, Any]:
            model = build_model(config.model, generator=torch.Generator().manual_seed(0))
            return dataclasses.asdict(measure_step(config.single(), model, self.device, world.world_size))

        cost = StepCost(**world.broadcast_object(measure))
        search = len(config.learning_rates) > 1
        held_out = len(hold_out(splits.train, config.held_out, config.seed)[1]) if search else 0
        classes = len(splits.train.classes)
        return Estimate(config, cost, len(splits.train), len(splits.test), classes, held_out, str(self.device))

    def create(self, seed: int) -> Model:
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

    def final(self, config: TrainConfig, path: Path, label: str | None = None) -> dict[str, Any]:
        """The result of a run on all of train, tested; read from its folder if it is finished."""
        settings = run_settings("finetune", self.start, self.splits.train, config)
        with Workdir(path, settings, tensorboard=False, world=self.execution.world) as folder:
            if folder.finished:
                return folder.read_result()
        create = functools.partial(self.create, config.seed)
        return run(config, path, self.splits, create, "finetune", self.execution, self.start, label).result

    def score(self, lr: float, rest: Dataset, held_out: Dataset, path: Path) -> dict[str, Any]:
        """The figures of a learning rate: trained on the rest, evaluated on the held-out part; None if it diverged."""
        config, world = self._search_config(lr, held_out.split), self.execution.world
        settings = run_settings("finetune", self.start, rest, config) | {"held_out": self.config.held_out}
        with Workdir(path, settings, tensorboard=self.execution.tensorboard, world=world) as folder:
            if not folder.finished:
                folder.write_result({held_out.split: self._train_and_score(config, folder, rest, held_out)})
                if folder.writes:
                    shutil.rmtree(folder.checkpoints, ignore_errors=True)
            record = folder.read_result()[held_out.split]
        score = {"learning_rate": lr, "accuracy": None} | (headline(record) if record else {})
        self.log(f"learning rate {lr:g}: {format_score(score)}")
        return score

    def _train_and_score(
        self, config: TrainConfig, folder: Workdir, rest: Dataset, held_out: Dataset
    ) -> dict[str, Any] | None:
        evaluations = []  # the last one is of the weights that training returns
        execution = self.execution

        def evaluate(model: nn.Module) -> dict[str, float]:
            evaluations[:] = [evaluate_split(config, model, held_out, self.device, execution.world)]
            return {f"{held_out.split}_{name}": value for name, value in evaluations[0].figures().items()}

        options: dict[str, Any] = {"label": f"rate {config.optim.lr:g}", "microbatch": execution.microbatch}
        options |= {"dataset": rest, "evaluate": evaluate, "device": self.device, "world": execution.world}
        try:
            model = train(config, folder, self.create(config.seed), **options)
        except NonFiniteError as error:
            self.log(str(error))
            return None
        if not evaluations:
            evaluate(model)
        is_finite = math.isfinite(evaluations[0].figures()["loss"])  # else the last update broke the weights
        return evaluations[0].record() if is_finite else None

    def _search_config(self, lr: float, split: str) -> TrainConfig:
        """A run of the search: in a shortened one, warm-up and average span the same share of the steps."""
        config = self.config.single(lr)
        steps, optim, decay = config.total_steps(len(self.splits.train)), config.optim, config.average_decay
        if (short := self.config.sweep_steps) is not None:
            optim = dataclasses.replace(optim, warmup_steps=optim.warmup_steps * short // steps)
            steps, decay = short, decay and decay ** (steps / short)
        data = dataclasses.replace(config.data, eval_split=split)
        return dataclasses.replace(config, steps=steps, epochs=None, average_decay=decay, optim=optim, data=data)

    def search_and_runs(self, workdir: Path) -> dict[str, Any]:
        """Search and runs, each in its own folder; returns the content of `workdir`/result.json."""
        config, scores, records = self.config, [], []
        rates = config.learning_rates if len(config.learning_rates) > 1 else ()
        rest = held_out = self.splits.train
        if rates:
            rest, held_out = hold_out(self.splits.train, config.held_out, config.seed)
        settings = run_settings("finetune", self.start, self.splits.train, config)
        with Workdir(workdir, settings, tensorboard=False, world=self.execution.world) as folder:
            if folder.finished:
                return folder.read_result()
            folder.truncate_logs(None)  # one line per finished run, the same at every start
            for lr in rates:
                scores.append(self.score(lr, rest, held_out, workdir / "sweep" / f"lr-{lr}"))
                folder.log_metrics(len(scores), scores[-1])
            best = best_rate(scores) if scores else config.optim.lr
            for number in range(config.runs):
                single = config.single(best, config.seed + number)
                records.append(self.final(single, workdir / f"run-{number}", f"run {number}")["test"])
                metrics = {"learning_rate": best, "seed": single.seed, **headline(records[-1])}
                folder.log_metrics(len(scores) + len(records), metrics)
            if folder.writes:
                save_model(load_model(workdir / "run-0"), workdir / "model", extra=load_card(workdir / "run-0"))
            accuracies = [record["accuracy"] for record in records]
            seeds = [config.seed + number for number in range(config.runs)]
            result = {
                "learning_rate": best,
                "sweep": scores,
                "runs": [{"seed": seed, **headline(record)} for seed, record in zip(seeds, records, strict=True)],
                "accuracy_mean": statistics.fmean(accuracies),
                "accuracy_sd": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                "test": records[0],
            }
            folder.write_result(result | unreadable_record(self.splits))
            return folder.read_result()


def best_rate(scores: Sequence[Mapping[str, Any]]) -> float:
    """The learning rate with the highest accuracy; of equals that with the lowest loss, then the smallest."""
    finite = [score for score in scores if score["accuracy"] is not None]
    if not finite:
        rates = ", ".join(f"{score['learning_rate']:g}" for score in scores)
        raise NonFiniteError(f"the training diverged at every learning rate ({rates}); try smaller ones.")
    best = max(finite, key=lambda score: (score["accuracy"], -score["loss"], -score["learning_rate"]))
    return best["learning_rate"]


def hold_out(dataset: Dataset, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """The training split without `share` of each class, and that part, chosen by `seed` (App. B.1.1).

    Raises UserError where one of the two is empty.
    """
    parts = stratified_split(dataset.labels, {"held_out": share}, seed, Stream.HELD_OUT)
    rest, held_out = (dataset.take(parts[name]) for name in ("train", "held_out"))
    if not len(rest) or not len(held_out):
        raise UserError(
            f"held_out={share:g} leaves {len(rest)} images of {dataset.name} to train on and {len(held_out)} to "
            f"evaluate on (a class needs at least two); give another share, or one rate and no search "
            f"(`--learning-rates 0.01`)."
        )
    return rest, dataclasses.replace(held_out, split="held_out")


def headline(record: Mapping[str, Any]) -> dict[str, Any]:
    """The main figures of an evaluation's record."""
    return {name: record[name] for name in ("accuracy", "loss", "top5", "images") if name in record}


def format_score(score: Mapping[str, Any]) -> str:
    """The figures of a learning rate as text."""
    if score["accuracy"] is None:
        return "diverged"
    return f"{score['accuracy']:.2%} of {score['images']} held-out images right, loss {score['loss']:.4f}"
