"""What a given setting replaces, the same on the command line and in Python."""

from dataclasses import replace

import pytest

from vitlab.recipes.finetune import cifar10, custom, staged
from vitlab.recipes.given import AUTOMATIC, check_given, settle, without_replaced
from vitlab.recipes.tiny import digits


def test_one_learning_rate_takes_the_place_of_the_search() -> None:
    assert without_replaced(cifar10(), {"optim.lr"}).learning_rates == ()
    assert without_replaced(cifar10(), {"mixup"}) == cifar10()
    assert without_replaced(replace(cifar10(), sweep_steps=10), {"optim.lr"}).sweep_steps is None


def test_steps_and_epochs() -> None:
    for config in (digits(), custom()):
        steps, epochs = (without_replaced(config, {name}) for name in ("steps", "epochs"))
        assert steps.steps is not None
        assert epochs.epochs is not None


def test_a_given_setting_is_not_automatic() -> None:
    assert set(staged().automatic) <= AUTOMATIC.keys()
    given = {"epochs", "data.eval_resize", "optim.lr", "seed"}
    left = set(staged().automatic) - {"steps", "preprocessing", "learning_rates", "refit"}
    assert set(settle(staged(), given).automatic) == left
    several = replace(staged(), learning_rates=(3e-5, 5e-5))
    assert settle(several, {"learning_rates"}).optim.lr == 3e-5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps", "optim.warmup_steps"}, "-budget chooses .* leave out -optim.warmup_steps, -steps, or -budget"),
        ({"optim.lr", "learning_rates"}, "-optim.lr is one learning rate and -learning_rates .* give one of them"),
    ],
)
def test_settings_that_exclude_each_other(given: set[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_given(given, budget=True, spell=_as_flag)


def test_nothing_is_held_out_for_one_learning_rate() -> None:
    single = without_replaced(cifar10(), {"optim.lr"})
    with pytest.raises(ValueError, match=r"-held_out has no effect .*, -learning_rates 0.003"):
        settle(single, {"held_out"}, _as_flag)


def _as_flag(name: str) -> str:
    return f"-{name}"
