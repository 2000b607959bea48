"""What commands show on the standard error while they work, and how they print tables."""

import functools
import html
import itertools
import math
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from vitlab.errors import UserError, printable

FIRST_LINE = 5.0
"""Without a terminal: seconds of silence before the first line of a progress display."""
NEXT_LINES = 30.0
"""Without a terminal: seconds between its next lines."""
NARROW = 16
"""Texts in the columns of tables are not wrapped to fewer characters."""
_wrap = functools.partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)


class ProgressDisplay:
    """Progress towards `total` on the standard error: a bar on a terminal, elsewhere a line now and then.

    A context manager. `total` counts `unit`, such as steps; `done` of them were done before. `quiet` shows nothing.
    """

    _live: ClassVar[list[Any]] = []
    """The bars on the terminal: at most one `Progress`; nested displays add their bar to it."""

    def __init__(
        self, label: str, total: int | float, unit: str = "images", quiet: bool = False, done: int = 0
    ) -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.quiet = quiet
        self._done_before = done
        if self._live:
            self._bar = self._live[0]
        else:
            from rich.console import Console  # slow to import
            from rich.progress import BarColumn, Progress, TextColumn

            console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
            label_column = TextColumn("{task.description}", markup=False)
            columns = (label_column, BarColumn(), TextColumn("{task.fields[status]}", markup=False))
            self._bar = Progress(*columns, console=console, disable=quiet or not console.is_terminal)
        self._console = self._bar.console
        self._is_outermost = False
        self._task = self._bar.add_task(printable(label), total=total, status="", visible=not quiet)
        self._start = self._last_line = time.monotonic()
        self._pause = FIRST_LINE

    @property
    def on_terminal(self) -> bool:
        return self._console.is_terminal and not self.quiet

    def __enter__(self) -> "ProgressDisplay":
        if self.on_terminal and not self._live:
            self._is_outermost = True
            self._live.append(self._bar)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_outermost:
            self._live.clear()
            self._bar.stop()
        elif self._live:
            self._bar.remove_task(self._task)

    def update(
        self, done: int | float, status: str | None = None, *, total: int | float | None = None, force: bool = False
    ) -> None:
        """Shows that `done` of the total is reached, with `status` beside it (default: count and time left).

        `total` replaces the total. Without a terminal a line is printed only after seconds of silence, or with `force`.
        """
        self.total = self.total if total is None else total
        now = time.monotonic()
        silent = now - self._last_line < self._pause
        if self.quiet or (not self.on_terminal and silent and not force):
            return
        if status is None:
            new = done - self._done_before
            eta = f" · ETA {format_duration((self.total - done) * (now - self._start) / new)}" if new else ""
            status = f"{done:,.0f} of {self.total:,.0f} {self.unit}{eta}"
        self._bar.update(self._task, completed=done, total=self.total, status=printable(status))
        if not self.on_terminal:
            self.say(status)
        self._last_line, self._pause = now, NEXT_LINES

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        if not self.quiet:
            self._console.print(f"{self.label}: {printable(text)}", markup=False)


def format_duration(seconds: int | float) -> str:
    """`45 s`; from two minutes on `2:30 min`, from two hours on `2:05 h`; `unknown` where it is infinite."""
    if seconds == math.inf:
        return "unknown"
    if (seconds := round(seconds)) < 120:
        return f"{seconds} s"
    whole, part = divmod(seconds if seconds < 7200 else round(seconds / 60), 60)
    return f"{whole:,}:{part:02d} {'min' if seconds < 7200 else 'h'}"


def screen_width(stream: Any) -> int | None:
    """Columns of the terminal, or COLUMNS if it is set; None for files and pipes, whose lines stay whole."""
    return shutil.get_terminal_size().columns if stream.isatty() or os.environ.get("COLUMNS") else None


def fit(text: str, stream: Any) -> str:
    """`text` with lines that are longer than the terminal wrapped between words, but not in commands in backticks.

    The head of a line is its indentation, and a name if two or more spaces follow. The text after it keeps its column.
    """
    if (width := screen_width(stream)) is None:
        return text
    unbreakable = re.sub("`[^`\n]*`", lambda command: command[0].replace(" ", "\0"), text)
    lines = []
    for line in unbreakable.split("\n"):
        body = re.sub(rf"^ *(\S.{{,{width // 2}}}? {{2,}}(?=\S))?", "", line)
        head = line.removesuffix(body)
        wrapped = _wrap(body, width, initial_indent=head, subsequent_indent=" " * len(head))
        lines += wrapped if len(line) > width else [line]
    return "\n".join(lines).replace("\0", " ")


def preformatted(text: str) -> str:
    """Text as HTML that a notebook shows as it is."""
    return f"<pre>{html.escape(printable(text))}</pre>"


def parse_duration(text: str) -> float:
    """Seconds of `90s`, `10m` or `1.5h`. Raises UserError, also without a unit: `2` may be meant as minutes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)", text.strip())
    seconds = match and float(match[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[match[2]]
    if not seconds:
        raise UserError(f"{text!r} is not a time; give a number with s, m or h, such as 90s, 10m or 1.5h.")
    return seconds


def format_rate(rate: int | float) -> str:
    """A rate with its significant digits: `1,234`, `56`, `7.8`."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def format_table(rows: Sequence[Mapping[str, Any]], markdown: bool = False, optional: Sequence[str] = ()) -> str:
    """Rows of equal keys as a table with the keys on top: aligned text, or Markdown. Numbers are right-aligned.

    Integers get thousands separators; format other numbers before. None and False are empty, True is "yes".
    On a terminal that is too narrow, columns that are `optional` are left out, then texts are wrapped between words,
    then last columns go below their row, or, where all rows share a value, below the table.
    """
    if not rows:
        return ""
    names = list(rows[0])
    right = {name for name in names if any(isinstance(row[name], (int, float)) for row in rows)}
    cells = [{name: name for name in names}, *({name: _format_cell(row[name]) for name in names} for row in rows)]
    if markdown:
        cells[1:1] = [{name: "--:" if name in right else "---" for name in names}]
        return "\n".join(f"| {' | '.join(line.values())} |" for line in cells)
    width = screen_width(sys.stdout) or sys.maxsize
    widths = _fit_columns(cells, optional, width)
    below = [name for name in names if name not in widths and name not in optional]
    shared = [name for name in below if len(rows) > 1 and len({row[name] for row in cells[1:]}) == 1]
    lines = []
    for row in cells:
        parts = [[row[name]] if len(row[name]) <= size else _wrap(row[name], size) for name, size in widths.items()]
        for line in itertools.zip_longest(*parts, fillvalue=""):
            aligned = zip(widths.items(), line, strict=True)
            padded = (cell.rjust(size) if name in right else cell.ljust(size) for (name, size), cell in aligned)
            lines.append("  ".join(padded).rstrip())
        notes = [f"{name}: {row[name]}" for name in below if row[name] and row is not cells[0] and name not in shared]
        lines += _wrap(" · ".join(notes), width, initial_indent="    ", subsequent_indent="    ")
    if of_all := [f"{name} {cells[1][name]}" for name in shared if cells[1][name]]:
        lines += _wrap(f"all rows: {', '.join(of_all)}", width)
    return "\n".join(lines)


def _fit_columns(cells: Sequence[dict[str, str]], optional: Sequence[str], width: int) -> dict[str, int]:
    """The columns that fit side by side, and their widths; `cells[0]` are the names.

    The narrowest column that is allowed has each word, and each text of up to NARROW characters, on one line.
    """
    widths = {name: max(len(row[name]) for row in cells) for name in cells[0]}
    words = {name: max(len(word) for row in cells for word in ["", *row[name].split()]) for name in cells[0]}
    narrowest = {name: max(size, *(min(len(row[name]), NARROW) for row in cells[1:])) for name, size in words.items()}

    def fits(sizes: Collection[int]) -> bool:
        return sum(sizes) + 2 * (len(sizes) - 1) <= width  # with two spaces between columns

    for name in optional:
        if not fits(widths.values()):
            widths.pop(name, None)
    while not fits([narrowest[name] for name in widths]) and len(widths) > 1:
        widths.popitem()
    while not fits(widths.values()) and (wider := [name for name in widths if widths[name] > narrowest[name]]):
        widths[max(wider, key=lambda name: widths[name])] -= 1
    return widths


def _format_cell(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:,}" if isinstance(value, int) else str(value)
