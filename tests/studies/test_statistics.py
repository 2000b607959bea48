"""Means, pairs and intervals, against values worked out by hand."""

import dataclasses
import itertools
import math
import subprocess
import sys

import numpy as np
import pytest

from vitlab.config import TrainConfig
from vitlab.models.config import ViTConfig
from vitlab.studies import statistics
from vitlab.studies.statistics import Estimate, difference, estimate, interval, percent, points
from vitlab.studies.study import Difference, Done, Point

CONFIG = TrainConfig(model=ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=1, mlp_dim=8), steps=1)


def run(seed: int, value: float, **labels: str | float) -> Done:
    name = "-".join(map(str, [*labels.values(), seed]))
    return Done(Point(name, dataclasses.replace(CONFIG, seed=seed), labels), {"accuracy": value}, [], 100)


RUNS = [
    run(2, 0.60, kind="1d", at="stem"),
    run(0, 0.64, kind="1d", at="stem"),
    run(1, 0.62, kind="1d", at="stem"),
    run(0, 0.60, kind="1d", at="every"),
    run(0, 0.50, kind="none"),
    run(1, 0.51, kind="none"),
    run(7, 0.99, kind="none"),
]


def test_an_estimate_holds_the_points_with_its_labels_by_seed() -> None:
    found = estimate(RUNS, "accuracy", kind="1d", at="stem")
    assert found.values == (0.64, 0.62, 0.60)
    assert found.mean == pytest.approx(0.62)
    assert found.sd == pytest.approx(0.02)  # n - 1: sqrt((0.02^2 + 0.02^2) / 2)
    assert len(estimate(RUNS, "accuracy").values) == len(RUNS)
    assert estimate(RUNS, "accuracy", kind="1d").values == (0.64, 0.60, 0.62, 0.60)  # in their order within a seed


def test_a_number_is_a_label_like_any_other() -> None:
    runs = [run(0, 0.1, depth=8.0), run(0, 0.2, depth=16.0)]
    assert estimate(runs, "accuracy", depth=16.0) == Estimate((0.2,))


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"no point has the labels .*'2d'.*kind='1d', kind='none'"):
        estimate(RUNS, "accuracy", kind="2d")
    with pytest.raises(ValueError, match="no point has the labels"):
        estimate(RUNS, "accuracy", color="1d")
    with pytest.raises(ValueError, match=r"1d-stem-2 has no figure 'fewshot_5shot'; it has accuracy"):
        estimate(RUNS, "fewshot_5shot", kind="1d")
    with pytest.raises(ValueError, match=r"no seed has points of both .*\[0\].*\[7\]"):
        difference(RUNS[3:4] + RUNS[-1:], "accuracy", {"kind": "1d"}, {"kind": "none"})


def test_a_difference_is_paired_by_seed() -> None:
    found = difference(RUNS, "accuracy", {"kind": "1d"}, {"kind": "none"})
    # seed 0: (0.64 + 0.60) / 2 - 0.50; seed 1: 0.62 - 0.51; seeds 2 and 7 have no partner
    assert found.pairs == 2
    assert (found.mean, found.low, found.high) == pytest.approx((0.115, 0.11, 0.12))
    turned = difference(RUNS, "accuracy", {"kind": "none"}, {"kind": "1d"})
    assert (turned.mean, turned.low, turned.high) == pytest.approx((-0.115, -0.12, -0.11))


def test_pairing_removes_what_the_seeds_share() -> None:
    runs = [run(seed, 0.1 * seed + more, kind=kind) for seed in range(3) for kind, more in (("a", 0.01), ("b", 0))]
    found = difference(runs, "accuracy", {"kind": "a"}, {"kind": "b"})
    assert (found.low, found.high) == pytest.approx((0.01, 0.01))


def test_one_seed_has_no_interval() -> None:
    found = difference(RUNS, "accuracy", {"at": "every"}, {"kind": "none"})
    assert (found.mean, found.low, found.high, found.pairs) == (pytest.approx(0.1), -math.inf, math.inf, 1)
    assert points(found) == "+10.0 (one seed)"


def test_a_figure_that_is_not_finite_leaves_no_interval() -> None:
    assert all(map(math.isnan, interval(np.array([0.1, math.nan, 0.2]))))


def test_three_seeds_span_their_differences() -> None:
    # 27 resamples: the smallest mean is that of one seed three times, and 1 / 27 > 2.5 %
    assert interval(np.array([0.03, -0.01, 0.02])) == pytest.approx((-0.01, 0.03))


def test_few_seeds_take_every_resample_once() -> None:
    values = (0.0, 0.1, 0.2, 0.4, 1.0)
    means = sorted(sum(drawn) / 5 for drawn in itertools.product(values, repeat=5))
    assert len(means) == 3125 <= statistics.DRAWS
    low, high = means[math.ceil(0.025 * 3125) - 1], means[math.ceil(0.975 * 3125) - 1]
    assert interval(np.array(values)) == pytest.approx((low, high))
    assert interval(np.array(values[::-1])) == pytest.approx((low, high))


def test_many_seeds_draw_the_same_each_time_and_near_the_normal_interval() -> None:
    values = np.random.default_rng(5).normal(0.3, 0.1, 40)
    low, high = interval(values)
    assert (low, high) == interval(values)
    half = 1.96 * values.std() / math.sqrt(40)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.15 * half)


@pytest.mark.parametrize(("count", "held"), [(2, 0.50), (3, 0.75), (5, 0.85)])
def test_intervals_of_few_seeds_hold_less_than_they_are_called(count: int, held: float) -> None:
    """What the file says of them, of 800 studies of normal differences around 0."""
    draws = np.random.default_rng(0).standard_normal((800, count))
    hits = [low <= 0 <= high for low, high in map(interval, draws)]
    assert np.mean(hits) == pytest.approx(held, abs=0.04)


def test_spelling() -> None:
    assert percent(Estimate((0.918, 0.921, 0.924))) == "92.1 ± 0.3"
    assert percent(Estimate((0.9214,))) == "92.1"
    assert points(Difference(0.0214, 0.0131, 0.0279, 3)) == "+2.1 (1.3 to 2.8)"
    assert points(Difference(-0.0214, -0.0279, -0.0001, 3)) == "-2.1 (-2.8 to 0.0)"
    assert points(Difference(-0.0001, -0.01, 0.01, 3)) == "+0.0 (-1.0 to 1.0)"


def test_it_needs_no_torch() -> None:
    command = "import sys, vitlab.studies.statistics, vitlab.studies.study; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "matplotlib"} & set(loaded)
    assert "vitlab.studies.study" in loaded
