"""The micro-batch fits the memory that is free, and what it takes is measured."""

import dataclasses
from pathlib import Path

import pytest
import torch

from vitlab.config import MaskingConfig, OptimConfig, TrainConfig
from vitlab.models import ViTConfig, build_model
from vitlab.train import microbatch
from vitlab.train.microbatch import GIB, PeakMemory, StepCost, default_microbatch, free_memory, measure_step
from vitlab.train.objectives import create_training_model

CPU = torch.device("cpu")
SMALL = TrainConfig(
    model=ViTConfig(image_size=32, patch_size=4, width=32, depth=2, heads=2, mlp_dim=64, num_classes=3),
    optim=OptimConfig(name="sgd"),
    steps=1,
    batch_size=24,
    precision="float32",
)
S14 = ViTConfig(image_size=224, patch_size=14, width=384, depth=12, heads=6, mlp_dim=1536)


def test_available_memory_is_what_linux_says(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24578932 kB\nMemAvailable:   1024 kB\nHugePages_Total:       0\n")
    assert microbatch._bytes_of(meminfo, "MemAvailable") == 2**20
    assert microbatch._bytes_of(tmp_path / "missing", "MemAvailable") is None


@pytest.mark.parametrize(
    ("limit", "usage", "unlimited"),
    [
        ("memory.max", "memory.current", "max\n"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "9223372036854771712\n"),
    ],
)
def test_limit_of_a_container(tmp_path: Path, limit: str, usage: str, unlimited: str) -> None:
    assert microbatch._cgroup_room(tmp_path) is None
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / limit).write_text("1000000\n")
    (tmp_path / usage).write_text("700000\n")
    assert microbatch._cgroup_room(tmp_path) == 300_000
    cache = "total_inactive_file" if "/" in limit else "inactive_file"
    (tmp_path / usage).with_name("memory.stat").write_text(f"anon 5\n{cache} 200000\n")
    assert microbatch._cgroup_room(tmp_path) == 500_000
    (tmp_path / limit).write_text(unlimited)
    assert microbatch._cgroup_room(tmp_path) is None


def test_the_smaller_of_system_and_container_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatch, "_bytes_of", lambda *_: 7)
    monkeypatch.setattr(microbatch, "_cgroup_room", lambda: 5)
    assert free_memory(CPU) == 5
    monkeypatch.setattr(microbatch, "_cgroup_room", lambda: None)
    assert free_memory(CPU) == 7


@pytest.mark.parametrize(
    ("size", "share", "device", "expected"),
    [(224, 256, "cpu", 16), (518, 256, "cpu", 2), (224, 8, "cpu", 8), (28, 500, "cpu", 500), (518, 256, "cuda", 256)],
)
def test_size_where_memory_is_no_concern(size: int, share: int, device: str, expected: int) -> None:
    """On a CPU a micro-batch takes seconds, not minutes; a small model takes its batch at once."""
    config = dataclasses.replace(SMALL, model=dataclasses.replace(S14, image_size=size))
    assert default_microbatch(config, torch.device(device), share) == expected


def test_measured_and_left_as_it_was() -> None:
    model = build_model(SMALL.model, generator=torch.Generator().manual_seed(0))
    model.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cost = measure_step(SMALL, model, CPU)
    assert cost.microbatch == 24
    assert cost.train_seconds > cost.eval_seconds > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
def test_measured_in_the_precision_of_the_run(precision: str) -> None:
    config = dataclasses.replace(SMALL, precision=precision, activation_checkpointing=True)
    assert measure_step(config, build_model(config.model), CPU).microbatch == 24


def test_masked_patch_prediction_is_measured() -> None:
    model = dataclasses.replace(SMALL.model, num_classes=0)
    config = dataclasses.replace(SMALL, model=model, masking=MaskingConfig())
    assert measure_step(config, create_training_model(config), CPU).eval_seconds > 0


def test_little_memory_makes_it_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halved until what is measured is MEMORY_FRACTION of what is free; the processes of a machine share its memory."""
    taken = {24: 24_000_000, 16: 16_000_000, 8: 8_000_000, 4: 4_000_000, 2: 2_000_000, 1: 1_000_000}
    asked: list[int] = []

    class Measured:
        def __init__(self, device: torch.device) -> None:
            self.start = len(asked)

        def bytes(self) -> int:
            return taken[max(asked[self.start :])]

    def seconds(self: object, images: int) -> float:
        asked.append(images)
        return 0.1 * images

    monkeypatch.setattr(microbatch, "PeakMemory", Measured)
    monkeypatch.setattr(microbatch._TrialStep, "seconds", seconds)
    monkeypatch.setattr(microbatch, "_constant_bytes", lambda *_: 1_000_000)
    model = build_model(SMALL.model)
    for free, processes, expected in (
        (100_000_000, 1, 24), (60_000_000, 1, 16), (30_000_000, 1, 8), (30_000_000, 2, 4), (1_000_000, 1, 1),
    ):  # fmt: skip
        monkeypatch.setattr(microbatch, "free_memory", lambda _, free=free: free)
        cost = measure_step(dataclasses.replace(SMALL, batch_size=24 * processes), model, CPU, processes)
        assert cost.memory is not None
        assert cost.microbatch == expected
        assert cost.memory == taken[expected] + 1_000_000
        assert (cost.free, cost.train_seconds) == (free // processes, pytest.approx(0.1))
        if expected > 1:
            assert cost.memory <= microbatch.MEMORY_FRACTION * free / processes


def test_what_holds_for_one_image_is_told_where_no_more_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two images, measured, take far more than twice as much: what is told is what one takes."""
    asked: list[int] = []

    class Measured:
        def __init__(self, device: torch.device) -> None:
            self.start = len(asked)

        def bytes(self) -> int:
            return 1_000_000 if max(asked[self.start :]) == 1 else 900_000_000

    def seconds(self: object, images: int) -> float:
        asked.append(images)
        return 0.1 if images == 1 else 50.0

    monkeypatch.setattr(microbatch, "PeakMemory", Measured)
    monkeypatch.setattr(microbatch._TrialStep, "seconds", seconds)
    monkeypatch.setattr(microbatch, "_constant_bytes", lambda *_: 0)
    monkeypatch.setattr(microbatch, "free_memory", lambda _: 1_000_000_000)
    cost = measure_step(SMALL, build_model(SMALL.model), CPU)
    assert (cost.microbatch, cost.train_seconds, cost.memory) == (1, 0.1, 1_000_000)


def test_what_is_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatch, "free_memory", lambda _: 1000)
    assert measure_step(dataclasses.replace(SMALL, microbatch=6), build_model(SMALL.model), CPU).microbatch == 6


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_peak_of_memory_is_seen_after_it_is_freed() -> None:
    def filled(mebibytes: int) -> None:
        torch.ones(mebibytes, 2**18).sum().item()

    filled(64)
    peak = PeakMemory(CPU)
    filled(256)
    seen = peak.bytes()
    assert seen is not None
    assert 128 * 2**20 < seen < 512 * 2**20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_a_larger_micro_batch_takes_more() -> None:
    """Measured for real: activations of 64 images of a model without many weights."""
    config = dataclasses.replace(SMALL, batch_size=64, model=dataclasses.replace(SMALL.model, depth=6))
    few, many = (
        measure_step(dataclasses.replace(config, microbatch=size), build_model(config.model), CPU) for size in (1, 64)
    )
    assert few.memory is not None
    assert many.memory is not None
    assert many.memory > few.memory + 20 * 2**20


def test_described() -> None:
    assert StepCost(16, 0.125, 0.1, 3 * GIB, 24 * GIB).describe() == (
        "micro-batches of 16, 8 images/s, 3.0 of 24.0 GiB free memory"
    )
    assert StepCost(16, 0.001, 0.1, None, None).describe() == "micro-batches of 16, 1,000 images/s"
