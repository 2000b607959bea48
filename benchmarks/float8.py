"""What `--float8` costs in accuracy: a small ViT trained with and without it, the same seeds for both.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/float8.py --out benchmarks/results/float8.json

Each run is a `pretrain` of a tiny recipe, shortened to `--epochs`, and its test. On a device without float8 units the
products are emulated, with the same rounding: that tells the accuracy, and nothing of the speed. A seed draws initial
weights, order and crops, so both runs of a seed begin alike. Told are mean and standard deviation of both, and the mean
of the differences with its bootstrap interval over seeds; few seeds carry little (`vitlab/studies/statistics.py`).
With `--runs FOLDER` the runs are kept there, and those that have ended are not made again.
"""

import contextlib
import dataclasses
import json
import math
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from circumstances import circumstances

from vitlab.config import TrainConfig
from vitlab.evaluate.load import choose_device
from vitlab.pipelines.pretrain import pretrain
from vitlab.recipes import tiny
from vitlab.studies.statistics import Estimate, interval
from vitlab.train.float8 import has_float8_units
from vitlab.train.precision import resolve_precision

WAYS = {"without": False, "with": True}
FIGURES = ("accuracy", "loss")


@dataclasses.dataclass(frozen=True)
class Arguments:
    recipe: Literal["digits", "fashion_mnist"] = "digits"
    """Of `vitlab.recipes.tiny`."""
    root: str | None = None
    """Folder that holds Fashion-MNIST; None means the cache folder."""
    epochs: float = 20.0
    seeds: int = 5
    precision: Literal["auto", "float32", "autocast", "bfloat16"] = "auto"
    """Of everything else, in both runs."""
    compile: bool = False
    device: str = "auto"
    runs: Path | None = None
    """Folder to keep the runs in; None throws them away."""
    out: Path | None = None
    """JSON file for the figures."""


def settings(arguments: Arguments, seed: int, float8: bool) -> TrainConfig:
    base = {"digits": tiny.digits, "fashion_mnist": tiny.fashion_mnist}[arguments.recipe]()
    return dataclasses.replace(
        base, data=dataclasses.replace(base.data, root=arguments.root), epochs=arguments.epochs, seed=seed,
        precision=arguments.precision, compile=arguments.compile, float8=float8,
    )  # fmt: skip


def measure(arguments: Arguments, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Figures of the test by way and seed."""
    found: dict[str, dict[str, list[float]]] = {way: {name: [] for name in FIGURES} for way in WAYS}
    for seed in range(arguments.seeds):
        for way, float8 in WAYS.items():
            ended = pretrain(
                settings(arguments, seed, float8), folder / f"{way}-{seed}", device=arguments.device, tensorboard=False
            )
            figures = ended.test.figures()
            for name, values in found[way].items():
                values.append(figures[name])
        print(f"seed {seed}: " + "; ".join(f"{way} float8 {told(found[way], seed)}" for way in WAYS), flush=True)
    return found


def told(figures: dict[str, list[float]], seed: int) -> str:
    return f"accuracy {figures['accuracy'][seed]:.4f}, loss {figures['loss'][seed]:.4f}"


def summary(found: dict[str, dict[str, list[float]]], name: str) -> dict[str, Any]:
    """Mean and standard deviation of both, and of what float8 adds the mean and its interval (none of one seed)."""
    both = {way: Estimate(tuple(found[way][name])) for way in WAYS}
    added = np.subtract(both["with"].values, both["without"].values)
    bounds = [bound if math.isfinite(bound) else None for bound in interval(added)]
    of_each = {way: {"mean": each.mean, "sd": each.sd} for way, each in both.items()}
    return {**of_each, "difference": {"mean": float(added.mean()), "interval": bounds, "of_each_seed": added.tolist()}}


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    device = choose_device(arguments.device)
    with contextlib.ExitStack() as stack:
        folder = arguments.runs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = measure(arguments, folder)
    summaries = {name: summary(found, name) for name in FIGURES}
    for name, each in summaries.items():
        means = ", ".join(f"{way} float8 {each[way]['mean']:.4f} (sd {each[way]['sd']:.4f})" for way in WAYS)
        low, high = each["difference"]["interval"]
        bounds = "no interval of one seed" if low is None else f"{low:+.4f} to {high:+.4f}, {arguments.seeds} seeds"
        print(f"{name}: {means}; float8 adds {each['difference']['mean']:+.4f} ({bounds})")
    if arguments.out is not None:
        import torchao  # the runs have imported it

        about = {
            "precision": resolve_precision(arguments.precision, device),
            "products": "in float8" if has_float8_units(device) else "emulated: rounded to float8, made in float32",
        }
        record = {
            "circumstances": circumstances(arguments, torch, torchao, **about), "results": summaries, "runs": found,
        }  # fmt: skip
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
