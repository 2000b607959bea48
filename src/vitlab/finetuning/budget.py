"""The plan of a fine-tuning job by measured costs: of a time budget, and of the image size without one."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from vitlab.config import FinetuneConfig
from vitlab.errors import UserError
from vitlab.finetuning.plan import Plan, Task, choose, head_only, side
from vitlab.runs.cost import ImageCost
from vitlab.train.clock import PLANNED_FRACTION
from vitlab.train.microbatch import timing_seconds

COMPARED_SIZES, COMPARED_FRACTION = (0.5, 0.7, 1.0), 0.2
"""Image sizes to compare by the head, as fractions of the largest that fits; the fraction of the time for that."""
MIN_COMPARED_IMAGES, MAX_COMPARED_IMAGES = 200, 500
"""Training images for that; fewer only where there are fewer."""
MEASURED_FRACTION = 0.1
"""Fraction of the time for measuring the cost."""
Measure = Callable[[FinetuneConfig, bool], ImageCost]
"""The cost at the image size of a config; with True, a training step is timed too."""
HeadLoss = Callable[[FinetuneConfig, int], float]
"""Leave-one-out loss of the least-squares head at the image size of a config, for this many training images."""


def fit_budget(task: Task, measure: Measure, left: Callable[[], float], head_loss: HeadLoss | None = None) -> Plan:
    """The plan for the seconds that are `left()`. Measuring itself uses at most MEASURED_FRACTION of the budget.

    No size above the best of COMPARED_SIZES by `head_loss` is taken: small images may be harder to classify when they
    are enlarged. Raises UserError as `choose` does.
    """
    sizes = task.sizes()
    costs = _Costs(measure, left, left() - MEASURED_FRACTION * task.budget)
    costs.measure_at(sizes[3 * len(sizes) // 4], train=False)  # a small size, which is measured fast

    def choose_and_measure() -> Plan:
        """Plans, measures at the planned size, and plans again, until that size is measured."""
        while True:
            try:
                plan = choose(task, costs.nearest, PLANNED_FRACTION * left())
            except UserError:  # by the cost at another size
                if not costs.measure_if_time(task.sizes()[-1]):
                    raise
            else:
                if not costs.measure_if_time(plan.config):
                    return plan

    plan = choose_and_measure()
    if head_loss and "runs" in task.open_settings and len(sizes) > 1:
        largest = choose(replace(task, config=head_only(task.config)), costs.nearest, PLANNED_FRACTION * left()).config
        if largest.data.subset_fraction == task.config.data.subset_fraction:
            task = replace(task, largest=_best_side(task, largest, costs.nearest, PLANNED_FRACTION * left(), head_loss))
            plan = choose_and_measure()
    return plan


def best_size(task: Task, measure: Measure, head_loss: HeadLoss) -> FinetuneConfig:
    """The settings without a budget, at the image size of least `head_loss`. Comparing takes a part of the job."""
    cost = measure(task.config, True)
    total = task.plan(task.config, cost).seconds
    if not math.isfinite(total):  # a model that only fits when it is sharded
        return task.config
    best = _best_side(task, task.config, lambda _: cost, total, head_loss)
    return next(config for config in task.sizes() if side(config) == best)


def _best_side(
    task: Task,
    largest: FinetuneConfig,
    cost_of: Callable[[FinetuneConfig], ImageCost],
    available: float,
    head_loss: HeadLoss,
) -> int:
    """The image side of least `head_loss`, of COMPARED_SIZES; the side of `largest` where the time does not suffice."""
    compared: dict[int, FinetuneConfig] = {}
    for fraction in COMPARED_SIZES:
        config = min(task.sizes(), key=lambda config: abs(side(config) - fraction * side(largest)))
        compared[side(config)] = config
    one_image = sum(cost_of(config).represent(config.model) for config in compared.values())
    needed, wanted = (min(count, task.images.train) for count in (MIN_COMPARED_IMAGES, MAX_COMPARED_IMAGES))
    count = min(wanted, int(COMPARED_FRACTION * available / one_image))
    if len(compared) == 1 or count < max(needed, 2 * largest.model.num_classes):
        return side(largest)
    losses = {pixels: head_loss(config, count) for pixels, config in compared.items()}
    return min(losses, key=losses.__getitem__)


@dataclass
class _Costs:
    """The costs measured so far. Measuring stops when `end` seconds are left."""

    measure: Measure
    left: Callable[[], float]
    end: float
    by_side: dict[int, ImageCost] = field(default_factory=dict)
    timed: set[int] = field(default_factory=set)
    """Sides at which a training step was timed."""

    def nearest(self, config: FinetuneConfig) -> ImageCost:
        """The cost at the nearest size."""
        return self.by_side[min(self.by_side, key=lambda known: abs(known - side(config)))]

    def measure_at(self, config: FinetuneConfig, train: bool) -> None:
        self.by_side[side(config)] = self.measure(config, train)
        self.timed |= {side(config)} if train else set()

    def measure_if_time(self, config: FinetuneConfig) -> bool:
        """Measures at the size of `config`; False if that was done, or the time for measuring is over."""
        training = timing_seconds(config, self.nearest(config).train(config.model)) if config.runs else math.inf
        train = side(config) not in self.timed and self.left() - training >= self.end
        if not train and (side(config) in self.by_side or self.left() < self.end):
            return False
        self.measure_at(config, train)
        return True
