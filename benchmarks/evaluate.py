"""Images/s of `vitlab evaluate` from files to figures, by the numbers that the model computes in.

    python benchmarks/evaluate.py shards:data/flowers102 --out benchmarks/results/evaluate.json

A model with random weights and a head for the data set's classes evaluates the same images through `evaluate`, in each
precision in turn, round after round; `reading` is the same without a model: images decoded and brought to size.
"""

import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from run_record import describe_run

from vitlab.data.loader import eval_batches
from vitlab.data.registry import load_dataset
from vitlab.data.transforms import EvalTransform
from vitlab.evaluation.accuracy import evaluate
from vitlab.evaluation.load import load_for_evaluation
from vitlab.evaluation.options import EvalOptions
from vitlab.models import create_model
from vitlab.weights import save_model


@dataclasses.dataclass(frozen=True)
class Arguments:
    data: tyro.conf.Positional[str]
    """Photographs: `folder:PATH` or `shards:PATH`."""
    split: str = "test"
    model: str = "ViT-S/16"
    size: int = 224
    images: int = 64
    """How many of them, the first ones, are evaluated."""
    batch_size: int = 32
    workers: int = 0
    rounds: int = 7
    """Timed rounds of each, in turn, after one that is not counted."""
    device: str = "cpu"
    threads: int | None = None
    out: Path | None = None
    """JSON file for the figures."""


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    dataset = load_dataset(arguments.data, arguments.split)
    dataset = dataset.take(np.arange(min(arguments.images, len(dataset))))
    model = create_model(
        arguments.model, generator=torch.Generator().manual_seed(0), num_classes=len(dataset.classes),
        image_size=arguments.size,
    )  # fmt: skip
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder) / "model")
        loaders = {
            name: EvalOptions(
                precision=name, device=arguments.device, batch_size=arguments.batch_size, workers=arguments.workers
            )
            for name in ("float32", "bfloat16")
        }
        models = {name: load_for_evaluation(Path(folder) / "model", each).model for name, each in loaders.items()}
    place = torch.device(arguments.device)
    options: dict[str, Any] = {"batch_size": arguments.batch_size, "workers": arguments.workers, "device": place}
    size = (arguments.size, arguments.size)
    rates: dict[str, list[float]] = {name: [] for name in (*models, "reading")}
    results = {}
    for turn in range(arguments.rounds + 1):
        for name in rates:
            since = time.perf_counter()
            if name == "reading":
                for _ in eval_batches(dataset, EvalTransform(size), **options):
                    pass
            else:
                results[name] = evaluate(models[name], dataset, size, loaders[name])
            if turn:  # the first round warms up
                rates[name].append(len(dataset) / (time.perf_counter() - since))
    paired = [ours / exact for ours, exact in zip(rates["bfloat16"], rates["float32"], strict=True)]
    agree = float((results["bfloat16"].predictions == results["float32"].predictions).mean())
    figures = {
        "environment": describe_run(arguments, torch),
        "images_per_s": {name: {"median": statistics.median(each), "all": each} for name, each in rates.items()},
        "bfloat16_over_float32": {"median": statistics.median(paired), "least": min(paired), "most": max(paired)},
        "same_answer": agree,
    }
    for name, each in rates.items():
        print(f"{name:8}  {statistics.median(each):7.2f} images/s ({min(each):.2f} to {max(each):.2f})")
    text = f"{statistics.median(paired):.2f} ({min(paired):.2f} to {max(paired):.2f})"
    print(f"bfloat16 over float32: {text}; same prediction {agree:.1%}")
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
