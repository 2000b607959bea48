"""The held-out part of the training split, the best learning rate, and the estimate before a fine-tuning begins."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from vitlab.config import FinetuneConfig
from vitlab.data.dataset import Dataset
from vitlab.data.splits import stratified_split
from vitlab.models.config import ViTConfig
from vitlab.pipelines.estimate import Images, JobCost, format_estimate
from vitlab.pipelines.linear_stage import hold_out
from vitlab.pipelines.sweep import best_score
from vitlab.recipes.finetune import custom
from vitlab.train.loop import NonFiniteError
from vitlab.train.microbatch import GIB, StepCost


def score(lr: float, accuracy: float | None, loss: float = 1.0) -> dict[str, Any]:
    return {"learning_rate": lr, "accuracy": accuracy, "loss": loss}


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([score(0.03, 0.5), score(0.003, 0.9), score(0.01, 0.7)], 0.003),
        ([score(0.03, 0.9), score(0.01, 0.9), score(0.003, 0.8)], 0.01),  # of equals the smaller
        ([score(lr, lr) | {"mean_average_precision": 1 - lr} for lr in (0.03, 0.003, 0.01)], 0.003),
        ([score(0.03, 0.9, 0.2), score(0.01, 0.9, 0.3), score(0.003, 0.8, 0.1)], 0.03),  # or that of lower loss
        ([score(0.03, None), score(0.01, 0.0)], 0.01),
        # Beside a least-squares head, by loss.
        ([score(0.03, 0.9, 0.3) | {"alpha": 0.5}, score(0.01, 0.8, 0.2) | {"alpha": 1.0}], 0.01),
    ],
)
def test_best_learning_rate(scores: list[dict[str, Any]], best: float) -> None:
    assert best_score(scores)["learning_rate"] == best


def test_no_best_learning_rate() -> None:
    with pytest.raises(NonFiniteError, match=r"diverged at every learning rate \(0\.03, 0\.1\)"):
        best_score([score(0.03, None), score(0.1, None)])


def numbered(labels: list[int]) -> Dataset:
    """A data set whose image i has the value i."""
    pixels = np.arange(len(labels), dtype=np.uint8)[:, None, None, None].repeat(3, axis=3)
    return Dataset("made", "trainval", ("a", "b", "c"), np.array(labels), pixels)


def numbers(dataset: Dataset) -> list[int]:
    assert dataset.pixels is not None
    return dataset.pixels[:, 0, 0, 0].tolist()


def test_hold_out() -> None:
    """Stratified, seeded, disjoint, and not the images that are held out as the val split."""
    train = numbered([0] * 100 + [1] * 40 + [2] * 10)
    rest, held = hold_out(train, 0.1, 7)
    assert np.bincount(held.labels).tolist() == [10, 4, 1]
    assert held.split == "held_out"
    assert sorted(numbers(rest) + numbers(held)) == list(range(150))
    assert numbers(hold_out(train, 0.1, 7)[1]) == numbers(held) != numbers(hold_out(train, 0.1, 8)[1])
    assert stratified_split(train.labels, {"val": 0.1}, 7)["val"].tolist() != numbers(held)
    assert np.bincount(hold_out(numbered([0, 0, 1, 1, 1]), 0.9, 0)[0].labels).tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"leaves 3 images of made to train on and 0 to evaluate on"):
        hold_out(numbered([0, 1, 2]), 0.5, 0)


COST = StepCost(
    microbatch=16, train_seconds=0.1, eval_seconds=0.05, feature_seconds=0.05, memory=2 * GIB, free=20 * GIB
)
CONFIG = dataclasses.replace(
    custom(),
    model=ViTConfig(image_size=224, patch_size=14, width=384, depth=12, heads=6, mlp_dim=1536, num_classes=3),
    steps=100,
    batch_size=32,
    sweep_steps=20,
    automatic=(),
)


def rows(config: FinetuneConfig = CONFIG, cost: StepCost = COST) -> dict[str, str]:
    """The lines of an estimate by name, for 160 training and 40 test images."""
    lines = format_estimate(config, JobCost(cost), Images(160, 40), "cpu").splitlines()
    return {line.split()[0]: " ".join(line.split()[1:]) for line in lines}


def test_estimate() -> None:
    """Seconds: 3 x (20 x 32 x 0.1 + 16 x 0.05) of the sweep, 100 x 32 x 0.1 + 40 x 0.05 of the run."""
    text = rows()
    assert text["model"] == "21.6M parameters, 224x224 px, on cpu"
    assert text["sweep"].endswith("scored on about 16 images: 3:14")
    assert text["training"] == "1 x 100 steps of 32 images (20.0 epochs), then the test: 5:22"
    assert text["total"] == "about 8:36"
    assert text["shorter"] == (
        "--optim.lr 0.01, without a sweep: 5:22 | --steps 50: 4:20 | --image-size 168: about 4:39"
    )


def test_estimate_without_a_refit() -> None:
    """The final run takes its test alone, 40 x 0.05 seconds."""
    text = rows(dataclasses.replace(CONFIG, refit=False, sweep_steps=None))
    assert text["training"] == "none: the best run of the sweep (20.0 epochs) is tested: 0:02"


def test_estimate_of_several_runs_without_a_sweep() -> None:
    text = rows(dataclasses.replace(CONFIG, runs=3, learning_rates=(), sweep_steps=None))
    assert text["training"].endswith("16:06")
    assert text["total"] == "about 16:06"
    assert "sweep" not in text


def test_estimate_of_unknown_speed() -> None:
    text = rows(cost=dataclasses.replace(COST, train_seconds=math.inf))
    assert (text["total"], "shorter" in text) == ("about unknown", False)


def test_estimate_of_a_short_run() -> None:
    assert "shorter" not in rows(
        cost=dataclasses.replace(COST, train_seconds=1e-3, eval_seconds=1e-3, feature_seconds=1e-3)
    )
