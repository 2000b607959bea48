"""A study's figure: panels side by side under one legend, as the paper's (Fig. 3-5, 8, 9, 12, 13).

A series has one color and one marker in all panels. Lengths are page pixels, as in `figures`.
"""

import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vitlab.inspect.figures import LIGHT, Axes, Figure, Theme, blank, place, text_width
from vitlab.inspect.panels import Panel, Series, front

FRONT = "Pareto front"
MARKERS = "osD^vPX*"
WIDTHS = {1: 420, 2: 320, 3: 260}
"""Of a panel's axes, where so many stand side by side."""
HIGH = 230
LEFT, RIGHT, TOP, BELOW = 72, 14, 30, 44
"""Margins of each panel."""
ENTRY = 44
"""Width of a legend's entry beyond its name."""
LINE = 13
"""Height of a line of small print."""
SMALL = 8.5


def panels(shown: Sequence[Panel], *, theme: Theme = LIGHT) -> Figure:
    """The panels in their order, up to three to a row, under a legend of all series where there are several."""
    assert shown, "a figure without panels"
    across = 2 if len(shown) == 4 else min(len(shown), 3)
    wide = WIDTHS[across]
    names = list(dict.fromkeys(each.name for panel in shown for each in panel.series))
    entries = [*names, FRONT] if any(panel.front for panel in shown) else names
    ticks = [_ticks(panel.ticks, wide) for panel in shown]
    below = BELOW + max(height for _, _, height in ticks) - (0 if any(panel.x_label for panel in shown) else 18)
    width = across * (LEFT + wide + RIGHT)
    columns = _columns(entries, width - 2 * RIGHT)
    legend = 8 + 20 * math.ceil(len(entries) / columns) if len(entries) > 1 else 0
    down = math.ceil(len(shown) / across)
    figure = blank(theme, (width, down * (TOP + HIGH + below) + legend))
    handles: dict[str, Any] = {}
    for i, (panel, (labels, rotation, _)) in enumerate(zip(shown, ticks, strict=True)):
        row, column = divmod(i, across)
        box = (column * (LEFT + wide + RIGHT) + LEFT, row * (TOP + HIGH + below) + TOP, wide, HIGH)
        axes = place(figure, theme, box)
        handles = _draw(axes, panel, names, theme) | handles
        if labels:
            axes.set_xticks(range(len(labels)), labels, rotation=rotation)
            axes.set_xlim(-0.5, len(labels) - 0.5)
        _annotate(axes, panel, names, theme)
    if legend:
        told = [name for column in range(columns) for name in entries[column::columns]]  # it is filled by columns
        figure.legend(
            handles=[handles[name] for name in told], labels=told, ncols=columns, loc="lower center",
            frameon=False, fontsize=9, labelcolor=theme.ink, borderaxespad=0.3,
            handlelength=1.8, columnspacing=1.4, handletextpad=0.6,
        )  # fmt: skip
    return figure


def _draw(axes: Axes, panel: Panel, names: Sequence[str], theme: Theme) -> dict[str, Any]:
    """Everything but the notes; what the legend shows of each series."""
    handles = {}
    joined = not panel.ticks and not panel.front
    for order, series in enumerate(panel.series):
        color, marker = _look(names.index(series.name), theme)
        points = zip(_places(panel, series, order), series.y, _bars(series), strict=True)
        x, y, spread = np.array([point for point in points if all(map(math.isfinite, point))]).reshape(-1, 3).T
        if series.spread:
            axes.errorbar(x, y, spread, fmt="none", ecolor=color, elinewidth=1, capsize=2.5, alpha=0.7, zorder=2)
        (handles[series.name],) = axes.plot(
            x, y, color=color, marker=marker, ms=7.5 if marker == "*" else 5.5, mec=theme.card, mew=0.7,
            ls="" if not joined else "--" if series.dashed else "-", lw=1.6, zorder=3,
        )  # fmt: skip
    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
    if panel.front:
        best = front([point for series in panel.series for point in zip(series.x, series.y, strict=True)])
        dashes: dict[str, Any] = {"lw": 1, "ls": (0, (4, 3)), "drawstyle": "steps-post"}
        (handles[FRONT],) = axes.plot([x for x, _ in best], [y for _, y in best], color=theme.muted, zorder=1, **dashes)
    axes.margins(x=0.07, y=0.1)
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", color=theme.ink, pad=8)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(axis="y", color=theme.line, lw=0.7)
    axes.set_axisbelow(True)
    _scale(axes, panel)
    return handles


def _scale(axes: Axes, panel: Panel) -> None:
    """Limits and ticks."""
    low, high = axes.get_ylim()
    if panel.percent:
        high = min(high + max(0.02 - (high - low), 0) / 2, 1.001)
        low = min(low, high - 0.02)  # points that hardly differ must not look as if they did
        axes.set_ylim(max(low, -0.001), high)
    if panel.log_y:
        values = [y for series in panel.series for y in series.y]
        marks = round_ticks(low, high)
        marks = marks if len(marks) > 1 else sorted({min(values), max(values)})  # too narrow for round numbers
        axes.set_yticks(marks, list(map(short, marks)))
    else:
        axes.locator_params(axis="y", nbins=6, steps=[1, 2, 2.5, 5, 10])
        axes.yaxis.set_major_formatter(lambda y, _: f"{round(100 * y, 6):.4g}%" if panel.percent else short(y))
    if panel.log_x or panel.log_y:
        axes.minorticks_off()
    if panel.log_x:
        marks = log_ticks([x for series in panel.series for x in series.x], *axes.get_xlim())
        axes.set_xticks(marks, list(map(short, marks)))
    elif not panel.ticks:
        axes.locator_params(axis="x", nbins=6)
        axes.xaxis.set_major_formatter(lambda x, _: short(x))


def _look(number: int, theme: Theme) -> tuple[str, str]:
    """Color and marker of the series of this number; both together come again after 64."""
    return theme.series[number % len(theme.series)], MARKERS[(number + number // len(MARKERS)) % len(MARKERS)]


def _places(panel: Panel, series: Series, order: int) -> list[float]:
    """The x of a panel's series; on an axis of names, several of them stand beside each other."""
    pitch = min(0.16, 0.7 / len(panel.series)) if panel.ticks else 0.0
    return [x + pitch * (order - (len(panel.series) - 1) / 2) for x in series.x]


def _bars(series: Series) -> Sequence[float | int]:
    return series.spread or [0.0] * len(series.x)


def _annotate(axes: Axes, panel: Panel, names: Sequence[str], theme: Theme) -> None:
    """Each note where it covers no point and no other note, if there is such a place around its point."""
    inside = axes.get_window_extent()
    taken: list[tuple[float, float, float, float]] = []
    wanted = []
    for order, series in enumerate(panel.series):
        color, _ = _look(names.index(series.name), theme)
        notes = series.notes or [""] * len(series.x)
        for x, y, bar, note in zip(_places(panel, series, order), series.y, _bars(series), notes, strict=True):
            if all(map(math.isfinite, (x, y, bar))):
                (a, b), (_, bottom), (_, top) = axes.transData.transform([(x, y), (x, y - bar), (x, y + bar)]).tolist()
                taken.append((a - 4, min(b - 4, bottom), a + 4, max(b + 4, top)))
                wanted += [(x, y, a, b, note, color)] if note else []
    for x, y, a, b, note, color in wanted:
        long = text_width(note, SMALL) + 2
        offsets = list(_around(long))
        boxes = [(a + dx, b + dy, a + dx + long, b + dy + LINE) for dx, dy in offsets]
        clear = [
            i for i, box in enumerate(boxes)
            if box[0] >= inside.x0 and box[2] <= inside.x1 + RIGHT and box[1] >= inside.y0 and box[3] <= inside.y1
            and not any(_overlap(box, other) for other in taken)
        ]  # fmt: skip
        best = (clear or [0])[0]
        taken.append(boxes[best])
        dx, dy = offsets[best]
        axes.annotate(
            note, (x, y), (0.72 * dx, 0.72 * (dy + 3)), textcoords="offset points", fontsize=SMALL, color=color,
            zorder=4, bbox={"facecolor": theme.card, "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
        )  # fmt: skip


def _around(long: float) -> Iterator[tuple[float, float]]:
    """Where the lower left corner of a note may lie from its point, the best place first."""
    for far in (0, 10):
        yield from ((6 + far, 1 + far), (6 + far, -LINE - 1 - far), (-long - 6 - far, 1 + far))
        yield from ((-long - 6 - far, -LINE - 1 - far), (-long / 2, 6 + far), (-long / 2, -LINE - 6 - far))


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _ticks(names: Sequence[str], wide: int) -> tuple[list[str], int, int]:
    """Names as they are written below the axis, their rotation in degrees, and the height beyond one line."""
    if not names:
        return [], 0, 0
    slot = wide / len(names) - 12
    fitting = max(int(slot / text_width("n", SMALL)), 1)
    wrapped = [textwrap.fill(name, fitting, break_long_words=False, break_on_hyphens=False) for name in names]
    lines = [line for name in wrapped for line in name.splitlines()]
    if all(text_width(line, SMALL) <= slot + 4 for line in lines):
        return wrapped, 0, LINE * max(name.count("\n") for name in wrapped)
    return list(names), 90, round(max(text_width(name, SMALL) for name in names)) - LINE + 4


def _columns(names: Sequence[str], width: int) -> int:
    """How many of the legend's entries stand in a row."""
    widest = max((text_width(name, 9.0) for name in names), default=0) + ENTRY
    every = sum(text_width(name, 9.0) + ENTRY for name in names)
    if every <= width:
        return len(names)
    rows = math.ceil(len(names) / max(int(width / widest), 1))
    return math.ceil(len(names) / rows)


def log_ticks(places: Sequence[float | int], low: float | int, high: float | int) -> list[float]:
    """Ticks of a logarithmic axis from `low` to `high`: the places themselves if they are few, else round numbers."""
    own = sorted({float(x) for x in places})
    if len(own) <= 8 and all(math.log(b / a) > 0.07 * math.log(high / low) for a, b in itertools.pairwise(own)):
        return own
    return round_ticks(low, high)


def round_ticks(low: float | int, high: float | int) -> list[float]:
    """At most seven powers of ten from `low` to `high`, and numbers between them where there is room."""
    marks: list[float] = []
    for digits in ((1, 2, 5), (1, 3), (1,)):
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        marks = [digit * 10.0**decade for decade in decades for digit in digits]
        marks = [mark for mark in marks if low <= mark <= high]
        if len(marks) <= 7:
            return marks
    return marks[:: math.ceil(len(marks) / 7)]


def short(value: float | int) -> str:
    """A number for a tick: 0.03, 2.5e-3, 600, 60k, 1.3M."""
    for unit, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * unit:
            return f"{value / unit:.3g}{sign}"
    if value == 0 or abs(value) >= 0.00995:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
