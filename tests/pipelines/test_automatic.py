"""Settings that data, checkpoint and device decide."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from vitlab.config import FinetuneConfig
from vitlab.models import ViTConfig
from vitlab.pipelines.automatic import bit_hyperrule, default_image_size, saved_choices, with_preprocessing
from vitlab.preprocessing import Preprocessing
from vitlab.recipes.finetune import own
from vitlab.settings import to_dict


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
def test_rule_for_own_images(examples: int, steps: int, warmup: int, mixup: float, batch: int) -> None:
    """BiT's HyperRule."""
    asked = FinetuneConfig(steps=1, automatic=("steps", "warmup_steps", "mixup", "batch_size"))
    found = bit_hyperrule(asked, examples)
    assert (found.steps, found.epochs, found.optim.warmup_steps) == (steps, None, warmup)
    assert (found.mixup, found.batch_size, found.automatic) == (mixup, batch, ())


def test_rule_leaves_alone_what_it_was_not_asked_for() -> None:
    config = FinetuneConfig(steps=50, mixup=0.7, batch_size=24, automatic=("warmup_steps",))
    expected = dataclasses.replace(config, automatic=(), optim=dataclasses.replace(config.optim, warmup_steps=10))
    assert bit_hyperrule(config, 30_000) == expected


S14 = ViTConfig(image_size=224, patch_size=14, width=384, depth=12, heads=6, mlp_dim=1536)


@pytest.mark.parametrize(
    ("examples", "batch", "steps", "warmup", "sweep_steps"),
    [(160, 32, 100, 20, 20), (2_934, 32, 500, 100, 100), (50_000, 32, 500, 100, 100)],
)
def test_rule_for_own_images_on_a_cpu(examples: int, batch: int, steps: int, warmup: int, sweep_steps: int) -> None:
    """A ViT-S/14 at 224 pixels would take hours for what BiT's rule asks of it; a small model takes BiT's rule."""
    asked = dataclasses.replace(own(), model=S14)
    chosen = bit_hyperrule(asked, examples, "cpu")
    assert (chosen.batch_size, chosen.steps, chosen.epochs) == (batch, steps, None)
    assert (chosen.optim.warmup_steps, chosen.sweep_steps) == (warmup, sweep_steps)
    assert bit_hyperrule(asked, examples, "cuda").batch_size == min(512, max(32, 2 ** int(math.log2(examples / 8))))
    tiny = dataclasses.replace(asked, model=dataclasses.replace(S14, image_size=28, depth=2))
    assert (bit_hyperrule(tiny, examples, "cpu") == bit_hyperrule(tiny, examples, "cuda")) == (examples < 20_000)


def test_batch_that_is_asked_for_stays_on_a_cpu() -> None:
    asked = dataclasses.replace(own(), model=S14, batch_size=64, automatic=("steps",))
    assert (bit_hyperrule(asked, 2_934, "cpu").batch_size, bit_hyperrule(asked, 2_934, "cpu").steps) == (64, 500)


@pytest.mark.parametrize(
    ("size", "patch", "device_type", "expected"),
    [(518, 14, "cpu", 224), (384, 16, "cpu", 224), (518, 14, "cuda", 518), (32, 4, "cpu", 32), (512, 30, "cpu", 210)],
)
def test_default_size(size: int, patch: int, device_type: str, expected: int) -> None:
    model = dataclasses.replace(S14, image_size=size // patch * patch, patch_size=patch)
    own_size = size // patch * patch
    nothing_said = Preprocessing(model.image_size)
    assert default_image_size(model, nothing_said, device_type) == (own_size if expected == size else expected)
    assert default_image_size(model, Preprocessing(112, 128), device_type) == 112  # at which it is evaluated


@pytest.mark.parametrize(
    ("checkpoint", "resize", "interpolation"),
    [
        (Preprocessing(224, 256, interpolation="bicubic"), 256, "bicubic"),
        (Preprocessing(224, interpolation="lanczos"), None, "lanczos"),
        (Preprocessing.google(224), None, None),
        (Preprocessing.google(224, 256), 256, None),
    ],
)
def test_test_images_are_prepared_as_the_checkpoints(
    checkpoint: Preprocessing, resize: int | None, interpolation: str | None
) -> None:
    data = with_preprocessing(own().data, checkpoint)
    assert (data.eval_resize, data.eval_interpolation) == (resize, interpolation)
    assert data.preprocessing(224).describe() == checkpoint.describe()


def test_choices_of_a_run_that_goes_on_elsewhere(tmp_path: Path) -> None:
    """What data and device have decided stays; what the user sets, and any other folder, decides nothing."""
    asked = own()
    data = dataclasses.replace(asked.data, eval_resize=256, eval_interpolation="bicubic")
    begun = bit_hyperrule(dataclasses.replace(asked, model=S14, data=data), 160, "cpu")
    (tmp_path / "config.json").write_text(json.dumps({"command": "finetune", **to_dict(begun)}))
    resumed = saved_choices(tmp_path, asked)
    assert (resumed.steps, resumed.batch_size, resumed.sweep_steps) == (100, 32, 20)
    assert (resumed.data.eval_resize, resumed.data.eval_interpolation) == (256, "bicubic")
    assert (resumed.optim.warmup_steps, resumed.model.image_size, resumed.automatic) == (20, 224, ())
    set_by_user = dataclasses.replace(asked, steps=7, automatic=("batch_size",))
    assert saved_choices(tmp_path, set_by_user).steps == 7
    assert saved_choices(tmp_path / "new", asked) == asked
    (tmp_path / "config.json").write_text("{")
    assert saved_choices(tmp_path, asked) == asked
