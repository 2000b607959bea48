"""Neighbors against a plain loop, the linear probe against its own gradient, and both on a checkpoint."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitlab.data.registry import load_dataset
from vitlab.data.subsets import stratified_split
from vitlab.evaluate import features as features_module
from vitlab.evaluate import probe as probes
from vitlab.evaluate.features import features, frozen_preprocessing
from vitlab.evaluate.probe import Linear, Neighbors, knn, linear_probe, probe_checkpoint
from vitlab.preprocessing import Preprocessing
from vitlab.weights import load_model

K = 4

GOOGLE = frozen_preprocessing(Preprocessing.google(), (8, 8))
"""Google's few-shot evaluation: 9 is 8 * 256 / 224."""


def made(n: int, seed: int, apart: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, K, n)
    centers = np.random.default_rng(99).standard_normal((K, 6))
    return (apart * centers[labels] + rng.standard_normal((n, 6))).astype(np.float32), labels


# ------------------------------------------------------------------------------------------------------- neighbors


@pytest.mark.parametrize("apart", [0.2, 1.0])
@pytest.mark.parametrize("memory", [2**24, 300])
def test_votes_against_a_plain_loop(apart: float, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_SIMILARITIES", memory)  # all test images at once, or 5 at a time
    (x, y), (test_x, test_y) = made(60, 0, apart), made(31, 1, apart)
    found = knn(x, y, test_x, test_y, K, ks=[1, 3, 10], temperature=0.5)
    unit, asked = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in (x, test_x))
    for k in (1, 3, 10):
        weighted = majority = 0
        for query, label in zip(asked, test_y, strict=True):
            cosines = unit @ query
            nearest = sorted(range(60), key=lambda i: -cosines[i])[:k]
            votes, counts, near = [0.0] * K, [0] * K, [0.0] * K
            for i in nearest:
                votes[y[i]] += math.exp(cosines[i] / 0.5)
                counts[y[i]] += 1
                near[y[i]] += cosines[i]
            weighted += max(range(K), key=lambda c: votes[c]) == label
            majority += max(range(K), key=lambda c: (counts[c], near[c])) == label
        assert found.weighted[k] == weighted / 31
        assert found.majority[k] == majority / 31
    assert found.weighted[1] == found.majority[1]


def test_length_of_a_representation_does_not_matter() -> None:
    (x, y), (test_x, test_y) = made(60, 0), made(30, 1)
    stretched = x * np.random.default_rng(0).uniform(0.1, 10, (60, 1)).astype(np.float32)
    assert knn(x, y, test_x, test_y, K) == knn(stretched, y, 5 * test_x, test_y, K)


def test_small_temperature_is_the_nearest_neighbor() -> None:
    (x, y), (test_x, test_y) = made(60, 0, 0.3), made(30, 1, 0.3)
    found = knn(x, y, test_x, test_y, K, ks=[1, 50], temperature=1e-5)
    assert found.weighted[50] == found.weighted[1]
    assert found.majority[50] != found.majority[1]


def test_as_many_neighbors_as_there_are() -> None:
    (x, y), (test_x, test_y) = made(12, 0), made(5, 1)
    assert list(knn(x, y, test_x, test_y, K).weighted) == [1, 5, 10]
    for ks in ([13], [0], []):
        with pytest.raises(ValueError, match="give numbers from 1 to the 12 training images"):
            knn(x, y, test_x, test_y, K, ks=ks)
    with pytest.raises(ValueError, match="temperature is 0"):
        knn(x, y, test_x, test_y, K, temperature=0.0)


def test_representation_of_zeros() -> None:
    (x, y), (test_x, test_y) = made(12, 0), made(5, 1)
    x[3], test_x[2] = 0, 0
    assert 0 <= knn(x, y, test_x, test_y, K).weighted[5] <= 1


# --------------------------------------------------------------------------------------------------- the linear probe


@pytest.mark.parametrize("l2", [1e-3, 1e-1])
def test_fit_has_no_gradient_left(l2: float) -> None:
    """Mean cross-entropy + l2 / 2 |W|^2 is at its least: the gradient, written out, is zero."""
    x, y = made(80, 0)
    standard = ((x - x.mean(axis=0)) / (x.std(axis=0) + 1e-5)).astype(np.float64)
    model, converged = probes._fit(standard, y, l2, None)
    assert converged
    logits = standard @ model.coef_.T + model.intercept_
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    wrong = shares / shares.sum(axis=1, keepdims=True) - np.eye(K)[y]
    gradient = wrong.T @ standard / 80 + l2 * model.coef_
    assert abs(gradient).max() < 1e-4
    assert abs(wrong.mean(axis=0)).max() < 1e-4


def test_l2_is_chosen_on_the_held_out_part_and_all_of_train_is_fitted() -> None:
    (x, y), (test_x, test_y) = made(150, 0, 0.6), made(400, 1, 0.6)
    found = linear_probe(x, y, test_x, test_y, K)
    parts = stratified_split(y, {"val": 0.2}, 0)
    mean, std = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64) + 1e-5
    standard, asked = (((part - mean) / std).astype(np.float32) for part in (x, test_x))
    for l2, share in found.held_out.items():
        model, _ = probes._fit(standard[parts["train"]], y[parts["train"]], l2, None)
        assert share == pytest.approx((model.predict(standard[parts["val"]]) == y[parts["val"]]).mean(), abs=0.04)
    assert list(found.held_out) == sorted(probes.L2_GRID, reverse=True)
    best = max(found.held_out.values())
    assert found.l2 == max(l2 for l2, share in found.held_out.items() if share == best)
    model, _ = probes._fit(standard, y, found.l2, None)
    assert found.accuracy == (model.predict(asked) == test_y).mean()
    assert found.converged
    other = linear_probe(x, y, test_x, test_y, K, seed=1)
    assert other.held_out != found.held_out


def test_one_l2_holds_nothing_out() -> None:
    x, y = made(40, 0)
    found = linear_probe(x, y, x, y, K, l2=[1e-3])
    assert (found.held_out, found.l2) == ({}, 1e-3)
    assert found.accuracy > 0.5
    assert found.as_table() == f"accuracy {found.accuracy:.2%} with l2 0.001"


def test_fit_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "MAX_STEPS", 2)
    x, y = made(40, 0)
    found = linear_probe(x, y, x, y, K, l2=[1e-6])
    assert not found.converged
    assert found.as_table().endswith("(stopped after 2 steps)")


def test_nothing_to_tell_apart() -> None:
    x, y = made(40, 0)
    with pytest.raises(ValueError, match="all training images are of one class"):
        linear_probe(x, np.zeros(40, np.int64), x, y, K)
    with pytest.raises(ValueError, match="every class has one training image"):
        linear_probe(x[:K], np.arange(K), x, y, K)
    assert linear_probe(x[:K], np.arange(K), x, y, K, l2=[1.0]).accuracy >= 0
    for l2 in ([], [0.0], [math.nan], [1.0, -1.0]):
        with pytest.raises(ValueError, match="give one or more positive numbers"):
            linear_probe(x, y, x, y, K, l2=l2)
    x[0, 0] = np.nan
    for call in (knn, linear_probe):
        with pytest.raises(ValueError, match="1 of 40 representations are not finite"):
            call(x, y, *made(5, 1), K)


def test_tables_of_known_numbers() -> None:
    assert Neighbors({1: 0.5, 20: 0.25}, {1: 0.5, 20: 0.125}).as_table().splitlines() == [
        "  k  weighted  majority", "  1    50.00%    50.00%", " 20    25.00%    12.50%",
    ]  # fmt: skip
    assert Linear(0.75, 0.001, {0.1: 0.5, 0.001: 1.0}, True).as_table().splitlines() == [
        "    l2  held-out", "   0.1    50.00%", " 0.001   100.00%", "accuracy 75.00% with l2 0.001",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("pretrained")
def test_checkpoint_on_digits(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds by one set of features."""
    first = probe_checkpoint(workdir, "digits", "knn", ks=[1, 5], device="cpu")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("computed again")

    train, test = load_dataset("digits", "train"), load_dataset("digits", "test")
    known, asked = (features(load_model(workdir), part, preprocessing=GOOGLE) for part in (train, test))
    monkeypatch.setattr(features_module, "eval_batches", refuse)
    second = probe_checkpoint(workdir, "digits", "linear", l2=[1e-3], device="cpu")
    arrays = (known.x, known.labels, asked.x, asked.labels, 10)
    assert first.found == knn(*arrays, ks=[1, 5])
    assert second.found == linear_probe(*arrays, l2=[1e-3])
    assert (first.train_images, first.test_images, first.skipped) == (len(train), len(test), 0)
    assert first.as_table().splitlines()[-1] == f"digits: {len(train)} training and {len(test)} test images"
    record = json.loads(json.dumps(second.record()))
    assert (record["kind"], record["dataset"], record["l2"]) == ("linear", "digits", 1e-3)
    assert record["accuracy"] > 0.3


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("knn", {"l2": [1.0]}, "kind is knn: ks belongs to knn and l2 to linear"),
        ("linear", {"ks": [1]}, "kind is linear: ks belongs to knn"),
        ("knn", {"dataset": "digit"}, "unknown data set 'digit'"),
        ("knn", {"device": "quantum"}, "device 'quantum'"),
        ("knn", {}, "there is nothing at nowhere"),
    ],
)
def test_bad_settings(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        probe_checkpoint("nowhere", **{"dataset": "digits", "kind": kind, "device": "cpu"} | options)
