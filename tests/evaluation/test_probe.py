"""Neighbors against a plain loop, the linear probe against its own gradient, and both on a checkpoint."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from vitlab.data.registry import load_dataset
from vitlab.data.splits import stratified_split
from vitlab.errors import UserError
from vitlab.evaluation import load
from vitlab.evaluation import probe as probes
from vitlab.evaluation.features import Features, features, frozen_preprocessing
from vitlab.evaluation.options import FeatureOptions
from vitlab.evaluation.probe import format_probe, knn, linear_probe, probe_checkpoint
from vitlab.preprocessing import Preprocessing
from vitlab.weights import load_model

K = 4

GOOGLE = frozen_preprocessing(Preprocessing.google(), (8, 8))
"""Google's few-shot evaluation: 9 is 8 * 256 / 224."""
CPU = FeatureOptions(device="cpu")


def made(n: int, seed: int, apart: float = 1.0) -> Features:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, K, n)
    centers = np.random.default_rng(99).standard_normal((K, 6))
    x = (apart * centers[labels] + rng.standard_normal((n, 6))).astype(np.float32)
    return Features(x, labels, np.arange(n), 0)


@pytest.mark.parametrize("memory", [2**24, 300])
def test_votes_against_a_plain_loop(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "MAX_SIMILARITIES", memory)  # all test images at once, or 5 at a time
    train, test = made(60, 0, 0.5), made(31, 1, 0.5)
    result = knn(train, test, K, ks=[1, 3, 10])
    unit, queries = (part.x / np.linalg.norm(part.x, axis=1, keepdims=True) for part in (train, test))
    for k in (1, 3, 10):
        correct = 0
        for query, label in zip(queries, test.labels, strict=True):
            cosines = unit @ query
            votes = [0.0] * K
            for i in sorted(range(60), key=lambda i: -cosines[i])[:k]:
                votes[train.labels[i]] += math.exp(cosines[i] / probes.TEMPERATURE)
            correct += max(range(K), key=lambda c: votes[c]) == label
        assert result[k] == correct / 31
    stretched = dataclasses.replace(train, x=train.x * 7), dataclasses.replace(test, x=test.x * 5)
    assert knn(*stretched, K, ks=[1, 3, 10]) == result  # the length does not matter


def test_as_many_neighbors_as_there_are() -> None:
    train, test = made(12, 0), made(5, 1)
    assert list(knn(train, test, K)) == [1, 5, 10]
    for ks in ([13], [0], []):
        with pytest.raises(ValueError, match="give numbers from 1 to the 12 training images"):
            knn(train, test, K, ks=ks)


@pytest.mark.parametrize("l2", [1e-3, 1e-1])
def test_fit_has_no_gradient_left(l2: float) -> None:
    """Mean cross-entropy + l2 / 2 |W|^2 is at its least: the gradient, written out, is zero."""
    train = made(80, 0)
    x, y = train.x, train.labels
    standard = ((x - x.mean(axis=0)) / (x.std(axis=0) + 1e-5)).astype(np.float64)
    model = probes._fit(standard, y, l2)
    logits = standard @ model.coef_.T + model.intercept_
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    error = shares / shares.sum(axis=1, keepdims=True) - np.eye(K)[y]
    gradient = error.T @ standard / 80 + l2 * model.coef_
    assert abs(gradient).max() < 1e-4
    assert abs(error.mean(axis=0)).max() < 1e-4


def test_l2_is_chosen_on_the_held_out_part_and_all_of_train_is_fitted() -> None:
    train, test = made(150, 0, 0.6), made(400, 1, 0.6)
    result = linear_probe(train, test)
    (x, y), (test_x, test_y) = (train.x, train.labels), (test.x, test.labels)
    parts = stratified_split(y, {"val": 0.2}, 0)
    mean, std = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64) + 1e-5
    standard, test_standard = (((part - mean) / std).astype(np.float32) for part in (x, test_x))
    for l2, share in result["held_out"].items():
        model = probes._fit(standard[parts["train"]], y[parts["train"]], l2)
        assert share == pytest.approx((model.predict(standard[parts["val"]]) == y[parts["val"]]).mean(), abs=0.04)
    assert list(result["held_out"]) == sorted(probes.L2_GRID, reverse=True)
    best = max(result["held_out"].values())
    assert result["l2"] == max(l2 for l2, share in result["held_out"].items() if share == best)
    model = probes._fit(standard, y, result["l2"])
    assert (result["accuracy"], result["converged"]) == ((model.predict(test_standard) == test_y).mean(), True)
    assert linear_probe(train, test, seed=1)["held_out"] != result["held_out"]


def test_l2_is_chosen_on_a_val_or_on_whole_groups() -> None:
    train, val, test = made(60, 0, 0.6), made(40, 1, 0.6), made(40, 2, 0.6)
    scores = linear_probe(train, test, val=val)["held_out"]
    for l2, score in scores.items():  # each fit is that of all of train
        assert linear_probe(train, val, l2=[l2])["accuracy"] == pytest.approx(score, abs=0.05)
    copies = dataclasses.replace(
        train, x=np.tile(train.x, (4, 1)), labels=np.tile(train.labels, 4), indices=np.arange(240)
    )
    fooled, honest = (linear_probe(copies, test, groups=groups) for groups in (None, np.tile(np.arange(60), 4)))
    assert max(honest["held_out"].values()) < max(fooled["held_out"].values())


def test_one_l2_holds_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    train = made(40, 0)
    linear = linear_probe(train, train, l2=[1e-3])
    assert (linear["held_out"], linear["l2"], linear["converged"]) == ({}, 1e-3, True)
    monkeypatch.setattr(probes, "MAX_STEPS", 2)
    assert not linear_probe(train, train, l2=[1e-6])["converged"]


def test_data_that_no_probe_is_fitted_to() -> None:
    train = made(40, 0)
    single = Features(train.x[:K], np.arange(K), np.arange(K), 0)
    assert linear_probe(single, train, l2=[1.0])["accuracy"] >= 0
    same = dataclasses.replace(train, labels=np.zeros(40, np.int64))
    wrong = [(same, probes.L2_GRID, "one class"), (single, probes.L2_GRID, "one l2")]
    wrong += [(train, l2, "positive") for l2 in ([], [math.nan], [1.0, -1.0])]
    for data, l2, message in wrong:
        with pytest.raises(UserError, match=message):
            linear_probe(data, train, l2=l2)
    with pytest.raises(UserError, match="ks is for knn"):
        probe_checkpoint("missing", "digits", "knn", options=CPU, l2=[1.0])


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("pretrained")
def test_checkpoint_on_digits(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = probe_checkpoint(workdir, "digits", "knn", options=CPU, ks=[1, 5])
    parts = [load_dataset("digits", split) for split in ("train", "test")]
    train, test = (features(load_model(workdir), part, preprocessing=GOOGLE) for part in parts)
    monkeypatch.delattr(load, "eval_batches")
    second = probe_checkpoint(workdir, "digits", "linear", options=CPU, l2=[1e-3, 1e-1])
    assert first["accuracies"] == knn(train, test, 10, ks=[1, 5])
    assert second.items() >= linear_probe(train, test, l2=[1e-3, 1e-1]).items()
    assert (first["train_images"], first["test_images"], first["skipped"]) == (len(parts[0]), len(parts[1]), 0)
    assert f"{len(parts[0])} training and {len(parts[1])} test images" in format_probe(first)
    assert f"accuracy {second['accuracy']:.2%} with l2" in format_probe(second)
    assert json.loads(json.dumps(second))["accuracy"] > 0.3
