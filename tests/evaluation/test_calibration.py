"""Calibration and rejection against plain loops, and against values from tables."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch.nn.functional import cross_entropy

from vitlab.evaluation.calibration import (
    BINS,
    TEMPERATURES,
    Calibrator,
    accuracy_interval,
    calibrate,
    choose_rejection,
    choose_temperature,
)


def made(decimals: int, n: int = 400) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    confidences = rng.uniform(0.2, 1, n).astype(np.float32).round(decimals)
    return confidences, rng.random(n) < confidences**2


def test_the_error_is_the_mean_gap_of_the_images() -> None:
    confidences, correct = made(decimals=7)
    result = calibrate(confidences, correct)
    gaps = 0.0
    for b in range(BINS):
        members = [i for i, p in enumerate(confidences) if b / BINS < p <= (b + 1) / BINS]
        assert result.counts[b] == len(members)
        if members:
            assert result.accuracies[b] == pytest.approx(np.mean(correct[members]))
            assert result.confidences[b] == pytest.approx(np.mean(confidences[members], dtype=np.float64))
            gaps += abs(sum(correct[members]) - sum(map(float, confidences[members])))
        else:
            assert np.isnan(result.accuracies[b])
    assert result.error == pytest.approx(gaps / len(correct))
    assert result.error > 0.05  # overconfident by construction


@pytest.mark.parametrize("factor", [0.6, 1.0, 5.0])
def test_the_temperature_undoes_a_factor(factor: float) -> None:
    """Labels are drawn from the softmax of logits, which are then multiplied."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(5_000, 4, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator)[:, 0]

    def losses(temperature: float) -> torch.Tensor:
        return cross_entropy(factor * logits / temperature, labels, reduction="none")

    found: Any = minimize_scalar(lambda t: float(losses(t).mean()), bounds=(0.1, 20), method="bounded")
    chosen = choose_temperature((factor * logits).numpy(), labels.numpy())
    assert chosen == pytest.approx(found.x, rel=0.1)  # half a step of the grid
    assert chosen == pytest.approx(factor, rel=0.15)


def test_few_images_that_are_all_right_do_not_make_it_certain() -> None:
    logits = np.tile(np.array([3, 0], np.float32), (20, 1))
    assert choose_temperature(logits, np.zeros(20, int)) == 1.0
    assert choose_temperature(np.tile(logits, (5, 1)), np.zeros(100, int)) == TEMPERATURES[0]


def drawn(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of six classes, and labels drawn from them."""
    generator = torch.Generator().manual_seed(seed)
    probabilities = (2 * torch.randn(count, 6, generator=generator, dtype=torch.float64)).softmax(dim=1)
    return probabilities.numpy(), torch.multinomial(probabilities, 1, generator=generator)[:, 0].numpy()


def test_prediction_sets() -> None:
    """By a loop: the most probable classes until their sum exceeds the conformal quantile of the labels' scores."""
    probabilities, labels = drawn(80, seed=0)
    calibrator = Calibrator.fit(np.log(probabilities), labels, temper=False)
    assert calibrator.temperature is None
    masses = []
    for row, label in zip(probabilities, labels, strict=True):
        ranked = sorted(range(6), key=lambda k: -row[k])
        masses.append(sum(row[k] for k in ranked[: ranked.index(label)]))
    np.testing.assert_allclose(calibrator.masses, sorted(masses), atol=1e-5)
    limit = sorted(masses)[math.ceil(81 * 0.8) - 1]
    assert calibrator.limit(0.8) == pytest.approx(limit, abs=1e-5)
    new, _ = drawn(40, seed=1)
    for row, chosen in zip(new, calibrator.sets(new, 0.8), strict=True):
        ranked = sorted(range(6), key=lambda k: -row[k])
        expected = [k for number, k in enumerate(ranked) if sum(row[ranked[:number]]) <= limit]
        assert set(np.flatnonzero(chosen)) == set(expected)
    assert calibrator.limit(0.99) == math.inf
    assert calibrator.sets(new, 0.99).all()


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.95])
def test_sets_have_the_label_as_often_as_they_say(coverage: float) -> None:
    """Of images that had no part, whatever the model: here its probabilities are too high."""
    (probabilities, labels), (new, new_labels) = drawn(2_000, seed=2), drawn(4_000, seed=3)
    calibrator = Calibrator.fit(3 * np.log(probabilities), labels, temper=False)
    overconfident = new**3 / (new**3).sum(axis=1, keepdims=True)
    covered = calibrator.sets(overconfident, coverage)[np.arange(4_000), new_labels].mean()
    assert covered >= coverage - 0.025
    honest = Calibrator.fit(3 * np.log(probabilities), labels)
    assert honest.temperature == pytest.approx(3, rel=0.15)


def test_many_images_keep_some_masses() -> None:
    probabilities, labels = drawn(2_500, seed=4)
    assert 800 < len(Calibrator.fit(np.log(probabilities), labels).masses) <= 1_000


def test_extremes() -> None:
    certain = np.ones(5, np.float32)
    assert calibrate(certain, np.ones(5, bool)).error == 0
    assert calibrate(certain, np.zeros(5, bool)).error == 1
    assert calibrate(certain, np.ones(5, bool)).counts.tolist() == [0] * 14 + [5]
    assert calibrate(np.zeros(1), np.zeros(1, bool)).counts[0] == 1
    assert np.isnan(calibrate(np.full(3, np.nan), np.ones(3, bool)).error)  # a model that diverged
    confidences = np.array([0.9, 0.8, 0.8, 0.4])
    for correct, threshold in (([1, 1, 1, 1], 0.0), ([1, 1, 0, 1], 0.9), ([1, 1, 1, 0], 0.8), ([0, 1, 1, 1], None)):
        assert choose_rejection(confidences, np.array(correct, bool)) == threshold
    assert choose_rejection(np.empty(0), np.empty(0, bool)) is None


@pytest.mark.parametrize(
    ("correct", "total", "interval"),
    [(0, 10, (0, 0.2775)), (10, 10, (0.7225, 1)), (81, 263, (0.2553, 0.3662))],  # the last: Newcombe 1998
)
def test_interval_is_wilsons(correct: int, total: int, interval: tuple[float, float]) -> None:
    assert accuracy_interval(correct, total) == pytest.approx(interval, abs=1e-4)


@pytest.mark.parametrize("target", [0.3, 0.5, 0.7, 0.8, 0.9, 1.0])
def test_rejection_is_the_smallest_threshold_that_suffices(target: float) -> None:
    confidences, correct = made(decimals=2)  # many are equal
    thresholds = [0.0, *sorted(set(confidences.tolist()))]
    enough = [t for t in thresholds if correct[confidences >= t].mean() >= target]
    assert choose_rejection(confidences, correct, target) == (enough[0] if enough else None)
