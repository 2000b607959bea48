"""`--help`: all commands, or the usual flags of one; `--help-all`: every flag. tyro writes the text."""

import dataclasses
import shutil
import textwrap
import typing
from collections.abc import Callable
from typing import Annotated, Any

import tyro

from vitlab.commands import PURPOSES, command_type
from vitlab.commands.settings import advice_for, with_default
from vitlab.config import FewShotConfig
from vitlab.recipes.given import AUTOMATIC

USUAL = {
    *("learning_rates", "steps", "epochs", "batch_size", "microbatch", "runs", "sweep_steps", "held_out", "mixup"),
    *("precision", "compile", "seed", "eval_every", "checkpoint_every", "data.name", "data.root", "data.train_split"),
    *("data.eval_split", "data.crop", "data.eval_resize", "data.workers", "data.on_error", "data.exclude", "optim.lr"),
    *("optim.name", "optim.weight_decay", "optim.warmup_steps", "masking.target", "masking.share"),
}
"""The settings of a run that `--help` shows. A command's other flags are always shown."""
HIDDEN = {"model.kind", "model.stem", "model.body"}
"""What no flag can usefully set."""


def overview() -> str:
    """All commands by purpose, one line each."""
    width = max(60, min(shutil.get_terminal_size().columns, 120))
    lines = ["usage: vitlab COMMAND [OPTIONS]", "", 'The Vision Transformer paper ("An Image is Worth 16x16 Words").']
    for purpose, names in PURPOSES.items():
        lines += ["", f"{purpose}:"]
        for name in names:
            text = textwrap.shorten(command_type(name).__doc__ or "", width - 14, placeholder=" ...")
            lines.append(f"  {name:10}  {text}")
    return "\n".join([*lines, "", "`vitlab COMMAND --help` shows a command's usual flags, --help-all every flag."])


def print_help(name: str, kind: Any, show_all: bool) -> None:
    """Prints the help of a command and exits with 0."""
    description = kind.__doc__

    def is_visible(setting: str) -> bool:
        without_effect = advice_for(name, f"--{setting.replace('_', '-')}")
        return not without_effect and (setting in USUAL or (show_all and setting not in HIDDEN))

    if hasattr(kind, "config"):
        left = set(getattr(kind.config, "automatic", ())) - {"learning_rates"}  # the rate itself is not automatic
        automatic = {name for key in left for name in AUTOMATIC[key]}
        kind = with_default(kind, _for_help(kind.config, is_visible, automatic))
        description = f"{description}{'' if show_all else ' --help-all shows every flag.'}"
    tyro.cli(kind, args=["--help"], prog=f"vitlab {name}", description=description)


def _for_help(config: Any, is_visible: Callable[[str], bool], automatic: set[str], section: str = "") -> Any:
    """`config` as an instance of a subclass in which settings that help leaves out are suppressed, and `automatic` ones
    have no default."""
    hints, fields, values = typing.get_type_hints(type(config), include_extras=True), [], {}
    for name in (item.name for item in dataclasses.fields(config)):  # hints has class variables, too
        value, hint = getattr(config, name), hints[name]
        if name == "fewshot" and value is None:
            value = FewShotConfig()  # as a first flag --fewshot.* makes it
        if dataclasses.is_dataclass(value) and section + name not in HIDDEN:
            value = _for_help(value, is_visible, automatic, f"{section}{name}.")
            fields.append((name, type(value), dataclasses.field(default=value)))
        elif not is_visible(section + name):
            fields.append((name, Annotated[hint, tyro.conf.Suppress], dataclasses.field(default=value)))
        elif section + name in automatic:
            marked = Annotated[hint, tyro.conf.arg(help_behavior_hint="(default: automatic)")]
            fields.append((name, marked, dataclasses.field(default=value)))
        values[name] = value
    kind = type(config)
    return dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=True)(**values)
