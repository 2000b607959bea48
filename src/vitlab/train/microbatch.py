"""How many images go through the model at once: chosen for the free memory, and measured before training."""

import copy
import ctypes
import gc
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vitlab.config import TrainConfig
from vitlab.data.loader import Batch
from vitlab.display import format_rate
from vitlab.train.objectives import create_objective
from vitlab.train.optim import state_per_weight
from vitlab.train.parallel import checkpoint_activations
from vitlab.train.precision import device_name, keep_freed_memory, resolve_precision
from vitlab.train.workdir import Workdir

MEMORY_FRACTION = 0.4
"""Fraction of the free memory for training; the rest is for evaluation, data loading and other programs."""
CPU_FLOPS = 1e12
"""Largest work of a micro-batch on a CPU, some seconds on two cores. Larger ones are no faster there, take more memory,
and a request to stop waits for the end of one."""
SMALL_FLOPS = 1e11
"""Work of a batch so small that nothing has to be measured."""
GIB = 2**30
PROCESS = Path("/proc/self/status")


@dataclass(frozen=True)
class StepCost:
    """One micro-batch, measured on this machine."""

    microbatch: int
    """Images that go through the model at once."""
    train_seconds: float
    """Seconds per image of training: forward and backward pass."""
    eval_seconds: float
    """Seconds per image of evaluation: forward pass in float32."""
    memory: int | None
    """Bytes that training adds to those of the process; None where they cannot be measured."""
    free: int | None
    """Bytes that were free before; None where the system does not say."""

    def describe(self) -> str:
        """`micro-batches of 16, 9.1 images/s, 2.1 of 22.0 GiB free memory`"""
        of_free = "" if self.free is None else f" of {self.free / GIB:.1f}"
        memory = "" if self.memory is None else f", {self.memory / GIB:.1f}{of_free} GiB free memory"
        return f"micro-batches of {self.microbatch}, {format_rate(1 / self.train_seconds)} images/s{memory}"


def choose_microbatch(
    config: TrainConfig, workdir: Workdir, model: nn.Module, device: torch.device, measured: int | None
) -> int:
    """Images per forward pass of each rank, the same on all: `config.microbatch` if given.

    Otherwise that of the run so far on the same device, so that it continues to the bit; what the caller has
    `measured`; a rank's whole shard of a small batch; or what is measured now. It is not a setting of the run, which
    may continue on a machine with other memory.
    """
    if device.type == "cpu":
        keep_freed_memory()
    world = workdir.world
    shard = -(-config.batch_size // world.world_size)
    runtime = {"device": device_name(device), "processes": world.world_size}

    def choose() -> int:
        saved = workdir.read_runtime()
        if config.microbatch is not None:
            return config.microbatch
        if saved.items() >= runtime.items():
            return int(saved["microbatch"])
        if measured is not None:
            return measured
        size = default_microbatch(config, device, shard)
        small = size == shard and shard * 6 * config.model.forward_macs < SMALL_FLOPS
        return size if small else measure_step(config, model, device, world.world_size).microbatch

    size = world.broadcast_object(lambda: min(choose(), shard))
    workdir.write_runtime({**runtime, "microbatch": size})
    return size


def default_microbatch(config: TrainConfig, device: torch.device, shard: int) -> int:
    """Images at once where memory does not matter: a rank's `shard` of a batch, on a CPU no more than useful."""
    if device.type != "cpu":
        return shard
    useful = max(int(CPU_FLOPS / (6 * config.model.forward_macs)), 1)
    return shard if useful >= shard else 2 ** (useful.bit_length() - 1)


def measure_step(config: TrainConfig, model: nn.Module, device: torch.device, processes: int = 1) -> StepCost:
    """Chooses the micro-batch of each of `processes` ranks and measures it; `model` stays unchanged.

    `config.microbatch` is taken if given. Otherwise it is `default_microbatch`, halved until training needs at most
    MEMORY_FRACTION of the free memory, or one image is left.
    """
    if device.type == "cpu":
        keep_freed_memory()
    free = free_memory(device)
    if free is not None and device.type == "cpu":
        free //= processes
    shard = -(-config.batch_size // processes)
    constant = _constant_bytes(config, model, shard)
    room = None if free is None or config.microbatch else MEMORY_FRACTION * free - constant
    trial = TrialStep(config, model, device)
    trial.measure(1)  # the first pass also builds what later ones reuse
    single = seconds, used = trial.measure(1)
    size = min(config.microbatch or default_microbatch(config, device, shard), shard)
    while size > 1 and room is not None and used is not None and size * used > room:
        size = _half(size)
    while size > 1:
        seconds, used = trial.measure(size)
        if room is None or used is None or used <= room:
            break
        size = _half(size)
        seconds, used = single  # if nothing larger fits
        trial.peak.reset()
    few = min(size, 8)
    memory = None if used is None or math.isinf(used) else int(used) + constant
    return StepCost(size, seconds, trial.eval_seconds(few) / few, memory, free)


def _half(size: int) -> int:
    """The largest power of two below `size`."""
    return 2 ** ((size - 1).bit_length() - 1)


def _constant_bytes(config: TrainConfig, model: nn.Module, shard: int) -> int:
    """Memory that does not depend on the micro-batch: gradients, optimizer state, average, a checkpoint's copy of these
    and of the weights, and two batches of images."""
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    copies = state_per_weight(config.optim) + int(config.average_decay is not None)
    height, width = config.model.image_hw
    return weights * (2 + 2 * copies) + 2 * shard * 3 * height * width * 4


class TrialStep:
    """Forward and backward passes of a copy of the model, as in training."""

    def __init__(self, config: TrainConfig, model: nn.Module, device: torch.device) -> None:
        self._config, self._device = config, device
        self.peak = PeakMemory(device)
        self._precision = resolve_precision(config.precision, device)
        self._model = copy.deepcopy(model).to(device).train()
        if self._precision == "bfloat16":
            self._model.to(torch.bfloat16)
        if config.activation_checkpointing:
            checkpoint_activations(self._model)

    def measure(self, images: int) -> tuple[float, int | float | None]:
        """(seconds per image, peak memory in bytes) of a forward and backward pass; (inf, inf) if out of memory.

        The memory is None where it cannot be measured.
        """
        device, objective = self._device, create_objective(self._config)
        labels = torch.zeros(images, dtype=torch.int64, device=device)
        draws = torch.full((images, objective.draws), 0.5, dtype=torch.float64, device=device)
        inputs = torch.zeros(images, 3, *self._config.model.image_hw, device=device)
        batch = Batch(inputs, labels, labels, draws=draws if objective.draws else None)
        inputs, targets = objective.corrupt(batch, np.random.default_rng(0))

        def step() -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=self._precision == "autocast"):
                loss = objective.loss(self._model, inputs, targets)[0]
            torch.autograd.grad(loss, list(self._model.parameters()), allow_unused=True)

        try:
            return self._timed(step) / images, self.peak.bytes()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return math.inf, math.inf

    @torch.inference_mode()
    def eval_seconds(self, images: int) -> float:
        """Seconds of a forward pass in float32, as in evaluation."""
        self._model.float().eval()
        inputs = torch.zeros(images, 3, *self._config.model.image_hw, device=self._device)
        forward = getattr(self._model, "vit", self._model)
        forward(inputs[:1])
        return self._timed(lambda: forward(inputs))

    def _timed(self, work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return max(time.perf_counter() - start, 1e-9)


class PeakMemory:
    """The largest memory use above that at its creation: of a GPU, or of this process on Linux."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base: int | None = 0
        self.reset()
        if self._base is not None:
            cuda = device.type == "cuda"
            self._base = torch.cuda.memory_allocated(device) if cuda else _bytes_of(PROCESS, "VmRSS")

    def reset(self) -> None:
        """Forgets the peak so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        gc.collect()
        if trim := getattr(ctypes.CDLL(None) if sys.platform.startswith("linux") else None, "malloc_trim", None):
            trim(0)  # freed memory that glibc keeps would be used first, and not be counted
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._base = None

    def bytes(self) -> int | None:
        """None where the system does not say."""
        cuda = self._device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self._device) if cuda else _bytes_of(PROCESS, "VmHWM")
        return None if peak is None or self._base is None else max(peak - self._base, 0)


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a GPU, or for this process on the CPU; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = (_bytes_of(Path("/proc/meminfo"), "MemAvailable"), _cgroup_room())
    return min((limit for limit in limits if limit is not None), default=None)


def _bytes_of(file: Path, name: str) -> int | None:
    """A size in a file of /proc, which gives them as `Name:   123 kB`."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _cgroup_room(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's limit (cgroup v2 or v1) leaves. Its page cache can be dropped and counts as free."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        if (root / limit).is_file() and (root / usage).is_file():
            most = (root / limit).read_text().strip()
            if not most.isdigit() or int(most) >= 2**60:  # "max", or v1's way of saying it
                return None
            statistics = (root / usage).with_name("memory.stat")
            stat = dict(line.split() for line in statistics.read_text().splitlines()) if statistics.is_file() else {}
            return max(int(most) - int((root / usage).read_text()) + int(stat.get(cache, 0)), 0)
    return None
