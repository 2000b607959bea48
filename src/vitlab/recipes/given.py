"""What the settings that a user gives replace in a recipe, on the command line and in Python."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TypeVar

from vitlab.config import DataConfig, FinetuneConfig, TrainConfig
from vitlab.config.finetune import NO_SWEEP
from vitlab.errors import UserError
from vitlab.recipes.finetune import OWN_IMAGES

Config = TypeVar("Config", bound=TrainConfig)
AUTOMATIC = {
    "steps": {"steps", "epochs"},
    "warmup_steps": {"optim.warmup_steps"},
    "mixup": {"mixup"},
    "batch_size": {"batch_size"},
    "sweep_steps": {"sweep_steps"},
    "preprocessing": {"data.eval_resize", "data.eval_interpolation"},
    "image_size": {"image_size"},
    "learning_rates": {"learning_rates", "optim.lr"},
    "held_out": {"held_out"},
    "refit": {"refit", "runs", "optim.lr"},
    "runs": {"runs"},
    "head_views": {"head_views"},
    "loss": {"loss"},
    "part": {"data.part"},
    "min_area": {"data.min_area"},
}
"""What a recipe leaves to the data, the checkpoint and the device -> the settings that decide it."""
CHOSEN_BY_BUDGET = {"steps", "epochs", "sweep_steps", "optim.warmup_steps"}


def check_given(given: Collection[str], budget: bool, spell: Callable[[str], str] = str) -> None:
    """Raises UserError for settings that exclude each other. spell: how the user writes the name of a setting."""
    if budget and (fixed := CHOSEN_BY_BUDGET.intersection(given)):
        names = ", ".join(sorted(map(spell, fixed)))
        raise UserError(f"{spell('budget')} chooses the number of steps; leave out {names}, or {spell('budget')}.")
    if {"optim.lr", "learning_rates"} <= set(given):
        names = f"{spell('optim.lr')} is one learning rate and {spell('learning_rates')} are those of a sweep"
        raise UserError(f"{names}; give one of them.")


def with_dataset(data: DataConfig, name: str, given: Collection[str] = ()) -> DataConfig:
    """The settings for the data set `name`. Unreadable files of one's own are skipped, unless on_error is given."""
    skip = name.startswith(OWN_IMAGES) and "data.on_error" not in given
    return replace(data, name=name, on_error="skip" if skip else data.on_error)


def without_replaced(config: Config, given: Collection[str]) -> Config:
    """A recipe before the `given` settings are set: steps take the place of epochs and vice versa, and one learning
    rate that of the sweep."""
    if "steps" in given:
        config = replace(config, steps=1, epochs=None)
    if "epochs" in given:
        config = replace(config, steps=None, epochs=1.0)
    if isinstance(config, FinetuneConfig) and "optim.lr" in given:
        config = replace(config, **NO_SWEEP)
    return config


def settle(config: FinetuneConfig, given: Collection[str], spell: Callable[[str], str] = str) -> FinetuneConfig:
    """The recipe with the `given` settings, which are automatic no more. Raises UserError for one without effect."""
    rates, given = config.learning_rates, set(given)
    if "held_out" in given and not config.tried_rates:
        name = spell("learning_rates")
        raise UserError(f"{spell('held_out')} has no effect with one learning rate; give several, {name} 0.003 0.01.")
    if rates and config.optim.lr not in rates:  # the recipe's rate
        config = replace(config, optim=replace(config.optim, lr=rates[0]))
    return replace(config, automatic=tuple(name for name in config.automatic if not AUTOMATIC[name] & given))
