"""How many times as long torch's fused attention takes as two matrix products, without gradients, on a CPU.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/attention.py --out benchmarks/results/attention.json

`vitlab.models.attention.attention_backend` stands on this table. Both compute the same from the same queries, keys and
values, which lie as a block's `qkv` leaves them, and end as its `out` takes them. Above 1, products are the faster way.
"""

import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from run_record import describe_run
from torch import Tensor

from vitlab.models.attention import attention_backend, attention_weights
from vitlab.train.precision import keep_freed_memory

WIDTH = 64
"""Of a head, as in every ViT of the paper but Huge."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    batches: tuple[int, ...] = (1, 8, 32)
    tokens: tuple[int, ...] = (17, 50, 82, 197, 257, 401, 577, 1025)
    heads: int = 12
    rounds: int = 7
    most: int = 2**28
    """Numbers that attention's matrices may hold; larger ones are left out."""
    out: Path | None = None
    """JSON file for the figures."""


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_weights(q * q.shape[-1] ** -0.5, k, None) @ v


def seconds(way: Any, qkv: tuple[Tensor, ...]) -> float:
    since = time.perf_counter()
    for _ in range(3):
        way(*qkv).transpose(1, 2).flatten(2)
    return time.perf_counter() - since


@torch.no_grad()
def measure(arguments: Arguments, dtype: torch.dtype, batch: int, tokens: int) -> dict[str, Any]:
    """Paired ratios, and which way vitlab takes."""
    lying = torch.randn(batch, tokens, 3 * arguments.heads * WIDTH).to(dtype)
    qkv = tuple(lying.unflatten(-1, (3, arguments.heads, -1)).permute(2, 0, 3, 1, 4))
    for way in (fused, products):
        seconds(way, qkv)
    ratios = [seconds(fused, qkv) / seconds(products, qkv) for _ in range(arguments.rounds)]
    taken = attention_backend("cpu", False, dtype, batch * arguments.heads * tokens**2)
    return {"batch": batch, "tokens": tokens, "ratio": statistics.median(ratios), "all": ratios, "taken": taken}


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    keep_freed_memory()
    torch.manual_seed(0)
    results = {}
    for dtype in (torch.bfloat16, torch.float32):
        rows = []
        for batch in arguments.batches:
            sizes = [tokens for tokens in arguments.tokens if batch * arguments.heads * tokens**2 <= arguments.most]
            rows += [measure(arguments, dtype, batch, tokens) for tokens in sizes]
            of_batch = [f"{row['tokens']}: {row['ratio']:.2f}" for row in rows if row["batch"] == batch]
            print(f"{dtype}, batch {batch}, tokens: ratio  {'  '.join(of_batch)}", flush=True)
        results[str(dtype).removeprefix("torch.")] = rows
    if arguments.out:
        figures = {"environment": describe_run(arguments, torch), "results": results}
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
