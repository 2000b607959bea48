"""How far the confidences of a classifier can be trusted: calibration, temperature, intervals, rejection."""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

BINS = 15
"""Equal-width bins of confidence (Guo et al. 2017)."""
MIN_CALIBRATED = 100
"""Minimum number of images for a calibration error: about seven for each bin."""
TEMPERATURES = tuple(2.0 ** (power / 4) for power in range(-8, 17))
"""Divisors of the logits to choose from, 1/4 to 16 (temperature scaling, Guo et al. 2017)."""


class Calibration(NamedTuple):
    """A reliability diagram: images by confidence in bins of equal width, (0, 1/b], (1/b, 2/b], ..."""

    counts: Int[np.ndarray, " b"]
    """Images in each bin."""
    accuracies: Float[np.ndarray, " b"]
    """Accuracy in each bin, NaN without images."""
    confidences: Float[np.ndarray, " b"]
    """Mean confidence in each bin, NaN without images."""

    @property
    def error(self) -> float:
        """The expected calibration error: mean of |accuracy - confidence| over the images, each by its bin."""
        used = self.counts > 0
        gaps = np.abs(self.accuracies - self.confidences)[used]
        return float(np.average(gaps, weights=self.counts[used]))


def calibrate(confidences: Float[np.ndarray, " n"], correct: Bool[np.ndarray, " n"]) -> Calibration:
    """Accuracy and mean confidence of n > 0 predictions, by bins of confidence (softmax probability of the prediction).

    Source: Guo et al. 2017, On Calibration of Modern Neural Networks, Sec. 2.
    """
    positions = np.digitize(confidences, np.linspace(0, 1, BINS + 1)[1:-1], right=True)
    counts = np.bincount(positions, minlength=BINS)
    sums = (np.bincount(positions, np.float64(values), BINS) for values in (correct, confidences))
    accuracies, means = (np.divide(total, counts, out=np.full(BINS, np.nan), where=counts > 0) for total in sums)
    return Calibration(counts, accuracies, means)


def choose_temperature(losses: Float[np.ndarray, "n T"]) -> float:
    """The temperature of least loss. losses: of n images that are held out, by each of TEMPERATURES.

    Fewer images than MIN_CALIBRATED may all be right, which would make all later predictions certain: they choose at
    least 1.
    """
    least = 1.0 if len(losses) < MIN_CALIBRATED else 0.0
    means = np.where(np.array(TEMPERATURES) >= least, losses.mean(axis=0), np.inf)
    return TEMPERATURES[int(means.argmin())]


def accuracy_interval(correct: int, total: int) -> tuple[float, float]:
    """The 95% confidence interval of an accuracy (Wilson's for a binomial proportion)."""
    # Not scipy's: its import takes longer than to evaluate a small data set.
    z, accuracy = NormalDist().inv_cdf(0.975), correct / total
    center, shrinkage = accuracy + z**2 / (2 * total), 1 + z**2 / total
    half = z * math.sqrt(accuracy * (1 - accuracy) / total + (z / (2 * total)) ** 2)
    return max((center - half) / shrinkage, 0.0), min((center + half) / shrinkage, 1.0)


def choose_rejection(
    confidences: Float[np.ndarray, " n"], correct: Bool[np.ndarray, " n"], target: float = 0.95
) -> float | None:
    """The smallest threshold at which the accuracy of the accepted images is at least `target`; None if there is none.

    Accepted are images whose confidence is at least the threshold: 0 accepts all, any other threshold is one of
    `confidences`. The images must be held out: neither trained on, nor in the test whose accuracy is reported.
    Selective classification: Geifman and El-Yaniv 2017.
    """
    order = np.argsort(-confidences, kind="stable")
    ranked = confidences[order]
    accuracies = np.cumsum(correct[order]) / np.arange(1, len(order) + 1)
    last_of_equals = np.append(ranked[1:] != ranked[:-1], True)[: len(order)]  # equal confidences are accepted together
    reached = np.flatnonzero(last_of_equals & (accuracies >= target))
    if not len(reached):
        return None
    return 0.0 if reached[-1] == len(order) - 1 else float(ranked[reached[-1]])
