"""The loop: it learns, counts right, stops and continues without a trace, and refuses to go on with nonsense."""

import dataclasses
import functools
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
from PIL import Image
from safetensors.torch import load_file
from stopping import stop_at
from torch import Tensor, nn

from vitlab import display
from vitlab.config import DataConfig, MaskingConfig, OptimConfig, TrainConfig
from vitlab.data.dataset import Dataset, Labels
from vitlab.data.decode import ImageError
from vitlab.data.loader import Batch, example_at, train_batches
from vitlab.data.registry import load_dataset
from vitlab.models import ViTConfig, build_model
from vitlab.models.vit import Model
from vitlab.settings import to_dict
from vitlab.train import loop, microbatch
from vitlab.train.checkpoint import load_latest
from vitlab.train.distributed import SINGLE, World, init_distributed
from vitlab.train.loop import NonFiniteError, train
from vitlab.train.objectives import classification_loss, create_training_model
from vitlab.train.optim import learning_rate
from vitlab.train.signals import StoppedError
from vitlab.train.workdir import Workdir

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


@functools.cache
def digits() -> Dataset:
    return load_dataset("digits", "train")


def run(config: TrainConfig, folder: Path, evaluate: loop.Evaluate | None = None, data: Dataset | None = None) -> Model:
    """Trains the same new model as `config` says, or continues what `folder` holds."""
    with Workdir(folder, to_dict(config), tensorboard=False) as workdir:
        return train(config, workdir, fresh(config), data or digits(), evaluate)


def fresh(config: TrainConfig) -> Model:
    return build_model(config.model, generator=torch.Generator().manual_seed(0))


def records(folder: Path, key: str = "loss") -> dict[int, float]:
    """Step -> value, in the order of the file."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def copied(model: nn.Module) -> Weights:
    return {name: tensor.detach().float().clone() for name, tensor in model.state_dict().items()}


def largest_difference(one: Weights, two: Weights) -> float:
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def identical(one: nn.Module, two: nn.Module) -> bool:
    return largest_difference(copied(one), copied(two)) == 0.0


def norm(model: nn.Module) -> dict[str, float]:
    """A figure that depends on every weight."""
    return {"norm": float(sum(tensor.double().square().sum() for tensor in copied(model).values()))}


# ------------------------------------------------------------------------------------------------ learning


def test_it_learns(tmp_path: Path) -> None:
    config = dataclasses.replace(
        PLAIN, model=dataclasses.replace(TINY, width=64, mlp_dim=128), optim=OptimConfig(lr=3e-3, warmup_steps=10),
        steps=80, batch_size=64, log_every=5,
    )  # fmt: skip
    run(config, tmp_path)
    loss, accuracy = records(tmp_path), records(tmp_path, "accuracy")
    assert loss[5] > 1.9
    assert loss[80] < 0.5
    assert accuracy[80] > 0.8


def test_the_model_comes_back_ready_to_use(tmp_path: Path) -> None:
    model = run(dataclasses.replace(PLAIN, precision="bfloat16", steps=1), tmp_path)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config == PLAIN.model


@pytest.mark.parametrize("changes", [{}, {"mixup": 0.5}, {"loss": "sigmoid", "label_smoothing": 0.1}])
def test_several_labels_a_image(tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits that are also called even or odd: learned, the same in micro-batches, the same after a stop."""
    sets = Labels.of_lists([[label, label % 2] if label > 1 else [label] for label in digits().labels.tolist()])
    data = dataclasses.replace(digits(), label_sets=sets)
    config = dataclasses.replace(PLAIN, optim=OptimConfig(lr=3e-3), steps=40, batch_size=64, microbatch=25, **changes)
    config = dataclasses.replace(config, checkpoint_every=15)
    whole = run(config, tmp_path / "whole", data=data)
    assert records(tmp_path / "whole")[40] < records(tmp_path / "whole")[1]
    assert records(tmp_path / "whole", "accuracy")[40] > 0.5  # 0 or 1 is right for every image, and easy to see
    alike = run(dataclasses.replace(config, microbatch=None), tmp_path / "alike", data=data)
    assert largest_difference(copied(whole), copied(alike)) < 1e-3
    signals = loop.stop_signals
    monkeypatch.setattr(loop, "stop_signals", stop_at(20))
    with pytest.raises(StoppedError):
        run(config, tmp_path / "stopped", data=data)
    monkeypatch.setattr(loop, "stop_signals", signals)
    assert identical(run(config, tmp_path / "stopped", data=data), whole)


@pytest.mark.parametrize("changes", [{}, {"mixup": 0.5}, {"loss": "sigmoid", "label_smoothing": 0.1}])
def test_accumulation_changes_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Micro-batches of 5, 5 and 2 are the batch of 12: their means are weighed by their sizes."""
    whole = dataclasses.replace(PLAIN, optim=OptimConfig(name="sgd", lr=0.03), **changes)
    parts = dataclasses.replace(whole, microbatch=5)
    one, two = run(whole, tmp_path / "whole"), run(parts, tmp_path / "parts")
    assert largest_difference(copied(one), copied(fresh(whole))) > 1e-2
    assert largest_difference(copied(one), copied(two)) < 1e-6
    for key in ("loss", "grad_norm", "accuracy"):
        given, expected = records(tmp_path / "parts", key), records(tmp_path / "whole", key)
        assert given == pytest.approx(expected, abs=1e-6, rel=1e-5)


def test_precisions_agree_loosely(tmp_path: Path) -> None:
    ends, losses = {}, {}
    for precision in ("float32", "autocast", "bfloat16"):
        config = dataclasses.replace(PLAIN, precision=precision, microbatch=5)
        ends[precision] = copied(run(config, tmp_path / precision, norm))
        losses[precision] = list(records(tmp_path / precision).values())
    moved = largest_difference(ends["float32"], copied(fresh(PLAIN)))
    for precision in ("autocast", "bfloat16"):
        assert 0 < largest_difference(ends[precision], ends["float32"]) < 0.2 * moved
        assert losses[precision] == pytest.approx(losses["float32"], rel=0.02)


def test_average_is_what_is_evaluated_and_returned(tmp_path: Path) -> None:
    """Against the moving average made by hand from the weights after each step of the same run without one."""
    plain = dataclasses.replace(PLAIN, eval_every=1)
    weights: list[Weights] = []
    run(plain, tmp_path / "plain", lambda model: weights.append(copied(model)) or {})
    judged: list[Weights] = []
    averaged = dataclasses.replace(plain, average_decay=0.7)
    end = run(averaged, tmp_path / "averaged", lambda model: judged.append(copied(model)) or {})
    expected = copied(fresh(plain))
    for state, seen in zip(weights, judged, strict=True):
        expected = {name: 0.7 * expected[name] + 0.3 * state[name] for name in expected}
        assert largest_difference(seen, expected) < 1e-6
    assert largest_difference(copied(end), expected) < 1e-6
    assert largest_difference(expected, weights[-1]) > 1e-3
    assert records(tmp_path / "averaged") == records(tmp_path / "plain")


def test_average_is_evaluated_in_float32(tmp_path: Path) -> None:
    config = dataclasses.replace(PLAIN, precision="bfloat16", average_decay=0.7)
    seen: list[Weights] = []
    end = run(config, tmp_path, lambda model: seen.append(copied(model)) or {})
    assert seen[-1].keys() == copied(end).keys()
    assert all(torch.equal(seen[-1][name], tensor) for name, tensor in copied(end).items())


def test_compile_by_a_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one shape, unless unreadable images make batches smaller."""
    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled.append(options) or model)
    one = run(PLAIN, tmp_path / "plain")
    assert not compiled
    config = dataclasses.replace(PLAIN, compile=True)
    assert identical(run(config, tmp_path / "compiled"), one)
    assert compiled == [{"dynamic": False}]
    skipping = dataclasses.replace(config, data=dataclasses.replace(config.data, on_error="skip"))
    assert identical(run(skipping, tmp_path / "skipping"), one)
    assert compiled[1:] == [{"dynamic": None}]


# ----------------------------------------------------------------------------------------------- recording


def test_records_come_when_asked_for(tmp_path: Path) -> None:
    config = dataclasses.replace(PLAIN, steps=8, log_every=3, eval_every=5, checkpoint_every=3, keep_checkpoints=2)
    run(config, tmp_path, norm)
    assert list(records(tmp_path)) == [3, 6, 8]
    assert list(records(tmp_path, "norm")) == [5, 8]
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-000000006", "step-000000008"]
    speed = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    assert [line["step"] for line in speed] == [3, 6, 8]
    assert all(line["images_per_s"] > 0 and 0 <= line["data_wait"] <= 1 for line in speed)


def test_speed_is_that_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation of a thousand seconds between two records is not in their images per second."""
    clock, passed = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + passed[0])

    def evaluate(model: nn.Module) -> dict[str, float]:
        passed[0] += 1000.0
        return {}

    run(dataclasses.replace(PLAIN, log_every=6, eval_every=4), tmp_path, evaluate)
    (speed,) = (json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines())
    assert 6 * 12 / speed["images_per_s"] < 500


def test_evaluates_once_at_the_end_unless_told(tmp_path: Path) -> None:
    run(PLAIN, tmp_path, norm)
    assert list(records(tmp_path, "norm")) == [6]


def test_a_record_is_the_mean_since_the_last(tmp_path: Path) -> None:
    run(PLAIN, tmp_path / "each")
    run(dataclasses.replace(PLAIN, log_every=4), tmp_path / "four")
    for key in ("loss", "accuracy", "grad_norm"):
        each = list(records(tmp_path / "each", key).values())
        expected = {4: sum(each[:4]) / 4, 6: sum(each[4:]) / 2}
        assert records(tmp_path / "four", key) == pytest.approx(expected, rel=1e-12)
    steps = range(1, 7)
    rates = {step: learning_rate(PLAIN.optim, step - 1, 6) for step in steps}
    assert records(tmp_path / "each", "lr") == pytest.approx(rates)
    assert records(tmp_path / "each", "epoch") == pytest.approx({step: step * 12 / 1259 for step in steps})
    assert set(records(tmp_path / "each", "skipped").values()) == {0}


def test_recording_leaves_no_trace_in_the_weights(tmp_path: Path) -> None:
    """Batches, augmentation, mixup and dropout know nothing of records, evaluations and checkpoints."""
    often = dataclasses.replace(EVERYTHING, log_every=1, eval_every=1, checkpoint_every=2)
    never = dataclasses.replace(EVERYTHING, log_every=100, eval_every=None, checkpoint_every=100)

    def draws(model: nn.Module) -> dict[str, float]:
        return {"drawn": float(torch.rand(3).sum())}

    assert identical(run(often, tmp_path / "often", draws), run(never, tmp_path / "never"))


def test_the_seed_decides(tmp_path: Path) -> None:
    one = run(EVERYTHING, tmp_path / "one", norm)
    assert identical(one, run(EVERYTHING, tmp_path / "again", norm))
    assert not identical(one, run(dataclasses.replace(EVERYTHING, seed=1), tmp_path / "other", norm))


# ------------------------------------------------------------------------------------ stopping, continuing


class CrashError(Exception):
    """Stands for anything that ends a run from outside."""


def crash_at(step: int) -> Callable[[nn.Module], dict[str, float]]:
    calls = iter(range(1, step + 1))

    def evaluate(model: nn.Module) -> dict[str, float]:
        if next(calls) == step:
            raise CrashError
        return norm(model)

    return evaluate


def signal_at(step: int, number: signal.Signals, times: int = 1) -> Callable[[nn.Module], dict[str, float]]:
    calls = iter(range(1, 1000))

    def evaluate(model: nn.Module) -> dict[str, float]:
        if next(calls) == step:
            for _ in range(times):
                os.kill(os.getpid(), number)
        return norm(model)

    return evaluate


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, bytes]:
    """Weights and metrics of a run with everything on that was never stopped."""
    folder = tmp_path_factory.mktemp("quiet")
    return copied(run(EVERYTHING, folder, norm)), (folder / "metrics.jsonl").read_bytes()


def assert_same_end(folder: Path, quiet: tuple[Weights, bytes]) -> None:
    model = run(EVERYTHING, folder, norm)
    assert largest_difference(copied(model), quiet[0]) == 0.0
    assert (folder / "metrics.jsonl").read_bytes() == quiet[1]


@pytest.mark.parametrize("step", [1, 4, 7, 9])
def test_a_crash_leaves_no_trace(tmp_path: Path, quiet: tuple[Weights, bytes], step: int) -> None:
    """Before the first checkpoint, in the middle of a record, twice over a checkpoint, after the last step."""
    with pytest.raises(CrashError):
        run(EVERYTHING, tmp_path, crash_at(step))
    assert_same_end(tmp_path, quiet)


def test_crash_upon_crash(tmp_path: Path, quiet: tuple[Weights, bytes]) -> None:
    for step in (5, 2, 5):
        with pytest.raises(CrashError):
            run(EVERYTHING, tmp_path, crash_at(step))
    assert_same_end(tmp_path, quiet)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop(
    tmp_path: Path, quiet: tuple[Weights, bytes], number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last complete step is saved, which no record and no checkpoint of the schedule falls on."""
    before = signal.getsignal(number)
    with pytest.raises(StoppedError, match=r"stopped and saved at step 4/9; the same command continues"):
        run(EVERYTHING, tmp_path, signal_at(4, number))
    assert signal.getsignal(number) is before
    saved = load_latest(tmp_path / "checkpoints", pytest.fail)
    assert saved is not None
    assert saved.step == 4
    assert_same_end(tmp_path, quiet)
    assert "continues from step-000000004" in capsys.readouterr().err


def test_asked_to_stop_at_the_last_step(tmp_path: Path, quiet: tuple[Weights, bytes]) -> None:
    """It stops too: in the same process more may follow, which nobody would stop."""
    with pytest.raises(StoppedError, match="stopped and saved at step 9/9"):
        run(EVERYTHING, tmp_path, signal_at(9, signal.SIGTERM))
    assert_same_end(tmp_path, quiet)


def test_slow_steps_are_heard_of_between_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a batch that goes through at once as of one in parts."""
    monkeypatch.setattr(display, "FIRST_LINE", 0.0)
    monkeypatch.setattr(display, "NEXT_LINES", 0.0)
    run(dataclasses.replace(PLAIN, log_every=100), tmp_path)
    assert "train: step 1.0/6 · " in capsys.readouterr().err


class MicroBatches:
    """Counts the micro-batches that go through a model, and sends a signal in one of them."""

    def __init__(self, model: nn.Module, number: int = 0) -> None:
        self.seen = 0
        self._number = number
        model.register_forward_pre_hook(self)

    def __call__(self, *_: object) -> None:
        self.seen += 1
        if self.seen == self._number:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("number", "step"), [(7, 2), (1, 0)])
def test_asked_to_stop_it_ends_within_one_micro_batch(
    number: int, step: int, tmp_path: Path, quiet: tuple[Weights, bytes]
) -> None:
    """Batches of 12 in parts of 5: the seventh part is the first of step 3, which is dropped; step 2 is saved."""
    model = fresh(EVERYTHING)
    parts = MicroBatches(model, number)
    stopped = pytest.raises(StoppedError, match=rf"stopped and saved at step {step}/9; the same command continues")
    with Workdir(tmp_path, to_dict(EVERYTHING), tensorboard=False) as workdir, stopped:
        train(EVERYTHING, workdir, model, digits(), norm)
    assert parts.seen == number
    assert_same_end(tmp_path, quiet)


@pytest.mark.parametrize("step", [4, 9])
def test_asked_to_stop_within_an_evaluation(
    tmp_path: Path, quiet: tuple[Weights, bytes], step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its next forward pass ends it; the step that it was of is saved, and the run begins again with the evaluation."""
    calls, passes = iter(range(1, 100)), []

    def evaluate(model: nn.Module) -> dict[str, float]:
        stop = next(calls) == step
        for number in range(3):
            if stop and number == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            model(torch.zeros(1, 3, 8, 8))
            passes.append(number)
        return norm(model)

    with pytest.raises(StoppedError, match=rf"saved at step {step}/9, whose evaluation is due; the same command"):
        run(EVERYTHING, tmp_path, evaluate)
    assert len(passes) == 3 * (step - 1) + 1
    with pytest.raises(CrashError):  # after the evaluation that was due, and before another checkpoint
        run(EVERYTHING, tmp_path, crash_at(2 if step < 9 else 1))
    assert_same_end(tmp_path, quiet)
    assert list(records(tmp_path, "norm")) == list(range(1, 10))


def test_micro_batch_is_no_setting(tmp_path: Path) -> None:
    """A run continues with another one where the machine is another, and with its own on the same."""
    short = dataclasses.replace(PLAIN, checkpoint_every=1, eval_every=1)
    with pytest.raises(CrashError):
        run(dataclasses.replace(short, microbatch=5), tmp_path, crash_at(3))
    with Workdir(tmp_path, to_dict(short), tensorboard=False) as workdir:
        assert workdir.read_runtime() == {"device": "cpu", "processes": 1, "microbatch": 5}
        model = fresh(short)
        parts = MicroBatches(model)
        with pytest.raises(CrashError):
            train(short, workdir, model, digits(), crash_at(2), microbatch=12)
        assert parts.seen == 2 * 3  # steps 3 and 4, in the parts that the run began with
        workdir.write_runtime({"device": "NVIDIA H200", "processes": 1, "microbatch": 5})
        model = fresh(short)
        parts = MicroBatches(model)
        with pytest.raises(CrashError):
            train(short, workdir, model, digits(), crash_at(2), microbatch=6)
        assert parts.seen == 2 * 2
        assert workdir.read_runtime() == {"device": "cpu", "processes": 1, "microbatch": 6}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"microbatch": "8"}', '{"microbatch": 0}'])
def test_runtime_choices_that_cannot_be_read_are_made_anew(tmp_path: Path, content: str) -> None:
    with Workdir(tmp_path, to_dict(PLAIN), tensorboard=False) as workdir:
        (tmp_path / "runtime.json").write_text(content)
        assert workdir.read_runtime() == {}
        train(PLAIN, workdir, fresh(PLAIN), digits())
        assert workdir.read_runtime()["microbatch"] == 12


def test_large_models_are_measured_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of small work goes through at once; of a large one a micro-batch is measured."""
    measured: list[int] = []

    def measure(config: TrainConfig, *given: Any) -> Any:
        measured.append(config.batch_size)
        return types.SimpleNamespace(microbatch=4)

    monkeypatch.setattr(microbatch, "measure_step", measure)
    run(dataclasses.replace(PLAIN, steps=1), tmp_path / "small")
    assert measured == []
    monkeypatch.setattr(microbatch, "SMALL_FLOPS", 1.0)
    run(dataclasses.replace(PLAIN, steps=1), tmp_path / "large")
    assert measured == [12]
    assert json.loads((tmp_path / "large" / "runtime.json").read_text())["microbatch"] == 4


def test_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(EVERYTHING, tmp_path, signal_at(4, signal.SIGINT, times=2))
    assert signal.getsignal(signal.SIGINT) is before
    assert list(records(tmp_path, "norm")) == [1, 2, 3]


def test_damaged_checkpoint_is_passed_over(
    tmp_path: Path, quiet: tuple[Weights, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CrashError):
        run(EVERYTHING, tmp_path, crash_at(8))
    newest = tmp_path / "checkpoints" / "step-000000006" / "state.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    assert_same_end(tmp_path, quiet)
    said = " ".join(capsys.readouterr().err.split())
    assert "step-000000006 is corrupt and skipped: state.safetensors does not match its checksum" in said
    assert "continues from step-000000003" in said


def test_a_finished_run_trains_no_more(
    tmp_path: Path, quiet: tuple[Weights, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(EVERYTHING, tmp_path, norm)
    monkeypatch.setattr(loop, "train_step", None)
    assert_same_end(tmp_path, quiet)


# ------------------------------------------------------------------------------------------------- nonsense


def test_loss_that_is_not_finite(tmp_path: Path) -> None:
    """A rate of 1e30 ruins the weights in the first step, and the second cannot be made."""
    config = dataclasses.replace(PLAIN, optim=OptimConfig(name="sgd", lr=1e30), checkpoint_every=1)
    with pytest.raises(NonFiniteError, match=r"not finite at step 2; (.*) holds the batch.*a smaller optim\.lr"):
        run(config, tmp_path)
    kept = load_file(tmp_path / "nonfinite" / "step-000000002.safetensors")
    expected = [example_at(digits(), config.seed, g)[1] for g in range(12, 24)]
    assert kept["indices"].tolist() == expected
    assert kept["labels"].tolist() == digits().labels[expected].tolist()
    assert kept["images"].shape == (12, 3, 8, 8)
    model = build_model(config.model)
    model.load_state_dict({n.removeprefix("weights/"): t for n, t in kept.items() if n.startswith("weights/")})
    classification_loss(model(kept["images"]), kept["labels"]).backward()
    replayed = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert not torch.isfinite(replayed)
    saved = load_latest(tmp_path / "checkpoints", pytest.fail)
    assert saved is not None
    assert saved.step == 1
    assert list(records(tmp_path)) == [1]
    with pytest.raises(NonFiniteError, match="not finite at step 2"):
        run(config, tmp_path)  # as before, from the checkpoint


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_image_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Any) -> None:
    def poisoned(*args: Any, start: int, **options: Any) -> Iterator[Batch]:
        for number, batch in enumerate(train_batches(*args, start=start, **options), start // 12 + 1):
            if number == 4:
                batch.images[3, 0, 0, 0] = float("inf")
            yield batch

    monkeypatch.setattr(loop, "train_batches", poisoned)
    config = dataclasses.replace(EVERYTHING, mixup=0.0, checkpoint_every=1, log_every=100, precision=precision)
    with pytest.raises(NonFiniteError, match="not finite at step 4"):
        run(config, tmp_path, norm)
    kept = load_file(tmp_path / "nonfinite" / "step-000000004.safetensors")
    assert kept["images"].isinf().nonzero().tolist() == [[3, 0, 0, 0]]
    saved = load_latest(tmp_path / "checkpoints", pytest.fail)
    assert saved is not None
    assert saved.step == 3
    assert all(bool(torch.isfinite(tensor).all()) for tensor in saved.tensors.values())
    assert all(torch.equal(kept[name], saved.tensors[name]) for name in saved.tensors if name.startswith("weights/"))


def test_another_number_of_classes(tmp_path: Path) -> None:
    config = dataclasses.replace(PLAIN, model=dataclasses.replace(TINY, num_classes=7))
    with pytest.raises(ValueError, match="the model has 7 classes and digits has 10"):
        run(config, tmp_path)


def folder_of_images(place: Path, good: int, bad: int) -> DataConfig:
    for name in ("cats", "dogs"):
        (place / "train" / name).mkdir(parents=True)
        for number in range(good):
            Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(place / "train" / name / f"{number}.png")
        for number in range(bad):
            (place / "train" / name / f"broken{number}.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return DataConfig(name=f"folder:{place / 'train'}", train_split="trainval", crop="none", on_error="skip")


def test_unreadable_images_are_counted(tmp_path: Path) -> None:
    """Two of twelve images are broken: every epoch of two steps lacks two."""
    data = folder_of_images(tmp_path, good=6, bad=2)
    model = dataclasses.replace(TINY, num_classes=2)
    config = dataclasses.replace(PLAIN, model=model, data=data, batch_size=7, steps=4)
    run(config, tmp_path / "run", data=load_dataset(data.name, "trainval", on_error="skip"))
    examples = records(tmp_path / "run", "epoch")[4]
    assert examples == pytest.approx(4 * 7 / 14)  # one of eight a class is the test split's
    skipped = list(records(tmp_path / "run", "skipped").values())
    assert skipped == sorted(skipped)
    assert 2 <= skipped[-1] <= 8


@pytest.mark.parametrize(("kind", "fsdp"), [("classes", False), ("several", True), ("masked", False)])
def test_share_of_unreadable_images(
    kind: str, fsdp: bool, tmp_path: Path, in_ranks: Callable[[int, Callable[[], Any]], list[Any]]
) -> None:
    """A batch is the same for two processes as for one, also where one of them has no image of it."""
    whole = digits().take(np.arange(16))
    broken = {index: ImageError(f"{index}.png", "broken") for index in range(16) if index % 3}
    data = dataclasses.replace(whole, failures=broken)
    if kind == "several":
        sets = Labels.of_lists([[i % 10, (i + 3) % 10][: 1 + i % 2] for i in range(16)])
        data = dataclasses.replace(data, labels=sets.firsts, label_sets=sets)
    config = dataclasses.replace(PLAIN, data=dataclasses.replace(PLAIN.data, on_error="skip"), fsdp=fsdp)
    config = dataclasses.replace(config, batch_size=8, microbatch=2, steps=8)
    if kind == "masked":
        model = dataclasses.replace(TINY, num_classes=0)
        config = dataclasses.replace(config, model=model, masking=MaskingConfig())
    stream = [example_at(data, config.seed, g)[1] for g in range(64)]
    shares = [[i for i in stream[g : g + 4] if i not in broken] for g in range(0, 64, 4)]
    assert [] in shares
    assert all(one or two for one, two in zip(shares[::2], shares[1::2], strict=True))

    def trained(world: World) -> dict[str, np.ndarray]:
        folder, model = (
            tmp_path / str(world.world_size),
            create_training_model(config, torch.Generator().manual_seed(0)),
        )
        with Workdir(folder, to_dict(config), tensorboard=False, world=world) as workdir:
            done = train(config, workdir, model, data, world=world)
        return {name: tensor.numpy() for name, tensor in done.state_dict().items()}

    def job() -> dict[str, np.ndarray]:
        with init_distributed() as world:
            return trained(world)

    alone = trained(SINGLE)
    for found in in_ranks(2, job):
        for name, expected in alone.items():
            np.testing.assert_allclose(found[name], expected, atol=1e-5)
    assert records(tmp_path / "2", "skipped") == records(tmp_path / "1", "skipped")
    assert records(tmp_path / "2") == pytest.approx(records(tmp_path / "1"), abs=1e-5)


def test_batch_of_unreadable_images_of_two(
    tmp_path: Path, in_ranks: Callable[[int, Callable[[], Any]], list[Any]]
) -> None:
    data = digits().take(np.arange(16))
    data = dataclasses.replace(data, failures={index: ImageError(f"{index}.png", "broken") for index in range(16)})
    config = dataclasses.replace(PLAIN, data=dataclasses.replace(PLAIN.data, on_error="skip"))

    def job() -> None:
        with init_distributed() as world, Workdir(tmp_path, to_dict(config), tensorboard=False, world=world) as workdir:
            train(config, workdir, fresh(config), data, world=world)

    for error in in_ranks(2, job):
        assert str(error).startswith("none of the 12 images of a batch can be read")


def test_batch_of_unreadable_images(tmp_path: Path) -> None:
    data = folder_of_images(tmp_path, good=0, bad=4)
    model = dataclasses.replace(TINY, num_classes=2)
    config = dataclasses.replace(PLAIN, model=model, data=data, batch_size=6)
    with pytest.raises(ValueError, match=r"none of the 6 images of a batch can be read.*broken\d\.png"):
        run(config, tmp_path / "run", data=load_dataset(data.name, "trainval", on_error="skip"))
