"""Images/s of our training step against timm's on the same CPU, interleaved in one process; the ratio is what counts.

    python benchmarks/train_cpu.py --rounds 7 --out benchmarks/results/train_cpu.json

Both train the same shapes on the same batch with AdamW, gradients clipped at 1, cross-entropy, in bfloat16:

- `vitlab`: the step of `vitlab.train.loop` as `vitlab pretrain` runs it (precision=bfloat16).
- `timm`: timm's VisionTransformer under torch.autocast, as timm's own training script runs it on a CPU, with torch's
  fused attention (its default) and fused AdamW.
- `timm-matmul`: the same with fused attention off, which timm can be told; the fairer peer of a user who knows.

The allocator's thresholds, which vitlab sets for itself, are a property of the process: `--peer-allocator ours` gives
them to timm as well, `default` (what a timm user has) restores glibc's own during its rounds.
"""

import ctypes
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import timm
import torch
import torch.nn.functional as F
import tyro
from circumstances import circumstances
from timm.layers.config import set_fused_attn
from timm.models.vision_transformer import VisionTransformer

from vitlab.data.loader import Batch
from vitlab.models.config import ViTConfig
from vitlab.models.vit import ViT
from vitlab.train.config import OptimConfig, TrainConfig
from vitlab.train.loop import _start, _update
from vitlab.train.objectives import Classification
from vitlab.train.precision import keep_freed_memory

# The exact GELU, because it is timm's.
SHAPES = {
    "cifar": (
        ViTConfig(image_size=32, patch_size=4, width=192, depth=9, heads=3, mlp_dim=768, num_classes=10, gelu="erf"),
        128,
    ),
    "Ti/16": (ViTConfig(width=192, depth=12, heads=3, mlp_dim=768, gelu="erf"), 16),
    "S/16": (ViTConfig(width=384, depth=12, heads=6, mlp_dim=1536, gelu="erf"), 16),
}
OPTIM = OptimConfig(lr=1e-3, weight_decay=0.05, clip_norm=1.0)
Step = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Arguments:
    shapes: tuple[str, ...] = ("cifar", "S/16")
    """Of: cifar, Ti/16, S/16."""
    rounds: int = 7
    """Timed rounds of each contender, in turn."""
    seconds: float = 3.0
    """Least length of a round."""
    threads: int = 2
    compile: bool = False
    """Compile all contenders, or none."""
    peer_allocator: Literal["default", "ours"] = "default"
    out: Path | None = None
    """JSON file for the figures."""


def vitlab_step(config: ViTConfig, batch: Batch, compiled: bool) -> Step:
    run = TrainConfig(model=config, optim=OPTIM, steps=10**9, batch_size=len(batch.labels), precision="bfloat16")
    model = ViT(config)
    state = _start(run, model, torch.device("cpu"))
    forward = torch.compile(model) if compiled else model
    objective = Classification(config.num_classes)
    return lambda: _update(run, state, forward, objective, batch, OPTIM.lr)


def timm_step(config: ViTConfig, batch: Batch, compiled: bool, fused: bool) -> Step:
    set_fused_attn(fused)
    model = VisionTransformer(
        img_size=config.image_hw, patch_size=config.patch_size, embed_dim=config.width, depth=config.depth,
        num_heads=config.heads, mlp_ratio=config.mlp_dim / config.width, num_classes=config.num_classes,
    ).train()  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIM.lr, weight_decay=OPTIM.weight_decay, fused=True)
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(forward(batch.images), batch.labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def default_allocator() -> None:
    """glibc's own thresholds again (mallopt(3))."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 128 * 1024)
    libc.mallopt(-1, 128 * 1024)
    libc.malloc_trim(0)


def matmul_ceiling(threads: int) -> float:
    """bfloat16 TFLOP/s of one large matrix product on this machine, the best of a few."""
    torch.set_num_threads(threads)
    a, b = torch.randn(2, 2048, 2048).bfloat16().unbind()
    best = 0.0
    for _ in range(12):
        since = time.perf_counter()
        torch.matmul(a, b)
        best = max(best, 2 * 2048**3 / (time.perf_counter() - since) / 1e12)
    return best


def measure(step: Step, seconds: float) -> float:
    """Steps per second over at least `seconds`."""
    since, steps = time.perf_counter(), 0
    while (passed := time.perf_counter() - since) < seconds:
        step()
        steps += 1
    return steps / passed


def compare(name: str, arguments: Arguments) -> dict[str, Any]:
    """All contenders on one shape, in turn; medians, quartiles and ratios."""
    config, size = SHAPES[name]
    images = torch.rand(size, 3, *config.image_hw) * 2 - 1
    batch = Batch(images, torch.randint(config.num_classes, (size,)), torch.arange(size))
    steps = {
        "vitlab": vitlab_step(config, batch, arguments.compile),
        "timm": timm_step(config, batch, arguments.compile, fused=True),
        "timm-matmul": timm_step(config, batch, arguments.compile, fused=False),
    }
    rates: dict[str, list[float]] = {contender: [] for contender in steps}
    for turn in range(arguments.rounds + 1):
        for contender, step in steps.items():
            gc.collect()
            if contender == "vitlab" or arguments.peer_allocator == "ours":
                keep_freed_memory()
            else:
                default_allocator()
            step()  # brings this contender's memory and caches back
            rate = measure(step, arguments.seconds) * size
            if turn:  # the first round warms up, and compiles
                rates[contender].append(rate)
    medians = {contender: statistics.median(values) for contender, values in rates.items()}
    paired = {
        peer: [ours / theirs for ours, theirs in zip(rates["vitlab"], rates[peer], strict=True)]
        for peer in steps if peer != "vitlab"
    }  # fmt: skip
    ceiling = matmul_ceiling(arguments.threads)
    return {
        "shape": name,
        "batch": size,
        "images_per_s": {c: {"median": medians[c], "all": rates[c]} for c in rates},
        "ratio": {
            peer: {"median": statistics.median(values), "least": min(values), "most": max(values)}
            for peer, values in paired.items()
        },
        "vitlab_tflops": medians["vitlab"] * 6 * config.forward_macs / 1e12,
        "matmul_tflops": ceiling,
    }


def capabilities() -> dict[str, Any]:
    flags = torch.cpu.get_capabilities()
    return {name: flags.get(name) for name in ("amx_bf16", "avx512_bf16")}


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    for name in arguments.shapes:
        if name not in SHAPES:
            raise SystemExit(f"unknown shape {name!r}; allowed: {', '.join(SHAPES)}.")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    results = []
    for name in arguments.shapes:
        result = compare(name, arguments)
        results.append(result)
        said = ", ".join(f"{c} {v['median']:.1f}" for c, v in result["images_per_s"].items())
        print(f"{name}: images/s {said}")
        for peer, ratio in result["ratio"].items():
            print(f"  vitlab / {peer}: {ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})")
        print(f"  {result['vitlab_tflops']:.2f} of {result['matmul_tflops']:.2f} TFLOP/s (one large matrix product)")
    if arguments.out is not None:
        record = {"circumstances": circumstances(arguments, torch, timm, **capabilities()), "results": results}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
