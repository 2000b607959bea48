"""Images/s of models of the paper beside the same in timm and Hugging Face, interleaved in one process.

    python benchmarks/peer_speed.py ViT-S/16 ViT-B/16 --batch 8 --out peer_speed.json

The ratio counts: what disturbs the machine disturbs all contenders alike. `ceiling` are the products alone.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from peer_models import OURS, PEERS, build
from run_record import describe_run
from tyro.conf import Positional

from vitlab.cost import measure
from vitlab.cost.step import Mode, StepSpec
from vitlab.models import get_config
from vitlab.train.precision import keep_freed_memory

CEILING = "ceiling"


@dataclass(frozen=True)
class Arguments:
    models: Positional[tuple[str, ...]]
    peers: tuple[str, ...] = tuple(PEERS)
    mode: Mode = "infer"
    size: int = 224
    batch: int = 8
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    compile: bool = False
    """Compile all contenders, or none."""
    seconds: float = 1.5
    """Length of a round of one contender."""
    rounds: int = 7
    device: str = "cpu"
    out: Path | None = None
    """JSON file for the figures."""


def compare(given: Arguments, model: str) -> dict[str, Any]:
    """All contenders on one model, in turn: images/s, and our speed over each of the others."""
    config, device = get_config(model, image_size=given.size), torch.device(given.device)
    spec = StepSpec(config, given.mode, given.batch, given.dtype, given.compile, given.device)
    steps: dict[str, measure.Step] = {name: build(name, spec) for name in (OURS, *given.peers)}
    products = measure.count_products(config, given.batch, given.mode == "train", attention=device.type == "cpu")
    steps[CEILING] = measure.products_step(products, getattr(torch, given.dtype), device)
    rates = measure.time_interleaved(steps, given.seconds, given.rounds)
    speeds = {name: measure.spread([given.batch * rate for rate in per_round]) for name, per_round in rates.items()}
    ratios = {name: measure.ratio(rates[OURS], rates[name]) for name in rates if name != OURS}
    return {"model": model, "images_per_s": speeds, "ratio": ratios}


def main() -> None:
    given = tyro.cli(Arguments, description=__doc__)
    if given.device == "cpu":
        keep_freed_memory()  # for all contenders alike
    record: dict[str, Any] = {"environment": describe_run(given, torch), "results": []}
    for model in given.models:
        result = compare(given, model)
        record["results"].append(result)
        print(f"{model}: {result['images_per_s'][OURS]['median']:.4g} images/s")
        for name, ratio in result["ratio"].items():
            low, high = ratio["quartiles"]
            print(f"  vitlab / {name}: {ratio['median']:.2f} ({low:.2f} to {high:.2f})")
        if given.out is not None:
            given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
