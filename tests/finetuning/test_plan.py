"""What is chosen for a budget, by the costs of a made-up machine."""

import dataclasses
import re
from typing import Literal

import pytest
from made_up_machine import BUDGETS, CONFIG, IMAGES, OPEN, Timer, measure, plan, task

from vitlab.config import FinetuneConfig
from vitlab.errors import UserError
from vitlab.finetuning.budget import fit_budget
from vitlab.finetuning.plan import ENOUGH_STEPS, MIN_EPOCHS, MIN_STEPS, choose, head_only, left_out, with_steps
from vitlab.finetuning.stages import Images
from vitlab.recipes.rules import REFIT_EPOCHS, SHORT_MIN_AREA
from vitlab.runs.cost import ImageCost
from vitlab.train.clock import PLANNED_FRACTION

pytestmark = pytest.mark.usefixtures("unchecked")  # a plan tries hundreds of configurations


def test_a_larger_budget_never_gives_a_smaller_job() -> None:
    """First the head at larger and larger sizes, then one run, then a second one on all images; within the time."""
    plans = [plan(seconds) for seconds in BUDGETS]
    for seconds, made in zip(BUDGETS, plans, strict=True):
        assert made.seconds <= PLANNED_FRACTION * seconds
        if made.config.runs and seconds < 10**6:
            assert made.seconds > 0.95 * PLANNED_FRACTION * seconds
            assert made.config.total_steps(1000) * 32 >= MIN_EPOCHS * IMAGES.train
    jobs = [made.config for made in plans]
    stages = [job.runs + (job.runs and job.refit) for job in jobs]
    assert stages == sorted(stages)
    assert {*stages} == {0, 1, 2}
    epochs = [32 * job.total_steps(1000) / IMAGES.train for job in jobs if job.runs and job.refit]
    assert min(epochs) >= REFIT_EPOCHS
    assert (jobs[0].runs, jobs[-1].model.image_hw) == (0, (224, 224))
    assert jobs[0].model.image_hw[0] < 224
    assert jobs[-2].total_steps(1000) < jobs[-1].total_steps(1000) < 10**5  # which ends at MAX_EPOCHS


def test_views_and_the_report_leave_time_for_fine_tuning() -> None:
    """Nothing but the head alone is planned only where fine-tuning without views does not fit either."""
    without = {"config": dataclasses.replace(CONFIG, head_views=None), "open_settings": {*OPEN} - {"head_views"}}
    saved = 0
    for seconds in range(300, 1500, 30):
        made = plan(seconds)
        assert bool(made.config.runs) >= bool(plan(seconds, **without).config.runs)
        saved += made.config.runs > 0 and made.report == "short" and seconds > 400  # which has time for the whole one
    assert saved > 1


def test_few_images_are_fine_tuned_for_enough_steps() -> None:
    """However few: many epochs, or not at all."""
    for images in (Images(100, 500), Images(10, 20)):
        jobs = [plan(seconds, images).config for seconds in BUDGETS[2::2]]
        steps = [job.total_steps(images.train) for job in jobs if job.runs]
        assert steps
        assert min(steps) >= MIN_STEPS


def test_the_budget_that_includes_what_is_left_out() -> None:
    made = plan(60)
    assert made.config.runs == 0
    (line,) = (line for line in left_out(task(60), made) if "fine-tuning" in line)
    (minutes,) = map(int, re.findall(r"--budget (\d+)m includes it", line))
    assert f"{task(60).images.train:,} training images takes" in line
    assert plan(60 * minutes).config.runs == 1
    assert plan(60 * (minutes - 1)).config.runs == 0
    assert not list(left_out(task(10**6), plan(10**6)))


def test_a_given_size_is_kept() -> None:
    given = ("runs", "head_views")
    assert plan(400, open_settings=given).config.model.image_hw == (224, 224)
    with pytest.raises(UserError, match=r"--budget [45]m"):
        plan(30, open_settings=given)


def test_preprocessing_follows_the_size() -> None:
    data = dataclasses.replace(CONFIG.data, eval_resize=256, eval_interpolation="bicubic")
    job = plan(90, config=dataclasses.replace(CONFIG, data=data)).config
    side = job.model.image_hw[0]
    assert job.data.eval_resize == round(256 * side / 224)
    assert job.data.preprocessing(job.model.image_size).image_size == side


def test_a_part_of_too_many_images() -> None:
    """The head alone, at the smallest size, for as many images of each class as the time suffices."""
    many = Images(100_000, 500)
    made = plan(60, many)
    assert made.config.data.subset_fraction is not None
    assert (made.config.runs, made.config.model.image_hw) == (0, (84, 84))
    assert 0.9 < made.seconds / (PLANNED_FRACTION * 60) <= 1
    assert any(f"of the {many.train:,} training images" in line for line in left_out(task(60, many), made))
    alone = choose(task(60, many, head_only(CONFIG)), measure, PLANNED_FRACTION * 60)  # for the sizes to compare
    assert (alone.config.runs, alone.config.data.subset_fraction) == (0, made.config.data.subset_fraction)
    with pytest.raises(UserError, match=r"--budget \d+m"):
        plan(60, many, open_settings=("model.image_size", "head_views", "runs"))
    job = plan(60, Images(1000, 1_000_000)).config  # the test takes longer, whatever is planned
    assert (job.runs, job.data.subset_fraction, job.model.image_hw) == (0, 2 * 10 / 1000, (84, 84))


def test_many_images_are_fine_tuned_for_less_than_an_epoch() -> None:
    """By ENOUGH_STEPS of one run, with the crops of a short training."""
    many, open_settings = Images(20_000, 500), (*OPEN, "data.min_area")
    jobs = (plan(seconds, many, open_settings=open_settings).config for seconds in range(1000, 20_000, 1000))
    first = next(job for job in jobs if job.runs)
    assert ENOUGH_STEPS <= first.total_steps(many.train) < MIN_EPOCHS * many.train / 32
    assert (first.refit, first.data.min_area) == (False, SHORT_MIN_AREA)
    longest = plan(10**6, many, open_settings=open_settings).config
    assert (longest.refit, longest.data.min_area) == (True, CONFIG.data.min_area)


@pytest.mark.parametrize("head", ["least_squares", None])
def test_the_advice_suffices(head: Literal["least_squares"] | None) -> None:
    """Where fine-tuning is asked for, it counts; with or without a head."""
    config = dataclasses.replace(CONFIG, head=head, head_views=None, learning_rates=(1e-4,), runs=3)

    def planned(seconds: int) -> FinetuneConfig:
        timer = Timer(seconds, passed=15.0)

        def slow(config: FinetuneConfig, _train: bool = True) -> ImageCost:
            timer.passed += 20
            return measure(config)

        return fit_budget(task(seconds, config=config, open_settings=("model.image_size",)), slow, timer.left).config

    with pytest.raises(UserError, match="--budget") as error:
        planned(60)
    (minutes,) = re.findall(r"--budget (\d+)m", str(error.value))
    assert planned(60 * int(minutes)).runs == 3


def test_other_steps_in_proportion() -> None:
    config = dataclasses.replace(CONFIG, steps=100, learning_rates=(1e-4, 3e-4), sweep_steps=20)
    longer = with_steps(config, 300)
    assert (longer.sweep_steps, longer.optim.warmup_steps) == (60, 30)
    assert with_steps(dataclasses.replace(config, sweep_steps=None), 300).sweep_steps is None
