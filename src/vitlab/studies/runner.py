"""Runs a study: each of its points once, in several processes, resuming interrupted ones; then writes its report.

A point is one training run of the study. Its folder is `OUT/points/NAME-DIGEST`, where the digest covers everything
that the result depends on: after a change of the recipe only the points that it affects are run again.
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
from vitlab.data.loader import available_cores
from vitlab.display import ProgressDisplay
from vitlab.errors import RunError, UserError
from vitlab.finetuning.protocol import sweep_and_finetune
from vitlab.io import lock_file
from vitlab.models.config import ModelConfig
from vitlab.runs.pretrain import pretrain
from vitlab.settings import from_dict
from vitlab.studies.presets import changed
from vitlab.studies.report import write_report
from vitlab.studies.spec import HELD_OUT, Point, Result, Results, Scale, Study, digest
from vitlab.train.precision import choose_device
from vitlab.train.stopping import NonFiniteError, StoppedError, stop_signals
from vitlab.train.workdir import write_json

POLL_SECONDS = 0.5
"""Seconds between two looks at the other processes."""
LOG = "workers.log"
FAILED = "failed.json"
"""In the folder of a point that diverged."""
MAX_PER_GPU = 4
"""Processes that share a GPU by default."""
SPAWN = multiprocessing.get_context("spawn")


class StudyError(RunError):
    """Points diverged, or a process was killed or failed; the finished points are complete."""


@dataclass(frozen=True)
class StudyPlan:
    """A study's points at one scale, and their folders. Workers receive it, so it holds no functions."""

    study: str
    """Name of the study."""
    scale: Scale
    points: tuple[Point, ...]
    out: Path
    folders: dict[str, Path]
    """Point name -> folder."""

    def finished(self, name: str) -> bool:
        """Whether the point has a result that matches its checksum."""
        folder = self.folders[name]
        return (folder / "result.json").is_file() and not find_corrupt_files(folder, ("result.json",))

    @property
    def unfinished_points(self) -> list[Point]:
        """The points without a result."""
        return [point for point in self.points if not self.finished(point.name)]

    @property
    def failed(self) -> dict[str, str]:
        """The points that diverged and those that start from them -> the reason."""
        failed: dict[str, str] = {}
        for point in self.points:  # it comes after the one that it starts from
            if point.init_from in failed:
                failed[point.name] = f"it starts from {point.init_from}, which failed"
                continue
            with contextlib.suppress(FileNotFoundError):
                failed[point.name] = json.loads((self.folders[point.name] / FAILED).read_bytes())["error"]
        return failed

    @property
    def open_points(self) -> list[Point]:
        """The points that are neither finished nor failed."""
        failed = self.failed
        return [point for point in self.unfinished_points if point.name not in failed]

    @property
    def results(self) -> Results:
        """All results, once every point is finished."""
        return Results(tuple(map(self._result, self.points)))

    def _result(self, point: Point) -> Result:
        folder = self.folders[point.name]
        result = json.loads((folder / "result.json").read_bytes())
        settings = json.loads((folder / "config.json").read_bytes())
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        kept = ("fewshot_", HELD_OUT)
        metrics = {name: value for record in records for name, value in record.items() if name.startswith(kept)}
        metrics |= {name: value for name, value in result["test"].items() if isinstance(value, (int, float))}
        return Result(point, metrics, records, settings["examples"], from_dict(ModelConfig, settings["model"]))


def plan(study: Study, scale: Scale, out: Path, *, dataset: str | None = None, root: str | None = None) -> StudyPlan:
    """The study's points at this scale; `dataset` and `root` replace the points' data set and its folder."""
    points = study.points(scale)
    names = sorted({point.config.data.name for point in points})
    if dataset is not None and len(names) > 1:
        raise UserError(
            f"--dataset {dataset}: the study {study.name} has several data sets at this scale ({', '.join(names)}); "
            "leave --dataset out."
        )
    root = root and str(Path(root).expanduser())
    points = tuple(replace(point, config=_with_data(point.config, dataset, root)) for point in points)
    by_name = {point.name: point for point in points}
    folders = {name: out / "points" / f"{name}-{digest(point, by_name)}" for name, point in by_name.items()}
    return StudyPlan(study.name, scale, points, out, folders)


def _with_data(config: TrainConfig, dataset: str | None, root: str | None) -> TrainConfig:
    config = changed(config, data={"name": dataset or config.data.name, "root": root or config.data.root})
    if root is not None and config.fewshot is not None and config.fewshot.dataset is not None:
        config = changed(config, fewshot={"root": root})
    return config


def run_unfinished_points(plan: StudyPlan, device: str = "auto") -> None:
    """Runs every point that no other process holds until all are finished; any number of processes may do so at once.

    A point that diverges does not stop the others: StudyError names it after them. Raises StoppedError, UserError and
    OSError as a run does.
    """
    while points := plan.open_points:
        if not any(_try_point(plan, point, device) for point in points):
            time.sleep(POLL_SECONDS)
    if failed := plan.failed:
        lines = "".join(f"\n  {name}: {why}" for name, why in failed.items())
        raise StudyError(f"{len(failed)} of {len(plan.points)} points failed; the others are complete:{lines}")


def _try_point(plan: StudyPlan, point: Point, device: str) -> bool:
    """Runs the point unless it waits for `init_from` or another process holds it; returns whether it has ended."""
    if point.init_from and not plan.finished(point.init_from):
        return False
    folder = plan.folders[point.name]
    lock = lock_file(folder.parent / ".claims" / folder.name)
    if lock is None:
        return False
    with lock:
        if not plan.finished(point.name) and not (folder / FAILED).is_file():
            if (folder / "result.json").is_file():  # corrupt, and the checkpoints are deleted
                shutil.rmtree(folder)
            try:
                _run(plan, point, device)
            except NonFiniteError as error:
                write_json(folder / FAILED, {"error": str(error)})  # no other process repeats it
    return True


def _run(plan: StudyPlan, point: Point, device: str) -> None:
    folder = plan.folders[point.name]
    if point.init_from is None:
        pretrain(point.config, folder, device=device, tensorboard=False)
    else:
        assert isinstance(point.config, FinetuneConfig), "only fine-tuning starts from another point"
        checkpoint, size = plan.folders[point.init_from], point.config.model.image_size
        sweep_and_finetune(checkpoint, point.config, folder, image_size=size, device=device, tensorboard=False)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def run_study(study: Study, plan: StudyPlan, *, processes: int | None = None, device: str = "auto") -> dict[str, Any]:
    """Runs the unfinished points of a study, writes its report to `plan.out` and returns what study.json holds.

    processes: None takes 1 at the paper's scale, else one per core, at most MAX_PER_GPU on a GPU; each has one thread,
    so that the results do not depend on their number. Points that diverged are run again. Raises StudyError,
    StoppedError after a signal (the same call resumes), and UserError.
    """
    if processes is not None and processes < 1:
        raise UserError(f"processes is {processes}; give at least 1.")
    on_gpu = choose_device(device).type == "cuda"  # refuses a missing device before anything starts
    cores = available_cores()
    count = processes or (1 if plan.scale == "paper" else min(MAX_PER_GPU, cores) if on_gpu else cores)
    for folder in plan.folders.values():
        (folder / FAILED).unlink(missing_ok=True)
    if plan.unfinished_points:
        plan.out.mkdir(parents=True, exist_ok=True)
        threads = max(1, cores // count) if plan.scale == "paper" else 1
        _run_workers(plan, min(count, len(plan.unfinished_points)), threads, device)
    return write_report(study, plan.scale, plan.results, plan.out)


def _run_workers(plan: StudyPlan, count: int, threads: int, device: str) -> None:
    """Runs the unfinished points in `count` processes and shows what finishes; all of them end before it returns."""
    errors, log = SPAWN.SimpleQueue(), plan.out / LOG
    workers = [SPAWN.Process(target=_worker, args=(plan, device, threads, errors, log)) for _ in range(count)]
    total, finished = len(plan.points), {point.name for point in plan.points if plan.finished(point.name)}
    with stop_signals() as stop, ProgressDisplay(plan.study, total, "points", done=len(finished)) as display:
        try:
            for worker in workers:
                worker.start()
            running = True
            while running:
                if stop.wait(POLL_SECONDS):
                    done = f"{len(finished)} of {total} points done"
                    raise StoppedError(f"stopped and saved with {done}; run the same command to resume.")
                running = any(worker.is_alive() for worker in workers)  # before looking for finished points
                for point in plan.points:
                    if point.name not in finished and plan.finished(point.name):
                        finished.add(point.name)
                        display.say(f"{len(finished)}/{total} {point.name}")
                display.update(len(finished))
                if any(worker.exitcode for worker in workers) and not stop.is_set():
                    ended = f"a process was killed or failed (log: {log}). Run the same command to resume."
                    raise StudyError(ended) if errors.empty() else errors.get()
        finally:
            while alive := [worker for worker in workers if worker.is_alive()]:
                for worker in alive:  # it saves and ends; repeated, for a signal between two runs may be lost
                    worker.terminate()
                alive[0].join(POLL_SECONDS)


def _worker(plan: StudyPlan, device: str, threads: int, errors: Any, log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        run_unfinished_points(plan, device)
    except (RunError, ValueError, OSError) as error:
        errors.put(error)
        raise SystemExit(1) from error
    except (RuntimeError, MemoryError) as error:  # out of memory; the log gets the traceback
        name = type(error).__name__
        errors.put(StudyError(f"a process ended with {name}: {error} (log: {log}). Run the same command to resume."))
        raise


def _end_with_parent() -> None:
    """Saves and ends this process once its parent has ended, in whatever way."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    while True:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(POLL_SECONDS)
