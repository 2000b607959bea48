"""What commands show on the standard error while they work, and how they print tables."""

import html
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from vitlab.errors import UserError, printable

FIRST_LINE, NEXT_LINES = 5.0, 30.0
"""Without a terminal: seconds of silence before the first line of a progress display, and between the next ones."""


class ProgressDisplay:
    """Progress towards `total` on the standard error: a bar on a terminal, elsewhere a line now and then.

    A context manager. `total` counts `unit`, such as steps; `done` of them were done before. `quiet` shows nothing.
    """

    _live: ClassVar[list[Progress]] = []
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
    """`1:02:03` or `2:03`."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def preformatted(text: str) -> str:
    """Text as HTML that a notebook shows as it is."""
    return f"<pre>{html.escape(printable(text))}</pre>"


def parse_duration(text: str) -> float:
    """Seconds of `90s`, `10m`, `1.5h` or a plain number of seconds. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|)", text.strip())
    seconds = match and float(match[1]) * {"s": 1, "": 1, "m": 60, "min": 60, "h": 3600}[match[2]]
    if not seconds:
        raise UserError(f"{text!r} is not a time; give a number with s, m or h, such as 90s, 10m or 1.5h.")
    return seconds


def format_rate(rate: int | float) -> str:
    """A rate with its significant digits: `1,234`, `56`, `7.8`."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def format_table(rows: Sequence[Mapping[str, Any]], markdown: bool = False) -> str:
    """Rows of equal keys as a table with the keys on top: aligned text, or Markdown. Numbers are right-aligned.

    Integers get thousands separators; format other numbers before. None and False are empty, True is "yes".
    """
    if not rows:
        return ""
    names = list(rows[0])
    right = [any(isinstance(row[name], (int, float)) for row in rows) for name in names]
    cells = [names, *([_format_cell(row[name]) for name in names] for row in rows)]
    if markdown:
        cells[1:1] = [["--:" if numeric else "---" for numeric in right]]
        return "\n".join(f"| {' | '.join(line)} |" for line in cells)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    )


def _format_cell(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:,}" if isinstance(value, int) else str(value)
