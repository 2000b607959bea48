"""How many images go through the model at once (`choose_microbatch`), and what a step costs (`measure_step`).

Every run calls the first. `runs/cost.py` calls the second before a run, to plan it within a time budget.
"""

import copy
import dataclasses
import functools
import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from vitlab.config import TrainConfig
from vitlab.display import format_rate
from vitlab.train.checkpoint import create_state
from vitlab.train.distributed import SINGLE
from vitlab.train.free_memory import GIB, free_memory
from vitlab.train.objectives import blank_batch, create_objective
from vitlab.train.precision import (
    device_name,
    frozen_dtype,
    keep_freed_memory,
    prepare_for_inference,
    resolve_precision,
)
from vitlab.train.step import train_step
from vitlab.train.workdir import Workdir

MEMORY_FRACTION = 0.4
"""Fraction of the free memory for training; the rest is for evaluation, checkpoints, data loading, other programs."""
STEP_FLOPS_PER_MAC = 6
"""FLOPs of a training step for each multiply-accumulate of its forward pass: 2 there, 4 in the backward pass."""
CPU_FLOPS = 1e12
"""Largest work of a micro-batch on a CPU, some seconds on two cores. Larger ones are no faster there, take more memory,
and a request to stop waits for the end of one."""
SAMPLE_FLOPS = 2e11
"""Work of the images whose training step is timed on a CPU, where memory is not tried."""
PASSES = 3
"""Passes that are timed."""
TRAIN_RATIO = 3.5
"""Estimated ratio of a training step's time to a forward pass's, if only the latter is timed."""
SMALL_FLOPS = 1e11
"""Work of a batch so small that nothing has to be measured."""


@dataclass(frozen=True)
class StepCost:
    """One micro-batch on this machine."""

    microbatch: int
    """Images that go through the model at once."""
    train_seconds: float
    """Seconds per image of training: forward and backward pass. Infinite if not known."""
    forward_seconds: float
    """Measured seconds per image of a forward pass in the precision of training (`frozen_dtype`), as in evaluation."""
    float32_seconds: float
    """The same in float32, as in a report."""
    memory: int
    """Bytes of a training step, by `memory.rank_bytes`."""
    free: int | None
    """Bytes that were free before the measurement; None if the system does not say."""

    def describe(self) -> str:
        """`micro-batches of 16, 9.1 images/s, 2.1 of 22.0 GiB free memory`"""
        of_free = " GiB" if self.free is None else f" of {self.free / GIB:.1f} GiB free"
        rate = f"{format_rate(1 / self.train_seconds)} images/s" if self.train_seconds < math.inf else "speed unknown"
        return f"micro-batches of {self.microbatch}, {rate}, {self.memory / GIB:.1f}{of_free} memory"


def choose_microbatch(
    config: TrainConfig, workdir: Workdir, model: nn.Module, device: torch.device, measured: int | None
) -> int:
    """Images per forward pass of each rank, the same on all: the first of these sizes that there is.

    1. `config.microbatch`;
    2. the size that this run has used on the same device so far, so that it resumes to the bit;
    3. `measured`, by the caller;
    4. all images of a rank, if the batch is small;
    5. the largest size that fits into memory now, by `measure_step`.

    At most all images of a rank. It is not a setting of the run, which may resume on a machine with other memory.
    """
    if device.type == "cpu":
        keep_freed_memory()
    world = workdir.world
    rank_batch = -(-config.batch_size // world.world_size)
    runtime = {"device": device_name(device), "processes": world.world_size}

    def choose() -> int:
        saved = workdir.read_runtime()
        used = int(saved["microbatch"]) if saved.items() >= runtime.items() else None
        known = [size for size in (config.microbatch, used, measured) if size is not None]
        if known:
            return known[0]
        size = default_microbatch(config.model.forward_macs, device, rank_batch)
        is_small = size == rank_batch and size * STEP_FLOPS_PER_MAC * config.model.forward_macs < SMALL_FLOPS
        return size if is_small else measure_step(config, model, device, world.world_size).microbatch

    size = world.broadcast_object(lambda: min(choose(), rank_batch))
    workdir.write_runtime({**runtime, "microbatch": size})
    return size


def default_microbatch(forward_macs: int, device: torch.device, rank_batch: int) -> int:
    """Images at once if memory does not matter: a rank's `rank_batch` images; on a CPU at most CPU_FLOPS of work."""
    if device.type != "cpu":
        return rank_batch
    most = max(int(CPU_FLOPS / (STEP_FLOPS_PER_MAC * forward_macs)), 1)
    return rank_batch if most >= rank_batch else _lower_power_of_two(most + 1)


def _lower_power_of_two(size: int) -> int:
    """The largest power of two below `size`."""
    return 2 ** ((size - 1).bit_length() - 1)


def measure_step(
    config: TrainConfig, model: nn.Module, device: torch.device, world_size: int = 1, train: bool = True
) -> StepCost:
    """Chooses the micro-batch of each of `world_size` ranks and measures its speed; `model` stays unchanged.

    `config.microbatch` is taken if given. Otherwise it is `default_microbatch`, halved until a step takes at most
    MEMORY_FRACTION of the free memory, by count and on a GPU also by trial, or one image is left. The trial is not
    sharded: if only a shard of the model fits, the count decides and the time is not known.

    train: on a CPU, whether a training step is timed (`timing_seconds` estimates what this takes). If not, its time is
    TRAIN_RATIO times the forward pass's.
    """
    from vitlab.train.memory import rank_bytes

    on_cpu = device.type == "cpu"
    free = free_memory(device)
    if on_cpu:
        keep_freed_memory()
        free = None if free is None else free // world_size
    precision = resolve_precision(config.precision, device)
    sharded = config.fsdp and world_size > 1

    def step_bytes(images: int) -> int:
        return sum(rank_bytes(config, images, precision, device.type, world_size, sharded).values())

    rank_batch = -(-config.batch_size // world_size)
    size = min(config.microbatch or default_microbatch(config.model.forward_macs, device, rank_batch), rank_batch)
    if free is not None and not config.microbatch:
        while size > 1 and step_bytes(size) > MEMORY_FRACTION * free:
            size = _lower_power_of_two(size)
    train_seconds = None
    if train or not on_cpu:
        size, train_seconds = _try_training(config, model, device, size, rank_batch, sharded)
    forward_seconds, float32_seconds = _time_forward(config, model, device, size)
    if train_seconds is None:
        train_seconds = TRAIN_RATIO * forward_seconds
    return StepCost(size, train_seconds, forward_seconds, float32_seconds, step_bytes(size), free)


def _try_training(
    config: TrainConfig, model: nn.Module, device: torch.device, size: int, rank_batch: int, sharded: bool
) -> tuple[int, float]:
    """The micro-batch, `size` or a half of it that does not run out of memory, and seconds per image of training."""
    while True:
        try:
            count = min(size, _timed_images(config)) if device.type == "cpu" else size
            return size, time_training(config, model, device, count, rank_batch)
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
    return math.ceil(SAMPLE_FLOPS / (STEP_FLOPS_PER_MAC * config.model.forward_macs))


def timing_seconds(config: TrainConfig, train_seconds: float) -> float:
    """What it takes to time a training step on a CPU, by an estimate of its seconds per image."""
    return PASSES * _timed_images(config) * train_seconds


def time_training(config: TrainConfig, model: nn.Module, device: torch.device, count: int, rank_batch: int) -> float:
    """Seconds per image of a training step of `rank_batch` images; `count` of them are timed, by a copy of the model.

    The update of the weights takes as long for any number. Raises torch.OutOfMemoryError.
    """
    config = dataclasses.replace(config, compile=False, fsdp=False)
    state = create_state(config, copy.deepcopy(model).to(device), device, SINGLE)
    objective = create_objective(config)
    batch = blank_batch(objective, torch.zeros(count, 3, *config.model.image_hw, device=device))
    seconds = _shortest(functools.partial(train_step, config, state, objective, batch, 0.0, count), device)
    update = min(_timed(state.optimizer.step, device), seconds)
    return (seconds - update) / count + update / rank_batch


def _time_forward(config: TrainConfig, model: nn.Module, device: torch.device, size: int) -> tuple[float, float]:
    """Seconds per image of a forward pass of up to `size` images, in the precision of training and in float32."""
    if device.type == "cpu":  # an eighth of the work of the training step that is timed
        size = min(size, math.ceil(SAMPLE_FLOPS / 8 / (2 * config.model.forward_macs)))
    images = torch.zeros(size, 3, *config.model.image_hw, device=device)
    chosen, seconds = frozen_dtype(config.precision, device), {}
    with torch.inference_mode():
        for dtype in {torch.float32, chosen}:
            forward = copy.deepcopy(getattr(model, "vit", model)).eval()
            prepare_for_inference(forward, device, dtype)
            seconds[dtype] = _shortest(functools.partial(forward, images), device) / len(images)
    return seconds[chosen], seconds[torch.float32]


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of PASSES passes but the first, which also builds and allocates what later ones reuse.

    Not their mean: a clock shortens a job whose machine turns out slower, but none is made longer where it is faster.
    """
    _, *seconds = (_timed(work, device) for _ in range(PASSES))
    return min(seconds)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(time.perf_counter() - start, 1e-9)
