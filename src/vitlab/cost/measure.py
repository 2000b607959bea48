"""Speed measurements: interleaved rounds, the machine's ceiling for a model, and the parts of a training step."""

import math
import os
import platform
import re
import subprocess
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import vitlab
from vitlab.models import ModelConfig, build_model

PACKAGE = Path(vitlab.__file__).parent
COPY_BYTES = 2**28
MIN_GAIN = 1.05
"""A batch twice as large must be this much faster to be chosen."""
PARTS = {
    "matrix products": r"mm|addmm|_addmm_activation|\w*convolution\w*",
    "attention": r"bmm|baddbmm|_softmax\w*|\w*attention\w*",  # in these models a batch of products is attention's
    "norms": r"native_\w+_norm\w*|var_mean|rsqrt",
    "activation functions": r"gelu\w*|relu|threshold_backward|tanh\w*",
    "loss": r"_log_softmax\w*|nll_loss\w*|argmax|eq|binary_cross_entropy_with_logits",
    "optimizer": r"_fused_\w+|_foreach_(norm|mul_|lerp_)|linalg_vector_norm",
    "casts and copies": r"copy_|_foreach_copy_|_to_copy|clone|cat|contiguous|reshape",
}
"""Part of a training step -> pattern of the names of its aten operations."""
REST = "the rest"
Step = Callable[[], object]


# ------------------------------------------------------------------------------------------------------------- timing


def synchronized_time() -> float:
    """The clock, after the current GPU has finished what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_per_step(step: Step, count: int = 1, warmup: int = 2) -> float:
    """Mean time of `count` steps after `warmup` others, without garbage collection in between."""
    timeit.timeit(step, number=warmup)
    return timeit.timeit(step, number=count, timer=synchronized_time) / count


def time_interleaved(
    steps: Mapping[str, Step], seconds: float, rounds: int, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Steps per second of each contender in each round, in turn, so that a disturbance affects all of them alike.

    A contender's share of a round takes at least about `seconds`, and one step.
    """
    counts = {}
    for name, step in steps.items():
        say(f"warming up {name}")
        counts[name] = max(1, math.ceil(seconds / seconds_per_step(step)))
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name, step in steps.items():
            say(f"round {turn + 1} of {rounds}, {name}")
            rates[name].append(1 / seconds_per_step(step, counts[name], warmup=1))
    return rates


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and all values."""
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    return {"median": median, "quartiles": [low, high], "all": list(values)}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """The spread of ours / theirs, round by round: neighbors in time were disturbed alike."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def fastest_batch(rate: Callable[[int], float], most: int) -> int:
    """The power of two up to `most` with the highest `rate(batch)` in images/s.

    Ends after two doublings without a gain.
    """
    best, best_rate, batch, without_gain = 1, rate(1), 2, 0
    while batch <= most and without_gain < 2:
        without_gain += 1
        if (new_rate := rate(batch)) > MIN_GAIN * best_rate:
            best, best_rate, without_gain = batch, new_rate, 0
        batch *= 2
    return best


# ------------------------------------------------------------------------------------------------------------ ceiling


class Product(NamedTuple):
    """A batch of matrix products [m, k] @ [k, n]."""

    batch: int
    m: int
    k: int
    n: int

    @property
    def macs(self) -> int:
        return self.batch * self.m * self.k * self.n

    @property
    def numel(self) -> int:
        """Elements of both operands and the result."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)


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
                weight, positions = args[1], out.shape[0] * math.prod(out.shape[2:])
                self.products[Product(1, positions, weight[0].numel(), weight.shape[0])] += 1
        return out


def count_products(config: ModelConfig, batch: int, training: bool) -> Counter[Product]:
    """How often each product is computed for one batch.

    Training adds the two of the gradients: [m, n] @ [n, k] for the inputs, [k, m] @ [m, n] for the weights.
    """
    recorder = _ProductRecorder()
    with torch.device("meta"), torch.no_grad():
        model, images = build_model(config).eval(), torch.empty(batch, 3, *config.image_hw)
        with recorder:
            model(images)
    products = recorder.products.copy()
    if training:
        for (size, m, k, n), times in recorder.products.items():
            products[Product(size, m, n, k)] += times
            products[Product(size, k, m, n)] += times
    return products


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


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of copying 256 MiB; the best of five."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / min(seconds_per_step(lambda: target.copy_(source)) for _ in range(5))


# ------------------------------------------------------------------------------------------------------------ profile


def part_of(operation: str) -> str:
    """The part to which an operation of the profile belongs, such as `aten::addmm`."""
    name = operation.removeprefix("aten::")
    return next((part for part, pattern in PARTS.items() if re.fullmatch(pattern, name)), REST)


def shares(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The share of each part, from pairs of an operation and its own time; they sum to 1."""
    sums = dict.fromkeys([*PARTS, REST], 0.0)
    for operation, seconds in times:
        sums[part_of(operation)] += seconds
    total = sum(sums.values())
    return {part: seconds / total for part, seconds in sums.items()}


def profile_step(step: Step, device: torch.device, count: int = 3) -> dict[str, float]:
    """Shares of the parts of a training step, from torch's profile of `count` steps after one warm-up step.

    On a CPU the time of the operations themselves, on a GPU that of the kernels they launch.
    """
    on_gpu = device.type == "cuda"
    step()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        for _ in range(count):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    events = [event for event in profiler.key_averages() if event.device_type.name == "CPU"]
    return shares(
        (event.key, event.self_device_time_total if on_gpu else event.self_cpu_time_total) for event in events
    )


# -------------------------------------------------------------------------------------------------------- environment


def environment(*libraries: str) -> dict[str, Any]:
    """The commit, the processor, its available cores, and the versions of installed `libraries`."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.processor())
    versions = {library: metadata.version(library) for library in libraries}
    return {"commit": commit(), "cpu": cpu, "cores": available_cores(), **versions}


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def commit() -> str | None:
    """The commit of the checkout that this code runs from, with `-dirty` if it has changes; None outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(PACKAGE), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) / "src" / "vitlab" != PACKAGE:  # installed inside another one
            return None
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None
