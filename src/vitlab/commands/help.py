"""`--help`: the commands by what they are for, and a command's usual flags, one a line; `--help-all`: every flag.

Everything is taken from the dataclasses that tyro parses: names, types, defaults, and the text under each field.
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

from vitlab.config import FewShotConfig

LONG = 60
"""Characters of choices that are too many to be shown with their flag; its text names them."""
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
"""The settings of a run that `--help` shows, in its order; the others are behind `--help-all`. Flags that are a
command's own and no settings of a run are all shown."""
USUAL_TEXTS = {
    "batch_size": "Images at once.",
    "beta1": "Adam's decay of the gradient's mean.",
    "beta2": "Adam's decay of the mean of its squares.",
    "device": "auto (the first GPU, else the CPU), cpu, cuda or cuda:1.",
    "json": "Print the result as JSON.",
    "kind": "Nearest neighbors, or a linear (logistic) classifier.",
    "loss": "Cross-entropy over all classes together, or of each class by itself.",
    "mode": "Answer images, learn from them, or both in turn.",
    "name": "Which optimizer.",
    "on_error": "What an unreadable image does: end the command, or be left out, named and counted.",
    "open_browser": "Open the page at once.",
    "rounds": "How often each contender is timed.",
    "schedule": "How the learning rate changes after the warm-up.",
    "seed": "Of all random draws.",
    "test_split": "Split to test on.",
    "top": "Answers for each image.",
    "train_split": "Split to learn from.",
    "workers": "Processes that read images; 0 reads in this one.",
}
"""Of fields that have no text of their own, by their names."""
COLUMN = 26
"""Widest flag beside which the texts of the others still start in one column."""
NARROWEST, WIDEST = 80, 120
SHORTEST = 24
"""A clause of fewer letters says too little by itself."""
_ARG: Any = type(tyro.conf.arg())  # what `tyro.conf.arg` leaves in a type hint


@dataclass(frozen=True)
class Flag:
    """One flag, or one positional argument, as help shows it."""

    name: str
    values: str
    """What follows it, such as `INT ...`; of a positional argument its name stands here."""
    text: str
    default: str
    group: str
    negated: str = ""
    """The flag that switches off what is on by default."""

    @property
    def invocation(self) -> str:
        return " ".join(filter(None, (self.negated or self.name, self.values)))


def overview(commands: Mapping[str, type]) -> str:
    """All commands by what they are for, a line each."""
    width = _width()
    lines = [
        "usage: vitlab COMMAND [OPTIONS]",
        "",
        *textwrap.wrap('The Vision Transformer paper ("An Image is Worth 16x16 Words") as software.', width),
    ]
    for purpose, names in PURPOSES.items():
        lines += ["", f"{purpose}:"]
        lines += [f"  {name:10}  {_cut(_first_sentence(_purpose(commands[name])), width - 14)}" for name in names]
    said = "`vitlab COMMAND --help` shows a command's usual flags, --help-all every flag."
    return "\n".join([*lines, "", *textwrap.wrap(said, width, break_on_hyphens=False)])


def command_help(kind: type, name: str, every: bool) -> str:
    """Help of one command: what it is for, and its flags by group; the usual ones a line each, or `every` one whole."""
    found = list(flags(kind))
    if any(flag.values == "CHECKPOINT" for flag in found):  # which brings its own model
        found = [flag for flag in found if flag.group != "model" or flag.name == "--model.dropout"]
    shown = found if every else _usual(found)
    width = _width()
    positional = " ".join(f"[{flag.values}]" if flag.default else flag.values for flag in shown if not flag.name)
    lines = [f"usage: vitlab {name} [OPTIONS] {positional}".rstrip(), "", *textwrap.wrap(_purpose(kind), width)]
    column = max(len(flag.invocation) for flag in shown if len(flag.invocation) <= COLUMN)
    groups = {"arguments": [flag for flag in shown if not flag.name]}
    groups |= {title: [flag for flag in shown if flag.name and flag.group == group] for group, title in TITLES.items()}
    for title, members in groups.items():
        if members:
            lines += ["", f"{title}:", *(line for flag in members for line in _lines(flag, column, width, every))]
    if not every:
        groups = dict.fromkeys(f"--{flag.group}.*" for flag in found if flag.group not in ("", "training"))
        more = f"all {len(found)} arguments ({', '.join(groups)})" if groups else "them"
        said = f"--help-all shows {more} with the whole of each text."
        lines += ["", *textwrap.wrap(said, width, break_on_hyphens=False)]
    return "\n".join(lines)


def _usual(found: list[Flag]) -> list[Flag]:
    """A command's own flags, and the usual settings of its run."""
    by_name, own = {flag.name: flag for flag in found}, [flag for flag in found if not flag.group]
    twice = ("--data.name", "--data.root") if "--dataset" in by_name else ()  # --dataset and --root say the same
    return own + [by_name[name] for name in USUAL if name in by_name and by_name[name].group and name not in twice]


def flags(kind: type, given: Any = None, prefix: str = "", group: str = "") -> Iterator[Flag]:
    """The flags of a dataclass in its order, with defaults from the instance `given` where there is one."""
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
            yield from flags(type(default), default, inner, inner.partition(".")[0] or "training")
        elif not any(dataclasses.is_dataclass(each) for each in _members(hint)) and not _is_fixed(hint):
            positional = tyro.conf.Positional in marks
            negated = f"--{prefix}[no-]{name}" if default is True else ""
            named = positional and "{" not in _values(hint)
            values = arg.metavar or (name.upper() if named else _values(hint))
            text = arg.help or texts.get(field.name) or USUAL_TEXTS.get(field.name, "")
            shown = "required" if default is dataclasses.MISSING and not positional else _default(default)
            yield Flag("" if positional else f"--{prefix}{name}", values, text, shown, group, negated)


def _texts(kind: type) -> dict[str, str]:
    """What stands under each field in the source of a dataclass and of those that it builds on."""
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
    """The types of a union but for None, without what they are annotated with."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [option for each in typing.get_args(hint) if each is not type(None) for option in _members(each)]
    return [hint]


def _is_fixed(hint: Any) -> bool:
    """Whether there is nothing to choose from."""
    return typing.get_origin(hint) is Literal and len(typing.get_args(hint)) == 1


def _values(hint: Any) -> str:
    """What a flag of this type takes: `INT`, `{a,b}`, `FLOAT ...`; nothing for a switch."""
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


def _lines(flag: Flag, column: int, width: int, every: bool) -> list[str]:
    """One line, cut where it is too long; or all of the text, in as many as it takes."""
    head, default = f"  {flag.invocation:<{column}}  ", f" [{flag.default}]" if flag.default else ""
    if not every:
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
    """The text; or what stands before its last colon or semicolon that there is room for; or as many words as fit."""
    if len(text) <= room:
        return text
    kept = text[: max(room - 1, 0)]
    clause = kept[: -len(re.split(r"[:;] ", kept)[-1]) - 2]
    if len(clause) >= SHORTEST:
        return clause
    return f"{kept.rpartition(' ')[0].rstrip(' ,(')} …" if " " in kept else ""


def _width() -> int:
    return max(NARROWEST, min(shutil.get_terminal_size().columns, WIDEST))
