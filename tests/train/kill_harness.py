"""Kills a training run again and again, and compares its end with that of a run that was left alone.

    python tests/train/kill_harness.py --kills 25 [--seed 0] [--steps 600] [--workers 0] [--folder DIR]

The run uses everything that has a state or draws a random number: augmentation, mixup, dropout, micro-batches, warm-up,
clipping, Adam, Polyak average, evaluation. Each life of it ends by SIGKILL at a random moment after it took its folder
(while it loads, trains, evaluates, or writes a checkpoint or the result), and the same command starts it again.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from vitlab.models import ViTConfig
from vitlab.train.config import DataConfig, OptimConfig, TrainConfig


def settings(steps: int, workers: int) -> TrainConfig:
    """A small ViT on the handwritten digits, with everything on."""
    return TrainConfig(
        model=ViTConfig(
            image_size=16, patch_size=4, width=32, depth=2, heads=2, mlp_dim=64, num_classes=10, dropout=0.1
        ),
        data=DataConfig(name="digits", crop="inception", randaugment_layers=1, workers=workers),
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


def start(folder: Path, steps: int, workers: int = 0) -> subprocess.Popen[bytes]:
    """Starts the run in `folder`, or continues it; comes back when it has taken the folder."""
    command = [sys.executable, __file__, "--run", str(folder), "--steps", str(steps), "--workers", str(workers)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    lock = folder / ".lock"
    while process.poll() is None and not (lock.exists() and lock.read_text() == str(process.pid)):
        time.sleep(0.001)
    return process


def finish(process: subprocess.Popen[bytes]) -> str:
    """Waits for the end of a run; what it said on its error stream."""
    _, said = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the run ended with {process.returncode}:\n{said.decode()}")
    return said.decode()


@dataclass
class Kill:
    """One SIGKILL: the last step on record, and whether a checkpoint was half written."""

    step: int
    while_saving: bool


def kill_often(folder: Path, steps: int, workers: int, kills: int, seconds: float, seed: int) -> list[Kill]:
    """Runs to the end through up to `kills` kills; `seconds` is how long a run takes that is left alone."""
    rng = random.Random(seed)
    done = []
    while len(done) < kills:
        process = start(folder, steps, workers)
        try:
            process.wait(rng.uniform(0, 2 * seconds / kills))
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        done.append(Kill(last_step(folder), any((folder / "checkpoints").glob("tmp-step-*"))))
    finish(start(folder, steps, workers))
    return done


def last_step(folder: Path) -> int:
    """The step of the last whole record in metrics.jsonl; 0 if there is none."""
    log = folder / "metrics.jsonl"
    lines = [line for line in log.read_text().splitlines(keepends=True)] if log.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a finished run that must not depend on how often it was stopped."""
    kept = ("config.json", "metrics.jsonl", "result.json", "model/*", "checkpoints/*/*")
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for pattern in kept
        for path in sorted(folder.glob(pattern))
    }


def differing(one: Path, two: Path) -> list[str]:
    """Names of the files that are not the same in two finished runs, byte for byte."""
    a, b = contents(one), contents(two)
    assert {"metrics.jsonl", "result.json", "model/model.safetensors"} <= a.keys()
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def _train(folder: Path, steps: int, workers: int) -> int:
    import torch

    from vitlab.train.loop import StoppedError
    from vitlab.transfer.run import pretrain

    torch.set_num_threads(1)
    try:
        pretrain(settings(steps, workers), folder, device="cpu", tensorboard=False)
    except StoppedError as stopped:
        print(stopped, file=sys.stderr)
        return 143
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the two runs go, and stay")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)  # the command that is killed
    given = parser.parse_args()
    if given.run:
        return _train(given.run, given.steps, given.workers)

    folder = given.folder or Path(tempfile.mkdtemp())
    quiet, killed = folder / "quiet", folder / "killed"
    process, since = start(quiet, given.steps, given.workers), time.monotonic()
    finish(process)
    seconds = time.monotonic() - since
    kills = kill_often(killed, given.steps, given.workers, given.kills, seconds, given.seed)
    wrong = differing(quiet, killed)
    print(
        f"{len(kills)} kills in {given.steps} steps, at steps {', '.join(str(kill.step) for kill in kills)}; "
        f"{sum(kill.while_saving for kill in kills)} while a checkpoint was written. "
        f"{'DIFFERENT: ' + ', '.join(wrong) if wrong else f'All {len(contents(quiet))} files identical.'}"
    )
    if not given.folder:
        shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
