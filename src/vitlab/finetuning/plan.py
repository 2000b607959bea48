"""What a fine-tuning job can do in a given time (`--budget`), and at which image size it does best."""

import bisect
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from vitlab.config import FinetuneConfig
from vitlab.config.finetune import NO_SWEEP
from vitlab.display import format_duration
from vitlab.errors import UserError
from vitlab.finetuning.estimate import REPORT_FRACTION, Images, JobCost
from vitlab.models.config import ViTConfig
from vitlab.recipes.rules import REFIT_EPOCHS, adapt_to_epochs
from vitlab.train.microbatch import step_seconds

PLANNED_FRACTION = 0.92
"""Fraction of the time that is planned; the rest is for saving, and for what is slower than measured."""
MIN_PATCHES = 6
"""Patches on the longer side of the smallest images to choose from. With 5, the head of 1,020 flowers was worse than
that of 918 with 6."""
MIN_EPOCHS, MAX_EPOCHS = 3.0, 50.0
"""Passes over the training images below which fine-tuning is left out, and at which it ends."""
MIN_STEPS = 30
"""Steps below which fine-tuning is left out: AdamW's first ones make the least-squares head worse."""
ENOUGH_STEPS = 200
"""Steps from which one run is not left out, however few epochs they are."""
MIN_FRACTION = 0.75
"""Smallest image size for fine-tuning, of that of the least-squares head alone."""
MAX_HEAD_FRACTION = 0.5
"""Largest fraction of the time for the least-squares head where fine-tuning follows."""
VIEWS = (4, 3, 2, 1, None)
"""Numbers of augmented views to choose from."""
COMPARED_SIZES = (0.5, 0.7, 1.0)
"""Image sizes of which the best is looked for, of the largest that fits."""
COMPARED_FRACTION = 0.2
"""Fraction of the time for that."""
MIN_COMPARED_IMAGES, MAX_COMPARED_IMAGES = 200, 500
"""Training images for that; fewer only where there are fewer."""
MEASURED_FRACTION = 0.1
"""Fraction of the time for measuring the speed."""
BUDGETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 90, 120, 180, 240, 360, 480, 720, 1440)
"""Minutes of the budgets that are suggested."""
Measure = Callable[[FinetuneConfig, bool], JobCost]
"""The cost at the image size of a config; with True, a training step is timed too."""


def fit_budget(
    config: FinetuneConfig,
    images: Images,
    measure: Measure,
    seconds: int | float,
    open_settings: Collection[str] = ("model.image_size", "head_views", "refit", "runs", "data.subset_fraction"),
    elapsed: Callable[[], float] = lambda: 0.0,
    head_loss: Callable[[FinetuneConfig, int], float] | None = None,
) -> FinetuneConfig:
    """`config` with steps, sweep and `open_settings` for a job of `seconds`, minus `elapsed`.

    head_loss: leave-one-out loss of the least-squares head at the image size of a config for so many training images.
    No size above the best of COMPARED_SIZES is taken: small images may be harder to classify when they are enlarged.

    Fine-tuning must take `_fewest_steps`, at a size of at least MIN_FRACTION of the largest that the least-squares head
    alone could have; if need be without the final run on all training images (`refit` is False); otherwise the job is
    that head, at that size (`runs` is 0), or at the smallest size for a part of the training images, two of each class
    or more. Measuring takes of the time too: at each size that is considered a few forward passes, and a training step
    where that is a small part of the time. Raises UserError where nothing fits and the settings that are not
    open forbid the smallest job.
    """
    all_views = VIEWS if "head_views" in open_settings else (config.head_views,)
    candidates = _sizes(config) if "model.image_size" in open_settings else [config]
    costs = _Measurements(measure, seconds, elapsed)

    def largest_that_fits(
        change: Callable[[FinetuneConfig], FinetuneConfig] = lambda candidate: candidate, min_side: float = 0.0
    ) -> FinetuneConfig | None:
        """The plan at the largest size that fits, by a measurement at this size, with the changed settings."""
        large = [change(candidate) for candidate in candidates if _side(candidate) >= min_side]
        while True:
            time = costs.available()
            plans = (_fit_steps(c, images, costs.estimate(c), time, all_views, open_settings) for c in large)
            planned = next((plan for plan in plans if plan is not None), None)
            if planned is None or not costs.refine(planned):
                return planned

    costs.take(candidates[3 * len(candidates) // 4], train=False)
    linear = largest_that_fits(_head_only) if "runs" in open_settings else None
    if linear and head_loss:
        best = _best_side(linear, candidates, images, costs.estimate, costs.available(), head_loss)
        candidates = [candidate for candidate in candidates if _side(candidate) <= best]
        linear = largest_that_fits(_head_only)
    min_side = MIN_FRACTION * _side(linear) if linear else 0.0
    tuned = largest_that_fits(min_side=min_side)
    if tuned is None and "refit" in open_settings:
        tuned = largest_that_fits(lambda candidate: replace(candidate, refit=False), min_side)
    # The head again, for what has been measured since took time.
    if planned := tuned or (linear and largest_that_fits(_head_only)):
        return adapt_to_epochs(planned, images.train, {*open_settings} - {"refit"})
    shortest = _shortest(candidates[-1], images, all_views[-1], alone="runs" in open_settings)
    costs.take(shortest, train=False)
    smallest = {"runs", "data.subset_fraction"} <= {*open_settings}
    time = costs.available() if smallest else 0.0
    return _subset(shortest, images, costs.estimate(shortest), time, elapsed(), smallest)


@dataclass
class _Measurements:
    """The costs measured so far. At another image size a cost is in proportion to that at the nearest one."""

    measure: Measure
    seconds: int | float
    elapsed: Callable[[], float]

    def __post_init__(self) -> None:
        self.by_side: dict[int, tuple[FinetuneConfig, JobCost]] = {}
        self.timed: set[int] = set()
        """Sides at which a training step was timed."""
        self.limit = self.elapsed() + MEASURED_FRACTION * self.seconds

    def available(self) -> float:
        """Seconds that are left for the job."""
        return PLANNED_FRACTION * (self.seconds - self.elapsed())

    def take(self, config: FinetuneConfig, train: bool) -> None:
        self.by_side[_side(config)] = config, self.measure(config, train)
        self.timed.update({_side(config)} if train else ())

    def estimate(self, config: FinetuneConfig) -> JobCost:
        nearest = min(self.by_side, key=lambda side: abs(side - _side(config)))
        return _scaled(self.by_side[nearest][1], config, self.by_side[nearest][0])

    def refine(self, planned: FinetuneConfig) -> bool:
        """Measures at the size of a plan; False if that was done, or the time for measuring is over."""
        training = step_seconds(planned, self.estimate(planned).step.train_seconds) if planned.runs else math.inf
        train = _side(planned) not in self.timed and self.elapsed() + training <= self.limit
        if not train and (_side(planned) in self.by_side or self.elapsed() > self.limit):
            return False
        self.take(planned, train)
        return True


def needed_budget(
    config: FinetuneConfig,
    images: Images,
    cost: JobCost,
    reference: FinetuneConfig,
    seconds: int | float,
    open_settings: Collection[str],
    holds: Callable[[FinetuneConfig, JobCost], bool],
) -> int | None:
    """Minutes of a budget beyond `seconds` with which the plan for `config` `holds`, by the `cost` of `reference`; None
    where that would be more than a day."""

    def measure(candidate: FinetuneConfig, train: bool) -> JobCost:
        return replace(_scaled(cost, candidate, reference), report_limit=REPORT_FRACTION * 60 * minutes)

    for minutes in BUDGETS:
        if 60 * minutes > seconds:
            try:
                plan = fit_budget(config, images, measure, 60 * minutes, open_settings)
            except UserError:
                continue
            if holds(plan, measure(plan, train=False)):
                return minutes
    return None


def best_size(
    config: FinetuneConfig,
    images: Images,
    measure: Measure,
    head_loss: Callable[[FinetuneConfig, int], float],
) -> FinetuneConfig:
    """`config` without a budget, at the image size of least `head_loss`; what this takes is a part of the whole job."""
    candidates, cost = _sizes(config), measure(config, True)
    if not math.isfinite(total := sum(cost.seconds(config, images))):  # a model that only fits when it is sharded
        return config

    def estimate(candidate: FinetuneConfig) -> JobCost:
        return _scaled(cost, candidate, config)

    best = _best_side(config, candidates, images, estimate, total, head_loss)
    return next(candidate for candidate in candidates if _side(candidate) == best)


def _best_side(
    largest: FinetuneConfig,
    candidates: Sequence[FinetuneConfig],
    images: Images,
    estimate: Callable[[FinetuneConfig], JobCost],
    available: float,
    head_loss: Callable[[FinetuneConfig, int], float],
) -> int:
    """The image side of least `head_loss`, of COMPARED_SIZES; that of `largest` where the time does not suffice."""
    compared: dict[int, FinetuneConfig] = {}
    for fraction in COMPARED_SIZES:
        config = min(candidates, key=lambda candidate: abs(_side(candidate) - fraction * _side(largest)))
        compared[_side(config)] = config
    plain = replace(largest, head_views=None)
    one_image = sum(estimate(config).seconds(plain, Images(1, 0)).linear for config in compared.values())
    needed, wanted = (min(count, images.train) for count in (MIN_COMPARED_IMAGES, MAX_COMPARED_IMAGES))
    count = min(wanted, int(COMPARED_FRACTION * available / one_image))
    if len(compared) == 1 or count < max(needed, 2 * largest.model.num_classes):
        return _side(largest)
    losses = {side: head_loss(config, count) for side, config in compared.items()}
    return min(losses, key=losses.__getitem__)


def _shortest(config: FinetuneConfig, images: Images, views: int | None, alone: bool) -> FinetuneConfig:
    """The shortest job at the image size of `config`: the least-squares head `alone`, or the fewest steps."""
    config = replace(config, head_views=views)
    if alone:
        return _head_only(config)
    return with_steps(config, _steps(config, images, MIN_EPOCHS))


def _steps(config: FinetuneConfig, images: Images, epochs: float) -> int:
    """The steps of so many epochs, at least MIN_STEPS."""
    return max(math.ceil(epochs * images.train / config.batch_size), MIN_STEPS)


def _fewest_steps(config: FinetuneConfig, images: Images, open_settings: Collection[str]) -> int:
    """The fewest steps of a run: REFIT_EPOCHS with an open refit; without one ENOUGH_STEPS suffice."""
    if config.refit:
        return _steps(config, images, REFIT_EPOCHS if "refit" in open_settings else MIN_EPOCHS)
    return min(_steps(config, images, MIN_EPOCHS), ENOUGH_STEPS)


def _head_only(config: FinetuneConfig) -> FinetuneConfig:
    """The job that is the least-squares head."""
    return replace(config, runs=0, **NO_SWEEP)


def _subset(
    config: FinetuneConfig, images: Images, cost: JobCost, available: float, elapsed: float, smallest: bool
) -> FinetuneConfig:
    """`config` with the part of each class for which the time suffices.

    Where the `smallest` job is allowed, these are two images of each class or more; else UserError is raised.
    """
    if not smallest:
        needed = sum(cost.seconds(config, images))
        raise UserError(
            f"{images.train:,} training and {images.test:,} test images take {format_duration(needed)} or more here; "
            f"give --budget {math.ceil((1.1 * needed / PLANNED_FRACTION + elapsed) / 60)}m, or fewer images."
        )
    train = _largest(images.train, lambda train: sum(cost.seconds(config, Images(train, images.test))) <= available)
    if (train := max(train, 2 * config.model.num_classes)) >= images.train:
        return config
    fraction = math.floor(1e6 * (config.data.subset_fraction or 1) * train / images.train) / 1e6
    return replace(config, data=replace(config.data, subset_fraction=fraction))


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that fits, where all below it do; 0 if not even 1 does."""
    return bisect.bisect_left(range(1, limit + 1), True, key=lambda number: not fits(number))


def _fit_steps(
    config: FinetuneConfig,
    images: Images,
    cost: JobCost,
    available: float,
    all_views: Sequence[int | None],
    open_settings: Collection[str],
) -> FinetuneConfig | None:
    """`config` with as many views and steps as fit into the `available` seconds; None if those are too few."""
    for views in all_views:
        config = replace(config, head_views=views)
        reading, linear, _, _, report = cost.seconds(config, images)
        if linear <= (MAX_HEAD_FRACTION if config.runs else 1.0) * (available - reading - report):
            break
    else:
        return None
    if not config.runs:
        return config
    fitting = _largest(10**7, lambda steps: sum(cost.seconds(with_steps(config, steps), images)) <= available)
    if fitting < _fewest_steps(config, images, open_settings):
        return None
    return with_steps(config, min(fitting, _steps(config, images, MAX_EPOCHS)))


def with_steps(config: FinetuneConfig, steps: int) -> FinetuneConfig:
    """`config` with this number of steps, with warm-up and sweep in proportion."""
    sweep_steps = config.sweep_steps and max(config.sweep_steps * steps // (config.steps or steps), 1)
    optim = replace(config.optim, warmup_steps=steps // 10)
    return replace(config, steps=steps, epochs=None, sweep_steps=sweep_steps, optim=optim)


def _sizes(config: FinetuneConfig) -> list[FinetuneConfig]:
    """`config` at its image size and at smaller ones, one patch after the other."""
    model = config.model
    if not isinstance(model, ViTConfig):
        return [config]
    sizes = [config]
    for patches in range(max(model.grid) - 1, MIN_PATCHES - 1, -1):
        fraction = patches / max(model.grid)
        height, width = (max(round(fraction * side), 1) * model.stride for side in model.grid)
        size = height if height == width else (height, width)
        scaled = config.data.preprocessing(model.image_size).at(size)
        data = replace(config.data, eval_resize=scaled.resize if scaled.keep_aspect else None)
        sizes.append(replace(config, model=replace(model, image_size=size), data=data))
    return sizes


def _side(config: FinetuneConfig) -> int:
    return max(config.model.image_hw)


def _scaled(cost: JobCost, config: FinetuneConfig, reference: FinetuneConfig) -> JobCost:
    """The cost at another size, in proportion to its matrix products."""
    ratio = config.model.forward_macs / reference.model.forward_macs
    seconds = {name: ratio * getattr(cost.step, name) for name in ("train_seconds", "eval_seconds", "feature_seconds")}
    return replace(cost, step=replace(cost.step, **seconds))
