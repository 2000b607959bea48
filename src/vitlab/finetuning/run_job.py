"""A fine-tuning job from its first stage to its result: `protocol.py` plans it and calls `run_stages`.

The stages: the least-squares head (`head.py`), the learning rate sweep (`sweep.py`, App. B.1.1), the final runs
(`final_runs.py`), and the test of the head alone.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vitlab.finetuning.final_runs import FinalRuns
from vitlab.finetuning.head import HeadTest, fit_head
from vitlab.finetuning.job import FinetuneJob
from vitlab.finetuning.scores import Choice, Score, best_score, format_score, summarize, summary_metrics
from vitlab.finetuning.sweep import RunStart, Sweep
from vitlab.runs.run import run_settings
from vitlab.train.microbatch import choose_microbatch
from vitlab.train.workdir import METRICS, Workdir
from vitlab.weights import load_metadata, load_model, save_model

MIN_SWEEP = 0.5
"""Fraction of the planned steps of the sweep that must fit; otherwise fine-tuning is left out."""


def run_stages(job: FinetuneJob, workdir: Path, make_report: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """All stages, each run in its own folder, and the report of `make_report()`; returns `workdir`/result.json."""
    settings = run_settings("finetune", job.init_id, job.splits, job.config) | {"reasons": job.reasons}
    with Workdir(workdir, settings, tensorboard=False, world=job.context.world) as folder:
        job.log(f"settings: {workdir / 'config.json'}")
        if not folder.finished:
            job.clock.open(folder)
            folder.truncate_logs(-1)  # one line per finished run, the same at every start
            result = _choose_and_test(_with_saved_microbatch(job, folder), folder)
            if folder.writes:
                _write_model(result, folder.path)
            folder.write_result(result.record())
        folder.write_report(make_report)
        return folder.read_result()


def _with_saved_microbatch(job: FinetuneJob, folder: Workdir) -> FinetuneJob:
    """The job with the micro-batch of its first start, so that all of its runs have the same."""
    if (measured := job.context.microbatch) is None:
        return job
    unused = nn.Identity()  # a model is only needed where none is measured
    size = choose_microbatch(job.config.single(), folder, unused, job.context.device, measured)
    return dataclasses.replace(job, context=dataclasses.replace(job.context, microbatch=size))


@dataclass(frozen=True)
class JobResult:
    """What the stages have chosen and tested."""

    job: FinetuneJob
    choice: Choice
    runs: Mapping[int, Mapping[str, Any]]
    """Seed -> record of the test of each final run; empty if the least-squares head is the result."""
    head: HeadTest | None
    """None without `config.head`, and if there was no time to test it beside the final runs."""

    @property
    def chosen(self) -> str:
        """The folder of the result's model."""
        return "run-0" if self.runs else "linear"

    @property
    def alpha(self) -> float:
        """Weight of the fine-tuned model in its average with the head."""
        return self.choice.alpha(self.job.config) if self.runs else 0.0

    def record(self) -> dict[str, Any]:
        """The content of result.json."""
        config, choice, clock = self.job.config, self.choice, self.job.clock
        record: dict[str, Any] = {
            "learning_rate": choice.learning_rate(config),
            "sweep": [score.record for score in choice.scores],
        }
        if self.head is not None:
            record["linear"] = {**self.head.fit, **summary_metrics(self.head.test), "held_out": choice.head_metrics}
        if config.head is not None:
            record |= {"chosen": self.chosen, "alpha": self.alpha}
        if clock.left_out:
            record["left_out"] = clock.left_out
        tests = list(self.runs.values()) or ([self.head.test] if self.head else [])
        return record | summarize(tests, list(self.runs)) | self.job.splits.record


def _choose_and_test(job: FinetuneJob, folder: Workdir) -> JobResult:
    """All choices first, then the tests: no test image, and no time of a test, decides anything."""
    config, clock = job.config, job.clock
    head = None if config.head is None else fit_head(job)
    if head is not None:
        head.describe()
    start = RunStart(job, head)
    choice = _choose(start, folder)
    runs = FinalRuns(start, choice).run(folder)
    one_test = clock.seconds("test") / (config.runs + 1)
    head_test = None
    if head is not None and (not runs or clock.fits("test of the head alone", one_test, after=0.0)):
        head_test = head.test(folder.path / "linear")
    return JobResult(job, choice, runs, head_test)


def _choose(start: RunStart, folder: Workdir) -> Choice:
    """Whether fine-tuning follows, by the time that is left and by the sweep, and the scores of the sweep."""
    job, head = start.job, start.head
    config, clock = job.config, job.clock
    enough = MIN_SWEEP * clock.seconds("sweep" if config.tried_rates else "final") + clock.seconds("score")
    if not config.runs or (head is not None and not clock.fits("fine-tuning", enough, clock.seconds("test"))):
        return Choice(fine_tunes=False)
    if not config.tried_rates:
        return Choice(fine_tunes=True)
    scores = Sweep.create(start).run(folder.path)
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


def _write_model(result: JobResult, workdir: Path) -> None:
    """Copies the chosen model to `workdir`/model, with how it was chosen."""
    metadata = load_metadata(workdir / result.chosen)
    chosen_on = result.choice.best.metrics if result.choice.best else {}
    if result.head is not None and not result.runs:
        chosen_on = result.head.fit
    if chosen_on.get("reject_below") is not None:
        metadata["reject_below"] = chosen_on["reject_below"]
    if result.runs and result.job.config.head:
        metadata["alpha"] = result.alpha
    save_model(load_model(workdir / result.chosen), workdir / "model", extra=metadata)
