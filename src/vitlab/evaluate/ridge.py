"""Regularized least squares from representations to targets of +-1 (Sec. 4.1): arrays in, right or wrong out."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int

from vitlab.errors import UserError
from vitlab.evaluate.features import check_features

L2_GRID = tuple(2.0**power for power in range(-10, 20))  # the code of the paper's time chooses from these
BIAS = 100.0  # the constant feature: so large that the penalty on its weight is next to none

_ROWS = 256  # test images at a time


class Ridge:
    """W = (X'X + l2 I)^-1 X'Y for every l2, from one eigendecomposition in float64.

    X are the representations, standardized by their own mean and standard deviation (+ 1e-5), and a last column of
    100; Y is +1 for the label and -1 for the other classes. Decomposed is the smaller of X'X and XX'.
    Deviation: Google's code solves in float32, whose answers are wrong for l2 below about 2^6.
    """

    def __init__(self, x: Float[np.ndarray, "n D"], labels: Int[np.ndarray, " n"], num_classes: int) -> None:
        check_features(x, labels, num_classes)
        wide = x.astype(np.float64)
        self.mean, self.std = wide.mean(axis=0), wide.std(axis=0) + 1e-5
        full = np.column_stack([(wide - self.mean) / self.std, np.full(len(x), BIAS)])
        targets = np.full((len(x), num_classes), -1.0)
        targets[np.arange(len(x)), labels] = 1.0
        n, width = full.shape
        eigenvalues, vectors = np.linalg.eigh(full.T @ full if n >= width else full @ full.T)
        self.eigenvalues: np.ndarray = np.maximum(eigenvalues, 0.0)
        # W = out @ diag(1 / (eigenvalues + l2)) @ inner, in both forms; the columns of `out` are orthogonal.
        self._out = vectors if n >= width else full.T @ vectors
        self._inner = vectors.T @ (full.T @ targets if n >= width else targets)

    def weights(self, l2: float) -> Float64[np.ndarray, "D1 K"]:
        """W; its last row belongs to the feature that is 100 everywhere."""
        return self._out @ (self._inner / (self.eigenvalues + l2)[:, None])

    def scores(self, x: Float[np.ndarray, "n D"], l2: float) -> Float64[np.ndarray, "n K"]:
        weights = self.weights(l2)
        return self._standardized(x) @ weights[:-1] + BIAS * weights[-1]

    def correct(
        self, x: Float[np.ndarray, "n D"], labels: Int[np.ndarray, " n"], l2s: Sequence[float]
    ) -> Bool[np.ndarray, "L n"]:
        """Whether the label has the highest of float64's scores, for each l2.

        Nearly all the time goes into test images times weights, so that is done in float32; where a margin is within
        its rounding, float64 decides. And a image is answered wrongly whenever one class, such as the one of the l2
        before, is above the label: the other classes need no look then.
        """
        check_features(x, labels, self._inner.shape[1])
        tested = np.concatenate([self._standardized(x[i : i + _ROWS]).astype(np.float32) for i in _starts(len(x))])
        norms = np.linalg.norm(tested, axis=1)
        rivals = labels.copy()  # a class that was above the label; itself, where there is none
        right = np.zeros((len(l2s), len(x)), bool)
        for number, l2 in enumerate(l2s):
            exact = self.weights(l2)
            exact -= exact.mean(axis=1, keepdims=True)  # moves no margin, and leaves less to round
            weights, bias = np.ascontiguousarray(exact[:-1].T, np.float32), (BIAS * exact[-1]).astype(np.float32)
            errors = 2.0**-22 * (
                (len(exact) + 8) * norms * np.linalg.norm(exact[:-1], axis=0).max() + np.abs(bias).max()
            )
            for start in _starts(len(x)):
                rows = np.arange(start, min(start + _ROWS, len(x)))
                own, rival = labels[rows], rivals[rows]
                lead = np.einsum("nd,nd->n", tested[rows], weights[rival] - weights[own]) + bias[rival] - bias[own]
                rows = rows[lead <= errors[rows]]
                margins, rivals[rows] = _margins(tested[rows] @ weights.T + bias, labels[rows])
                right[number, rows] = margins > 0
                if len(close := rows[np.abs(margins) <= errors[rows]]):
                    answers = (self._standardized(x[close]) @ exact[:-1] + BIAS * exact[-1]).argmax(axis=1)
                    right[number, close] = answers == labels[close]
        return right

    def _standardized(self, x: np.ndarray) -> np.ndarray:
        return (x - self.mean) / self.std


def _starts(count: int) -> range:
    return range(0, count, _ROWS)


def _margins(
    scores: Float32[np.ndarray, "n K"], labels: Int[np.ndarray, " n"]
) -> tuple[Float32[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """How far the label's score is above the best of the others, and which that is. Overwrites `scores`."""
    rows = np.arange(len(labels))
    own = scores[rows, labels]
    scores[rows, labels] = -np.inf
    rivals = scores.argmax(axis=1)
    return own - scores[rows, rivals], rivals


# ----------------------------------------------------------------------------------------- one l2 for several data sets


def mean_ranks(accuracies: Float[np.ndarray, "S L"]) -> Float[np.ndarray, " L"]:
    """The mean over data sets of each l2's rank, the best of a data set having the highest rank.

    Deviation: of l2 that are equally good the later ranks higher, where Google's code leaves it to the sorting.
    """
    return np.argsort(np.argsort(accuracies, axis=1, kind="stable"), axis=1, kind="stable").mean(axis=0)


def choose_l2(accuracies: Float[np.ndarray, "S L"], leave_self_out: bool = False) -> Int[np.ndarray, " S"]:
    """The place of each data set's l2: that of the highest mean rank, one for all data sets (the paper's time).

    leave_self_out: a data set's own accuracies, which are of its test images, have no part in its choice (as in
    uncertainty-baselines).
    """
    sets = len(accuracies)
    if not leave_self_out:
        return np.full(sets, mean_ranks(accuracies).argmax())
    if sets < 2:
        raise UserError("leave_self_out chooses by the other data sets, and there is one only; give at least two.")
    return np.array([mean_ranks(np.delete(accuracies, own, axis=0)).argmax() for own in range(sets)])
