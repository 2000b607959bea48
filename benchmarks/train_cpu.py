"""Images/s of our training step against timm's on the same CPU, interleaved in one process; the ratio is what counts.

    python benchmarks/train_cpu.py --rounds 7 --out benchmarks/results/train_cpu.json

What `peer_speed.py --mode train` does, for shapes that are no model of the paper: one for images of
CIFAR's size, and two with timm's exact GELU. Both train on the same batch with AdamW, gradients clipped at 1,
cross-entropy, in bfloat16 or float32:

- `vitlab`: the step of `vitlab.train.loop` as `vitlab pretrain` runs it.
- `timm`: the same model in timm, in bfloat16 under torch.autocast, as timm's own training script runs it on a CPU; once
  with torch's fused attention, its default, and once without.

The allocator's thresholds, which vitlab sets for itself, are a property of the process: timm has them as well.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import timm
import torch
import tyro
from peer_models import OURS, build
from run_record import describe_run
from timm.layers.config import set_fused_attn

from vitlab.cost.measure import count_products, products_step, ratio, spread, time_interleaved
from vitlab.cost.step import StepSpec
from vitlab.models.config import ViTConfig
from vitlab.models.variant import override
from vitlab.train.cpu_speed import cpu_is_faster_in_bfloat16
from vitlab.train.precision import keep_freed_memory

# The exact GELU, because it is timm's.
SHAPES = {
    "cifar": (
        override(
            ViTConfig(),
            image_size=32,
            patch_size=4,
            width=192,
            depth=9,
            heads=3,
            mlp_dim=768,
            num_classes=10,
            gelu="erf",
        ),
        128,
    ),
    "Ti/16": (override(ViTConfig(), width=192, depth=12, heads=3, mlp_dim=768, gelu="erf"), 16),
    "S/16": (override(ViTConfig(), width=384, depth=12, heads=6, mlp_dim=1536, gelu="erf"), 16),
}
CEILING = "ceiling"
TIMM = {"timm, fused attention": True, "timm, plain attention": False}
"""timm's default, and the same with its fused attention turned off."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    shapes: tuple[str, ...] = ("cifar", "S/16")
    """Of: cifar, Ti/16, S/16."""
    rounds: int = 7
    """Timed rounds of each contender, in turn."""
    seconds: float = 3.0
    """Least length of a round."""
    threads: int = 2
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` is what is faster on this CPU."""
    compile: bool = False
    """Compile all contenders, or none."""
    out: Path | None = None
    """JSON file for the figures."""


def compare(name: str, arguments: Arguments) -> dict[str, Any]:
    """All contenders on one shape, in turn; medians, quartiles and ratios."""
    config, size = SHAPES[name]
    dtype = ("bfloat16" if cpu_is_faster_in_bfloat16() else "float32") if arguments.dtype == "auto" else arguments.dtype
    spec = StepSpec(config, "train", size, dtype, arguments.compile)
    steps = {OURS: build(OURS, spec)}
    for contender, fused in TIMM.items():
        set_fused_attn(fused)  # read when a model is built
        steps[contender] = build("timm", spec)
    ceiling = products_step(count_products(config, size, training=True), getattr(torch, dtype), torch.device("cpu"))
    rates = time_interleaved(steps | {CEILING: ceiling}, arguments.seconds, arguments.rounds)
    speeds = {contender: spread([size * rate for rate in of_rounds]) for contender, of_rounds in rates.items()}
    flops = 6 * config.forward_macs
    return {
        "shape": name,
        "batch": size,
        "images_per_s": speeds,
        "dtype": dtype,
        "ratio": {contender: ratio(rates[OURS], rates[contender]) for contender in TIMM},
        "vitlab_tflops": speeds[OURS]["median"] * flops / 1e12,
        "ceiling_tflops": speeds[CEILING]["median"] * flops / 1e12,
    }


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    for name in arguments.shapes:
        if name not in SHAPES:
            raise SystemExit(f"unknown shape {name!r}; allowed: {', '.join(SHAPES)}.")
    keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    results = []
    for name in arguments.shapes:
        result = compare(name, arguments)
        results.append(result)
        text = ", ".join(f"{contender} {speed['median']:.1f}" for contender, speed in result["images_per_s"].items())
        print(f"{name}: images/s {text}")
        for peer, ratio_of_peer in result["ratio"].items():
            low, high = ratio_of_peer["quartiles"]
            print(f"  vitlab / {peer}: {ratio_of_peer['median']:.2f} ({low:.2f} to {high:.2f})")
        print(f"  {result['vitlab_tflops']:.2f} of {result['ceiling_tflops']:.2f} TFLOP/s (the same products alone)")
    if arguments.out is not None:
        units = {name: torch.cpu.get_capabilities().get(name) for name in ("amx_bf16", "avx512_bf16")}
        record = {"environment": describe_run(arguments, torch, timm, **units), "results": results}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
