"""One step of training: micro-batches, gradients of all ranks, clipping, the update (Sec. 4.1).

The state holds float32 weights, the optimizer, the Polyak average and sums of metrics. Each rank computes the gradient
of its shard of the batch in micro-batches; the mean over the global batch does not depend on how they are cut. The loop
(`loop.py`) calls `train_step` with the learning rate of the step, and is the only one that does.

    train_step(config, state, objective, batch, lr=1e-3, num_images=4096)  # True; state.step is one more
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vitlab.config import TrainConfig
from vitlab.data.loader import Batch
from vitlab.rng import Stream, generator
from vitlab.train.checkpoint import TrainState
from vitlab.train.objectives import Objective
from vitlab.train.optim import clip_by_global_norm, set_learning_rate, update_average


def train_step(
    config: TrainConfig,
    state: TrainState,
    objective: Objective,
    batch: Batch,
    lr: float,
    num_images: int,
    microbatch: int | None = None,
    should_continue: Callable[[float], bool] = lambda _: True,
) -> bool:
    """One update: forward and backward pass in micro-batches, clipping, optimizer step. Returns False if stopped.

    `batch` is this rank's shard of `num_images` in all; `microbatch` images go through the model at once (default all).
    After each micro-batch but the last, False from `should_continue(fraction done)` stops the step; the state is as
    before. On a CPU a step that is not finite returns True without an update; `check_finite` then raises.
    """
    weights = state.weights
    parallel = state.parallel
    world = state.parallel.world
    rng = generator(config.seed, Stream.STEP, epoch=state.step)
    _seed(int(rng.integers(2**62)) + world.rank, batch.images.device)  # dropout draws from torch's global generator
    images, targets = objective.prepare_batch(batch, rng)
    microbatches = _split(images, targets, microbatch or config.batch_size, config.batch_size, world.world_size)
    weights.zero_grad()
    totals = torch.zeros(2, dtype=torch.float64, device=images.device)  # loss and accuracy
    for number, (inputs, micro_targets, count) in enumerate(microbatches, 1):
        # `loss` is a mean over the micro-batch, and ranks average their gradients. For the gradient of the mean over
        # the global batch the micro-batch weighs count / num_images, times world_size, since DDP averages.
        scale = count * world.world_size / num_images
        with parallel.micro_step(last=number == len(microbatches)):
            with weights.autocast():
                loss, accuracy = objective.loss(parallel.forward, inputs, micro_targets)
            (loss * scale).backward()
        weights.accumulate_gradients()
        totals += torch.stack([loss.detach(), accuracy]).double() * scale
        if number < len(microbatches) and not should_continue(number / len(microbatches)):
            return False
    masters = weights.masters.values()
    parallel.average_gradients(master.grad for master in masters if master.grad is not None)
    world.all_reduce_mean([totals])
    norm = clip_by_global_norm(masters, config.optim.clip_norm)
    finite = torch.isfinite(totals[0]) & torch.isfinite(norm)
    state.first_nonfinite_step.masked_fill_((state.first_nonfinite_step == 0) & ~finite, state.step + 1)
    state.metric_sums[:2] += totals
    state.metric_sums[2] += norm
    if images.device.type == "cpu" and not finite:
        return True  # without the update: `check_finite` saves the weights before this update
    set_learning_rate(state.optimizer, lr)
    state.optimizer.step()
    weights.copy_masters_to_model()
    state.step += 1
    if state.average is not None and config.average_decay is not None:
        update_average(state.average.values(), masters, config.average_decay)
    return True


def _seed(seed: int, device: torch.device) -> None:
    """Sets the generators of the CPU and of `device`. `torch.manual_seed` also takes note of the stack for each kind of
    device that is not there, a millisecond at each step."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _split(
    images: Tensor, targets: Tensor, microbatch: int, batch_size: int, world_size: int
) -> list[tuple[Tensor, Tensor, int]]:
    """(images, targets, loss weight) of each micro-batch of this rank's shard; the weight counts images."""
    pairs = zip(images.split(microbatch), targets.split(microbatch), strict=True)
    microbatches = [(inputs, micro_targets, len(inputs)) for inputs, micro_targets in pairs]
    if world_size > 1:
        # Every rank makes the same number of passes, for each is a collective (sharded weights, requests to stop).
        # A rank that skipped unreadable images pads with forward passes of one image with loss weight 0.
        passes = -(-batch_size // (world_size * microbatch))
        microbatches += [(images[:1], targets[:1], 0)] * (passes - len(microbatches))
    return microbatches
