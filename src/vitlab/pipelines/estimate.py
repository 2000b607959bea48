"""What a fine-tuning job takes on this machine, and what it can do in a given time (`--budget`)."""

import bisect
import contextlib
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from vitlab.config import FinetuneConfig
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.transforms import EvalTransform
from vitlab.display import format_duration
from vitlab.errors import UserError
from vitlab.models.config import ViTConfig
from vitlab.train.microbatch import StepCost

PLANNED = 0.92
"""Fraction of the time that is planned; the rest is for saving, and for what is slower than measured."""
MIN_PATCHES = 6
"""Patches on the longer side of the smallest images to choose from. With 5, the head of 1,020 flowers was worse than
that of 918 with 6."""
MIN_EPOCHS, MAX_EPOCHS = 3.0, 50.0
"""Passes over the training images below which fine-tuning is left out, and at which it ends."""
MIN_FRACTION = 0.75
"""Smallest image size for fine-tuning, of that of the least-squares head alone."""
HEAD_SHARE = 0.5
"""Largest fraction of the time for the least-squares head where fine-tuning follows."""
VIEWS = (4, 3, 2, 1, None)
"""Numbers of augmented views to choose from."""
COMPARED_SIZES = (0.5, 0.7, 1.0)
"""Image sizes of which the best is looked for, of the largest that fits."""
COMPARED_SHARE, COMPARED_IMAGES = 0.2, (200, 500)
"""Fraction of the time for that, and how many training images it needs, if there are so many, and takes."""
SHORT = 120.0
"""Seconds up to which no shorter settings are suggested."""
REPORT_SECONDS, REPORT_IMAGES = 12.0, 200
"""What a report takes on two cores, and images that pass through the model for it."""
MAX_COMPARED = 20_000
"""Training and test images up to which the report searches near-duplicates among them."""
SAMPLES = 8
"""Images whose decoding is measured."""


class Images(NamedTuple):
    """How many images a job has."""

    train: int
    test: int


class Seconds(NamedTuple):
    """What the parts of a job take: to read every image once for what is unreadable, the least-squares head and its
    test, the search, the final runs and their tests, the report."""

    reading: float
    linear: float
    search: float
    runs: float
    report: float


@dataclass(frozen=True)
class JobCost:
    """What a job takes at one image size."""

    step: StepCost
    decode: float = 0.0
    """Measured seconds to read and prepare an image."""
    processes: int = 1
    """That share the images."""
    readers: int = 0
    """Processes of each that read images while a GPU computes; on a CPU they would take its cores."""
    cores: int = 1
    """For what is only read."""

    def seconds(self, config: FinetuneConfig, images: Images) -> Seconds:
        evaluate, train = self._per_image(self.step.eval_seconds), self._per_image(self.step.train_seconds)
        views, read_once = 1 + (config.head_views or 0), sum(images) * self.decode
        reading = read_once / self.cores if config.data.on_error == "skip" else 0.0
        linear = (views * images.train + images.test) * evaluate if config.head else 0.0
        search, rates = 0.0, len(config.tried_rates)
        steps = config.total_steps(images.train)
        for halving in range((config.halvings or 0) + 1 if rates and config.runs else 0):
            trained = (config.sweep_steps or steps) * 2**halving * config.batch_size
            search += rates * (trained * train + config.held_out * images.train * evaluate)
            rates = (rates + 1) // 2
        one_run = steps * config.batch_size * train + images.test * evaluate
        report = REPORT_SECONDS + REPORT_IMAGES * evaluate * self.processes if config.head else 0.0
        report += read_once / min(self.cores, 8) if config.head and sum(images) <= MAX_COMPARED else 0.0
        return Seconds(reading, linear, search, config.runs * one_run, report)

    def _per_image(self, compute: float) -> float:
        seconds = max(compute, self.decode / self.readers) if self.readers else compute + self.decode
        return seconds / self.processes


def measure_decode(config: FinetuneConfig, dataset: Dataset) -> float:
    """Seconds to read and prepare an image, of a few."""
    transform = EvalTransform(config.model.image_hw, config.data.preprocessing(config.model.image_size))
    started, done = time.perf_counter(), 0
    for index in np.linspace(0, len(dataset) - 1, min(SAMPLES, len(dataset))).astype(int).tolist():
        with contextlib.suppress(ImageError):  # the run says what becomes of it
            transform.apply([dataset.image(index)])
            done += 1
    return (time.perf_counter() - started) / max(done, 1)


def fit_budget(
    config: FinetuneConfig,
    images: Images,
    measure: Callable[[FinetuneConfig], JobCost],
    seconds: int | float,
    automatic: Collection[str] = ("image_size", "head_views", "runs", "part"),
    elapsed: Callable[[], float] = lambda: 0.0,
    head_loss: Callable[[FinetuneConfig, int], float] | None = None,
) -> FinetuneConfig:
    """`config` for a job of `seconds`, of which some are `elapsed`: with steps and search, and what of the settings is
    `automatic`.

    head_loss: leave-one-out loss of the least-squares head at the image size of a config for so many training images.
    No size above the best of COMPARED_SIZES is taken: small images may be harder to classify when they are enlarged.

    Fine-tuning must see every training image MIN_EPOCHS times, at a size of at least MIN_FRACTION of the largest that
    the least-squares head alone could have; otherwise the job is that head, at that size (`runs` is 0), or at the
    smallest size for a part of the training images. Measuring takes time too: it begins with a small size, and what is
    left counts. Raises UserError where nothing fits.
    """
    all_views = VIEWS if "head_views" in automatic else (config.head_views,)
    candidates = _sizes(config) if "image_size" in automatic else [config]
    small, smallest = candidates[3 * len(candidates) // 4], candidates[-1]
    measured = {_side(small): (small, measure(small))}

    def guess(candidate: FinetuneConfig) -> JobCost:
        """By the measurement at the nearest size."""
        nearest = min(measured, key=lambda side: abs(side - _side(candidate)))
        return _scaled(measured[nearest][1], candidate, measured[nearest][0])

    def available() -> float:
        return PLANNED * (seconds - elapsed())

    def choose(runs: int, min_side: float = 0.0) -> FinetuneConfig | None:
        """The plan at the largest size that fits, by a measurement at this size."""
        large = [candidate for candidate in candidates if _side(candidate) >= min_side]
        while True:
            time = available()
            plans = (_fill(candidate, images, guess(candidate), time, runs, all_views) for candidate in large)
            planned = next((plan for plan in plans if plan is not None), None)
            if planned is None or (side := _side(planned)) in measured:
                return planned
            measured[side] = planned, measure(planned)

    linear = choose(0) if "runs" in automatic else None
    if linear and head_loss:
        best = _best_side(linear, candidates, images, guess, available(), head_loss)
        candidates = [candidate for candidate in candidates if _side(candidate) <= best]
        linear = choose(0)
    tuned = choose(config.runs, MIN_FRACTION * _side(linear) if linear else 0.0)
    if planned := tuned or (linear and choose(0)):  # again, for what has been measured since took time
        return planned
    shortest, cost = _shortest(smallest, images, all_views[-1], alone="runs" in automatic), measure(smallest)
    if {"runs", "part"} <= {*automatic} and (planned := _part(shortest, images, cost, available())):
        return planned
    needed = sum(cost.seconds(shortest, images))
    raise UserError(
        f"{images.train:,} training and {images.test:,} test images take {format_duration(needed)} or more here; give "
        f"--budget {math.ceil((1.1 * needed / PLANNED + elapsed()) / 60)}m, or fewer images."
    )


def _best_side(
    largest: FinetuneConfig,
    candidates: Sequence[FinetuneConfig],
    images: Images,
    guess: Callable[[FinetuneConfig], JobCost],
    available: float,
    head_loss: Callable[[FinetuneConfig, int], float],
) -> int:
    """The image side of least `head_loss`, of COMPARED_SIZES; that of `largest` where the time does not suffice."""
    compared: dict[int, FinetuneConfig] = {}
    for fraction in COMPARED_SIZES:
        config = min(candidates, key=lambda candidate: abs(_side(candidate) - fraction * _side(largest)))
        compared[_side(config)] = config
    plain = replace(largest, head_views=None)
    one_image = sum(guess(config).seconds(plain, Images(1, 0)).linear for config in compared.values())
    needed, wanted = (min(count, images.train) for count in COMPARED_IMAGES)
    count = min(wanted, int(COMPARED_SHARE * available / one_image))
    if len(compared) == 1 or count < max(needed, 2 * largest.model.num_classes):
        return _side(largest)
    losses = {side: head_loss(config, count) for side, config in compared.items()}
    return min(losses, key=losses.__getitem__)


def _shortest(config: FinetuneConfig, images: Images, views: int | None, alone: bool) -> FinetuneConfig:
    """The shortest job at the image size of `config`: the least-squares head `alone`, or the fewest steps."""
    if alone:
        return _alone(config, views)
    return with_steps(replace(config, head_views=views), math.ceil(MIN_EPOCHS * images.train / config.batch_size))


def _alone(config: FinetuneConfig, views: int | None) -> FinetuneConfig:
    """The job that is the least-squares head."""
    return replace(config, runs=0, learning_rates=(), sweep_steps=None, halvings=None, head_views=views)


def _part(config: FinetuneConfig, images: Images, cost: JobCost, available: float) -> FinetuneConfig | None:
    """`config` with the part of each class for which the time suffices; None below two images a class."""
    train = _largest(images.train, lambda train: sum(cost.seconds(config, Images(train, images.test))) <= available)
    if train < 2 * config.model.num_classes:
        return None
    part = math.floor(1e6 * (config.data.part or 1) * train / images.train) / 1e6
    return replace(config, data=replace(config.data, part=part))


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that fits, where all below it do; 0 if not even 1 does."""
    return bisect.bisect_left(range(1, limit + 1), True, key=lambda number: not fits(number))


def _fill(
    config: FinetuneConfig,
    images: Images,
    cost: JobCost,
    available: float,
    runs: int,
    all_views: Sequence[int | None],
) -> FinetuneConfig | None:
    """`config` with as many views and steps as fit into the `available` seconds; None if those are too few."""
    config = config if runs else _alone(config, None)
    for views in all_views:
        config = replace(config, head_views=views)
        reading, linear, _, _, report = cost.seconds(config, images)
        if linear <= (HEAD_SHARE if runs else 1.0) * (available - reading - report):
            break
    else:
        return None
    if not runs:
        return config
    fitting = _largest(10**7, lambda steps: sum(cost.seconds(with_steps(config, steps), images)) <= available)
    if fitting * config.batch_size < MIN_EPOCHS * images.train:
        return None
    return with_steps(config, min(fitting, round(MAX_EPOCHS * images.train / config.batch_size)))


def with_steps(config: FinetuneConfig, steps: int) -> FinetuneConfig:
    """`config` with this number of steps; warm-up is in proportion, and the last rates of halvings take all steps."""
    sweep_steps = max(steps // 2**config.halvings, 1) if config.halvings else None
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
    step = cost.step
    step = replace(step, train_seconds=ratio * step.train_seconds, eval_seconds=ratio * step.eval_seconds)
    return replace(cost, step=step)


def format_estimate(config: FinetuneConfig, cost: JobCost, images: Images, device: str) -> str:
    """What a fine-tuning job with these complete settings will take, as lines of text: size, memory and time."""

    def duration(seconds: float) -> str:
        return format_duration(seconds) if seconds < math.inf else "unknown"

    model, steps, rates = config.model, config.total_steps(images.train), len(config.tried_rates)
    seconds = cost.seconds(config, images)
    total = sum(seconds)
    epochs, size = steps * config.batch_size / images.train, "x".join(map(str, model.image_hw))
    held_out = round(config.held_out * images.train)
    halvings = f", the better half {config.halvings} times again with twice the steps" if config.halvings else ""
    rows = {
        "model": f"{model.num_parameters / 1e6:.1f}M parameters, {size} px, on {device}",
        "data": f"{images.train:,} training and {images.test:,} test images, {model.num_classes:,} classes",
        "measured": cost.step.describe(),
        "reading": f"every image once, to find what cannot be read: {duration(seconds.reading)}",
        "linear": f"least-squares head on frozen representations (each image and {config.head_views or 0} augmented "
        f"views of it), then the test: {duration(seconds.linear)}",
        "search": f"{rates} learning rate{'s' * (rates > 1)} x {config.sweep_steps or steps:,} steps of "
        f"{config.batch_size} images"
        f"{halvings}, scored on {held_out:,} images: {duration(seconds.search)}",
        "training": f"{config.runs} x {steps:,} steps of {config.batch_size} images ({epochs:.1f} epochs), then the "
        f"test: {duration(seconds.runs)}",
        "report": f"one page: {duration(seconds.report)}",
        "total": f"about {duration(total)}",
    }
    without = [] if config.head else ["linear", "report"]
    without += [] if seconds.reading >= 1 else ["reading"]
    without += [] if rates and config.runs else ["search"]
    without += [] if config.runs else ["training"]
    rows = {name: text for name, text in rows.items() if name not in without}
    if SHORT < total < math.inf:
        rows["shorter"] = " | ".join(_shorter(config, cost, images, total))
    return "\n".join(f"  {name:9} {text}" for name, text in rows.items())


def _shorter(config: FinetuneConfig, cost: JobCost, images: Images, total: float) -> list[str]:
    """Options for a shorter job, and what it takes."""
    if config.head is not None:
        return [f"--budget {math.ceil(total / 120)}m, with another --workdir"]
    options, (_, _, search, runs, _) = [], cost.seconds(config, images)
    if search:
        options.append(f"--optim.lr {config.optim.lr:g}, without a search: {format_duration(runs)}")
    steps, model = config.total_steps(images.train), config.model
    if (half := steps // 2) > 0:
        sweep_steps = config.sweep_steps and max(config.sweep_steps * half // steps, 1)
        fewer = replace(config, steps=half, epochs=None, sweep_steps=sweep_steps)
        options.append(f"--steps {half}: {format_duration(sum(cost.seconds(fewer, images)))}")
    if isinstance(model, ViTConfig) and (side := min(model.image_hw) * 3 // 4 // model.stride * model.stride) >= 64:
        ratio = replace(model, image_size=side).forward_macs / model.forward_macs
        options.append(f"--image-size {side}: about {format_duration(ratio * total)}")
    return options
