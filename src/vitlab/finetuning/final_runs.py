"""The final runs of a fine-tuning job (App. B.1.1): at the chosen learning rate on all of train, each with a test.

`run_job.py` calls `FinalRuns.run`; `protocol.py` calls `train_and_test` for a job that is one run.
"""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlab.config import TrainConfig
from vitlab.finetuning.scores import Choice, Score, average_weights, summary_metrics
from vitlab.finetuning.sweep import RunStart, Sweep, read_thresholds, sweep_folder
from vitlab.runs.run import TrainingRun, evaluate_split, write_run
from vitlab.train.workdir import METRICS, Workdir, read_log
from vitlab.weights import load_model

MIN_FINAL = 0.6
"""Fraction of the planned steps of a final run that must fit; otherwise the run is left out."""


@dataclass(frozen=True)
class FinalRuns:
    """The runs with the seeds `config.seed`, `config.seed` + 1, ..."""

    start: RunStart
    choice: Choice

    def run(self, folder: Workdir) -> dict[int, dict[str, Any]]:
        """Trains and tests in run-0, run-1, ... of the job's `folder`; returns seed -> record of the test.

        A run that is not trained is taken from the sweep, if it is the first, and left out otherwise.
        """
        choice, config, workdir = self.choice, self.start.job.config, folder.path
        records: dict[int, dict[str, Any]] = {}
        if not choice.fine_tunes:
            return records
        lr = choice.learning_rate(config)
        thresholds = None if choice.best is None else read_thresholds(sweep_folder(workdir, lr))
        for number in range(config.runs):
            seed = config.seed + number
            if self._is_trained(number):
                limit = self.start.job.clock.limit("final", later=1 - (number + 1) / config.runs)
                options = {"description": f"run {number}", "thresholds": thresholds, "limit": limit}
                run_config, path = self.start.run_config(lr, seed), workdir / f"run-{number}"
                result = train_and_test(self.start, run_config, path, choice.alpha(config), **options)
            elif number == 0 and choice.best is not None:
                result = self.test_swept(workdir, choice.best)
            else:
                break
            records[seed] = result["test"]
            metrics = {"learning_rate": lr, "seed": seed, **summary_metrics(records[seed])}
            folder.log(METRICS, len(choice.scores) + len(records), metrics)
        return records

    def _is_trained(self, number: int) -> bool:
        """Whether this run is trained: never without `refit`; always if there is no other run; otherwise if it fits."""
        config, clock = self.start.job.config, self.start.job.clock
        if not config.refit:
            return False
        if number == 0 and self.choice.best is None:
            return True
        enough = MIN_FINAL * clock.seconds("final") / config.runs
        return clock.fits(f"final run {number}", enough, clock.seconds("test"))

    def test_swept(self, workdir: Path, best: Score) -> dict[str, Any]:
        """The best run of the sweep as run 0, tested: the content of its result.json."""
        start, job = self.start, self.start.job
        sweep = Sweep.create(start)
        config = start.sweep_config(best.learning_rate)
        source = sweep_folder(workdir, best.learning_rate)
        splits = dataclasses.replace(sweep.splits, test=job.splits.test, unreadable=job.splits.unreadable)
        with sweep.open_folder(workdir / "run-0", config, splits) as folder:
            if folder.finished:
                return folder.read_result()
            folder.truncate_logs(-1)
            for record in read_log(source / METRICS):
                folder.log(METRICS, record.pop("step"), record)
            model = load_model(source / "model").to(job.context.device)
            test = evaluate_split(config, model, splits.test, job.context.world)
            test = test.with_thresholds(read_thresholds(source))
            return write_run(config, folder, splits, model, test, job.init_id)


def train_and_test(
    start: RunStart, config: TrainConfig, path: Path, alpha: float = 1.0, **options: Any
) -> dict[str, Any]:
    """The result of a run on all of train, tested: the content of result.json, which is read if the run is finished.

    alpha: weight of the trained model in its average with the least-squares head's. options: `description`,
    `thresholds`, `settings` and `limit` of a TrainingRun.
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
