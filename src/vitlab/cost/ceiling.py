"""What this machine could do at most: the products of a model's own shapes and nothing else, and the speed of copying.

`products` finds the shapes by running the model without numbers; `product_step` computes them one after the other.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vitlab.models import ModelConfig, build_model

MM = torch.ops.aten
COPIED = 2**28
"""Bytes of the copy whose speed is measured."""


@dataclass(frozen=True)
class Product:
    """`count` matrix products [m, k] @ [k, n] at a time, independent of each other."""

    count: int
    m: int
    k: int
    n: int

    @property
    def macs(self) -> int:
        return self.count * self.m * self.k * self.n

    @property
    def numbers(self) -> int:
        """Of both operands and the answer."""
        return self.count * (self.m * self.k + self.k * self.n + self.m * self.n)


class _Shapes(TorchDispatchMode):
    """Writes down every matrix product; a convolution is the product that it amounts to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Product] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        match func.overloadpacket:
            case MM.mm | MM.bmm:
                self._add(args[0], args[1])
            case MM.addmm | MM.baddbmm:
                self._add(args[1], args[2])
            case MM.convolution:
                weight = args[1]
                places = out.shape[0] * math.prod(out.shape[2:])
                self.found[Product(1, places, weight[0].numel(), weight.shape[0])] += 1
        return out

    def _add(self, a: Tensor, b: Tensor) -> None:
        *count, m, k = a.shape
        self.found[Product(math.prod(count), m, k, b.shape[-1])] += 1


def products(config: ModelConfig, batch: int, training: bool) -> Counter[Product]:
    """How often each product is computed for one batch. Training adds the two of every gradient: of the inputs,
    [m, n] @ [n, k], and of the weights, [k, m] @ [m, n]."""
    shapes = _Shapes()
    with torch.device("meta"), torch.no_grad():
        model, images = build_model(config).eval(), torch.empty(batch, 3, *config.image_hw)
        with shapes:
            model(images)
    if not training:
        return shapes.found
    every: Counter[Product] = Counter()
    for each, times in shapes.found.items():
        every[each] += times
        every[Product(each.count, each.m, each.n, each.k)] += times
        every[Product(each.count, each.k, each.m, each.n)] += times
    return every


def product_step(found: Counter[Product], dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """Computes all of them once. Each has operands of its own, which lie as a dense layer's do: [n, k], read across."""
    work = []
    for each, times in found.items():
        lead = (each.count,) if each.count > 1 else ()
        a = torch.randn(*lead, each.m, each.k, device=device).to(dtype)
        b = torch.randn(*lead, each.n, each.k, device=device).to(dtype).transpose(-2, -1)
        work.append((a, b, torch.empty(*lead, each.m, each.n, device=device, dtype=dtype), times))

    def step() -> None:
        for a, b, out, times in work:
            for _ in range(times):
                torch.matmul(a, b, out=out)

    return step


def copy_bandwidth(device: torch.device, rounds: int = 5) -> float:
    """Bytes read and written a second by a copy of 256 MiB: the best of several."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), math.inf
    for _ in range(rounds + 1):
        since = time.perf_counter()
        target.copy_(source)
        wait_for(device)
        best = min(best, time.perf_counter() - since)
    return 2 * COPIED / best


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
