"""The loop: its arithmetic, its records, stopping and resuming to the bit, and losses that are not finite."""

import dataclasses
import itertools
import json
import os
import signal
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import example_at
from safetensors.torch import load_file
from small_run import digits, initial_model, largest_difference, records, run
from torch import Tensor, nn

from vitlab.config import DataConfig, MaskingConfig, OptimConfig, TrainConfig
from vitlab.data.dataset import Labels
from vitlab.data.decode import ImageError
from vitlab.data.loader import Batch, train_batches
from vitlab.errors import UserError
from vitlab.models import ViTConfig
from vitlab.models.vit import build_model
from vitlab.train import loop, microbatch
from vitlab.train.checkpoint import Checkpoint, CheckpointWriter, load_latest
from vitlab.train.clock import Clock, TimeLimit
from vitlab.train.distributed import SINGLE, World, init_distributed
from vitlab.train.loop import NonFiniteError, StoppedError
from vitlab.train.objectives import classification_loss
from vitlab.train.optim import learning_rate

TINY = ViTConfig(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp_dim=16, num_classes=10)
PLAIN = TrainConfig(
    model=TINY,
    data=DataConfig(crop="none", flip=False),
    optim=OptimConfig(name="sgd", lr=0.1),
    steps=6,
    batch_size=12,
    log_every=1,
    precision="float32",
)
EVERYTHING = dataclasses.replace(
    PLAIN,
    model=dataclasses.replace(TINY, dropout=0.2),
    data=DataConfig(crop="inception", min_area=0.5, randaugment_layers=1),
    optim=OptimConfig(lr=3e-3, weight_decay=0.1, warmup_steps=2, clip_norm=1.0),
    label_smoothing=0.1,
    mixup=0.3,
    steps=9,
    microbatch=5,
    average_decay=0.8,
    log_every=2,
    eval_every=1,
    checkpoint_every=3,
)

Weights = dict[str, Tensor]
InRanks = Callable[[int, Callable[[], Any]], list[Any]]


def weights_of(model: nn.Module) -> Weights:
    return {name: tensor.detach().float().clone() for name, tensor in model.state_dict().items()}


def norm(model: nn.Module) -> dict[str, float]:
    """A figure that depends on every weight."""
    return {"norm": float(sum(tensor.double().square().sum() for tensor in weights_of(model).values()))}


def latest(folder: Path) -> Checkpoint:
    checkpoint = load_latest(folder / "checkpoints", pytest.fail)
    assert checkpoint is not None
    return checkpoint


@pytest.mark.parametrize("changes", [{}, {"loss": "sigmoid", "label_smoothing": 0.1, "mixup": 0.5}])
def test_accumulation_changes_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Micro-batches of 5, 5 and 2 are the batch of 12: their means are weighed by their sizes."""
    whole = dataclasses.replace(PLAIN, optim=OptimConfig(name="sgd", lr=0.03), **changes)
    parts = dataclasses.replace(whole, microbatch=5)
    one, two = (weights_of(run(config, tmp_path / str(config.microbatch))) for config in (whole, parts))
    assert largest_difference(one, weights_of(initial_model(whole))) > 1e-2
    assert largest_difference(one, two) < 1e-6
    for key in ("loss", "grad_norm", "accuracy"):
        assert records(tmp_path / "5", key) == pytest.approx(records(tmp_path / "None", key), abs=1e-6, rel=1e-5)


def test_precisions_agree_loosely(tmp_path: Path) -> None:
    ends, losses = {}, {}
    for precision in ("float32", "autocast", "bfloat16"):
        config = dataclasses.replace(PLAIN, precision=precision, microbatch=5)
        model = run(config, tmp_path / precision, norm)
        assert not model.training
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        ends[precision] = weights_of(model)
        losses[precision] = list(records(tmp_path / precision).values())
    moved = largest_difference(ends["float32"], weights_of(initial_model(PLAIN)))
    for precision in ("autocast", "bfloat16"):
        assert 0 < largest_difference(ends[precision], ends["float32"]) < 0.2 * moved
        assert losses[precision] == pytest.approx(losses["float32"], rel=0.02)


def test_average_is_evaluated_and_returned(tmp_path: Path) -> None:
    """Against the moving average of the weights after each step of the same run without one."""
    plain = dataclasses.replace(PLAIN, eval_every=1)
    weights: list[Weights] = []
    run(plain, tmp_path / "plain", lambda model: weights.append(weights_of(model)) or {})
    evaluated: list[Weights] = []
    averaged = dataclasses.replace(plain, average_decay=0.7)
    end = run(averaged, tmp_path / "averaged", lambda model: evaluated.append(weights_of(model)) or {})
    expected = weights_of(initial_model(plain))
    for state, average in zip(weights, evaluated, strict=True):
        expected = {name: 0.7 * expected[name] + 0.3 * state[name] for name in expected}
        assert largest_difference(average, expected) < 1e-6
    assert largest_difference(weights_of(end), evaluated[-1]) == 0.0
    assert largest_difference(expected, weights[-1]) > 1e-3
    assert records(tmp_path / "averaged") == records(tmp_path / "plain")


def test_compile_by_a_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one shape, unless unreadable images make batches smaller."""
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda model, **kwargs: options.append(kwargs) or model)
    config = dataclasses.replace(PLAIN, compile=True, steps=1)
    run(dataclasses.replace(config, compile=False), tmp_path / "plain")
    run(config, tmp_path / "compiled")
    run(dataclasses.replace(config, data=dataclasses.replace(config.data, on_error="skip")), tmp_path / "skipping")
    assert options == [{"dynamic": False}, {"dynamic": None}]


def test_records_evaluations_and_checkpoints(tmp_path: Path) -> None:
    config = dataclasses.replace(PLAIN, steps=8, log_every=3, eval_every=5, checkpoint_every=3, keep_checkpoints=2)
    run(config, tmp_path, norm)
    assert list(records(tmp_path)) == [3, 6, 8]
    assert list(records(tmp_path, "norm")) == [5, 8]
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-000000006", "step-000000008"]
    speed = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    assert [line["step"] for line in speed] == [3, 6, 8]
    assert all(line["images_per_s"] > 0 and 0 <= line["data_wait"] <= 1 for line in speed)


def test_speed_is_that_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling and an evaluation between two records take a thousand seconds each, which are not part of it."""
    passed = [0.0]
    for name in ("perf_counter", "monotonic"):
        clock = getattr(time, name)
        monkeypatch.setattr(time, name, lambda clock=clock: clock() + passed[0])

    def slow_first_call(model: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        calls = itertools.count()

        def forward(*args: Any) -> Any:
            passed[0] += 0.0 if next(calls) else 1000.0
            return model(*args)

        return forward

    def evaluate(model: nn.Module) -> dict[str, float]:
        passed[0] += 1000.0
        return {}

    monkeypatch.setattr(torch, "compile", slow_first_call)
    run(dataclasses.replace(PLAIN, log_every=6, eval_every=4, compile=True), tmp_path, evaluate)
    assert passed[0] >= 2000
    (speed,) = (json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines())
    assert 5 * 12 / speed["images_per_s"] < 500


def test_a_record_is_the_mean_since_the_last(tmp_path: Path) -> None:
    run(PLAIN, tmp_path / "every")
    run(dataclasses.replace(PLAIN, log_every=4), tmp_path / "four")
    for key in ("loss", "accuracy", "grad_norm"):
        values = list(records(tmp_path / "every", key).values())
        expected = {4: sum(values[:4]) / 4, 6: sum(values[4:]) / 2}
        assert records(tmp_path / "four", key) == pytest.approx(expected, rel=1e-12)
    rates = {step: learning_rate(PLAIN.optim, step - 1, 6) for step in range(1, 7)}
    assert records(tmp_path / "every", "lr") == pytest.approx(rates)
    assert records(tmp_path / "every", "epoch") == pytest.approx({step: step * 12 / 1259 for step in range(1, 7)})


class CrashError(Exception):
    """Stands for anything that ends a run from outside."""


def interrupt_at(step: int, interrupt: Callable[[], object]) -> Callable[[nn.Module], dict[str, float]]:
    """An evaluation that calls `interrupt` when it is called for the `step`th time."""
    calls = itertools.count(1)

    def evaluate(model: nn.Module) -> dict[str, float]:
        if next(calls) == step:
            interrupt()
        return norm(model)

    return evaluate


def crash() -> None:
    raise CrashError


def crash_at(step: int) -> Callable[[nn.Module], dict[str, float]]:
    return interrupt_at(step, crash)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, bytes]:
    """Weights and metrics of a run with everything on that was never stopped."""
    folder = tmp_path_factory.mktemp("straight")
    return weights_of(run(EVERYTHING, folder, norm)), (folder / "metrics.jsonl").read_bytes()


def assert_same_end(folder: Path, straight: tuple[Weights, bytes]) -> None:
    model = run(EVERYTHING, folder, norm)
    assert largest_difference(weights_of(model), straight[0]) == 0.0
    assert (folder / "metrics.jsonl").read_bytes() == straight[1]


def test_the_seed_alone_decides(tmp_path: Path, straight: tuple[Weights, bytes]) -> None:
    """Batches, augmentation, mixup and dropout do not depend on records, evaluations and checkpoints."""
    never = dataclasses.replace(EVERYTHING, log_every=100, eval_every=None, checkpoint_every=100)
    configs = [dataclasses.replace(never, seed=seed) for seed in (0, 1)]
    ends = [weights_of(run(c, tmp_path / str(c.seed), lambda _: {"x": torch.rand(1).item()})) for c in configs]
    assert largest_difference(ends[0], straight[0]) == 0.0
    assert largest_difference(ends[1], straight[0]) > 0.0


@pytest.mark.parametrize("evaluations", [[1], [5, 2, 3]])
def test_a_crash_leaves_no_trace(tmp_path: Path, straight: tuple[Weights, bytes], evaluations: list[int]) -> None:
    """Before the first checkpoint, in the middle of a record, and in the evaluation that follows a checkpoint: the run
    begins with it."""
    for number in evaluations:
        with pytest.raises(CrashError):
            run(EVERYTHING, tmp_path, crash_at(number))
    assert (tmp_path / "checkpoints" / "step-000000006").exists() == (len(evaluations) == 3)
    assert_same_end(tmp_path, straight)


class Scripted(TimeLimit):
    """A limit that finds at step 3 that two more steps fit."""

    def update(self, step: int, total: int, planned_rest: float) -> int:
        return 5 if step == 3 else total


def shortened(folder: Path, shortens: bool, evaluate: loop.Evaluate = norm) -> nn.Module:
    """A run of nine steps, or five where it `shortens`."""
    config = dataclasses.replace(EVERYTHING, checkpoint_every=1, log_every=1)
    return run(config, folder, evaluate, limit=(Scripted if shortens else TimeLimit)(Clock(1e6), 1e-3, 0.0))


def test_a_resumed_run_keeps_its_changes(tmp_path: Path) -> None:
    """Though the machine is fast again: the same steps, rates and bits."""
    straight = weights_of(shortened(tmp_path / "straight", shortens=True))
    rates = records(tmp_path / "straight", "lr")
    assert rates == {step: learning_rate(EVERYTHING.optim, at, 9) for step, at in enumerate([0, 1, 2, 3, 6], 1)}
    assert records(tmp_path / "straight", "total_steps") == {4: 5, 5: 5}
    with pytest.raises(CrashError):
        shortened(tmp_path / "killed", shortens=True, evaluate=crash_at(4))
    resumed = weights_of(shortened(tmp_path / "killed", shortens=False))
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("straight", "killed")]
    assert metrics[0] == metrics[1]
    assert latest(tmp_path / "killed").state["changes"] == [[3, 5]]
    assert latest(tmp_path / "killed").state["seconds_left"] > 1e5


@pytest.mark.parametrize(("number", "step"), [(signal.SIGINT, 4), (signal.SIGTERM, 9)])
def test_a_signal_saves_the_last_step(
    tmp_path: Path,
    straight: tuple[Weights, bytes],
    number: signal.Signals,
    step: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also the last step of all: in the same process more may follow, which is not to begin."""
    before = signal.getsignal(number)
    with pytest.raises(StoppedError, match=f"saved at step {step}/9"):
        run(EVERYTHING, tmp_path, interrupt_at(step, lambda: signal.raise_signal(number)))
    assert signal.getsignal(number) is before
    assert latest(tmp_path).step == step
    assert_same_end(tmp_path, straight)
    assert f"resumed from step-00000000{step}" in capsys.readouterr().err


class MicroBatches:
    """Counts the micro-batches that go through a model, and sends a signal in one of them."""

    def __init__(self, model: nn.Module, number: int = 0) -> None:
        self.count = 0
        self._number = number
        model.register_forward_pre_hook(self)

    def __call__(self, *_: object) -> None:
        self.count += 1
        if self.count == self._number:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_ends_the_run_within_one_microbatch(tmp_path: Path, straight: tuple[Weights, bytes]) -> None:
    """Batches of 12 in parts of 5: the seventh part is the first of step 3, which is dropped; step 2 is saved."""
    model = initial_model(EVERYTHING)
    parts = MicroBatches(model, 7)
    with pytest.raises(StoppedError, match="step 2/9"):
        run(EVERYTHING, tmp_path, norm, model=model)
    assert parts.count == 7
    assert_same_end(tmp_path, straight)


@pytest.mark.parametrize("step", [4, 9])
def test_a_signal_within_an_evaluation(tmp_path: Path, straight: tuple[Weights, bytes], step: int) -> None:
    """The next forward pass ends it; its step is saved, and the run begins again with the evaluation."""
    calls, passes = itertools.count(1), []

    def evaluate(model: nn.Module) -> dict[str, float]:
        stop = next(calls) == step
        for number in range(3):
            if stop and number == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            model(torch.zeros(1, 3, 8, 8))
            passes.append(number)
        return norm(model)

    with pytest.raises(StoppedError, match=f"saved at step {step}/9"):
        run(EVERYTHING, tmp_path, evaluate)
    assert len(passes) == 3 * (step - 1) + 1
    with pytest.raises(CrashError):  # after the evaluation that was due, and before another checkpoint
        run(EVERYTHING, tmp_path, crash_at(2 if step < 9 else 1))
    assert_same_end(tmp_path, straight)
    assert list(records(tmp_path, "norm")) == list(range(1, 10))


def test_a_signal_that_ends_the_processes_that_read_images(
    tmp_path: Path, straight: tuple[Weights, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a terminal or a scheduler, to all processes of the run; where there is none, it is an error."""

    def ended(*args: Any, first_example: int, **options: Any) -> Iterator[Batch]:
        batches = train_batches(*args, first_example=first_example, **options)
        yield from itertools.islice(batches, 2)
        if signaled:
            os.kill(os.getpid(), signal.SIGTERM)
        raise UserError("a DataLoader worker was killed")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_batches", ended)
        for signaled, error in ((True, StoppedError), (False, UserError)):
            with pytest.raises(error, match="saved at step 2/9" if signaled else "worker was killed"):
                run(EVERYTHING, tmp_path, norm)
    assert latest(tmp_path).step == 3
    assert_same_end(tmp_path, straight)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a signal after a step that a GPU has not been asked about yet."""

    def stop_after_such_a_step(run: Any, _: int) -> None:
        run.state.first_nonfinite_step.fill_(1)
        run.state.step = 1
        run.save_and_stop()

    monkeypatch.setattr(loop, "_train_steps", stop_after_such_a_step)
    with pytest.raises(NonFiniteError, match="not finite at step 1"):
        run(EVERYTHING, tmp_path, norm)
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_microbatch_is_no_setting(tmp_path: Path) -> None:
    """A run continues with another one on another device, and with the same one on the same."""
    short = dataclasses.replace(PLAIN, checkpoint_every=1, eval_every=1)
    with pytest.raises(CrashError):
        run(dataclasses.replace(short, microbatch=5), tmp_path, crash_at(3))
    runtime = tmp_path / "runtime.json"
    assert json.loads(runtime.read_text()) == {"device": "cpu", "processes": 1, "microbatch": 5}
    for measured, passes in ((12, 3), (6, 2)):
        parts = MicroBatches(model := initial_model(short))
        with pytest.raises(CrashError):
            run(short, tmp_path, crash_at(2), model=model, microbatch=measured)
        assert parts.count == passes  # of one step: the run begins with the evaluation that crashed
        runtime.write_text('{"device": "NVIDIA H200", "processes": 1, "microbatch": 5}')


def test_a_warmup_longer_than_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optim = dataclasses.replace(PLAIN.optim, warmup_steps=20)
    run(dataclasses.replace(PLAIN, optim=optim, steps=10), tmp_path)
    assert "--optim.warmup-steps 1" in capsys.readouterr().err


def test_a_failed_checkpoint_ends_the_run_before_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def check(_: CheckpointWriter) -> None:
        steps.append(len(steps) + 1)
        if len(steps) == 3:
            raise OSError("no space left")

    monkeypatch.setattr(CheckpointWriter, "check", check)
    with pytest.raises(OSError, match="no space left"):
        run(dataclasses.replace(PLAIN, checkpoint_every=100), tmp_path)
    assert steps == [1, 2, 3]


def test_large_models_are_measured_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small batch goes through at once; of a large one a micro-batch is measured."""
    monkeypatch.setattr(microbatch, "measure_step", lambda *_: types.SimpleNamespace(microbatch=4))
    for flops, expected in ((1e11, 12), (1.0, 4)):
        monkeypatch.setattr(microbatch, "SMALL_FLOPS", flops)
        run(dataclasses.replace(PLAIN, steps=1), tmp_path / str(expected))
        assert json.loads((tmp_path / str(expected) / "runtime.json").read_text())["microbatch"] == expected


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    """A rate of 1e30 ruins the weights in the first step, and the second cannot be made."""
    config = dataclasses.replace(PLAIN, optim=OptimConfig(name="sgd", lr=1e30), checkpoint_every=1)
    for _ in range(2):  # again from the checkpoint
        with pytest.raises(NonFiniteError, match="not finite at step 2"):
            run(config, tmp_path)
    saved = load_file(tmp_path / "nonfinite" / "step-000000002.safetensors")
    expected = [example_at(digits(), config.seed, position)[1] for position in range(12, 24)]
    assert saved["indices"].tolist() == expected
    assert saved["labels"].tolist() == digits().labels[expected].tolist()
    model = build_model(config.model)
    model.load_state_dict({n.removeprefix("weights/"): t for n, t in saved.items() if n.startswith("weights/")})
    classification_loss(model(saved["images"]), saved["labels"]).backward()
    replayed = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert not torch.isfinite(replayed)
    assert latest(tmp_path).step == 1
    assert list(records(tmp_path)) == [1]


def test_an_image_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(*args: Any, first_example: int, **options: Any) -> Iterator[Batch]:
        for number, batch in enumerate(
            train_batches(*args, first_example=first_example, **options), first_example // 12 + 1
        ):
            if number == 4:
                batch.images[3, 0, 0, 0] = float("inf")
            yield batch

    monkeypatch.setattr(loop, "train_batches", poisoned)
    config = dataclasses.replace(EVERYTHING, mixup=0.0, checkpoint_every=1, log_every=100, precision="bfloat16")
    with pytest.raises(NonFiniteError, match="not finite at step 4"):
        run(config, tmp_path, norm)
    batch = load_file(tmp_path / "nonfinite" / "step-000000004.safetensors")
    assert batch["images"].isinf().nonzero().tolist() == [[3, 0, 0, 0]]
    saved = latest(tmp_path)
    assert saved.step == 3
    assert all(bool(torch.isfinite(tensor).all()) for tensor in saved.tensors.values())
    assert all(torch.equal(batch[name], saved.tensors[name]) for name in saved.tensors if name.startswith("weights/"))


def test_another_number_of_classes(tmp_path: Path) -> None:
    config = dataclasses.replace(PLAIN, model=dataclasses.replace(TINY, num_classes=7))
    with pytest.raises(UserError, match="7 classes"):
        run(config, tmp_path)


@pytest.mark.parametrize(("kind", "fsdp"), [("several labels", False), ("masked", True)])
def test_unreadable_images_of_one_rank(kind: str, fsdp: bool, tmp_path: Path, in_ranks: InRanks) -> None:
    """A batch is the same for two ranks as for one, also where one of them can read fewer images of it."""
    failures = {index: ImageError(f"{index}.png", "corrupt") for index in range(16) if index % 4 == 1}
    data = dataclasses.replace(digits().take(np.arange(16)), failures=failures)
    config = dataclasses.replace(PLAIN, data=dataclasses.replace(PLAIN.data, on_error="skip"), fsdp=fsdp)
    config = dataclasses.replace(config, batch_size=8, microbatch=2, steps=8)
    if kind == "masked":
        model = dataclasses.replace(TINY, num_classes=0)
        config = dataclasses.replace(config, model=model, masking=MaskingConfig())
    else:
        sets = Labels.of_lists([[i % 10, (i + 3) % 10][: 1 + i % 2] for i in range(16)])
        data = dataclasses.replace(data, labels=sets.first_labels, label_sets=sets)
    stream = [example_at(data, config.seed, position)[1] for position in range(64)]
    shards = [[i for i in stream[start : start + 4] if i not in failures] for start in range(0, 64, 4)]
    assert all(shards)
    assert len(set(map(len, shards))) > 1

    def trained(world: World) -> dict[str, np.ndarray]:
        end = run(config, tmp_path / str(world.world_size), None, data, world=world)
        return {name: tensor.numpy() for name, tensor in end.state_dict().items()}

    def job() -> dict[str, np.ndarray]:
        with init_distributed() as world:
            return trained(world)

    one_rank = trained(SINGLE)
    for weights in in_ranks(2, job):
        for name, expected in one_rank.items():
            np.testing.assert_allclose(weights[name], expected, atol=1e-5)
    assert records(tmp_path / "2", "skipped") == records(tmp_path / "1", "skipped")
    assert records(tmp_path / "2") == pytest.approx(records(tmp_path / "1"), abs=1e-5)
