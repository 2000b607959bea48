"""One step: what a stop or numbers that are not finite leave, and the passes of ranks with fewer images."""

import copy
from typing import Any

import pytest
import torch

from vitlab.config import OptimConfig, TrainConfig
from vitlab.data.loader import Batch
from vitlab.models import ViTConfig
from vitlab.train.checkpoint import TrainState, create_state
from vitlab.train.distributed import SINGLE
from vitlab.train.objectives import create_objective, create_training_model
from vitlab.train.step import _split, train_step

CONFIG = TrainConfig(
    model=ViTConfig(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp_dim=16, num_classes=3, head_std=0.1),
    optim=OptimConfig(lr=1e-2),
    steps=4,
    batch_size=4,
    average_decay=0.5,
    precision="float32",
)
IMAGES = torch.linspace(-1, 1, 4 * 3 * 8 * 8).reshape(4, 3, 8, 8)


@pytest.fixture
def state() -> TrainState:
    model = create_training_model(CONFIG.model, CONFIG.masking, torch.Generator().manual_seed(0))
    return create_state(CONFIG, model, torch.device("cpu"), SINGLE)


def step(state: TrainState, images: torch.Tensor = IMAGES, **options: Any) -> bool:
    batch = Batch(images, torch.tensor([0, 1, 2, 1]), torch.arange(4))
    return train_step(CONFIG, state, create_objective(CONFIG), batch, 1e-2, len(images), **options)


def test_a_step_is_done_or_not(state: TrainState) -> None:
    before = copy.deepcopy(state.tensors())
    fractions: list[float] = []

    def stop_at_the_second(fraction: float) -> bool:
        fractions.append(fraction)
        return len(fractions) < 2

    assert not step(state, microbatch=1, should_continue=stop_at_the_second)
    assert fractions == [0.25, 0.5]
    assert state.step == 0
    after = state.tensors()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert step(state, microbatch=1)
    assert state.step == 1
    after = state.tensors()
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert {"weights/head.weight", "average/head.weight", "sums"} <= changed


def test_no_update_by_numbers_that_are_not_finite(state: TrainState) -> None:
    before = copy.deepcopy(state.tensors())
    images = IMAGES.clone()
    images[2, 0, 0, 0] = torch.nan
    assert step(state, images)
    assert (state.step, int(state.first_nonfinite_step)) == (0, 1)
    after = state.tensors()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name != "sums")


def test_every_rank_makes_the_same_number_of_passes() -> None:
    """Of a shard of 6 images in micro-batches of 2, of which one rank could read 3: a pass without weight is added."""
    images, labels = torch.arange(3.0)[:, None], torch.arange(3)
    parts = [
        (inputs[:, 0].tolist(), targets.tolist(), weight)
        for inputs, targets, weight in _split(images, labels, 2, 12, 2)
    ]
    assert parts == [([0, 1], [0, 1], 2), ([2], [2], 1), ([0], [0], 0)]
    assert [weight for *_, weight in _split(images, labels, 2, 6, 1)] == [2, 1]
