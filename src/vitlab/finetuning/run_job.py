"""A fine-tuning job from its first stage to its result: `protocol.py` plans it and calls `run_stages`.

The stages: the least-squares head (`head.py`), the learning rate sweep (`sweep.py`), the final runs at the chosen
learning rate on all of train (App. B.1.1), each with a test, and the test of the head alone. `protocol.py` calls
`train_and_test` for a job that is one run.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from vitlab.config import TrainConfig
from vitlab.evaluation.result import headline
from vitlab.finetuning.head import fit_head
from vitlab.finetuning.job import FinetuneJob
from vitlab.finetuning.scores import (
    Choice,
    Score,
    average_weights,
    best_score,
    format_score,
    summarize,
    summary_metrics,
)
from vitlab.finetuning.sweep import RunStart, Sweep, read_calibrator, read_thresholds, sweep_folder
from vitlab.runs.run import TrainingRun, evaluate_split, run_settings, write_run
from vitlab.train.microbatch import choose_microbatch
from vitlab.train.workdir import METRICS, Workdir, read_log
from vitlab.weights import load_metadata, load_model, save_model

MIN_SWEEP_FRACTION = 0.5
"""Fine-tuning is skipped if less than this fraction of the sweep's planned seconds is left."""
MIN_FINAL_FRACTION = 0.6
"""A final run is skipped if less than this fraction of its planned seconds is left."""


def run_stages(job: FinetuneJob, workdir: Path, make_report: Callable[[], bool]) -> dict[str, Any]:
    """All stages, each run in its own folder, and the report of `make_report()`; returns `workdir`/result.json."""
    settings = run_settings("finetune", job.init_id, job.splits, job.config) | {"reasons": job.reasons}
    settings |= {} if job.layers is None else {"layers": job.layers}
    with Workdir(workdir, settings, tensorboard=False, world=job.context.world) as folder:
        job.log(f"settings: {workdir / 'config.json'}")
        if not folder.finished:
            job.clock.open(folder)
            folder.truncate_logs(-1)  # one line per finished run, the same at every start
            folder.write_result(_choose_and_test(_with_saved_microbatch(job, folder), folder))
        test = folder.read_result()["test"]
        job.log(f"test: {headline(test)} ({test['images']:,} images)")  # the report takes a while
        folder.write_report(make_report)
        return folder.read_result()


def _with_saved_microbatch(job: FinetuneJob, folder: Workdir) -> FinetuneJob:
    """The job with the micro-batch of its first start, so that all of its runs have the same."""
    if (measured := job.context.microbatch) is None:
        return job
    unused = nn.Identity()  # a model is only needed where none is measured
    size = choose_microbatch(job.config.single(), folder, unused, job.context.device, measured)
    return dataclasses.replace(job, context=dataclasses.replace(job.context, microbatch=size))


def _choose_and_test(job: FinetuneJob, folder: Workdir) -> dict[str, Any]:
    """Makes all choices, then trains and tests the final runs; saves the chosen model, returns result.json's content.

    The choices come first: no test image, and no time of a test, decides anything.
    """
    config, clock = job.config, job.clock
    head = None if config.head is None else fit_head(job)
    if head is not None:
        head.log_metrics()
        head.write_suspects(folder.path)
    start = RunStart(job, head)
    choice = _choose(start, folder)
    record: dict[str, Any] = {
        "learning_rate": choice.learning_rate(config),
        "sweep": [score.record for score in choice.scores],
    }
    runs = _run_final(start, choice, folder)
    linear = None
    one_test = clock.seconds("test") / (config.runs + 1)  # the stage tests every run and the head
    if head is not None and (not runs or clock.fits("test of the head alone", one_test, after=0.0)):
        linear = head.test(folder.path / "linear")
        fit = linear["least_squares"]
        record["linear"] = {**fit, **summary_metrics(linear["test"]), "held_out": choice.head_metrics}
    if runs:
        chosen, alpha, tests = "run-0", choice.alpha(config), list(runs.values())
        chosen_metrics = choice.best.metrics if choice.best else {}  # on held-out images
    else:
        assert linear is not None  # a job without a head has runs
        chosen, alpha, tests = "linear", 0.0, [linear["test"]]
        chosen_metrics = linear["least_squares"]  # leave-one-out
    if head is not None:
        record |= {"chosen": chosen, "alpha": alpha}
    if left_out := [part for part, fits in clock.decisions.items() if not fits]:
        record["left_out"] = left_out
    if job.layers is not None:
        record["layers"] = job.layers
    extra = {"alpha": alpha} if runs and head else {}
    # The threshold is for confidences at the temperature of the held-out images. A test with too many logits to keep
    # has no temperature, so its confidences are on another scale.
    same_temperature = chosen_metrics.get("temperature") in (None, tests[0].get("temperature"))
    if (threshold := chosen_metrics.get("reject_below")) is not None and same_temperature:
        extra["reject_below"] = threshold
    _save_chosen(folder, chosen, extra)
    return record | summarize(tests, list(runs)) | job.splits.record


def _save_chosen(folder: Workdir, chosen: str, extra: dict[str, Any]) -> None:
    """Saves the model of the run `chosen` as the job's `model`, with `extra` in its metadata (rank 0)."""
    if folder.writes:
        source = folder.path / chosen
        save_model(load_model(source), folder.path / "model", extra=load_metadata(source) | extra)


def _choose(start: RunStart, folder: Workdir) -> Choice:
    """Decides by the time left, then by the sweep, whether there are final runs, and at which learning rate."""
    job, head = start.job, start.head
    config, clock = job.config, job.clock
    enough = MIN_SWEEP_FRACTION * clock.seconds("sweep" if config.tried_rates else "final") + clock.seconds("score")
    if not config.runs or (head is not None and not clock.fits("fine-tuning", enough, clock.seconds("test"))):
        return Choice(fine_tunes=False)
    if not config.tried_rates:
        return Choice(fine_tunes=True)
    scores = Sweep(start).run(folder.path)
    for number, score in enumerate(scores, 1):
        folder.log(METRICS, number, score.record)
    head_metrics = None if head is None else head.score_held_out()
    helps = head_metrics is None or _helps(job, scores, head_metrics)
    return Choice(helps, best_score(scores) if helps else None, scores, head_metrics)


def _helps(job: FinetuneJob, scores: Sequence[Score], head_metrics: Mapping[str, Any]) -> bool:
    """Whether fine-tuning is better than the head alone, by the loss on the held-out part."""
    job.log(f"least-squares head: {format_score(head_metrics)}")
    finite = any(score.metrics for score in scores)
    helps = finite and best_score(scores).metrics["loss"] < head_metrics["loss"]
    if not helps:
        worse = "makes the least-squares head worse" if finite else "diverged at every learning rate"
        job.log(f"fine-tuning {worse}: the head is the result")
    return helps


def _run_final(start: RunStart, choice: Choice, folder: Workdir) -> dict[int, dict[str, Any]]:
    """Trains and tests in run-0, run-1, ... of the job's `folder`; returns seed -> record of the test.

    If the first run is not trained, the best of the sweep takes its place; at any other the runs end.
    """
    config, workdir = start.job.config, folder.path
    records: dict[int, dict[str, Any]] = {}
    if not choice.fine_tunes:
        return records
    lr = choice.learning_rate(config)
    thresholds = None if choice.best is None else read_thresholds(sweep_folder(workdir, lr))
    calibrator = None if choice.best is None else read_calibrator(sweep_folder(workdir, lr))
    for number in range(config.runs):
        seed = config.seed + number
        if _is_trained(start.job, choice, number):
            limit = start.job.clock.limit("final", later=1 - (number + 1) / config.runs)
            run_config, path = start.run_config(lr, seed), workdir / f"run-{number}"
            result = train_and_test(
                start,
                run_config,
                path,
                choice.alpha(config),
                description=f"run {number}",
                thresholds=thresholds,
                calibrator=calibrator,
                limit=limit,
            )
        elif number == 0 and choice.best is not None:
            result = _test_swept(start, workdir, choice.best.learning_rate)
        else:
            break
        records[seed] = result["test"]
        metrics = {"learning_rate": lr, "seed": seed, **summary_metrics(records[seed])}
        folder.log(METRICS, len(choice.scores) + len(records), metrics)
    return records


def _is_trained(job: FinetuneJob, choice: Choice, number: int) -> bool:
    """Whether a final run is trained: never without `refit`; always if there is no other run; otherwise if it fits."""
    if not job.config.refit:
        return False
    if number == 0 and choice.best is None:
        return True
    enough = MIN_FINAL_FRACTION * job.clock.seconds("final") / job.config.runs
    return job.clock.fits(f"final run {number}", enough, job.clock.seconds("test"))


def _test_swept(start: RunStart, workdir: Path, lr: float) -> dict[str, Any]:
    """The run of the sweep at this learning rate as run 0, tested: the content of its result.json."""
    job, sweep, source = start.job, Sweep(start), sweep_folder(workdir, lr)
    config = start.sweep_config(lr)
    splits = dataclasses.replace(sweep.splits, test=job.splits.test, unreadable=job.splits.unreadable)
    with sweep.open_folder(workdir / "run-0", config, splits) as folder:
        if folder.finished:
            return folder.read_result()
        folder.truncate_logs(-1)
        for record in read_log(source / METRICS):
            folder.log(METRICS, record.pop("step"), record)
        model = load_model(source / "model").to(job.context.device)
        calibrator = read_calibrator(source)
        test = evaluate_split(config, model, splits.test, job.context.world, calibrator is not None)
        test = test.with_calibrator(calibrator)
        return write_run(config, folder, splits, model, test.with_thresholds(read_thresholds(source)), job.init_id)


def train_and_test(
    start: RunStart, config: TrainConfig, path: Path, alpha: float = 1.0, **options: Any
) -> dict[str, Any]:
    """Trains on all of train and tests; returns the content of result.json. A finished run is only read.

    alpha: weight of the trained model in its average with the least-squares head's; 1 without a head.
    options: `description`, `thresholds`, `calibrator`, `settings` and `limit` of a TrainingRun.
    """
    job, head = start.job, start.head
    create_head = None if head is None or alpha == 1 else functools.cache(head.create_classifier)
    run = TrainingRun(
        config,
        job.splits,
        functools.partial(start.create_model, config.seed),
        "finetune",
        job.context,
        init_id=job.init_id,
        finish=lambda model: model if create_head is None else average_weights(create_head(), model, alpha),
        **options,
    )
    return run.run(path).result
