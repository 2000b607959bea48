"""Measuring for a plan, and the image size that the head prefers."""

import dataclasses
import math

import pytest
from made_up_machine import CONFIG, Timer, measure, plan, task

from vitlab.config import FinetuneConfig
from vitlab.finetuning.budget import MEASURED_FRACTION, best_size, fit_budget
from vitlab.finetuning.plan import REPORT_FRACTION
from vitlab.finetuning.stages import Images
from vitlab.runs.cost import ImageCost
from vitlab.train.clock import PLANNED_FRACTION
from vitlab.train.microbatch import timing_seconds

pytestmark = pytest.mark.usefixtures("unchecked")


def test_speed_is_measured_at_the_size_that_is_chosen() -> None:
    """Where small images take longer than their matrix products say, the plan keeps to the time all the same."""
    measured = []

    def slow_when_small(config: FinetuneConfig, _train: bool = True) -> ImageCost:
        measured.append(config.model.image_hw[0])
        return measure(config, slower=1.7 if config.model.image_hw[0] < 150 else 1.0)

    for seconds in (70, 300):
        measured.clear()
        made = plan(seconds, measure=slow_when_small)
        assert made.config.model.image_hw[0] in measured
        assert dataclasses.replace(made, cost=slow_when_small(made.config)).seconds <= PLANNED_FRACTION * seconds
    assert measured[0] == 112
    assert made.config.model.image_hw[0] == 224  # although by the first measurement it takes too long


@pytest.mark.parametrize("speed", [0.01, 1.0])
def test_measuring_is_a_small_part(speed: float) -> None:
    """However slow the machine: a training step is timed where a tenth of the time suffices for it. A job is planned
    for any time, and the report is a fifth of it at most."""
    few = Images(39, 6)
    for seconds in (1, 30, 300, 3600):
        timer = Timer(seconds)

        def timed(config: FinetuneConfig, train: bool, timer: Timer = timer) -> ImageCost:
            cost = measure(config, slower=1 / speed)
            timer.passed += timing_seconds(config, cost.step.train_seconds) if train else 0.0
            return cost

        made = fit_budget(task(seconds, few), timed, timer.left)
        assert timer.passed <= 1.01 * MEASURED_FRACTION * seconds
        assert made.seconds_of("report") <= REPORT_FRACTION * seconds


@pytest.mark.parametrize("seconds", [60, 90, 900])
def test_measuring_takes_of_the_time(seconds: int) -> None:
    timer = Timer(seconds)

    def slow(config: FinetuneConfig, _train: bool = True) -> ImageCost:
        timer.passed += 5
        return measure(config)

    made = fit_budget(task(seconds), slow, timer.left)
    assert timer.passed > 0
    assert made.seconds <= PLANNED_FRACTION * timer.left()


@pytest.mark.parametrize(("best", "chosen"), [(160, 154), (224, 224)])
def test_the_size_with_the_least_loss(best: int, chosen: int) -> None:
    """Of half, 70% and all of the largest side, and not larger; with a budget and without."""
    compared: list[tuple[int, int]] = []

    def head_loss(config: FinetuneConfig, count: int) -> float:
        compared.append((config.model.image_hw[0], count))
        return abs(config.model.image_hw[0] - best)

    def sizes() -> tuple[list[int], int]:
        (count,) = {count for _, count in compared}
        sides = [side for side, _ in compared]
        compared.clear()
        return sides, count

    made = fit_budget(task(300), measure, lambda: 300.0, head_loss)
    sides, count = sizes()
    assert (sides, made.config.model.image_hw) == ([112, 154, 224], (chosen, chosen))
    assert 200 <= count <= 500
    assert fit_budget(task(40), measure, lambda: 40.0, head_loss).config.runs == 0
    assert not compared  # the time suffices for too few images

    data = dataclasses.replace(CONFIG.data, eval_resize=256)
    config = dataclasses.replace(CONFIG, steps=100, data=data)
    job = best_size(task(math.inf, config=config), measure, head_loss)
    assert (job.model.image_hw, job.data.eval_resize) == ((chosen, chosen), round(256 * chosen / 224))
    assert (job.steps, job.runs, sizes()) == (100, config.runs, ([112, 154, 224], 500))
    few = task(math.inf, Images(30, 10), dataclasses.replace(config, steps=1))
    assert best_size(few, measure, head_loss).model.image_hw == (chosen, chosen)
    assert sizes()[1] == 30
    assert best_size(task(math.inf, Images(19, 10), config), measure, head_loss) == config
    assert not compared  # fewer than two images of each class


def test_a_model_whose_speed_is_not_known() -> None:
    """One that only fits when it is sharded: the head alone takes a known time, and no smaller size is looked for."""

    def unknown(config: FinetuneConfig, _train: bool = True) -> ImageCost:
        cost = measure(config)
        return dataclasses.replace(cost, step=dataclasses.replace(cost.step, train_seconds=math.inf))

    config = dataclasses.replace(CONFIG, steps=100)
    assert best_size(task(math.inf, config=config), unknown, lambda *_: pytest.fail("is compared")) == config
    assert plan(300, measure=unknown).config.runs == 0


def test_no_part_where_all_images_fit() -> None:
    """By the measurement at the smallest size, where that at another was no guide."""

    def fast_when_small(config: FinetuneConfig, _train: bool = True) -> ImageCost:
        return measure(config, slower=1.0 if config.model.image_hw[0] <= 84 else 50.0)

    job = plan(60, measure=fast_when_small).config
    assert (job.model.image_hw, job.data.subset_fraction) == ((84, 84), None)
