"""Means over seeds, and differences with their bootstrap intervals.

A seed sets the initial weights, the order of the images and the crops. The test images are the same for all seeds, so
an interval says how far another seed might be, and nothing about other test images.

Intervals of few seeds are narrow. With three, the percentile interval spans the three differences (the smallest
resampled mean has a chance of 1 in 27, more than 2.5 %): it covers the true mean in 75 % of studies, not in 95 %. Five
seeds cover it in about 85 %; one seed has no interval.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

CONFIDENCE = 0.95


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


def interval(values: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Bounds of the percentile bootstrap interval of the mean: infinite for one value, NaN where one is not finite.

    Every resample is taken once, without randomness, which is for five seeds at most. The bounds are means of
    resamples, not interpolated between two of them.
    """
    if len(values) == 1:
        return -math.inf, math.inf
    if not np.isfinite(values).all():
        return math.nan, math.nan
    means = np.array(list(itertools.product(values, repeat=len(values)))).mean(axis=1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="inverted_cdf")
    return float(low), float(high)
