"""Settings are decided here, once: the recipe's values, what the user gives, and rules for what the recipe leaves open.

`resolve` is pure. The command line and Python call it without facts, which finds invalid settings before anything is
read, and again with what the checkpoint, the data and the device say. After it only a plan may change what is still
open (`finetuning/plan.py`). Settings have dotted names: `steps`, `optim.lr`, `data.flip`.
"""

import dataclasses
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from vitlab.config import FewShotConfig, FinetuneConfig, TrainConfig
from vitlab.config.finetune import NO_SWEEP
from vitlab.config.train import REQUIRES, has_effect
from vitlab.errors import UserError
from vitlab.models.config import LEARNED_POSITIONS, ImageSize, ModelConfig, Pool, ViTConfig
from vitlab.models.readout import change_readout
from vitlab.models.variant import Interpolation, override
from vitlab.preprocessing import Preprocessing
from vitlab.recipes.finetune import LAYER
from vitlab.recipes.rules import adapt_config, bit_hyperrule, default_image_size
from vitlab.settings import nearest

Config = TypeVar("Config", bound=TrainConfig)
OWN_IMAGES = ("folder:", "csv:")
"""Data sets of one's own files: unreadable ones are skipped and listed, unless `data.on_error` is given."""
CLOSED_BY = {
    "steps": {"epochs"},
    "epochs": {"steps"},
    "optim.lr": {"learning_rates", "refit"},
    "learning_rates": {"optim.lr"},
    "runs": {"refit"},
    "data.eval_resize": {"data.eval_interpolation"},
    "data.eval_interpolation": {"data.eval_resize"},
}
"""A given setting -> the others that are no longer open either."""
CHOSEN_WITH = {
    "model.image_size": {"data.eval_resize"},  # in proportion to it
    "model.pool": {"model.variant.registers", "model.variant.class_position"},  # a class token may become a register
    "learning_rates": {"optim.lr"},
    "runs": set(NO_SWEEP),  # the least-squares head alone has none
}
"""An open setting -> the others that are chosen with it."""
BY_BUDGET = {"steps", "epochs", "sweep_steps", "optim.warmup_steps"}
"""What a time budget decides, whatever the recipe says."""
RECIPE = "the recipe"
"""The reason for an open setting that nothing has changed."""


class Reason(NamedTuple):
    """An open setting, its value, and what has chosen it."""

    setting: str
    value: Any
    why: str


@dataclass(frozen=True)
class Facts:
    """What is known of a job; None if it is not known yet."""

    device_type: str = "cuda"
    """On a CPU the default image size and the number of steps are smaller."""
    checkpoint: ModelConfig | None = None
    preprocessing: Preprocessing | None = None
    """The checkpoint's, for test images."""
    image_size: ImageSize | None = None
    """As the user gives it."""
    interpolation: Interpolation | None = None
    """Of position embeddings, as the user gives it."""
    layer: int | None = None
    """Number of blocks to keep, as the user gives it."""
    pool: Pool | None = None
    """What represents an image, as the user gives it."""
    examples: int | None = None
    """Training images."""
    num_classes: int | None = None
    multi_label: bool = False


@dataclass(frozen=True)
class Resolved(Generic[Config]):
    """The settings of a job."""

    config: Config
    open_settings: frozenset[str]
    """Settings that are neither given nor the recipe's: a plan may choose them."""
    reasons: tuple[Reason, ...] = ()


def resolve(
    config: Config,
    given: Mapping[str, Any] | None = None,
    open_settings: Collection[str] = (),
    facts: Facts = Facts(),
    budget: bool = False,
) -> Resolved[Config]:
    """The settings of a recipe, `config`, with what is `given`; `open_settings` are chosen by the known facts.

    A given setting replaces what excludes it: `steps` replaces `epochs` and vice versa, and `optim.lr` a sweep.
    budget: whether a time budget decides BY_BUDGET. Raises UserError for settings that are unknown, invalid, without
    effect, or exclude each other.
    """
    given = given or {}
    _check_given(given, budget)
    config = with_settings(config, {**_replaced_by(given, config), **given})
    closed = {*given, *(name for setting in given for name in CLOSED_BY.get(setting, ()))}
    still_open = frozenset(open_settings) - closed
    if isinstance(config, FinetuneConfig):
        return _resolve_finetune(config, given, still_open, facts)
    if facts.num_classes is not None and config.masking is None:
        config = with_settings(config, {"model.num_classes": facts.num_classes})
    return Resolved(config, still_open)


def _resolve_finetune(config: Any, given: Container[str], open_settings: frozenset[str], facts: Facts) -> Resolved[Any]:
    """`config`, which has the `given` settings, with the open ones as the known facts choose them, and the reasons."""
    if "held_out" in given and not config.tried_rates:
        raise UserError("held_out has no effect with one learning rate; give learning_rates, such as 0.003 and 0.01.")
    if config.learning_rates and config.optim.lr not in config.learning_rates:  # the recipe's rate without a sweep
        config = with_settings(config, {"optim.lr": config.learning_rates[0]})
    reasons: list[Reason] = []
    still_open = open_settings - set(LAYER)  # the checkpoint's own, until images choose
    for why, choose in (("the checkpoint", _choose_by_checkpoint), ("the training images", _choose_by_data)):
        chosen: Any = choose(config, open_settings, facts)
        reasons += [Reason(name, value, why) for name, value in changes(config, chosen) if name in still_open]
        config = chosen
    if facts.examples is not None:  # also what kept the recipe's value: another device could choose differently
        unchanged = open_settings - {reason.setting for reason in reasons}
        values = dict(changes(None, config))
        reasons += [Reason(name, values[name], RECIPE) for name in sorted(unchanged & values.keys())]  # of a ViT or not
    return Resolved(config, open_settings, tuple(reasons))


def keep_choices(resolved: Resolved[FinetuneConfig], saved: Sequence[Reason], budget: bool) -> Resolved[FinetuneConfig]:
    """`resolved` with the values that an interrupted job has `saved` for its open settings. They are kept even if the
    device or its speed has changed since."""
    chosen = set(resolved.open_settings) | (BY_BUDGET if budget else set())
    chosen |= {name for setting in chosen for name in CHOSEN_WITH.get(setting, ())}
    reasons = {reason.setting: reason for reason in saved if reason.setting in chosen}
    config = with_settings(resolved.config, {name: reason.value for name, reason in reasons.items()})
    return replace(resolved, config=config, reasons=tuple(reasons.values()) or resolved.reasons)


def with_settings(config: Any, settings: Mapping[str, Any]) -> Any:
    """`config` with these settings, all at once. Raises UserError for unknown and invalid ones."""
    values: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, _, inner = name.partition(".")
        names = [field.name for field in dataclasses.fields(config)]
        if section not in names:
            raise UserError(f"unknown setting {name!r}; {nearest(section, names)}.")
        if inner:
            sections.setdefault(section, {})[inner] = value
        else:
            values[section] = value
    for section, inner_values in sections.items():
        part = getattr(config, section)
        part = FewShotConfig() if part is None and section == "fewshot" else part
        if not dataclasses.is_dataclass(part):
            first = next(iter(inner_values))
            raise UserError(f"{section} is {part!r} and has no settings; leave {section}.{first} out.")
        values[section] = with_settings(part, inner_values)
    return replace(config, **values)


def changes(before: Any, after: Any, section: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and new value of each setting that two configs do not share; of all settings if `before` is None."""
    for field in dataclasses.fields(after):
        old, new = getattr(before, field.name, None), getattr(after, field.name)
        if dataclasses.is_dataclass(new) and (before is None or type(old) is type(new)):
            yield from changes(old, new, f"{section}{field.name}.")
        elif before is None or old != new:
            yield f"{section}{field.name}", new


def _check_given(given: Mapping[str, Any], budget: bool) -> None:
    if budget and (fixed := sorted(BY_BUDGET & given.keys())):
        raise UserError(f"the budget chooses the number of steps; leave out {', '.join(fixed)}, or the budget.")
    if {"optim.lr", "learning_rates"} <= given.keys():
        raise UserError("optim.lr is one learning rate, and a sweep tries the learning_rates; give one of the two.")


def _replaced_by(given: Mapping[str, Any], config: TrainConfig) -> dict[str, Any]:
    """Settings of the recipe that exclude the `given` ones or have no effect beside them, with new values."""
    settings: dict[str, Any] = {}
    if ("steps" in given) != ("epochs" in given):
        settings["epochs" if "steps" in given else "steps"] = None
    if isinstance(config, FinetuneConfig) and "optim.lr" in given:
        settings |= NO_SWEEP
    if str(given.get("data.name", "")).startswith(OWN_IMAGES):
        settings["data.on_error"] = "skip"
    for section, rows in REQUIRES.items():
        for name, (switch, wanted) in rows.items():
            if f"{section}.{switch}" in given and not has_effect(given[f"{section}.{switch}"], wanted):
                settings[f"{section}.{name}"] = getattr(type(getattr(config, section)), name)
    return settings


def _choose_by_checkpoint(config: Any, open_settings: frozenset[str], facts: Facts) -> FinetuneConfig:
    """`config` with the checkpoint's model, and its preprocessing of test images."""
    source, preprocessing = facts.checkpoint, facts.preprocessing
    if source is None:
        return config
    _check_checkpoint(source, config, facts)
    if facts.interpolation is not None:
        source = override(source, position_interpolation=facts.interpolation)
    if facts.layer is not None or facts.pool is not None:
        hidden = {} if config.pre_logits or not isinstance(source, ViTConfig) else {"representation_size": None}
        source = change_readout(replace(source, **hidden), facts.layer, facts.pool)
    size = facts.image_size
    if size is None and preprocessing is not None and "model.image_size" in open_settings:
        size = default_image_size(source, preprocessing, facts.device_type)
    config = adapt_config(source, config, facts.num_classes or 2, size)  # 2 until the images are read
    if preprocessing is not None and "data.eval_resize" in open_settings:
        scaled = preprocessing.at(config.model.image_size)
        resize = scaled.resize if scaled.keep_aspect else None
        interpolation = None if scaled.is_google else scaled.interpolation
        config = with_settings(config, {"data.eval_resize": resize, "data.eval_interpolation": interpolation})
    config.data.preprocessing(config.model.image_size)  # raises for an invalid size
    return config


def _check_checkpoint(source: ModelConfig, config: Any, facts: Facts) -> None:
    """Raises UserError for a setting that requires what the checkpoint's model does not have."""
    if config.fresh_positions and getattr(source, "position", None) not in LEARNED_POSITIONS:
        raise UserError("fresh_positions draws learned position embeddings, and the checkpoint has none; leave it out.")
    if config.pre_logits and not getattr(source, "representation_size", None):
        raise UserError("pre_logits='keep' keeps the layer before the head, and the checkpoint has none; leave it out.")
    if facts.interpolation is not None and not isinstance(source, ViTConfig):
        raise UserError(f"interpolation={facts.interpolation!r} resamples position embeddings, and a ResNet has none.")


def _choose_by_data(config: Any, open_settings: frozenset[str], facts: Facts) -> FinetuneConfig:
    """`config` with the settings that depend on the training images."""
    if facts.examples is None:
        return config
    if "loss" in open_settings and facts.multi_label:
        config = replace(config, loss="sigmoid")
    return bit_hyperrule(config, facts.examples, facts.device_type, open_settings)
