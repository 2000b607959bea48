"""Statistics over the seeds of a study: spread, intervals, and the verdict on a claim."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

CONFIDENCE, POWER = 0.95, 0.8


def std(values: Float[np.ndarray, " n"]) -> float:
    """Standard deviation over seeds (n - 1); 0 for a single value."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def format_percent(values: Float[np.ndarray, " n"]) -> str:
    """Mean and standard deviation over seeds in percent: "92.1 ± 0.3"; for a single value "92.1"."""
    mean = f"{100 * values.mean():.1f}"
    return f"{mean} ± {100 * std(values):.1f}" if len(values) > 1 else mean


Verdict = Literal["supported", "contradicted", "inconclusive", "not tested"]


@dataclass(frozen=True)
class Difference:
    """A mean difference over paired seeds with its 95% interval, Student's t."""

    mean: float
    low: float
    high: float
    """Bounds of the interval; infinite for a single pair."""
    detectable: float
    """The true difference that as many seeds of this spread show with a probability of 80%; infinite for one pair."""
    pairs: int
    """Number of seeds."""

    def verdict(self, expected: Literal["more", "equal"], relevant: float) -> Verdict:
        """By the interval alone. `relevant` is the smallest difference that counts as one, 0.01 a percentage point.

        more: supported where all of the interval is above 0, contradicted where all of it is below `relevant`.
        equal: supported where all of it is within +-`relevant`, contradicted where all of it is outside.
        """
        if expected == "more":
            return "supported" if self.low > 0 else "contradicted" if self.high < relevant else "inconclusive"
        if -relevant < self.low and self.high < relevant:
            return "supported"
        return "contradicted" if self.low >= relevant or self.high <= -relevant else "inconclusive"

    def __str__(self) -> str:
        """In percentage points: "+2.1 (1.3 to 2.8)"; for a single pair "+2.1 (one seed)"."""
        mean, low, high = (round(100 * value, 1) + 0.0 for value in (self.mean, self.low, self.high))  # no "-0.0"
        return f"{mean:+.1f} (one seed)" if self.pairs == 1 else f"{mean:+.1f} ({low:.1f} to {high:.1f})"


def paired_difference(values: Float[np.ndarray, " n"]) -> Difference:
    """Mean, interval and detectable difference of one difference per seed; NaN where one of them is NaN."""
    count = len(values)
    if count == 1:
        return Difference(float(values[0]), -math.inf, math.inf, math.inf, 1)
    error = std(values) / math.sqrt(count)
    half_width, power = (float(stdtrit(count - 1, p)) * error for p in (0.5 + CONFIDENCE / 2, POWER))
    mean = float(values.mean())
    return Difference(mean, mean - half_width, mean + half_width, half_width + power, count)
