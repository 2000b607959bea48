"""Seconds per image of a run on this machine: measured on a few images, scaled by MACs to other image sizes."""

import contextlib
import dataclasses
import time
from dataclasses import dataclass

import numpy as np
import torch

from vitlab.config import TrainConfig
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.transforms import EvalTransform
from vitlab.data.workers import available_cores, num_workers
from vitlab.models.config import ModelConfig
from vitlab.runs.run import RunContext
from vitlab.train.microbatch import StepCost, measure_step
from vitlab.train.objectives import create_training_model

SAMPLES = 8
"""Images whose decoding is measured."""


@dataclass(frozen=True)
class ImageCost:
    """Wall-clock seconds per image across all ranks."""

    step: StepCost
    macs: int
    """Multiply-adds of the forward pass of the measured model."""
    decode: float = 0.0
    """To read and prepare an image."""
    processes: int = 1
    """World size."""
    workers: int = 0
    """Loader workers of each rank; 0 on a CPU, where they would compete for cores."""
    cores: int = 1
    """CPU cores of this machine."""

    def train(self, model: ModelConfig) -> float:
        """Forward and backward pass; infinite if not known."""
        return self._per_image(self.step.train_seconds, model, 1)

    def forward(self, model: ModelConfig) -> float:
        """Forward pass in the precision of training, of a test and for representations."""
        threads = max(self.cores // self.processes, 1)  # as `data.workers.read_threads`
        return self._per_image(self.step.forward_seconds, model, threads)

    def forward_in_float32(self, model: ModelConfig) -> float:
        """The same in float32, as for a report."""
        return self._per_image(self.step.float32_seconds, model, 1)

    @property
    def read(self) -> float:
        """Reading alone, on all cores."""
        return self.decode / self.cores

    def _per_image(self, compute: float, model: ModelConfig, threads: int) -> float:
        compute *= model.forward_macs / self.macs
        if self.workers:
            return max(compute, self.decode / self.workers) / self.processes
        return (compute + self.decode / threads) / self.processes


def measure_cost(config: TrainConfig, dataset: Dataset, context: RunContext, train: bool = True) -> ImageCost:
    """The cost of a run, as rank 0 measures it. train: see `train.microbatch.measure_step`."""
    world, device = context.world, context.device
    model = create_training_model(config.model, config.masking, torch.Generator().manual_seed(0))
    step = world.broadcast_object(
        lambda: dataclasses.asdict(measure_step(config, model, device, world.world_size, train))
    )
    decode, cores = world.broadcast_object(lambda: (_measure_decode(config, dataset), available_cores()))
    workers = 0 if device.type == "cpu" else num_workers(config.data.workers, device)
    return ImageCost(StepCost(**step), config.model.forward_macs, decode, world.world_size, workers, cores)


def _measure_decode(config: TrainConfig, dataset: Dataset) -> float:
    """Seconds to read and prepare an image, averaged over a few."""
    transform = EvalTransform(config.model.image_hw, config.data.preprocessing(config.model.image_size))
    started, done = time.perf_counter(), 0
    for index in np.linspace(0, len(dataset) - 1, min(SAMPLES, len(dataset))).astype(int).tolist():
        with contextlib.suppress(ImageError):  # the run reports it
            transform.apply([dataset.image(index)])
            done += 1
    return (time.perf_counter() - started) / max(done, 1)
