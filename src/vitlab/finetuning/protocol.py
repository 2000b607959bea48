"""Table 4 and App. B.1.1: fine-tune a checkpoint on another task, at another resolution.

`sweep_and_finetune` is the paper's protocol: a learning rate sweep on a held-out part of the training split, then one
run or several on all of it, then the test.
"""

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from vitlab.config import FinetuneConfig
from vitlab.config.finetune import NO_SWEEP
from vitlab.data.classes import require_two_classes
from vitlab.data.loader import available_cores, num_workers
from vitlab.errors import UserError, quoted
from vitlab.finetuning.estimate import REPORT_FRACTION, Images, JobCost, format_estimate, measure_decode
from vitlab.finetuning.head import check_head, hold_out, hold_out_indices
from vitlab.finetuning.job import FinetuneJob, Log
from vitlab.finetuning.plan import best_size, fit_budget, needed_budget
from vitlab.finetuning.result import Finetuned
from vitlab.models.config import ImageSize
from vitlab.models.variant import Interpolation
from vitlab.preprocessing import Preprocessing
from vitlab.recipes.resolve import RECIPE, Facts, Reason, Resolved, keep_choices, resolve
from vitlab.recipes.rules import MAX_HELD_OUT, adapt_to_epochs
from vitlab.runs.init_from_checkpoint import fingerprint
from vitlab.runs.run import RunContext
from vitlab.runs.splits import Splits, drop_unreadable, load_splits, with_measured_range
from vitlab.train.distributed import SINGLE, World
from vitlab.train.precision import choose_device
from vitlab.train.workdir import check_folder
from vitlab.weights import load_metadata, load_model


def sweep_and_finetune(
    checkpoint: str | Path,
    config: FinetuneConfig,
    workdir: str | Path,
    *,
    open_settings: Collection[str] = (),
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
    open_settings: what `resolve` chooses by checkpoint, images and device, or the plan of a `budget`: seconds from
    `started` (by `time.monotonic()`; default: now) to the end. config.json says why each has its value; an interrupted
    job keeps them. Raises UserError for bad settings or data, and for a folder with other settings.
    """
    started = time.monotonic() if started is None else started
    workdir = Path(workdir)
    open_settings = frozenset(open_settings) - ({"model.image_size"} if image_size is not None else set())
    # What is wrong with the checkpoint, the size or the folder is an error before any image is read.
    source = load_model(checkpoint)
    preprocessing = Preprocessing.read(load_metadata(checkpoint), str(checkpoint), source.config.image_size)
    context = RunContext(choose_device(world.device(device)), tensorboard, world)
    facts = Facts(context.device.type, source.config, preprocessing, image_size, interpolation)
    init_id = _describe_init(checkpoint, config, fingerprint(source))
    resolved, splits = _resolve(config, facts, workdir, open_settings, budget is not None, log, world)
    job = FinetuneJob(checkpoint, init_id, splits, resolved.config, context, log, reasons=resolved.reasons)
    job = _check_held_out(job, open_settings)
    job = _without_unreadable(_plan(job, workdir, budget, started, open_settings), open_settings)
    config = job.config
    for why, settings in itertools.groupby(job.reasons, lambda reason: reason.why):
        if why == RECIPE:
            continue
        log(f"by {why}: {', '.join(f'{name} {value}' for name, value, _ in settings)}")
    if not config.tried_rates and config.runs == 1 and config.head is None:
        return Finetuned(
            config, job.train_and_test(config.single(), workdir, settings={"reasons": job.reasons}), workdir
        )

    def make_report() -> bool:
        if config.head is None:
            return False
        from vitlab.inspection.write_pages import report

        if (note := report(workdir, device=device, kind=job.report).get("note")) is not None:
            log(note)
        return note is None

    return Finetuned(config, job.sweep_and_runs(workdir, make_report), workdir)


def _resolve(
    config: FinetuneConfig,
    facts: Facts,
    workdir: Path,
    open_settings: Collection[str],
    budget: bool,
    log: Log,
    world: World,
) -> tuple[Resolved[FinetuneConfig], Splits]:
    """The settings of the job, which an interrupted one keeps, and its images. `facts` are the checkpoint's."""
    if len(rates := config.learning_rates) > 1 and config.optim.lr not in rates:
        raise UserError(
            f"optim.lr is {config.optim.lr:g}, and learning_rates {rates} are tried instead of it. To train at "
            f"optim.lr, set learning_rates=() and sweep_steps=None; to try it as well, add it to learning_rates."
        )
    saved = world.broadcast_object(lambda: load_reasons(workdir))

    def decide(config: FinetuneConfig, facts: Facts) -> Resolved[FinetuneConfig]:
        return keep_choices(resolve(config, open_settings=open_settings, facts=facts), saved, budget)

    known = decide(config, facts).config
    log(f"test images: {known.data.preprocessing(known.model.image_size).describe()}")
    check_folder(workdir)
    data = with_measured_range(known.data, world)
    splits = _load_splits(dataclasses.replace(known, data=data), log, world)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, range=data.range))
    train = splits.train
    seen: dict[str, Any] = {"examples": len(train), "num_classes": len(train.classes)}
    resolved = decide(config, dataclasses.replace(facts, **seen, multi_label=train.multi_label))
    if (steps := resolved.config.sweep_steps) is not None:
        log(f"Deviation: the sweep takes {steps} steps per rate; the paper's takes as many as the run")
    check_head(resolved.config)
    world.check_batch_size(resolved.config.batch_size)
    return resolved, splits


def load_reasons(workdir: Path) -> tuple[Reason, ...]:
    """What a job in this folder has decided; empty for a new folder and for anything else."""
    try:
        saved = json.loads((workdir / "config.json").read_bytes())["reasons"]
        reasons = [Reason(str(name), value, str(why)) for name, value, why in saved]
    except (OSError, ValueError, TypeError, KeyError):
        return ()  # opening the folder reports what is wrong with it
    return tuple(
        reason._replace(value=tuple(reason.value)) if isinstance(reason.value, list) else reason for reason in reasons
    )


def _load_splits(config: FinetuneConfig, log: Log, world: World) -> Splits:
    log(f"reading the data set {config.data.name}")
    if config.data.levels is not None:
        log("black and white: the values {} and {} of an image file".format(*config.data.levels))
    splits = load_splits(config.data, world, config.loss == "sigmoid")
    require_two_classes(splits.train)
    return splits


def _check_held_out(job: FinetuneJob, open_settings: Collection[str]) -> FinetuneJob:
    """The job with the fraction of the user's own val as `held_out`, if there is one. With too few images to hold some
    out it is the least-squares head alone where `runs` is open; otherwise UserError is raised."""
    config, train = job.config, job.splits.train
    if not config.tried_rates:
        return job
    if (val := train.from_val) is not None and 0 < val.mean() < 1:
        if config.head and "held_out" not in open_settings:
            raise UserError(
                f"held_out={config.held_out:g} has no effect on {config.data.name}, whose own val split choices are "
                f"made on; leave it out, or leave val out with --data.train-split train."
            )
        held_out = min(val.mean(), MAX_HELD_OUT / len(val)) if config.head else val.mean()
        if held_out != config.held_out:
            job.log(
                f"choices are made on {round(held_out * len(val)):,} of the {val.sum():,} images of val, not of train"
            )
        job = job.decide("the user's val split", dataclasses.replace(config, held_out=float(held_out)))
    config = job.config
    if config.head is None or "runs" not in open_settings:
        hold_out(train, config.held_out, config.seed)
    elif not all(map(len, hold_out_indices(train, config.held_out, config.seed))):
        job.log(
            f"{len(train)} images are too few to hold {config.held_out:.0%} of a class out: only the head is fitted"
        )
        job = job.decide("the few training images", dataclasses.replace(config, runs=0, **NO_SWEEP))
    return job


def _plan(
    job: FinetuneJob, workdir: Path, budget: float | None, started: float, open_settings: Collection[str]
) -> FinetuneJob:
    """The job with the `open_settings` that a plan chooses, for the `budget` if there is one and no plan in `workdir`,
    and with the measured micro-batch. Logs what the job will take, unless it is finished."""
    world, device, splits, wanted = job.context.world, job.context.device, job.splits, job.config
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
        config = fit_budget(job.config, images, measure, budget, open_settings, elapsed, job.head_loss)
        for line in _left_out(config, wanted, images, measure(config, False), budget, open_settings):
            job.log(line)
        if config.data.subset_fraction != job.config.data.subset_fraction:
            splits = load_splits(config.data, world, config.loss == "sigmoid")
            images = Images(len(splits.train), len(splits.test))
        job = dataclasses.replace(job.decide("the time budget", config), splits=splits)
    elif not planned_before:
        job = job.decide("the number of epochs", adapt_to_epochs(job.config, images.train, open_settings))
        if job.config.head and "model.image_size" in open_settings:
            job = job.decide("leave-one-out losses", best_size(job.config, images, measure, job.head_loss))
    if world.broadcast_object(lambda: (workdir / "result.json").exists()):
        return job
    cost = measure(job.config, budget is None)
    text = format_estimate(job.config, cost, images, str(job.context.device))
    resumed = " in all (what is finished is not repeated)" if planned_before else ""
    job.log(f"what this will take{resumed}:\n{text}")
    if budget is not None and not planned_before and elapsed() + sum(cost.seconds(job.config, images)) > budget:
        job.log("this takes longer than --budget; Ctrl-C stops it")
    context = dataclasses.replace(job.context, microbatch=cost.step.microbatch)
    return dataclasses.replace(job, context=context, report=cost.report(images))


def _left_out(
    config: FinetuneConfig,
    wanted: FinetuneConfig,
    images: Images,
    cost: JobCost,
    budget: float,
    open_settings: Collection[str],
) -> Iterator[str]:
    """What of the `wanted` job the `budget` leaves out of the planned `config`, and the budget that includes it."""

    def with_budget(holds: Callable[[FinetuneConfig, JobCost], bool]) -> str:
        minutes = needed_budget(wanted, images, cost, config, budget, open_settings, holds)
        return "" if minutes is None else f"; --budget {minutes}m includes it"

    if config.data.subset_fraction != wanted.data.subset_fraction:
        dropped = 1 - (config.data.subset_fraction or 1) / (wanted.data.subset_fraction or 1)
        text = f"left out: {dropped:.0%} of the {images.train:,} training images"
        yield text + with_budget(lambda plan, _: plan.data.subset_fraction == wanted.data.subset_fraction)
    if not config.runs and wanted.runs:
        yield "left out: fine-tuning after the least-squares head" + with_budget(lambda plan, _: plan.runs > 0)
    if (kind := cost.report(images)) != "whole":
        parts = "the report" if kind == "none" else "near-duplicates and files of the figures, in the report"
        yield f"left out: {parts}" + with_budget(lambda _, cost: cost.report(images) == "whole")


def _without_unreadable(job: FinetuneJob, open_settings: Collection[str]) -> FinetuneJob:
    """The job without the images that cannot be read, where these are skipped."""
    if job.config.data.on_error != "skip":
        return job
    splits = drop_unreadable(job.splits, job.context.world)
    if splits.unreadable:
        first = splits.unreadable[0]
        job.log(
            f"{len(splits.unreadable)} images cannot be read and are skipped, the first {quoted(first['path'])} "
            f"({first['reason']}); result.json and the report list them"
        )
    return _check_held_out(dataclasses.replace(job, splits=splits), open_settings)


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
