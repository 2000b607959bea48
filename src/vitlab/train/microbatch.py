"""How many images go through the model at once (`choose_microbatch`), and what a step costs (`measure_step`)."""

import copy
import dataclasses
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vitlab.config import TrainConfig
from vitlab.display import format_rate
from vitlab.train.checkpoint import create_state
from vitlab.train.distributed import SINGLE
from vitlab.train.objectives import blank_batch, create_objective
from vitlab.train.precision import device_name, frozen_dtype, keep_freed_memory, resolve_precision
from vitlab.train.step import train_step
from vitlab.train.workdir import Workdir

MEMORY_FRACTION = 0.4
"""Fraction of the free memory for training; the rest is for evaluation, checkpoints, data loading, other programs."""
CPU_FLOPS = 1e12
"""Largest work of a micro-batch on a CPU, some seconds on two cores. Larger ones are no faster there, take more memory,
and a request to stop waits for the end of one."""
SAMPLE_FLOPS = 2e11
"""Work of the images of a micro-batch that are timed on a CPU, where memory is not tried."""
TRAIN_RATIO = 3.5
"""Estimated ratio of a training step's time to a forward pass's, where only the latter is timed."""
SMALL_FLOPS = 1e11
"""Work of a batch so small that nothing has to be measured."""
GIB = 2**30


@dataclass(frozen=True)
class StepCost:
    """One micro-batch on this machine."""

    microbatch: int
    """Images that go through the model at once."""
    train_seconds: float
    """Seconds per image of training: forward and backward pass. Infinite if not known."""
    eval_seconds: float
    """Measured seconds per image of evaluation: forward pass in float32."""
    feature_seconds: float
    """The same in the precision of training (`frozen_dtype`)."""
    memory: int
    """Counted bytes of a training step."""
    free: int | None
    """Bytes that were free before; None where the system does not say."""

    def describe(self) -> str:
        """`micro-batches of 16, 9.1 images/s, 2.1 of 22.0 GiB free memory`"""
        of_free = " GiB" if self.free is None else f" of {self.free / GIB:.1f} GiB free"
        rate = f"{format_rate(1 / self.train_seconds)} images/s" if self.train_seconds < math.inf else "speed unknown"
        return f"micro-batches of {self.microbatch}, {rate}, {self.memory / GIB:.1f}{of_free} memory"


def choose_microbatch(
    config: TrainConfig, workdir: Workdir, model: nn.Module, device: torch.device, measured: int | None
) -> int:
    """Images per forward pass of each rank, the same on all: `config.microbatch` if given.

    Otherwise the run's own so far on the same device, so that it resumes to the bit; what the caller has `measured`;
    a rank's whole shard of a small batch; or what fits now. It is not a setting of the run, which may resume on a
    machine with other memory.
    """
    if device.type == "cpu":
        keep_freed_memory()
    world = workdir.world
    shard = -(-config.batch_size // world.world_size)
    runtime = {"device": device_name(device), "processes": world.world_size}

    def choose() -> int:
        if config.microbatch is not None:
            return config.microbatch
        saved = workdir.read_runtime()
        if saved.items() >= runtime.items():
            return int(saved["microbatch"])
        if measured is not None:
            return measured
        size = default_microbatch(config.model.forward_macs, device, shard)
        small = size == shard and shard * 6 * config.model.forward_macs < SMALL_FLOPS
        return size if small else measure_step(config, model, device, world.world_size).microbatch

    size = world.broadcast_object(lambda: min(choose(), shard))
    workdir.write_runtime({**runtime, "microbatch": size})
    return size


def default_microbatch(forward_macs: int, device: torch.device, shard: int) -> int:
    """Images at once where memory does not matter: a rank's `shard` of a batch, on a CPU no more than useful."""
    if device.type != "cpu":
        return shard
    useful = max(int(CPU_FLOPS / (6 * forward_macs)), 1)
    return shard if useful >= shard else _lower_power_of_two(useful + 1)


def measure_step(
    config: TrainConfig, model: nn.Module, device: torch.device, world_size: int = 1, train: bool = True
) -> StepCost:
    """Chooses the micro-batch of each of `world_size` ranks and measures its speed; `model` stays unchanged.

    train: on a CPU, whether a training step is timed (`timing_seconds` estimates what this takes). If not, its time is
    TRAIN_RATIO times the forward pass's.

    `config.microbatch` is taken if given. Otherwise it is `default_microbatch`, halved until a step takes at most
    MEMORY_FRACTION of the free memory, by count and on a GPU also by trial, or one image is left. The trial is not
    sharded: where only a shard of the model fits, the count decides and the time is not known.
    """
    from vitlab.train.memory import rank_bytes

    on_cpu = device.type == "cpu"
    free = free_memory(device)
    if on_cpu:
        keep_freed_memory()
        free = None if free is None else free // world_size
    precision = resolve_precision(config.precision, device)
    sharded = config.fsdp and world_size > 1

    def memory(images: int) -> int:
        return sum(rank_bytes(config, images, precision, device.type, world_size, sharded).values())

    shard = -(-config.batch_size // world_size)
    size = min(config.microbatch or default_microbatch(config.model.forward_macs, device, shard), shard)
    if free is not None and not config.microbatch:
        while size > 1 and memory(size) > MEMORY_FRACTION * free:
            size = _lower_power_of_two(size)
    train_seconds = None
    if train or not on_cpu:
        size, train_seconds = _try_training(config, model, device, size, shard, sharded)
    # Three passes of an eighth of the work of the training step that is timed.
    count = min(size, math.ceil(SAMPLE_FLOPS / (16 * config.model.forward_macs))) if on_cpu else size
    images = _blank_images(config, count, device)
    dtype = frozen_dtype(config.precision, device)
    eval_seconds = _time_evaluation(model, images)
    feature_seconds = eval_seconds if dtype == torch.float32 else _time_evaluation(model, images, dtype)
    if train_seconds is None:
        train_seconds = TRAIN_RATIO * feature_seconds
    return StepCost(size, train_seconds, eval_seconds, feature_seconds, memory(size), free)


def _try_training(
    config: TrainConfig, model: nn.Module, device: torch.device, size: int, shard: int, sharded: bool
) -> tuple[int, float]:
    """The micro-batch, `size` or a half of it that does not run out of memory, and seconds per image of training."""
    while True:
        try:
            num_images = min(size, _timed_images(config)) if device.type == "cpu" else size
            return size, time_training(config, model, device, num_images, shard)
        except torch.OutOfMemoryError:
            if not sharded and (config.microbatch or size == 1):
                raise
        gc.collect()  # with activation checkpointing a model is a cycle of references
        torch.cuda.empty_cache()
        if sharded:
            return size, math.inf
        size = _lower_power_of_two(size)


def _timed_images(config: TrainConfig) -> int:
    """Images of a training step that are timed on a CPU."""
    return math.ceil(SAMPLE_FLOPS / (6 * config.model.forward_macs))


def timing_seconds(config: TrainConfig, train_seconds: float) -> float:
    """What it takes to time a training step on a CPU, by an estimate of its seconds per image."""
    return 2 * _timed_images(config) * train_seconds


def _lower_power_of_two(size: int) -> int:
    """The largest power of two below `size`."""
    return 2 ** ((size - 1).bit_length() - 1)


def time_training(config: TrainConfig, model: nn.Module, device: torch.device, num_images: int, shard: int) -> float:
    """Seconds per image of a training step of `shard` images; `num_images` of them are timed, by a copy of the model.

    The update of the weights takes as long for any number. Raises torch.OutOfMemoryError.
    """
    config = dataclasses.replace(config, compile=False, fsdp=False)
    state = create_state(config, copy.deepcopy(model).to(device), device, SINGLE)
    objective = create_objective(config)
    seconds = 0.0
    batch = blank_batch(objective, _blank_images(config, num_images, device))
    for _ in range(2):  # the first pass also builds and allocates what later ones reuse
        seconds = _timed(functools.partial(train_step, config, state, objective, batch, 0.0, num_images), device)
    update = min(_timed(state.optimizer.step, device), seconds)
    return (seconds - update) / num_images + update / shard


def _time_evaluation(model: nn.Module, images: Tensor, dtype: torch.dtype = torch.float32) -> float:
    """Seconds per image of a forward pass, as in evaluation: the mean of two, after a warm-up."""
    forward = copy.deepcopy(getattr(model, "vit", model)).to(images.device, dtype).eval()
    with torch.inference_mode():
        _, *seconds = (_timed(lambda: forward(images), images.device) for _ in range(3))
    return statistics.fmean(seconds) / len(images)


def _blank_images(config: TrainConfig, count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, 3, *config.model.image_hw, device=device)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(time.perf_counter() - start, 1e-9)


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a GPU, or for this process on the CPU; None where the system does not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, which reuses it
        return torch.cuda.mem_get_info(device)[0] + cached
    limits = (_available_bytes(), _container_bytes())
    return min((limit for limit in limits if limit is not None), default=None)


def _available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _container_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's limit (cgroup v2 or v1) leaves. Its page cache can be dropped and counts as free."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        if (cgroup / limit).is_file() and (cgroup / usage).is_file():
            most = (cgroup / limit).read_text().strip()
            if not most.isdigit() or int(most) >= 2**60:  # no limit: "max", in v1 the largest number
                return None
            statistics = (cgroup / usage).with_name("memory.stat")
            stat = dict(line.split() for line in statistics.read_text().splitlines()) if statistics.is_file() else {}
            return max(int(most) - int((cgroup / usage).read_text()) + int(stat.get(cache, 0)), 0)
    return None
