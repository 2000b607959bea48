"""Executes the runs of a study in several processes, resuming interrupted ones; then writes its report.

`vitlab study` calls `plan` and `run_study`. The folder of a run is `OUT/points/NAME-DIGEST`. The digest covers
everything that the result depends on: after a change of the recipe only the runs that it affects are repeated.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vitlab.checksums import find_corrupt_files
from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.data.workers import available_cores
from vitlab.display import ProgressDisplay
from vitlab.errors import RunError, UserError
from vitlab.finetuning.protocol import sweep_and_finetune
from vitlab.io import lock_file
from vitlab.models.config import ModelConfig
from vitlab.runs.pretrain import pretrain
from vitlab.settings import from_dict
from vitlab.studies.report import write_report
from vitlab.studies.spec import HELD_OUT, Result, Results, Scale, Study, StudyRun, changed, digest
from vitlab.train.clock import Clock
from vitlab.train.precision import choose_device
from vitlab.train.stopping import NonFiniteError, StoppedError, stop_signals
from vitlab.train.workdir import write_json

POLL_SECONDS = 0.5
"""Interval at which other processes are polled."""
REPORT_SECONDS = 10.0
"""Part of a time budget that is reserved for saving and the report."""
LOG = "workers.log"
"""Output of the processes, in the folder of the study."""
FAILED = "failed.json"
"""The error of a run that diverged, in its folder."""
MAX_PER_GPU = 4
"""Processes that share a GPU by default."""
SPAWN = multiprocessing.get_context("spawn")


class StudyError(RunError):
    """Runs diverged, or a process was killed or failed; the finished runs are complete."""


@dataclass(frozen=True)
class StudyPlan:
    """A study's runs at one scale, and their folders, which are read at each access. It is sent to the workers."""

    study: str
    """Name of the study."""
    scale: Scale
    runs: tuple[StudyRun, ...]
    out: Path
    folders: dict[str, Path]
    """Name of a run -> folder."""
    divisor: int = 1
    """By what the steps of all runs are divided, for a time budget."""

    def finished(self, name: str) -> bool:
        """Whether the run has a result that matches its checksum."""
        folder = self.folders[name]
        return (folder / "result.json").is_file() and not find_corrupt_files(folder, ("result.json",))

    @property
    def unfinished_runs(self) -> list[StudyRun]:
        """The runs without a result."""
        return [run for run in self.runs if not self.finished(run.name)]

    @property
    def failed(self) -> dict[str, str]:
        """The runs that diverged and those that start from them -> the reason."""
        failed: dict[str, str] = {}
        for run in self.runs:  # it comes after the one that it starts from
            if run.init_from in failed:
                failed[run.name] = f"it starts from {run.init_from}, which failed"
                continue
            with contextlib.suppress(FileNotFoundError):
                failed[run.name] = json.loads((self.folders[run.name] / FAILED).read_bytes())["error"]
        return failed

    @property
    def open_runs(self) -> list[StudyRun]:
        """The runs that are neither finished nor failed."""
        failed = self.failed
        return [run for run in self.unfinished_runs if run.name not in failed]

    def finished_seeds(self) -> tuple[StudyRun, ...]:
        """The runs of the seeds whose runs are all finished. Raises StudyError without one."""
        unfinished = self.unfinished_runs
        seeds = {run.config.seed for run in self.runs} - {run.config.seed for run in unfinished}
        if not seeds:
            raise StudyError(
                f"the time is over, with {len(self.runs) - len(unfinished)} of {len(self.runs)} runs done and no seed "
                f"complete; run the same command to resume."
            )
        return tuple(run for run in self.runs if run.config.seed in seeds)

    @property
    def results(self) -> Results:
        """All results, once every run is finished."""
        return Results(tuple(map(self._result, self.runs)))

    def _result(self, run: StudyRun) -> Result:
        folder = self.folders[run.name]
        result = json.loads((folder / "result.json").read_bytes())
        settings = json.loads((folder / "config.json").read_bytes())
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        recorded = ("fewshot_", HELD_OUT)  # the last record of each counts
        metrics = {name: value for record in records for name, value in record.items() if name.startswith(recorded)}
        metrics |= {name: value for name, value in result["test"].items() if isinstance(value, (int, float))}
        return Result(run, metrics, records, settings["examples"], from_dict(ModelConfig, settings["model"]))


def plan(
    study: Study,
    scale: Scale,
    out: Path,
    *,
    dataset: str | None = None,
    root: str | None = None,
    seeds: int | None = None,
    divisor: int = 1,
) -> StudyPlan:
    """The study's runs at this scale. `dataset`, `root` and the number of `seeds` replace the study's, the steps of all
    runs are divided by `divisor`. Raises UserError for a `dataset` in place of several."""
    runs = study.runs(scale, seeds, divisor)
    names = sorted({run.config.data.name for run in runs})
    if dataset is not None and len(names) > 1:
        raise UserError(
            f"--dataset {dataset}: the study {study.name} has several data sets at this scale ({', '.join(names)}); "
            "leave --dataset out."
        )
    root = root and str(Path(root).expanduser())
    runs = tuple(replace(run, config=_with_data(run.config, dataset, root)) for run in runs)
    by_name = {run.name: run for run in runs}
    folders = {name: out / "points" / f"{name}-{digest(run, by_name)}" for name, run in by_name.items()}
    return StudyPlan(study.name, scale, runs, out, folders, divisor)


def _with_data(config: TrainConfig, dataset: str | None, root: str | None) -> TrainConfig:
    config = changed(config, data={"name": dataset or config.data.name, "root": root or config.data.root})
    if root is not None and config.fewshot is not None and config.fewshot.dataset is not None:
        config = changed(config, fewshot={"root": root})
    return config


def run_unfinished(plan: StudyPlan, device: str = "auto") -> None:
    """Trains every run that no other process holds, until all have ended. Any number of processes may call it at once.

    A run that diverges does not stop the others: StudyError names it at the end. Other errors come from a run.
    """
    while runs := plan.open_runs:
        if not any(_train_if_free(plan, run, device) for run in runs):
            time.sleep(POLL_SECONDS)
    if failed := plan.failed:
        lines = "".join(f"\n  {name}: {why}" for name, why in failed.items())
        raise StudyError(f"{len(failed)} of {len(plan.runs)} runs failed; the others are complete:{lines}")


def _train_if_free(plan: StudyPlan, run: StudyRun, device: str) -> bool:
    """Trains the run unless it waits for `init_from` or another process holds it; returns whether it has ended."""
    if run.init_from and not plan.finished(run.init_from):
        return False
    folder = plan.folders[run.name]
    lock = lock_file(folder.parent / ".claims" / folder.name)
    if lock is None:
        return False
    with lock:
        if not plan.finished(run.name) and not (folder / FAILED).is_file():
            if (folder / "result.json").is_file():  # corrupt, and the checkpoints are deleted
                shutil.rmtree(folder)
            try:
                _train(plan, run, device)
            except NonFiniteError as error:
                write_json(folder / FAILED, {"error": str(error)})  # no other process repeats it
    return True


def _train(plan: StudyPlan, run: StudyRun, device: str) -> None:
    folder = plan.folders[run.name]
    if run.init_from is None:
        pretrain(run.config, folder, device=device, tensorboard=False)
    else:
        assert isinstance(run.config, FinetuneConfig), "only fine-tuning starts from another run"
        checkpoint = plan.folders[run.init_from]
        size = run.config.model.image_size
        sweep_and_finetune(checkpoint, run.config, folder, image_size=size, device=device, tensorboard=False)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def num_processes(scale: Scale, processes: int | None, device: str) -> int:
    """`processes`, or the default: 1 at the paper's scale, else one per core, at most MAX_PER_GPU on a GPU."""
    if processes is not None and processes < 1:
        raise UserError(f"processes is {processes}; give at least 1.")
    on_gpu = choose_device(device).type == "cuda"  # refuses a missing device before anything starts
    cores = available_cores()
    return processes or (1 if scale == "paper" else min(MAX_PER_GPU, cores) if on_gpu else cores)


def run_study(
    study: Study, plan: StudyPlan, *, processes: int | None = None, device: str = "auto", clock: Clock | None = None
) -> dict[str, Any]:
    """Trains the unfinished runs of a study, writes its report to `plan.out` and returns what study.json holds.

    processes: see `num_processes`; each has one thread, so that the results do not depend on their number. clock: when
    its time is over, the report is on the seeds whose runs are all finished. Runs that diverged are repeated. Raises
    StudyError, StoppedError after a signal (the same call resumes), and UserError.
    """
    count = num_processes(plan.scale, processes, device)
    for folder in plan.folders.values():
        (folder / FAILED).unlink(missing_ok=True)
    if plan.unfinished_runs:
        plan.out.mkdir(parents=True, exist_ok=True)
        threads = max(1, available_cores() // count) if plan.scale == "paper" else 1
        _run_workers(plan, min(count, len(plan.unfinished_runs)), threads, device, clock)
    if clock is not None:
        plan = replace(plan, runs=plan.finished_seeds())
    return write_report(study, plan.scale, plan.results, plan.out, plan.divisor)


def _run_workers(plan: StudyPlan, count: int, threads: int, device: str, clock: Clock | None) -> None:
    """Trains the unfinished runs in `count` processes and shows what finishes. All processes have ended when it
    returns, REPORT_SECONDS before the end of the `clock` at the latest."""
    errors, log = SPAWN.SimpleQueue(), plan.out / LOG
    workers = [SPAWN.Process(target=_worker, args=(plan, device, threads, errors, log)) for _ in range(count)]
    total = len(plan.runs)
    finished = {run.name for run in plan.runs if plan.finished(run.name)}
    with stop_signals() as stop, ProgressDisplay(plan.study, total, "runs", done=len(finished)) as display:
        try:
            for worker in workers:
                worker.start()
            while clock is None or clock.left() > REPORT_SECONDS:
                if stop.wait(POLL_SECONDS):
                    done = f"{len(finished)} of {total} runs done"
                    raise StoppedError(f"stopped and saved with {done}; run the same command to resume.")
                is_running = any(worker.is_alive() for worker in workers)  # before the last finished runs are read
                for run in plan.runs:
                    if run.name not in finished and plan.finished(run.name):
                        finished.add(run.name)
                        display.say(f"{len(finished)}/{total} {run.name}")
                display.update(len(finished))
                if any(worker.exitcode for worker in workers) and not stop.is_set():
                    if not errors.empty():
                        raise errors.get()
                    raise StudyError(f"a process was killed or failed (log: {log}). Run the same command to resume.")
                if not is_running:
                    break
        finally:
            while alive := [worker for worker in workers if worker.is_alive()]:
                for worker in alive:  # it saves and ends; repeated, for a signal between two runs may be lost
                    worker.terminate()
                alive[0].join(POLL_SECONDS)


def _worker(plan: StudyPlan, device: str, threads: int, errors: Any, log: Path) -> None:
    """A process: `run_unfinished` with its output in the `log`; puts its error into the queue `errors`."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        run_unfinished(plan, device)
    except (RunError, ValueError, OSError) as error:
        errors.put(error)
        raise SystemExit(1) from error
    except (RuntimeError, MemoryError) as error:  # out of memory; the log gets the traceback
        name = type(error).__name__
        errors.put(StudyError(f"a process ended with {name}: {error} (log: {log}). Run the same command to resume."))
        raise


def _end_with_parent() -> None:
    """Stops this process, which saves its run, once its parent has ended or was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    while True:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(POLL_SECONDS)
