"""Table 4 and App. B.1.1: fine-tune a checkpoint on another task, at another resolution.

`sweep_and_finetune` is the paper's protocol: a learning rate sweep on a held-out part of the training split, then one
run or several on all of it, then the test.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlab.config import FinetuneConfig
from vitlab.config.finetune import NO_SWEEP
from vitlab.data.classes import require_two_classes
from vitlab.data.loader import available_cores, num_workers
from vitlab.display import preformatted
from vitlab.errors import UserError, quoted
from vitlab.evaluation.summary import format_evaluation, headline
from vitlab.models.config import ImageSize, Interpolation, ModelConfig, ViTConfig
from vitlab.models.init import LEARNED_POSITIONS
from vitlab.pipelines.automatic import (
    MAX_HELD_OUT,
    adapt_to_epochs,
    bit_hyperrule,
    default_image_size,
    load_automatic_settings,
)
from vitlab.pipelines.budget import best_size, fit_budget, needed_budget
from vitlab.pipelines.estimate import REPORT_FRACTION, Images, JobCost, format_estimate, measure_decode
from vitlab.pipelines.init_from_checkpoint import adapt_config, fingerprint
from vitlab.pipelines.linear_stage import check_head, hold_out, hold_out_indices
from vitlab.pipelines.pretrain import Execution
from vitlab.pipelines.splits import Splits, drop_unreadable, load_splits, with_measured_range
from vitlab.pipelines.sweep import FinetuneJob, Log, format_score
from vitlab.preprocessing import Preprocessing
from vitlab.train.distributed import SINGLE, World
from vitlab.train.precision import choose_device
from vitlab.train.run_files import PAGE
from vitlab.train.workdir import check_folder, read_log
from vitlab.weights import load_metadata, load_model


@dataclass(frozen=True)
class Finetuned:
    """The result of `sweep_and_finetune`."""

    config: FinetuneConfig
    """The complete settings."""
    result: dict[str, Any]
    """The content of `result.json`: the same however often the work was interrupted."""
    workdir: Path

    def summary(self) -> str:
        """The learning rates tried, the test, the runs, unreadable files, and the paths of model and curves."""
        result, lines = self.result, []
        scores = result.get("sweep", ())
        last = max((score.get("steps", 0) for score in scores), default=0)
        for score in scores:
            steps = score.get("steps", 0)
            chosen = (score["learning_rate"], steps) == (result["learning_rate"], last)
            text = f"learning rate {score['learning_rate']:<6g} {f'after {steps} steps: ' * bool(steps)}"
            text += format_score(score)
            lines.append(text + ("  <- chosen" if chosen and result.get("chosen") != "linear" else ""))
        if linear := result.get("linear"):
            held_out = f"{format_score(linear['held_out'])}; " if linear["held_out"] else ""
            chosen = "  <- chosen" if result["chosen"] == "linear" else ""
            test = f"{linear['accuracy']:.2%} of the test images"
            test = f"test {headline(linear)}" if "mean_average_precision" in linear else test
            lines.append(f"least-squares head   {held_out}{test}{chosen}")
        lines.append(format_evaluation(result["test"]))
        if len(runs := result.get("runs", ())) > 1:
            name = "mean_average_precision" if "mean_average_precision_mean" in result else "accuracy"
            values = ", ".join(f"{record[name]:.2%}" for record in runs)
            mean = f"{name.replace('_', ' ')} over {len(runs)} runs: "
            mean += f"{result[f'{name}_mean']:.2%} +- {result[f'{name}_sd']:.2%}"
            lines.append(f"{mean} ({values}; the classes above are run-0's)")
        if unreadable := result.get("unreadable"):
            lines.append(f"{len(unreadable)} files could not be read and were skipped:")
            lines += [f"  {quoted(file['path'])}: {file['reason']}" for file in unreadable]
        report = f" · report: {self.workdir / PAGE}" if (self.workdir / PAGE).exists() else ""
        return "\n".join([*lines, f"model: {self.workdir / 'model'}{report}"])

    def _repr_html_(self) -> str:
        """In a notebook: the summary, and the curves of the first run."""
        from vitlab.inspection import figures, plots
        from vitlab.inspection.page import data_uri

        logs = [folder / "metrics.jsonl" for folder in (self.workdir / "run-0", self.workdir)]
        records = next((read_log(path) for path in logs if path.is_file()), [])
        shown = [data_uri(figures.png(plots.panels(panels)))] if (panels := plots.curves(records)) else []
        return preformatted(self.summary()) + "".join(f'<img src="{uri}">' for uri in shown)


def sweep_and_finetune(
    checkpoint: str | Path,
    config: FinetuneConfig,
    workdir: str | Path,
    *,
    image_size: ImageSize | None = None,
    interpolation: Interpolation | None = None,
    budget: float | None = None,
    started: float | None = None,
    device: str = "auto",
    tensorboard: bool = True,
    log: Log = lambda _: None,
    world: World = SINGLE,
) -> Finetuned:
    """The whole protocol (App. B.1.1): tries `config.learning_rates`, trains on all of train, tests once for each run.

    The sweep is in `workdir`/sweep/lr-RATE, the runs in `workdir`/run-0, run-1, ... The model of run-0 (not the best by
    test accuracy) is also saved to `workdir`/model. A single run without a sweep writes to `workdir` directly.
    `interpolation` of position embeddings overrides the checkpoint's own. With `config.data.on_error="skip"`
    unreadable images are skipped and listed in the result. The same call resumes what was interrupted.

    With `config.head` the least-squares head is tested first, in `workdir`/linear, and the runs start from it and are
    averaged with it, if that helps on the held-out part; `workdir`/model is the better one.
    `budget`: seconds, from `started` (by `time.monotonic()`; default: now) to the end, for which the automatic settings
    are chosen; a resumed job keeps them.
    Raises UserError for bad settings or data, and for a folder with other settings.
    """
    started = time.monotonic() if started is None else started
    workdir, torch_device = Path(workdir), choose_device(world.device(device))
    if len(rates := config.learning_rates) > 1 and config.optim.lr not in rates:
        raise UserError(
            f"optim.lr is {config.optim.lr:g}, and learning_rates {rates} are tried instead of it. To train at "
            f"optim.lr, set learning_rates=() and sweep_steps=None; to try it as well, add it to learning_rates."
        )
    # What is wrong with the checkpoint, the size or the folder is an error before any image is read.
    source = load_model(checkpoint)
    init_id = _describe_init(checkpoint, config, fingerprint(source))
    automatic = set(config.automatic) - ({"image_size"} if image_size is not None else set())
    config, saved_size = load_automatic_settings(workdir, config, budget is not None)
    image_size = saved_size if image_size is None else image_size
    config = _apply_checkpoint_settings(checkpoint, source.config, config, image_size, interpolation, torch_device.type)
    log(f"test images: {config.data.preprocessing(config.model.image_size).describe()}")
    check_folder(workdir)
    config, splits = _load_data(config, torch_device.type, automatic, log, world)
    world.check_batch_size(config.batch_size)
    job = FinetuneJob(checkpoint, init_id, splits, config, Execution(torch_device, tensorboard, world), log)
    job = _without_unreadable(_plan(job, workdir, budget, started, automatic), automatic)
    config = job.config
    if not config.tried_rates and config.runs == 1 and config.head is None:
        return Finetuned(config, job.train_and_test(config.single(), workdir), workdir)

    def make_report() -> bool:
        from vitlab.pipelines.inspect import report

        made = config.head is not None
        note = report(workdir, device=device, kind=job.execution.report).get("note") if made else None
        if note is not None:
            log(note)
        return config.head is not None and note is None

    return Finetuned(config, job.sweep_and_runs(workdir, make_report), workdir)


def _load_data(
    config: FinetuneConfig, device_type: str, automatic: Collection[str], log: Log, world: World
) -> tuple[FinetuneConfig, Splits]:
    """The splits, and `config` with all that they decide."""
    log(f"reading the data set {config.data.name}")
    config = dataclasses.replace(config, data=with_measured_range(config.data, world))
    if config.data.levels is not None:
        log("black and white: the values {} and {} of an image file".format(*config.data.levels))
    splits = load_splits(config.data, world, config.loss == "sigmoid")
    require_two_classes(splits.train)
    model = dataclasses.replace(config.model, num_classes=len(splits.train.classes))
    if "loss" in config.automatic and splits.train.multi_label:
        config = dataclasses.replace(config, loss="sigmoid")
    config = bit_hyperrule(dataclasses.replace(config, model=model), len(splits.train), device_type)
    if config.sweep_steps is not None:
        log(f"Deviation: the sweep takes {config.sweep_steps} steps per rate; the paper's takes as many as the run")
    check_head(config)
    return _check_held_out(config, splits, automatic, log), splits


def _check_held_out(config: FinetuneConfig, splits: Splits, automatic: Collection[str], log: Log) -> FinetuneConfig:
    """`config`, or the least-squares head alone where this is `automatic` and there are too few images to hold some
    out; else raises UserError for that. Where the user's own val is held out, `held_out` is its fraction."""
    if not config.tried_rates:
        return config
    if (val := splits.train.from_val) is not None and 0 < val.mean() < 1:
        if config.head and "held_out" not in automatic:
            raise UserError(
                f"held_out={config.held_out:g} has no effect on {config.data.name}, whose own val split choices are "
                f"made on; leave it out, or leave val out with --data.train-split train."
            )
        held_out = min(val.mean(), MAX_HELD_OUT / len(val)) if config.head else val.mean()
        if held_out != config.held_out:
            log(f"choices are made on {round(held_out * len(val)):,} of the {val.sum():,} images of val, not of train")
        config = dataclasses.replace(config, held_out=float(held_out))
    if config.head is None or "runs" not in automatic:
        hold_out(splits.train, config.held_out, config.seed)
    elif not all(map(len, hold_out_indices(splits.train, config.held_out, config.seed))):
        count, fraction = len(splits.train), config.held_out
        log(f"{count} images are too few to hold {fraction:.0%} of a class out: only the head is fitted")
        return dataclasses.replace(config, runs=0, **NO_SWEEP)
    return config


def _plan(
    job: FinetuneJob, workdir: Path, budget: float | None, started: float, automatic: Collection[str]
) -> FinetuneJob:
    """The job with what of its settings is `automatic` for the `budget`, if there is one and no plan in `workdir`, and
    with the measured micro-batch. Logs what the job will take, unless it is finished."""
    world, device, splits, wanted = job.execution.world, job.execution.device, job.splits, job.config
    planned_before = world.broadcast_object(lambda: (workdir / "config.json").exists())
    images = Images(len(splits.train), len(splits.test))
    costs: dict[Any, JobCost] = {}
    limit = math.inf if budget is None else REPORT_FRACTION * budget

    def elapsed() -> float:
        return world.broadcast_object(lambda: time.monotonic() - started)

    def measure(config: FinetuneConfig, train: bool) -> JobCost:
        size = config.model.image_size
        if (size, True) in costs or (size, train) in costs:
            return costs.get((size, True)) or costs[size, train]
        if not costs:
            job.log("measuring the speed")
        step = dataclasses.replace(job, config=config).measure_step(train)
        decode, cores = world.broadcast_object(lambda: (measure_decode(config, splits.train), available_cores()))
        workers = 0 if device.type == "cpu" else num_workers(config.data.workers, device)
        costs[size, train] = JobCost(step, decode, world.world_size, workers, cores, limit)
        return costs[size, train]

    if budget is not None and planned_before:
        plan = f"{job.config.steps} steps" if job.config.runs else "the least-squares head alone"
        job.log(
            f"resuming the plan in {workdir / 'config.json'}, {plan} at "
            f"{'x'.join(map(str, job.config.model.image_hw))} px; for another --budget give another --workdir"
        )
    elif budget is not None:
        config = fit_budget(job.config, images, measure, budget, automatic, elapsed, job.head_loss)
        for line in _left_out(config, wanted, images, measure(config, False), budget, automatic):
            job.log(line)
        if config.data.part != job.config.data.part:
            splits = load_splits(config.data, world, config.loss == "sigmoid")
            images = Images(len(splits.train), len(splits.test))
        job = dataclasses.replace(job, config=config, splits=splits)
    elif not planned_before:
        config = adapt_to_epochs(job.config, images.train, automatic)
        if config.head and "image_size" in automatic:
            config = best_size(config, images, measure, job.head_loss)
        job = dataclasses.replace(job, config=config)
    if world.broadcast_object(lambda: (workdir / "result.json").exists()):
        return job
    cost = measure(job.config, budget is None)
    text = format_estimate(job.config, cost, images, str(job.execution.device))
    resumed = " in all (what is finished is not repeated)" if planned_before else ""
    job.log(f"what this will take{resumed}:\n{text}")
    if budget is not None and not planned_before and elapsed() + sum(cost.seconds(job.config, images)) > budget:
        job.log("this takes longer than --budget; Ctrl-C stops it")
    execution = dataclasses.replace(job.execution, microbatch=cost.step.microbatch, report=cost.report(images))
    return dataclasses.replace(job, execution=execution)


def _left_out(
    config: FinetuneConfig,
    wanted: FinetuneConfig,
    images: Images,
    cost: JobCost,
    budget: float,
    automatic: Collection[str],
) -> Iterator[str]:
    """What of the `wanted` job the `budget` leaves out of the planned `config`, and the budget that includes it."""

    def with_budget(holds: Callable[[FinetuneConfig, JobCost], bool]) -> str:
        minutes = needed_budget(wanted, images, cost, config, budget, automatic, holds)
        return "" if minutes is None else f"; --budget {minutes}m includes it"

    if config.data.part != wanted.data.part:
        count = f"{1 - (config.data.part or 1) / (wanted.data.part or 1):.0%} of the {images.train:,} training images"
        yield f"left out: {count}" + with_budget(lambda plan, _: plan.data.part == wanted.data.part)
    if not config.runs and wanted.runs:
        yield "left out: fine-tuning after the least-squares head" + with_budget(lambda plan, _: plan.runs > 0)
    if (kind := cost.report(images)) != "whole":
        parts = "the report" if kind == "none" else "near-duplicates and files of the figures, in the report"
        yield f"left out: {parts}" + with_budget(lambda _, cost: cost.report(images) == "whole")


def _without_unreadable(job: FinetuneJob, automatic: Collection[str]) -> FinetuneJob:
    """The job without the images that cannot be read, where these are skipped."""
    if job.config.data.on_error != "skip":
        return job
    splits = drop_unreadable(job.splits, job.execution.world)
    if splits.unreadable:
        first = splits.unreadable[0]
        job.log(
            f"{len(splits.unreadable)} images cannot be read and are skipped, the first {quoted(first['path'])} "
            f"({first['reason']}); result.json and the report list them"
        )
    config = _check_held_out(job.config, splits, automatic, job.log)
    return dataclasses.replace(job, splits=splits, config=config)


def default_workdir(dataset: str) -> Path:
    """`runs/finetune-NAME`, of a data set, a folder or a table."""
    name = Path(dataset.partition(":")[2] or dataset).absolute().name
    return Path("runs") / f"finetune-{name.removesuffix('.csv')}"


def _describe_init(checkpoint: str | Path, config: FinetuneConfig, weights: str) -> str:
    """The id of the initial weights in the settings of a run."""
    init_id = f"{Path(checkpoint).name} {'from scratch' if config.from_scratch else weights}"
    init_id += ", fresh positions" if config.fresh_positions else ""
    init_id += ", pre_logits kept" if config.pre_logits else ""
    return init_id + ("" if config.head_std is None else f", head of sd {config.head_std:g}")


def _apply_checkpoint_settings(
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
    if config.fresh_positions and getattr(source, "position", None) not in LEARNED_POSITIONS:
        raise UserError("fresh_positions draws learned position embeddings, and the checkpoint has none; leave it out.")
    if config.pre_logits and not getattr(source, "representation_size", None):
        raise UserError("pre_logits='keep' keeps the layer before the head, and the checkpoint has none; leave it out.")
    if interpolation is not None:
        if not isinstance(source, ViTConfig):
            raise UserError(f"interpolation={interpolation!r} is of position embeddings, which a ResNet has not.")
        source = dataclasses.replace(source, position_interpolation=interpolation)
    preprocessing = Preprocessing.read(load_metadata(checkpoint), str(checkpoint), source.image_size)
    if "image_size" in config.automatic and image_size is None:
        image_size = default_image_size(source, preprocessing, device_type)
    config = adapt_config(source, config, num_classes=2, image_size=image_size)  # classes: set from the data set later
    if "preprocessing" in config.automatic:
        scaled = preprocessing.at(config.model.image_size)
        data = dataclasses.replace(
            config.data,
            eval_resize=scaled.resize if scaled.keep_aspect else None,
            eval_interpolation=None if scaled.is_google else scaled.interpolation,
        )
        config = dataclasses.replace(config, data=data)
    config.data.preprocessing(config.model.image_size)  # raises for an invalid size
    return config
