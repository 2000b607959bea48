"""The contents of a plot as plain data, without matplotlib; `plots` draws it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Series:
    """Points of one series; `spread` is drawn as an error bar."""

    name: str
    x: Sequence[float | int]
    y: Sequence[float | int]
    spread: Sequence[float | int] = ()
    notes: Sequence[str] = ()
    """Text next to each point, or empty; as many as points. For a few of them."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes. The points of a series are joined by a line, unless x is a name or the front is drawn."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    ticks: Sequence[str] = ()
    """Names of x = 0, 1, 2, ... where x is not a number."""
    front: bool = False
    """Draws the Pareto front."""
    percent: bool = True
    """Whether y is a fraction, shown in percent."""


def front(points: Sequence[tuple[float | int, float | int]]) -> list[tuple[float | int, float | int]]:
    """The (cost, gain) of the Pareto front, by cost: each has more gain than all that cost as much or less.

    Points that are not finite are ignored.
    """
    best, points_of_front = -math.inf, []
    for cost, gain in sorted(filter(lambda point: all(map(math.isfinite, point)), points), key=lambda p: (p[0], -p[1])):
        if gain > best:
            best = gain
            points_of_front.append((cost, gain))
    return points_of_front
