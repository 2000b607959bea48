"""The stages of a job as a table."""

import dataclasses
import math

import pytest
from made_up_machine import CONFIG, IMAGES, measure

from vitlab.finetuning.plan import Plan, with_steps
from vitlab.finetuning.stages import Images
from vitlab.runs.cost import ImageCost
from vitlab.train.microbatch import StepCost


def test_the_table() -> None:
    """A row for each stage: seconds = images x seconds of an image, by hand."""
    config = dataclasses.replace(with_steps(CONFIG, 10), head_views=2, learning_rates=(1e-4,))
    cost = ImageCost(StepCost(32, 0.4, 0.1, 0.2, 0, None), config.model.forward_macs, decode=0.01, cores=2)
    made = Plan(config, Images(1000, 500), cost)
    read = {stage.name: stage.seconds for stage in made.stages}
    assert read["head"] == pytest.approx(3 * 1000 * 0.105)
    assert read["sweep"] == read["final"] == pytest.approx(10 * 32 * 0.41)
    assert read["score"] == pytest.approx(200 * 4 * 0.105)  # the model, and three averages
    assert read["test"] == pytest.approx(2 * 500 * 0.105)
    assert read["report"] == pytest.approx(12 + 200 * 0.21 + 1500 * 0.01 / 2)  # in float32
    assert read["read"] == 0  # only where unreadable images are skipped
    assert made.seconds == pytest.approx(sum(read.values()))
    assert made.seconds_after("final") == pytest.approx(read["test"] + read["report"])
    lines = made.table("cpu").splitlines()
    assert [line.split()[0] for line in lines] == [
        *("model", "data", "speed", "head", "sweep", "score", "final", "test", "report", "total")
    ]
    several = dataclasses.replace(made, config=dataclasses.replace(config, learning_rates=(), runs=3))
    assert several.seconds_of("final") == pytest.approx(3 * read["final"])
    assert (several.seconds_of("sweep"), several.seconds_of("score")) == (0, 0)
    alone = dataclasses.replace(made, config=dataclasses.replace(config, refit=False))
    assert (alone.seconds_of("final"), alone.seconds_of("test")) == (0, read["test"])
    unknown = dataclasses.replace(made, cost=dataclasses.replace(cost, step=StepCost(1, math.inf, 1.0, 1.0, 0, None)))
    assert "unknown" in unknown.table("cpu")


def test_the_rows_of_sweep_and_final_run_have_their_own_epochs() -> None:
    """By hand: 100 and 500 steps of 32 images are 3.2 and 16 epochs of 1,000 images."""
    config = dataclasses.replace(with_steps(CONFIG, 500), learning_rates=(1e-4, 1e-3), sweep_steps=100)
    what = {stage.name: stage.what for stage in Plan(config, IMAGES, measure(config)).stages}
    assert "2 x 100 steps" in what["sweep"]
    assert "(3.2 epochs)" in what["sweep"]
    assert "1 x 500 steps" in what["final"]
    assert "(16.0 epochs)" in what["final"]
