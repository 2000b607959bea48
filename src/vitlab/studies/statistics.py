"""Means over seeds, differences between two groups of runs, and bootstrap intervals. Imports no torch.

A seed sets the initial weights, the order of the images and the crops. The test images are the same for all seeds, so
an interval says how far another seed might be, and nothing about other test images.

Intervals of few seeds are narrow. With three, the percentile interval spans the three differences (the smallest
resampled mean has a chance of 1 in 27, more than 2.5 %): it covers the true mean in 75 % of studies, not in 95 %. Five
seeds cover it in about 85 %; one seed has no interval.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from vitlab.models.config import ModelConfig
from vitlab.studies.point import Labels, Metric, Result

DRAWS = 10_000
"""Resamples. Where there are fewer in all, each is taken once, without randomness."""
COVERAGE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A metric over seeds."""

    values: tuple[float, ...]
    """In the order of the seeds."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def sd(self) -> float:
        """Standard deviation (n - 1); 0 for a single value."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else 0.0

    def __str__(self) -> str:
        """In percent: "92.1 ± 0.3"; for a single value "92.1"."""
        mean = f"{100 * self.mean:.1f}"
        return f"{mean} ± {100 * self.sd:.1f}" if len(self.values) > 1 else mean


@dataclass(frozen=True)
class Difference:
    """A mean difference with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float
    """Bounds of the interval; infinite for a single pair."""
    pairs: int
    """Number of seeds."""

    def verdict(self, expected: Literal["more", "equal"] = "more") -> str:
        """`shows`, `not clear` or `contradicted`; for groups that should be equal, `shows` or `differ`.

        The interval decides; a single seed shows nothing.
        """
        low, high = self.low, self.high
        if not (math.isfinite(low) and math.isfinite(high)):
            return "not clear"
        if expected == "equal":
            return "shows" if low <= 0 <= high else "differ"
        return "shows" if low > 0 else "contradicted" if high < 0 else "not clear"

    def __str__(self) -> str:
        """In percentage points: "+2.1 (1.3 to 2.8)"; for a single pair "+2.1 (one seed)"."""
        mean, low, high = (round(100 * value, 1) + 0.0 for value in (self.mean, self.low, self.high))  # no "-0.0"
        return f"{mean:+.1f} (one seed)" if self.pairs == 1 else f"{mean:+.1f} ({low:.1f} to {high:.1f})"


@dataclass(frozen=True)
class Results:
    """Results of a study, or of a part of its points: a table's row, or a group that differs only by the seed."""

    runs: tuple[Result, ...]
    whole: "Results | None" = None
    """All results of the study; None for these themselves."""

    def __iter__(self) -> Iterator[Result]:
        return iter(self.runs)

    @property
    def study(self) -> "Results":
        return self.whole or self

    @property
    def labels(self) -> Labels:
        """Labels of the first run."""
        return self.runs[0].point.labels

    @property
    def model(self) -> ModelConfig:
        """Model of the first run."""
        return self.runs[0].config.model

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})

    def select(self, keep: Callable[[Result], bool]) -> "Results":
        """The runs for which `keep` is true, possibly none."""
        return Results(tuple(filter(keep, self.runs)), self.study)

    def where(self, **labels: str | float) -> "Results":
        """The runs with these labels (and any others); raises ValueError where there is none."""
        chosen = self.select(lambda run: labels.items() <= run.point.labels.items())
        if not chosen.runs:
            known = sorted({f"{name}={value!r}" for run in self.runs for name, value in run.point.labels.items()})
            raise ValueError(f"no point has the labels {labels}; the points have {', '.join(known) or 'none'}.")
        return chosen

    def values(self, label: str) -> list[str | float]:
        """The distinct values of a label, in the order of the points."""
        return list(dict.fromkeys(run.point.labels[label] for run in self.runs if label in run.point.labels))

    def groups(self, *names: str) -> "list[Results]":
        """The runs grouped by these labels, or by all labels if none is given, in the order of the points.

        Runs that lack one of the labels are left out.
        """
        groups: dict[tuple, list[Result]] = {}
        for run in self.runs:
            labels = run.point.labels
            if all(name in labels for name in names):
                key = tuple(labels[name] for name in names) if names else tuple(labels.items())
                groups.setdefault(key, []).append(run)
        return [Results(tuple(runs), self.study) for runs in groups.values()]

    def mean(self, metric: Metric, **labels: str | float) -> Estimate:
        """The metric of every run with these labels, ordered by seed."""
        return Estimate(tuple(run.metric(metric) for run in sorted(self.where(**labels), key=lambda run: run.seed)))

    def best(self, label: str, metric: Metric, **labels: str | float) -> str | float:
        """The value of `label` with the highest mean of the metric, among the runs with these other labels."""
        runs = self.where(**labels)
        return max(runs.values(label), key=lambda value: runs.mean(metric, **{label: value}).mean)

    def difference(
        self, metric: Metric, more: Labels | Sequence[Labels], less: Labels | Sequence[Labels]
    ) -> Difference:
        """By how much the metric of the group `more` exceeds that of the group `less`, paired by seed.

        For two groups on each side it is a difference of differences: more[0] + more[1] - less[0] - less[1].
        """
        above, below = (_groups(side) for side in (more, less))
        sides = [self.where(**labels) for labels in (*above, *below)]
        seeds = set.intersection(*(set(side.seeds) for side in sides))
        if not seeds:
            raise ValueError(f"no seed has points of both {more} and {less}.")

        def measure(runs: Results) -> float:
            high, low = (sum(runs.mean(metric, **labels).mean for labels in side) for side in (above, below))
            return high - low

        return self.select(lambda run: run.seed in seeds).over_seeds(measure)

    def over_seeds(self, measure: "Callable[[Results], float]") -> Difference:
        """Mean and interval of a difference that is measured on the runs of each seed."""
        values = np.array([measure(self.select(lambda run, seed=seed: run.seed == seed)) for seed in self.seeds])
        return Difference(float(values.mean()), *interval(values), len(values))


def _groups(side: Labels | Sequence[Labels]) -> list[Labels]:
    return [side] if isinstance(side, Mapping) else list(side)


def interval(values: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Bounds of the percentile bootstrap interval of the mean: infinite for one value, NaN where one is not finite.

    The bounds are means of resamples, not interpolated between two of them.
    """
    count = len(values)
    if count == 1:
        return -math.inf, math.inf
    if not np.isfinite(values).all():
        return math.nan, math.nan
    if count**count <= DRAWS:
        drawn = np.array(list(itertools.product(range(count), repeat=count)))
    else:
        drawn = np.random.default_rng(0).integers(0, count, (DRAWS, count))
    means = values[drawn].mean(axis=1)
    low, high = np.quantile(means, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2], method="inverted_cdf")
    return float(low), float(high)
