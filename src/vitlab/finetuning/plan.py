"""The plan of a fine-tuning job in a given time (`--budget`): image size, augmented views, steps, what is left out.

`choose` measures nothing and reads no clock. From the cost of an image it finds the first of these plans that fits:

1. The least-squares head, the sweep and a final run that each see every image REFIT_EPOCHS times;
2. the same without the final run, where the sweep sees every image MIN_EPOCHS times, or takes ENOUGH_STEPS;
3. the head alone, at the largest image size that fits;
4. the head alone, at the smallest size, on as many training images as fit.

1 and 2 take the largest image size that fits, and none below MIN_FRACTION of the size in 3. If neither fits, they are
tried with fewer augmented views and a short report. (Where time is left at the end, the whole report is made.)

`budget.py` measures the cost of an image.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from vitlab.config import FinetuneConfig
from vitlab.config.finetune import NO_SWEEP
from vitlab.display import format_duration
from vitlab.errors import UserError
from vitlab.finetuning.stages import Images, Plan
from vitlab.inspection.run_section import Report
from vitlab.models.config import ViTConfig
from vitlab.recipes.rules import REFIT_EPOCHS, adapt_to_epochs
from vitlab.runs.cost import ImageCost
from vitlab.train.clock import PLANNED_FRACTION

MIN_PATCHES = 6
"""Patches on the longer side of the smallest images to choose from. The head fitted to
1,020 images of flowers with 5 was worse than the one fitted to 918 with 6."""
MIN_EPOCHS = 3.0
"""With fewer passes over the training images fine-tuning is left out."""
MAX_EPOCHS = 50.0
"""Fine-tuning takes at most so many passes over the training images."""
MIN_STEPS = 30
"""With fewer steps fine-tuning is left out: AdamW's first steps make the least-squares head worse."""
ENOUGH_STEPS = 200
"""With at least so many steps the sweep is kept, even if they are fewer than MIN_EPOCHS."""
MIN_FRACTION = 0.75
"""Smallest image size for fine-tuning, as a fraction of the size for the least-squares head alone."""
MAX_HEAD_FRACTION = 0.5
"""Largest fraction of the time for the least-squares head, if fine-tuning follows."""
REPORT_FRACTION = 0.15
"""Largest fraction of a budget for the report."""
REPORTS: tuple[Report, ...] = ("whole", "short")
"""Reports to choose from."""
SHORT_REPORTS = REPORTS[1:]
"""Reports to choose from where time must be saved."""
VIEWS = (4, 3, 2, 1, None)
"""Numbers of augmented views to choose from."""
BUDGETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 90, 120, 180, 240, 360, 480, 720, 1440)
"""Minutes of the budgets that are suggested."""


@dataclass(frozen=True)
class Task:
    """What a plan is made for."""

    config: FinetuneConfig
    """The settings without a budget."""
    images: Images
    open_settings: Collection[str]
    """Settings that the plan may choose."""
    budget: int | float
    """Seconds of the whole job."""
    largest_side: int | float = math.inf
    """Largest image side to choose, in pixels."""

    @functools.cached_property
    def sizes(self) -> list[FinetuneConfig]:
        """The config at each image size to choose from: its own, then one patch less on the longer side each time."""
        config, model = self.config, self.config.model
        if not isinstance(model, ViTConfig) or "model.image_size" not in self.open_settings:
            return [config]
        configs = [config]
        for patches in range(max(model.grid) - 1, MIN_PATCHES - 1, -1):  # on the longer side
            scale = patches / max(model.grid)
            height, width = (max(round(scale * count), 1) * model.stride for count in model.grid)
            size = height if height == width else (height, width)
            scaled = config.data.preprocessing(model.image_size).at(size)
            data = replace(config.data, eval_resize=scaled.resize if scaled.keep_aspect else None)
            configs.append(replace(config, model=replace(model, image_size=size), data=data))
        return [config for config in configs if side(config) <= self.largest_side] or configs[-1:]

    @property
    def small_config(self) -> FinetuneConfig:
        """The config at the small size that is measured first, because that is fast."""
        return self.sizes[3 * len(self.sizes) // 4]

    def plan(self, config: FinetuneConfig, cost: ImageCost, reports: Sequence[Report] = REPORTS) -> Plan:
        """The plan for `config`, with the first of these reports that the report's part of the budget allows."""
        plan = Plan(config, self.images, cost)
        kinds = (kind for kind in reports if plan.report_seconds(kind) <= REPORT_FRACTION * self.budget)
        return replace(plan, report=next(kinds, "none"))


def choose(task: Task, cost_of: Callable[[FinetuneConfig], ImageCost], available: float) -> Plan:
    """The best plan for the `available` seconds: the first that fits of the four in the module's docstring.

    Raises UserError if the settings that are not open forbid all.
    """

    def first_that_fits(configs: Sequence[FinetuneConfig], save_time: bool = False) -> Plan | None:
        reports = SHORT_REPORTS if save_time else REPORTS
        candidates = (task.plan(config, cost_of(config), reports) for config in configs)
        plans = (_plan_that_fits(task, candidate, available, save_time) for candidate in candidates)
        return next((plan for plan in plans if plan is not None), None)

    sizes = task.sizes  # the largest first
    head_plan = first_that_fits([head_only(config) for config in sizes]) if "runs" in task.open_settings else None
    smallest = MIN_FRACTION * side(head_plan.config) if head_plan else 0.0
    tuned = [config for config in sizes if side(config) >= smallest]
    plan = None
    for save_time in (False, True):
        plan = plan or first_that_fits(tuned, save_time)  # 1
        if "refit" in task.open_settings and task.config.runs:
            plan = plan or first_that_fits([replace(config, refit=False) for config in tuned], save_time)  # 2
    if plan is None:
        plan = head_plan  # 3
    if plan is None:
        plan = _plan_of_fewer_images(task, cost_of, available)  # 4
    can_change = {*task.open_settings} - {"refit"}  # `refit` is decided above
    return replace(plan, config=adapt_to_epochs(plan.config, task.images.train, can_change))


def _plan_that_fits(task: Task, plan: Plan, available: float, save_time: bool) -> Plan | None:
    """The plan with as many views, and then steps, as fit into the `available` seconds; None if those are too few.

    save_time: views may be fewer than fit, to leave time for the steps.
    """
    by_views = _by_views(task, plan, available)
    for fitting in by_views if save_time else itertools.islice(by_views, 1):
        config = fitting.config
        if not config.runs:
            return fitting
        if (steps := _most_steps(fitting, available)) >= _fewest_steps(config, task):
            return replace(fitting, config=with_steps(config, min(steps, _steps_of(config, task.images, MAX_EPOCHS))))
    return None


def _by_views(task: Task, plan: Plan, available: float) -> Iterator[Plan]:
    """The plan with each number of augmented views that fits, the most first.

    They fit if the least-squares head and its test take at most the time that reading and the report leave. If
    fine-tuning follows, they may take MAX_HEAD_FRACTION of it.
    """
    config = plan.config
    limit = available - plan.seconds_of("read") - plan.seconds_of("report")
    if config.runs:
        limit *= MAX_HEAD_FRACTION
    choices = VIEWS if "head_views" in task.open_settings else (config.head_views,)
    for views in choices:
        candidate = replace(plan, config=replace(config, head_views=views))
        head_seconds = 0.0
        if config.head:  # its fit, and its part of the stage that tests all runs and the head
            head_seconds = candidate.seconds_of("head") + candidate.seconds_of("test") / (config.runs + 1)
        if head_seconds <= limit:
            yield candidate


def _most_steps(plan: Plan, available: float) -> int:
    """The most steps of a run that fit into the `available` seconds; 0 if none fits."""
    # The seconds are linear in the steps: two plans show the slope.
    one, many = (replace(plan, config=with_steps(plan.config, steps)).seconds for steps in (1, 10_001))
    if one <= available:
        return 1 + int(1e4 * (available - one) / (many - one))
    return 0


def _steps_of(config: FinetuneConfig, images: Images, epochs: float) -> int:
    """The steps of this number of epochs, at least MIN_STEPS."""
    return max(math.ceil(epochs * images.train / config.batch_size), MIN_STEPS)


def _fewest_steps(config: FinetuneConfig, task: Task) -> int:
    """The fewest steps of a run that are worth their time.

    With a refit: REFIT_EPOCHS, or MIN_EPOCHS if the refit is not open. Without: MIN_EPOCHS, or ENOUGH_STEPS if fewer.
    """
    if config.refit:
        return _steps_of(config, task.images, REFIT_EPOCHS if "refit" in task.open_settings else MIN_EPOCHS)
    return min(_steps_of(config, task.images, MIN_EPOCHS), ENOUGH_STEPS)


def with_steps(config: FinetuneConfig, steps: int) -> FinetuneConfig:
    """`config` with this number of steps: a tenth of them warm-up, the sweep's in proportion to `config.steps`, if
    set."""
    sweep_steps = config.sweep_steps and max(config.sweep_steps * steps // (config.steps or steps), 1)
    optim = replace(config.optim, warmup_steps=steps // 10)
    return replace(config, steps=steps, epochs=None, sweep_steps=sweep_steps, optim=optim)


def head_only(config: FinetuneConfig) -> FinetuneConfig:
    """`config` without fine-tuning: the least-squares head is the result."""
    return replace(config, runs=0, **NO_SWEEP)


def _plan_of_fewer_images(task: Task, cost_of: Callable[[FinetuneConfig], ImageCost], available: float) -> Plan:
    """The head alone at the smallest size, on the largest fraction of each class that fits: at least two images per
    class on average.

    Raises UserError if the settings that are not open forbid it.
    """
    views = VIEWS[-1] if "head_views" in task.open_settings else task.config.head_views
    config = replace(task.sizes[-1], head_views=views)
    config = head_only(config) if "runs" in task.open_settings else with_steps(config, _fewest_steps(config, task))
    plan, images = task.plan(config, cost_of(config)), task.images
    if not {"runs", "data.subset_fraction"} <= {*task.open_settings}:
        already_spent = task.budget - available / PLANNED_FRACTION
        minutes = math.ceil((1.1 * plan.seconds / PLANNED_FRACTION + already_spent) / 60)
        raise UserError(
            f"{images.train:,} training and {images.test:,} test images take {format_duration(plan.seconds)} or more "
            f"here; give --budget {minutes}m, or fewer images."
        )

    def seconds(train: int) -> float:
        return replace(plan, images=images._replace(train=train)).seconds

    fitting = bisect.bisect_right(range(1, images.train + 1), available, key=seconds)
    num_train = max(fitting, 2 * config.model.num_classes)
    if num_train >= images.train:
        return plan
    fraction = math.floor(1e6 * (config.data.subset_fraction or 1) * num_train / images.train) / 1e6
    config = replace(config, data=replace(config.data, subset_fraction=fraction))
    return replace(plan, config=config, images=images._replace(train=num_train))


def left_out(task: Task, plan: Plan) -> Iterator[str]:
    """A line of text for each thing that the plan leaves out, with the shortest of BUDGETS that includes it."""

    @functools.cache
    def longer_plan(minutes: int) -> Plan | None:
        larger = replace(task, budget=60 * minutes)
        try:
            return choose(larger, lambda _: plan.cost, PLANNED_FRACTION * larger.budget)
        except UserError:
            return None

    def budget_for(includes: Callable[[Plan], bool]) -> str:
        plans = ((minutes, longer_plan(minutes)) for minutes in BUDGETS if 60 * minutes > task.budget)
        shortest = next((minutes for minutes, longer in plans if longer and includes(longer)), None)
        return f"; --budget {shortest}m includes it" if shortest else ""

    task_fraction = task.config.data.subset_fraction
    plan_fraction = plan.config.data.subset_fraction
    if plan_fraction != task_fraction:
        fraction = 1 - (plan_fraction or 1) / (task_fraction or 1)
        text = f"left out: {fraction:.0%} of the {task.images.train:,} training images"
        yield text + budget_for(lambda longer: longer.config.data.subset_fraction == task_fraction)
    if not plan.config.runs and task.config.runs:
        seconds = task.images.train * plan.cost.train(plan.config.model)
        reason = f"a pass over {task.images.train:,} training images takes {format_duration(seconds)}"
        text = f"left out: fine-tuning after the least-squares head ({reason})"
        yield text + budget_for(lambda longer: longer.config.runs > 0)
    if plan.report != "whole" and plan.config.head:
        parts = "the report" if plan.report == "none" else "near-duplicates and files of the figures, in the report"
        seconds = plan.report_seconds("whole")
        reason = f"it takes {format_duration(seconds)}"
        if seconds > REPORT_FRACTION * task.budget:
            reason += f", more than {REPORT_FRACTION:.0%} of the time"
        yield f"left out: {parts} ({reason})" + budget_for(lambda longer: longer.report == "whole")


def side(config: FinetuneConfig) -> int:
    """The longer image side in pixels."""
    return max(config.model.image_hw)
