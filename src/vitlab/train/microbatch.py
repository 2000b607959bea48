"""How many images go through the model at once: chosen for the memory that is free, and measured before training."""

import copy
import ctypes
import functools
import gc
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vitlab.config import TrainConfig
from vitlab.data.loader import Batch
from vitlab.train.distributed import blocks
from vitlab.train.memory import moments
from vitlab.train.objectives import create_objective
from vitlab.train.precision import Precision, keep_freed_memory, resolve_precision
from vitlab.train.progress import per_second

MEMORY_SHARE = 0.4
"""Share of the free memory that a training may take; the rest is for evaluation, data loading and other programs."""
CPU_FLOPS = 1e12
"""Most work of a micro-batch on a CPU, some seconds of two cores. Larger ones are no faster there and take more memory,
and a request to stop waits for the end of one."""
GIB = 2**30


@dataclass(frozen=True)
class StepCost:
    """One micro-batch, measured on this machine."""

    microbatch: int
    """Images that go through the model at once."""
    train_seconds: float
    """Seconds that training takes for an image: forward and backward pass."""
    eval_seconds: float
    """Seconds that evaluation takes for an image: forward pass in float32."""
    memory: int | None
    """Bytes that training adds to what the process holds already; None where it cannot be measured."""
    free: int | None
    """Bytes that were free before; None where the system does not tell."""

    def describe(self) -> str:
        """`micro-batches of 16, 9.1 images/s, 2.1 of 22.0 GiB free memory`"""
        of_free = "" if self.free is None else f" of {self.free / GIB:.1f}"
        memory = "" if self.memory is None else f", {self.memory / GIB:.1f}{of_free} GiB free memory"
        return f"micro-batches of {self.microbatch}, {per_second(1 / self.train_seconds)} images/s{memory}"


def free_memory(device: torch.device) -> int | None:
    """Bytes of memory that are free on a GPU, or for this process on the CPU; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [room for room in (_available(), _left_in_cgroup()) if room is not None]
    if not limits and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2]  # macOS: half of what is built in
    return min(limits, default=None)


def _available(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """What Linux says can be allocated without swapping."""
    if not meminfo.is_file():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None


def _left_in_cgroup(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's limit (cgroup v2 or v1) leaves; its page cache can be dropped, so it counts as free."""
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


def default_microbatch(config: TrainConfig, device: torch.device, share: int) -> int:
    """Images at once where memory is no concern: the process's `share` of a batch, on a CPU no more than is useful."""
    if device.type != "cpu":
        return share
    at_once = max(int(CPU_FLOPS / (6 * config.model.forward_macs)), 1)
    return share if at_once >= share else 2 ** (at_once.bit_length() - 1)


@dataclass
class _Trial:
    """A copy of the model that computes micro-batches as the training will, without changing anything."""

    config: TrainConfig
    model: nn.Module
    device: torch.device
    precision: Precision

    @classmethod
    def of(cls, config: TrainConfig, model: nn.Module, device: torch.device) -> "_Trial":
        precision = resolve_precision(config.precision, device)
        made = copy.deepcopy(model).to(device).train()
        if precision == "bfloat16":
            made.to(torch.bfloat16)
        for block in blocks(made) if config.activation_checkpointing else ():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return cls(config, made, device, precision)

    def seconds(self, images: int) -> float:
        """Forward and backward pass of so many images."""
        config, objective = self.config, create_objective(self.config)
        labels = torch.zeros(images, dtype=torch.int64, device=self.device)
        draws = None
        if objective.draws:
            draws = torch.full((images, objective.draws), 0.5, dtype=torch.float64, device=self.device)
        inputs = torch.zeros(images, 3, *config.model.image_hw, device=self.device)
        batch = Batch(inputs, labels, labels, draws=draws)
        inputs, targets = objective.corrupt(batch, np.random.default_rng(0))
        with _Clock(self.device) as clock:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "autocast"):
                loss = objective.loss(self.model, inputs, targets)[0]
            # not `backward`: nothing is learned here
            torch.autograd.grad(loss, list(self.model.parameters()), allow_unused=True)
        return clock.seconds

    @torch.inference_mode()
    def eval_seconds(self, images: int) -> float:
        """Forward pass in float32, as evaluation computes."""
        self.model.float().eval()
        inputs = torch.zeros(images, 3, *self.config.model.image_hw, device=self.device)
        forward = getattr(self.model, "vit", self.model)
        forward(inputs[:1])
        with _Clock(self.device) as clock:
            forward(inputs)
        return clock.seconds


class _Clock:
    """Seconds of what is within, until the device has done it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = 0.0

    def __enter__(self) -> "_Clock":
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds = max(time.perf_counter() - self._start, 1e-9)


class PeakMemory:
    """The most memory in use from its creation on: of a GPU by torch, or of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base: int | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._base = torch.cuda.memory_allocated(device)
            return
        gc.collect()
        if trim := getattr(ctypes.CDLL(None) if sys.platform.startswith("linux") else None, "malloc_trim", None):
            trim(0)  # freed memory that glibc keeps would be used first, and not be seen
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        except OSError:
            return
        self._base = _status("VmRSS")

    def bytes(self) -> int | None:
        """Bytes above those at the start; None where the system does not tell."""
        if self._base is None:
            return None
        peak = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else _status("VmHWM")
        return None if peak is None else max(peak - self._base, 0)


def _status(name: str) -> int | None:
    """A size in /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def measure_step(config: TrainConfig, model: nn.Module, device: torch.device, processes: int = 1) -> StepCost:
    """Chooses the micro-batch of each of `processes` processes and measures it; `model` stays as it is.

    `config.microbatch`, where it is given, is taken as it is. Otherwise it is `default_microbatch`, halved until a
    training with it needs at most MEMORY_SHARE of the memory that is free, or one image is left.
    """
    if device.type == "cpu":
        keep_freed_memory()
    free = free_memory(device)
    if free is not None and device.type == "cpu":
        free //= processes
    share = -(-config.batch_size // processes)
    constant = _constant_bytes(config, model, share)
    peak, trial = PeakMemory(device), _Trial.of(config, model, device)
    trial.seconds(1)
    single = trial.seconds(1), peak.bytes()
    seconds, taken = single
    size = min(config.microbatch or default_microbatch(config, device, share), share)
    room = None if free is None else MEMORY_SHARE * free - constant
    while config.microbatch is None and size > 1 and room is not None and taken is not None and size * taken > room:
        size = _half(size)
    while size > 1:
        try:
            seconds, taken = trial.seconds(size) / size, peak.bytes()
        except torch.OutOfMemoryError:
            taken = None if config.microbatch else int(room or 0) + 1
            torch.cuda.empty_cache()
        if config.microbatch is not None or room is None or taken is None or taken <= room:
            break
        size = _half(size)
        seconds, taken = single  # of one image, where nothing larger fits
        peak = PeakMemory(device)
    few = min(size, 8)
    eval_seconds = trial.eval_seconds(few) / few
    return StepCost(size, seconds, eval_seconds, None if taken is None else taken + constant, free)


def _half(size: int) -> int:
    """The largest power of two below `size`."""
    return 2 ** ((size - 1).bit_length() - 1)


def _constant_bytes(config: TrainConfig, model: nn.Module, share: int) -> int:
    """What a training holds whatever its micro-batch: gradients, optimizer state and average, a checkpoint's copy of
    the weights and of these, and two batches of images."""
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    kept = moments(config.optim) + int(config.average_decay is not None)
    height, width = config.model.image_hw
    return weights * (2 + 2 * kept) + 2 * share * 3 * height * width * 4
