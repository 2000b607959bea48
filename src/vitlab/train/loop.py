"""The training loop: every run of every model goes through `train` (Sec. 4.1).

`_train_steps` is the loop: batch, step, log, save, evaluate. `_Run` below has what these words mean, and how a run
resumes and stops. Each rank computes its part of every batch, and all hold the same state after each step. A resumed
run computes the same bits: batches and augmentation are pure functions of (seed, step, example), mixup and dropout of
(seed, step, rank). So mixup partners depend on the world size, dropout masks on the world size and the micro-batch.
`runs/run.py` calls `train`:

    model = train(config, workdir, model, dataset, evaluate)
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import NoReturn, TypeVar, cast

import torch
from safetensors.torch import save_file
from torch import nn

from vitlab.config import TrainConfig
from vitlab.data.dataset import Dataset
from vitlab.data.loader import Batch, train_batches
from vitlab.data.transforms import TrainTransform
from vitlab.errors import UserError
from vitlab.io import writing
from vitlab.train.checkpoint import CheckpointWriter, TrainState, create_state, load_latest, trained_model
from vitlab.train.clock import Schedule, TimeLimit
from vitlab.train.microbatch import choose_microbatch
from vitlab.train.objectives import create_objective
from vitlab.train.optim import learning_rate
from vitlab.train.parallel import full_tensor, resolve_compile
from vitlab.train.precision import device_name
from vitlab.train.step import train_step
from vitlab.train.stopping import NonFiniteError, StoppedError, stop_signals
from vitlab.train.throughput import Throughput, TrainProgress, peak_flops
from vitlab.train.workdir import METRICS, SPEED, Workdir

Evaluate = Callable[[nn.Module], dict[str, float]]
AnyModel = TypeVar("AnyModel", bound=nn.Module)


def train(
    config: TrainConfig,
    workdir: Workdir,
    model: AnyModel,
    dataset: Dataset,
    evaluate: Evaluate | None = None,
    *,
    device: str | torch.device = "cpu",
    description: str = "train",
    microbatch: int | None = None,
    limit: TimeLimit | None = None,
) -> AnyModel:
    """Trains `model` on `dataset` as `config` says, or resumes the run in `workdir`; returns the model in float32.

    The weights returned, and passed to `evaluate(model)` on every rank, are the Polyak average if there is one.
    `microbatch`: images per forward pass, if the caller has measured it; `description` is shown with the progress.
    A `limit` shortens the run where the machine is slower than planned. SIGTERM or Ctrl-C ends the run within one
    micro-batch, and saves the last complete step: StoppedError. Also raises NonFiniteError.
    """
    device, world = torch.device(device), workdir.world
    outputs, classes = config.model.num_classes, len(dataset.classes)
    if config.masking is None and outputs != classes:
        raise UserError(f"the model has {outputs} classes and {config.data.name} has {classes}; set model.num_classes.")
    steps = config.total_steps(len(dataset))
    microbatch = choose_microbatch(config, workdir, model, device, microbatch)
    config = dataclasses.replace(config, compile=resolve_compile(config, device, steps))
    state = create_state(config, model.to(device), device, world)
    progress = TrainProgress(description, steps, config.batch_size, not world.is_rank_0, dataset.multi_label)
    writer = CheckpointWriter(workdir.checkpoints, config.keep_checkpoints)
    with progress, stop_signals() as stop, writer:
        run = _Run(config, workdir, dataset, evaluate, state, Schedule(steps, limit), progress, stop, writer)
        run.resume()
        _train_steps(run, microbatch)
    return cast(AnyModel, trained_model(config.model, config.masking, state))


def train_transform(config: TrainConfig) -> TrainTransform:
    """How a run augments its images."""
    names = [field.name for field in fields(TrainTransform) if field.name != "image_size"]
    return TrainTransform(config.model.image_hw, **{name: getattr(config.data, name) for name in names})


def _train_steps(run: "_Run", microbatch: int) -> None:
    """The remaining steps, with their records, evaluations and checkpoints."""
    config, state, world = run.config, run.state, run.world
    batches = run.load_batches(first_step=state.step)
    compiling = config.compile
    if run.evaluation_is_due() and not run.workdir.is_evaluated(state.step):  # a signal has stopped it
        run.evaluate_model()
    while state.step < run.schedule.total:
        batch = run.next_batch(batches)
        images, skipped = (len(batch.indices), batch.skipped) if batch else (0, 0)
        fitting = run.schedule.fitting(state.step) if world.is_rank_0 else 0  # steps that fit, as rank 0 says
        # From here on these are sums over all ranks, so that all stop at the same step. The host waits here, and in
        # `should_continue` between micro-batches.
        stopping, images, skipped, fitting = world.all_reduce(run.stop.is_set(), images, skipped, fitting)
        run.shorten(fitting)
        lr = learning_rate(config.optim, run.schedule.position(state.step), run.schedule.planned)
        if stopping or batch is None:
            run.save_and_stop()
        if not train_step(config, state, run.objective, batch, lr, images, microbatch, run.should_continue):
            run.save_and_stop()
        state.skipped += skipped
        run.throughput.images += images
        last = state.step == run.schedule.total
        logging, saving = (last or state.step % n == 0 for n in (config.log_every, config.checkpoint_every))
        if compiling and not logging:  # the first step took much longer than the others
            run.start_clock()
        compiling = False
        run.progress.tick(state.step)
        evaluating = run.evaluation_is_due()
        if logging or saving or evaluating or run.device.type == "cpu":  # on a GPU this waits for the device
            run.check_finite()
        run.writer.check()
        # Log before saving: a run killed in between repeats the step and its record. Evaluate after saving, since it
        # may take long: a run killed in between begins with the evaluation.
        if logging:
            run.log(lr)
        if saving:
            run.save()
        if evaluating:
            run.evaluate_model()
    if world.all_reduce(run.stop.is_set())[0]:  # the caller must not start further work
        run.save_and_stop()


@dataclass
class _Run:
    """What happens around the steps: resume, log, evaluate, save, stop."""

    config: TrainConfig
    workdir: Workdir
    dataset: Dataset
    evaluate: Evaluate | None
    state: TrainState
    schedule: Schedule
    progress: TrainProgress
    stop: threading.Event
    writer: CheckpointWriter

    def __post_init__(self) -> None:
        self.world, self.device = self.state.parallel.world, self.state.device
        self.objective = create_objective(self.config, self.dataset.labels)
        self.saved_step = -1
        peak = peak_flops(device_name(self.device))
        # 2 FLOPs a multiply-accumulate, three times: forward, gradients of activations, gradients of weights
        self.throughput = Throughput(6.0 * self.config.model.training_macs, peak and peak * self.world.world_size)

    def resume(self) -> None:
        """Restores the last valid checkpoint, and describes the run."""
        state, say = self.state, self.progress.say
        if (warmup := self.config.optim.warmup_steps) >= (steps := self.schedule.planned):
            say(f"the warm-up of {warmup} steps exceeds the run of {steps}; usual: --optim.warmup-steps {steps // 10}")
        saved = load_latest(self.workdir.checkpoints, say, self.world)
        if saved is None and self.workdir.corrupt:
            raise UserError(
                f"{', '.join(self.workdir.corrupt)} of the finished run in {self.workdir.path} cannot be read, and no "
                f"checkpoint is left to regenerate them from. Restore them, or delete the folder to train again."
            )
        self.workdir.truncate_logs(saved.step if saved else -1)
        if saved:
            state.restore(saved.tensors, saved.step, saved.state)
            self.schedule.restore(saved.state)
            self.progress.total = self.schedule.total
            self.progress.last_record = (state.step, time.monotonic())
            self.saved_step = state.step
            say(f"resumed from {saved.path.name}")
        processes = f" by {self.world.world_size} processes" if self.world.world_size > 1 else ""
        duration = "minutes" if self.device.type == "cpu" else "half a minute or more"
        compiling = f"; compiling, which takes {duration} ..." if self.config.compile else ""
        say(f"{state.weights.precision} on {self.device}{processes}{compiling}")

    def shorten(self, total: int) -> None:
        """Ends the run after `total` steps, if these are fewer than planned."""
        if total < (planned := self.schedule.total):
            self.schedule.changes.append((self.state.step, total))
            self.progress.total = total
            self.progress.say(f"the machine is slower than planned: {total} steps instead of {planned}")

    def start_clock(self) -> None:
        """Measures speed from here on."""
        self.throughput.record(0)
        self.progress.last_record = self.state.step, time.monotonic()

    def load_batches(self, first_step: int) -> Iterator[Batch]:
        """This rank's shard of every batch from `first_step` on; the order is a pure function of the seed."""
        return train_batches(
            self.dataset,
            train_transform(self.config),
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            first_example=first_step * self.config.batch_size,
            rank=self.world.rank,
            world_size=self.world.world_size,
            workers=self.config.data.workers,
            on_error=self.config.data.on_error,
            device=self.device,
            num_uniforms=self.objective.num_uniforms,
        )

    def next_batch(self, batches: Iterator[Batch]) -> Batch | None:
        """The next batch; None where a signal to this and all other processes has ended those that read images."""
        with self.throughput.waiting_for_data():
            try:
                return next(batches)
            except UserError:
                if not self.stop.wait(1.0):  # the signal to this process may come a moment later
                    raise
        return None

    def should_continue(self, fraction: float) -> bool:
        """Whether no rank has received a signal, after this fraction of a step."""
        self.progress.tick(self.state.step + fraction)
        return not self.world.all_reduce(self.stop.is_set())[0]

    def log(self, lr: float) -> None:
        """Records the means since the last record."""
        state = self.state
        loss, accuracy, norm = state.metric_sums.tolist()
        updates = state.step - state.last_logged_step
        epoch = state.step * self.config.batch_size / len(self.dataset)
        metrics = {"loss": loss / updates, "grad_norm": norm / updates, "lr": lr, "epoch": epoch}
        if not math.isnan(accuracy):  # of an objective with classes
            metrics["accuracy"] = accuracy / updates
        metrics["skipped"] = state.skipped
        if self.schedule.changes:
            metrics["total_steps"] = self.schedule.total
        state.metric_sums.zero_()
        state.last_logged_step = state.step
        speed = self.throughput.record((self.schedule.total - state.step) * self.config.batch_size)
        self.workdir.log(METRICS, state.step, metrics)
        self.workdir.log(SPEED, state.step, speed)
        self.progress.show({"step": state.step, **metrics}, speed)

    def evaluation_is_due(self) -> bool:
        """Whether the model is evaluated after this step."""
        step, every = self.state.step, self.config.eval_every
        is_due = step == self.schedule.total or (every is not None and step % every == 0)
        return self.evaluate is not None and step > 0 and is_due

    def evaluate_model(self) -> None:
        """Evaluates and records. A signal saves and stops the run, which begins again with this evaluation."""
        assert self.evaluate is not None
        with self.throughput.paused():
            model = trained_model(self.config.model, self.config.masking, self.state)
            if self.world.world_size == 1:  # several ranks evaluate to the end, for each waits for the others' results
                model.register_forward_pre_hook(lambda *_: self.save_and_stop() if self.stop.is_set() else None)
            metrics = self.evaluate(model)
            self.workdir.log(METRICS, self.state.step, metrics)
            hidden = ("_accuracy", "_top5") if self.dataset.multi_label else ()  # whether the top label is right
            shown = (f"{name} {value:.4f}" for name, value in metrics.items() if not name.endswith(hidden))
            self.progress.say(f"step {self.state.step}: {', '.join(shown)}")

    def save(self) -> None:
        """Saves the last complete step, while training goes on; once."""
        state = self.state
        if self.saved_step == state.step:
            return
        self.saved_step = state.step
        with self.throughput.paused():
            tensors = state.tensors(keep=self.workdir.writes)
            if self.workdir.writes:
                self.workdir.sync()
                self.writer.save(state.step, tensors, state.scalars() | self.schedule.state())

    def save_and_stop(self) -> NoReturn:
        """Saves and raises StoppedError. All ranks wait for the checkpoint: torchrun kills the rest once one ends."""
        self.check_finite()  # on a GPU it is not checked at every step
        self.save()
        self.world.broadcast_object(self.writer.wait)
        at = f"step {self.state.step}/{self.schedule.total}"
        raise StoppedError(f"stopped and saved at {at}; run the same command to resume.")

    def check_finite(self) -> None:
        """Raises NonFiniteError after a step that was not finite; each rank saves its local batch for debugging."""
        state = self.state
        if not (step := int(state.first_nonfinite_step)):
            return
        batch = next(self.load_batches(first_step=step - 1))
        rank = "" if self.world.is_rank_0 else f".rank-{self.world.rank}"
        path = self.workdir.path / "nonfinite" / f"step-{step:09d}{rank}.safetensors"
        path.parent.mkdir(exist_ok=True)
        names = ("images", "labels", "indices", "targets", "uniforms")
        tensors = {name: value.contiguous() for name in names if (value := getattr(batch, name)) is not None}
        if state.step < step:  # the update was skipped, so these weights produced the loss
            tensors |= {f"weights/{name}": full_tensor(w.detach()) for name, w in state.weights.masters.items()}
        with writing(path.parent):
            save_file(tensors, path)
        raise NonFiniteError(
            f"the loss or its gradient is not finite at step {step}; {path} holds the batch. The last checkpoint "
            f"is from before it. Try a smaller optim.lr, optim.clip_norm=1 or precision=float32."
        )
