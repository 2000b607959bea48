"""What a checkpoint is made of: everything that changes, and enough to go on from."""

import dataclasses
from typing import Any

import pytest
import torch

from vitlab.config import OptimConfig, TrainConfig
from vitlab.data.loader import Batch
from vitlab.models import ViTConfig
from vitlab.train.distributed import SINGLE
from vitlab.train.loop import train_step
from vitlab.train.objectives import create_objective, create_training_model
from vitlab.train.state import TrainState, create_state

CONFIG = TrainConfig(
    model=ViTConfig(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp_dim=16, num_classes=3, head_std=0.1),
    optim=OptimConfig(lr=1e-2),
    steps=4,
    batch_size=4,
    average_decay=0.5,
    precision="float32",
)
IMAGES = torch.linspace(-1, 1, 4 * 3 * 8 * 8).reshape(4, 3, 8, 8)
BATCH = Batch(IMAGES, torch.tensor([0, 1, 2, 1]), torch.arange(4))


def begun(config: TrainConfig, seed: int = 0) -> TrainState:
    model = create_training_model(config, torch.Generator().manual_seed(seed))
    return create_state(config, model, torch.device("cpu"), SINGLE)


def step(config: TrainConfig, state: TrainState) -> None:
    train_step(config, state, create_objective(config), BATCH, 1e-2, len(IMAGES))


def same(one: TrainState, two: TrainState) -> bool:
    ours, theirs = one.tensors(), two.tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_goes_on_from_what_was_kept(precision: Any) -> None:
    """The next step of another model, given all this, is the same to the bit."""
    config = dataclasses.replace(CONFIG, precision=precision)
    state = begun(config)
    step(config, state)
    kept = {name: tensor.clone() for name, tensor in state.tensors().items()}
    assert {"sums", "weights/head.weight", "average/head.weight", "optimizer/head.weight/exp_avg"} <= kept.keys()
    assert all(tensor.dtype in (torch.float32, torch.float64) for tensor in kept.values())
    other = begun(config, seed=1)
    assert not same(other, state)
    other.restore(kept, 1, {"skipped": 2, "recorded": 1})
    assert (other.step, other.skipped, other.recorded) == (1, 2, 1)
    assert same(other, state)
    for each in (state, other):
        step(config, each)
    assert same(other, state)
    assert not torch.equal(kept["weights/head.weight"], state.tensors()["weights/head.weight"])


def test_nothing_is_kept_where_nothing_is_wanted() -> None:
    assert set(begun(CONFIG).tensors(keep=False)) == {"sums"}


def test_an_average_only_where_it_is_asked_for() -> None:
    assert not any(
        name.startswith("average/") for name in begun(dataclasses.replace(CONFIG, average_decay=None)).tensors()
    )
