"""What a recipe leaves to data, checkpoint and device, and that a run keeps it."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from vitlab.config import FinetuneConfig
from vitlab.finetuning.automatic import (
    REFIT_EPOCHS,
    SHORT_MIN_AREA,
    adapt_to_epochs,
    bit_hyperrule,
    default_image_size,
    load_automatic_settings,
)
from vitlab.models import ViTConfig
from vitlab.preprocessing import Preprocessing
from vitlab.recipes.finetune import custom, staged
from vitlab.recipes.given import settle
from vitlab.settings import to_dict

S14 = ViTConfig(image_size=224, patch_size=14, width=384, depth=12, heads=6, mlp_dim=1536)


@pytest.mark.parametrize(
    ("examples", "steps", "warmup", "mixup", "batch"),
    [
        (40, 500, 100, 0.0, 32),
        (1_020, 500, 100, 0.0, 64),
        (19_999, 500, 100, 0.0, 512),
        (20_000, 10_000, 500, 0.1, 512),
        (499_999, 10_000, 500, 0.1, 512),
        (500_000, 20_000, 500, 0.1, 512),
    ],
)
def test_bit_hyperrule(examples: int, steps: int, warmup: int, mixup: float, batch: int) -> None:
    config = FinetuneConfig(steps=1, automatic=("steps", "warmup_steps", "mixup", "batch_size"))
    chosen = bit_hyperrule(config, examples)
    assert (chosen.steps, chosen.epochs, chosen.optim.warmup_steps) == (steps, None, warmup)
    assert (chosen.mixup, chosen.batch_size, chosen.automatic) == (mixup, batch, ())


def test_all_steps_are_tried_from_a_least_squares_head() -> None:
    assert (staged().tried_rates, bit_hyperrule(staged(), 1000).sweep_steps) == ((1e-4,), None)
    several = bit_hyperrule(dataclasses.replace(staged(), learning_rates=(3e-5, 1e-4)), 1000)
    assert (several.steps, several.sweep_steps) == (500, None)
    assert bit_hyperrule(custom(), 1000).sweep_steps == 100


def test_settings_that_depend_on_the_epochs() -> None:
    """Those that are automatic, and no other."""
    base = dataclasses.replace(staged(), batch_size=32)

    def adapted(epochs: float, automatic: set[str]) -> FinetuneConfig:
        return adapt_to_epochs(dataclasses.replace(base, steps=round(epochs * 10_000 / 32)), 10_000, automatic)

    for epochs in (2.9, 3.1, REFIT_EPOCHS - 0.1, REFIT_EPOCHS + 0.1):
        assert adapted(epochs, {"refit"}).refit == (epochs > REFIT_EPOCHS)
        short = epochs < 3
        assert adapted(epochs, {"min_area"}).data.min_area == (SHORT_MIN_AREA if short else base.data.min_area)
        rated, rate = adapted(epochs, {"learning_rates"}), 2e-4 if short else 1e-4
        assert (rated.optim.lr, rated.learning_rates) == (rate, (rate,))
        assert adapted(epochs, set()) == dataclasses.replace(base, steps=round(epochs * 10_000 / 32))
    head_alone = dataclasses.replace(base, runs=0, steps=1)  # whose steps say nothing
    assert adapt_to_epochs(head_alone, 10_000, {"refit", "min_area", "learning_rates"}) == head_alone
    assert "refit" not in settle(dataclasses.replace(staged(), runs=3), {"runs"}).automatic


@pytest.mark.parametrize(("examples", "fraction"), [(40, 0.2), (5_000, 0.2), (10_000, 0.1), (1_000_000, 0.001)])
def test_no_more_images_are_held_out_than_tell(examples: int, fraction: float) -> None:
    assert bit_hyperrule(staged(), examples).held_out == pytest.approx(fraction)
    assert bit_hyperrule(settle(dataclasses.replace(staged(), held_out=0.3), {"held_out"}), examples).held_out == 0.3


def test_bit_hyperrule_changes_nothing_else() -> None:
    config = FinetuneConfig(steps=50, mixup=0.7, batch_size=24, automatic=("warmup_steps",))
    expected = dataclasses.replace(config, automatic=(), optim=dataclasses.replace(config.optim, warmup_steps=10))
    assert bit_hyperrule(config, 30_000) == expected
    large = dataclasses.replace(custom(), model=S14, batch_size=64, automatic=("steps",))
    assert (bit_hyperrule(large, 2_934, "cpu").batch_size, bit_hyperrule(large, 2_934, "cpu").steps) == (64, 500)


@pytest.mark.parametrize(
    ("examples", "batch", "steps", "warmup", "sweep_steps"),
    [(160, 32, 100, 20, 20), (2_934, 32, 500, 100, 100), (50_000, 32, 500, 100, 100)],
)
def test_bit_hyperrule_on_a_cpu(examples: int, batch: int, steps: int, warmup: int, sweep_steps: int) -> None:
    """A ViT-S/14 at 224 pixels would take hours for BiT's own steps; a small model takes BiT's."""
    config = dataclasses.replace(custom(), model=S14)
    chosen = bit_hyperrule(config, examples, "cpu")
    assert (chosen.batch_size, chosen.steps, chosen.epochs) == (batch, steps, None)
    assert (chosen.optim.warmup_steps, chosen.sweep_steps) == (warmup, sweep_steps)
    assert bit_hyperrule(config, examples, "cuda").batch_size == min(512, max(32, 2 ** int(math.log2(examples / 8))))
    tiny = dataclasses.replace(config, model=dataclasses.replace(S14, image_size=28, depth=2))
    assert (bit_hyperrule(tiny, examples, "cpu") == bit_hyperrule(tiny, examples, "cuda")) == (examples < 20_000)


@pytest.mark.parametrize(
    ("size", "patch", "device_type", "expected"),
    [(518, 14, "cpu", 224), (384, 16, "cpu", 224), (518, 14, "cuda", 518), (32, 4, "cpu", 32), (510, 30, "cpu", 210)],
)
def test_default_image_size(size: int, patch: int, device_type: str, expected: int) -> None:
    model = dataclasses.replace(S14, image_size=size, patch_size=patch)
    assert default_image_size(model, Preprocessing(size), device_type) == expected
    assert default_image_size(model, Preprocessing(112, 128), device_type) == 112  # at which it is evaluated


def test_a_run_continues_with_its_choices_on_another_device(tmp_path: Path) -> None:
    """What data and device have decided stays; what the user sets, and any other folder, decides nothing."""
    config = custom()
    data = dataclasses.replace(config.data, eval_resize=256, eval_interpolation="bicubic")
    first = bit_hyperrule(dataclasses.replace(config, model=S14, data=data), 160, "cpu")
    saved = {"command": "finetune", "examples": 160, **to_dict(first)}
    saved |= {"halvings": None, "optim": saved["optim"] | {"cooldown_steps": 0}}  # as earlier versions
    (tmp_path / "config.json").write_text(json.dumps(saved))
    resumed, size = load_automatic_settings(tmp_path, config)
    assert (resumed.steps, resumed.batch_size, resumed.sweep_steps) == (100, 32, 20)
    assert (resumed.data.eval_resize, resumed.data.eval_interpolation) == (256, "bicubic")
    assert (resumed.optim.warmup_steps, size, resumed.automatic) == (20, 224, ())
    resumed, size = load_automatic_settings(tmp_path, dataclasses.replace(config, steps=7, automatic=("batch_size",)))
    assert (resumed.steps, resumed.batch_size, size) == (7, 32, None)
    lanczos = dataclasses.replace(config.data, eval_interpolation="lanczos")
    given = dataclasses.replace(staged(), data=lanczos, automatic=("image_size",))
    resumed, _ = load_automatic_settings(tmp_path, given)  # refused later, for the settings are others
    assert (resumed.data.eval_resize, resumed.data.eval_interpolation) == (256, "lanczos")
    assert load_automatic_settings(tmp_path / "new", config) == (config, None)
    (tmp_path / "config.json").write_text("{")
    assert load_automatic_settings(tmp_path, config) == (config, None)


def test_a_short_run_continues_with_its_crops_and_rate(tmp_path: Path) -> None:
    config = staged()
    first = bit_hyperrule(dataclasses.replace(config, model=S14), 10_000, "cpu")
    first = adapt_to_epochs(first, 10_000, config.automatic)
    (tmp_path / "config.json").write_text(json.dumps({"command": "finetune", "examples": 10_000, **to_dict(first)}))
    resumed, _ = load_automatic_settings(tmp_path, config)
    for settings in (first, resumed):
        assert (settings.refit, settings.held_out, settings.data.min_area) == (False, 0.1, SHORT_MIN_AREA)
        assert (settings.optim.lr, settings.learning_rates) == (2e-4, (2e-4,))
    given = dataclasses.replace(config, automatic=(), optim=dataclasses.replace(config.optim, lr=3e-3))
    assert load_automatic_settings(tmp_path, given)[0].optim.lr == 3e-3
