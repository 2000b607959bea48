"""What is chosen for a budget, by the costs of a made-up machine."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, Literal

import pytest

from vitlab.config import FinetuneConfig
from vitlab.errors import UserError
from vitlab.finetuning.budget import MEASURED_FRACTION, best_size, fit_budget
from vitlab.finetuning.plan import (
    ENOUGH_STEPS,
    MIN_EPOCHS,
    MIN_STEPS,
    REPORT_FRACTION,
    Plan,
    Task,
    choose,
    left_out,
    with_steps,
)
from vitlab.finetuning.stages import Images
from vitlab.models import ViTConfig
from vitlab.recipes.finetune import staged
from vitlab.recipes.rules import REFIT_EPOCHS, SHORT_MIN_AREA
from vitlab.runs.cost import ImageCost
from vitlab.train.clock import PLANNED_FRACTION
from vitlab.train.microbatch import StepCost, step_seconds

pytestmark = pytest.mark.usefixtures("unchecked")  # a plan tries hundreds of configurations

CONFIG = dataclasses.replace(
    staged(),
    model=ViTConfig(image_size=224, patch_size=14, width=384, depth=12, heads=6, mlp_dim=1536, num_classes=10),
    batch_size=32,
)
IMAGES = Images(1000, 500)
FLOPS = 1e11
OPEN = ("model.image_size", "head_views", "refit", "runs", "data.subset_fraction")
BUDGETS = (60, 90, 150, 300, 900, 1500, 3600, 10**6)


def measure(config: FinetuneConfig, _train: bool = True, slower: float = 1.0) -> ImageCost:
    forward = 2 * config.model.forward_macs / FLOPS * slower
    return ImageCost(StepCost(32, 3 * forward, forward, forward, 0, None), config.model.forward_macs, decode=0.002)


def task(seconds: float, images: Images = IMAGES, config: FinetuneConfig = CONFIG, **settings: Any) -> Task:
    return Task(config, images, settings.pop("open_settings", OPEN), seconds, **settings)


def plan(seconds: float, *arguments: Any, measure: Callable[..., ImageCost] = measure, **settings: Any) -> Plan:
    """The plan on a machine whose clock stands still."""
    return fit_budget(task(seconds, *arguments, **settings), measure, lambda: float(seconds))


class Timer:
    """The seconds left of a budget."""

    def __init__(self, seconds: float, passed: float = 0.0) -> None:
        self.seconds, self.passed = seconds, passed

    def left(self) -> float:
        return self.seconds - self.passed


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


def test_the_table() -> None:
    """A row for each stage: seconds = images x seconds of an image, by hand."""
    config = dataclasses.replace(with_steps(CONFIG, 10), head_views=2, learning_rates=(1e-4,))
    cost = ImageCost(StepCost(32, 0.4, 0.1, 0.05, 0, None), config.model.forward_macs, decode=0.01, cores=2)
    made = Plan(config, Images(1000, 500), cost)
    read = {stage.name: stage.seconds for stage in made.stages}
    assert read["head"] == pytest.approx(3 * 1000 * 0.06)
    assert read["sweep"] == read["final"] == pytest.approx(10 * 32 * 0.41)
    assert read["score"] == pytest.approx(200 * (0.11 + 3 * 0.06))  # the model in float32, averages in bfloat16
    assert read["test"] == pytest.approx(2 * 500 * 0.11)
    assert read["read"] == 0  # only where unreadable images are skipped
    assert made.seconds == pytest.approx(sum(read.values()))
    assert made.after("final") == pytest.approx(read["test"] + read["report"])
    lines = made.table("cpu").splitlines()
    assert [line.split()[0] for line in lines] == [
        *("model", "data", "speed", "head", "sweep", "score", "final", "test", "report", "total")
    ]
    several = dataclasses.replace(made, config=dataclasses.replace(config, learning_rates=(), runs=3))
    assert several.stage("final") == pytest.approx(3 * read["final"])
    assert (several.stage("sweep"), several.stage("score")) == (0, 0)
    alone = dataclasses.replace(made, config=dataclasses.replace(config, refit=False))
    assert (alone.stage("final"), alone.stage("test")) == (0, read["test"])
    unknown = dataclasses.replace(made, cost=dataclasses.replace(cost, step=StepCost(1, math.inf, 1.0, 1.0, 0, None)))
    assert "unknown" in unknown.table("cpu")


def test_processes_share_the_images_and_a_gpu_waits_for_readers() -> None:
    model, cost = CONFIG.model, ImageCost(StepCost(32, 0.3, 0.1, 0.1, 0, None), CONFIG.model.forward_macs, decode=0.002)
    assert dataclasses.replace(cost, processes=8).train(model) == pytest.approx(cost.train(model) / 8)
    slow = dataclasses.replace(cost, decode=3.0, workers=5)
    assert slow.train(model) == pytest.approx(0.6)  # five readers take twice as long as a step


def test_few_images_are_fine_tuned_for_enough_steps() -> None:
    """However few: many epochs, or not at all."""
    for images in (Images(100, 500), Images(10, 20)):
        jobs = [plan(seconds, images).config for seconds in BUDGETS]
        steps = [job.total_steps(images.train) for job in jobs if job.runs]
        assert steps
        assert min(steps) >= MIN_STEPS


def test_speed_is_measured_at_the_size_that_is_chosen() -> None:
    """Where small images take longer than their matrix products say, the plan keeps to the time all the same."""
    measured = []

    def slow_when_small(config: FinetuneConfig, _train: bool = True) -> ImageCost:
        measured.append(config.model.image_hw[0])
        return measure(config, slower=1.7 if config.model.image_hw[0] < 150 else 1.0)

    for seconds in (70, 90, 300):
        measured.clear()
        made = plan(seconds, measure=slow_when_small)
        assert made.config.model.image_hw[0] in measured
        assert dataclasses.replace(made, cost=slow_when_small(made.config)).seconds <= PLANNED_FRACTION * seconds
    assert measured[0] == 112
    assert made.config.model.image_hw[0] == 224  # although by the first measurement it takes too long


@pytest.mark.parametrize("speed", [0.01, 0.1, 1.0])
def test_measuring_is_a_small_part(speed: float) -> None:
    """However slow the machine: a training step is timed where a tenth of the time suffices for it. A job is planned
    for any time, and the report is a fifth of it at most."""
    few = Images(39, 6)
    for seconds in (1, 10, 30, 90, 300, 3600):
        timer = Timer(seconds)

        def timed(config: FinetuneConfig, train: bool, timer: Timer = timer) -> ImageCost:
            cost = measure(config, slower=1 / speed)
            timer.passed += step_seconds(config, cost.step.train_seconds) if train else 0.0
            return cost

        made = fit_budget(task(seconds, few), timed, timer.left)
        assert timer.passed <= 1.01 * MEASURED_FRACTION * seconds
        assert made.stage("report") <= REPORT_FRACTION * seconds


def test_the_budget_that_includes_what_is_left_out() -> None:
    made = plan(60)
    assert made.config.runs == 0
    (line,) = (line for line in left_out(task(60), made) if "fine-tuning" in line)
    (minutes,) = map(int, re.findall(r"--budget (\d+)m includes it", line))
    assert plan(60 * minutes).config.runs == 1
    assert plan(60 * (minutes - 1)).config.runs == 0
    assert not list(left_out(task(10**6), plan(10**6)))


@pytest.mark.parametrize("seconds", [60, 70, 90, 120, 300, 900])
def test_measuring_takes_of_the_time(seconds: int) -> None:
    timer = Timer(seconds)

    def slow(config: FinetuneConfig, _train: bool = True) -> ImageCost:
        timer.passed += 5
        return measure(config)

    made = fit_budget(task(seconds), slow, timer.left)
    assert timer.passed > 0
    assert made.seconds <= PLANNED_FRACTION * timer.left()


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


@pytest.mark.parametrize(("best", "chosen"), [(84, 112), (160, 154), (224, 224)])
def test_the_size_with_the_least_loss(best: int, chosen: int) -> None:
    """Of half, 70 % and all of the largest side, and not larger; with a budget and without."""
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


def test_other_steps_in_proportion() -> None:
    config = dataclasses.replace(CONFIG, steps=100, learning_rates=(1e-4, 3e-4), sweep_steps=20)
    longer = with_steps(config, 300)
    assert (longer.sweep_steps, longer.optim.warmup_steps) == (60, 30)
    assert with_steps(dataclasses.replace(config, sweep_steps=None), 300).sweep_steps is None


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


def test_choosing_is_pure() -> None:
    arguments = (task(300), measure, 250.0)
    assert choose(*arguments) == choose(*arguments)
