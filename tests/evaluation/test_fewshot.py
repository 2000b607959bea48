"""The least squares against Google's own results and a direct solve; few-shot accuracy of checkpoints."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import write_images

from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.registry import load_dataset
from vitlab.evaluation import fewshot, load
from vitlab.evaluation.features import Features, features, frozen_preprocessing
from vitlab.evaluation.fewshot import (
    Ridge,
    accuracies,
    choose_l2,
    fewshot_checkpoint,
    format_fewshot,
    sample_examples,
    sample_shots,
)
from vitlab.evaluation.options import EvalOptions, FewShotProtocol
from vitlab.preprocessing import Preprocessing
from vitlab.weights import load_model

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


GOOGLE = frozen_preprocessing(Preprocessing.google(), (8, 8))
"""Google's few-shot evaluation: 9 is 8 * 256 / 224."""
CPU = EvalOptions(device="cpu")


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


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vitlab" / "features"


@pytest.mark.usefixtures("pretrained")
def test_checkpoint_on_digits(workdir: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all features are in the cache."""
    settings = (workdir, ["digits"], FewShotProtocol(shots=(1, 5)))
    report = fewshot_checkpoint(*settings, options=CPU, out=tmp_path / "result.json")
    train, test = load_dataset("digits", "train"), load_dataset("digits", "test")
    train_x, test_x = (features(load_model(workdir), part, preprocessing=GOOGLE) for part in (train, test))
    assert [(row["shots"], row["l2"]) for row in report["rows"]] == [(1, 1024.0), (5, 1024.0)]
    for row in report["rows"]:
        for seed, accuracy in enumerate(row["accuracies"]):
            rows = sample_shots(train.labels, 10, row["shots"], seed)
            ridge = Ridge(train_x.x[rows], train.labels[rows], 10)
            assert accuracy == ridge.correct(test_x.x, test.labels, [1024.0]).mean()
        assert (row["train_images"], row["test_images"], row["short_classes"]) == (10 * row["shots"], len(test), 0)
        assert row["mean"] == pytest.approx(np.mean(row["accuracies"]))
        assert row["deviation"] == pytest.approx(np.std(row["accuracies"], ddof=1))
        assert f"{row['mean']:.2%} ± {row['deviation']:.2%}" in format_fewshot(report)
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(report))
    assert report["settings"]["preprocessing"]["resize"] == 9  # 8 * 256 / 224
    assert len(list(cache.glob("*.npz"))) == 2
    monkeypatch.delattr(load, "eval_batches")
    assert fewshot_checkpoint(*settings, options=CPU) == report


@pytest.mark.usefixtures("pretrained")
def test_original_form_on_two_sets(workdir: Path, tmp_path: Path) -> None:
    """The first images of each class, one l2 for all sets and each number of shots, chosen by rank."""
    write_images(tmp_path / "some", load_dataset("digits", "train").take(np.arange(200)))
    names, grid = ["digits", f"folder:{tmp_path / 'some'}"], FewShotProtocol(original=True).l2_grid
    report = fewshot_checkpoint(workdir, names, FewShotProtocol(shots=(5,), original=True), options=CPU)
    model, table = load_model(workdir), []
    for name in names:
        train, test = load_dataset(name, "train"), load_dataset(name, "test")
        train_x, test_x = (features(model, part, preprocessing=GOOGLE) for part in (train, test))
        rows = sample_shots(train.labels, 10, 5, None)
        ridge = Ridge(train_x.x[rows], train.labels[rows], 10)
        table.append(ridge.correct(test_x.x, test_x.labels, grid).mean(axis=1))
    best = choose_l2(np.stack(table))[0]
    for row, accuracies_by_l2 in zip(report["rows"], table, strict=True):
        assert (row["l2"], row["accuracies"], row["deviation"]) == (grid[best], [accuracies_by_l2[best]], None)
    protocol = FewShotProtocol(shots=(5,), original=True, leave_self_out=True)
    left = fewshot_checkpoint(workdir, names, protocol, options=CPU)
    assert [row["l2"] for row in left["rows"]] == [grid[choose_l2(table[other][None])[0]] for other in (1, 0)]


@pytest.mark.usefixtures("pretrained")
def test_small_and_broken_folder(workdir: Path, tmp_path: Path) -> None:
    """Fewer images than shots: what is there is used, and the table says so; what cannot be read is counted."""
    digits = load_dataset("digits", "train", classes=(0, 1))
    write_images(tmp_path / "few", digits.take(np.arange(30)))
    name = f"folder:{tmp_path / 'few'}"
    train = load_dataset(name, "train")
    Path(train.entries[0].file).write_bytes(b"")
    protocol, skip = FewShotProtocol(shots=(5, 25)), EvalOptions(on_error="skip", device="cpu")
    with pytest.raises(ImageError, match="zero bytes"):
        fewshot_checkpoint(workdir, [name], protocol, options=CPU)
    report = fewshot_checkpoint(workdir, [name], protocol, options=skip)
    assert [(row["short_classes"], row["skipped"]) for row in report["rows"]] == [(0, 1), (2, 1)]
    assert "2 classes have fewer images than shots; 1 images could not be read" in format_fewshot(report)
