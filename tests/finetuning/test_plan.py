"""What is chosen for a budget, by the costs of a made-up machine."""

import dataclasses
import math
import re
from typing import Literal

import pytest

from vitlab.config import FinetuneConfig
from vitlab.finetuning.estimate import REPORT_FRACTION, Images, JobCost
from vitlab.finetuning.plan import (
    ENOUGH_STEPS,
    MEASURED_FRACTION,
    MIN_EPOCHS,
    MIN_STEPS,
    PLANNED_FRACTION,
    best_size,
    fit_budget,
    needed_budget,
    with_steps,
)
from vitlab.models import ViTConfig
from vitlab.recipes.finetune import staged
from vitlab.recipes.rules import REFIT_EPOCHS, SHORT_MIN_AREA
from vitlab.train.microbatch import StepCost, step_seconds

pytestmark = pytest.mark.usefixtures("unchecked")  # a plan tries thousands of configurations

CONFIG = dataclasses.replace(
    staged(),
    model=ViTConfig(image_size=224, patch_size=14, width=384, depth=12, heads=6, mlp_dim=1536, num_classes=10),
    batch_size=32,
)
IMAGES = Images(1000, 500)
FLOPS = 1e11
AUTOMATIC = ("model.image_size", "head_views", "refit", "runs", "data.subset_fraction")
BUDGETS = (60, 90, 150, 300, 900, 1500, 3600, 10**6)


def measure(config: FinetuneConfig, _train: bool = True, slower: float = 1.0) -> JobCost:
    forward = 2 * config.model.forward_macs / FLOPS * slower
    return JobCost(StepCost(32, 3 * forward, forward, forward, 0, None), decode=0.002)


def test_a_larger_budget_never_gives_a_smaller_job() -> None:
    """First the head at larger and larger sizes, then one run, then a second one on all images; within the time."""
    jobs = [fit_budget(CONFIG, IMAGES, measure, seconds) for seconds in BUDGETS]
    for seconds, job in zip(BUDGETS, jobs, strict=True):
        total = sum(measure(job).seconds(job, IMAGES))
        assert total <= PLANNED_FRACTION * seconds
        if job.runs and seconds < 10**6:
            assert total > 0.95 * PLANNED_FRACTION * seconds
            assert job.steps is not None
            assert job.steps * 32 >= MIN_EPOCHS * IMAGES.train
    stages = [job.runs + (job.runs and job.refit) for job in jobs]
    assert stages == sorted(stages)
    assert {*stages} == {0, 1, 2}
    epochs = [32 * job.total_steps(1000) / IMAGES.train for job in jobs if job.runs and job.refit]
    assert min(epochs) >= REFIT_EPOCHS
    assert jobs[0].runs == 0
    assert jobs[0].model.image_hw[0] < 224
    assert jobs[-1].model.image_hw == (224, 224)
    longest = jobs[-1].total_steps(1000)
    assert jobs[-2].total_steps(1000) < longest < 10**5  # which ends at MAX_EPOCHS


def test_few_images_are_fine_tuned_for_enough_steps() -> None:
    """However few: many epochs, or not at all."""
    for images in (Images(100, 500), Images(10, 20)):
        jobs = [fit_budget(CONFIG, images, measure, seconds) for seconds in BUDGETS]
        steps = [job.total_steps(images.train) for job in jobs if job.runs]
        assert steps
        assert min(steps) >= MIN_STEPS


def test_speed_is_measured_at_the_size_that_is_chosen() -> None:
    """Where small images take longer than their matrix products say, the plan keeps to the time all the same."""
    measured = []

    def slow_when_small(config: FinetuneConfig, _train: bool = True) -> JobCost:
        measured.append(config.model.image_hw[0])
        return measure(config, slower=1.7 if config.model.image_hw[0] < 150 else 1.0)

    for seconds in (70, 90, 300):
        measured.clear()
        job = fit_budget(CONFIG, IMAGES, slow_when_small, seconds)
        assert job.model.image_hw[0] in measured
        images = Images(round((job.data.subset_fraction or 1) * IMAGES.train), IMAGES.test)
        assert sum(slow_when_small(job).seconds(job, images)) <= PLANNED_FRACTION * seconds
    assert measured[0] == 112
    assert job.model.image_hw[0] == 224  # although by the first measurement it takes too long


@pytest.mark.parametrize("speed", [0.01, 0.1, 1.0])
def test_measuring_is_a_small_part(speed: float) -> None:
    """However slow the machine: a training step is timed where a tenth of the time suffices for it. A job is planned
    for any time, and the report is a fifth of it at most."""
    few = Images(39, 6)
    for seconds in (1, 10, 30, 90, 300, 3600):
        passed = [0.0]

        def timed(config: FinetuneConfig, train: bool, seconds: int = seconds, passed: list[float] = passed) -> JobCost:
            cost = measure(config, slower=1 / speed)
            passed[0] += step_seconds(config, cost.step.train_seconds) if train else 0.0
            return dataclasses.replace(cost, report_limit=REPORT_FRACTION * seconds)

        job = fit_budget(CONFIG, few, timed, seconds, AUTOMATIC, lambda passed=passed: passed[0])
        assert passed[0] <= 1.01 * MEASURED_FRACTION * seconds
        cost = timed(job, train=False)
        assert cost.seconds(job, few).report <= REPORT_FRACTION * seconds


def test_the_budget_that_includes_what_is_left_out() -> None:
    job = fit_budget(CONFIG, IMAGES, measure, 60)
    assert job.runs == 0
    minutes = needed_budget(CONFIG, IMAGES, measure(job), job, 60, AUTOMATIC, lambda plan, _: plan.runs > 0)
    assert minutes is not None
    assert fit_budget(CONFIG, IMAGES, measure, 60 * minutes).runs == 1
    assert fit_budget(CONFIG, IMAGES, measure, 60 * (minutes - 1)).runs == 0
    assert needed_budget(CONFIG, IMAGES, measure(job), job, 60, AUTOMATIC, lambda *_: False) is None


@pytest.mark.parametrize("seconds", [60, 70, 90, 120, 300, 900])
def test_measuring_takes_of_the_time(seconds: int) -> None:
    passed = [0.0]

    def slow(config: FinetuneConfig, _train: bool = True) -> JobCost:
        passed[0] += 5
        return measure(config)

    job = fit_budget(CONFIG, IMAGES, slow, seconds, elapsed=lambda: passed[0])
    images = Images(round((job.data.subset_fraction or 1) * IMAGES.train), IMAGES.test)
    assert passed[0] > 0
    assert sum(measure(job).seconds(job, images)) <= PLANNED_FRACTION * (seconds - passed[0])


def test_a_given_size_is_kept() -> None:
    assert fit_budget(CONFIG, IMAGES, measure, 400, ("runs", "head_views")).model.image_hw == (224, 224)
    with pytest.raises(ValueError, match=r"1,000 training and 500 test images take 3:.. or more.*--budget [45]m"):
        fit_budget(CONFIG, IMAGES, measure, 30, ("runs", "head_views"))


def test_preprocessing_follows_the_size() -> None:
    data = dataclasses.replace(CONFIG.data, eval_resize=256, eval_interpolation="bicubic")
    job = fit_budget(dataclasses.replace(CONFIG, data=data), IMAGES, measure, 90)
    side = job.model.image_hw[0]
    assert job.data.eval_resize == round(256 * side / 224)
    assert job.data.preprocessing(job.model.image_size).image_size == side


def test_a_part_of_too_many_images() -> None:
    """The head alone, at the smallest size, for as many images of each class as the time suffices."""
    many = Images(100_000, 500)
    job = fit_budget(CONFIG, many, measure, 60)
    assert job.data.subset_fraction is not None
    assert (job.runs, job.model.image_hw) == (0, (84, 84))
    used = Images(round(job.data.subset_fraction * many.train), 500)
    assert 0.9 < sum(measure(job).seconds(job, used)) / (PLANNED_FRACTION * 60) <= 1
    with pytest.raises(ValueError, match=r"100,000 training and 500 test images take .* --budget \d+m"):
        fit_budget(CONFIG, many, measure, 60, ("model.image_size", "head_views", "runs"))
    job = fit_budget(CONFIG, Images(1000, 1_000_000), measure, 60)  # the test takes longer, whatever is planned
    assert (job.runs, job.data.subset_fraction, job.model.image_hw) == (0, 2 * 10 / 1000, (84, 84))


def test_many_images_are_fine_tuned_for_less_than_an_epoch() -> None:
    """By ENOUGH_STEPS of one run, with the crops of a short training."""
    many, open_settings = (
        Images(20_000, 500),
        ("model.image_size", "head_views", "refit", "runs", "data.subset_fraction", "data.min_area"),
    )
    jobs = (fit_budget(CONFIG, many, measure, seconds, open_settings) for seconds in range(1000, 20_000, 1000))
    first = next(job for job in jobs if job.runs)
    assert ENOUGH_STEPS <= first.total_steps(many.train) < MIN_EPOCHS * many.train / 32
    assert (first.refit, first.data.min_area) == (False, SHORT_MIN_AREA)
    longest = fit_budget(CONFIG, many, measure, 10**6, open_settings)
    assert (longest.refit, longest.data.min_area) == (True, CONFIG.data.min_area)


@pytest.mark.parametrize("head", ["least_squares", None])
def test_the_advice_suffices(head: Literal["least_squares"] | None) -> None:
    """Where fine-tuning is asked for, it counts; with or without a head."""
    config = dataclasses.replace(CONFIG, head=head, head_views=None, learning_rates=(1e-4,), runs=3)
    passed = [0.0]

    def slow(config: FinetuneConfig, _train: bool = True) -> JobCost:
        passed[0] += 20
        return measure(config)

    def plan(seconds: int) -> FinetuneConfig:
        passed[0] = 15.0
        return fit_budget(config, IMAGES, slow, seconds, ("model.image_size",), lambda: passed[0])

    with pytest.raises(ValueError, match="--budget") as error:
        plan(60)
    (minutes,) = re.findall(r"--budget (\d+)m", str(error.value))
    assert plan(60 * int(minutes)).runs == 3


@pytest.mark.parametrize(("best", "chosen"), [(84, 112), (160, 154), (224, 224)])
def test_the_size_with_the_least_loss(best: int, chosen: int) -> None:
    """Of half, 70 % and all of the largest side, and not larger."""
    compared: list[tuple[int, int]] = []

    def head_loss(config: FinetuneConfig, count: int) -> float:
        side = config.model.image_hw[0]
        compared.append((side, count))
        return abs(side - best)

    job = fit_budget(CONFIG, IMAGES, measure, 300, head_loss=head_loss)
    assert [side for side, _ in compared] == [112, 154, 224]
    (count,) = {count for _, count in compared}
    assert 200 <= count <= 500
    assert job.model.image_hw == (chosen, chosen)
    compared.clear()
    assert fit_budget(CONFIG, IMAGES, measure, 60, head_loss=head_loss).runs == 0
    assert not compared  # the time suffices for too few images


@pytest.mark.parametrize(("best", "chosen"), [(84, 112), (160, 154), (224, 224)])
def test_the_size_without_a_budget(best: int, chosen: int) -> None:
    """The same three sizes, by up to 500 images; test images are prepared at the size that is chosen."""
    counts: list[int] = []

    def head_loss(config: FinetuneConfig, count: int) -> float:
        counts.append(count)
        return abs(config.model.image_hw[0] - best)

    data = dataclasses.replace(CONFIG.data, eval_resize=256)
    config = dataclasses.replace(CONFIG, steps=100, data=data)
    job = best_size(config, IMAGES, measure, head_loss)
    assert (job.model.image_hw, job.data.eval_resize) == ((chosen, chosen), round(256 * chosen / 224))
    assert (job.steps, job.runs, set(counts)) == (100, config.runs, {500})
    counts.clear()
    few = Images(30, 10)
    assert best_size(dataclasses.replace(config, steps=1), few, measure, head_loss).model.image_hw == (chosen, chosen)
    assert set(counts) == {30}
    counts.clear()
    assert best_size(config, Images(19, 10), measure, head_loss) == config
    assert not counts  # fewer than two images of each class


def test_other_steps_in_proportion() -> None:
    config = dataclasses.replace(CONFIG, steps=100, learning_rates=(1e-4, 3e-4), sweep_steps=20)
    longer = with_steps(config, 300)
    assert (longer.sweep_steps, longer.optim.warmup_steps) == (60, 30)
    assert with_steps(dataclasses.replace(config, sweep_steps=None), 300).sweep_steps is None


def test_a_model_whose_speed_is_not_known() -> None:
    """One that only fits when it is sharded: the head alone takes a known time, and no smaller size is looked for."""

    def unknown(config: FinetuneConfig, _train: bool = True) -> JobCost:
        cost = measure(config)
        return dataclasses.replace(cost, step=dataclasses.replace(cost.step, train_seconds=math.inf))

    config = dataclasses.replace(CONFIG, steps=100)
    assert best_size(config, IMAGES, unknown, lambda *_: pytest.fail("is compared")) == config
    assert math.isfinite(sum(unknown(config).seconds(dataclasses.replace(config, runs=0), IMAGES)))
    assert fit_budget(CONFIG, IMAGES, unknown, 300).runs == 0


def test_no_part_where_all_images_fit() -> None:
    """By the measurement at the smallest size, where that at another was no guide."""

    def fast_when_small(config: FinetuneConfig, _train: bool = True) -> JobCost:
        return measure(config, slower=1.0 if config.model.image_hw[0] <= 84 else 50.0)

    job = fit_budget(CONFIG, IMAGES, fast_when_small, 60)
    assert (job.model.image_hw, job.data.subset_fraction) == ((84, 84), None)
