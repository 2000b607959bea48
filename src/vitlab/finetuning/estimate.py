"""What a fine-tuning job takes on this machine: its parts in seconds, and the plan as text."""

import contextlib
import math
import time
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from vitlab.config import FinetuneConfig
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.transforms import EvalTransform
from vitlab.display import format_duration
from vitlab.finetuning.head import head_images
from vitlab.inspection.finished_run import MAX_COMPARED, Report
from vitlab.models.config import ViTConfig
from vitlab.train.microbatch import StepCost

SHORT = 120.0
"""Jobs of fewer seconds get no suggestion of shorter settings."""
REPORT_SECONDS, REPORT_IMAGES = 12.0, 200
"""What a report takes on two cores, and images that pass through the model for it."""
SHORT_REPORT_SECONDS = 6.0
"""The same without near-duplicates and without files of the figures."""
REPORT_FRACTION = 0.2
"""Largest fraction of a budget for the report."""
SAMPLES = 8
"""Images whose decoding is measured."""


REPORT_TEXT = {
    "whole": "one page",
    "short": "one page, without near-duplicates and files of the figures",
    "none": "left out",
}


class Images(NamedTuple):
    """How many images a job has."""

    train: int
    test: int


class Seconds(NamedTuple):
    """What the parts of a job take: to read every image once for what is unreadable, the least-squares head and its
    test, the sweep, the final runs and their tests, the report."""

    reading: float
    linear: float
    sweep: float
    runs: float
    report: float


@dataclass(frozen=True)
class JobCost:
    """What a job takes at one image size."""

    step: StepCost
    decode: float = 0.0
    """Measured seconds to read and prepare an image."""
    processes: int = 1
    """World size."""
    workers: int = 0
    """Loader processes of each rank beside a GPU; on a CPU they would take its cores."""
    cores: int = 1
    """CPU cores for images that are only decoded."""
    report_limit: float = math.inf
    """Seconds that the report may take; a whole one that takes longer becomes a short one, or none."""

    def seconds(self, config: FinetuneConfig, images: Images) -> Seconds:
        evaluate, train = self._per_image(self.step.eval_seconds), self._per_image(self.step.train_seconds)
        views, read_once = 1 + (config.head_views or 0), sum(images) * self.decode
        reading = read_once / self.cores if config.data.on_error == "skip" else 0.0
        features = self._per_image(self.step.feature_seconds)
        seen = views * head_images(config, images.train, config.model.num_classes)
        linear = seen * features + images.test * evaluate if config.head else 0.0
        score = config.held_out * images.train * (evaluate + (3 * features if config.head else 0))  # ALPHAS
        steps = config.total_steps(images.train)
        sweep = 0.0
        if config.tried_rates and config.runs:
            sweep = len(config.tried_rates) * ((config.sweep_steps or steps) * config.batch_size * train + score)
        one_run = images.test * evaluate + (steps * config.batch_size * train if config.refit else 0.0)
        report = self.reports(images)[self.report(images)] if config.head else 0.0
        return Seconds(reading, linear, sweep, config.runs * one_run if config.runs else 0.0, report)

    def reports(self, images: Images) -> dict[Report, float]:
        """Seconds of each kind of report."""
        seen = REPORT_IMAGES * self._per_image(self.step.eval_seconds) * self.processes
        compared = sum(images) * self.decode / min(self.cores, 8) if sum(images) <= MAX_COMPARED else 0.0
        return {"whole": REPORT_SECONDS + seen + compared, "short": SHORT_REPORT_SECONDS + seen, "none": 0.0}

    def report(self, images: Images) -> Report:
        """The kind of report that the limit allows."""
        return next(kind for kind, seconds in self.reports(images).items() if seconds <= self.report_limit)

    def _per_image(self, compute: float) -> float:
        seconds = max(compute, self.decode / self.workers) if self.workers else compute + self.decode
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


def format_estimate(config: FinetuneConfig, cost: JobCost, images: Images, device: str) -> str:
    """What a fine-tuning job with these complete settings will take, as lines of text: size, memory and time."""

    def duration(seconds: float) -> str:
        return format_duration(seconds) if seconds < math.inf else "unknown"

    model, fitted = config.model, head_images(config, images.train, config.model.num_classes)
    steps, rates = config.total_steps(images.train), len(config.tried_rates)
    seconds = cost.seconds(config, images)
    total = sum(seconds)
    epochs, size = steps * config.batch_size / images.train, "x".join(map(str, model.image_hw))
    held_out = round(config.held_out * images.train)
    rows = {
        "model": f"{model.num_parameters / 1e6:.1f}M parameters, {size} px, on {device}",
        "data": f"{images.train:,} training and {images.test:,} test images, {model.num_classes:,} classes",
        "measured": cost.step.describe(),
        "reading": f"every image once, to find what cannot be read: {duration(seconds.reading)}",
        "linear": f"least-squares head on frozen representations ({fitted:,} images, each as it is and in "
        f"{config.head_views or 0} augmented views), then the test: {duration(seconds.linear)}",
        "sweep": f"{rates} learning rate{'s' * (rates > 1)} x {config.sweep_steps or steps:,} steps of "
        f"{config.batch_size} images, scored on about {held_out:,} images: {duration(seconds.sweep)}",
        "training": f"{config.runs} x {steps:,} steps of {config.batch_size} images ({epochs:.1f} epochs), then the "
        f"test: {duration(seconds.runs)}"
        if config.refit
        else f"none: the best run of the sweep ({epochs:.1f} epochs) is tested: {duration(seconds.runs)}",
        "report": f"{REPORT_TEXT[cost.report(images)]}: {duration(seconds.report)}",
        "total": f"about {duration(total)}",
    }
    without = [] if config.head else ["linear", "report"]
    without += [] if seconds.reading >= 1 else ["reading"]
    without += [] if rates and config.runs else ["sweep"]
    without += [] if config.runs else ["training"]
    rows = {name: text for name, text in rows.items() if name not in without}
    if SHORT < total < math.inf:
        rows["shorter"] = " | ".join(_shorter(config, cost, images, total))
    return "\n".join(f"  {name:9} {text}" for name, text in rows.items())


def _shorter(config: FinetuneConfig, cost: JobCost, images: Images, total: float) -> list[str]:
    """Options for a shorter job, and what it takes."""
    if config.head is not None:
        return [f"--budget {math.ceil(total / 120)}m, with another --workdir"]
    options, (_, _, sweep, runs, _) = [], cost.seconds(config, images)
    if sweep:
        options.append(f"--optim.lr {config.optim.lr:g}, without a sweep: {format_duration(runs)}")
    steps, model = config.total_steps(images.train), config.model
    if (half := steps // 2) > 0:
        sweep_steps = config.sweep_steps and max(config.sweep_steps * half // steps, 1)
        fewer = replace(config, steps=half, epochs=None, sweep_steps=sweep_steps)
        options.append(f"--steps {half}: {format_duration(sum(cost.seconds(fewer, images)))}")
    if isinstance(model, ViTConfig) and (side := min(model.image_hw) * 3 // 4 // model.stride * model.stride) >= 64:
        ratio = replace(model, image_size=side).forward_macs / model.forward_macs
        options.append(f"--image-size {side}: about {format_duration(ratio * total)}")
    return options
