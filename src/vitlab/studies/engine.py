"""Runs a study: each point once, on as many processes as there are, wherever it was interrupted; then its report.

A point's folder is `OUT/points/NAME-DIGEST`, where the digest is of everything that its result depends on: a recipe
that changes gives new folders to the points that it touches, and the others are not run again.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vitlab.config import DataConfig, FinetuneConfig
from vitlab.errors import UserError
from vitlab.evaluate.load import choose_device
from vitlab.io import find_damage, lock_file
from vitlab.models.config import ModelConfig
from vitlab.pipelines.finetune import sweep_and_finetune
from vitlab.pipelines.pretrain import pretrain
from vitlab.settings import from_dict
from vitlab.studies.report import write_report
from vitlab.studies.study import Done, Point, Scale, Study, digest
from vitlab.train.loop import NonFiniteError
from vitlab.train.signals import StoppedError, stop_signals
from vitlab.train.workdir import write_json

WRONG_INPUT = 2
"""Exit code of a process that met bad settings or data, whose last words say which."""
WAIT = 0.5
"""Seconds between two looks at what other processes do."""
FAILED = "failed.json"
SPAWN = multiprocessing.get_context("spawn")


class StudyError(RuntimeError):
    """Some points of a study could not be brought to their end; the others are kept."""


@dataclass(frozen=True)
class Plan:
    """A study's points at one scale, on the data that the user has, and where each lies."""

    study: Study
    scale: Scale
    points: tuple[Point, ...]
    out: Path
    folders: dict[str, Path]
    """Of each point by its name."""

    def finished(self, name: str) -> bool:
        folder = self.folders[name]
        return (folder / "result.json").is_file() and not find_damage(folder, ("result.json",))

    def failure(self, name: str) -> str | None:
        """Why the point can have no result: its training diverged, or that of a point which it starts from."""
        path = self.folders[name] / FAILED
        if path.is_file():
            return json.loads(path.read_bytes())["why"]
        start = next(point.start for point in self.points if point.name == name)
        return f"it starts from {start}, which failed" if start and self.failure(start) else None

    @property
    def open_points(self) -> list[Point]:
        """Those that are still to be run, in whole or in part."""
        return [point for point in self.points if not self.finished(point.name) and not self.failure(point.name)]

    def done(self, point: Point) -> Done:
        """What a finished point's folder tells."""
        folder = self.folders[point.name]
        result = json.loads((folder / "result.json").read_bytes())
        settings = json.loads((folder / "config.json").read_bytes())
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        figures = {name: value for record in records for name, value in record.items() if name.startswith("fewshot_")}
        figures |= {name: value for name, value in result["test"].items() if isinstance(value, (int, float))}
        model = from_dict(ModelConfig, settings["model"])
        return Done(point, figures, records, settings["examples"], model)

    def leftovers(self) -> list[Path]:
        """Folders of points that this study has no more, or not with these settings or this data."""
        return [each for each in sorted(self.out.glob("points/*-????????")) if each not in self.folders.values()]


def plan(study: Study, scale: Scale, out: Path, *, dataset: str | None = None, root: str | None = None) -> Plan:
    """The study's points at this scale.

    `dataset` and `root` take the place of the points' own, where all of them have the same.
    """
    points = study.points(scale)
    names = {point.config.data.name for point in points}
    if dataset is not None and len(names) > 1:
        raise UserError(f"this study has several data sets at this scale ({', '.join(sorted(names))}); none can stand "
                         f"in for all. Leave --dataset out.")  # fmt: skip
    points = tuple(_on_data(point, dataset, root and str(Path(root).expanduser())) for point in points)
    by_name = {point.name: point for point in points}
    assert len(by_name) == len(points), "two points of one name"
    folders = {name: out / "points" / f"{name}-{digest(point, by_name)}" for name, point in by_name.items()}
    return Plan(study, scale, points, out, folders)


def _on_data(point: Point, dataset: str | None, root: str | None) -> Point:
    """The point on the user's data set, and with the user's folder for all sets that it needs."""
    config = point.config
    told = {name: value for name, value in (("name", dataset), ("root", root)) if value is not None}
    data: DataConfig = dataclasses.replace(config.data, **told)
    fewshot = config.fewshot
    if root is not None and fewshot is not None and fewshot.dataset is not None:
        fewshot = dataclasses.replace(fewshot, root=root)
    return dataclasses.replace(point, config=dataclasses.replace(config, data=data, fewshot=fewshot))


# ------------------------------------------------------------------------------------------------- in one process


def work(plan: Plan, device: str = "auto") -> None:
    """Runs every point that nobody else has in hand until none is open; any number of processes may do so at once.

    A point that diverges does not stop the others. Raises StoppedError, ValueError and OSError as a run does.
    """
    while open_points := plan.open_points:
        if not any(_take(plan, point, device) for point in open_points):
            time.sleep(WAIT)


def _take(plan: Plan, point: Point, device: str) -> bool:
    """Runs the point, unless what it starts from is not there yet or another process has it in hand."""
    if point.start and not plan.finished(point.start):
        return False
    folder = plan.folders[point.name]
    claim = lock_file(folder.parent / ".claims" / folder.name)
    if claim is None:
        return False
    with claim:
        if not plan.finished(point.name) and not plan.failure(point.name):
            try:
                _run(plan, point, device)
            except NonFiniteError as error:
                write_json(folder / FAILED, {"why": str(error)})
    return True


def _run(plan: Plan, point: Point, device: str) -> None:
    """Brings one point to its end."""
    folder = plan.folders[point.name]
    if point.start is None:
        pretrain(point.config, folder, device=device, tensorboard=False)
    else:
        assert isinstance(point.config, FinetuneConfig), "what starts from another point fine-tunes it"
        start, size = plan.folders[point.start], point.config.model.image_size
        sweep_and_finetune(start, point.config, folder, image_size=size, device=device, tensorboard=False)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # nobody asks for them again


# -------------------------------------------------------------------------------------------------- on several


def run_study(plan: Plan, *, processes: int | None = None, device: str = "auto") -> dict[str, Any]:
    """Runs what is open of a study, writes its report to `plan.out` and returns what `study.json` there says.

    processes: None takes one for each core at the scale `tiny`, whose points compute with one thread each (so that
    their numbers do not depend on how many run at once), 4 that share the device at `gpu`, else 1.
    Raises StudyError where points diverged, StoppedError after a signal (the same call continues), and ValueError.
    """
    if processes is not None and processes < 1:
        raise UserError(f"processes is {processes}; at least 1 is needed.")
    choose_device(device)  # a device that is not there is refused before anything starts
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    count = processes or {"tiny": cores, "gpu": min(4, cores), "paper": 1}[plan.scale]
    if plan.open_points:
        plan.out.mkdir(parents=True, exist_ok=True)
        threads = 1 if plan.scale == "tiny" else max(1, cores // count)
        with _children(plan, min(count, len(plan.open_points)), device, threads) as children:
            _watch(plan, children)
    if failures := {point.name: why for point in plan.points if (why := plan.failure(point.name))}:
        lines = "\n".join(f"  {name}: {why}" for name, why in failures.items())
        raise StudyError(
            f"{len(failures)} of {len(plan.points)} points could not be finished:\n{lines}\nThe others are kept. "
            f"Remove a point's folder in {plan.out / 'points'} to try it again."
        )
    return write_report(plan.study, plan.scale, [plan.done(point) for point in plan.points], plan.out)


@contextlib.contextmanager
def _children(plan: Plan, count: int, device: str, threads: int) -> Iterator[list[BaseProcess]]:
    """Processes that work on the plan; none is left behind."""
    logs = [plan.out / f"worker-{number}.log" for number in range(count)]
    children: list[BaseProcess] = [SPAWN.Process(target=_child, args=(plan, device, threads, log)) for log in logs]
    try:
        for child in children:
            child.start()
        yield children
    finally:
        while alive := [child for child in children if child.is_alive()]:
            for child in alive:  # it saves, and ends; again, for between two runs a signal may be lost
                child.terminate()
            alive[0].join(WAIT)


def _child(plan: Plan, device: str, threads: int, log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        work(plan, device)
    except StoppedError as error:
        raise SystemExit(143) from error
    except (ValueError, OSError) as error:
        sys.stderr.write(f"vitlab: {error}\n")
        raise SystemExit(WRONG_INPUT) from error


def _end_with_parent() -> None:
    """Saves and ends this process once the one that started it is gone, however it ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    while True:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(WAIT)


def _watch(plan: Plan, children: list[BaseProcess]) -> None:
    """Shows what is finished until all children have ended."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    total, seen = len(plan.points), {point.name for point in plan.points if plan.finished(point.name)}
    with stop_signals() as asked_to_stop, Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(plan.study.name, total=total, completed=len(seen))
        running = True
        while running:
            if asked_to_stop.wait(WAIT):
                raise StoppedError(f"stopped and saved with {len(seen)} of {total} points done; the same command "
                                   f"continues.")  # fmt: skip
            running = any(child.is_alive() for child in children)  # before the look at what is finished
            for point in plan.points:
                if point.name not in seen and plan.finished(point.name):
                    seen.add(point.name)
                    bar.update(task, completed=len(seen))
                    console.print(f"{len(seen)}/{total} {point.name}: {_headline(plan.done(point))}", markup=False)
            for number, child in enumerate(children):
                if child.exitcode and not asked_to_stop.is_set():  # Ctrl-C reaches them as well
                    raise _failure(plan.out / f"worker-{number}.log", child.exitcode)


def _headline(done: Done) -> str:
    shown = [name for name in done.figures if name == "accuracy" or name.startswith("fewshot_")] or ["loss"]
    return ", ".join(f"{name} {done.figures[name]:.4f}" for name in shown)


def _failure(log: Path, code: int) -> Exception:
    """What a child that failed has said last, as the error that it is."""
    said = log.read_text(errors="replace").strip()
    if code == WRONG_INPUT:
        return UserError(said.rpartition("vitlab: ")[2])
    _, _, last = said.rpartition("\n")
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return StudyError(f"a process of the study {how}: {last} (all it said: {log}). The same command "
                      f"continues.")  # fmt: skip
