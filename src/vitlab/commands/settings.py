"""Flags of a run's settings: one for each field of its config, such as `--optim.lr`, with the recipe's values.

tyro reads the flags into copies of the config's dataclasses that check nothing; `resolve` makes the config of the
recipe and the settings given. The recipe is read first, for its values are the defaults.
"""

import dataclasses
import itertools
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import tyro

from vitlab.config import FewShotConfig, TrainConfig
from vitlab.errors import UserError
from vitlab.models.registry import get_config
from vitlab.recipes import FINETUNE, OPEN, PRETRAIN, resolve
from vitlab.settings import nearest

MODEL_OF_CHECKPOINT = {"model.": "the checkpoint brings its own model; give --image-size or --model.dropout."}
TASK_DATA = ("data.name", "data.root", "data.classes", "data.train_split", "data.eval_split")
WITHOUT_EFFECT = {
    "pretrain": {"model.num_classes": "the data set decides."},
    "plan": {"model.num_classes": "the data set decides."},
    "finetune": MODEL_OF_CHECKPOINT | {"data.name": "give --dataset.", "data.root": "give --root."},
    "vtab": MODEL_OF_CHECKPOINT | dict.fromkeys(TASK_DATA, "each task brings its own data; give --root and --tasks."),
}
"""Settings that something else decides: command -> how their names begin -> the advice."""


def parse_command(name: str, kind: Any, words: Sequence[str]) -> Any:
    """The command `name`, an instance of its dataclass `kind`, of the words after its name.

    Its field `config`, if it has one, is the recipe's config with the flags, and `open_settings` are what the recipe
    leaves to the data. Raises UserError for invalid settings, SystemExit(2) for unknown flags.
    """
    words = [_with_hyphens(word) for word in words]
    if not has_config(kind):
        return tyro.cli(kind, args=words, prog=f"vitlab {name}", description=kind.__doc__)
    config = recipe_config(name, words)
    command: Any = tyro.cli(with_flags(kind, config), args=words, prog=f"vitlab {name}", description=kind.__doc__)
    flags = {word.partition("=")[0] for word in words if word.startswith("-")}
    given = {setting: value for setting, value in _leaves(command.config) if flags & set(_flags_of(setting, value))}
    for setting in sorted(given):
        if advice := advice_for(name, setting):
            raise UserError(f"--{setting.replace('_', '-')} has no effect here: {advice}")
    if name in ("pretrain", "plan") and (command.recipe, command.model_name) != (words[0], value_of("--model", words)):
        raise UserError(f"write the recipe first and --model once: `vitlab {name} {command.recipe} --...`.")
    if name == "finetune":
        given |= {} if command.dataset is None else {"data.name": command.dataset}
        given |= {} if command.root is None else {"data.root": command.root}
    recipe = getattr(command, "recipe", "vtab")
    budget = getattr(command, "budget", None) is not None
    resolved = resolve(config, given, OPEN.get(recipe, ()) if is_finetuning(name, words) else (), budget=budget)
    command = dataclasses.replace(command, config=resolved.config)
    if any(field.name == "open_settings" for field in dataclasses.fields(kind)):
        command = dataclasses.replace(command, open_settings=resolved.open_settings)
    return command


def has_config(kind: Any) -> bool:
    return any(field.name == "config" for field in dataclasses.fields(kind))


def with_flags(kind: Any, config: TrainConfig) -> Any:
    """The dataclass of a command with flags for the settings of `config`, whose values are the defaults."""
    flags = _unchecked(config)
    hint = Annotated[type(flags), tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]  # `--optim.lr`
    made = dataclasses.make_dataclass(
        kind.__name__, [("config", hint, dataclasses.field(default=flags))], bases=(kind,), frozen=True
    )
    made.__doc__ = kind.__doc__
    return made


def _unchecked(config: Any) -> Any:
    """`config` as an instance of a dataclass with the same fields and values that checks nothing."""
    types, fields, values = typing.get_type_hints(type(config), include_extras=True), [], {}
    for name in (field.name for field in dataclasses.fields(config)):  # hints have class variables, too
        value, hint = getattr(config, name), types[name]
        if name == "fewshot" and value is None:
            value = FewShotConfig()
        if dataclasses.is_dataclass(value):
            value = _unchecked(value)
            hint = type(value)
        fields.append((name, hint, dataclasses.field(default=value)))
        values[name] = value
    kind, nothing = type(config), {"__post_init__": lambda _: None}
    return dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=True, namespace=nothing)(**values)


def _leaves(config: Any, section: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of all settings."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{section}{field.name}.")
        else:
            yield section + field.name, value


def _flags_of(setting: str, value: Any) -> list[str]:
    """`--data.flip` and, of a switch, `--data.no-flip`."""
    section, dot, name = setting.replace("_", "-").rpartition(".")
    return [f"--{section}{dot}{name}", *([f"--{section}{dot}no-{name}"] if isinstance(value, bool) else [])]


def recipe_config(name: str, words: Sequence[str]) -> TrainConfig:
    """The recipe that a command's words name, without the other flags. Raises UserError for an unknown one."""
    if name == "vtab":
        return FINETUNE["vtab"]().single()
    first = words[0] if words and not words[0].startswith("-") else "tiny-digits"  # as for `--help`
    model = value_of("--model", words)
    if not is_finetuning(name, words):
        return _recipe(first, PRETRAIN)(*([model] if model else []))
    config = _recipe(value_of("--recipe", words) or "staged" if name == "finetune" else first, FINETUNE)()
    if name == "plan":  # a new model in place of the checkpoint's
        side = value_of("--model.image-size", words) or ""
        size = int(side) if side.isdigit() else config.model.image_size
        config = dataclasses.replace(config, model=get_config(model or "ViT-B/16", image_size=size))
    return config


def is_finetuning(name: str, words: Sequence[str]) -> bool:
    """Whether the recipe of a command is one for fine-tuning."""
    return name == "finetune" or "--finetune" in words


def value_of(flag: str, words: Sequence[str]) -> str | None:
    """The value of `--flag VALUE` or `--flag=VALUE`."""
    for word, following in itertools.zip_longest(words, words[1:]):
        name, equals, value = word.partition("=")
        if name == flag:
            return value if equals else following
    return None


def advice_for(name: str, setting: str) -> str | None:
    """What to do instead of giving a setting that has no effect in a command; None where it has one."""
    rules = WITHOUT_EFFECT[name].items()
    return next((advice for start, advice in rules if setting.startswith(start) and setting != "model.dropout"), None)


def _recipe(name: str, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if name not in table:
        raise UserError(f"unknown recipe {name!r}; {nearest(name, table)}. `vitlab list recipes` shows all.")
    return table[name]


def _with_hyphens(word: str) -> str:
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if word.startswith("--") else word
