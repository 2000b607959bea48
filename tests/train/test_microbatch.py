"""The micro-batch fits the free memory, and its speed is measured."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from vitlab.config import MaskingConfig, OptimConfig, TrainConfig
from vitlab.models import ViTConfig
from vitlab.models.vit import build_model
from vitlab.train import memory, microbatch
from vitlab.train.microbatch import default_microbatch, measure_step
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


@pytest.mark.parametrize(
    ("size", "shard", "device", "expected"),
    [(224, 256, "cpu", 16), (28, 500, "cpu", 500), (518, 256, "cuda", 256)],
)
def test_default(size: int, shard: int, device: str, expected: int) -> None:
    """On a CPU a micro-batch takes seconds, not minutes; a small model takes its batch at once."""
    config = dataclasses.replace(SMALL, model=dataclasses.replace(S14, image_size=size))
    assert default_microbatch(config.model.forward_macs, torch.device(device), shard) == expected


@pytest.mark.parametrize("changes", [{"precision": "bfloat16", "microbatch": 6}, {"masking": MaskingConfig()}])
def test_measuring_leaves_the_model_unchanged(changes: dict[str, Any]) -> None:
    network = dataclasses.replace(SMALL.model, num_classes=0) if "masking" in changes else SMALL.model
    config = dataclasses.replace(SMALL, activation_checkpointing=True, model=network, **changes)
    model = create_training_model(config.model, config.masking, torch.Generator().manual_seed(0)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cost = measure_step(config, model, CPU)
    assert cost.microbatch == changes.get("microbatch", 24)
    assert min(cost.train_seconds, cost.forward_seconds, cost.float32_seconds, cost.memory) > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize(("free", "processes", "expected"), [(1000, 1, 24), (50, 1, 16), (50, 2, 8), (3, 1, 1)])
def test_it_fits_the_free_memory(free: int, processes: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halved until its megabyte per image fits MEMORY_FRACTION of the free memory, which processes share."""
    monkeypatch.setattr(microbatch, "time_training", lambda *_: 0.1)
    monkeypatch.setattr(memory, "rank_bytes", lambda _, images, *__: {"weights": 10**6, "activations": 10**6 * images})
    monkeypatch.setattr(microbatch, "free_memory", lambda _: free * 1_000_000)
    config = dataclasses.replace(SMALL, batch_size=24 * processes)
    cost = measure_step(config, build_model(SMALL.model), CPU, processes)
    assert (cost.microbatch, cost.memory) == (expected, (expected + 1) * 1_000_000)
    assert (cost.free, cost.train_seconds) == (free * 1_000_000 // processes, 0.1)


def test_a_trial_that_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is halved, unless it was given; a model that fits only sharded has the counted size, and no known time."""

    def fits(most: int) -> None:
        def time_training(config: TrainConfig, model: object, device: object, images: int, shard: int) -> float:
            if images > most:
                raise torch.OutOfMemoryError
            return 0.1

        monkeypatch.setattr(microbatch, "time_training", time_training)

    model = build_model(SMALL.model)
    fits(4)
    assert measure_step(SMALL, model, CPU).microbatch == 4
    with pytest.raises(torch.OutOfMemoryError):
        measure_step(dataclasses.replace(SMALL, microbatch=8), model, CPU)
    fits(0)
    config = dataclasses.replace(SMALL, fsdp=True)
    cost = measure_step(config, model, CPU, world_size=2)
    assert (cost.microbatch, cost.train_seconds) == (12, math.inf)
    assert "unknown" in cost.describe()
    assert measure_step(dataclasses.replace(config, microbatch=3), model, CPU, world_size=2).microbatch == 3
    with pytest.raises(torch.OutOfMemoryError):
        measure_step(config, model, CPU)
