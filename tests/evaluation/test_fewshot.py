"""The least squares against Google's own results and a direct solve; few-shot accuracy of checkpoints."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitlab.data.dataset import Dataset
from vitlab.evaluation import fewshot
from vitlab.evaluation.features import Features
from vitlab.evaluation.fewshot import (
    Ridge,
    accuracies,
    choose_l2,
    sample_examples,
    sample_shots,
)
from vitlab.evaluation.options import FewShotProtocol

CASES = ("case1_NltD", "case2_NgeD", "case3_5shot5cls")


@pytest.fixture(scope="session")
def golden(shared: Path) -> dict[str, Any]:
    with np.load(shared / "golden" / "fewshot.npz") as archive:
        return dict(archive)


def made(n: int, D: int, K: int, seed: int = 0, apart: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Representations of K classes, each with its own mean, at very different scales."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(99).standard_normal((K, D))
    labels = rng.integers(0, K, n)
    x = (apart * centers[labels] + rng.standard_normal((n, D))) * np.geomspace(1e-2, 1e2, D) + 3
    return x.astype(np.float32), labels


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_the_golden_file(case: str, golden: dict[str, Any]) -> None:
    x, y, test_x, test_y = (golden[f"{case}/{name}"] for name in ("x_train", "y_train", "x_test", "y_test"))
    ridge, meta = Ridge(x, y, int(y.max()) + 1), json.loads(str(golden["meta"]))[case]
    right = ridge.correct(test_x, test_y, golden["l2_regs"].tolist())
    assert right.mean(axis=1).tolist() == golden[f"{case}/acc_f64"].tolist()
    assert (abs(right.mean(axis=1) - golden[f"{case}/acc"]) <= meta["tol_acc"]).all()
    scores = ridge.scores(test_x, 1024.0)
    for name, tolerance in (("scores_f64_l2_1024", 1e-12), ("scores_l2_1024", meta["tol_scores_nerr_l2_1024"])):
        expected = golden[f"{case}/{name}"].astype(np.float64)
        assert abs(scores - expected).max() / np.sqrt((expected**2).mean()) <= tolerance
    np.testing.assert_allclose(ridge.mean, golden[f"{case}/cache_mean"][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ridge.std, golden[f"{case}/cache_std"][0], rtol=1e-5)
    eigenvalues = golden[f"{case}/cache_eigs"]
    np.testing.assert_allclose(ridge.eigenvalues, eigenvalues, rtol=1e-3, atol=1e-6 * eigenvalues.max())


def test_whole_evaluation_of_the_golden_file(golden: dict[str, Any]) -> None:
    """Draws identical to the index, accuracies to the last image, for three seeds and four numbers of shots."""
    x, y, test_x, test_y = (golden[f"evaluator/{name}"] for name in ("x_train", "y_train", "x_test", "y_test"))
    shots, protocol = golden["evaluator/shots"].tolist(), FewShotProtocol()
    assert tuple(shots) == protocol.shots
    assert (float(golden["evaluator/l2_reg"]),) == protocol.l2_grid
    train, test = (Dataset("made", s, tuple("abcdefghij"), labels) for s, labels in (("train", y), ("test", test_y)))
    split = sample_examples(train, test, shots, range(3))
    drawn = np.unique(np.concatenate([sample_shots(y, 10, 25, seed) for seed in range(3)]))
    known = Features(x[drawn], y[drawn], np.arange(len(drawn)), 0)
    result = accuracies(split, known, Features(test_x, test_y, np.arange(len(test_y)), 0), protocol.l2_grid)
    for seed in range(3):
        for number, k in enumerate(shots):
            indices = golden[f"evaluator/seed{seed}/shots{k}/all_idx"]
            assert sample_shots(y, 10, k, seed).tolist() == indices.tolist()
            assert drawn[split.subsets[k, seed]].tolist() == indices.tolist()
            expected = golden["evaluator/acc[seed,shots]"][seed, number]
            assert round(result[k][seed, 0] * 600) == round(float(expected) * 600)


def naive(x: np.ndarray, y: np.ndarray, test_x: np.ndarray, classes: int, l2: float) -> np.ndarray:
    """Scores by a direct solve, in float64."""
    wide = x.astype(np.float64)
    mean, std = wide.mean(axis=0), wide.std(axis=0) + 1e-5
    train, test = (np.hstack([(part - mean) / std, np.full((len(part), 1), 100.0)]) for part in (wide, test_x))
    targets = 2.0 * np.eye(classes)[y] - 1.0
    return test @ np.linalg.solve(train.T @ train + l2 * np.eye(train.shape[1]), train.T @ targets)


@pytest.mark.parametrize(("n", "D", "K"), [(30, 50, 6), (50, 50, 6), (51, 50, 6), (200, 12, 30), (3, 40, 2), (1, 5, 3)])
def test_any_shape_against_a_direct_solve(n: int, D: int, K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = made(n, D, K)
    test_x, test_y = made(300, D, K, seed=1)
    ridge = Ridge(x, y, K)
    l2s = [2.0**power for power in (-4, 0, 6, 10, 15)]
    monkeypatch.setattr(fewshot, "ROWS", 128)
    right = ridge.correct(test_x, test_y, l2s)
    for row, l2 in zip(right, l2s, strict=True):
        expected = naive(x, y, test_x, K, l2)
        scores = ridge.scores(test_x, l2)
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5 * np.sqrt((expected**2).mean()))
        assert np.array_equal(row, scores.argmax(axis=1) == test_y)
        assert ridge.weights(l2).shape == (D + 1, K)


def test_degenerate_data() -> None:
    """A class without an image, a single class, and a feature that never changes."""
    x, y = made(40, 8, 3)
    assert not Ridge(x, y, 5).correct(x, np.full(40, 4), [1.0]).any()
    assert Ridge(x, np.zeros(40, np.int64), 1).correct(x, np.zeros(40, np.int64), [1.0]).all()
    x[:, 2] = 7.0
    assert np.isfinite(Ridge(x, y, 3).scores(x + 1, 1.0)).all()


def test_best_l2_by_rank() -> None:
    """Of three data sets, two prefer the second l2; the third's accuracies are far apart, which must not count."""
    table = np.array([[0.50, 0.52, 0.51, 0.49], [0.30, 0.33, 0.31, 0.29], [0.10, 0.20, 0.30, 0.90]])
    assert choose_l2(table).tolist() == [1, 1, 1]
    table[0] = [0.4, 0.1, 0.2, 0.3]  # by itself the first, by the others' ranks the second; without the last, the third
    assert choose_l2(table).tolist() == [2, 2, 2]
    assert choose_l2(table, leave_self_out=True).tolist() == [1, 3, 0]
    assert choose_l2(np.array([[0.1, 0.7, 0.7, 0.2]])).tolist() == [2]


def test_draws() -> None:
    labels = np.array([2, 0, 2, 2, 0, 3, 2, 0])
    assert sample_shots(labels, 5, 2, None).tolist() == [1, 4, 0, 2, 5]
    assert sample_shots(labels, 5, 9, None).tolist() == [1, 4, 7, 0, 2, 3, 6, 5]
    for seed in range(5):
        first, many = sample_shots(labels, 5, 1, seed), sample_shots(labels, 5, 3, seed)
        assert many[[0, 3, 6]].tolist() == first.tolist()
        rng = np.random.default_rng(seed)
        expected = [rng.permutation(np.flatnonzero(labels == c))[:3] for c in range(5)]
        assert many.tolist() == np.concatenate(expected).tolist()


def test_only_the_drawn_images_are_read() -> None:
    labels = np.arange(1000) % 10
    train = Dataset("made", "train", tuple("abcdefghij"), labels, np.zeros((1000, 1, 1, 3), np.uint8))
    test = dataclasses.replace(train.take(np.arange(101)), split="test")
    split = sample_examples(train, test, (1, 5), range(2), test_images=10)
    assert len(split.train) <= 100
    assert split.subsets.keys() == {(1, 0), (1, 1), (5, 0), (5, 1)}
    for (k, seed), rows in split.subsets.items():
        assert split.train.labels[rows].tolist() == labels[sample_shots(labels, 10, k, seed)].tolist()
    assert split.test.labels.tolist() == [(i * 101 // 10) % 10 for i in range(10)]
    assert split.short_classes == {1: 0, 5: 0}
    assert sample_examples(train.take(np.arange(13)), test, (2,), [None]).short_classes == {2: 7}
