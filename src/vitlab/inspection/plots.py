"""Plots of runs and studies: panels side by side under one legend (Fig. 3-5, 8, 9, 12, 13), and confusion matrices."""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, PercentFormatter

from vitlab.errors import quoted
from vitlab.inspection.figures import INK, LINE, MUTED, SERIES, new_figure
from vitlab.panels import Panel, Series, front

FRONT = "Pareto front"
MARKERS = "osD^vPX*"
WIDTHS = {1: 500, 2: 405, 3: 345}
"""Width of a panel in CSS pixels, by the number of panels in a row."""
HEIGHT = 310
"""Height of a panel in CSS pixels."""
LABELS = 80
"""Approximate width, and height, of what is around the axes of a panel, in CSS pixels."""
CORNERS = ((1, 1), (1, -1), (-1, 1), (-1, -1))
"""Where a note may be, seen from its point, as signs of x and y; the first is preferred."""
CHARACTER = 6.5
"""Approximate width of a character of small print, in CSS pixels."""
TITLE_CHARACTER = 8.2
"""The same of a title."""


def curves(records: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Loss, accuracy (or mean average precision) and learning rate over `step`: record keys that end in these words."""
    names = dict.fromkeys(key for record in records for key in record)
    panels, multi_label = [], any(name.endswith("mean_average_precision") for name in names)
    metric = "mean_average_precision" if multi_label else "accuracy"
    for title, ending in (("Loss", "loss"), (metric.replace("_", " ").capitalize(), metric), ("Learning rate", "lr")):
        series = []
        for name in (name for name in names if name.endswith(ending)):
            points = [(r["step"], r[name]) for r in records if r.get(name) is not None and math.isfinite(r[name])]
            if points:
                steps, values = zip(*points, strict=True)
                series.append(Series(name.replace("_", " "), steps, values))
        if series:
            panels.append(Panel(title, "step", "", series, percent=ending == metric))
    return panels


def panels(shown: Sequence[Panel]) -> Figure:
    """The panels in their order, up to three to a row, above a legend of all series where there are several."""
    across = 2 if len(shown) == 4 else min(len(shown), 3)
    rows = math.ceil(len(shown) / across)
    width = WIDTHS[across]
    figure, grid = new_figure((across * width, rows * HEIGHT + 30), rows, across)
    for spare in grid[len(shown) :]:
        spare.remove()
    names = list(dict.fromkeys(series.name for panel in shown for series in panel.series))
    handles: dict[str, Any] = {}
    for panel, axes in zip(shown, grid, strict=False):
        handles = _draw(axes, panel, names) | handles
        title = textwrap.fill(panel.title, int((width - LABELS) / TITLE_CHARACTER))
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
        _set_ticks(axes, panel, width - LABELS)
        _write_notes(axes, panel, handles, width - LABELS)
    if len(handles) > 1:
        columns = max(int(across * width / (CHARACTER * max(map(len, handles)) + 50)), 1)
        style = {"frameon": False, "labelcolor": INK, "fontsize": 9, "handlelength": 1.8, "columnspacing": 1.4}
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns, **style)
    return figure


def _draw(axes: Axes, panel: Panel, names: Sequence[str]) -> dict[str, Any]:
    """Draws points, lines and error bars; returns the legend's handle of each series and of the front."""
    handles = {}
    joined = not panel.ticks and not panel.front
    for order, series in enumerate(panel.series):
        number = names.index(series.name)
        color = SERIES[number % len(SERIES)]
        marker = MARKERS[(number + number // len(MARKERS)) % len(MARKERS)]  # with the color it repeats after 64
        x, y, spread = np.array(_points(panel, series, order)).reshape(-1, 3).T
        if series.spread:
            axes.errorbar(x, y, spread, fmt="none", ecolor=color, elinewidth=1, capsize=2.5, alpha=0.7, zorder=2)
        style = {"color": color, "marker": marker if len(x) <= 30 else None, "ms": 5.5, "mec": "white", "mew": 0.7}
        (handles[series.name],) = axes.plot(x, y, ls="-" if joined else "", lw=1.6, zorder=3, **style)
    if panel.front:
        best = front([point for series in panel.series for point in zip(series.x, series.y, strict=True)])
        x, y = np.array(best, dtype=float).reshape(-1, 2).T
        dashes: dict[str, Any] = {"color": MUTED, "lw": 1, "ls": (0, (4, 3)), "drawstyle": "steps-post"}
        (handles[FRONT],) = axes.plot(x, y, zorder=1, **dashes)
    axes.margins(x=0.07, y=0.1)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.grid(axis="y", color=LINE, lw=0.7)
    axes.set_axisbelow(True)
    return handles


def _write_notes(axes: Axes, panel: Panel, handles: Mapping[str, Any], width: int) -> None:
    """Writes each note at the corner of its point where it covers least of points, notes and the front."""
    if not any(series.notes for series in panel.series):
        return
    size = np.array([width, HEIGHT - LABELS])
    points = [point for series in panel.series for point in zip(series.x, series.y, strict=True)]
    to_axes = axes.transData - axes.transAxes
    centers, stairs = to_axes.transform(points) * size, np.empty((0, 2))  # in pixels of the axes, as all below
    if panel.front and (best := front(points)):
        stairs = _stairs(to_axes.transform(best) * size)
    notes = [(note, series.name) for series in panel.series for note in series.notes or [""] * len(series.x)]
    covered = [*centers]
    for (note, name), point, center in zip(notes, points, centers, strict=True):
        if not note:
            continue
        half = np.array([0.6 * CHARACTER * len(note), CHARACTER])  # half its width and height, with some space
        # Four middles of the note, one for each corner; 4 pixels are between it and its point.
        middles = [center + np.array(corner) * (half + 4) for corner in CORNERS]
        inside = [(np.abs(middle - size / 2) <= size / 2 - half).all() for middle in middles]
        hits = [sum((np.abs(middle - other) < half + 4).all() for other in covered) for middle in middles]
        crossed = [(np.abs(middle - stairs) < half).all(axis=1).any() for middle in middles]
        chosen = int(np.argmin(np.array(hits) + crossed - inside))  # outside of the axes counts as a hit
        right, up = CORNERS[chosen]
        covered += [middles[chosen] + np.array([shift * half[0], 0]) for shift in (-0.9, 0, 0.9)]  # its ends, middle
        style: dict[str, Any] = {"ha": "left" if right > 0 else "right", "va": "bottom" if up > 0 else "top"}
        style |= {"color": handles[name].get_color(), "size": 8.5, "zorder": 4}
        axes.annotate(note, point, (4 * right, 3 * up), textcoords="offset points", **style)


def _stairs(best: Float[np.ndarray, "n 2"]) -> Float[np.ndarray, "m 2"]:
    """Close points on the line of the front: from each of its points right to below the next one, then up to that."""
    twice = best.repeat(2, axis=0)
    corners = np.stack([twice[1:, 0], twice[:-1, 1]], axis=1)
    return np.linspace(corners[:-1], corners[1:], 30).reshape(-1, 2)


def _points(panel: Panel, series: Series, order: int) -> list[tuple[float, float, float]]:
    """The (x, y, spread) of a series, NaN unless finite; on an axis of names, several series are side by side."""
    pitch = min(0.16, 0.7 / len(panel.series)) if panel.ticks else 0.0
    shift = pitch * (order - (len(panel.series) - 1) / 2)
    spread = series.spread or [0.0] * len(series.x)
    points = [(float(x) + shift, float(y), float(bar)) for x, y, bar in zip(series.x, series.y, spread, strict=True)]
    return [point if all(map(math.isfinite, point)) else (math.nan, math.nan, math.nan) for point in points]


def _set_ticks(axes: Axes, panel: Panel, width: int) -> None:
    if panel.log_x:
        axes.set_xscale("log")
        values = {float(x) for series in panel.series for x in series.x}
        axes.xaxis.set_major_locator(_log_locator(sorted(values), *axes.get_xlim()))
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(_log_locator([], *axes.get_ylim()))
    for axis, log in ((axes.xaxis, panel.log_x), (axes.yaxis, panel.log_y)):
        if not log:
            axis.set_major_locator(MaxNLocator(min(width // 40, 6), steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    if panel.percent:
        low, high = axes.get_ylim()
        high = min(high + max(0.02 - (high - low), 0) / 2, 1.001)
        low = min(low, high - 0.02)  # do not magnify noise
        axes.set_ylim(max(low, -0.001), high)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if panel.ticks:
        fitting = int(width / len(panel.ticks) / CHARACTER)
        upright = max(len(word) for name in panel.ticks for word in name.split()) <= fitting
        labels = [textwrap.fill(name, fitting, break_on_hyphens=False) if upright else name for name in panel.ticks]
        axes.set_xticks(range(len(labels)), labels, rotation=0 if upright else 90)
        axes.set_xlim(-0.5, len(labels) - 0.5)


def _log_locator(ticks: Sequence[float], low: float, high: float) -> FixedLocator | LogLocator:
    """A tick at each of a few values with some distance between them, else round numbers."""
    decades = math.log10(high / low)
    if 0 < len(ticks) <= 8 and all(math.log10(b / a) > 0.07 * decades for a, b in itertools.pairwise(ticks)):
        return FixedLocator(ticks)
    return LogLocator(subs=(1, 2, 5) if decades < 2 else (1, 3) if decades < 3.5 else (1,), numticks=7)


def confusion(counts: Int[np.ndarray, "K K"], classes: Sequence[str]) -> Figure:
    """The confusion matrix; rows are labels, columns predictions, color is the square root of the fraction of the row.

    Counts are written for up to 12 classes, names for up to 40.
    """
    size = len(counts)
    cell = max(min(40, 480 // size), 4)
    figure, (axes,) = new_figure((cell * size + 130, cell * size + 130), layout="compressed")
    fractions = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(fractions, cmap="Blues", norm=PowerNorm(0.5, vmin=0, vmax=1), interpolation="nearest")
    axes.set(xlabel="prediction", ylabel="label")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(True)
    if size <= 40:
        names = [name if len(name) <= 16 else f"{name[:15]}…" for name in map(quoted, classes)]
        axes.set_xticks(range(size), names, rotation=90, fontsize=min(8.5, 0.6 * cell))
        axes.set_yticks(range(size), names, fontsize=min(8.5, 0.6 * cell))
    if size <= 12:
        for row, column in zip(*counts.nonzero(), strict=True):
            text, color = str(counts[row, column]), "white" if fractions[row, column] > 0.4 else INK
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=min(9, cell / len(text)))
    return figure


def reliability(
    counts: Int[np.ndarray, " b"], accuracies: Float[np.ndarray, " b"], confidences: Float[np.ndarray, " b"]
) -> Figure:
    """A reliability diagram (Guo et al. 2017, Fig. 1): accuracy over confidence in b equal bins, and their counts.

    Hatched is the gap between a bin's accuracy and its mean confidence.
    """
    bins = len(counts)
    centers = (np.arange(bins) + 0.5) / bins
    figure, (top, bottom) = new_figure((460, 480), 2)
    top.get_gridspec().set_height_ratios([3, 1])  # pyright: ignore[reportOptionalMemberAccess]
    width = 0.92 / bins
    top.bar(centers, accuracies, width, color=SERIES[0], label="accuracy", zorder=2)
    gap = {"fill": False, "hatch": "////", "edgecolor": SERIES[1], "label": "gap to the mean confidence", "zorder": 3}
    top.bar(centers, confidences - accuracies, width, bottom=accuracies, **gap)
    top.plot([0, 1], [0, 1], color=MUTED, lw=1.2, ls=(0, (5, 3)), label="calibrated", zorder=4)
    top.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    bottom.bar(centers, counts / max(counts.sum(), 1), width, color=MUTED, zorder=2)
    bottom.set(xlim=(0, 1), xlabel="confidence", ylabel="images")
    for axes in (top, bottom):
        axes.grid(axis="y", color=LINE, lw=0.7)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    figure.legend(frameon=False, fontsize=9, labelcolor=INK, loc="outside lower center", ncols=3)
    return figure
