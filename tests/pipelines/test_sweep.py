"""The held-out part of the training split, and the best learning rate."""

from typing import Any

import numpy as np
import pytest

from vitlab.data.dataset import Dataset
from vitlab.data.subsets import stratified_split
from vitlab.pipelines.sweep import best_rate, hold_out
from vitlab.train.loop import NonFiniteError


def test_best_rate() -> None:
    def score(lr: float, accuracy: float | None, loss: float = 1.0) -> dict[str, Any]:
        return {"learning_rate": lr, "accuracy": accuracy, "loss": loss}

    assert best_rate([score(0.03, 0.5), score(0.003, 0.9), score(0.01, 0.7)]) == 0.003
    assert best_rate([score(0.03, 0.9), score(0.01, 0.9), score(0.003, 0.8)]) == 0.01  # of equals the smaller
    assert best_rate([score(0.03, 0.9, 0.2), score(0.01, 0.9, 0.3), score(0.003, 0.8, 0.1)]) == 0.03  # or less sure
    assert best_rate([score(0.03, None), score(0.01, 0.0)]) == 0.01
    with pytest.raises(NonFiniteError, match=r"diverged at every learning rate \(0\.03, 0\.1\); try smaller"):
        best_rate([score(0.03, None), score(0.1, None)])


def numbered(labels: np.ndarray) -> Dataset:
    """A set whose image i has the value i."""
    pixels = np.arange(len(labels), dtype=np.uint8)[:, None, None, None].repeat(3, axis=3)
    return Dataset("made", "trainval", ("a", "b", "c"), labels, pixels)


def test_held_out_part_is_stratified_seeded_and_apart() -> None:
    train = numbered(np.repeat([0, 1, 2], [100, 40, 10]))
    rest, held = hold_out(train, 0.1, 7)
    assert np.bincount(held.labels).tolist() == [10, 4, 1]
    assert held.split == "held_out"
    assert rest.pixels is not None
    assert held.pixels is not None
    values = np.concatenate([rest.pixels.ravel()[::3], held.pixels.ravel()[::3]])
    assert sorted(values) == list(range(150))  # every image once, on one side
    again, other = hold_out(train, 0.1, 7)[1], hold_out(train, 0.1, 8)[1]
    assert again.pixels is not None
    assert other.pixels is not None
    assert np.array_equal(again.pixels, held.pixels)
    assert not np.array_equal(other.pixels, held.pixels)
    cut = stratified_split(train.labels, {"val": 0.1}, 7)["val"]  # as val is cut from train
    as_cut = train.take(cut).pixels
    assert as_cut is not None
    assert not np.array_equal(as_cut, held.pixels)
    large = hold_out(numbered(np.array([0, 0, 1, 1, 1])), 0.9, 0)[0]
    assert np.bincount(large.labels).tolist() == [1, 1]  # no class is lost to train on
    with pytest.raises(ValueError, match=r"leaves 3 images of made to train on and 0 to evaluate on"):
        hold_out(numbered(np.array([0, 1, 2])), 0.5, 0)
