"""The Pareto front."""

import math

from vitlab.panels import front


def test_nothing_beats_a_point_of_the_front_in_both() -> None:
    points = [(4, 0.7), (1, 0.5), (2, 0.55), (2, 0.6), (3, 0.6), (5, 0.9), (8, 0.9)]
    assert front(points) == [(1, 0.5), (2, 0.6), (4, 0.7), (5, 0.9)]
    for cost, gain in points:
        beaten = any(c <= cost and g >= gain and (c, g) != (cost, gain) for c, g in points)
        assert ((cost, gain) in front(points)) is not beaten
    assert front([(1, math.nan), (2, 0.5), (0.5, math.inf), (math.nan, 0.9)]) == [(2, 0.5)]
