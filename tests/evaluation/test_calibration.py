"""Calibration and rejection against plain loops, and against values from tables."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch.nn.functional import cross_entropy

from vitlab.evaluation.calibration import (
    BINS,
    TEMPERATURES,
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

    best = minimize_scalar(lambda t: float(losses(t).mean()), bounds=(0.1, 20), method="bounded").x
    chosen = choose_temperature(torch.stack([losses(t) for t in TEMPERATURES], dim=1).numpy())
    assert chosen == pytest.approx(best, rel=2**0.125)
    assert chosen == pytest.approx(factor, rel=0.15)


def test_few_images_that_are_all_right_do_not_make_it_certain() -> None:
    losses = np.tile(np.array(TEMPERATURES), (20, 1))  # the less, the better
    assert choose_temperature(losses) == 1.0
    assert choose_temperature(np.tile(losses, (5, 1))) == TEMPERATURES[0]


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
