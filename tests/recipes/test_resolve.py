"""A recipe, what is given, and the facts: the same on the command line and in Python."""

import dataclasses
from typing import Any

import pytest

from vitlab.config import DataConfig, FewShotConfig
from vitlab.errors import UserError
from vitlab.models import ViTConfig
from vitlab.preprocessing import Preprocessing
from vitlab.recipes.finetune import OPEN, cifar10, custom, staged
from vitlab.recipes.resolve import RECIPE, Facts, Reason, changes, keep_choices, resolve, with_settings
from vitlab.recipes.tiny import digits

S14 = ViTConfig(image_size=518, patch_size=14, width=384, depth=12, heads=6, mlp_dim=1536)
SMALL = Preprocessing(182)
FACTS = Facts("cpu", S14, Preprocessing(518), examples=160, num_classes=3)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"optim.lr": 3e-3}, {"optim.lr": 3e-3, "learning_rates": ()}),
        ({"learning_rates": (0.1,)}, {"learning_rates": (0.1,), "optim.lr": 0.1}),
        ({"epochs": 2.0}, {"epochs": 2.0, "steps": None}),
        ({"data.crop": "pad"}, {"data.crop": "pad"}),
        ({"data.name": "folder:x"}, {"data.name": "folder:x", "data.on_error": "skip"}),
        ({"data.name": "csv:x", "data.on_error": "raise"}, {"data.name": "csv:x"}),
        ({"fewshot.shots": (5,)}, {"fewshot": FewShotConfig(shots=(5,))}),
    ],
)
def test_given_settings_and_what_they_replace(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert dict(changes(cifar10(), resolve(cifar10(), given).config)) == expected
    pad = resolve(digits(), {"data.crop": "none", "steps": 7}).config.data.pad  # the recipe's, without effect now
    assert pad == DataConfig.pad != digits().data.pad


def test_a_given_setting_is_not_open() -> None:
    given = {"epochs": 1.0, "data.eval_resize": 9, "optim.lr": 1e-3, "seed": 3}
    left = {*OPEN["staged"]} - {"steps", "learning_rates", "refit"}
    left -= {"data.eval_resize", "data.eval_interpolation"}
    assert resolve(staged(), given, OPEN["staged"]).open_settings == left


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"steps": 3, "optim.warmup_steps": 1}, "optim.warmup_steps, steps"),
        ({"data.crop": "none", "data.pad": 3}, "pad=3"),
        ({"optim.lr": 0.1, "learning_rates": (0.1, 0.2)}, "learning_rates"),
        ({"optim.lr": 0.1, "held_out": 0.3}, "held_out"),
        ({"optim.rate": 0.1}, "unknown setting 'rate'"),
        ({"masking.share": 0.5}, "masking"),
        ({"steps": 0}, "steps is 0"),
    ],
)
def test_invalid_settings(given: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        resolve(cifar10(), given, budget="steps" in given and len(given) > 1)


def test_facts_choose_what_is_open_and_the_reasons_say_so() -> None:
    resolved = resolve(
        custom(), {"mixup": 0.2, "seed": 1}, OPEN["custom"], dataclasses.replace(FACTS, preprocessing=SMALL)
    )
    assert (resolved.config.steps, resolved.config.batch_size, resolved.config.mixup) == (100, 32, 0.2)
    assert resolved.config.model == dataclasses.replace(S14, image_size=182, num_classes=3)
    reasons = {reason.setting: (reason.value, reason.why) for reason in resolved.reasons}
    assert reasons["model.image_size"] == (182, "the checkpoint")
    assert reasons["steps"] == (100, "the training images")
    assert reasons["sweep_steps"][1] != RECIPE
    assert reasons["loss"] == ("softmax", RECIPE)
    assert reasons.keys() == {*OPEN["custom"]} - {"mixup"}


def test_it_may_be_called_again_with_its_result() -> None:
    """Without facts first, as when a command is read, and with them when they are known."""
    given = {"data.name": "folder:x", "optim.lr": 1e-3}
    first = resolve(staged(), given, OPEN["staged"])
    again = resolve(first.config, open_settings=first.open_settings, facts=FACTS)
    assert again == resolve(staged(), given, OPEN["staged"], FACTS)


def test_changes_are_what_with_settings_takes() -> None:
    for config in (staged(), custom()):
        after = resolve(config, {}, OPEN["staged"], FACTS).config
        assert with_settings(config, dict(changes(config, after))) == after


def test_an_interrupted_job_keeps_its_choices_on_another_device() -> None:
    """Also where the first device took the recipe's values, from which the second would depart; with an open sweep also
    the rate, but nothing that is given now."""
    gpu = dataclasses.replace(FACTS, device_type="cuda", preprocessing=Preprocessing(224))
    first = resolve(custom(), {}, OPEN["custom"], gpu)
    other = resolve(custom(), {}, OPEN["custom"], dataclasses.replace(gpu, device_type="cpu"))
    assert (first.config.steps, other.config.steps) == (custom().steps, 100)
    assert keep_choices(other, first.reasons, budget=False).config == first.config
    saved = [Reason("optim.lr", 2e-4, ""), Reason("learning_rates", (2e-4,), ""), Reason("mixup", 0.1, "")]
    kept = keep_choices(resolve(staged(), {"mixup": 0.3}, OPEN["staged"], FACTS), saved, budget=False).config
    assert (kept.optim.lr, kept.learning_rates, kept.mixup) == (2e-4, (2e-4,), 0.3)
