"""Table 4 and App. B.1.1: fine-tune a checkpoint on another task, at another resolution.

`sweep_and_finetune` is the paper's protocol: a learning rate sweep on a held-out split of the training images, then one
run or several on all of it, then the test. Here the job is prepared: settings, images, plan; `run_job.py` does the
work.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from vitlab.config import DataConfig, FinetuneConfig
from vitlab.config.finetune import NO_SWEEP
from vitlab.data.classes import require_two_classes
from vitlab.errors import UserError, quoted
from vitlab.finetuning.budget import Measure, best_size, fit_budget
from vitlab.finetuning.choose_readout import saved_choice, with_chosen_readout
from vitlab.finetuning.head import check_head, head_loss
from vitlab.finetuning.held_out import hold_out, hold_out_indices
from vitlab.finetuning.job import FinetuneJob, JobClock
from vitlab.finetuning.plan import SHORT_REPORTS, Task, left_out
from vitlab.finetuning.result import Finetuned
from vitlab.finetuning.run_job import run_stages, train_and_test
from vitlab.finetuning.stages import Images, Plan
from vitlab.finetuning.sweep import RunStart
from vitlab.models.config import ImageSize, Pool
from vitlab.models.variant import Interpolation
from vitlab.preprocessing import Preprocessing
from vitlab.recipes.finetune import LAYER
from vitlab.recipes.resolve import RECIPE, Facts, Resolved, keep_choices, resolve
from vitlab.recipes.rules import MAX_HELD_OUT, adapt_to_epochs
from vitlab.runs.cost import ImageCost, measure_cost
from vitlab.runs.init_from_checkpoint import fingerprint
from vitlab.runs.run import RunContext, load_reasons
from vitlab.runs.splits import Splits, drop_unreadable, load_splits, with_measured_range
from vitlab.train.clock import PLANNED_FRACTION, Clock
from vitlab.train.distributed import SINGLE, World
from vitlab.train.objectives import check_balance
from vitlab.train.precision import choose_device
from vitlab.train.workdir import check_folder
from vitlab.weights import load_metadata, load_model

SUGGEST_FROM = 120.0
"""From so many planned seconds on, a `--budget` is suggested."""
Log = Callable[[str], None]


def sweep_and_finetune(
    checkpoint: str | Path,
    config: FinetuneConfig,
    workdir: str | Path,
    *,
    open_settings: Collection[str] = (),
    image_size: ImageSize | None = None,
    layer: int | None = None,
    pool: Pool | None = None,
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
    test accuracy) is also saved to `workdir`/model. A single run without a sweep writes to `workdir` directly. With
    `config.head` the runs start from the least-squares head and are averaged with it, if that helps on the held-out
    part; `workdir`/model is the better one. The head is also tested by itself, in `workdir`/linear.

    budget: seconds from `started` (by `time.monotonic()`; default: now) to the end. open_settings: what `resolve`
    chooses by checkpoint, images and device, or the plan of a budget; config.json says why each has its value.
    layer: number of blocks to keep, in place of all, or of the choice by leave-one-out losses. pool: what represents an
    image, in place of the checkpoint's own or of that choice. interpolation: of position embeddings, in place of the
    checkpoint's own. With `config.data.on_error="skip"` unreadable images are skipped and listed in the result. The
    same call resumes an interrupted job, which keeps its settings. Raises UserError for bad settings or data, and for a
    folder with other settings.
    """
    workdir = Path(workdir)
    open_settings = frozenset(open_settings) - ({"model.image_size"} if image_size is not None else set())
    if layer is not None:  # block and pooling are the user's, or the checkpoint's own
        open_settings -= set(LAYER)
    elif pool is not None:
        open_settings -= {"model.pool"}
    # What is wrong with the checkpoint, the size or the folder is an error before any image is read.
    source = load_model(checkpoint)
    preprocessing = Preprocessing.read(load_metadata(checkpoint), str(checkpoint), source.config.image_size)
    context = RunContext(choose_device(world.device(device)), tensorboard, world)
    facts = Facts(context.device.type, source.config, preprocessing, image_size, interpolation, layer, pool)
    init_id = _describe_init(checkpoint, config, fingerprint(source))
    _check_rates(config)
    resolved, splits = _resolve_by_images(config, open_settings, facts, workdir, budget is not None, log, world)
    job = FinetuneJob(checkpoint, init_id, splits, resolved.config, context, log, open_settings, resolved.reasons)
    job = dataclasses.replace(job, layers=saved_choice(workdir, world))
    job = _with_held_out(job)
    job = _with_plan(job, workdir, None if budget is None else Clock(budget, started))
    if job.config.data.on_error == "skip":
        job = _with_held_out(_without_unreadable(job))  # of fewer images
    _log_reasons(job)
    if not job.config.tried_rates and job.config.runs == 1 and job.config.head is None:
        limit, settings = job.clock.limit("final", later=0.0), {"reasons": job.reasons}
        result = train_and_test(RunStart(job, None), job.config.single(), workdir, settings=settings, limit=limit)
    else:
        result = run_stages(job, workdir, lambda: _make_report(job, workdir, device))
    return Finetuned(job.config, result, workdir)


def _resolve_by_images(
    config: FinetuneConfig,
    open_settings: frozenset[str],
    facts: Facts,
    workdir: Path,
    has_budget: bool,
    log: Log,
    world: World,
) -> tuple[Resolved[FinetuneConfig], Splits]:
    """The settings by `facts` and by the images, and the images. A resumed job keeps what is saved in `workdir`."""
    saved = load_reasons(workdir, world)

    def resolve_by(facts: Facts, config: FinetuneConfig) -> Resolved[FinetuneConfig]:
        return keep_choices(resolve(config, open_settings=open_settings, facts=facts), saved, has_budget)

    data, splits = _read_images(resolve_by(facts, config).config, workdir, log, world)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, range=data.range))
    seen: dict[str, Any] = {"examples": len(splits.train), "num_classes": len(splits.train.classes)}
    resolved = resolve_by(dataclasses.replace(facts, **seen, multi_label=splits.train.multi_label), config)
    _check_settings(resolved.config, log, world)
    return resolved, splits


def _make_report(job: FinetuneJob, workdir: Path, device: str) -> bool:
    """Writes the report page, if there is time, and the model card; returns False after an error, and without a
    head."""
    if job.config.head is None:
        return False
    from vitlab.inspection.write_pages import report

    if (kind := job.clock.report()) == "none":
        job.log("no time left for the report; the same command makes it")  # `report` writes the card alone
    if (note := report(workdir, device=device, kind=kind).get("note")) is not None:
        job.log(note)
    return note is None


def _check_rates(config: FinetuneConfig) -> None:
    """Raises UserError if the sweep does not try `optim.lr`."""
    if len(rates := config.learning_rates) > 1 and config.optim.lr not in rates:
        raise UserError(
            f"optim.lr is {config.optim.lr:g}, and learning_rates {rates} are tried instead of it. To train at "
            f"optim.lr, set learning_rates=() and sweep_steps=None; to try it as well, add it to learning_rates."
        )


def _read_images(config: FinetuneConfig, workdir: Path, log: Log, world: World) -> tuple[DataConfig, Splits]:
    """The settings of the images with their measured range, and the images. `config` is what is known without them.

    Raises UserError for a work folder that is not a job's, and for fewer than two classes.
    """
    log(f"test images: {config.data.preprocessing(config.model.image_size).describe()}")
    check_folder(workdir)
    data = with_measured_range(config.data, world)
    log(f"reading the data set {data.name}")
    if data.levels is not None:
        log("black and white: the values {} and {} of an image file".format(*data.levels))
    splits = load_splits(data, world, config.loss == "sigmoid")
    require_two_classes(splits.train)
    check_balance(config, splits.train)
    return data, splits


def _check_settings(config: FinetuneConfig, log: Log, world: World) -> None:
    """Logs a deviation from the paper. Raises UserError for too many classes, or a batch that ranks cannot share."""
    if config.sweep_steps is not None:
        log(f"Deviation: the sweep takes {config.sweep_steps} steps per rate; the paper's takes as many as the run")
    check_head(config)
    world.check_batch_size(config.batch_size)


def _with_held_out(job: FinetuneJob) -> FinetuneJob:
    """The job with the `held_out` that its training images allow.

    If they are too few to hold some out, and `runs` is open, the job is the least-squares head alone. If `runs` is not
    open, UserError is raised.
    """
    if not job.config.tried_rates:
        return job
    job = _with_own_val(job)
    config, train = job.config, job.splits.train
    if config.head is None or "runs" not in job.open_settings:
        hold_out(train, config.held_out, config.seed)  # raises UserError if a part is empty
    elif not all(map(len, hold_out_indices(train, config.held_out, config.seed))):
        job.log(
            f"{len(train)} images are too few to hold {config.held_out:.0%} of a class out: only the head is fitted"
        )
        job = job.decide("the few training images", dataclasses.replace(config, runs=0, **NO_SWEEP))
    return job


def _with_own_val(job: FinetuneJob) -> FinetuneJob:
    """The job that holds out the user's own val, if it trains on train and val; with a head at most MAX_HELD_OUT."""
    config, val = job.config, job.splits.train.from_val
    if val is None or not 0 < val.mean() < 1:
        return job
    if config.head and "held_out" not in job.open_settings:
        raise UserError(
            f"held_out={config.held_out:g} has no effect: choices are made on the val split of {config.data.name}; "
            f"leave held_out out, or train without val (--data.train-split train)."
        )
    held_out = min(val.mean(), MAX_HELD_OUT / len(val)) if config.head else val.mean()
    if held_out != config.held_out:
        job.log(f"choices are made on {round(held_out * len(val)):,} of the {val.sum():,} images of val, not of train")
    return job.decide("the user's val split", dataclasses.replace(config, held_out=float(held_out)))


def _with_plan(job: FinetuneJob, workdir: Path, clock: Clock | None) -> FinetuneJob:
    """The job with the settings of its plan, its clock, and the measured micro-batch.

    A new job chooses block and pooling, then the settings that fit the `clock` (without one: the image size). An
    interrupted job keeps its settings. For the final settings the plan is made once more: it is logged, and `JobClock`
    compares the work with it. A finished job is not measured.
    """
    world = job.context.world
    is_resumed, is_finished = world.broadcast_object(
        lambda: [(workdir / name).exists() for name in ("config.json", "result.json")]
    )
    images = Images(len(job.splits.train), len(job.splits.test))
    task = Task(job.config, images, job.open_settings, math.inf if clock is None else clock.seconds)
    measure = _cached_measure(job)
    if not is_resumed:
        job = with_chosen_readout(job, task, measure, clock)
        task = dataclasses.replace(task, config=job.config)
        job = _choose_size(job, task, measure) if clock is None else _fit_budget(job, task, measure, clock)
    elif clock is not None:
        what = f"{job.config.steps} steps" if job.config.runs else "the least-squares head alone"
        size = "x".join(map(str, job.config.model.image_hw))
        job.log(f"resuming the plan in {workdir}, {what} at {size} px; for another --budget give another --workdir")
    if is_finished:
        return job
    plan = task.plan(job.config, measure(job.config, clock is None))
    images = Images(len(job.splits.train), len(job.splits.test))  # fewer than in `task` if a budget leaves some out
    plan = dataclasses.replace(plan, images=images)
    if plan.seconds > PLANNED_FRACTION * task.budget:  # chosen with a short report
        plan = dataclasses.replace(plan, report=task.plan(job.config, plan.cost, SHORT_REPORTS).report)
    notes = tuple(left_out(task, plan))
    for line in () if is_resumed else notes:
        job.log(line)
    _log_plan(job, plan, clock, is_resumed)
    context = dataclasses.replace(job.context, microbatch=plan.cost.step.microbatch)
    job_clock = JobClock(plan, clock, world, notes=notes)
    return dataclasses.replace(job, context=context, clock=job_clock)


def _log_plan(job: FinetuneJob, plan: Plan, clock: Clock | None, is_resumed: bool) -> None:
    """Logs the table of the plan; for a new job also a budget that would halve it, or that the budget is too short."""
    note = " (what is finished is not repeated)" if is_resumed else ""
    job.log(f"plan{note}:\n{plan.table(str(job.context.device))}")
    if is_resumed:
        return
    if clock is None and SUGGEST_FROM < plan.seconds < math.inf:
        job.log(f"half of that: --budget {math.ceil(plan.seconds / 120)}m, with another --workdir")
    if clock is not None and job.context.world.broadcast_object(clock.left) < plan.seconds:
        job.log("this takes longer than --budget; Ctrl-C stops it")


def _cached_measure(job: FinetuneJob) -> Measure:
    """Measures each image size once, or a second time if a training step is to be timed too.

    A model that is cut later has the measured cost in proportion to its MACs (`ImageCost`).
    """
    measured: dict[tuple[Any, bool], ImageCost] = {}

    def measure(config: FinetuneConfig, train: bool) -> ImageCost:
        size = config.model.image_size
        if (size, True) not in measured and (size, train) not in measured:
            if not measured:
                job.log("measuring the speed")
            measured[size, train] = measure_cost(config.single(), job.splits.train, job.context, train)
        return measured.get((size, True)) or measured[size, train]

    return measure


def _fit_budget(job: FinetuneJob, task: Task, measure: Measure, clock: Clock) -> FinetuneJob:
    """The job with the settings that fit the time."""
    world, splits = job.context.world, job.splits
    plan = fit_budget(task, measure, lambda: world.broadcast_object(clock.left), functools.partial(head_loss, job))
    if plan.config.data.subset_fraction != job.config.data.subset_fraction:
        splits = load_splits(plan.config.data, world, plan.config.loss == "sigmoid")
    return dataclasses.replace(job.decide("the time budget", plan.config), splits=splits)


def _choose_size(job: FinetuneJob, task: Task, measure: Measure) -> FinetuneJob:
    """The job without a budget: what few epochs ask for, and the image size by the head."""
    job = job.decide("the number of epochs", adapt_to_epochs(job.config, task.images.train, task.open_settings))
    if job.config.head and "model.image_size" in task.open_settings:
        task = dataclasses.replace(task, config=job.config)
        job = job.decide("leave-one-out losses", best_size(task, measure, functools.partial(head_loss, job)))
    return job


def _without_unreadable(job: FinetuneJob) -> FinetuneJob:
    """The job without the images that cannot be read."""
    splits = drop_unreadable(job.splits, job.context.world)
    if splits.unreadable:
        first = splits.unreadable[0]
        job.log(
            f"{len(splits.unreadable)} images cannot be read and are skipped, the first {quoted(first['path'])} "
            f"({first['reason']}); result.json and the report list them"
        )
    return dataclasses.replace(job, splits=splits)


def _log_reasons(job: FinetuneJob) -> None:
    """Logs the settings that were not the recipe's, one line for each reason."""
    for why, settings in itertools.groupby(job.reasons, lambda reason: reason.why):
        if why != RECIPE:
            job.log(f"by {why}: {', '.join(f'{name} {value}' for name, value, _ in settings)}")


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
