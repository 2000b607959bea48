"""Means over seeds, and what can be said of a difference between two of them.

A seed is one run: its own initial weights, order of the images and crops. The test images are the same throughout,
so an interval here says how far another seed might lead, and nothing of other test images or other data.

Few seeds carry little. The percentile interval of three is from the smallest of the three differences to the largest
(for the smallest mean that can be drawn, three times the smallest, has a chance of 1 in 27, more than 2.5 %): it holds
the middle of all differences in 75 of 100 such studies, not in 95. Where there is no difference at all, all three
seeds point the same way once in four times. That of five seeds holds it in about 85 of 100, and of one there is none.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from vitlab.errors import UserError
from vitlab.studies.study import Difference, Done

DRAWS = 10_000
"""Resamples, where there are more than so many in all; else each is taken once, and chance has no part in it."""
COVERAGE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure over seeds."""

    values: tuple[float, ...]
    """In the order of the seeds."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def sd(self) -> float:
        """Standard deviation (n - 1); 0 of a single value."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else 0.0


def estimate(done: Sequence[Done], figure: str, **labels: str | float) -> Estimate:
    """The figure of every point that has these labels (and any others), by seed.

    Raises ValueError where there is no such point, or one of them has no such figure.
    """
    return Estimate(tuple(value for _, value in _values(done, figure, labels)))


def difference(
    done: Sequence[Done],
    figure: str,
    more: Mapping[str, str | float],
    less: Mapping[str, str | float],
) -> Difference:
    """By how much the figure of the points with the labels `more` exceeds that of those with the labels `less`.

    Paired by seed: of each seed that both have, the mean over its points of the one less that of the other; then the
    mean over seeds, and its percentile bootstrap interval over seeds.
    Raises ValueError where a side has no point or no such figure, or the two have no seed in common.
    """
    above, below = _by_seed(done, figure, more), _by_seed(done, figure, less)
    seeds = sorted(above.keys() & below.keys())
    if not seeds:
        raise UserError(
            f"no seed has points of both {dict(more)} (seeds {sorted(above)}) and {dict(less)} (seeds {sorted(below)})."
        )
    return _over([above[seed] - below[seed] for seed in seeds])


def over_seeds(done: Sequence[Done], of: Callable[[Sequence[Done]], float]) -> Difference:
    """What `of` says of the points of each seed, where it is a difference already: mean and interval over seeds."""
    seeds = sorted({each.seed for each in done})
    return _over([of([each for each in done if each.seed == seed]) for seed in seeds])


def _over(differences: Sequence[float]) -> Difference:
    values = np.array(differences)
    return Difference(float(values.mean()), *interval(values), len(values))


def interval(values: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Bounds of the percentile bootstrap interval of the mean: infinite for one value, NaN where one is not finite.

    The bounds are means that some resample has, not points between two of them.
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


def percent(estimate: Estimate) -> str:
    """Mean and standard deviation of a share: "92.1 ± 0.3"; of a single value "92.1"."""
    mean = f"{100 * estimate.mean:.1f}"
    return f"{mean} ± {100 * estimate.sd:.1f}" if len(estimate.values) > 1 else mean


def points(difference: Difference) -> str:
    """A difference of shares in percentage points: "+2.1 (1.3 to 2.8)"; of a single pair "+2.1 (one seed)"."""
    mean = f"{_tenths(difference.mean):+.1f}"
    if difference.pairs == 1:
        return f"{mean} (one seed)"
    return f"{mean} ({_tenths(difference.low):.1f} to {_tenths(difference.high):.1f})"


def _tenths(share: float) -> float:
    """In percent to one decimal, without a zero below zero."""
    return round(100 * share, 1) + 0.0


def _values(done: Sequence[Done], figure: str, labels: Mapping[str, str | float]) -> list[tuple[int, float]]:
    """(seed, figure) of the points with these labels, by seed."""
    absent = object()
    found = [each for each in done if all(each.point.labels.get(name, absent) == labels[name] for name in labels)]
    if not found:
        known = sorted({f"{name}={value!r}" for each in done for name, value in each.point.labels.items()})
        raise UserError(f"no point has the labels {dict(labels)}; the points have {', '.join(known) or 'none'}.")
    for each in found:
        if figure not in each.figures:
            raise UserError(f"{each.point.name} has no figure {figure!r}; it has {', '.join(sorted(each.figures))}.")
    return sorted(((each.seed, float(each.figures[figure])) for each in found), key=lambda pair: pair[0])


def _by_seed(done: Sequence[Done], figure: str, labels: Mapping[str, str | float]) -> dict[int, float]:
    pairs = _values(done, figure, labels)
    return {seed: float(np.mean([value for at, value in pairs if at == seed])) for seed, _ in pairs}
