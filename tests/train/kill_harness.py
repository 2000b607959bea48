"""Kills a training run again and again, and compares its end with that of a run that was left alone.

    python tests/train/kill_harness.py --kills 25 [--steps 600] [--seed 0] [--folder DIR] [--masked | --compile]
        [--processes 2]

The run uses everything that has a state or draws a random number: augmentation, mixup, dropout, micro-batches,
warm-up, clipping, Adam, Polyak average, evaluation. Each of its lives is a fresh process, ended by SIGKILL at a
random moment after it took its folder, while it loads, trains, evaluates, or writes a checkpoint or the result. With
several processes a life is all of them; one is killed, and the others have to end by themselves. With --compile half
of the lives end while the model is compiled. At the end no file of a killed life may be left.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from vitlab.config import DataConfig, MaskingConfig, OptimConfig, TrainConfig
from vitlab.models import ViTConfig

IMPORTS = ["torch._dynamo", "sklearn.datasets", "vitlab.pipelines.pretrain"]
"""What takes a run seconds to import."""


def settings(steps: int) -> TrainConfig:
    """A small ViT on the handwritten digits, with everything on."""
    return TrainConfig(
        model=ViTConfig(
            image_size=16, patch_size=4, width=32, depth=2, heads=2, mlp_dim=64, num_classes=10, dropout=0.1
        ),
        data=DataConfig(name="digits", crop="inception", min_area=0.3, flip=False, randaugment_layers=1),
        optim=OptimConfig(lr=2e-3, weight_decay=0.05, warmup_steps=20, clip_norm=1.0),
        label_smoothing=0.1,
        mixup=0.2,
        steps=steps,
        batch_size=48,
        microbatch=20,
        average_decay=0.99,
        seed=1,
        log_every=2,
        eval_every=25,
        checkpoint_every=3,
        keep_checkpoints=2,
    )


def masked(steps: int) -> TrainConfig:
    """The same in masked patch prediction, which draws what it hides from every example's own numbers."""
    config = settings(steps)
    return replace(
        config, model=replace(config.model, num_classes=0), label_smoothing=0.0, mixup=0.0, masking=MaskingConfig()
    )


def compiled(steps: int) -> TrainConfig:
    """The same with a model of one block, compiled for one shape."""
    config = settings(steps)
    return replace(config, model=replace(config.model, depth=1), compile=True, microbatch=None, checkpoint_every=1)


def live(config: TrainConfig, folder: Path, place: dict[str, str]) -> None:
    """One life of the run, or one of its processes; what it says goes to a file beside its folder. `place` is what
    torchrun would tell it."""
    os.environ.update(place)
    for name in IMPORTS:  # before the folder is taken, so that kills find the run at work
        importlib.import_module(name)
    import torch

    from vitlab.pipelines.pretrain import pretrain
    from vitlab.train.distributed import RankError, init_distributed
    from vitlab.train.signals import StoppedError

    sys.stderr = folder.with_suffix(".log").open("a", buffering=1)
    torch.set_num_threads(1)
    try:
        with init_distributed() as world:
            pretrain(config, folder, device="cpu", tensorboard=False, world=world)
    except (StoppedError, RankError) as stopped:
        sys.stderr.write(f"{stopped}\n")
        sys.exit(143 if isinstance(stopped, StoppedError) else 1)


def places(count: int) -> list[dict[str, str]]:
    """What torchrun tells each of `count` processes; nothing where there is one."""
    if count == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(count)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


@dataclass(frozen=True)
class Life:
    """The processes of one start."""

    processes: list[BaseProcess]

    @property
    def pid(self) -> int | None:
        """Of the process that takes the folder."""
        return self.processes[0].pid

    @property
    def exitcode(self) -> int | None:
        return self.processes[0].exitcode

    def is_alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def join(self, timeout: float | None = None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        for process in self.processes:
            process.join(None if end is None else max(0.0, end - time.monotonic()))

    def terminate(self) -> None:
        self.processes[-1].terminate()

    def kill(self, which: int = 0) -> float:
        """Kills one process; returns how many seconds the others took to end."""
        since = time.monotonic()
        self.processes[which].kill()
        self.join(60)
        assert not self.is_alive(), "a process outlives its fellow by a minute"
        return time.monotonic() - since


@dataclass(frozen=True)
class Run:
    """A run that can be started and stopped; `processes` says how a life of it begins."""

    config: TrainConfig
    folder: Path
    processes: SpawnContext | ForkServerContext
    count: int = 1
    """Processes of a life."""

    def start(self) -> Life:
        """Begins a life; comes back when it has taken the folder (or ended)."""
        life = Life([
            self.processes.Process(target=live, args=(self.config, self.folder, place)) for place in places(self.count)
        ])  # fmt: skip
        for process in life.processes:
            process.start()
        lock = self.folder / ".lock"
        while life.is_alive() and not (lock.exists() and lock.read_text() == str(life.pid)):
            time.sleep(0.001)
        return life

    def finish(self) -> float:
        """Lives to the end; returns the seconds from taking the folder."""
        life, since = self.start(), time.monotonic()
        life.join()
        assert life.exitcode == 0, self.said()
        return time.monotonic() - since

    def kill_often(self, kills: int, seconds: float, seed: int) -> list["Kill"]:
        """Lives to the end through up to `kills` kills; `seconds` is how long an unharmed run takes.

        A life lasts some steps, so that a busy machine kills as often as an idle one, and then a moment; one in
        four lasts until a checkpoint is being written, which chance would seldom hit.
        """
        rng = random.Random(seed)
        steps = self.config.steps or 0
        done: list[Kill] = []
        while len(done) < kills:
            reached = self.last_step()
            until = reached + rng.uniform(-3, 2 * (steps - reached) / (kills - len(done) + 1))
            moment, aimed = rng.uniform(0, 3 * seconds / steps), rng.random() < 0.25
            compiling = self.config.compile and len(done) % 2 == 0  # every other kill hits a compiled run's first step
            if self.config.compile:
                moment, aimed = (rng.uniform(0, seconds / 2), False) if compiling else (rng.uniform(0, 0.1), aimed)
            life, since = self.start(), time.monotonic()
            if compiling:  # which takes a tenth as long where an earlier life has compiled
                while life.is_alive() and time.monotonic() - since < moment and self.last_step() <= reached:
                    time.sleep(0.001)
                moment = 0
            else:
                while life.is_alive() and self.last_step() < until:
                    time.sleep(0.001)
            while aimed and life.is_alive() and not self.is_saving():
                pass
            life.join(0 if aimed else moment)
            if not life.is_alive():
                break
            which = len(done) % self.count
            took = life.kill(which)
            done.append(Kill(self.last_step(), self.is_saving(), which, took))
        self.finish()
        return done

    def last_step(self) -> int:
        """The step of the last whole record in metrics.jsonl; 0 if there is none."""
        log = self.folder / "metrics.jsonl"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)

    def is_saving(self) -> bool:
        """Whether a checkpoint is half written."""
        return any((self.folder / "checkpoints").glob("tmp-step-*"))

    def said(self) -> str:
        """All that its lives have said."""
        log = self.folder.with_suffix(".log")
        return log.read_text() if log.exists() else ""


@dataclass(frozen=True)
class Kill:
    """One SIGKILL: the last step on record, and whether a checkpoint was half written."""

    step: int
    while_saving: bool
    process: int
    seconds: float
    """Until all the others had ended."""


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a finished run that must not depend on how often it was stopped."""
    kept = ["config.json", "metrics.jsonl", "result.json", "predictions.csv", "model/*"]
    kept += ["checkpoints/*/*", "masking.safetensors", "*.png"]
    paths = [path for pattern in kept for path in folder.glob(pattern)]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def leftovers(folder: Path) -> list[str]:
    """Files and folders below `folder` that only a killed life can have left."""
    patterns = (".*.new", ".*.old", "tmp-*", "*.tmp", "vitlab-job-*")
    return sorted({path.relative_to(folder).as_posix() for pattern in patterns for path in folder.rglob(pattern)})


def differing(one: Path, two: Path) -> list[str]:
    """Names of the files that are not the same in two finished runs, byte for byte."""
    a, b = contents(one), contents(two)
    assert {"metrics.jsonl", "result.json", "model/model.safetensors"} <= a.keys()
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--masked", action="store_true", help="masked patch prediction instead of classes")
    parser.add_argument(
        "--compile", action="store_true", help="a compiled model; about half the kills while it compiles"
    )
    parser.add_argument("--processes", type=int, default=1, help="of each run")
    parser.add_argument("--folder", type=Path, help="an empty folder for the two runs")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(IMPORTS)
    make = compiled if given.compile else masked if given.masked else settings
    quiet = Run(make(given.steps), folder / "quiet", processes, given.processes)
    seconds = quiet.finish()
    shutil.rmtree(folder / "cache", ignore_errors=True)  # or the second run had nothing to compile
    killed = Run(quiet.config, folder / "killed", processes, given.processes)
    kills = killed.kill_often(given.kills, seconds, given.seed)
    wrong, left = differing(quiet.folder, killed.folder), leftovers(folder)
    steps = ", ".join(str(kill.step) for kill in kills)
    sys.stdout.write(
        f"{len(kills)} kills in {given.steps} steps (at {steps}), {sum(kill.while_saving for kill in kills)} of "
        f"them while a checkpoint was written, {sum(kill.process > 0 for kill in kills)} of another process than the "
        f"first; the others ended within {max((kill.seconds for kill in kills), default=0):.1f} s: "
        f"{'DIFFERENT ' + ', '.join(wrong) if wrong else f'all {len(contents(quiet.folder))} files identical'}, "
        f"{'LEFT ' + ', '.join(left) if left else 'no leftover file'}\n"
    )
    return 1 if wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())
