"""What a panel refuses, and the Pareto front."""

import math

import pytest

from vitlab.inspect.panels import Panel, Series, front


def test_the_front_is_what_nothing_beats_in_both() -> None:
    points = [(4, 0.7), (1, 0.5), (2, 0.55), (2, 0.6), (3, 0.6), (5, 0.9), (8, 0.9)]
    assert front(points) == [(1, 0.5), (2, 0.6), (4, 0.7), (5, 0.9)]
    for cost, gain in points:
        beaten = any(c <= cost and g >= gain and (c, g) != (cost, gain) for c, g in points)
        assert ((cost, gain) in front(points)) is not beaten


def test_the_front_leaves_out_what_is_not_finite() -> None:
    assert front([(1, math.nan), (2, 0.5), (0.5, math.inf), (math.nan, 0.9)]) == [(2, 0.5)]
    assert front([]) == []


def test_a_series_of_two_lengths_is_refused() -> None:
    with pytest.raises(AssertionError, match="2 x and 1 y"):
        Series("a", [1, 2], [0.5])
    with pytest.raises(AssertionError, match="1 bars"):
        Series("a", [1, 2], [0.5, 0.6], [0.1])
    with pytest.raises(AssertionError, match="3 notes"):
        Series("a", [1, 2], [0.5, 0.6], notes=["a", "b", "c"])


def test_a_panel_refuses_what_it_cannot_place() -> None:
    with pytest.raises(AssertionError, match="no place for 0"):
        Panel("P", "x", "y", [Series("a", [0, 1], [0.5, 0.6])], log_x=True)
    with pytest.raises(AssertionError, match="no place for 0"):
        Panel("P", "x", "y", [Series("a", [1, 2], [0.5, 0])], log_y=True, percent=False)
    with pytest.raises(AssertionError, match="a share has no logarithmic axis"):
        Panel("P", "x", "y", [Series("a", [1, 2], [0.5, 0.6])], log_y=True)
    with pytest.raises(AssertionError, match="a place without a name"):
        Panel("P", "x", "y", [Series("a", [0, 2], [0.5, 0.6])], ticks=["none", "1-D"])
