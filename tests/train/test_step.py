"""One step: what a stop or numbers that are not finite leave, and the passes of ranks with fewer images."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from small_step import BATCH, CONFIG, IMAGES, new_state

from vitlab.train.checkpoint import TrainState
from vitlab.train.objectives import create_objective
from vitlab.train.step import _split, train_step


@pytest.fixture
def state() -> TrainState:
    return new_state(CONFIG)


def step(state: TrainState, images: torch.Tensor = IMAGES, **options: Any) -> bool:
    batch = dataclasses.replace(BATCH, images=images)
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
