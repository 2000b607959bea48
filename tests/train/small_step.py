"""A small model, the state of a run before its first step, and a step."""

from typing import Any

import torch

from vitlab.config import OptimConfig, TrainConfig
from vitlab.data.loader import Batch
from vitlab.models import ViTConfig
from vitlab.train.checkpoint import TrainState, create_state
from vitlab.train.distributed import SINGLE
from vitlab.train.objectives import create_objective, create_training_model
from vitlab.train.step import train_step

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


def new_state(config: TrainConfig, seed: int = 0) -> TrainState:
    model = create_training_model(config.model, config.masking, torch.Generator().manual_seed(seed))
    return create_state(config, model, torch.device("cpu"), SINGLE)


def make_step(config: TrainConfig, state: TrainState, **options: Any) -> bool:
    return train_step(config, state, create_objective(config), BATCH, 1e-2, len(IMAGES), **options)
