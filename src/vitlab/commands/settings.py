"""The settings of a run on the command line: a recipe gives the defaults, flags change them."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vitlab.commands.study import Plan
from vitlab.commands.train import Finetune, FinetuneRunConfig, Pretrain, RunConfig, Vtab
from vitlab.config import COUNTS_WITH, FewShotConfig, FinetuneConfig, TrainConfig, counts_with
from vitlab.errors import UserError
from vitlab.models.registry import get_config
from vitlab.recipes import FINETUNE, PRETRAIN
from vitlab.settings import nearest, to_dict

AUTOMATIC = {
    "steps": {"--steps", "--epochs"},
    "warmup_steps": {"--optim.warmup-steps"},
    "mixup": {"--mixup"},
    "batch_size": {"--batch-size"},
    "sweep_steps": {"--sweep-steps"},
    "preprocessing": {"--data.eval-resize", "--data.eval-interpolation"},
    "image_size": {"--model.image-size"},
}
"""The flags that set what a recipe leaves to the data, the checkpoint and the device."""


RENAMED = {
    "--test-pictures": "--test-images",
    "--fewshot.test-pictures": "--fewshot.test-images",
    "--picture-kb": "--image-kb",
}
"""Flags of earlier versions that are still accepted."""


class Arguments:
    """The words after a command's name. `flags` are the names of the flags, with hyphens."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = [_with_hyphens(word) for word in words]
        self.flags = {word.partition("=")[0] for word in self.words if word.startswith("-")}

    @property
    def recipe(self) -> str:
        """The first positional argument; `tiny-digits` where there is none yet, as for `--help`."""
        return self.words[0] if self.words and not self.words[0].startswith("-") else "tiny-digits"

    def value(self, flag: str) -> str | None:
        """The value of `--flag VALUE` or `--flag=VALUE`."""
        for index, word in enumerate(self.words):
            name, equals, value = word.partition("=")
            if name == flag:
                return value if equals else next(iter(self.words[index + 1 :]), None)
        return None


def _with_hyphens(word: str) -> str:
    flag, equals, value = word.partition("=")
    name = flag.replace("_", "-")
    return RENAMED.get(name, name) + equals + value if word.startswith("--") else word


def default_config(kind: Any, arguments: Arguments) -> Any:
    """The command `kind`, its field `config` with the defaults of the recipe in `arguments`, if it has that field."""
    if kind is Pretrain:
        default = _pretrain_recipe(arguments)
    elif kind is Plan:
        default = _finetune_plan(arguments) if "--finetune" in arguments.flags else _pretrain_recipe(arguments)
    elif kind is Finetune:
        name = arguments.value("--recipe") or "own"
        if name == "vtab":
            raise UserError("the recipe vtab is for 19 tasks: `vitlab vtab CHECKPOINT --tasks ...` runs one or all.")
        default = _without_search(_recipe(name, FINETUNE)(), arguments)
    elif kind is Vtab:
        default = FINETUNE["vtab"]().single()
    else:
        return kind
    if default.masking is None and any(flag.startswith("--masking.") for flag in arguments.flags):
        masked = ", ".join(name for name, make in PRETRAIN.items() if make().masking)
        raise UserError(f"--masking.* has no effect in {arguments.recipe}, which learns classes; take one of {masked}.")
    hint = FinetuneRunConfig if isinstance(default, FinetuneConfig) else RunConfig
    field = dataclasses.field(default=_apply_switches(default, arguments))
    made = dataclasses.make_dataclass(kind.__name__, [("config", hint, field)], bases=(kind,), frozen=True)
    made.__doc__ = kind.__doc__
    return made


def resolve(command: Any, arguments: Arguments) -> Any:
    """The parsed `command`, checked against its recipe; what no flag sets is left to the data and the checkpoint.

    Raises UserError for flags that have no effect in this command.
    """
    if isinstance(command, (Pretrain, Plan)):
        return _resolve_recipe(command, arguments)
    if isinstance(command, Finetune):
        _refuse_model_settings(command.config, FINETUNE[command.recipe]())
        config = _automatic(command.config, arguments)
        return dataclasses.replace(command, config=dataclasses.replace(config, data=_data(command, arguments)))
    if isinstance(command, Vtab):
        default = FINETUNE["vtab"]().single()
        _refuse_model_settings(command.config, default)
        if command.config.model.image_size != default.model.image_size:
            raise UserError("--model.image-size has no effect here; give --image-size.")
        for name in ("name", "root", "train_split", "eval_split", "classes"):
            if getattr(command.config.data, name) != getattr(default.data, name):
                raise UserError(
                    f"--data.{name.replace('_', '-')} has no effect here: the tasks bring their own data. Set --root "
                    f"and --tasks."
                )
    return command


def _recipe(name: str, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if name not in table:
        raise UserError(f"unknown recipe {name!r}; {nearest(name, table)}. `vitlab list recipes` shows all.")
    return table[name]


def _pretrain_recipe(arguments: Arguments) -> TrainConfig:
    if arguments.recipe in FINETUNE and arguments.recipe not in PRETRAIN:
        raise UserError(f"{arguments.recipe} is a recipe of `vitlab finetune`, not of pre-training.")
    model_name = arguments.value("--model")
    return _recipe(arguments.recipe, PRETRAIN)(*([model_name] if model_name else []))


def _finetune_plan(arguments: Arguments) -> FinetuneConfig:
    """What `vitlab finetune` would run, with a fresh model in the checkpoint's place."""
    default = _without_search(_recipe(arguments.recipe, FINETUNE)(), arguments)
    side = arguments.value("--model.image-size") or ""
    size = int(side) if side.isdigit() else default.model.image_size
    return dataclasses.replace(default, model=get_config(arguments.value("--model") or "ViT-B/16", image_size=size))


def _without_search(default: FinetuneConfig, arguments: Arguments) -> FinetuneConfig:
    """Without the learning-rate search if --optim.lr gives the rate."""
    if "--optim.lr" not in arguments.flags:
        return default
    return dataclasses.replace(default, learning_rates=(), sweep_steps=None)


def _apply_switches(config: TrainConfig, arguments: Arguments) -> TrainConfig:
    """Changes defaults of the recipe that do not go with a flag.

    --steps takes the place of epochs and vice versa; a first --fewshot.* brings the other few-shot settings; a setting
    that has no effect with the given value of its switch, such as the recipe's `pad` with `--data.crop none`, returns
    to its own default.
    """
    if "--steps" in arguments.flags:
        config = dataclasses.replace(config, steps=1, epochs=None)
    if "--epochs" in arguments.flags:
        config = dataclasses.replace(config, steps=None, epochs=1.0)
    if any(flag.startswith("--fewshot.") for flag in arguments.flags):
        config = dataclasses.replace(config, fewshot=FewShotConfig())
    for section, settings in COUNTS_WITH.items():
        part = getattr(config, section)
        for name, (switch, wanted) in settings.items():
            value = arguments.value(f"--{section}.{switch.replace('_', '-')}")
            with contextlib.suppress(ValueError):  # tyro reports an invalid value of the switch
                if value is not None and not counts_with(type(getattr(part, switch))(value), wanted):
                    part = dataclasses.replace(part, **{name: getattr(type(part), name)})
        config = dataclasses.replace(config, **{section: part})
    return config


def _resolve_recipe(command: Pretrain | Plan, arguments: Arguments) -> Pretrain | Plan:
    model_name, name = arguments.value("--model"), type(command).__name__.lower()
    if (command.recipe, command.model_name) != (arguments.recipe, model_name):
        raise UserError(f"write the recipe first and --model once: `vitlab {name} {command.recipe} --...`.")
    finetune = isinstance(command.config, FinetuneConfig)
    default = _finetune_plan(arguments) if finetune else _pretrain_recipe(arguments)
    if command.config.model.num_classes != default.model.num_classes:
        raise UserError("--model.num-classes has no effect here: the data set decides. Leave it out.")
    if isinstance(command, Pretrain):
        return command
    if isinstance(command.config, FinetuneConfig):
        command = dataclasses.replace(command, config=_automatic(command.config, arguments))
    if _model_changes(command.config, default):
        return dataclasses.replace(command, model_name=None)
    first = inspect.signature(PRETRAIN[command.recipe]).parameters["model"].default if not finetune else "ViT-B/16"
    return dataclasses.replace(command, model_name=model_name or first)


def _automatic(config: FinetuneConfig, arguments: Arguments) -> FinetuneConfig:
    """`config.automatic` without what a flag sets. Raises UserError for flags of a search without one."""
    flags, rates = arguments.flags, config.learning_rates
    if {"--optim.lr", "--learning-rates"} <= flags:
        raise UserError("--optim.lr is one learning rate and --learning-rates are those to search; give one of them.")
    if "--held-out" in flags and len(rates) < 2:
        raise UserError("--held-out has no effect with one learning rate; give several, --learning-rates 0.003 0.01.")
    if rates and config.optim.lr not in rates:  # the recipe's rate
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=rates[0]))
    return dataclasses.replace(
        config, automatic=tuple(name for name in config.automatic if not AUTOMATIC[name] & flags)
    )


def _data(command: Finetune, arguments: Arguments) -> Any:
    """The data settings of `command` with --dataset and --root. Unreadable files of a folder are skipped."""
    data = command.config.data
    for short, long in (("--dataset", "--data.name"), ("--root", "--data.root")):
        if {short, long} <= arguments.flags:
            raise UserError(f"{short} and {long} are the same setting; give one of them.")
    if command.dataset is not None:
        skip = command.dataset.startswith("folder:") and "--data.on-error" not in arguments.flags
        data = dataclasses.replace(data, name=command.dataset, on_error="skip" if skip else data.on_error)
    return data if command.root is None else dataclasses.replace(data, root=command.root)


def _model_changes(config: TrainConfig, default: TrainConfig) -> list[str]:
    """Names of model settings other than the image size and dropout that differ from the default."""
    model, expected = to_dict(config.model), to_dict(default.model)
    return [name for name in expected if model[name] != expected[name] and name not in ("image_size", "dropout")]


def _refuse_model_settings(config: TrainConfig, default: TrainConfig) -> None:
    if changes := _model_changes(config, default):
        raise UserError(
            f"--model.{changes[0].replace('_', '-')} has no effect here: the checkpoint brings its own model. Only "
            f"--image-size and --model.dropout can be set."
        )
