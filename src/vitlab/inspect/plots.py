"""Figures of the studies: panels side by side under one legend (Fig. 3-5, 8, 9, 12, 13)."""

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitlab.inspect.figures import LIGHT, Axes, Figure, FixedLocator, LogLocator, MaxNLocator, Theme, new_figure, short
from vitlab.inspect.panels import Panel, Series, front

FRONT = "Pareto front"
MARKERS = "osD^vPX*"
WIDTHS = {1: 500, 2: 405, 3: 345}
"""Of a panel in CSS pixels, by the number of panels in a row."""
LETTER = 6.5
"""Width of a letter of small print, about."""
BESIDE = [
    (dx * far, dy * far, ha, va)
    for far in (1, 2.5)
    for dx, dy, ha, va in (
        (6, 2, "left", "bottom"), (6, -2, "left", "top"), (-6, 2, "right", "bottom"), (-6, -2, "right", "top"),
        (0, 6, "center", "bottom"), (0, -6, "center", "top"),
    )
]  # fmt: skip
"""Offset in points and alignment of a note beside its point, the best first."""


def panels(shown: Sequence[Panel], *, theme: Theme = LIGHT) -> Figure:
    """The panels in their order, up to three to a row, above a legend of all series where there are several."""
    across = 2 if len(shown) == 4 else min(len(shown), 3)
    rows = math.ceil(len(shown) / across)
    figure, grid = new_figure(theme, (across * WIDTHS[across], rows * 310 + 30), rows, across)
    for spare in grid[len(shown) :]:
        spare.remove()
    names = list(dict.fromkeys(series.name for panel in shown for series in panel.series))
    handles: dict[str, Any] = {}
    for panel, axes in zip(shown, grid, strict=False):
        handles = _draw(axes, panel, names, theme) | handles
        _set_ticks(axes, panel, WIDTHS[across] - 80)
    if len(handles) > 1:
        columns = max(int(across * WIDTHS[across] / (LETTER * max(map(len, handles)) + 50)), 1)
        columns = math.ceil(len(handles) / math.ceil(len(handles) / columns))
        figure.legend(
            handles=handles.values(), labels=handles, ncols=columns, loc="outside lower center", frameon=False,
            fontsize=9, labelcolor=theme.ink, handlelength=1.8, columnspacing=1.4, handletextpad=0.6,
        )  # fmt: skip
    figure.draw_without_rendering()  # notes need the final layout
    for panel, axes in zip(shown, grid, strict=False):
        _annotate(axes, panel, names, theme)
    return figure


def _draw(axes: Axes, panel: Panel, names: Sequence[str], theme: Theme) -> dict[str, Any]:
    """Draws points, lines, bars and labels; returns the legend's handle of each series."""
    handles = {}
    joined = not panel.ticks and not panel.front
    for order, series in enumerate(panel.series):
        color, marker = _style(names.index(series.name), theme)
        x, y, spread = np.array(_points(panel, series, order)).reshape(-1, 3).T
        if series.spread:
            axes.errorbar(x, y, spread, fmt="none", ecolor=color, elinewidth=1, capsize=2.5, alpha=0.7, zorder=2)
        style = {"color": color, "marker": marker, "ms": 7.5 if marker == "*" else 5.5, "mec": theme.card, "mew": 0.7}
        line = "" if not joined else "--" if series.dashed else "-"
        (handles[series.name],) = axes.plot(x, y, ls=line, lw=1.6, zorder=3, **style)
    if panel.front:
        best = front([point for series in panel.series for point in zip(series.x, series.y, strict=True)])
        x, y = np.array(best, dtype=float).reshape(-1, 2).T
        dashes: dict[str, Any] = {"color": theme.muted, "lw": 1, "ls": (0, (4, 3)), "drawstyle": "steps-post"}
        (handles[FRONT],) = axes.plot(x, y, zorder=1, **dashes)
    axes.margins(x=0.07, y=0.1)
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", color=theme.ink)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.grid(axis="y", color=theme.line, lw=0.7)
    axes.set_axisbelow(True)
    return handles


def _style(number: int, theme: Theme) -> tuple[str, str]:
    """Color and marker of a series; the combination repeats after 64."""
    return theme.series[number % len(theme.series)], MARKERS[(number + number // len(MARKERS)) % len(MARKERS)]


def _points(panel: Panel, series: Series, order: int) -> list[tuple[float, float, float]]:
    """The finite (x, y, spread) of a series; on an axis of names, several series are side by side."""
    pitch = min(0.16, 0.7 / len(panel.series)) if panel.ticks else 0.0
    shift = pitch * (order - (len(panel.series) - 1) / 2)
    spread = series.spread or [0.0] * len(series.x)
    points = [(float(x) + shift, float(y), float(bar)) for x, y, bar in zip(series.x, series.y, spread, strict=True)]
    return [point if all(map(math.isfinite, point)) else (math.nan, math.nan, math.nan) for point in points]


def _set_ticks(axes: Axes, panel: Panel, width: int) -> None:
    xs = [x for series in panel.series for x in series.x]
    if panel.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(_log_locator(xs, *axes.get_xlim()))
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(_log_locator([], *axes.get_ylim()))
    for axis, log in ((axes.xaxis, panel.log_x), (axes.yaxis, panel.log_y)):
        if not log:
            axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(lambda value, _: short(value))
    if panel.log_x or panel.log_y:
        axes.minorticks_off()
    if panel.percent:
        low, high = axes.get_ylim()
        high = min(high + max(0.02 - (high - low), 0) / 2, 1.001)
        low = min(low, high - 0.02)  # do not magnify noise
        axes.set_ylim(max(low, -0.001), high)
        axes.yaxis.set_major_formatter(lambda value, _: f"{round(100 * value, 6):.4g}%")
    if panel.ticks:
        fitting = int(width / len(panel.ticks) / LETTER)
        upright = max(len(word) for name in panel.ticks for word in name.split()) <= fitting
        labels = [textwrap.fill(name, fitting, break_on_hyphens=False) if upright else name for name in panel.ticks]
        axes.set_xticks(range(len(labels)), labels, rotation=0 if upright else 90)
        axes.set_xlim(-0.5, len(labels) - 0.5)


def _log_locator(values: Sequence[float | int], low: float, high: float) -> FixedLocator | LogLocator:
    """A tick at each of a few values that are not too near to each other, else round numbers."""
    ticks = sorted({float(value) for value in values})
    decades = math.log10(high / low)
    if 0 < len(ticks) <= 8 and all(math.log10(b / a) > 0.07 * decades for a, b in itertools.pairwise(ticks)):
        return FixedLocator(ticks)
    return LogLocator(subs=(1, 2, 5) if decades < 2 else (1, 3) if decades < 3.5 else (1,), numticks=7)


def _annotate(axes: Axes, panel: Panel, names: Sequence[str], theme: Theme) -> None:
    """Writes each note beside its point, where it overlaps the fewest points and other notes."""
    series_points = [_points(panel, series, order) for order, series in enumerate(panel.series)]
    points = [point[:2] for points in series_points for point in points if math.isfinite(point[0])]
    taken = axes.transData.transform(points).tolist()
    for series, placed in zip(panel.series, series_points, strict=True):
        color, _ = _style(names.index(series.name), theme)
        for note, (x, y, _) in zip(series.notes, placed, strict=False):
            if note and math.isfinite(x):
                text = axes.annotate(
                    note, (x, y), (0, 0), textcoords="offset points", fontsize=8.5, color=color, zorder=4,
                    bbox={"facecolor": theme.card, "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
                )  # fmt: skip
                costs = []
                for dx, dy, ha, va in BESIDE:
                    text.set(position=(dx, dy), ha=ha, va=va)
                    box = text.get_window_extent()
                    outside = not all(axes.bbox.contains(*corner) for corner in box.corners())
                    costs.append(sum(box.padded(3).contains(*point) for point in taken) + outside)
                dx, dy, ha, va = BESIDE[int(np.argmin(costs))]
                text.set(position=(dx, dy), ha=ha, va=va)
                left, bottom, right, top = text.get_window_extent().extents
                across = np.linspace(left, right, max(int((right - left) / 4), 2))
                taken += [(x, y) for x in across for y in (bottom, (bottom + top) / 2, top)]
