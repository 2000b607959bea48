"""The settings of a run on the command line: a recipe gives the defaults, flags change them."""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import tyro

from vitlab.config import FewShotConfig, FinetuneConfig, TrainConfig
from vitlab.errors import UserError
from vitlab.models.registry import get_config
from vitlab.recipes import FINETUNE, PRETRAIN
from vitlab.recipes.given import check_given, settle, with_dataset, without_replaced
from vitlab.settings import nearest
from vitlab.switches import REQUIRED_SWITCHES, has_effect

MODEL_OF_CHECKPOINT = {"--model.": "the checkpoint brings its own model; give --image-size or --model.dropout."}
TASK_DATA = ("--data.name", "--data.root", "--data.classes", "--data.train-split", "--data.eval-split")
WITHOUT_EFFECT = {
    "pretrain": {"--model.num-classes": "the data set decides."},
    "plan": {"--model.num-classes": "the data set decides."},
    "finetune": MODEL_OF_CHECKPOINT | {"--data.name": "give --dataset.", "--data.root": "give --root."},
    "vtab": MODEL_OF_CHECKPOINT | dict.fromkeys(TASK_DATA, "each task brings its own data; give --root and --tasks."),
}
"""Settings that something else decides: command -> how their flags begin -> the advice."""


class Arguments:
    """The words after a command's name. `flags` are the names of the flags, with hyphens."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = [_with_hyphens(word) for word in words]
        self.flags = {word.partition("=")[0] for word in self.words if word.startswith("-")}

    @property
    def given(self) -> set[str]:
        """The settings that the flags set: `optim.lr` of --optim.lr, `data.flip` of --data.no-flip."""
        return {re.sub(r"(^--|\.)(no-)?", r"\1", flag)[2:].replace("-", "_") for flag in self.flags}

    @property
    def recipe(self) -> str:
        """The first positional argument; `tiny-digits` where there is none yet, as for `--help`."""
        return self.words[0] if self.words and not self.words[0].startswith("-") else "tiny-digits"

    def value(self, flag: str) -> str | None:
        """The value of `--flag VALUE` or `--flag=VALUE`."""
        for word, following in itertools.zip_longest(self.words, self.words[1:]):
            name, equals, value = word.partition("=")
            if name == flag:
                return value if equals else following
        return None


def _as_flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def _with_hyphens(word: str) -> str:
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if word.startswith("--") else word


def with_recipe(name: str, kind: Any, arguments: Arguments) -> Any:
    """The dataclass of the command `name`; the default of its field `config`, if it has one, is the recipe's.

    Raises UserError for an unknown recipe.
    """
    if all(field.name != "config" for field in dataclasses.fields(kind)):
        return kind
    return with_default(kind, _apply_switches(_recipe_config(name, arguments), arguments))


def with_default(kind: Any, config: TrainConfig) -> Any:
    """The dataclass of a command with this default of its field `config`."""
    hint = Annotated[type(config), tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]  # `--optim.lr`
    field = dataclasses.field(default=config)
    made = dataclasses.make_dataclass(kind.__name__, [("config", hint, field)], bases=(kind,), frozen=True)
    made.__doc__ = kind.__doc__
    return made


def _recipe_config(name: str, arguments: Arguments) -> TrainConfig:
    if name == "vtab":
        return FINETUNE["vtab"]().single()
    recipe, model = arguments.recipe, arguments.value("--model")
    if name == "finetune" or "--finetune" in arguments.flags:
        recipe = (arguments.value("--recipe") or "staged") if name == "finetune" else recipe
        config = _recipe(recipe, FINETUNE)()
        if name == "plan":  # a new model in place of the checkpoint's
            side = arguments.value("--model.image-size") or ""
            size = int(side) if side.isdigit() else config.model.image_size
            config = dataclasses.replace(config, model=get_config(model or "ViT-B/16", image_size=size))
        return config
    return _recipe(recipe, PRETRAIN)(*([model] if model else []))


def _recipe(name: str, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if name not in table:
        raise UserError(f"unknown recipe {name!r}; {nearest(name, table)}. `vitlab list recipes` shows all.")
    return table[name]


def _apply_switches(config: TrainConfig, arguments: Arguments) -> TrainConfig:
    """Changes defaults of the recipe that do not go with a flag.

    A first --fewshot.* brings the other few-shot settings; a setting that has no effect with the given value of its
    switch, such as the recipe's `pad` with `--data.crop none`, returns to its own default.
    """
    config = without_replaced(config, arguments.given)
    if any(flag.startswith("--fewshot.") for flag in arguments.flags):
        config = dataclasses.replace(config, fewshot=FewShotConfig())
    for section, settings in REQUIRED_SWITCHES.items():
        part = getattr(config, section)
        defaults, switches = {}, {}
        for name, (switch, wanted) in settings.items():
            text = arguments.value(f"--{section}.{switch.replace('_', '-')}")
            with contextlib.suppress(ValueError):  # tyro reports an invalid value of the switch
                if text is not None and not has_effect(value := type(getattr(part, switch))(text), wanted):
                    defaults[name], switches[switch] = getattr(type(part), name), value
        for changes in (defaults, defaults | switches):  # crop_resize returns to None only with its switch
            with contextlib.suppress(ValueError):
                part = dataclasses.replace(part, **changes)
                break
        config = dataclasses.replace(config, **{section: part})
    return config


def advice_for(name: str, flag: str) -> str | None:
    """What to do instead of giving `flag` to a command in which it has no effect; None where it has one."""
    rules = WITHOUT_EFFECT[name].items()
    return next((advice for start, advice in rules if flag.startswith(start) and flag != "--model.dropout"), None)


def check_settings(name: str, command: Any, arguments: Arguments) -> Any:
    """The parsed `command`; what no flag sets is left to the data and the checkpoint.

    Raises UserError for flags that have no effect in this command.
    """
    if not hasattr(command, "config"):
        return command
    for flag in sorted(arguments.flags):
        if advice := advice_for(name, flag):
            raise UserError(f"{flag} has no effect here: {advice}")
    first = arguments.recipe, arguments.value("--model")
    if name in ("pretrain", "plan") and (command.recipe, command.model_name) != first:
        raise UserError(f"write the recipe first and --model once: `vitlab {name} {command.recipe} --...`.")
    config = command.config
    if isinstance(config, FinetuneConfig):
        check_given(arguments.given, "--budget" in arguments.flags, _as_flag)
        config = settle(config, arguments.given, _as_flag)
    if name == "finetune":
        config = dataclasses.replace(config, data=_data(command, arguments))
    return dataclasses.replace(command, config=config)


def _data(command: Any, arguments: Arguments) -> Any:
    """The data settings with --dataset and --root."""
    data = command.config.data
    if command.dataset is not None:
        data = with_dataset(data, command.dataset, arguments.given)
    return data if command.root is None else dataclasses.replace(data, root=command.root)
