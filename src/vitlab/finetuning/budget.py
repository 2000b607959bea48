"""Plans a fine-tuning job from measured costs: for a time budget, or only its image size if there is none."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from vitlab.config import FinetuneConfig
from vitlab.errors import UserError
from vitlab.finetuning.plan import Task, choose, head_only, side
from vitlab.finetuning.stages import Plan
from vitlab.runs.cost import ImageCost
from vitlab.train.clock import PLANNED_FRACTION
from vitlab.train.microbatch import timing_seconds

MEASURED_FRACTION = 0.1
"""Largest fraction of a budget for measuring the cost."""
COMPARED_SIZES = (0.5, 0.7, 1.0)
"""Image sizes to compare by the least-squares head, as fractions of the largest that fits."""
COMPARED_FRACTION = 0.2
"""Largest fraction of the time for comparing sizes."""
MIN_COMPARED_IMAGES = 200
"""Fewest training images to compare sizes with, or all if there are fewer; otherwise sizes are not compared."""
MAX_COMPARED_IMAGES = 500
"""Most training images to compare sizes with."""
Measure = Callable[[FinetuneConfig, bool], ImageCost]
"""The cost at the image size of a config; with True, a training step is timed too."""
HeadLoss = Callable[[FinetuneConfig, int], float]
"""Leave-one-out loss of the least-squares head at the image size of a config, for this many training images."""


def fit_budget(task: Task, measure: Measure, left: Callable[[], float], head_loss: HeadLoss | None = None) -> Plan:
    """The plan for the seconds that are `left()`. Measuring itself uses at most MEASURED_FRACTION of the budget.

    1. Measure at a small size, and plan at the largest size that fits.
    2. Plan the head alone, which may afford a still larger size.
    3. Compare sizes up to that one by `head_loss`, and plan again up to the best: enlarging small images may make them
       harder to classify.

    Without sizes to compare, the plan of step 1 is returned. Raises UserError as `choose` does.
    """
    sizes = task.sizes
    costs = _Costs(measure, left, left() - MEASURED_FRACTION * task.budget)
    costs.measure_at(task.small_config, train=False)
    plan = costs.choose_and_measure(task)
    if head_loss is None or "runs" not in task.open_settings or len(sizes) == 1:
        return plan
    head_alone = replace(task, config=head_only(task.config))
    largest = choose(head_alone, costs.cost_of, costs.available()).config
    if largest.data.subset_fraction != task.config.data.subset_fraction:  # too little time even for the smallest size
        return plan
    best = _best_side(task, largest, costs.cost_of, costs.available(), head_loss)
    return costs.choose_and_measure(replace(task, largest_side=best))


def best_size(task: Task, measure: Measure, head_loss: HeadLoss) -> FinetuneConfig:
    """The settings without a budget, at the image size of least `head_loss`; `_best_side` limits the time for it."""
    cost = measure(task.config, True)
    total = task.plan(task.config, cost).seconds
    if not math.isfinite(total):  # a model that only fits when it is sharded
        return task.config
    best = _best_side(task, task.config, lambda _: cost, total, head_loss)
    return next(config for config in task.sizes if side(config) == best)


def _best_side(
    task: Task,
    largest: FinetuneConfig,
    cost_of: Callable[[FinetuneConfig], ImageCost],
    available: float,
    head_loss: HeadLoss,
) -> int:
    """The image side of least `head_loss` among COMPARED_SIZES; the side of `largest` if the time does not suffice.

    Comparing takes at most COMPARED_FRACTION of the `available` seconds.
    """
    compared: dict[int, FinetuneConfig] = {}
    for fraction in COMPARED_SIZES:
        config = min(task.sizes, key=lambda config: abs(side(config) - fraction * side(largest)))
        compared[side(config)] = config
    image_seconds = sum(cost_of(config).forward(config.model) for config in compared.values())  # at all sizes
    min_images = max(min(MIN_COMPARED_IMAGES, task.images.train), 2 * largest.model.num_classes)
    num_images = min(MAX_COMPARED_IMAGES, task.images.train, int(COMPARED_FRACTION * available / image_seconds))
    if len(compared) == 1 or num_images < min_images:
        return side(largest)
    losses = {pixels: head_loss(config, num_images) for pixels, config in compared.items()}
    return min(losses, key=losses.__getitem__)


@dataclass
class _Costs:
    """The costs measured so far."""

    measure: Measure
    left: Callable[[], float]
    reserved: float
    """Seconds of the budget that measuring must leave."""
    by_side: dict[int, ImageCost] = field(default_factory=dict)
    """Longer image side -> cost."""
    timed: set[int] = field(default_factory=set)
    """Sides at which a training step was timed."""

    def choose_and_measure(self, task: Task) -> Plan:
        """The best plan: measures at its image size and plans again, until that is measured or the time is over.

        It ends, as each round measures a size, or times a training step at it, for the first time.
        """
        while True:
            try:
                plan = choose(task, self.cost_of, self.available())
            except UserError:
                # Nothing fits by another size's cost; the smallest size, once measured, may turn out cheaper.
                if not self.measure_if_time(task.sizes[-1]):
                    raise
            else:
                if not self.measure_if_time(plan.config):
                    return plan

    def cost_of(self, config: FinetuneConfig) -> ImageCost:
        """The cost that was measured at the nearest size."""
        return self.by_side[min(self.by_side, key=lambda known: abs(known - side(config)))]

    def available(self) -> float:
        """The seconds to plan."""
        return PLANNED_FRACTION * self.left()

    def measure_at(self, config: FinetuneConfig, train: bool) -> None:
        """Measures at the size of `config`, with `train` a training step too."""
        self.by_side[side(config)] = self.measure(config, train)
        self.timed |= {side(config)} if train else set()

    def measure_if_time(self, config: FinetuneConfig) -> bool:
        """Measures what is unknown at the size of `config`, if there is time; returns whether it did."""
        times_step = config.runs > 0 and side(config) not in self.timed
        if times_step:
            seconds = timing_seconds(config, self.cost_of(config).train(config.model))
            times_step = self.left() - seconds >= self.reserved
        is_measured = side(config) in self.by_side
        if not times_step and (is_measured or self.left() < self.reserved):
            return False
        self.measure_at(config, train=times_step)
        return True
