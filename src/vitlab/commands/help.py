"""`--help`: all commands, or the usual flags of one, a sentence each; `--help-all`: every flag with its text.

`cli.parse` calls `overview` and `command_help`. tyro's own help would always show every setting.
"""

import ast
import dataclasses
import inspect
import itertools
import pathlib
import re
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
    *("learning_rates", "steps", "epochs", "batch_size", "runs", "balance", "precision", "seed", "optim.lr"),
    *("data.name", "data.root", "data.train_split", "data.crop", "data.workers", "masking.target", "masking.share"),
}
"""The settings of a run that `--help` shows. A command's other flags are always shown."""
EXAMPLES = {
    "demo": "vitlab demo",
    "pretrain": "vitlab pretrain tiny-digits --epochs 20",
    "finetune": "vitlab finetune --dataset folder:flowers --budget 10m",
    "study": "vitlab study positions --dry-run",
    "evaluate": "vitlab evaluate runs/flowers --split test",
    "fewshot": "vitlab fewshot CHECKPOINT --dataset folder:flowers --shots 1 5",
    "probe": "vitlab probe CHECKPOINT --dataset folder:flowers",
    "features": "vitlab features CHECKPOINT --dataset folder:flowers --out flowers.npz",
    "vtab": "vitlab vtab CHECKPOINT --root data/vtab --tasks pets",
    "predict": "vitlab predict runs/flowers new-images/",
    "inspect": "vitlab inspect runs/flowers photo.jpg",
    "paper": "vitlab paper fig7",
    "duplicates": "vitlab duplicates folder:web folder:flowers",
    "convert": "vitlab convert runs/flowers flowers-hf --to huggingface",
    "export": "vitlab export runs/flowers --to onnx --out flowers.onnx",
    "shard": "vitlab shard folder:flowers flowers-256 --size 256",
    "app": "vitlab app runs/flowers",
    "list": 'vitlab list models "ViT-B*"',
    "plan": "vitlab plan jft --model ViT-L/16 --device h100 --count 256",
    "bench": "vitlab bench ViT-S/16 --sizes 224 --batch 8",
    "doctor": "vitlab doctor",
}
HIDDEN = {"model.kind", "model.stem", "model.body"}
"""Settings that the model's name decides: their flags are never shown."""
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", pathlib.Path: "PATH"}
COLUMN = 28
"""The column in which texts begin."""


class Flag(NamedTuple):
    """A line of the help."""

    name: str
    """`--optim.lr`; of a positional argument its metavar."""
    metavar: str
    """The values that it takes, as `_metavar` returns them; empty for a positional argument."""
    text: str
    default: str | None
    """In words, as `_format_default` returns them."""
    usage: str = ""
    """Of a positional argument: its metavar, in brackets if it may be left out."""


def overview() -> str:
    """All commands by purpose, one line each."""
    width = _width()
    lines = ["usage: vitlab COMMAND [OPTIONS]", "", 'The Vision Transformer paper ("An Image is Worth 16x16 Words").']
    for purpose, names in PURPOSES.items():
        lines += ["", f"{purpose}:"]
        for name in names:
            clause = re.split(r"[:;] |\. (?=[A-Z])|\.$", " ".join((command_type(name).__doc__ or "").split()))[0]
            lines += textwrap.wrap(clause, width, initial_indent=f"  {name:10}  ", subsequent_indent=" " * 14)
    return "\n".join([*lines, "", "`vitlab COMMAND --help` shows a command's usual flags, --help-all every flag."])


def command_help(name: str, kind: Any, words: Sequence[str]) -> str:
    """The help of a command with the defaults of the recipe that `words` name."""
    show_all = "--help-all" in words
    flags = list(_command_flags(kind))
    positional = [flag for flag in flags if not flag.name.startswith("-")]
    groups = {"": positional, "options": [flag for flag in flags if flag.name.startswith("-")]}
    if has_field(kind, "config"):
        for flag in _settings_flags(name, words, show_all):
            section, dot, _ = flag.name[2:].partition(".")
            groups.setdefault(section if dot and show_all else "settings", []).append(flag)
    usage = " ".join([f"usage: vitlab {name}", *(flag.usage for flag in positional), "[OPTIONS]"])
    blocks = [
        textwrap.fill(usage, _width(), subsequent_indent="    "),
        textwrap.fill(" ".join((kind.__doc__ or "").split()), _width()),
        f"example: {EXAMPLES[name]}",
    ]
    for title, rows in groups.items():
        if rows:
            blocks.append("\n".join([*([f"{title}:"] if title else []), *(_row(flag, show_all) for flag in rows)]))
    if not show_all and (has_field(kind, "config") or any(_first_sentence(flag) != flag.text for flag in flags)):
        blocks.append(f"`vitlab {name} --help-all` shows every flag, with its whole text.")
    return "\n\n".join(blocks)


def _width() -> int:
    return max(60, min(shutil.get_terminal_size().columns, 120))


def _first_sentence(flag: Flag) -> str:
    """What `--help` shows of a flag's text; of a positional argument's all."""
    return re.split(r"(?<=\.) (?=[A-Z`])", flag.text)[0] if flag.name.startswith("-") else flag.text


def _row(flag: Flag, whole_text: bool) -> str:
    text = flag.text if whole_text else _first_sentence(flag)
    if flag.default is not None:
        text = f"{text.rstrip('.')} ({flag.default})."
    left = f"  {flag.name} {flag.metavar}".rstrip()
    lines = textwrap.wrap(text, _width() - COLUMN) or [""]
    if len(left) + 2 > COLUMN:
        lines.insert(0, "")
    first, *rest = lines
    return "\n".join([f"{left:{COLUMN}}{first}".rstrip(), *(f"{'':{COLUMN}}{line}" for line in rest)])


def _command_flags(kind: Any, prefix: str = "", defaults: Any = None) -> Iterator[Flag]:
    """The arguments of a command but `config`, with the values of the instance `defaults`, if there is one.

    A field that is a dataclass stands for its own fields: `--assume.pool`, or `--pool` where tyro's name of the field
    is empty.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    texts = field_texts(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        marks = getattr(hint, "__metadata__", ())  # of Annotated
        if field.name == "config" or tyro.conf.Suppress in marks:
            continue
        bare_type = typing.get_args(hint)[0] if marks else hint
        arg: Any = next((mark for mark in marks if hasattr(mark, "metavar")), tyro.conf.arg())
        text = arg.help or texts.get(field.name, "")
        metavar = arg.metavar or _metavar(hint)
        default = field.default if defaults is None else getattr(defaults, field.name)
        required = default is dataclasses.MISSING
        shown = None if required else _format_default(default)
        if dataclasses.is_dataclass(bare_type):
            values = default if dataclasses.is_dataclass(default) else None
            yield from _command_flags(bare_type, "" if arg.name == "" else f"{field.name}.", values)
        elif tyro.conf.Positional in marks:
            yield Flag(metavar, "", text, shown, metavar if required else f"[{metavar}]")
        else:
            yield Flag(f"--{prefix}{arg.name or field.name.replace('_', '-')}", metavar, text, shown)


def _settings_flags(name: str, words: Sequence[str], show_all: bool) -> Iterator[Flag]:
    """The flags of the settings of the recipe that `words` name: those in USUAL, or with `show_all` all that work."""
    words = [word for word in words if word not in ("-h", "--help", "--help-all")]
    chosen = read_recipe(name, words)

    def flags_of(config: Any, prefix: str) -> Iterator[Flag]:
        hints = typing.get_type_hints(type(config), include_extras=True)
        texts = field_texts(type(config))
        for field in dataclasses.fields(config):
            setting = prefix + field.name
            value = getattr(config, field.name)
            if setting == "fewshot" and value is None:
                value = FewShotConfig()
            if dataclasses.is_dataclass(value) and setting not in HIDDEN:
                yield from flags_of(value, f"{setting}.")
            elif value is None and any(map(dataclasses.is_dataclass, typing.get_args(hints[field.name]))):
                continue  # the recipe has no such section
            elif not advice_for(name, setting) and (setting in USUAL or (show_all and setting not in HIDDEN)):
                default = "chosen by the data" if setting in chosen.open_settings else _format_default(value)
                flag = f"--{setting.replace('_', '-')}"
                yield Flag(flag, _metavar(hints[field.name]), texts.get(field.name, ""), default)

    return flags_of(chosen.config, "")


def _format_default(value: Any) -> str | None:
    """A default as text; None for one that need not be shown."""
    if value is None or value is False or value in ((), "") or callable(value):
        return None
    if isinstance(value, tuple):
        return "default: " + " ".join(map(str, value))
    return f"default: {'on, --no-... turns it off' if value is True else value}"


def _metavar(hint: Any) -> str:
    """The values that a flag takes, such as INT or {adam,sgd}; empty for a switch."""
    origin = typing.get_origin(hint)
    args = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if origin is Annotated:
        return _metavar(args[0])
    if origin in (typing.Union, types.UnionType):
        return "|".join(dict.fromkeys(_metavar(arg) or "{True,False}" for arg in args)).replace("}|{", ",")
    if origin is Literal:
        return "{" + ",".join(map(str, args)) + "}"
    if origin is tuple:
        return f"{_metavar(args[0])} ..." if args[-1] is ... else " ".join(map(_metavar, args))
    return "" if hint is bool else METAVARS.get(hint, "TEXT")


def field_texts(kind: Any) -> dict[str, str]:
    """The docstrings of a dataclass's fields, each on one line, inherited ones included."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if "__dataclass_fields__" in vars(base):
            body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(base)).body[0]).body
            for node, following in itertools.pairwise(body):
                if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
                    texts[ast.unparse(node.target)] = " ".join(ast.literal_eval(following.value).split())
    return texts
