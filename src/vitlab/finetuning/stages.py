"""The stages of a fine-tuning job, one row each: what it does, and its seconds on this machine."""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from vitlab.config import FinetuneConfig
from vitlab.display import format_duration
from vitlab.inspection.run_section import MAX_COMPARED, Report
from vitlab.runs.cost import ImageCost

ALPHAS = (0.25, 0.5, 0.75)
"""Weights of the fine-tuned model to try in an average with the head, besides 1."""
HEAD_IMAGES, HEAD_SHOTS = 4_000, 20
"""Images the head is fitted to if fine-tuning follows: HEAD_IMAGES, or HEAD_SHOTS of each class if that is more."""
REPORT_SECONDS = {"whole": 12.0, "short": 6.0, "none": 0.0}
"""Seconds of a report on two cores, without passing its images through the model."""
REPORT_TEXT = {
    "whole": "one page",
    "short": "one page, without near-duplicates and files of the figures",
    "none": "left out",
}
REPORT_IMAGES = {"whole": 200, "short": 104}
"""Images that pass through the model for a report."""


class Images(NamedTuple):
    """How many images a job has."""

    train: int
    test: int


class Stage(NamedTuple):
    """A row of the plan."""

    name: str
    seconds: float
    what: str


@dataclass(frozen=True)
class Plan:
    """What a job does on these images, at this cost of an image: a table of stages."""

    config: FinetuneConfig
    images: Images
    cost: ImageCost
    report: Report = "whole"

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The rows, in order; those that the job leaves out take no time."""
        config, images, cost, model = self.config, self.images, self.cost, self.config.model
        forward, train = cost.forward(model), cost.train(model)
        views = config.head_views or 0
        rates = len(config.tried_rates) if config.runs else 0
        steps, batch = config.total_steps(images.train), config.batch_size
        sweep_steps = config.sweep_steps or steps
        final_runs = config.runs if config.refit else 0
        fitted = head_images(config, images.train, model.num_classes) if config.head else 0
        held_out = config.held_out * images.train
        tests = config.runs + (1 if config.head else 0)
        score = forward * (1 + (len(ALPHAS) if config.head else 0))

        def training(runs: int, steps: int) -> float:
            return runs * steps * batch * train if runs else 0.0  # train may be infinite

        def describe(runs: int, steps: int) -> str:
            return f"{runs} x {steps:,} steps of {batch} images ({steps * batch / images.train:.1f} epochs)"

        return (
            Stage("read", sum(images) * cost.read if config.data.on_error == "skip" else 0.0, "every image once"),
            Stage("head", (1 + views) * fitted * forward, f"least squares: {fitted:,} images, {views} views"),
            Stage("sweep", training(rates, sweep_steps), describe(rates, sweep_steps)),
            Stage("score", rates * held_out * score, f"about {round(held_out):,} images held out"),
            Stage("final", training(final_runs, steps), describe(final_runs, steps)),
            Stage("test", tests * images.test * forward, f"{tests} x {images.test:,} images"),
            Stage("report", self.report_seconds(self.report) if config.head else 0.0, REPORT_TEXT[self.report]),
        )

    @property
    def seconds(self) -> float:
        """The duration of the job."""
        return math.fsum(stage.seconds for stage in self.stages)

    def seconds_of(self, name: str) -> float:
        """Seconds of a stage."""
        return next(stage.seconds for stage in self.stages if stage.name == name)

    def seconds_after(self, name: str) -> float:
        """Seconds of the stages after this one."""
        names = [stage.name for stage in self.stages]
        return math.fsum(stage.seconds for stage in self.stages[names.index(name) + 1 :])

    def report_seconds(self, kind: Report) -> float:
        """Seconds of a report of this kind."""
        if kind == "none":
            return 0.0
        seen = REPORT_IMAGES[kind] * self.cost.forward_in_float32(self.config.model) * self.cost.processes
        compared = 0.0
        if kind == "whole" and sum(self.images) <= MAX_COMPARED:
            compared = sum(self.images) * self.cost.decode / min(self.cost.cores, 8)
        return REPORT_SECONDS[kind] + seen + compared

    def table(self, device: str) -> str:
        """The plan as lines of text."""
        model, images = self.config.model, self.images
        size = "x".join(map(str, model.image_hw))
        rows = [
            ("model", f"{model.num_parameters / 1e6:.1f}M parameters, {size} px, on {device}"),
            ("data", f"{images.train:,} training and {images.test:,} test images, {model.num_classes:,} classes"),
            ("speed", self.cost.step.describe()),
            *((name, f"{format_duration(time):>9}  {what}") for name, time, what in self.stages if time >= 0.5),
            ("total", f"{format_duration(self.seconds):>9}"),
        ]
        return "\n".join(f"  {name:7} {text}" for name, text in rows)


def head_images(config: FinetuneConfig, count: int, classes: int) -> int:
    """The number of training images, of `count`, that the head is fitted to or scored on.

    All without fine-tuning. Otherwise the held-out images and at most HEAD_IMAGES, or HEAD_SHOTS of each class if that
    is more: fine-tuning makes better use of the time.
    """
    held_out = round(config.held_out * count) if config.tried_rates else 0
    return min(count, max(HEAD_IMAGES, HEAD_SHOTS * classes) + held_out) if config.runs else count
