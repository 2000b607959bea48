"""The command line: from words to one of the commands, and from errors to exit codes."""

import contextlib
import dataclasses
import inspect
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import tyro

from vitlab.commands import COMMANDS, Command, Finetune, FinetuneRunConfig, Plan, Pretrain, RunConfig, Vtab
from vitlab.commands.help import command_help, overview
from vitlab.config import COUNTS_WITH, DataConfig, FewShotConfig, FinetuneConfig, TrainConfig, counts_with
from vitlab.errors import UserError, printable
from vitlab.models.registry import get_config
from vitlab.recipes import FINETUNE, PRETRAIN
from vitlab.settings import nearest, to_dict

SEVERAL = ("pretrain", "finetune", "vtab", "evaluate", "fewshot", "probe")
"""The commands that several processes of torchrun do together."""
HELP = {"-h", "--help", "--help-all"}
AUTOMATIC = {
    "steps": {"--steps", "--epochs"},
    "warmup_steps": {"--optim.warmup-steps"},
    "mixup": {"--mixup"},
    "batch_size": {"--batch-size"},
    "sweep_steps": {"--sweep-steps"},
    "preprocessing": {"--data.eval-resize", "--data.eval-interpolation"},
    "image_size": {"--model.image-size"},
}
"""The flags by which a user sets what a recipe leaves to the data."""
NO_COMPILER = re.compile(r"No working C\+\+ compiler|Failed to find C(\+\+)? compiler")
"""What torch.compile and Triton say without one."""


def parse(argv: Sequence[str]) -> Command:
    """The command in `argv`. Raises ValueError for a setting out of range, SystemExit(2) for words it does not know.

    Only the command that is asked for is built, so that an error speaks of nothing else.
    """
    if not argv or argv[0] not in COMMANDS:
        _overview(argv)
    name, *words = argv
    arguments = [_with_hyphens(word) for word in words]
    processes = os.environ.get("WORLD_SIZE") or "1"
    if processes != "1" and name not in SEVERAL:
        raise UserError(
            f"torchrun has started {processes} processes, and `vitlab {name}` is done by one; start it without "
            f"torchrun. What several do together: {', '.join(SEVERAL)}."
        )
    if name == "pretrain":
        return _parse_pretrain(arguments)
    if name == "finetune":
        return _parse_finetune(arguments)
    if name == "vtab":
        return _parse_vtab(arguments)
    if name == "plan":
        return _parse_plan(arguments)
    return _parse_as(COMMANDS[name], name, arguments)


def _overview(argv: Sequence[str]) -> NoReturn:
    """All commands with their purpose, for `--help`; for anything else what is wrong with it."""
    if HELP & set(argv[:1]):
        print(overview(COMMANDS))
        raise SystemExit(0)
    if not argv:
        print(overview(COMMANDS), file=sys.stderr)
        raise SystemExit(2)
    if argv[0].startswith("-"):
        raise UserError(f"{argv[0]} stands before the command; give a command first, one of {', '.join(COMMANDS)}.")
    raise UserError(f"unknown command {argv[0]!r}; {nearest(argv[0], COMMANDS)}. `vitlab --help` lists all.")


def _parse_as(kind: type[Command], name: str, arguments: Sequence[str]) -> Any:
    if asked := HELP & set(arguments):
        print(command_help(kind, name, every="--help-all" in asked))
        raise SystemExit(0)
    return tyro.cli(kind, args=arguments, prog=f"vitlab {name}", description=kind.__doc__)


def _parse_pretrain(arguments: Sequence[str]) -> Pretrain:
    """The recipe comes first, for its values are the defaults of all further settings."""
    recipe, name = _first(arguments), _value(arguments, "--model")
    return _parse_by(Pretrain, _recipe(recipe, PRETRAIN)(*([name] if name else [])), recipe, arguments)


def _parse_plan(arguments: Sequence[str]) -> Plan:
    """As `pretrain`; or what `finetune` would run, with a fresh model in the checkpoint's place."""
    recipe, name, given = _first(arguments), _value(arguments, "--model"), _given(arguments)
    if "--finetune" in given:
        default = _without_search(_recipe(recipe, FINETUNE)(), given)
        name, side = name or "ViT-B/16", _value(arguments, "--model.image-size") or ""
        size = int(side) if side.isdigit() else default.model.image_size
        default = dataclasses.replace(default, model=get_config(name, image_size=size))
    else:
        if recipe in FINETUNE and recipe not in PRETRAIN:
            raise UserError(f"{recipe} is a recipe of `vitlab finetune`; add --finetune.")
        make = _recipe(recipe, PRETRAIN)
        name = name or inspect.signature(make).parameters["model"].default
        default = make(*([name] if name else []))
    command = _parse_by(Plan, default, recipe, arguments)
    if isinstance(command.config, FinetuneConfig):
        command = dataclasses.replace(command, config=_decided(command.config, given))
    told, ours = to_dict(command.config.model), to_dict(default.model)
    changed = {key for key in ours if told[key] != ours[key]} - {"image_size", "dropout"}
    return dataclasses.replace(command, model_name=None if changed else name)


def _first(arguments: Sequence[str]) -> str:
    """The recipe; where none stands in front, one by which the rest can be read."""
    return arguments[0] if arguments and not arguments[0].startswith("-") else "tiny-digits"


def _parse_by(kind: type[Any], default: TrainConfig, recipe: str, arguments: Sequence[str]) -> Any:
    """A command that goes by a recipe, whose settings are `default` where nothing else is said."""
    if default.masking is None and any(word.startswith("--masking.") for word in arguments):
        able = ", ".join(name for name, make in PRETRAIN.items() if make().masking)
        raise UserError(f"--masking.* has no effect in {recipe}, which learns classes; take one of {able}.")
    called = kind.__name__.lower()
    command = _parse_as(_with_default(kind, default, arguments), called, arguments)
    if (command.recipe, command.model_name) != (recipe, _value(arguments, "--model")):
        raise UserError(f"write the recipe first and --model once: `vitlab {called} {command.recipe} --...`.")
    if command.config.model.num_classes != default.model.num_classes:
        raise UserError("--model.num-classes has no effect here: the data set's classes decide. Leave it out.")
    return command


def _parse_finetune(arguments: Sequence[str]) -> Finetune:
    recipe = _value(arguments, "--recipe") or "own"
    if recipe == "vtab":
        raise UserError("the recipe vtab is that of 19 tasks: `vitlab vtab CHECKPOINT --tasks ...` runs one or all.")
    given = _given(arguments)
    default = _without_search(_recipe(recipe, FINETUNE)(), given)
    command = _parse_as(_with_default(Finetune, default, arguments), "finetune", arguments)
    _refuse_model(command.config, default)
    config = _decided(command.config, given)
    return dataclasses.replace(command, config=dataclasses.replace(config, data=_data(command, given)))


def _with_hyphens(word: str) -> str:
    """A flag as it is called, where it is spelt with underscores."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if word.startswith("--") else word


def _given(arguments: Sequence[str]) -> set[str]:
    """The flags among the words."""
    return {word.partition("=")[0] for word in arguments}


def _without_search(default: FinetuneConfig, given: set[str]) -> FinetuneConfig:
    """The recipe, less its search where --optim.lr says which rate it is."""
    return dataclasses.replace(default, learning_rates=(), sweep_steps=None) if "--optim.lr" in given else default


def _decided(config: FinetuneConfig, given: set[str]) -> FinetuneConfig:
    """`config`, where only what no flag says is left to the data; ValueError for flags of a search without one."""
    if {"--optim.lr", "--learning-rates"} <= given:
        raise UserError("--optim.lr is one learning rate and --learning-rates are those to try; give one of the two.")
    if "--held-out" in given and len(config.learning_rates) < 2:
        raise UserError(
            "--held-out has no effect with one learning rate; add rates to try, --learning-rates 0.003 0.01."
        )
    rates = config.learning_rates
    if rates and config.optim.lr not in rates:  # the recipe's, which is not among those that are asked for
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=rates[0]))
    automatic = tuple(name for name in config.automatic if not AUTOMATIC[name] & given)
    return dataclasses.replace(config, automatic=automatic)


def _data(command: Finetune, given: set[str]) -> DataConfig:
    """The data of `command`, with what --dataset and --root say."""
    data = command.config.data
    for short, long in (("--dataset", "--data.name"), ("--root", "--data.root")):
        if {short, long} <= given:
            raise UserError(f"{short} and {long} say the same; give one of the two.")
    if command.dataset is not None:
        skips = command.dataset.startswith("folder:") and "--data.on-error" not in given
        data = dataclasses.replace(data, name=command.dataset, on_error="skip" if skips else data.on_error)
    return data if command.root is None else dataclasses.replace(data, root=command.root)


def _refuse_model(config: TrainConfig, default: TrainConfig) -> None:
    """Says so where settings of a model are given, and a checkpoint brings its own."""
    told, ours = to_dict(config.model), to_dict(default.model)
    if idle := [name for name in ours if told[name] != ours[name] and name not in ("image_size", "dropout")]:
        raise UserError(
            f"--model.{idle[0].replace('_', '-')} has no effect here: the checkpoint brings its own model. What can be "
            f"set is --image-size and --model.dropout."
        )


def _parse_vtab(arguments: Sequence[str]) -> Vtab:
    default = FINETUNE["vtab"]().single()
    command = _parse_as(_with_default(Vtab, default, arguments), "vtab", arguments)
    _refuse_model(command.config, default)
    if command.config.model.image_size != default.model.image_size:
        raise UserError("--model.image-size has no effect here; give --image-size.")
    for name in ("name", "root", "train_split", "eval_split", "classes"):
        if getattr(command.config.data, name) != getattr(default.data, name):
            raise UserError(
                f"--data.{name.replace('_', '-')} has no effect here: the tasks bring their own data. What can be set "
                f"is --root and --tasks."
            )
    return command


def _with_default(kind: type[Command], config: TrainConfig, arguments: Sequence[str]) -> type[Command]:
    """`kind` with `config` as the default of its field, under the same name and documentation."""
    given = _given(arguments)
    if "--steps" in given:
        config = dataclasses.replace(config, steps=1, epochs=None)
    if "--epochs" in given:
        config = dataclasses.replace(config, steps=None, epochs=1.0)
    if any(word.startswith("--fewshot.") for word in given):
        config = dataclasses.replace(config, fewshot=FewShotConfig())
    field = dataclasses.field(default=_switched(config, arguments))
    hint = FinetuneRunConfig if isinstance(config, FinetuneConfig) else RunConfig
    made = dataclasses.make_dataclass(kind.__name__, [("config", hint, field)], bases=(kind,), frozen=True)
    made.__doc__ = kind.__doc__
    return made


def _switched(config: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """`config` with the defaults of those settings that a given switch leaves without effect, such as a recipe's `pad`
    after `--data.crop none`."""
    for section, settings in COUNTS_WITH.items():
        part = getattr(config, section)
        for name, (switch, wanted) in settings.items():
            given = _value(arguments, f"--{section}.{switch.replace('_', '-')}")
            with contextlib.suppress(ValueError):  # tyro says what a switch can be
                if given is not None and not counts_with(type(getattr(part, switch))(given), wanted):
                    part = dataclasses.replace(part, **{name: getattr(type(part), name)})
        config = dataclasses.replace(config, **{section: part})
    return config


def _recipe(name: str, table: dict[str, Any]) -> Any:
    if name not in table:
        raise UserError(f"unknown recipe {name!r}; {nearest(name, table)}. `vitlab list recipes` shows all.")
    return table[name]


def _value(arguments: Sequence[str], flag: str) -> str | None:
    """What follows `flag`, or its `flag=value`."""
    for place, word in enumerate(arguments):
        if word == flag and place + 1 < len(arguments):
            return arguments[place + 1]
        if word.startswith(flag + "="):
            return word.partition("=")[2]
    return None


def main(argv: Sequence[str] | None = None) -> None:
    """The `vitlab` program.

    Exit codes: 0 done, 1 in part or not at all, 2 bad input, 130 interrupted, 143 stopped and saved.
    """
    # Before torch is loaded: threads that spin for long while they wait bring a training to a crawl beside other work,
    # and threads that do not spin at all halve the speed of small models. (GNU's OpenMP, which torch uses on Linux.)
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Or our line on why a job has ended would drown in what torch's sockets have to say about it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # names of files may hold bytes that are no text
    if logging.lastResort:
        logging.lastResort.setFormatter(_Printable())
    command = None
    try:
        command = parse(sys.argv[1:] if argv is None else argv)
        code = command.run()
    except BrokenPipeError:
        sys.stderr.close()  # the reader has enough (`| head`)
        code = 0
    except (UserError, OSError) as error:
        if os.environ.get("VITLAB_DEBUG"):
            traceback.print_exc()
        print(f"vitlab: {printable(str(error))}", file=sys.stderr)
        code = 2
    except RuntimeError as error:
        code = _failure(error, command)
    except KeyboardInterrupt:
        print("vitlab: interrupted.", file=sys.stderr)
        code = 130
    raise SystemExit(code)


class _Printable(logging.Formatter):
    """Warnings without control characters, whatever the names in them hold."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _failure(error: RuntimeError, command: Command | None) -> int:
    import torch

    from vitlab.studies.engine import StudyError
    from vitlab.train.distributed import RankError
    from vitlab.train.loop import NonFiniteError, StoppedError
    from vitlab.weights import ParityError

    if isinstance(error, torch.OutOfMemoryError):
        print(f"vitlab: the device's memory is full.{_smaller(command)} ({error})", file=sys.stderr)
        return 1
    if NO_COMPILER.search(str(error)):
        print(
            "vitlab: torch.compile needs a C++ compiler (g++), and there is none: install one, or leave --compile out.",
            file=sys.stderr,
        )
        return 2
    if not isinstance(error, (StoppedError, NonFiniteError, ParityError, RankError, StudyError)):
        raise error
    if isinstance(error, RankError) or os.environ.get("RANK", "0") == "0":  # else the first process says the same
        print(f"vitlab: {error}", file=sys.stderr)
    return 143 if isinstance(error, StoppedError) else 1


def _smaller(command: Command | None) -> str:
    """What to give for less memory, by the names that the flags of this command have."""
    names = ["batch", "batch_size", "image_size"]
    if config := getattr(command, "config", None):
        names = ["microbatch", "image_size" if hasattr(command, "image_size") else "model.image_size"]
    flags = [f"--{name.replace('_', '-')}" for name in names if config or hasattr(command, name)]
    return f" Give a smaller {' or '.join(flags)}." if flags else ""
