"""The steps that are timed do the work of inference and of training."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitlab.config import OptimConfig, TrainConfig
from vitlab.cost import step as module
from vitlab.cost.step import StepSpec, build, example_images, example_model
from vitlab.models import ViTConfig
from vitlab.models.vit import Model
from vitlab.train.objectives import blank_batch, create_objective

VIT = ViTConfig(image_size=16, patch_size=8, width=16, depth=2, heads=2, mlp_dim=24, num_classes=5)


def test_logits() -> None:
    with torch.no_grad():
        expected = example_model(VIT)(example_images(VIT, 3))
    assert expected.std() > 0.01  # a new head would return zeros
    tolerances: dict[Any, float] = {"float32": 1e-4, "bfloat16": 5e-2}
    for dtype, tolerance in tolerances.items():
        logits = build(StepSpec(VIT, "infer", 3, dtype))()
        assert logits is not None
        assert logits.shape == (3, 5)
        assert (logits.float() - expected).norm() < tolerance * expected.norm()


def test_a_training_step_is_adam_with_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss after two steps is that after two steps written out here."""
    optim, made = OptimConfig(lr=1e-2, weight_decay=0.05, clip_norm=0.1), []
    monkeypatch.setattr(module, "OPTIM", optim)

    def recorded(config: ViTConfig) -> Model:
        made.append(example_model(config))
        return made[-1]

    monkeypatch.setattr(module, "example_model", recorded)
    train = build(StepSpec(VIT, "train", 4, "float32"))
    train()
    train()

    model = example_model(VIT).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
    run = TrainConfig(model=VIT, optim=optim, steps=1, batch_size=4)
    batch = blank_batch(create_objective(run), example_images(VIT, 4))
    start = F.cross_entropy(model(batch.images), batch.labels)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.images), batch.labels).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        optimizer.step()
    with torch.no_grad():
        expected, loss = (F.cross_entropy(trained(batch.images), batch.labels) for trained in (model, made[-1]))
    assert abs(expected - start) > 1e-2
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
