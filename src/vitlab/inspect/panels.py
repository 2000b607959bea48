"""The contents of a study's figure as plain data; `plots` draws it."""

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
    """Text beside each point."""
    dashed: bool = False

    def __post_init__(self) -> None:
        count = len(self.x)
        assert len(self.y) == count, f"{self.name}: {count} x and {len(self.y)} y"
        assert len(self.spread) in (0, count), f"{self.name}: {count} points and {len(self.spread)} bars"
        assert len(self.notes) in (0, count), f"{self.name}: {count} points and {len(self.notes)} notes"


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

    def __post_init__(self) -> None:
        xs = [x for series in self.series for x in series.x]
        assert not self.log_x or all(x > 0 for x in xs), f"{self.title}: no place for 0 on a logarithmic axis"
        values = [y for series in self.series for y in series.y]
        assert not self.log_y or all(y > 0 for y in values), f"{self.title}: no place for 0 on a logarithmic axis"
        assert not (self.log_y and self.percent), f"{self.title}: a share has no logarithmic axis"
        assert not self.ticks or set(xs) <= set(range(len(self.ticks))), f"{self.title}: a place without a name"


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
