"""`--help`: all commands, or the usual flags of one; `--help-all`: every flag. tyro writes the text."""

import ast
import dataclasses
import inspect
import shutil
import textwrap
import typing
from collections.abc import Callable
from typing import Annotated, Any

import tyro

from vitlab.commands import PURPOSES, command_type
from vitlab.config import FewShotConfig, TrainConfig

USUAL = {
    *("learning_rates", "steps", "epochs", "batch_size", "microbatch", "runs", "sweep_steps", "held_out", "mixup"),
    *("precision", "compile", "seed", "eval_every", "checkpoint_every", "data.name", "data.root", "data.train_split"),
    *("data.eval_split", "data.crop", "data.eval_resize", "data.workers", "data.on_error", "data.exclude", "optim.lr"),
    *("optim.name", "optim.weight_decay", "optim.warmup_steps", "masking.target", "masking.share"),
}
"""The settings of a run that `--help` shows. A command's other flags are always shown."""
HIDDEN = {"model.kind", "model.stem", "model.body"}
"""What no flag can usefully set."""
_ARG: Any = type(tyro.conf.arg())  # what `tyro.conf.arg` leaves in a type hint


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


def print_help(kind: type, name: str, show_all: bool) -> None:
    """Prints the help of one command and exits with 0."""
    fields = {field.name for field in dataclasses.fields(kind)}

    def is_visible(setting: str) -> bool:
        if "checkpoint" in fields and setting.startswith("model."):  # the checkpoint brings its model
            return show_all and setting == "model.dropout"
        return setting in USUAL or (show_all and setting not in HIDDEN)

    more = " --help-all shows every flag." if "config" in fields and not show_all else ""
    tyro.cli(
        _for_help(kind, None, is_visible), args=["--help"], prog=f"vitlab {name}", description=f"{kind.__doc__}{more}"
    )


def _for_help(kind: type, default: Any, is_visible: Callable[[str], bool], prefix: str | None = None) -> type:
    """`kind` with its texts, the defaults of the instance `default`, and without the settings that help leaves out.

    prefix: the section of the run's settings, such as `optim.`; None for the command's own arguments.
    """
    hints, texts, rows = typing.get_type_hints(kind, include_extras=True), _texts(kind), []
    for field in dataclasses.fields(kind):
        hint, marks = hints[field.name], []
        if typing.get_origin(hint) is Annotated:
            hint, *marks = typing.get_args(hint)
        arg: Any = next((mark for mark in marks if isinstance(mark, _ARG)), tyro.conf.arg())
        marks = [mark for mark in marks if mark is not arg]
        value = field.default if default is None else getattr(default, field.name)
        if field.name == "fewshot" and value is None:
            value = FewShotConfig()  # as a first flag --fewshot.* makes it
        setting = None if prefix is None else f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value) and setting not in HIDDEN:
            section = "" if isinstance(value, TrainConfig) else setting and f"{setting}."
            hint = _for_help(type(value), value, is_visible, section)
            value = hint(**{item.name: item.default for item in dataclasses.fields(hint)})
        elif setting is not None and not is_visible(setting):
            marks.append(tyro.conf.Suppress)
        marks.append(dataclasses.replace(arg, help=arg.help or texts.get(field.name)))
        rows.append((field.name, Annotated[(hint, *marks)], dataclasses.field(default=value)))
    return dataclasses.make_dataclass(kind.__name__, rows, frozen=True)


def _texts(kind: type) -> dict[str, str]:
    """The docstrings under the fields of a dataclass and of its base classes, by field."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base is object or not dataclasses.is_dataclass(base) or base.__module__ == "types":  # made at run time
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                texts[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return texts
