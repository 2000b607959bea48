"""The training loop: every run of every model goes through `train`.

Batches, augmentation, mixup and dropout are pure functions of (seed, step, example), so that a resumed run computes the
same bits. Each of several ranks computes its shard of every batch, and all hold the same state after each step. Order,
batches and learning rate do not depend on the world size; only dropout's masks and mixup's partners do.
"""

import functools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeVar, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vitlab.config import TrainConfig
from vitlab.data.dataset import Dataset
from vitlab.data.loader import Batch, train_batches
from vitlab.data.transforms import TrainTransform
from vitlab.errors import RunError, UserError
from vitlab.rng import Stream, generator
from vitlab.train.checkpoint import CheckpointWriter, TrainState, create_state, load_latest, trained_model
from vitlab.train.distributed import SINGLE, World
from vitlab.train.microbatch import choose_microbatch
from vitlab.train.objectives import Objective, create_objective
from vitlab.train.optim import clip_by_global_norm, describe_groups, learning_rate, set_learning_rate, update_average
from vitlab.train.parallel import full_tensor, local_shard
from vitlab.train.precision import device_name
from vitlab.train.progress import Speed, TrainProgress, peak_flops
from vitlab.train.signals import StoppedError, stop_signals
from vitlab.train.workdir import Workdir

Evaluate = Callable[[nn.Module], dict[str, float]]
AnyModel = TypeVar("AnyModel", bound=nn.Module)


class NonFiniteError(RunError):
    """The loss or the gradient is infinite or NaN."""


def train(
    config: TrainConfig,
    workdir: Workdir,
    model: AnyModel,
    dataset: Dataset,
    evaluate: Evaluate | None = None,
    *,
    device: str | torch.device = "cpu",
    label: str = "train",
    microbatch: int | None = None,
    world: World = SINGLE,
) -> AnyModel:
    """Trains `model` on `dataset` as `config` says, or continues the run in `workdir`; returns the model in float32.

    The weights returned, and given to `evaluate(model)` every `eval_every` steps on every rank, are the Polyak average
    if there is one. `microbatch`: images per forward pass, if the caller has measured it. SIGTERM or Ctrl-C ends the
    run within one micro-batch, and saves the last complete step: StoppedError. Also raises NonFiniteError.
    """
    device = torch.device(device)
    given, needed = config.model.num_classes, len(dataset.classes)
    if config.masking is None and given != needed:
        raise UserError(f"the model has {given} classes and {config.data.name} has {needed}; set model.num_classes.")
    steps = config.total_steps(len(dataset))
    microbatch = choose_microbatch(config, workdir, model, device, microbatch)
    state = create_state(config, model.to(device), device, world)
    with (
        TrainProgress(label, steps, quiet=not world.is_rank_0) as progress,
        stop_signals() as stop,
        CheckpointWriter(workdir.checkpoints, config.keep_checkpoints) as writer,
    ):
        run = _Run(config, workdir, dataset, evaluate, state, steps, progress, stop, writer)
        run.resume()
        _train_steps(run, microbatch)
    return cast(AnyModel, trained_model(config, state))


def _train_steps(run: "_Run", microbatch: int) -> None:
    """The steps that are left, with their records, evaluations and checkpoints."""
    config, state, world, writer = run.config, run.state, run.world, run.writer
    objective = create_objective(config)
    batches = load_batches(config, run.dataset, state.step, run.device, world)
    if state.evaluation_due:
        run.evaluate_model()
    while state.step < run.total_steps:
        with run.speed.waiting_for_data():
            batch = next(batches)
        # The host waits here, and in `should_continue` between micro-batches: all ranks stop at the same step.
        stopping, num_images, skipped = world.all_reduce(run.stop.is_set(), len(batch.indices), batch.skipped)
        if not num_images:
            raise UserError(f"none of the {skipped} images of a batch can be read; the log lists them.")
        lr = learning_rate(config.optim, state.step, run.total_steps)
        should_continue = functools.partial(run.should_continue, num_images)
        if stopping or not train_step(config, state, objective, batch, lr, num_images, microbatch, should_continue):
            run.save_and_stop()
        run.count(num_images, skipped)
        last = state.step == run.total_steps
        logging, saving = (last or state.step % n == 0 for n in (config.log_every, config.checkpoint_every))
        if logging or saving or run.device.type == "cpu":  # on a GPU this waits for the device
            run.check_finite()
        writer.check()
        # Metrics before the checkpoint: a run killed in between repeats the step and its record. In the other order the
        # record would be lost.
        if logging:
            run.log(lr)
        if last or (config.eval_every and state.step % config.eval_every == 0):
            run.evaluate_model()
        if saving:
            run.save()
    if world.all_reduce(run.stop.is_set())[0]:  # the caller may have more to do, which is not to begin
        run.save_and_stop()


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
    """One update: forward and backward pass in micro-batches, clipping, optimizer step. Returns whether it was made.

    `batch` is this rank's shard of `num_images` in all; `microbatch` images go through the model at once (default all).
    Between micro-batches `should_continue(fraction done)` says whether to continue; if not, the state is as before.
    """
    weights, parallel, world = state.weights, state.parallel, state.parallel.world
    rng = generator(config.seed, Stream.STEP, epoch=state.step)
    torch.manual_seed(int(rng.integers(2**62)) + world.rank)  # dropout draws from torch's global generator
    images, targets = objective.corrupt(batch, rng)
    microbatches = _split(config, images, targets, microbatch, len(batch.indices), world.world_size)
    weights.zero_grad()
    totals = torch.zeros(2, dtype=torch.float64, device=images.device)  # loss and accuracy
    for number, (inputs, labels, count) in enumerate(microbatches, 1):
        # `loss` is a mean over the micro-batch, and ranks average their gradients. For the gradient of the mean over
        # the global batch the micro-batch weighs count / num_images, times world_size against the average.
        scale = count * world.world_size / num_images
        with parallel.micro_step(last=number == len(microbatches)):
            with weights.autocast():
                loss, accuracy = objective.loss(parallel.forward, inputs, labels)
            (loss * scale).backward()
        weights.accumulate_gradients()
        totals += torch.stack([loss.detach(), accuracy]).double() * scale
        if number < len(microbatches) and not should_continue(number / len(microbatches)):
            return False
    masters = weights.masters.values()
    parallel.average_gradients(master.grad for master in masters if master.grad is not None)
    world.all_reduce_mean([totals])
    norm = full_tensor(clip_by_global_norm(masters, config.optim.clip_norm))
    finite = torch.isfinite(totals[0]) & torch.isfinite(norm)
    state.sums[3] = torch.where((state.sums[3] == 0) & ~finite, state.step + 1, state.sums[3])
    state.sums[:2] += totals
    state.sums[2] += norm
    if images.device.type == "cpu" and not finite:
        return True  # without the update: `check_finite` saves the weights that met this batch
    set_learning_rate(state.optimizer, lr)
    state.optimizer.step()
    weights.update_copy()
    state.step += 1
    if state.average is not None and config.average_decay is not None:
        average, current = ([local_shard(t.detach()) for t in group] for group in (state.average.values(), masters))
        update_average(average, current, config.average_decay)
    return True


def _split(
    config: TrainConfig, images: Tensor, targets: Tensor, microbatch: int | None, readable: int, world_size: int
) -> list[tuple[Tensor, Tensor, int]]:
    """(images, targets, number of images that count) of each micro-batch of a rank's shard."""
    size = microbatch or config.microbatch or config.batch_size
    microbatches = [
        (inputs, labels, min(len(labels), readable))  # 0 for the stand-in of a shard that cannot be read
        for inputs, labels in zip(images.split(size), targets.split(size), strict=True)
    ]
    if world_size > 1:
        # Every rank makes the same number of passes, for each is a collective (sharded weights, requests to stop).
        # A shard that has lost unreadable images is filled up with passes over one image of weight 0.
        passes = -(-config.batch_size // (world_size * size))
        microbatches += [(images[:1], targets[:1], 0)] * (passes - len(microbatches))
    return microbatches


def load_batches(
    config: TrainConfig, dataset: Dataset, step: int, device: torch.device, world: World
) -> Iterator[Batch]:
    """This rank's shard of every batch from that of `step` on: the order is a pure function of the seed."""
    data = config.data
    transform = TrainTransform(
        config.model.image_hw,
        crop=data.crop,
        min_area=data.min_area,
        resize=data.crop_resize,
        pad=data.pad,
        flip=data.flip,
        randaugment_layers=data.randaugment_layers,
        randaugment_magnitude=data.randaugment_magnitude,
        fast=data.fast_decode,
    )
    return train_batches(
        dataset,
        transform,
        batch_size=config.batch_size,
        seed=config.seed,
        start=step * config.batch_size,
        rank=world.rank,
        world_size=world.world_size,
        workers=data.workers,
        on_error=data.on_error,
        device=device,
        draws=create_objective(config).draws,
    )


@dataclass
class _Run:
    """What happens around the steps: resume, log, evaluate, save, stop."""

    config: TrainConfig
    workdir: Workdir
    dataset: Dataset
    evaluate: Evaluate | None
    state: TrainState
    total_steps: int
    progress: TrainProgress
    stop: threading.Event
    writer: CheckpointWriter

    def __post_init__(self) -> None:
        self.world, self.device = self.state.parallel.world, self.state.sums.device
        peak = peak_flops(device_name(self.device))
        self.speed = Speed(6.0 * self.config.model.forward_macs, peak and peak * self.world.world_size)

    def resume(self) -> None:
        """Restores the last valid checkpoint, and describes the run."""
        config, state, world, say = self.config, self.state, self.world, self.progress.say
        warmup, steps = config.optim.warmup_steps, self.total_steps
        if warmup >= steps:
            say(f"the warm-up of {warmup} steps exceeds the run of {steps}; usual: --optim.warmup-steps {steps // 10}")
        saved = load_latest(self.workdir.checkpoints, say, world)
        due = bool(saved and saved.state.get("evaluation_due"))
        self.workdir.truncate_logs(saved.step if saved else None, evaluation_due=due)
        if saved:
            state.restore(saved.tensors, saved.step, saved.state)
            say(f"continues from {saved.path.name}")
        processes = f" by {world.world_size} processes" if world.world_size > 1 else ""
        say(f"{state.weights.precision} on {self.device}{processes}; {describe_groups(state.optimizer)}")

    def show_progress(self, num_images: int = 0, fraction: float = 0.0) -> None:
        """Shows the progress, `fraction` of a batch of `num_images` included."""
        step = self.state.step + fraction
        left = (self.total_steps - step) * self.config.batch_size
        self.progress.tick(step, self.speed.images + num_images * fraction, left)

    def count(self, num_images: int, skipped: int) -> None:
        """Counts a complete step."""
        self.state.skipped += skipped
        self.speed.images += num_images
        self.show_progress()

    def should_continue(self, num_images: int, fraction: float) -> bool:
        """Whether no rank has received a signal, after this fraction of a step."""
        self.show_progress(num_images, fraction)
        return not self.world.all_reduce(self.stop.is_set())[0]

    def log(self, lr: float) -> None:
        """Records the means since the last record."""
        state = self.state
        loss, accuracy, norm, _ = state.sums.tolist()
        updates = state.step - state.recorded
        epoch = state.step * self.config.batch_size / len(self.dataset)
        metrics = {"loss": loss / updates, "grad_norm": norm / updates, "lr": lr, "epoch": epoch}
        if not math.isnan(accuracy):  # of an objective with classes
            metrics["accuracy"] = accuracy / updates
        metrics["skipped"] = state.skipped
        state.sums.zero_()
        state.recorded = state.step
        speed = self.speed.record((self.total_steps - state.step) * self.config.batch_size)
        self.workdir.log_metrics(state.step, metrics)
        self.workdir.log_speed(state.step, speed)
        self.progress.show({"step": state.step, **metrics}, speed)

    def evaluate_model(self) -> None:
        """Evaluates and records. If a signal stops it, the run is saved, and resumes with the evaluation."""
        state = self.state
        if self.evaluate is None:
            return
        with self.speed.paused():
            model = trained_model(self.config, state)
            if self.world.world_size == 1:  # several ranks evaluate to the end, for each waits for the others' results
                model.register_forward_pre_hook(self._check_evaluation)
            try:
                figures = self.evaluate(model)
            except StoppedError:
                state.evaluation_due = True
                self.save()
                self.writer.wait()
                raise
            state.evaluation_due = False
            self.workdir.log_metrics(state.step, figures)
            self.progress.say(f"step {state.step}: " + ", ".join(f"{k} {v:.4f}" for k, v in figures.items()))

    def _check_evaluation(self, *_: object) -> None:
        if self.stop.is_set():
            at = f"step {self.state.step}/{self.total_steps}"
            raise StoppedError(f"stopped and saved at {at}, whose evaluation is due; the same command continues.")

    def save(self) -> None:
        """Saves the last complete step, while training goes on."""
        state = self.state
        with self.speed.paused():
            tensors = state.tensors(keep=self.workdir.writes)
            if self.workdir.writes:
                self.workdir.sync()
                self.writer.save(state.step, tensors, state.scalars())

    def save_and_stop(self) -> NoReturn:
        """Saves and raises StoppedError. All ranks wait for the checkpoint: torchrun kills the rest once one ends."""
        self.save()
        self.world.broadcast_object(self.writer.wait)
        raise StoppedError(
            f"stopped and saved at step {self.state.step}/{self.total_steps}; the same command continues."
        )

    def check_finite(self) -> None:
        """Raises NonFiniteError after a step that was not finite, and saves its batch, shard by shard, for replay."""
        state = self.state
        bad_step = int(state.sums[3])
        if not bad_step:
            return
        batch = next(load_batches(self.config, self.dataset, bad_step - 1, self.device, self.world))
        rank = "" if self.world.is_rank_0 else f".process-{self.world.rank}"
        path = self.workdir.path / "nonfinite" / f"step-{bad_step:09d}{rank}.safetensors"
        path.parent.mkdir(exist_ok=True)
        tensors = {"images": batch.images.contiguous(), "labels": batch.labels, "indices": batch.indices}
        if state.step < bad_step:  # the update was not made: these weights met the batch
            tensors |= {f"weights/{name}": full_tensor(w.detach()) for name, w in state.weights.masters.items()}
        save_file(tensors, path)
        raise NonFiniteError(
            f"the loss or its gradient is not finite at step {bad_step}; {path} holds the batch. The last checkpoint "
            f"is from before it. Try a smaller optim.lr, optim.clip_norm=1 or precision=float32."
        )
