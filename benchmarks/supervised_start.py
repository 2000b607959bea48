"""Sec. 4.6: the fine-tuning of the study `masking` from a supervised pre-training on other images, Fashion-MNIST.

    python benchmarks/supervised_start.py --data shards:data/cifar10 --out benchmarks/results/supervised_start.json

Model, steps and fine-tuning are the study's; its other starts are recorded in `vitlab/paper/recorded/masking.json`.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import tyro
from run_record import describe_run

from vitlab.cost.measure import spread
from vitlab.finetuning.protocol import sweep_and_finetune
from vitlab.runs.pretrain import pretrain
from vitlab.studies.masking import BEST, MASKING
from vitlab.studies.spec import changed


@dataclasses.dataclass(frozen=True)
class Arguments:
    data: str = "cifar10"
    """Where CIFAR-10 is."""
    root: str | None = None
    """Folder that holds Fashion-MNIST."""
    seeds: tuple[int, ...] = (0, 1, 2)
    workdir: Path = Path("runs/supervised-start")
    out: Path | None = None
    """JSON file for the figures."""


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    runs = {run.name: run.config for run in MASKING.variants("small")}
    masked, after = runs[BEST], runs[f"{BEST}.finetuned"]
    data = {"name": "fashion_mnist", "root": arguments.root}
    supervised = changed(masked, masking=None, data=data)
    accuracies: dict[str, list[float]] = {"pre-training": [], "fine-tuned": []}
    for seed in arguments.seeds:
        folder = arguments.workdir / f"seed-{seed}"
        result: Any = pretrain(changed(supervised, seed=seed), folder / "pretrained").result
        accuracies["pre-training"].append(result["test"]["accuracy"])
        config: Any = changed(after, seed=seed, data={"name": arguments.data})
        tuned = sweep_and_finetune(folder / "pretrained", config, folder / "finetuned").result
        accuracies["fine-tuned"].append(tuned["test"]["accuracy"])
        print(f"seed {seed}:", {name: f"{values[-1]:.2%}" for name, values in accuracies.items()}, flush=True)
    record = {"environment": describe_run(arguments, torch), **{k: spread(v) for k, v in accuracies.items()}}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
