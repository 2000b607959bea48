"""`--help`: all commands, or the usual flags of one, a sentence each; `--help-all`: every flag with its text."""

import ast
import dataclasses
import inspect
import itertools
import pathlib
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from vitlab.commands import PURPOSES, command_type
from vitlab.commands.settings import advice_for, has_field, read_recipe
from vitlab.config import FewShotConfig

USUAL = {
    *("learning_rates", "steps", "epochs", "batch_size", "runs", "mixup", "precision", "seed", "optim.lr"),
    *("data.name", "data.root", "data.train_split", "data.crop", "data.workers", "masking.target", "masking.share"),
}
"""The settings of a run that `--help` shows. A command's other flags are always shown."""
HIDDEN = {"model.kind", "model.stem", "model.body"}
"""What no flag can usefully set."""
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", pathlib.Path: "PATH"}
COLUMN = 28
"""Where the texts begin."""


class Flag(NamedTuple):
    """A line of the help."""

    name: str
    metavar: str
    text: str
    default: Any


def overview() -> str:
    """All commands by purpose, one line each."""
    width = _width()
    lines = ["usage: vitlab COMMAND [OPTIONS]", "", 'The Vision Transformer paper ("An Image is Worth 16x16 Words").']
    for purpose, names in PURPOSES.items():
        lines += ["", f"{purpose}:"]
        for name in names:
            text = textwrap.shorten(command_type(name).__doc__ or "", width - 14, placeholder=" ...")
            lines.append(f"  {name:10}  {text}")
    return "\n".join([*lines, "", "`vitlab COMMAND --help` shows a command's usual flags, --help-all every flag."])


def command_help(name: str, kind: Any, words: Sequence[str]) -> str:
    """The help of a command with the defaults of the recipe that `words` name."""
    every = "--help-all" in words
    flags = list(_command_flags(kind))
    positional = [flag for flag in flags if not flag.name.startswith("-")]
    groups = {"": positional, "options": [flag for flag in flags if flag.name.startswith("-")]}
    if has_field(kind, "config"):
        for flag in _settings_flags(name, words, every):
            section, dot, _ = flag.name[2:].partition(".")
            groups.setdefault(section if dot and every else "settings", []).append(flag)
    usage = " ".join([f"usage: vitlab {name}", *(flag.name for flag in positional), "[OPTIONS]"])
    blocks = [
        textwrap.fill(usage, _width(), subsequent_indent="    "),
        textwrap.fill(" ".join((kind.__doc__ or "").split()), _width()),
    ]
    for title, rows in groups.items():
        if rows:
            blocks.append("\n".join([*([f"{title}:"] if title else []), *(_row(flag, every) for flag in rows)]))
    if has_field(kind, "config") and not every:
        blocks.append(f"`vitlab {name} --help-all` shows every flag, with its whole text.")
    return "\n\n".join(blocks)


def _width() -> int:
    return max(60, min(shutil.get_terminal_size().columns, 120))


def _row(flag: Flag, every: bool) -> str:
    text = flag.text if every else flag.text.partition(". ")[0].rstrip(".") + "."
    if flag.default is not None and flag.default != "":
        text = f"{text.rstrip('.')} ({flag.default})."
    left = f"  {flag.name} {flag.metavar}".rstrip()
    lines = textwrap.wrap(text, _width() - COLUMN) or [""]
    if len(left) + 2 > COLUMN:
        return "\n".join([left, *(f"{'':{COLUMN}}{line}" for line in lines)])
    return "\n".join([f"{left:{COLUMN}}{lines[0]}", *(f"{'':{COLUMN}}{line}" for line in lines[1:])])


def _command_flags(kind: Any, prefix: str = "") -> Iterator[Flag]:
    """The arguments of a command, except the settings of its `config`. Those of a dataclass in it have its name as
    prefix, unless that is empty."""
    hints = typing.get_type_hints(kind, include_extras=True)
    texts = field_texts(kind)
    for field in dataclasses.fields(kind):
        hint, text = hints[field.name], texts.get(field.name, "")
        marks = getattr(hint, "__metadata__", ())
        if field.name == "config" or tyro.conf.Suppress in marks:
            continue
        name = f"--{prefix}{field.name.replace('_', '-')}"
        metavar = _metavar(hint)
        value = None if field.default is dataclasses.MISSING else field.default
        for mark in marks:
            text = getattr(mark, "help", None) or text
            name = f"--{prefix}{mark.name}" if getattr(mark, "name", None) else name
            metavar = getattr(mark, "metavar", None) or metavar
        inner = typing.get_args(hint)[0] if marks else hint
        if dataclasses.is_dataclass(inner):
            unnamed = any(getattr(mark, "name", None) == "" for mark in marks)
            yield from _command_flags(inner, "" if unnamed else f"{field.name}.")
        elif tyro.conf.Positional in marks:
            yield Flag(metavar, "", text, value)
        else:
            yield Flag(name, metavar, text, _shown(value))


def _settings_flags(name: str, words: Sequence[str], every: bool) -> Iterator[Flag]:
    """The flags of the settings of the recipe that `words` name."""
    words = [word for word in words if word not in ("-h", "--help", "--help-all")]
    chosen = read_recipe(name, words)

    def rows(part: Any, section: str) -> Iterator[Flag]:
        hints = typing.get_type_hints(type(part), include_extras=True)
        texts = field_texts(type(part))
        for field in dataclasses.fields(part):
            setting, value = section + field.name, getattr(part, field.name)
            value = FewShotConfig() if setting == "fewshot" and value is None else value
            if dataclasses.is_dataclass(value) and setting not in HIDDEN:
                yield from rows(value, f"{setting}.")
            elif value is None and any(map(dataclasses.is_dataclass, typing.get_args(hints[field.name]))):
                continue  # the recipe has no such section
            elif not advice_for(name, setting) and (setting in USUAL or (every and setting not in HIDDEN)):
                default = "chosen by the data" if setting in chosen.open_settings else _shown(value)
                flag = f"--{setting.replace('_', '-')}"
                yield Flag(flag, _metavar(hints[field.name]), texts.get(field.name, ""), default)

    return rows(chosen.config, "")


def _shown(value: Any) -> str | None:
    """A default as text; None for one that says nothing."""
    if value is None or value is False or value == () or callable(value):
        return None
    if isinstance(value, tuple):
        return "default: " + " ".join(map(str, value))
    return f"default: {'on, --no-... turns it off' if value is True else value}"


def _metavar(hint: Any) -> str:
    """What a flag takes, such as INT or {adam,sgd}; empty for a switch."""
    origin = typing.get_origin(hint)
    args = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if origin is Annotated:
        return _metavar(args[0])
    if origin in (typing.Union, types.UnionType):
        return "|".join(dict.fromkeys(_metavar(arg) or "{True,False}" for arg in args)).replace("}|{", ",")
    if origin is Literal:
        return "{" + ",".join(map(str, args)) + "}"
    if origin is tuple:
        metavars = len(args) == 2 and args[1] is not ... and [_metavar(arg) for arg in args]
        return " ".join(metavars) if metavars else f"{_metavar(args[0])} ..."
    return "" if hint is bool else METAVARS.get(hint, "TEXT")


def field_texts(kind: Any) -> dict[str, str]:
    """The docstrings of a dataclass's fields, on one line each."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if "__dataclass_fields__" in vars(base):
            body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(base)).body[0]).body
            for node, following in itertools.pairwise(body):
                if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
                    texts[ast.unparse(node.target)] = " ".join(ast.literal_eval(following.value).split())
    return texts
