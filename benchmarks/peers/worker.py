"""One contender of `finetune_peers.py` in a process of its own: trains, tests, and prints one JSON line.

Run by the interpreter of the contender's environment: it needs the standard library and what the contender itself
needs. The clock starts with the process, so that imports count.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from job import Examples, Fitted, Job
from learners import fit_autogluon, fit_fastai
from loops import fit_huggingface, fit_timm

STARTED = time.time()
HEAD_VIEWS = 4
"""Augmented views of an image for the least-squares head of vitlab, its default."""
HEAD_IMAGES = 5_000
"""Training images at most that pass through this head: those that it is fitted to, and those held out."""
REFIT_EPOCHS = 5
"""Epochs from which the final run of vitlab trains again."""
FACTORS = (0.3, 1.0, 3.0)
"""The learning rates that a sweep tries, over the default."""
PACKAGES = {
    "vitlab": ["vitlab", "torch"],
    "huggingface": ["transformers", "accelerate", "torch"],
    "timm": ["timm", "torch"],
    "fastai": ["fastai", "timm", "torch"],
    "autogluon": ["autogluon.multimodal", "timm", "torch"],
}
FITS = {"huggingface": fit_huggingface, "timm": fit_timm, "fastai": fit_fastai, "autogluon": fit_autogluon}


def run_vitlab(job: Job, folder: Path) -> dict[str, Any]:
    """`vitlab finetune` with its defaults in the time that is left, which choose the image size.

    By images: at the peers' size, and as many steps that all passes over training images count: those of the
    least-squares head (without augmented views where they would be too many), of the run that is compared with it, and
    of the final one, if that trains again. Nothing is cached.
    """
    with tempfile.TemporaryDirectory() as out:
        if job.images is None:
            amount = ["--budget", f"{job.deadline - time.time():.0f}s"]
        else:
            count = len(job.examples)
            views = HEAD_VIEWS if job.images > (1 + HEAD_VIEWS) * count else None
            left = job.images - (1 + (views or 0)) * min(count, HEAD_IMAGES)
            refit = left // 2 >= REFIT_EPOCHS * count
            amount = ["--image-size", str(job.image_size), "--head-views", str(views), "--batch-size", "32"]
            amount += ["--steps", str(left // 64 if refit else left // 32)]
        command = [
            sys.executable, "-m", "vitlab", "finetune", str(job.checkpoints / "huggingface"), "--dataset",
            f"folder:{folder}", "--seed", str(job.seed), "--json", "--workdir", f"{out}/run", *amount,
        ]  # fmt: skip
        environment = os.environ | {"XDG_CACHE_HOME": f"{out}/cache"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        result = json.loads(Path(out, "run", "result.json").read_text())
        settings = json.loads(Path(out, "run", "config.json").read_text())
    runs = len(result["sweep"]) + settings["refit"] * len(result["runs"])
    steps = settings["steps"] if runs else 0
    images = runs * steps * settings["batch_size"]
    images += result["linear"]["fitted_images"] * (1 + (settings["head_views"] or 0))
    row = {"accuracy": result["test"]["accuracy"], "steps": steps, "images_seen": images}
    return row | {"chosen_size": settings["model"]["image_size"], "part": settings["data"]["subset_fraction"]}


def read_split(folder: Path, classes: list[str]) -> Examples:
    return [(path, label) for label, name in enumerate(classes) for path in sorted((folder / name).glob("*"))]


def accuracy_of(fitted: Fitted, examples: Examples) -> float:
    predicted = fitted.predict([path for path, _ in examples])
    return sum(p == label for p, (_, label) in zip(predicted, examples, strict=True)) / len(examples)


def sweep(job: Job, fit: Callable[[Job], Fitted]) -> tuple[Fitted, dict[str, Any]]:
    """The best of three learning rates on a fifth of each class; each rate has a third of the time."""
    groups: dict[int, list[tuple[Path, int]]] = {}
    for example in random.Random(job.seed).sample(job.examples, len(job.examples)):
        groups.setdefault(example[1], []).append(example)
    counts = {label: max(1, round(len(group) / 5)) for label, group in groups.items()}
    held_out = [example for label, group in groups.items() for example in group[: counts[label]]]
    kept = [example for label, group in groups.items() for example in group[counts[label] :]]
    best, score, factor, steps, images = None, -1.0, 1.0, 0, 0
    for left, tried in zip((3, 2, 1), FACTORS, strict=True):
        until = time.time() + (job.deadline - time.time()) / left
        reserve = len(held_out) + job.reserve // left
        part = dataclasses.replace(job, examples=kept, deadline=until, reserve=reserve, factor=tried)
        fitted = fit(part)
        steps, images = steps + fitted.steps, images + fitted.images
        if (reached := accuracy_of(fitted, held_out)) > score:
            best, score, factor = fitted, reached, tried
    assert best is not None
    return best, {"steps": steps, "images_seen": images, "rate_factor": factor, "held_out_accuracy": score}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=PACKAGES)
    parser.add_argument("variant", choices=("time", "default", "sweep", "images"))
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--amount", type=float, required=True, help="seconds; of the variant `images`, images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--bfloat16", action="store_true")
    given = parser.parse_args()
    by_images = given.variant == "images"
    classes = sorted(folder.name for folder in (given.data / "train").iterdir())
    test = read_split(given.data / "test", classes)
    job = Job(
        given.checkpoints, classes, read_split(given.data / "train", classes), given.image_size, given.seed,
        given.bfloat16, deadline=math.inf if by_images else STARTED + given.amount, reserve=len(test),
        images=int(given.amount) if by_images else None, epochs=3 if given.variant == "default" else math.inf,
    )  # fmt: skip
    if given.contender == "vitlab":
        row = run_vitlab(job, given.data)
    elif given.variant == "sweep":
        fitted, counts = sweep(job, FITS[given.contender])
        row = {"accuracy": accuracy_of(fitted, test), **counts}
    else:
        fitted = FITS[given.contender](job)
        row = {"accuracy": accuracy_of(fitted, test), "steps": fitted.steps, "images_seen": fitted.images}
    versions = {package: importlib.metadata.version(package) for package in PACKAGES[given.contender]}
    row = {"contender": given.contender, "variant": given.variant, **row, "versions": versions}
    print(json.dumps(row | {"seconds": round(time.time() - STARTED, 1)}), flush=True)


if __name__ == "__main__":
    main()
