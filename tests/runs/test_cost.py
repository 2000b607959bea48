"""Seconds per image of a run."""

import dataclasses

import pytest
from made_up_machine import CONFIG

from vitlab.runs.cost import ImageCost
from vitlab.train.microbatch import StepCost


def test_processes_share_the_images_and_a_gpu_waits_for_readers() -> None:
    model, cost = CONFIG.model, ImageCost(StepCost(32, 0.3, 0.1, 0.2, 0, None), CONFIG.model.forward_macs, decode=0.002)
    assert dataclasses.replace(cost, processes=8).train(model) == pytest.approx(cost.train(model) / 8)
    two_cores = dataclasses.replace(cost, decode=0.02, cores=2)
    assert two_cores.forward(model) == pytest.approx(0.11)  # two threads read
    slow = dataclasses.replace(cost, decode=3.0, workers=5)
    assert slow.train(model) == pytest.approx(0.6)  # five readers take twice as long as a step
