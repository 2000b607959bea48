"""The micro-batch fits the free memory, and its cost is measured."""

import dataclasses
from pathlib import Path

import pytest
import torch

from vitlab.config import MaskingConfig, OptimConfig, TrainConfig
from vitlab.models import ViTConfig, build_model
from vitlab.train import microbatch
from vitlab.train.microbatch import GIB, PeakMemory, StepCost, TrialStep, default_microbatch, free_memory, measure_step
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
needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")


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


def test_free_memory_is_the_smaller_of_system_and_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24578932 kB\nMemAvailable:   1024 kB\nHugePages_Total:       0\n")
    assert microbatch._bytes_of(meminfo, "MemAvailable") == 2**20
    monkeypatch.setattr(microbatch, "_bytes_of", lambda *_: 7)
    for limit, expected in ((5, 5), (None, 7)):
        monkeypatch.setattr(microbatch, "_cgroup_room", lambda limit=limit: limit)
        assert free_memory(CPU) == expected


@pytest.mark.parametrize(
    ("size", "shard", "device", "expected"),
    [(224, 256, "cpu", 16), (518, 256, "cpu", 2), (224, 8, "cpu", 8), (28, 500, "cpu", 500), (518, 256, "cuda", 256)],
)
def test_default(size: int, shard: int, device: str, expected: int) -> None:
    """On a CPU a micro-batch takes seconds, not minutes; a small model takes its batch at once."""
    config = dataclasses.replace(SMALL, model=dataclasses.replace(S14, image_size=size))
    assert default_microbatch(config, torch.device(device), shard) == expected


@pytest.mark.parametrize("changes", [{}, {"precision": "autocast"}, {"precision": "bfloat16"}, {"microbatch": 6}])
def test_measuring_leaves_the_model_unchanged(changes: dict) -> None:
    model = build_model(SMALL.model, generator=torch.Generator().manual_seed(0)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cost = measure_step(dataclasses.replace(SMALL, activation_checkpointing=True, **changes), model, CPU)
    assert cost.microbatch == changes.get("microbatch", 24)
    assert min(cost.train_seconds, cost.eval_seconds) > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module.training for module in model.modules())


def test_masked_patch_prediction_is_measured() -> None:
    model = dataclasses.replace(SMALL.model, num_classes=0)
    config = dataclasses.replace(SMALL, model=model, masking=MaskingConfig())
    assert measure_step(config, create_training_model(config), CPU).eval_seconds > 0


@pytest.mark.parametrize(
    ("free", "processes", "expected"), [(100, 1, 24), (60, 1, 16), (30, 1, 8), (30, 2, 4), (1, 1, 1)]
)
def test_little_memory_makes_it_smaller(
    free: int, processes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halved until its megabyte per image fits MEMORY_FRACTION of the free memory, which processes share."""
    monkeypatch.setattr(TrialStep, "measure", lambda self, images: (0.1, 1_000_000 * images))
    monkeypatch.setattr(microbatch, "_constant_bytes", lambda *_: 1_000_000)
    monkeypatch.setattr(microbatch, "free_memory", lambda _: free * 1_000_000)
    config = dataclasses.replace(SMALL, batch_size=24 * processes)
    cost = measure_step(config, build_model(SMALL.model), CPU, processes)
    assert (cost.microbatch, cost.memory) == (expected, (expected + 1) * 1_000_000)
    assert (cost.free, cost.train_seconds) == (free * 1_000_000 // processes, 0.1)


def test_one_image_where_no_more_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two images, measured, need far more than twice as much: the figures are those of one."""
    figures = {1: (0.1, 1_000_000)}
    monkeypatch.setattr(TrialStep, "measure", lambda self, images: figures.get(images, (25.0, 900_000_000)))
    monkeypatch.setattr(microbatch, "_constant_bytes", lambda *_: 0)
    monkeypatch.setattr(microbatch, "free_memory", lambda _: 1_000_000_000)
    cost = measure_step(SMALL, build_model(SMALL.model), CPU)
    assert (cost.microbatch, cost.train_seconds, cost.memory) == (1, 0.1, 1_000_000)


@needs_proc
def test_peak_includes_memory_that_was_freed() -> None:
    peak = PeakMemory(CPU)
    torch.ones(256, 2**18).sum().item()
    assert 128 * 2**20 < (peak.bytes() or 0) < 512 * 2**20
    peak.reset()
    assert (peak.bytes() or 0) < 128 * 2**20


@needs_proc
def test_a_larger_microbatch_needs_more_memory() -> None:
    config = dataclasses.replace(SMALL, batch_size=64, model=dataclasses.replace(SMALL.model, depth=6))
    few, many = (
        measure_step(dataclasses.replace(config, microbatch=size), build_model(config.model), CPU) for size in (1, 64)
    )
    assert (many.memory or 0) > (few.memory or 0) + 20 * 2**20


def test_description() -> None:
    assert StepCost(16, 0.125, 0.1, 3 * GIB, 24 * GIB).describe() == (
        "micro-batches of 16, 8 images/s, 3.0 of 24.0 GiB free memory"
    )
    assert StepCost(16, 0.001, 0.1, None, None).describe() == "micro-batches of 16, 1,000 images/s"
