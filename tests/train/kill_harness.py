"""Kills a training run again and again, and compares its end with that of a run that was not stopped.

    python tests/train/kill_harness.py --kills 25 [--steps 600] [--seed 0] [--folder DIR] [--masked | --compile]
        [--processes 2]

The run uses everything that has a state or draws a random number: augmentation, mixup, dropout, micro-batches,
warm-up, clipping, Adam, Polyak average, evaluation. Each start is a new process, ended by SIGKILL at a random moment
after it locked its folder, while it loads, trains, evaluates, or writes a checkpoint or the result. Of several
processes one is killed, and the others have to end by themselves. With --compile half of the kills come while the model
is compiled. At the end no temporary file may be left.
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
from multiprocessing.context import ForkContext, ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from vitlab.config import DataConfig, MaskingConfig, OptimConfig, TrainConfig
from vitlab.models import ViTConfig

IMPORTS = ["torch._dynamo", "sklearn.datasets", "vitlab.runs.pretrain"]
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
    """The same in masked patch prediction, whose corruption is drawn for every example."""
    config = settings(steps)
    model = replace(config.model, num_classes=0)
    return replace(config, model=model, label_smoothing=0.0, mixup=0.0, masking=MaskingConfig())


def compiled(steps: int) -> TrainConfig:
    """The same with a model of one block, compiled for one shape."""
    config = settings(steps)
    return replace(config, model=replace(config.model, depth=1), compile=True, microbatch=None, checkpoint_every=1)


def train_process(config: TrainConfig, folder: Path, environment: dict[str, str]) -> None:
    """One process of the run; its messages go to FOLDER.log. `environment` is as from torchrun."""
    os.environ.update(environment)
    for name in IMPORTS:  # before the folder is locked, so that kills hit the run at work
        importlib.import_module(name)
    import torch

    from vitlab.runs.pretrain import pretrain
    from vitlab.train.distributed import RankError, init_distributed

    sys.stderr = folder.with_suffix(".log").open("a", buffering=1)
    torch.set_num_threads(1)
    try:
        with init_distributed() as world:
            pretrain(config, folder, device="cpu", tensorboard=False, world=world)
    except RankError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)


def environments(count: int) -> list[dict[str, str]]:
    """torchrun's variables for each of `count` processes; none for a single one."""
    if count == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(count)}
    return [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


@dataclass(frozen=True)
class Kill:
    """One SIGKILL: the last recorded step, and whether a checkpoint was half written."""

    step: int
    while_saving: bool
    process: int
    seconds: float
    """Until all the others had ended."""


@dataclass(frozen=True)
class Run:
    """A run that can be started and killed; each start is `count` processes of `context`."""

    config: TrainConfig
    folder: Path
    context: ForkContext | ForkServerContext
    count: int = 1

    def start(self) -> list[BaseProcess]:
        """Starts the processes; returns when rank 0 has locked the folder (or ended)."""
        started: list[BaseProcess] = [
            self.context.Process(target=train_process, args=(self.config, self.folder, environment))
            for environment in environments(self.count)
        ]
        for process in started:
            process.start()
        lock = self.folder / ".lock"
        while is_alive(started) and not (lock.exists() and lock.read_text() == str(started[0].pid)):
            time.sleep(0.001)
        return started

    def finish(self) -> float:
        """Runs to the end; returns the seconds since the folder was locked."""
        started, since = self.start(), time.monotonic()
        for process in started:
            process.join()
        assert started[0].exitcode == 0, self.folder.with_suffix(".log").read_text()
        return time.monotonic() - since

    def kill_often(self, kills: int, seconds: float, seed: int) -> list[Kill]:
        """Runs to the end through up to `kills` kills; `seconds` is the duration of an undisturbed run.

        A start is killed some steps and a moment later, so that a busy machine kills as often as an idle one; one in
        four is killed while a checkpoint is written, which chance would seldom hit.
        """
        rng, steps = random.Random(seed), self.config.steps or 0
        done: list[Kill] = []
        while len(done) < kills:
            first = self.last_step()
            until = first + rng.uniform(-3, 2 * (steps - first) / (kills - len(done) + 1))
            pause, saving = rng.uniform(0, 3 * seconds / steps), rng.random() < 0.25
            compiling = self.config.compile and len(done) % 2 == 0  # every other kill hits a compiled run's first step
            if self.config.compile:
                pause, saving = (rng.uniform(0, seconds / 2), False) if compiling else (rng.uniform(0, 0.1), saving)
            started, since = self.start(), time.monotonic()
            if compiling:  # which takes a tenth as long where an earlier start has compiled
                while is_alive(started) and time.monotonic() - since < pause and self.last_step() <= first:
                    time.sleep(0.001)
            else:
                while is_alive(started) and self.last_step() < until:
                    time.sleep(0.001)
                while saving and is_alive(started) and not self.is_saving():
                    pass
                started[0].join(0 if saving else pause)
            if not is_alive(started):
                break
            which, since = len(done) % self.count, time.monotonic()
            started[which].kill()
            for process in started:
                process.join(60)
            assert not is_alive(started), "a process outlives the killed one by a minute"
            done.append(Kill(self.last_step(), self.is_saving(), which, time.monotonic() - since))
        self.finish()
        return done

    def last_step(self) -> int:
        """The step of the last complete record in metrics.jsonl; 0 if there is none."""
        log = self.folder / "metrics.jsonl"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)

    def is_saving(self) -> bool:
        """Whether a checkpoint is half written."""
        return any((self.folder / "checkpoints").glob("tmp-step-*"))


def is_alive(processes: list[BaseProcess]) -> bool:
    return any(process.is_alive() for process in processes)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a finished run that must not depend on how often it was stopped."""
    patterns = ["config.json", "metrics.jsonl", "result.json", "predictions.csv", "model/*", "checkpoints/*/*"]
    paths = [path for pattern in [*patterns, "masking.safetensors", "*.png"] for path in folder.glob(pattern)]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def leftovers(folder: Path) -> list[str]:
    """Temporary files and folders below `folder`."""
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
    parser.add_argument("--compile", action="store_true", help="a compiled model; half the kills while it compiles")
    parser.add_argument("--processes", type=int, default=1, help="of each run")
    parser.add_argument("--folder", type=Path, help="an empty folder for the two runs")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    make = compiled if options.compile else masked if options.masked else settings
    straight = Run(make(options.steps), folder / "straight", context, options.processes)
    seconds = straight.finish()
    shutil.rmtree(folder / "cache", ignore_errors=True)  # or the second run had nothing to compile
    killed = Run(straight.config, folder / "killed", context, options.processes)
    kills = killed.kill_often(options.kills, seconds, options.seed)
    wrong, left = differing(straight.folder, killed.folder), leftovers(folder)
    steps = ", ".join(str(kill.step) for kill in kills)
    sys.stdout.write(
        f"{len(kills)} kills in {options.steps} steps (at {steps}), {sum(kill.while_saving for kill in kills)} while a "
        f"checkpoint was written, {sum(kill.process > 0 for kill in kills)} of a rank other than 0; the others ended "
        f"within {max((kill.seconds for kill in kills), default=0):.1f} s: "
        f"{'DIFFERENT ' + ', '.join(wrong) if wrong else f'all {len(contents(straight.folder))} files identical'}, "
        f"{'LEFT ' + ', '.join(left) if left else 'no temporary file left'}\n"
    )
    return 1 if wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())
