"""The parts of the paper, from `parts.toml`: sections, equations, tables and figures, in the paper's order."""

import functools
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from vitlab.display import format_table
from vitlab.errors import UserError
from vitlab.settings import nearest

LABEL = re.compile(r"(Sec|App|Eq|Fig|Table)\.? ([A-D]?[\d.]*\d|[A-D])")
LONG_NAMES = {"section": "sec", "appendix": "app", "equation": "eq", "figure": "fig"}


@dataclass(frozen=True)
class Part:
    """A part of the paper; where it is in the code and what is known about it here. All but `part` are Markdown."""

    part: str
    """Its name in the paper: `Fig. 7`; a further row of the same part adds a word: `Fig. 7, left`."""
    text: str
    """What the paper has there."""
    code: str = ""
    """Files below src/vitlab, each followed by names in it."""
    run: str = ""
    """The command that does it."""
    known: str = ""
    """What was measured here, and where it is recorded; empty where nothing was."""

    @property
    def key(self) -> str:
        """`fig7`: its name for `vitlab paper`, shared by all rows of the part."""
        match = LABEL.match(self.part)
        assert match is not None, self.part
        return f"{match[1]}{match[2]}".lower()


@dataclass(frozen=True)
class Group:
    """A part of the list under one heading."""

    title: str
    parts: Sequence[Part]
    intro: str = ""


@functools.cache
def read_groups() -> tuple[Group, ...]:
    """All parts, by section of the paper."""
    text = files("vitlab.paper").joinpath("parts.toml").read_text("utf-8")
    return tuple(
        Group(group["title"], tuple(Part(**row) for row in group["row"]), group.get("intro", ""))
        for group in tomllib.loads(text)["group"]
    )


def list_text() -> str:
    """All parts, by section, with what each shows."""
    lines = []
    for group in read_groups():
        lines.append(group.title)
        lines.append(format_table([{"name": p.key, "part": p.part, "what": plain(p.text)} for p in group.parts]))
        lines.append("")
    return "\n".join([*lines, "`vitlab paper fig7` shows one of them; others likewise."])


def plain(text: str) -> str:
    """Markdown without the marks of code and links."""
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text).replace("`", "")


def find_parts(name: str) -> list[Part]:
    """The rows of the part called `name`: `fig7`, `Fig. 7`, `figure 7`. Raises UserError for an unknown name."""
    parts = [part for group in read_groups() for part in group.parts]
    key = re.sub(r"[\s_-]+", "", name.lower())
    for long, short in LONG_NAMES.items():
        key = key.replace(long, short)
    key = re.sub(r"^(sec|app|eq|fig|table)\.", r"\1", key)
    if found := [part for part in parts if part.key == key]:
        return found
    keys = list(dict.fromkeys(part.key for part in parts))
    raise UserError(f"the paper has no part {name!r}; {nearest(key, keys)}. `vitlab paper` lists all.")
