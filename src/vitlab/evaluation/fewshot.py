"""Few-shot accuracy (Sec. 4.1): regularized least squares on the frozen features of a few images per class.

The algebra: X are the n representations, standardized by their own mean and standard deviation (+ 1e-5), and a last
column of 100, the bias; Y is +1 for the label of an image and -1 for the other classes. The weights are

    W = (X'X + l2 I)^-1 X'Y = X' (XX' + l2 I)^-1 Y,

and the smaller system is solved, by an eigendecomposition that serves every l2. Leaving images out needs no other
solution. Let R be the rows left out: an image, all its views, or a whole group. With H = X (X'X + l2 I)^-1 X' (the hat
matrix, HY are the fitted scores), the classifier of all other rows gives these the scores

    Y_R - (I - H_RR)^-1 (Y - HY)_R.

With weights of the images, the rows of X and Y are multiplied by their square roots, and all this holds for these.

`vitlab fewshot` evaluates a checkpoint (`fewshot_checkpoint.py`); a run with `config.fewshot` measures the same while
it trains (`runs/run.py`), and the least-squares head of fine-tuning is a `Ridge`, too.

    Ridge(x, labels, num_classes=10).correct(test_x, test_labels, [1024.0]).mean()
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from vitlab.data.dataset import Dataset
from vitlab.errors import UserError
from vitlab.evaluation.features import Features
from vitlab.evaluation.load import check_train_and_test

BIAS = 100.0  # so large that the penalty on its weight is negligible
ROWS = 4096  # test images at a time


# ---------------------------------------------------------------------------------------------------------- the algebra


class Ridge:
    """The solution for every l2, in float64.

    Deviation: Google's code solves in float32, whose predictions are wrong for l2 below about 2^6.
    """

    def __init__(
        self,
        x: Float[np.ndarray, "n D"],
        labels: Int[np.ndarray, " n"] | Bool[np.ndarray, "n K"],
        num_classes: int,
        weights: Float[np.ndarray, " n"] | None = None,
    ) -> None:
        """labels: one of each image, or whether it has each of the classes. weights: of the images, positive; default:
        all 1."""
        wide = x.astype(np.float64)
        self.mean, self.std = wide.mean(axis=0), wide.std(axis=0) + 1e-5
        full = np.column_stack([(wide - self.mean) / self.std, np.full(len(x), BIAS)])
        targets = np.full((len(x), num_classes), -1.0)
        if labels.ndim == 1:
            targets[np.arange(len(x)), labels] = 1.0
        else:
            targets[labels] = 1.0
        self._roots = np.ones((len(x), 1)) if weights is None else np.sqrt(weights)[:, None]
        if weights is not None:  # least squares of rows times the roots of their weights
            full, targets = self._roots * full, self._roots * targets
        # W = outer @ diag(1 / (eigenvalues + l2)) @ inner. The hat matrix is H = basis @ S @ basis.T: in the primal
        # form with S = diag(1 / (eigenvalues + l2)), in the dual form with S = diag(eigenvalues / (eigenvalues + l2)).
        self._primal = full.shape[0] >= full.shape[1]
        if self._primal:
            eigenvalues, vectors = np.linalg.eigh(full.T @ full)
            self._outer, self._inner, self._basis = vectors, vectors.T @ (full.T @ targets), full @ vectors
        else:
            eigenvalues, vectors = np.linalg.eigh(full @ full.T)
            self._outer, self._inner, self._basis = full.T @ vectors, vectors.T @ targets, vectors
        self.eigenvalues: np.ndarray = np.maximum(eigenvalues, 0.0)
        self._targets = targets

    def weights(self, l2: float) -> Float64[np.ndarray, "D1 K"]:
        """W; its last row belongs to the bias."""
        return self._outer @ (self._inner / (self.eigenvalues + l2)[:, None])

    def leave_one_out(
        self, l2: float, views: int = 1, groups: Int[np.ndarray, " m"] | None = None
    ) -> Float64[np.ndarray, "m K"]:
        """Scores of each training image by the classifier of all others (with the standardization of all).

        The n training rows are `views` of each of m images: the first view of all, whose scores are returned, then the
        second of all, and so on. With `groups`, the number of each image's group, the classifier of all other groups
        scores an image. Images with a negative number are in all classifiers, and have no scores (NaN).
        """
        images = len(self._targets) // views
        group_of = np.tile(np.arange(images) if groups is None else groups, views)
        order = np.argsort(group_of, kind="stable")[np.count_nonzero(group_of < 0) :]  # rows, group by group
        _, starts, sizes = np.unique(group_of[order], return_index=True, return_counts=True)
        shrinkage = (1.0 if self._primal else self.eigenvalues) / (self.eigenvalues + l2)
        errors = self._targets - self._basis @ (shrinkage[:, None] * (self._basis.T @ self._targets))  # Y - HY
        scores = np.full_like(self._targets, np.nan)
        for size in np.unique(sizes):  # all groups of one size at once; 1 + 1e-9 keeps I - H invertible for copies
            rows = order[starts[sizes == size][:, None] + np.arange(size)]  # R of each group, [m, size]
            basis = self._basis[rows]
            if size <= basis.shape[2]:
                hat = np.einsum("mvr,r,mwr->mvw", basis, shrinkage, basis, optimize=True)  # H_RR
                scores[rows] = self._targets[rows] - np.linalg.solve((1 + 1e-9) * np.eye(size) - hat, errors[rows])
                continue
            # Of larger ones by Woodbury's identity: (I - B S B')^-1 = I + B (I - S B'B)^-1 S B', where H_RR = B S B'.
            scaled = shrinkage[:, None] * basis.swapaxes(1, 2)
            inner = np.linalg.solve((1 + 1e-9) * np.eye(basis.shape[2]) - scaled @ basis, scaled @ errors[rows])
            scores[rows] = self._targets[rows] - errors[rows] - basis @ inner
        return scores[:images] / self._roots[:images]

    def scores(self, x: Float[np.ndarray, "n D"], l2: float) -> Float64[np.ndarray, "n K"]:
        weights = self.weights(l2)
        return (x - self.mean) / self.std @ weights[:-1] + BIAS * weights[-1]

    def correct(
        self, x: Float[np.ndarray, "n D"], labels: Int[np.ndarray, " n"], l2s: Sequence[float]
    ) -> Bool[np.ndarray, "L n"]:
        """Whether the label has the highest score, for each l2."""
        starts = range(0, len(x), ROWS)
        predictions = [[self.scores(x[i : i + ROWS], l2).argmax(axis=1) for i in starts] for l2 in l2s]
        return np.stack([np.concatenate(rows) == labels for rows in predictions])


def choose_l2(accuracies: Float[np.ndarray, "S L"], leave_self_out: bool = False) -> Int[np.ndarray, " S"]:
    """The index of each data set's l2: the one with the highest mean rank over all data sets, as in Google's code.

    leave_self_out: over the other data sets, so that a data set's test images have no part in its choice (as in
    uncertainty-baselines).

    Deviation: ties go to the later l2; in Google's code they depend on the sort.
    """
    ranks = np.argsort(np.argsort(accuracies, axis=1, kind="stable"), axis=1, kind="stable")
    totals = np.broadcast_to(ranks.sum(axis=0), ranks.shape)
    return (totals - ranks if leave_self_out else totals).argmax(axis=1)


# ------------------------------------------------------------------------------------------------ the training images


def sample_shots(
    labels: Int[np.ndarray, " n"], num_classes: int, shots: int, seed: int | None
) -> Int[np.ndarray, " m"]:
    """Indices of the first `shots` images of each class, class by class, after a shuffle by `seed` (None: no shuffle).

    A class with fewer images gives all of them. The samples are big_vision's; more shots add images to the same ones.
    """
    order = np.argsort(labels, kind="stable")
    classes = np.split(order, np.searchsorted(labels[order], np.arange(1, num_classes)))
    if seed is not None:
        rng = np.random.default_rng(seed)
        classes = [rng.permutation(members) for members in classes]
    return np.concatenate([members[:shots] for members in classes])


@dataclass(frozen=True)
class FewShotData:
    """The training images that any subset has, and the test images, of one data set."""

    train: Dataset
    test: Dataset
    subsets: dict[tuple[int, int], np.ndarray]
    """(shots, index of the seed) -> indices into `train`."""
    short_classes: dict[int, int]
    """Shots -> classes with fewer images."""


def sample_examples(
    train: Dataset, test: Dataset, shots: Sequence[int], seeds: Sequence[int | None], test_images: int | None = None
) -> FewShotData:
    """Subsets for all shots and seeds, so that no other image of `train` is read; of test at most `test_images`."""
    check_train_and_test(train, test)
    classes = len(train.classes)
    subsets = {(k, i): sample_shots(train.labels, classes, k, seed) for k in shots for i, seed in enumerate(seeds)}
    used = np.unique(np.concatenate(list(subsets.values())))
    subsets = {key: np.searchsorted(used, indices) for key, indices in subsets.items()}
    counts = np.bincount(train.labels, minlength=classes)
    short = {k: int((counts < k).sum()) for k in shots}
    if test_images is not None and test_images < len(test):
        test = test.take(np.arange(test_images) * len(test) // test_images)
    return FewShotData(train.take(used), test, subsets, short)


def accuracies(
    data: FewShotData, train: Features, test: Features, l2s: Sequence[float]
) -> dict[int, Float[np.ndarray, "S L"]]:
    """Shots -> test accuracy for every seed and l2."""
    row_of = np.full(len(data.train), -1)
    row_of[train.indices] = np.arange(len(train.indices))
    result: dict[int, list[np.ndarray]] = {}
    for (shots, _), indices in data.subsets.items():
        rows = row_of[indices]
        rows = rows[rows >= 0]  # without unreadable images
        if not len(rows):
            raise UserError(f"none of the {len(indices)} images sampled from {data.train.name} could be read.")
        ridge = Ridge(train.x[rows], train.labels[rows], len(data.train.classes))
        result.setdefault(shots, []).append(ridge.correct(test.x, test.labels, l2s).mean(axis=1))
    return {shots: np.stack(rows) for shots, rows in result.items()}
