"""Intervals over seeds and the verdicts that follow from them, against a table of Student's t and by simulation."""

import math

import numpy as np
import pytest

from vitlab.studies.statistics import Difference, format_percent, paired_difference


def test_student_s_interval_of_three_and_five_seeds() -> None:
    """By hand: the quantiles of a t-table, times the standard error."""
    three = paired_difference(np.array([0.01, 0.02, 0.03]))  # s = 0.01
    error = 0.01 / math.sqrt(3)
    assert (three.low, three.high) == pytest.approx((0.02 - 4.3027 * error, 0.02 + 4.3027 * error), abs=1e-6)
    assert three.detectable == pytest.approx((4.3027 + 1.0607) * error, rel=1e-4)
    five = paired_difference(np.array([0.00, 0.01, 0.02, 0.03, 0.04]))  # s^2 = 0.00025
    error = math.sqrt(0.00025 / 5)
    assert (five.low, five.high) == pytest.approx((0.02 - 2.7764 * error, 0.02 + 2.7764 * error), abs=1e-6)
    assert five.detectable == pytest.approx((2.7764 + 0.9410) * error, rel=1e-4)


@pytest.mark.parametrize("seeds", [3, 5])
def test_intervals_cover_95_percent_and_detect_in_80(seeds: int) -> None:
    draws = np.random.default_rng(0).standard_normal((4000, seeds))
    assert np.mean([d.low <= 0 <= d.high for d in map(paired_difference, draws)]) == pytest.approx(0.95, abs=0.01)
    typical = paired_difference(np.linspace(-1, 1, seeds) / np.linspace(-1, 1, seeds).std(ddof=1)).detectable
    assert np.mean([paired_difference(values + typical).low > 0 for values in draws]) == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize(
    ("low", "high", "more", "equal"),
    [
        (0.01, 0.03, "supported", "contradicted"),
        (0.001, 0.004, "supported", "supported"),
        (0.001, 0.03, "supported", "inconclusive"),
        (-0.01, 0.03, "inconclusive", "inconclusive"),
        (0.0, 0.03, "inconclusive", "inconclusive"),
        (-0.02, 0.004, "contradicted", "inconclusive"),
        (-0.004, 0.004, "contradicted", "supported"),
        (-0.03, -0.01, "contradicted", "contradicted"),
        (-math.inf, math.inf, "inconclusive", "inconclusive"),
        (math.nan, math.nan, "inconclusive", "inconclusive"),
    ],
)
def test_the_interval_decides_a_claim(low: float, high: float, more: str, equal: str) -> None:
    """Where half a point is the smallest difference that counts."""
    measured = Difference((low + high) / 2, low, high, 0.01, 3)
    assert measured.verdict("more", 0.005) == more
    assert measured.verdict("equal", 0.005) == equal


def test_an_interval_needs_seeds_and_finite_values() -> None:
    assert paired_difference(np.array([0.1])) == Difference(0.1, -math.inf, math.inf, math.inf, 1)
    assert math.isnan(paired_difference(np.array([0.1, math.nan, 0.2])).low)
    assert format_percent(np.array([0.918, 0.921, 0.924])) == "92.1 ± 0.3"
    assert format_percent(np.array([0.9214])) == "92.1"
    assert str(Difference(-0.0001, -0.01, 0.01, 0.01, 3)) == "+0.0 (-1.0 to 1.0)"
