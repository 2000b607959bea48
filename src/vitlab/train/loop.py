"""THE training loop: every run of every model goes through `train`.

Batches, augmentation, mixup and dropout are functions of (seed, step, example), so a checkpoint needs nothing but
the weights, what the optimizer remembers, the average and the sums of the record under way.

Of several processes each computes with its share of every batch, and all hold the same state after each step: the
batch, the learning rate and the order of examples know nothing of their number, and a checkpoint of eight continues
on one. What they cannot share is drawn by each for itself: dropout's masks, and mixup's partners within a share.
"""

import contextlib
import functools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from vitlab.config import TrainConfig
from vitlab.data.dataset import Dataset
from vitlab.data.loader import Batch, train_batches
from vitlab.data.registry import load_dataset
from vitlab.data.transforms import TrainTransform
from vitlab.errors import UserError
from vitlab.rng import Stream, generator
from vitlab.train.checkpoint import Checkpoint, CheckpointWriter, load_latest, read_checkpoint
from vitlab.train.compiled import StoppedError
from vitlab.train.distributed import SINGLE, World, full_tensor, local_shard
from vitlab.train.float8 import describe_float8
from vitlab.train.microbatch import default_microbatch, measure_step
from vitlab.train.objectives import Classification, MaskedPatch, create_objective, create_training_model
from vitlab.train.optim import clip_by_global_norm, describe_groups, learning_rate, set_learning_rate, update_average
from vitlab.train.precision import keep_freed_memory
from vitlab.train.progress import Progress, Speed, peak_flops
from vitlab.train.state import State, create_state
from vitlab.train.workdir import Workdir

SMALL_FLOPS = 1e11
"""Work of a batch that is small: nothing has to be measured before it."""
Evaluate = Callable[[nn.Module], dict[str, float]]
Trained = TypeVar("Trained", bound=nn.Module)
"""What `create_training_model` makes of the run's settings."""


class NonFiniteError(RuntimeError):
    """The loss or the gradient is not a number any more."""


class _EvaluationStoppedError(Exception):
    """A request to stop has come during an evaluation."""


def train(
    config: TrainConfig,
    workdir: Workdir,
    model: Trained,
    *,
    dataset: Dataset | None = None,
    evaluate: Evaluate | None = None,
    device: str | torch.device = "cpu",
    label: str = "train",
    microbatch: int | None = None,
    world: World = SINGLE,
) -> Trained:
    """Trains `model` as `config` says, or continues what `workdir` holds; returns the trained model in float32.

    `dataset` is the training split where the caller has loaded it already, `microbatch` the number of images at once
    where the caller has measured it; see `_microbatch`. With Polyak averaging the returned weights are the averaged
    ones. `evaluate(model)`, given such a model, makes figures to record every `eval_every` steps; each
    process calls it. A request to stop (SIGTERM, Ctrl-C) ends the run within one micro-batch: the step under way is
    dropped and the last complete one saved.
    Raises StoppedError after such a request, NonFiniteError, and ValueError for bad settings or data.
    """
    device = torch.device(device)
    if device.type == "cpu":
        keep_freed_memory()
    data = config.data
    if dataset is None:
        dataset = load_dataset(
            data.name, data.train_split, root=data.root, classes=data.classes, on_error=data.on_error,
            exclude=data.exclude, part=data.part, part_seed=data.part_seed or 0,
        )  # fmt: skip
    if config.masking is None and len(dataset.classes) != config.model.num_classes:
        raise UserError(
            f"the model has {config.model.num_classes} classes and {data.name} has {len(dataset.classes)}; set "
            f"model.num_classes to {len(dataset.classes)}."
        )
    steps = config.total_steps(len(dataset))
    size = _microbatch(config, workdir, model, device, microbatch)
    state = create_state(config, model.to(device), device, world)
    objective = create_objective(config)
    flops = 6.0 * config.model.forward_macs
    with (
        Progress(label, steps, quiet=not world.is_rank_0) as progress,
        stop_signals() as asked_to_stop,
        CheckpointWriter(workdir.checkpoints, config.keep_checkpoints) as writer,
    ):
        if config.optim.warmup_steps >= steps:
            progress.say(
                f"the warm-up of {config.optim.warmup_steps} steps is not over when the run of {steps} steps ends; "
                f"the rate never reaches optim.lr. A tenth of the run is usual: --optim.warmup-steps {steps // 10}."
            )
        _resume(state, workdir, progress)
        several = f" by {world.world_size} processes" if world.world_size > 1 else ""
        products = f", {describe_float8(model, device)}" if config.float8 else ""
        progress.say(f"{state.weights.precision} on {device}{several}{products}; {describe_groups(state.optimizer)}")
        batches = _batches(config, dataset, state.step, device, world)
        peak = peak_flops(device)
        speed = Speed(flops, peak and peak * world.world_size)

        def evaluate_now() -> None:
            """Evaluates and records; interrupted by a request to stop, it saves the run, which then begins with it."""
            assert evaluate is not None
            with speed.paused():
                try:
                    figures = evaluate(_stoppable(_finished(config, state, model), asked_to_stop, world))
                except _EvaluationStoppedError:
                    state.evaluation_due = True
                    _save(state, workdir, writer)
                    writer.wait()
                    raise StoppedError(
                        f"stopped and saved at step {state.step}/{steps}, whose evaluation is still due; the same "
                        f"command continues."
                    ) from None
                state.evaluation_due = False
                workdir.log_metrics(state.step, figures)
                progress.say(f"step {state.step}: " + ", ".join(f"{k} {v:.4f}" for k, v in figures.items()))

        def tick(step: float, images: float) -> None:
            progress.tick(step, images, (steps - step) * config.batch_size)

        def goes_on(num_images: int, share: float) -> bool:
            """Whether to continue with a batch of `num_images` of which a `share` is done."""
            tick(state.step + share, speed.images + num_images * share)
            return not world.all_reduce(asked_to_stop.is_set())[0]

        if state.evaluation_due and evaluate:
            evaluate_now()
        while state.step < steps:
            waiting = time.perf_counter()
            batch = next(batches)
            speed.waited += time.perf_counter() - waiting
            # The one exchange of a step that the host waits for; where a process has died it ends the others.
            asked, num_images, skipped = world.all_reduce(asked_to_stop.is_set(), len(batch.indices), batch.skipped)
            if not num_images:
                raise UserError(
                    f"none of the {skipped} images of a batch can be read; the log says why. Mend them, or take them "
                    f"out of {data.name}."
                )
            rate = learning_rate(config.optim, state.step, steps)
            more = functools.partial(goes_on, num_images)
            if asked or not update(config, state, objective, batch, rate, num_images, size, more):
                _save(state, workdir, writer)  # the last complete step
                raise _stopped(state, steps, world, writer)
            state.skipped += skipped
            speed.images += num_images
            tick(float(state.step), float(speed.images))
            last = state.step == steps
            due = last or state.step % config.log_every == 0
            saving = last or state.step % config.checkpoint_every == 0
            if due or saving or device.type == "cpu":  # reading a number off a CPU's tensor costs nothing
                _check_finite(config, state, workdir, dataset, device, world)
            writer.check()
            if due:
                _record(config, state, workdir, progress, speed, rate, len(dataset), steps)
            if evaluate and (last or (config.eval_every and state.step % config.eval_every == 0)):
                evaluate_now()
            if saving:
                with speed.paused():
                    _save(state, workdir, writer)
            if last and world.all_reduce(asked_to_stop.is_set())[0]:  # also at the end: more may follow here
                raise _stopped(state, steps, world, writer)
    return _finished(config, state, model)


def _stopped(state: State, steps: int, world: World, writer: CheckpointWriter) -> StoppedError:
    """Waits until the checkpoint is written, on every process: torchrun kills whoever is left soon after the first has
    ended."""
    world.broadcast_object(writer.wait)
    return StoppedError(f"stopped and saved at step {state.step}/{steps}; the same command continues.")


def _microbatch(
    config: TrainConfig, workdir: Workdir, model: nn.Module, device: torch.device, measured: int | None
) -> int:
    """Images that each process computes at once, the same on all: `config.microbatch` where it is given.

    Otherwise what the folder says of a run on the same device, so that a continued run computes the same numbers to
    the bit; then what the caller has `measured`; the whole share of a batch where it is small; or what is measured now.
    It is no setting of the run, which may go on where memory is different.
    """
    world = workdir.world
    share = -(-config.batch_size // world.world_size)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    def choose() -> int:
        if config.microbatch is not None:
            return min(config.microbatch, share)
        saved = workdir.read_runtime()
        if saved.get("device") == name and saved.get("processes") == world.world_size:
            return min(int(saved["microbatch"]), share)
        if measured is not None:
            return min(measured, share)
        size = default_microbatch(config, device, share)
        small = size == share and share * 6 * config.model.forward_macs < SMALL_FLOPS
        return size if small or config.cuda_graphs else measure_step(config, model, device, world.world_size).microbatch

    size = world.broadcast_object(choose)
    workdir.write_runtime({"device": name, "processes": world.world_size, "microbatch": size})
    return size


def _stoppable(model: Trained, asked_to_stop: threading.Event, world: World) -> Trained:
    """`model`, whose forward pass raises _EvaluationStoppedError once a request to stop has come. Several processes
    evaluate to the end, for each waits for what the others have computed."""

    def check(*_: object) -> None:
        if asked_to_stop.is_set():
            raise _EvaluationStoppedError

    if world.world_size == 1:
        model.register_forward_pre_hook(check)
    return model


def _resume(state: State, workdir: Workdir, progress: Progress) -> None:
    """Continues from the last checkpoint: the one that the first process finds whole, on every process."""
    saved: Checkpoint | None = None
    if workdir.writes:
        saved = load_latest(
            workdir.checkpoints, lambda path, why: progress.say(f"{path.name} is damaged and passed over: {why}")
        )
    found = workdir.world.broadcast_object(lambda: saved and saved.path.name)
    due = workdir.world.broadcast_object(lambda: bool(saved and saved.state.get("evaluation_due")))
    workdir.truncate_metrics(saved.step if saved else None, evaluation_due=due)
    if found:
        saved = saved or read_checkpoint(workdir.checkpoints / found)
        state.restore(saved.tensors, saved.step, saved.state)
        progress.say(f"continues from {found}")


def _save(state: State, workdir: Workdir, writer: CheckpointWriter) -> None:
    tensors = state.tensors(wanted=workdir.writes)
    if workdir.writes:
        workdir.sync()
        due = {"evaluation_due": True} if state.evaluation_due else {}
        writer.save(state.step, tensors, {"skipped": state.skipped, "recorded": state.recorded, **due})


def _batches(config: TrainConfig, dataset: Dataset, step: int, device: torch.device, world: World) -> Iterator[Batch]:
    data = config.data
    transform = TrainTransform(
        config.model.image_hw, crop=data.crop, min_area=data.min_area, resize=data.crop_resize, pad=data.pad,
        flip=data.flip, randaugment_layers=data.randaugment_layers,
        randaugment_magnitude=data.randaugment_magnitude, fast=data.fast_decode,
    )  # fmt: skip
    return train_batches(
        dataset, transform, batch_size=config.batch_size, seed=config.seed, start=step * config.batch_size,
        rank=world.rank, world_size=world.world_size, workers=data.workers, on_error=data.on_error, device=device,
        draws=create_objective(config).draws,
    )  # fmt: skip


def step_rng(seed: int, step: int) -> np.random.Generator:
    """The generator of one step's choices for the whole batch; its counter keeps it apart from the loader's draws."""
    return generator(seed, Stream.STEP, step)


def update(
    config: TrainConfig,
    state: State,
    objective: Classification | MaskedPatch,
    batch: Batch,
    rate: float,
    num_images: int,
    microbatch: int | None = None,
    goes_on: Callable[[float], bool] = lambda _: True,
) -> bool:
    """One step: the gradient of the whole batch in micro-batches, clipped, and the optimizer's update.

    `batch` is this process's share of the `num_images` in all; `microbatch` images are computed at once (all, unless
    given). `goes_on` hears after each micro-batch which share of the batch is done, and says whether to continue;
    every process asks it equally often. Returns whether the step was made: if not, the state is as before it.
    """
    parallel, world = state.parallel, state.parallel.world
    rng = step_rng(config.seed, state.step)
    torch.manual_seed(int(rng.integers(2**62)) + world.rank)  # dropout draws from torch's own generator
    state.weights.clear_gradients()
    images, targets = objective.corrupt(batch, rng)
    size = microbatch or config.microbatch or config.batch_size
    total = torch.zeros(2, dtype=torch.float64, device=images.device)
    parts = [
        (part, answer, min(len(answer), len(batch.indices)))  # 0 for what stands in for a share that cannot be read
        for part, answer in zip(images.split(size), targets.split(size), strict=True)
    ]
    if world.world_size > 1:
        # Sharded weights are gathered, and a request to stop is exchanged, once a part, by all at once, also where a
        # share has lost images.
        most = -(-config.batch_size // (world.world_size * size))
        parts += [(images[:1], targets[:1], 0)] * (most - len(parts))
    for number, (part, answer, count) in enumerate(parts, 1):
        share = count * world.world_size / num_images  # of a mean over processes
        with parallel.exchanging(last=number == len(parts)):
            with state.weights.autocast():
                loss, accuracy = objective.loss(parallel.forward, part, answer)
            (loss * share).backward()
        state.weights.collect_gradients()
        total += torch.stack([loss.detach(), accuracy]).double() * share
        if number < len(parts) and not goes_on(number / len(parts)):
            return False
    masters = state.weights.masters.values()
    parallel.average(master.grad for master in masters if master.grad is not None)
    world.all_reduce_mean([total])
    norm = full_tensor(clip_by_global_norm(masters, config.optim.clip_norm))
    finite = torch.isfinite(total[0]) & torch.isfinite(norm)
    state.sums[3] = torch.where((state.sums[3] == 0) & ~finite, state.step + 1, state.sums[3])
    state.sums[:2] += total
    state.sums[2] += norm
    if images.device.type == "cpu" and not finite:
        return True  # leaves the weights as they were, for `_check_finite` to save
    set_learning_rate(state.optimizer, rate)
    state.optimizer.step()
    state.weights.refresh()
    state.step += 1
    if state.average is not None:
        assert config.average_decay is not None
        averages, weights = ([local_shard(each.detach()) for each in of] for of in (state.average.values(), masters))
        update_average(averages, weights, config.average_decay)
    return True


def _record(
    config: TrainConfig, state: State, workdir: Workdir, progress: Progress, speed: Speed, rate: float,
    examples: int, steps: int,
) -> None:  # fmt: skip
    """Means since the last record; the only place where a run without evaluation waits for the device."""
    loss, accuracy, norm, _ = state.sums.tolist()
    updates = state.step - state.recorded
    metrics = {
        "loss": loss / updates,
        "accuracy": accuracy / updates,
        "grad_norm": norm / updates,
        "lr": rate,
        "epoch": state.step * config.batch_size / examples,
        "skipped": state.skipped,
    }
    if math.isnan(accuracy):  # there is nothing to be right about
        del metrics["accuracy"]
    state.sums.zero_()
    state.recorded = state.step
    figures = speed.record(steps - state.step, config.batch_size)
    workdir.log_metrics(state.step, metrics)
    workdir.log_speed(state.step, figures)
    progress.show({"step": state.step, **metrics}, figures)


def _check_finite(
    config: TrainConfig, state: State, workdir: Workdir, dataset: Dataset, device: torch.device, world: World
) -> None:
    """Stops the run at the first loss or gradient that is not finite, with the batch that made it on disk; of several
    processes each keeps its share."""
    bad = int(state.sums[3])
    if not bad:
        return
    batch = next(_batches(config, dataset, bad - 1, device, world))
    folder = workdir.path / "nonfinite"
    folder.mkdir(exist_ok=True)
    path = folder / (f"step-{bad:09d}" + ("" if world.is_rank_0 else f".process-{world.rank}") + ".safetensors")
    kept = {"images": batch.images.contiguous(), "labels": batch.labels, "indices": batch.indices}
    if state.step < bad:  # the update was not made: the weights are those that met this batch
        kept |= {f"weights/{name}": full_tensor(master.detach()) for name, master in state.weights.masters.items()}
    save_file(kept, path)
    raise NonFiniteError(
        f"the loss or its gradient is not finite at step {bad}. The batch is kept in {path} for replay, and the "
        f"last checkpoint is from before it. Try a smaller optim.lr, optim.clip_norm=1 or precision=float32."
    )


def _finished(config: TrainConfig, state: State, model: Trained) -> Trained:
    """The trained model as it stands, in float32: with the averaged weights where there are any."""
    fresh = create_training_model(config).to(next(iter(state.weights.masters.values())).device)
    assert isinstance(model, type(fresh)), f"the settings are those of a {type(fresh).__name__}"  # FSDP derives from it
    trained = state.average or {name: master.detach() for name, master in state.weights.masters.items()}
    fresh.load_state_dict({name: full_tensor(tensor) for name, tensor in trained.items()})
    return cast(Trained, fresh.eval())


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and the first Ctrl-C set instead of ending the process."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def ask(number: int, _: Any) -> None:
        if event.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        event.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
