"""Interleaved timing, the machine's ceiling for a model, and where a measurement was made."""

import math
import platform
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer

import vitlab
from vitlab.data.workers import available_cores
from vitlab.models import ModelConfig
from vitlab.models.vit import build_model

Step = Callable[[], object]


def timer(step: Step) -> Timer:
    """A timer of `step` with the threads of this process; it synchronizes a GPU."""
    return Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())


def time_interleaved(steps: Mapping[str, Step], seconds: float, rounds: int) -> dict[str, list[float]]:
    """Steps per second of each contender in each round, in turn, so that a disturbance affects all of them alike.

    Each contender runs for about `seconds` in a round, and for at least one step.
    """
    timers = {name: timer(step) for name, step in steps.items()}
    counts = {name: math.ceil(seconds / timers[name].timeit(1).mean) for name in steps}
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, count in counts.items():
            rates[name].append(1 / timers[name].timeit(count).mean)
    return rates


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and all values."""
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    return {"median": median, "quartiles": [low, high], "all": list(values)}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """The spread of ours / theirs, round by round: neighbors in time were disturbed alike."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


class Product(NamedTuple):
    """A batch of matrix products [m, k] @ [k, n]."""

    batch: int
    m: int
    k: int
    n: int


class _ProductRecorder(TorchDispatchMode):
    """Counts every matrix product; a convolution counts as the product it is equal to."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[Product] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        match func.overloadpacket.__name__:
            case "mm" | "bmm" | "addmm" | "baddbmm" as name:
                a, b = args[-2:] if name in ("mm", "bmm") else args[1:3]
                *batch, m, k = a.shape
                self.products[Product(math.prod(batch), m, k, b.shape[-1])] += 1
            case "convolution":
                weight = args[1]
                positions = out.shape[0] * math.prod(out.shape[2:])
                self.products[Product(1, positions, weight[0].numel(), weight.shape[0])] += 1
        return out


def count_products(config: ModelConfig, batch: int, training: bool, attention: bool = True) -> Counter[Product]:
    """How often each product is computed for one batch, with or without attention matrices.

    Training adds the two of the gradients: [m, n] @ [n, k] for the inputs, [k, m] @ [m, n] for the weights.
    """
    recorder = _ProductRecorder()
    with torch.device("meta"), torch.no_grad():
        model = build_model(config).eval()
        images = torch.empty(batch, 3, *config.image_hw)
        with recorder:
            model(images)
    forward = Counter({product: n for product, n in recorder.products.items() if attention or product.batch == 1})
    products = forward.copy()
    if training:
        for (size, m, k, n), times in forward.items():
            products[Product(size, m, n, k)] += times
            products[Product(size, k, m, n)] += times
    return products


def product_flops(products: Counter[Product]) -> int:
    """FLOPs of all products."""
    return sum(2 * times * math.prod(product) for product, times in products.items())


def products_step(products: Counter[Product], dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """Computes all products once. The second operand is a transposed view, as a dense layer's weight."""

    def operand(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    operands = []
    for (size, m, k, n), times in products.items():
        batch = (size,) if size > 1 else ()
        a, b = operand(*batch, m, k), operand(*batch, n, k).mT
        operands.append((a, b, torch.empty(*batch, m, n, device=device, dtype=dtype), times))

    def step() -> None:
        for a, b, out, times in operands:
            for _ in range(times):
                torch.matmul(a, b, out=out)

    return step


def environment(*libraries: str) -> dict[str, Any]:
    """The commit, the processor, its available cores, and the versions of installed `libraries`."""
    cpu = torch.cpu.get_capabilities().get("cpu_name", platform.processor())
    versions = {library: metadata.version(library) for library in libraries}
    return {"commit": commit(), "cpu": cpu, "cores": available_cores(), **versions}


def commit() -> str | None:
    """The commit of the checkout that this code runs from, with `-dirty` if it has changes; None outside a checkout."""
    checkout = Path(vitlab.__file__).parents[2]
    if not (checkout / ".git").exists():  # an installed package may lie in the checkout of something else
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
