"""What a checkpoint brings along, and what the other task's size decides."""

import dataclasses
from typing import Literal

import pytest
import torch

from vitlab.errors import UserError
from vitlab.models import ViTConfig, build_model, get_config
from vitlab.train.config import FinetuneConfig
from vitlab.train.memory import step_bytes
from vitlab.transfer import carry
from vitlab.transfer.carry import activation_bytes, adapted, by_size, identity


@pytest.mark.parametrize(
    ("examples", "steps", "warmup", "mixup", "batch"),
    [
        (40, 500, 100, 0.0, 32),
        (1_020, 500, 100, 0.0, 64),
        (5_000, 500, 100, 0.0, 512),
        (19_999, 500, 100, 0.0, 512),
        (20_000, 10_000, 500, 0.1, 512),
        (499_999, 10_000, 500, 0.1, 512),
        (500_000, 20_000, 500, 0.1, 512),
    ],
)
def test_rule_for_own_pictures(examples: int, steps: int, warmup: int, mixup: float, batch: int) -> None:
    """BiT's HyperRule."""
    asked = FinetuneConfig(steps=1, automatic=("steps", "warmup_steps", "mixup", "batch_size"))
    found = by_size(asked, examples)
    assert (found.steps, found.epochs, found.optim.warmup_steps) == (steps, None, warmup)
    assert (found.mixup, found.batch_size, found.automatic) == (mixup, batch, ())


def test_rule_leaves_alone_what_it_was_not_asked_for() -> None:
    config = FinetuneConfig(steps=50, mixup=0.7, batch_size=24, automatic=("warmup_steps",))
    expected = dataclasses.replace(config, automatic=(), optim=dataclasses.replace(config.optim, warmup_steps=10))
    assert by_size(config, 30_000) == expected


def test_large_batches_are_cut_to_what_memory_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """About: a ViT-B/16 at 384 pixels leaves 325 MiB of maps for each picture, in float32; on a CPU its attention
    matrices besides, so that half as many pictures fit."""
    source = get_config("ViT-B/16", image_size=384)
    assert activation_bytes(source, "cuda") / 2**20 == pytest.approx(325, rel=0.01)
    assert activation_bytes(source, "cpu") / 2**20 == pytest.approx(325 + 4 * 14 * 12 * 577**2 / 2**20, rel=0.01)
    table = FinetuneConfig(model=ViTConfig(image_size=384), steps=500, batch_size=512)
    assert adapted(source, table, 10, device="cpu").microbatch == 8
    monkeypatch.setattr(carry, "choose_device", lambda _: torch.device("cuda"))
    assert adapted(source, table, 10).microbatch == 16
    assert adapted(get_config("ViT-Ti/16"), table, 10, 64).microbatch is None
    assert adapted(source, dataclasses.replace(table, microbatch=512), 10).microbatch == 512
    assert adapted(source, dataclasses.replace(table, batch_size=8), 10).microbatch is None
    kept = [activation_bytes(get_config(name, image_size=384), "cpu") for name in ("R50x1", "R50+ViT-B/16", "R152x4")]
    assert kept[0] < kept[1] < kept[2]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("name", "size", "encoder"),
    [("ViT-B/8", 384, "full"), ("ViT-L/16", 512, "full"), ("ViT-S/16", 224, "full"), ("ViT-B/16", 384, "axial")],
)
def test_what_a_picture_leaves_is_what_a_step_holds(
    name: str, size: int, encoder: Literal["full", "axial"], device_type: str
) -> None:
    """Counted from the step itself, of which two pictures more hold twice as much of activations."""
    model = dataclasses.replace(get_config(name, image_size=size), depth=8, encoder=encoder)
    config = FinetuneConfig(model=model, steps=1)
    one, three = (step_bytes(config, pictures, "float32", device_type).total for pictures in (1, 3))
    assert activation_bytes(model, device_type) == pytest.approx((three - one) / 2, rel=0.15)


def test_a_recipes_size_is_the_nearest_that_patches_divide(caplog: pytest.LogCaptureFixture) -> None:
    """The recipes' 384 pixels for patches of 14; what is asked for stays as it is, or is refused."""
    table = FinetuneConfig(model=ViTConfig(image_size=384), steps=500, batch_size=8)
    source = get_config("ViT-H/14")
    for _ in range(2):
        assert adapted(source, table, 10, device="cpu").model.image_size == 392
    assert len(caplog.messages) == 1
    assert "384 pixels cannot be cut into patches of 14: taking the nearest larger size, 392" in caplog.text
    assert adapted(get_config("ViT-B/16"), table, 10, device="cpu").model.image_size == 384
    with pytest.raises(UserError, match="384x384 cannot be cut into patches of 14x14"):
        adapted(source, table, 10, 384, device="cpu")


def test_identity_is_of_shape_and_every_number() -> None:
    config = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, num_classes=3)
    one, same = (build_model(config, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    assert identity(one) == identity(same)
    with torch.no_grad():
        next(same.parameters()).view(-1)[3] += 1e-6
    shape, name = identity(same)
    assert shape == config
    assert name != identity(one)[1]
