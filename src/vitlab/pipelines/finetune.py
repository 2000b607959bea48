"""Table 4 and App. B.1.1: fine-tune a checkpoint on another task, at another resolution.

`finetune` is one run. `sweep_and_finetune` is the paper's protocol: a search for the learning rate on a held-out part
of the training split, then one run or several on all of it, then the test.
"""

import dataclasses
import math
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.data.dataset import Dataset
from vitlab.errors import UserError, quoted
from vitlab.evaluate.accuracy import format_evaluation
from vitlab.evaluate.load import choose_device
from vitlab.models import build_model
from vitlab.models.config import ImageSize, Interpolation, ModelConfig, ViTConfig
from vitlab.models.init import redraw_head
from vitlab.models.vit import Model
from vitlab.pipelines.automatic import bit_hyperrule, default_image_size, saved_choices, with_preprocessing
from vitlab.pipelines.estimate import Estimate
from vitlab.pipelines.init_from_checkpoint import adapt_config, check_positions, fingerprint, init_from_checkpoint
from vitlab.pipelines.pretrain import (
    OnSettings,
    Outcome,
    Splits,
    drop_unreadable,
    evaluate_split,
    fit_classes,
    load_splits,
    run,
    run_settings,
    unreadable_record,
)
from vitlab.pipelines.sweep import best_rate, check_search, format_score, headline, hold_out
from vitlab.preprocessing import Preprocessing
from vitlab.train.distributed import SINGLE, World
from vitlab.train.loop import NonFiniteError, train
from vitlab.train.microbatch import StepCost, measure_step
from vitlab.train.workdir import Workdir, check_folder
from vitlab.weights import load_card, load_model, save_model

Log = Callable[[str], None]


@dataclass(frozen=True)
class Finetuned:
    """The result of `sweep_and_finetune`."""

    config: FinetuneConfig
    """The complete settings."""
    result: dict[str, Any]
    """The content of `result.json`: the same however often the work was interrupted."""

    def summary(self, workdir: Path) -> str:
        """The learning rates tried, the test, the runs, unreadable files, and the paths of model and curves."""
        result, lines = self.result, []
        for score in result.get("sweep", ()):
            chosen = "  <- chosen" if score["learning_rate"] == result["learning_rate"] else ""
            lines.append(f"learning rate {score['learning_rate']:<6g} {format_score(score)}{chosen}")
        lines.append(format_evaluation(result["test"]))
        if len(runs := result.get("runs", ())) > 1:
            accuracies = ", ".join(f"{record['accuracy']:.2%}" for record in runs)
            mean = f"{result['accuracy_mean']:.2%} +- {result['accuracy_sd']:.2%}"
            lines.append(f"accuracy over {len(runs)} runs: {mean} ({accuracies}; the classes above are run-0's)")
        if unreadable := result.get("unreadable"):
            lines.append(f"{len(unreadable)} files could not be read and were left out:")
            lines += [f"  {quoted(file['path'])}: {file['reason']}" for file in unreadable]
        return "\n".join([*lines, f"model: {workdir / 'model'} · curves: {workdir / 'metrics.jsonl'}"])


def finetune(
    checkpoint: str | Path,
    config: TrainConfig,
    workdir: str | Path,
    *,
    image_size: ImageSize | None = None,
    device: str = "auto",
    tensorboard: bool = True,
    on_settings: OnSettings | None = None,
    world: World = SINGLE,
) -> Outcome:
    """One run: fine-tunes `checkpoint` with the learning rate `config.optim.lr`, then tests it (Sec. 3.2, App. B.1.1).

    The model is the checkpoint's with a new zero head for the data set's classes, and position embeddings
    interpolated to `image_size` (default: the recipe's); a pre-logits layer is dropped, as in the paper.
    The same call on the same folder continues an interrupted run. `on_settings` receives the complete settings.
    """
    if isinstance(config, FinetuneConfig):
        single = ("runs", "from_scratch", "fresh_positions", "head_std", "automatic")
        if len(config.learning_rates) > 1 or any(
            getattr(config, name) != getattr(FinetuneConfig, name) for name in single
        ):
            raise UserError(f"a search, and {', '.join(single)}, are for sweep_and_finetune.")
        config = config.single()
    source = load_model(checkpoint)
    start = f"{Path(checkpoint).name} {fingerprint(source)}"
    splits = load_splits(config.data, world)
    complete = adapt_config(source.config, config, len(splits.train.classes), image_size)
    if on_settings:
        on_settings(complete)
    return run(
        complete, workdir, splits, lambda: init_from_checkpoint(checkpoint, complete.model), command="finetune",
        start=start, device=device, tensorboard=tensorboard, world=world,
    )  # fmt: skip


def sweep_and_finetune(
    checkpoint: str | Path,
    config: FinetuneConfig,
    workdir: str | Path,
    *,
    image_size: ImageSize | None = None,
    interpolation: Interpolation | None = None,
    device: str = "auto",
    tensorboard: bool = True,
    on_settings: OnSettings | None = None,
    log: Log = lambda _: None,
    world: World = SINGLE,
) -> Finetuned:
    """The whole protocol (App. B.1.1): tries `config.learning_rates`, trains on all of train, tests once for each run.

    The search is in `workdir`/sweep/lr-RATE, the runs in `workdir`/run-0, run-1, ...; the model of run-0, not chosen by
    its test, also in `workdir`/model. A single run without a search has `workdir` itself as its folder.
    `interpolation` of position embeddings overrides the checkpoint's own. With `config.data.on_error="skip"`
    unreadable images are left out and listed in the result. The same call continues what was interrupted.
    Raises UserError for bad settings or data, and for a folder with other settings.
    """
    workdir = Path(workdir)
    torch_device = choose_device(world.device(device))
    check_search(config)
    # What is wrong with the checkpoint, the size or the folder is an error before any image is read.
    log(f"reading the checkpoint {checkpoint}")
    source = load_model(checkpoint)
    start = _describe_start(checkpoint, config, fingerprint(source))
    config = _settings_before_data(
        checkpoint, source.config, saved_choices(workdir, config), image_size, interpolation, torch_device.type
    )
    log(f"test images: {config.data.preprocessing(config.model.image_size).describe()}")
    check_folder(workdir)
    log(f"reading the data set {config.data.name}")
    splits = load_splits(config.data, world)
    if config.data.on_error == "skip":
        splits = drop_unreadable(splits, world)
        if splits.unreadable:
            log(f"{len(splits.unreadable)} images cannot be read and are left out; they are listed at the end")
    shortened = config.sweep_steps
    config = bit_hyperrule(fit_classes(config, splits.train), len(splits.train), torch_device.type)
    world.check_batch_size(config.batch_size)
    if on_settings:
        on_settings(config)
    log(f"settings: {workdir / 'config.json'}")
    if shortened is not None:
        run_steps = config.total_steps(len(splits.train))
        log(f"Deviation: the search takes {shortened} steps per rate; the paper's takes the run's own {run_steps}")
    task = _Task(checkpoint, start, splits, config, torch_device, tensorboard, log, world)
    if world.broadcast_object(lambda: not (workdir / "result.json").exists()):
        estimate = task.estimate()
        resumed = " in all (what is finished is not repeated)" if (workdir / "config.json").exists() else ""
        log(f"what this will take{resumed}:\n{estimate.describe()}")
        task = dataclasses.replace(task, microbatch=estimate.cost.microbatch)
    if len(config.learning_rates) < 2 and config.runs == 1:
        return Finetuned(config, task.final(config.single(), workdir))
    return Finetuned(config, task.search_and_runs(workdir))


def _describe_start(checkpoint: str | Path, config: FinetuneConfig, weights: str) -> str:
    """What identifies the initial weights in the settings of a run."""
    start = f"{Path(checkpoint).name} {'from scratch' if config.from_scratch else weights}"
    start += ", fresh positions" if config.fresh_positions else ""
    return start + ("" if config.head_std is None else f", head of sd {config.head_std:g}")


def _settings_before_data(
    checkpoint: str | Path,
    source: ModelConfig,
    config: FinetuneConfig,
    image_size: ImageSize | None,
    interpolation: Interpolation | None,
    device_type: str,
) -> FinetuneConfig:
    """`config` with all that the checkpoint decides; the number of classes is the data set's."""
    if len(config.learning_rates) == 1:
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=config.learning_rates[0]))
    if interpolation is not None and isinstance(source, ViTConfig):
        source = dataclasses.replace(source, position_interpolation=interpolation)
    preprocessing = Preprocessing.read(load_card(checkpoint), str(checkpoint), source.image_size)
    if "image_size" in config.automatic and image_size is None:
        image_size = default_image_size(source, preprocessing, device_type)
    config = adapt_config(source, config, 2, image_size)
    if "preprocessing" in config.automatic:
        data = with_preprocessing(config.data, preprocessing.at(config.model.image_size))
        config = dataclasses.replace(config, data=data)
    config.data.preprocessing(config.model.image_size)  # a wrong size
    if config.fresh_positions:
        check_positions(config.model)
    return config


@dataclass(frozen=True)
class _Task:
    """What all runs of one fine-tuning share."""

    checkpoint: str | Path
    start: str
    splits: Splits
    config: FinetuneConfig
    device: torch.device
    tensorboard: bool
    log: Log
    world: World
    microbatch: int | None = None

    def estimate(self) -> Estimate:
        """What the whole will take, measured by rank 0."""
        self.log("measuring how long a micro-batch takes, and how much memory")
        config, splits = self.config, self.splits

        def measure() -> dict[str, Any]:
            model = build_model(config.model, generator=torch.Generator().manual_seed(0))
            return dataclasses.asdict(measure_step(config.single(), model, self.device, self.world.world_size))

        cost = StepCost(**self.world.broadcast_object(measure))
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
        with Workdir(path, settings, tensorboard=False, world=self.world) as folder:
            if folder.finished:
                return folder.read_result()
        return run(
            config, path, self.splits, lambda: self.create(config.seed), command="finetune", start=self.start,
            label=label, device=str(self.device), tensorboard=self.tensorboard, microbatch=self.microbatch,
            world=self.world,
        ).result  # fmt: skip

    def score(self, lr: float, rest: Dataset, held_out: Dataset, path: Path) -> dict[str, Any]:
        """The figures of a learning rate: trained on the rest, evaluated on the held-out part; None if it diverged."""
        config = self._search_config(lr, held_out.split)
        settings = run_settings("finetune", self.start, rest, config) | {"held_out": self.config.held_out}
        evaluations = []  # the last one is of the weights that training returns

        def evaluate(model: nn.Module) -> dict[str, float]:
            evaluations[:] = [evaluate_split(config, model, held_out, self.device, self.world)]
            return {f"{held_out.split}_{name}": value for name, value in evaluations[0].figures().items()}

        with Workdir(path, settings, tensorboard=self.tensorboard, world=self.world) as folder:
            if not folder.finished:
                record = None
                try:
                    model = train(
                        config, folder, self.create(config.seed), dataset=rest, evaluate=evaluate, device=self.device,
                        label=f"rate {lr:g}", microbatch=self.microbatch, world=self.world,
                    )  # fmt: skip
                    if not evaluations:
                        evaluate(model)
                    if math.isfinite(evaluations[0].figures()["loss"]):  # else the last update broke the weights
                        record = evaluations[0].record()
                except NonFiniteError as error:
                    self.log(str(error))
                folder.write_result({held_out.split: record})
                if folder.writes:
                    shutil.rmtree(folder.checkpoints, ignore_errors=True)
            record = folder.read_result()[held_out.split]
        score = {"learning_rate": lr, "accuracy": None} | (headline(record) if record else {})
        self.log(f"learning rate {lr:g}: {format_score(score)}")
        return score

    def _search_config(self, lr: float, split: str) -> TrainConfig:
        """A run of the search: in a shortened one, warm-up and average span the same share of the steps."""
        config = self.config.single(lr)
        steps, warmup, decay = (
            config.total_steps(len(self.splits.train)),
            config.optim.warmup_steps,
            config.average_decay,
        )
        if (short := self.config.sweep_steps) is not None:
            steps, warmup, decay = short, warmup * short // steps, decay and decay ** (steps / short)
        return dataclasses.replace(
            config, steps=steps, epochs=None, average_decay=decay,
            optim=dataclasses.replace(config.optim, warmup_steps=warmup),
            data=dataclasses.replace(config.data, eval_split=split),
        )  # fmt: skip

    def search_and_runs(self, workdir: Path) -> dict[str, Any]:
        """Search and runs, each in its own folder; returns the content of `workdir`/result.json."""
        config, scores, records = self.config, [], []
        rates = config.learning_rates if len(config.learning_rates) > 1 else ()
        rest = held_out = self.splits.train
        if rates:
            rest, held_out = hold_out(self.splits.train, config.held_out, config.seed)
        settings = run_settings("finetune", self.start, self.splits.train, config)
        with Workdir(workdir, settings, tensorboard=False, world=self.world) as folder:
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
            folder.write_result({
                "learning_rate": best,
                "sweep": scores,
                "runs": [{"seed": config.seed + number, **headline(record)} for number, record in enumerate(records)],
                "accuracy_mean": statistics.fmean(accuracies),
                "accuracy_sd": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                "test": records[0],
                **unreadable_record(self.splits),
            })  # fmt: skip
            return folder.read_result()
