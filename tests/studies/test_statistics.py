"""Means, pairs and intervals, against values worked out by hand."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest

from vitlab.config import TrainConfig
from vitlab.models.config import ViTConfig
from vitlab.studies.presets import changed
from vitlab.studies.spec import Point, Result, Results
from vitlab.studies.statistics import Difference, Estimate, interval

CONFIG = TrainConfig(model=ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=1, mlp_dim=8), steps=1)


def run(seed: int, value: float, **labels: str | float) -> Result:
    name = "-".join(map(str, [*labels.values(), seed]))
    return Result(Point(name, changed(CONFIG, seed=seed), labels), {"accuracy": value}, [], 100, CONFIG.model)


RUNS = Results(
    (
        run(2, 0.60, kind="1d", at="stem"),
        run(0, 0.64, kind="1d", at="stem"),
        run(1, 0.62, kind="1d", at="stem"),
        run(0, 0.60, kind="1d", at="every"),
        run(0, 0.50, kind="none"),
        run(1, 0.51, kind="none"),
        run(2, 0.52, kind="none"),
    )
)


def test_a_mean_is_over_the_points_with_its_labels_by_seed() -> None:
    estimate = RUNS.mean("accuracy", kind="1d", at="stem")
    assert estimate.values == (0.64, 0.62, 0.60)
    assert estimate.mean == pytest.approx(0.62)
    assert estimate.sd == pytest.approx(0.02)  # n - 1: sqrt((0.02^2 + 0.02^2) / 2)
    assert RUNS.mean("accuracy", kind="1d").values == (0.64, 0.60, 0.62, 0.60)
    assert RUNS.mean(lambda result: 2 * result.figures["accuracy"], kind="1d", at="every").values == (1.2,)
    with pytest.raises(ValueError, match="2d"):
        RUNS.mean("accuracy", kind="2d")


def test_groups_and_values_are_in_the_order_of_the_points() -> None:
    assert RUNS.values("kind") == ["1d", "none"]
    assert [dict(group.labels) for group in RUNS.groups()] == [
        {"kind": "1d", "at": "stem"},
        {"kind": "1d", "at": "every"},
        {"kind": "none"},
    ]
    assert [len(group.runs) for group in RUNS.groups("kind")] == [4, 3]
    assert [len(group.runs) for group in RUNS.groups("kind", "at")] == [3, 1]
    assert all(group.study is RUNS for group in RUNS.groups())


def test_the_best_is_that_of_the_mean() -> None:
    """`a` is best at 0.2 although one seed is better at 0.1; of equal ones the first."""
    table = {("a", 0.1): (0.6, 0.2), ("a", 0.2): (0.5, 0.5), ("b", 0.1): (0.3, 0.3), ("b", 0.2): (0.3, 0.3)}
    runs = [run(s, v[s], kind=kind, rate=rate) for (kind, rate), v in table.items() for s in (0, 1)]
    assert Results(tuple(runs)).best("rate", "accuracy", kind="a") == 0.2
    assert Results(tuple(runs)).best("rate", "accuracy", kind="b") == 0.1


def test_a_difference_is_paired_by_seed() -> None:
    difference = RUNS.difference("accuracy", {"kind": "1d"}, {"kind": "none"})
    # seed 0: (0.64 + 0.60) / 2 - 0.50; seed 1: 0.62 - 0.51; seed 2: 0.60 - 0.52
    assert difference.pairs == 3
    assert (difference.mean, difference.low, difference.high) == pytest.approx((0.31 / 3, 0.08, 0.12))
    opposite = RUNS.difference("accuracy", {"kind": "none"}, {"kind": "1d"})
    assert (opposite.low, opposite.high) == pytest.approx((-0.12, -0.08))


def test_a_difference_of_differences() -> None:
    """`a` rises by 0.2, `b` by 0.13 and by 0.10 with one seed."""
    values = {("a", 0.0): 0.3, ("a", 1.0): 0.5, ("b", 0.0): 0.35, ("b", 1.0): 0.48}
    runs = [
        run(seed, value - 0.03 * (seed == 2 and (kind, part) == ("b", 1.0)), kind=kind, part=part)
        for (kind, part), value in values.items()
        for seed in range(3)
    ]
    groups = {(kind, part): {"kind": kind, "part": part} for kind, part in values}
    difference = Results(tuple(runs)).difference(
        "accuracy", (groups["a", 1.0], groups["b", 0.0]), (groups["a", 0.0], groups["b", 1.0])
    )
    assert (difference.low, difference.mean, difference.high) == pytest.approx((0.07, 0.08, 0.10))


def test_an_interval_needs_seeds_and_finite_values() -> None:
    assert interval(np.array([0.1])) == (-math.inf, math.inf)
    assert all(map(math.isnan, interval(np.array([0.1, math.nan, 0.2]))))


def test_few_seeds_take_every_resample_once() -> None:
    values = (0.0, 0.1, 0.2, 0.4, 1.0)
    means = sorted(sum(drawn) / 5 for drawn in itertools.product(values, repeat=5))
    low, high = means[math.ceil(0.025 * 3125) - 1], means[math.ceil(0.975 * 3125) - 1]
    assert interval(np.array(values)) == pytest.approx((low, high))
    # 27 resamples of three: the smallest mean is that of one seed three times, and 1 / 27 > 2.5 %
    assert interval(np.array([0.03, -0.01, 0.02])) == pytest.approx((-0.01, 0.03))


@pytest.mark.parametrize(("count", "covered"), [(2, 0.50), (3, 0.75), (5, 0.85)])
def test_intervals_of_few_seeds_cover_less_than_95_percent(count: int, covered: float) -> None:
    draws = np.random.default_rng(0).standard_normal((800 if count < 5 else 300, count))
    hits = [low <= 0 <= high for low, high in map(interval, draws)]
    assert np.mean(hits) == pytest.approx(covered, abs=0.04)


@pytest.mark.parametrize(
    ("low", "high", "pairs", "more", "equal"),
    [
        (0.01, 0.03, 3, "shows", "differ"),
        (-0.01, 0.03, 3, "not clear", "shows"),
        (0.0, 0.03, 3, "not clear", "shows"),
        (-0.03, 0.0, 3, "not clear", "shows"),
        (-0.03, -0.01, 3, "contradicted", "differ"),
        (-math.inf, math.inf, 1, "not clear", "not clear"),
        (math.nan, math.nan, 3, "not clear", "not clear"),
    ],
)
def test_the_interval_decides_a_claim(low: float, high: float, pairs: int, more: str, equal: str) -> None:
    measured = Difference((low + high) / 2 if pairs > 1 else 0.5, low, high, pairs)
    assert measured.verdict() == more
    assert measured.verdict("equal") == equal


def test_format() -> None:
    assert str(Estimate((0.918, 0.921, 0.924))) == "92.1 ± 0.3"
    assert str(Estimate((0.9214,))) == "92.1"
    assert str(Difference(0.0214, 0.0131, 0.0279, 3)) == "+2.1 (1.3 to 2.8)"
    assert str(Difference(-0.0001, -0.01, 0.01, 3)) == "+0.0 (-1.0 to 1.0)"
    assert str(Difference(0.1, -math.inf, math.inf, 1)) == "+10.0 (one seed)"


def test_studies_need_no_torch() -> None:
    command = "import sys, vitlab.studies; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "matplotlib"} & set(loaded)
    assert "vitlab.studies.spec" in loaded
