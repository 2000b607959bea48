"""How far the confidences of a classifier can be trusted: calibration, temperature, prediction sets, rejection."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32, Float64, Int

BINS = 15
"""Equal-width bins of confidence (Guo et al. 2017)."""
MIN_CALIBRATED = 100
"""Minimum number of images for a calibration error: about seven for each bin."""
TEMPERATURES = tuple(2.0 ** (power / 4) for power in range(-8, 17))
"""Divisors of the logits to choose from, 1/4 to 16 (temperature scaling, Guo et al. 2017)."""
MAX_MASSES = 1_000
"""Most held-out images that choose the size of prediction sets."""
COVERAGE = 0.9
"""Expected coverage of the prediction sets that are counted in a test."""


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


def divide_logits(
    logits: Float[np.ndarray, "n K"], labels: Int[np.ndarray, " n"], temperature: float
) -> tuple[Float32[np.ndarray, " n"], Float32[np.ndarray, "n K"]]:
    """Losses, and probabilities of all classes, of logits divided by a temperature."""
    divided = torch.from_numpy(logits).double() / temperature
    losses = F.cross_entropy(divided, torch.from_numpy(labels), reduction="none")
    return losses.float().numpy(), divided.softmax(dim=1).float().numpy()


def choose_temperature(logits: Float[np.ndarray, "n K"], labels: Int[np.ndarray, " n"]) -> float:
    """The one of TEMPERATURES with the lowest loss on n images that are held out.

    Fewer images than MIN_CALIBRATED may all be right, which would make all later predictions certain: they choose at
    least 1.
    """
    allowed = [t for t in TEMPERATURES if t >= 1 or len(labels) >= MIN_CALIBRATED]
    return min(allowed, key=lambda temperature: divide_logits(logits, labels, temperature)[0].mean())


def masses_before(probabilities: Float[np.ndarray, "n K"]) -> Float64[np.ndarray, "n K"]:
    """For each class the total probability of all more probable classes of the image."""
    order = np.argsort(-probabilities, axis=1, kind="stable")
    ranked = np.take_along_axis(np.float64(probabilities), order, axis=1)
    masses = np.empty(probabilities.shape)
    np.put_along_axis(masses, order, ranked.cumsum(axis=1) - ranked, axis=1)
    return masses


class Calibrator(NamedTuple):
    """A temperature and the size of prediction sets, fitted to a classifier's outputs for n held-out images.

    A prediction set has the most probable classes until their total probability exceeds a limit. The limit is such that
    the sets of the held-out images would have their label in a fraction `coverage`, and so have those of new images of
    the same kind: split conformal prediction with adaptive sets (Romano et al. 2020). The score of a class is its
    `masses_before`, without its own probability, which makes the sets smaller.
    """

    temperature: float | None
    """Divisor of the logits; None if their scale is chosen already."""
    masses: Sequence[float]
    """`masses_before` of the labels of the images, or of MAX_MASSES of them, in increasing order."""

    @classmethod
    def fit(cls, logits: Float[np.ndarray, "n K"], labels: Int[np.ndarray, " n"], temper: bool = True) -> "Calibrator":
        """The calibrator for these held-out logits. temper: whether to choose a temperature."""
        temperature = choose_temperature(logits, labels) if temper else None
        rows = np.arange(len(labels))[:: -(-len(labels) // MAX_MASSES)]
        _, probabilities = divide_logits(logits[rows], labels[rows], temperature or 1.0)
        masses = masses_before(probabilities)[np.arange(len(rows)), labels[rows]]
        return cls(temperature, np.sort(masses).tolist())

    def limit(self, coverage: float) -> float:
        """The largest score in a set; infinite if the images are too few for this coverage."""
        rank = math.ceil((len(self.masses) + 1) * coverage)
        return self.masses[rank - 1] if rank <= len(self.masses) else math.inf

    def sets(self, probabilities: Float[np.ndarray, "n K"], coverage: float) -> Bool[np.ndarray, "n K"]:
        """Which classes are in the prediction set of each image; always the most probable one."""
        return masses_before(probabilities) <= self.limit(coverage)


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
