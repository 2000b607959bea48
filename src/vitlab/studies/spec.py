"""What a study consists of: points, a table, claims and charts, as data. Imports no torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from vitlab.inspect.panels import Panel
from vitlab.studies.point import Labels, Metric, Point, Scale
from vitlab.studies.statistics import Difference, Results

SEEDS = (0, 1, 2)
Item = TypeVar("Item")
PerResults = Item | Callable[[Results], Item]
"""A constant, or a function of the study's results."""
Cell = str | Callable[[Results], str]
"""A cell of a table: the name of a label, or a function of the row's results."""


@dataclass(frozen=True)
class Claim:
    """A statement of the paper about a difference between two groups of runs."""

    text: str
    """A full sentence about the expected outcome."""
    paper: str
    """The paper's numbers and their place: "0.614 against 0.642 (Table 8)"."""
    metric: Metric = ""
    more: Labels | Sequence[Labels] = ()
    less: Labels | Sequence[Labels] = ()
    """The group that is expected to be ahead, and the other; two groups each are a difference of differences."""
    expected: Literal["more", "equal"] = "more"
    """`equal`: the paper sees no difference beyond noise."""
    per_seed: Callable[[Results], float] | None = None
    """In place of metric and groups: the difference, measured on the results of one seed."""

    def measure(self, results: Results) -> Difference:
        """The difference in these results, in shares: 0.01 is one percentage point."""
        if self.per_seed is not None:
            return results.over_seeds(self.per_seed)
        return results.difference(self.metric, self.more, self.less)


@dataclass(frozen=True)
class Chart:
    """A metric of every group of runs over a label, or over a number computed from the group."""

    title: str
    y_label: str
    metric: Metric
    x: str | Callable[[Results], float]
    """A label, or a function of a group."""
    lines: str | Callable[[Results], str | Sequence[str]]
    """The line that a group belongs to: the value of a label, or a function that returns one or several names."""
    x_label: str = ""
    categories: bool = False
    """Whether x is a label whose values are names."""
    names: Mapping[Any, str] = field(default_factory=dict)
    """How the values of labels are written; also their order on an axis of categories."""
    where: Callable[[Results], bool] | None = None
    """Which groups are drawn; None draws all."""
    note: Callable[[Results], str] | None = None
    """A word beside a group's point."""
    log_x: bool = False
    front: bool = False
    """Draw the Pareto front in place of lines."""


@dataclass(frozen=True)
class Study:
    """A study of the paper: which runs, and what the report makes of them."""

    name: str
    source: str
    """Place in the paper: "Table 8, App. D.4"."""
    question: str
    variants: Callable[[Scale], Sequence[Point]]
    """The points of one seed; those that others start from come first."""
    summary: PerResults[str]
    """Markdown: what is compared, in one or two sentences. The report adds data, steps and seeds."""
    rows: tuple[str, ...]
    """The labels that identify a row of the table."""
    columns: PerResults[Mapping[str, Cell]]
    claims: PerResults[Sequence[Claim]]
    charts: PerResults[Sequence[Chart | Panel]]
    seeds: tuple[int, ...] = SEEDS

    def points(self, scale: Scale) -> list[Point]:
        """Every variant at every seed; at the paper's scale with the first seed only."""
        variants = self.variants(scale)
        return [
            point.with_seed(seed) for seed in (self.seeds[:1] if scale == "paper" else self.seeds) for point in variants
        ]


def resolve(value: Any, results: Results) -> Any:
    """The value of a PerResults."""
    return value(results) if callable(value) else value


def share(metric: Metric, **labels: str | float) -> Callable[[Results], str]:
    """Cell: the metric in percent, of the runs of the row with these labels; empty where there are none."""

    def cell(row: Results) -> str:
        runs = row.select(lambda run: labels.items() <= run.point.labels.items())
        return str(runs.mean(metric)) if runs.runs else ""

    return cell


def named(label: str, names: Mapping[Any, str]) -> Callable[[Results], str]:
    """Cell: the name of the row's value of a label."""
    return lambda row: names[row.labels[label]]
