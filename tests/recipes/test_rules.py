"""What data, checkpoint and device choose."""

import dataclasses

import pytest

from vitlab.config import FinetuneConfig
from vitlab.models import ViTConfig
from vitlab.preprocessing import Preprocessing
from vitlab.recipes.finetune import OPEN, custom, staged
from vitlab.recipes.resolve import resolve
from vitlab.recipes.rules import REFIT_EPOCHS, SHORT_MIN_AREA, adapt_to_epochs, bit_hyperrule, default_image_size

S14 = ViTConfig(image_size=224, patch_size=14, width=384, depth=12, heads=6, mlp_dim=1536)


@pytest.mark.parametrize(
    ("examples", "steps", "warmup", "mixup", "batch"),
    [
        (1_020, 500, 100, 0.0, 64),
        (19_999, 500, 100, 0.0, 512),
        (20_000, 10_000, 500, 0.1, 512),
        (499_999, 10_000, 500, 0.1, 512),
        (500_000, 20_000, 500, 0.1, 512),
    ],
)
def test_bit_hyperrule(examples: int, steps: int, warmup: int, mixup: float, batch: int) -> None:
    open_settings = ("steps", "optim.warmup_steps", "mixup", "batch_size")
    chosen = bit_hyperrule(FinetuneConfig(steps=1), examples, "cuda", open_settings)
    assert (chosen.steps, chosen.epochs, chosen.optim.warmup_steps) == (steps, None, warmup)
    assert (chosen.mixup, chosen.batch_size) == (mixup, batch)


def test_all_steps_are_tried_from_a_least_squares_head() -> None:
    assert (staged().tried_rates, bit_hyperrule(staged(), 1000, "cuda", OPEN["staged"]).sweep_steps) == ((1e-4,), None)
    several = dataclasses.replace(staged(), learning_rates=(3e-5, 1e-4))
    several = bit_hyperrule(several, 1000, "cuda", OPEN["staged"])
    assert (several.steps, several.sweep_steps) == (500, None)
    assert bit_hyperrule(custom(), 1000, "cuda", OPEN["custom"]).sweep_steps == 100


def test_settings_that_depend_on_the_epochs() -> None:
    """Those that are open, and no other."""
    base = dataclasses.replace(staged(), batch_size=32)

    def adapted(epochs: float, open_settings: set[str]) -> FinetuneConfig:
        return adapt_to_epochs(dataclasses.replace(base, steps=round(epochs * 10_000 / 32)), 10_000, open_settings)

    for epochs in (2.9, 3.1, REFIT_EPOCHS - 0.1, REFIT_EPOCHS + 0.1):
        assert adapted(epochs, {"refit"}).refit == (epochs > REFIT_EPOCHS)
        short = epochs < 3
        assert adapted(epochs, {"data.min_area"}).data.min_area == (SHORT_MIN_AREA if short else base.data.min_area)
        rated, rate = adapted(epochs, {"learning_rates"}), 2e-4 if short else 1e-4
        assert (rated.optim.lr, rated.learning_rates) == (rate, (rate,))
        assert adapted(epochs, set()) == dataclasses.replace(base, steps=round(epochs * 10_000 / 32))
    head_alone = dataclasses.replace(base, runs=0, steps=1)  # whose steps say nothing
    assert adapt_to_epochs(head_alone, 10_000, {"refit", "data.min_area", "learning_rates"}) == head_alone
    assert "refit" not in resolve(staged(), {"runs": 3}, OPEN["staged"]).open_settings


@pytest.mark.parametrize(("examples", "fraction"), [(5_000, 0.2), (10_000, 0.1), (1_000_000, 0.001)])
def test_no_more_images_are_held_out_than_tell(examples: int, fraction: float) -> None:
    assert bit_hyperrule(staged(), examples, "cuda", OPEN["staged"]).held_out == pytest.approx(fraction)
    given = dataclasses.replace(staged(), held_out=0.3)
    assert bit_hyperrule(given, examples, "cuda", {*OPEN["staged"]} - {"held_out"}).held_out == 0.3


def test_bit_hyperrule_changes_nothing_else() -> None:
    config = FinetuneConfig(steps=50, mixup=0.7, batch_size=24)
    expected = dataclasses.replace(config, optim=dataclasses.replace(config.optim, warmup_steps=10))
    assert bit_hyperrule(config, 30_000, "cuda", {"optim.warmup_steps"}) == expected
    large = bit_hyperrule(dataclasses.replace(custom(), model=S14, batch_size=64), 2_934, "cpu", {"steps"})
    assert (large.batch_size, large.steps) == (64, 500)


@pytest.mark.parametrize(
    ("examples", "batch", "steps", "warmup", "sweep_steps"),
    [(160, 32, 100, 20, 20), (50_000, 32, 500, 100, 100)],
)
def test_bit_hyperrule_on_a_cpu(examples: int, batch: int, steps: int, warmup: int, sweep_steps: int) -> None:
    """A ViT-S/14 at 224 pixels would take hours for BiT's own steps; a small model takes BiT's."""
    config = dataclasses.replace(custom(), model=S14)
    chosen = bit_hyperrule(config, examples, "cpu", OPEN["custom"])
    assert (chosen.batch_size, chosen.steps, chosen.epochs) == (batch, steps, None)
    assert (chosen.optim.warmup_steps, chosen.sweep_steps) == (warmup, sweep_steps)
    tiny = dataclasses.replace(config, model=dataclasses.replace(S14, image_size=28, depth=2))
    on_cpu, on_gpu = (bit_hyperrule(tiny, examples, device, OPEN["custom"]) for device in ("cpu", "cuda"))
    assert (on_cpu == on_gpu) == (examples < 20_000)


@pytest.mark.parametrize(
    ("size", "patch", "device_type", "expected"),
    [(384, 16, "cpu", 224), (518, 14, "cuda", 518), (32, 4, "cpu", 32), (510, 30, "cpu", 210)],
)
def test_default_image_size(size: int, patch: int, device_type: str, expected: int) -> None:
    model = dataclasses.replace(S14, image_size=size, patch_size=patch)
    assert default_image_size(model, Preprocessing(size), device_type) == expected
    assert default_image_size(model, Preprocessing(112, 128), device_type) == 112  # at which it is evaluated
