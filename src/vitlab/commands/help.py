"""`--help`: all commands, or the usual flags of one, one line each; `--help-all`: every flag.

Names, types, defaults and texts are those of the dataclasses that tyro parses.
"""

import ast
import dataclasses
import inspect
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from vitlab.config import FewShotConfig, TrainConfig

LONG = 60
"""Characters from which on a list of choices is not shown beside its flag; the text names them."""
PURPOSES = {
    "Train": ("demo", "pretrain", "finetune", "study"),
    "Evaluate": ("evaluate", "fewshot", "probe", "vtab", "predict"),
    "Look inside": ("inspect", "duplicates"),
    "Convert and serve": ("convert", "export", "shard", "app"),
    "This machine, and what there is": ("list", "plan", "bench", "doctor"),
}
TITLES = {
    "": "options",
    "training": "training",
    "data": "data",
    "optim": "optimizer",
    "model": "model",
    "fewshot": "few-shot accuracy while training",
    "masking": "masked patch prediction",
}
"""Headings of the groups of flags, by the first part of their names."""
USUAL = (
    "--learning-rates", "--optim.lr", "--steps", "--epochs", "--batch-size", "--microbatch", "--runs", "--sweep-steps",
    "--held-out", "--mixup", "--precision", "--compile", "--seed", "--eval-every", "--checkpoint-every", "--data.name",
    "--data.root", "--data.train-split", "--data.eval-split", "--data.crop", "--data.eval-resize", "--data.workers",
    "--data.on-error", "--data.exclude", "--optim.name", "--optim.weight-decay", "--optim.warmup-steps",
    "--masking.target", "--masking.share",
)  # fmt: skip
"""The settings of a run that `--help` shows, in this order. A command's other flags are always shown."""
USUAL_TEXTS = {
    "batch_size": "Images at once.",
    "beta1": "Adam's decay of the gradient's mean.",
    "beta2": "Adam's decay of the mean of its squares.",
    "device": "auto (the first GPU, else the CPU), cpu, cuda or cuda:1.",
    "json": "Print the result as JSON.",
    "kind": "Nearest neighbors, or a linear (logistic) classifier.",
    "loss": "Cross-entropy over all classes together, or of each class by itself.",
    "mode": "Inference, training steps, or both.",
    "name": "Which optimizer.",
    "on_error": "Unreadable images: `raise` ends the command, `skip` leaves them out and lists them.",
    "open_browser": "Open the page at once.",
    "rounds": "Timed rounds of each contender.",
    "schedule": "How the learning rate changes after the warm-up.",
    "seed": "Seed of all random numbers.",
    "test_split": "Split to test on.",
    "top": "Predictions for each image.",
    "train_split": "Split to learn from.",
    "workers": "Processes that read images; 0 reads in this one.",
}
"""Texts of fields without a docstring, by name."""
COLUMN = 26
"""Widest flag that has its text on the same line."""
NARROWEST, WIDEST = 80, 120
SHORTEST = 24
"""Fewest characters of a clause that stands for its sentence."""
_ARG: Any = type(tyro.conf.arg())  # what `tyro.conf.arg` leaves in a type hint


@dataclass(frozen=True)
class Flag:
    """One flag, or one positional argument, as help shows it."""

    name: str
    values: str
    """Its values, such as `INT ...`; the name of a positional argument."""
    text: str
    default: str
    group: str
    negated: str = ""
    """The flag that switches off what is on by default."""

    @property
    def invocation(self) -> str:
        return " ".join(filter(None, (self.negated or self.name, self.values)))


def overview(commands: Mapping[str, type]) -> str:
    """All commands by purpose, one line each."""
    width = _width()
    lines = [
        "usage: vitlab COMMAND [OPTIONS]",
        "",
        *textwrap.wrap('The Vision Transformer paper ("An Image is Worth 16x16 Words") as software.', width),
    ]
    for purpose, names in PURPOSES.items():
        lines += ["", f"{purpose}:"]
        lines += [f"  {name:10}  {_cut(_first_sentence(_purpose(commands[name])), width - 14)}" for name in names]
    hint = "`vitlab COMMAND --help` shows a command's usual flags, --help-all every flag."
    return "\n".join([*lines, "", *textwrap.wrap(hint, width, break_on_hyphens=False)])


def command_help(kind: type, name: str, show_all: bool) -> str:
    """Help of one command: its purpose and its flags by group, the usual ones or all of them."""
    known = list(flags(kind))
    if any(flag.values == "CHECKPOINT" for flag in known):  # which brings its own model
        known = [flag for flag in known if flag.group != "model" or flag.name == "--model.dropout"]
    shown = known if show_all else _usual(known)
    width = _width()
    positional = " ".join(f"[{flag.values}]" if flag.default else flag.values for flag in shown if not flag.name)
    lines = [f"usage: vitlab {name} [OPTIONS] {positional}".rstrip(), "", *textwrap.wrap(_purpose(kind), width)]
    column = max(len(flag.invocation) for flag in shown if len(flag.invocation) <= COLUMN)
    groups = {"arguments": [flag for flag in shown if not flag.name]}
    groups |= {title: [flag for flag in shown if flag.name and flag.group == group] for group, title in TITLES.items()}
    for title, members in groups.items():
        if members:
            lines += ["", f"{title}:", *(line for flag in members for line in _lines(flag, column, width, show_all))]
    if not show_all:
        groups = dict.fromkeys(f"--{flag.group}.*" for flag in known if flag.group not in ("", "training"))
        more = f"all {len(known)} arguments ({', '.join(groups)})" if groups else "them"
        hint = f"--help-all shows {more} with their full texts."
        lines += ["", *textwrap.wrap(hint, width, break_on_hyphens=False)]
    return "\n".join(lines)


def _usual(known: list[Flag]) -> list[Flag]:
    """The flags of the command itself, and the usual settings of its run."""
    by_name = {flag.name: flag for flag in known if flag.group}
    if any(flag.name == "--dataset" for flag in known):  # which, with --root, sets the same
        by_name = {name: flag for name, flag in by_name.items() if name not in ("--data.name", "--data.root")}
    return [flag for flag in known if not flag.group] + [by_name[name] for name in USUAL if name in by_name]


def flags(kind: type, given: Any = None, prefix: str = "", group: str = "") -> Iterator[Flag]:
    """The flags of a dataclass in its order; defaults come from the instance `given`, if there is one."""
    hints, texts = typing.get_type_hints(kind, include_extras=True), _texts(kind)
    for field in dataclasses.fields(kind):
        hint, marks = hints[field.name], ()
        if typing.get_origin(hint) is typing.Annotated:
            hint, *marks = typing.get_args(hint)
        arg: Any = next((mark for mark in marks if isinstance(mark, _ARG)), tyro.conf.arg())
        name = (field.name if arg.name is None else arg.name).replace("_", "-")
        default = field.default if given is None else getattr(given, field.name)
        if field.name == "fewshot" and default is None:
            default = FewShotConfig()  # what a first flag --fewshot.* makes of it
        if dataclasses.is_dataclass(default):
            inner = f"{prefix}{name}." if name else prefix
            unnamed = "training" if isinstance(default, TrainConfig) else group
            yield from flags(type(default), default, inner, inner.partition(".")[0] or unnamed)
        elif not any(dataclasses.is_dataclass(each) for each in _members(hint)) and not _is_fixed(hint):
            positional = tyro.conf.Positional in marks
            negated = f"--{prefix}[no-]{name}" if default is True else ""
            named = positional and "{" not in _values(hint)
            values = arg.metavar or (name.upper() if named else _values(hint))
            text = arg.help or texts.get(field.name) or USUAL_TEXTS.get(field.name, "")
            shown = "required" if default is dataclasses.MISSING and not positional else _default(default)
            yield Flag("" if positional else f"--{prefix}{name}", values, text, shown, group, negated)


def _texts(kind: type) -> dict[str, str]:
    """The docstrings under the fields of a dataclass and of its base classes, by field."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base is object or not dataclasses.is_dataclass(base) or base.__module__ == "types":  # made by `cli`
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                texts[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return texts


def _members(hint: Any) -> list[Any]:
    """The types of a union except None, without annotations."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [option for each in typing.get_args(hint) if each is not type(None) for option in _members(each)]
    return [hint]


def _is_fixed(hint: Any) -> bool:
    """Whether there is nothing to choose from."""
    return typing.get_origin(hint) is Literal and len(typing.get_args(hint)) == 1


def _values(hint: Any) -> str:
    """The values of a flag of this type: `INT`, `{a,b}`, `FLOAT ...`; empty for a switch."""
    shown = []
    for each in _members(hint):
        inner = typing.get_args(each)
        if typing.get_origin(each) is Literal:
            choices = ",".join(map(str, inner))
            shown.append(f"{{{choices if len(choices) < LONG else f'{inner[0]},...'}}}")
        elif typing.get_origin(each) is tuple:
            shown.append(" ".join("..." if part is ... else _values(part) for part in inner))
        elif each is not bool:
            shown.append(each.__name__.upper())
    return "|".join(shown)


def _default(value: Any) -> str:
    if value is None or value is False or value is dataclasses.MISSING:
        return ""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "on" if value is True else str(value)


def _purpose(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split())


def _lines(flag: Flag, column: int, width: int, show_all: bool) -> list[str]:
    """One line, shortened to fit; or the full text on as many lines as it needs."""
    head, default = f"  {flag.invocation:<{column}}  ", f" [{flag.default}]" if flag.default else ""
    if not show_all:
        return [(head + _cut(_first_sentence(flag.text), width - len(head) - len(default)) + default).rstrip()]
    indent, text = " " * (column + 4), flag.text + default
    if len(flag.invocation) > column:
        return [head.rstrip(), *_wrapped(text, width, indent, indent)]
    return _wrapped(text, width, head, indent) or [head.rstrip()]


def _wrapped(text: str, width: int, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )


def _first_sentence(text: str) -> str:
    return re.split(r"(?<!\bSec)(?<!\bFig)(?<!\bApp)(?<!\bEq)(?<!e[.]g)[.] (?=[A-Z`])", text, maxsplit=1)[0].rstrip(".")


def _cut(text: str, room: int) -> str:
    """The text; or the clauses before a colon or semicolon that fit; or as many words as fit."""
    if len(text) <= room:
        return text
    kept = text[: max(room - 1, 0)]
    clause = kept[: -len(re.split(r"[:;] ", kept)[-1]) - 2]
    if len(clause) >= SHORTEST:
        return clause
    return f"{kept.rpartition(' ')[0].rstrip(' ,(')} …" if " " in kept else ""


def _width() -> int:
    return max(NARROWEST, min(shutil.get_terminal_size().columns, WIDEST))
