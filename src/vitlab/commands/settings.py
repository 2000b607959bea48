"""Flags of a run's settings: one for each field of its config, such as `--optim.lr`, with the recipe's values.

`cli.parse` calls `parse_command`, which takes three steps: `read_recipe` finds the recipe in the words of a command,
whose values are the defaults of the flags; tyro reads the flags, unchecked; `resolve` makes the config and checks it.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any

import tyro

from vitlab.config import FewShotConfig, TrainConfig
from vitlab.errors import UserError
from vitlab.models.registry import get_config
from vitlab.recipes import FINETUNE, OPEN, PRETRAIN, resolve
from vitlab.recipes.resolve import changes
from vitlab.settings import nearest

OTHER_NAMES = {
    "--dataset": "--data.name",
    "--root": "--data.root",
    "--lr": "--optim.lr",
    "--out": "--workdir",
    "--workdir": "--out",
}
"""A flag by its name in another command -> the name that this command may have for it."""
SHOWN_RECIPE = "tiny-digits"
"""The recipe whose defaults `--help` shows if none is given."""
MODEL_OF_CHECKPOINT = {"model.": "the model comes from the checkpoint; give --image-size or --model.dropout."}
"""The rule of commands that take a checkpoint, which `advice_for` does not apply to `model.dropout`."""
TASK_DATA = ("data.name", "data.root", "data.classes", "data.train_split", "data.eval_split")
"""The settings that each task of VTAB decides."""
WITHOUT_EFFECT = {
    "pretrain": {"model.num_classes": "the data set decides."},
    "plan": {"model.num_classes": "the data set decides."},
    "finetune": MODEL_OF_CHECKPOINT | {"data.name": "give --dataset.", "data.root": "give --root."},
    "vtab": MODEL_OF_CHECKPOINT | dict.fromkeys(TASK_DATA, "each task brings its own data; give --root and --tasks."),
}
"""Settings without effect: command -> how their names begin -> what to do instead."""


@dataclasses.dataclass(frozen=True)
class ChosenRecipe:
    """The recipe of a command."""

    model: str | None
    """Value of --model."""
    config: TrainConfig
    """The recipe's config, of this model, without the other flags."""
    open_settings: Collection[str]
    """Settings that the recipe leaves to the data."""


def parse_command(name: str, kind: Any, words: Sequence[str]) -> Any:
    """The command `name`, an instance of its dataclass `kind`, of the words after its name.

    Its field `config`, if it has one, is the recipe's config with the flags, and `open_settings` are what the recipe
    leaves to the data. Raises UserError for invalid settings, SystemExit(2) for unknown flags.
    """
    words = [_by_own_name(_with_hyphens(word), kind) for word in words]
    if not has_field(kind, "config"):
        return tyro.cli(kind, args=words, prog=f"vitlab {name}", description=kind.__doc__)
    chosen = read_recipe(name, words)
    kind_with_flags = with_flags(kind, chosen.config)
    command: Any = tyro.cli(kind_with_flags, args=words, prog=f"vitlab {name}", description=kind.__doc__)
    given = _given_settings(command, words)
    for setting in sorted(given):
        if advice := advice_for(name, setting):
            raise UserError(f"--{setting.replace('_', '-')} has no effect here: {advice}")
    # tyro may have found another recipe or model than `read_recipe`, whose defaults would be wrong.
    if name in ("pretrain", "plan") and (command.recipe, command.model_name) != (words[0], chosen.model):
        raise UserError(f"write the recipe first and --model once: `vitlab {name} {command.recipe} --...`.")
    if name == "finetune":
        data = {"data.name": command.dataset, "data.root": command.root}
        given |= {setting: value for setting, value in data.items() if value is not None}
    has_budget = getattr(command, "budget", None) is not None
    resolved = resolve(chosen.config, given, chosen.open_settings, budget=has_budget)
    if has_field(kind, "open_settings"):
        command = dataclasses.replace(command, open_settings=resolved.open_settings)
    return dataclasses.replace(command, config=resolved.config)


def _with_hyphens(word: str) -> str:
    """`--image-size`, for `--image_size`."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if word.startswith("--") else word


def _by_own_name(word: str, kind: Any) -> str:
    """`--data.name`, for `--dataset` in a command that has no flag of this name; other words as they are."""
    flag, equals, value = word.partition("=")
    own = OTHER_NAMES.get(flag)
    if own is None or has_field(kind, flag[2:]) or not has_field(kind, "config" if "." in own else own[2:]):
        return word
    return own + equals + value


def has_field(kind: Any, name: str) -> bool:
    return any(field.name == name for field in dataclasses.fields(kind))


def read_recipe(name: str, words: Sequence[str]) -> ChosenRecipe:
    """The recipe of a command. Raises UserError for an unknown one.

    The words that name it are searched here, before tyro reads them all: tyro must know the defaults first.
    """
    if name == "vtab":
        return ChosenRecipe(None, FINETUNE["vtab"]().single(), ())
    if name == "finetune":
        recipe = _value_of("--recipe", words) or "staged"
        return ChosenRecipe(None, _look_up(recipe, FINETUNE)(), OPEN.get(recipe, ()))
    recipe = words[0] if words and not words[0].startswith("-") else SHOWN_RECIPE
    model = _value_of("--model", words)
    if "--finetune" not in words:
        create = _look_up(recipe, PRETRAIN)
        return ChosenRecipe(model, create(model) if model else create(), ())
    # `plan --finetune`, of a new model in place of the checkpoint's
    config = _look_up(recipe, FINETUNE)()
    side = _value_of("--model.image-size", words) or ""
    size = int(side) if side.isdigit() else config.model.image_size
    config = dataclasses.replace(config, model=get_config(model or "ViT-B/16", image_size=size))
    return ChosenRecipe(model, config, OPEN.get(recipe, ()))


def _value_of(flag: str, words: Sequence[str]) -> str | None:
    """The value of `--flag VALUE` or `--flag=VALUE`."""
    for word, following in itertools.zip_longest(words, words[1:]):
        name, equals, value = word.partition("=")
        if name == flag:
            return value if equals else following
    return None


def _look_up(name: str, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if name not in table:
        raise UserError(f"unknown recipe {name!r}; {nearest(name, table)}. `vitlab list recipes` shows all.")
    return table[name]


def with_flags(kind: Any, config: TrainConfig) -> Any:
    """The dataclass `kind` of a command with a flag for each setting of `config`, whose values are the defaults.

    tyro takes the defaults of flags from the default of their field. So `config: TrainConfig` of the command becomes
    `config: <its unchecked subclass> = <the recipe's values>` in a subclass of the command.
    """
    flags = _unchecked(config)
    hint = Annotated[type(flags), tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]  # `--optim.lr`
    field = ("config", hint, dataclasses.field(default=flags))
    made = dataclasses.make_dataclass(kind.__name__, [field], bases=(kind,), frozen=True)
    made.__doc__ = kind.__doc__
    return made


def _unchecked(config: Any) -> Any:
    """`config` as an instance of a subclass that checks nothing (an empty `__post_init__`), and its sections likewise.

    tyro makes a config of the flags alone. It may be invalid until `resolve` resets what the flags make useless: with
    `--data.crop none` the recipe's `data.pad` has no effect, and `TrainConfig` refuses it.
    """
    kind = type(config)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if "fewshot" in values and values["fewshot"] is None:
        values["fewshot"] = FewShotConfig()  # it has flags, too
    sections = {name: _unchecked(value) for name, value in values.items() if dataclasses.is_dataclass(value)}
    fields = [(name, type(section), dataclasses.field(default=section)) for name, section in sections.items()]
    namespace = {"__post_init__": lambda _: None}
    unchecked = dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=True, namespace=namespace)
    return unchecked(**values | sections)


def _given_settings(command: Any, words: Sequence[str]) -> dict[str, Any]:
    """The settings of `command.config` whose flags are among the words: dotted name -> value."""
    flags = {word.partition("=")[0] for word in words if word.startswith("-")}
    given = {}
    for setting, value in changes(None, command.config):
        section, dot, name = setting.replace("_", "-").rpartition(".")
        is_negated = isinstance(value, bool) and f"--{section}{dot}no-{name}" in flags
        if is_negated or f"--{section}{dot}{name}" in flags:
            given[setting] = value
    return given


def advice_for(name: str, setting: str) -> str | None:
    """What to do instead of giving a setting that has no effect in a command; None if it has one."""
    rules = WITHOUT_EFFECT[name].items()
    return next((advice for start, advice in rules if setting.startswith(start) and setting != "model.dropout"), None)
