"""The least squares against Google's own answers and a direct solve; the choice of l2 by rank."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitlab.data.dataset import Dataset
from vitlab.evaluate import fewshot
from vitlab.evaluate import ridge as module
from vitlab.evaluate.features import Features
from vitlab.evaluate.fewshot import accuracies, draw, few_examples
from vitlab.evaluate.ridge import L2_GRID, Ridge, choose_l2, mean_ranks

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


# ------------------------------------------------------------------------------------------------- Google's answers


@pytest.mark.parametrize("case", CASES)
def test_accuracies_are_those_of_the_golden_file(case: str, golden: dict[str, Any]) -> None:
    x, y, test_x, test_y = (golden[f"{case}/{name}"] for name in ("x_train", "y_train", "x_test", "y_test"))
    classes = int(y.max()) + 1
    right = Ridge(x, y, classes).correct(test_x, test_y, golden["l2_regs"].tolist())
    assert right.mean(axis=1).tolist() == golden[f"{case}/acc_f64"].tolist()
    meta = json.loads(str(golden["meta"]))[case]
    assert (abs(right.mean(axis=1) - golden[f"{case}/acc"]) <= meta["tol_acc"]).all()


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_the_golden_file(case: str, golden: dict[str, Any]) -> None:
    x, y, test_x = (golden[f"{case}/{name}"] for name in ("x_train", "y_train", "x_test"))
    ridge = Ridge(x, y, int(y.max()) + 1)
    scores = ridge.scores(test_x, 1024.0)
    meta = json.loads(str(golden["meta"]))[case]
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
    shots = golden["evaluator/shots"].tolist()
    assert tuple(shots) == fewshot.SHOTS
    assert float(golden["evaluator/l2_reg"]) == fewshot.L2
    train, test = (Dataset("made", s, tuple("abcdefghij"), labels) for s, labels in (("train", y), ("test", test_y)))
    split = few_examples(train, test, shots, range(3))
    kept = np.unique(np.concatenate([draw(y, 10, 25, seed) for seed in range(3)]))
    known = Features(x[kept], y[kept], np.arange(len(kept)), 0)
    found = accuracies(split, known, Features(test_x, test_y, np.arange(len(test_y)), 0), [fewshot.L2])
    for seed in range(3):
        for number, k in enumerate(shots):
            indices = golden[f"evaluator/seed{seed}/shots{k}/all_idx"]
            assert draw(y, 10, k, seed).tolist() == indices.tolist()
            assert kept[split.draws[k, seed]].tolist() == indices.tolist()
            expected = golden["evaluator/acc[seed,shots]"][seed, number]
            assert round(found[k][seed, 0] * 600) == round(float(expected) * 600)


# ------------------------------------------------------------------------------------------------------ the algebra


def naive(x: np.ndarray, y: np.ndarray, test_x: np.ndarray, classes: int, l2: float) -> np.ndarray:
    """Scores by a direct solve, in float64."""
    wide = x.astype(np.float64)
    mean, std = wide.mean(axis=0), wide.std(axis=0) + 1e-5
    train, test = (np.hstack([(part - mean) / std, np.full((len(part), 1), 100.0)]) for part in (wide, test_x))
    targets = 2.0 * np.eye(classes)[y] - 1.0
    return test @ np.linalg.solve(train.T @ train + l2 * np.eye(train.shape[1]), train.T @ targets)


@pytest.mark.parametrize(("n", "D", "K"), [(30, 50, 6), (50, 50, 6), (51, 50, 6), (200, 12, 30), (3, 40, 2), (1, 5, 3)])
def test_any_shape_against_a_direct_solve(n: int, D: int, K: int) -> None:
    x, y = made(n, D, K)
    test_x, test_y = made(300, D, K, seed=1)
    ridge = Ridge(x, y, K)
    l2s = [2.0**power for power in (-4, 0, 6, 10, 15)]
    right = ridge.correct(test_x, test_y, l2s)
    for row, l2 in zip(right, l2s, strict=True):
        expected = naive(x, y, test_x, K, l2)
        scores = ridge.scores(test_x, l2)
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5 * np.sqrt((expected**2).mean()))
        assert np.array_equal(row, scores.argmax(axis=1) == test_y)
        assert ridge.weights(l2).shape == (D + 1, K)


@pytest.mark.parametrize("apart", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize(("n", "rows"), [(40, 100), (300, 64), (300, 1000)])
def test_answers_are_float64s_over_the_whole_grid(
    apart: float, n: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever float32 and the skipping of images do, easy and hopeless data, in one piece and in many."""
    monkeypatch.setattr(module, "_ROWS", rows)
    x, y = made(n, 64, 20, apart=apart)
    test_x, test_y = made(700, 64, 20, seed=1, apart=apart)
    ridge = Ridge(x, y, 20)
    expected = np.stack([ridge.scores(test_x, l2).argmax(axis=1) == test_y for l2 in L2_GRID])
    assert np.array_equal(ridge.correct(test_x, test_y, L2_GRID), expected)
    assert np.array_equal(ridge.correct(test_x, test_y, L2_GRID[::-1]), expected[::-1])
    assert 0 < expected.mean() <= 1


def test_float64_decides_where_float32_cannot() -> None:
    """Two classes whose representations differ in the seventh digit only."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal((1, 16)).astype(np.float32)
    x = np.repeat(base, 2, axis=0)
    x[1] *= 1 + 3e-7
    y = np.array([0, 1])
    test_x = np.repeat(x, 20, axis=0)
    ridge = Ridge(x, y, 2)
    test_y = np.repeat(y, 20)
    expected = ridge.scores(test_x, 2.0**20).argmax(axis=1) == test_y
    assert np.array_equal(ridge.correct(test_x, test_y, [2.0**20])[0], expected)


def test_class_without_a_image_and_class_alone() -> None:
    x, y = made(40, 8, 3)
    ridge = Ridge(x, y, 5)
    assert not ridge.correct(x, np.full(40, 4), [1.0]).any()
    assert Ridge(x, np.zeros(40, np.int64), 1).correct(x, np.zeros(40, np.int64), [1.0]).all()


def test_feature_that_never_changes() -> None:
    x, y = made(40, 8, 3)
    x[:, 2] = 7.0
    assert np.isfinite(Ridge(x, y, 3).scores(x + 1, 1.0)).all()


def test_broken_representations() -> None:
    x, y = made(10, 4, 3)
    for bad in (np.nan, np.inf):
        broken = x.copy()
        broken[3, 1] = bad
        with pytest.raises(ValueError, match="1 of 10 representations are not finite"):
            Ridge(broken, y, 3)
        with pytest.raises(ValueError, match="1 of 10 representations are not finite"):
            Ridge(x, y, 3).correct(broken, y, [1.0])
    with pytest.raises(ValueError, match=r"the labels are 0 to 2; 2 classes"):
        Ridge(x, y, 2)


def test_best_l2_by_rank() -> None:
    """Of three data sets, two prefer the second l2; the third's accuracies are far apart, which must not count."""
    table = np.array([[0.50, 0.52, 0.51, 0.49], [0.30, 0.33, 0.31, 0.29], [0.10, 0.20, 0.30, 0.90]])
    assert mean_ranks(table).tolist() == [pytest.approx(2 / 3), pytest.approx(7 / 3), 2, 1]
    assert choose_l2(table).tolist() == [1, 1, 1]
    table[0] = [0.4, 0.1, 0.2, 0.3]  # by itself the first, by the others' ranks the second; without the last, the third
    assert mean_ranks(table).tolist() == [
        pytest.approx(4 / 3),
        pytest.approx(4 / 3),
        pytest.approx(5 / 3),
        pytest.approx(5 / 3),
    ]
    assert choose_l2(table).tolist() == [2, 2, 2]
    assert choose_l2(table, leave_self_out=True).tolist() == [1, 3, 0]
    assert choose_l2(np.array([[0.1, 0.7, 0.7, 0.2]])).tolist() == [2]
    with pytest.raises(ValueError, match="give at least two"):
        choose_l2(table[:1], leave_self_out=True)
