"""One step of a model, repeated on a fixed batch: a training step of `vitlab pretrain`, or inference."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from vitlab.config import OptimConfig, TrainConfig
from vitlab.models import ModelConfig
from vitlab.models.vit import Model, build_model
from vitlab.train.checkpoint import create_state
from vitlab.train.distributed import SINGLE
from vitlab.train.objectives import blank_batch, create_objective, create_training_model
from vitlab.train.precision import prepare_for_inference
from vitlab.train.step import train_step

Mode = Literal["train", "infer"]
OPTIM = OptimConfig(lr=1e-5, weight_decay=0.05, clip_norm=1.0)


@dataclass(frozen=True)
class StepSpec:
    """What one step computes: the model, training or inference, the batch and the precision."""

    config: ModelConfig
    mode: Mode
    batch: int
    dtype: Literal["float32", "bfloat16"]
    compile: bool = False
    device: str = "cpu"

    @property
    def train_config(self) -> TrainConfig:
        """The settings of the training, with the precision of `vitlab pretrain` for this dtype on this device."""
        lower = "autocast" if self.device.startswith("cuda") else "bfloat16"
        return TrainConfig(
            model=self.config,
            optim=OPTIM,
            steps=10**9,
            batch_size=self.batch,
            precision="float32" if self.dtype == "float32" else lower,
            compile=self.compile,
        )


def build(spec: StepSpec) -> Callable[[], Tensor | None]:
    """A function that computes one batch, and returns the logits in inference."""
    model = example_model(spec.config)
    if spec.mode == "infer":
        if not spec.compile:
            prepare_for_inference(model, torch.device(spec.device), getattr(torch, spec.dtype))
        return inference_step(spec, model)
    return training_step(spec.train_config, torch.device(spec.device), model)


def example_model(config: ModelConfig) -> Model:
    """The model, the same at every call, with a random head: a new one returns zeros."""
    generator = torch.Generator().manual_seed(0)
    model = build_model(config, generator=generator).eval()
    if model.head is not None:
        nn.init.normal_(model.head.weight, std=0.02, generator=generator)
    return model


def example_images(
    config: ModelConfig, count: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Random images. Repeated after 64, so that a large batch takes memory on the device only."""
    images = torch.rand(min(count, 64), 3, *config.image_hw, generator=torch.Generator().manual_seed(1)) * 2 - 1
    return images.to(device, dtype).repeat(-(-count // 64), 1, 1, 1)[:count]


def training_step(run: TrainConfig, device: torch.device, model: nn.Module | None = None) -> Callable[[], None]:
    """The step of `vitlab pretrain` with these settings."""
    if model is None:
        model = create_training_model(run.model, run.masking, torch.Generator().manual_seed(0))
    state = create_state(run, model.to(device), device, SINGLE)
    objective = create_objective(run)
    batch = blank_batch(objective, example_images(run.model, run.batch_size, device))

    def step() -> None:
        train_step(run, state, objective, batch, OPTIM.lr, run.batch_size)

    return step


def inference_step(spec: StepSpec, model: nn.Module) -> Callable[[], Tensor]:
    """The forward pass of `model`, which takes the images of `spec.config`."""
    device, dtype = torch.device(spec.device), getattr(torch, spec.dtype)
    images = example_images(spec.config, spec.batch, device, dtype)
    model = model.to(device, dtype).eval()
    forward = torch.compile(model, dynamic=False) if spec.compile else model
    return torch.no_grad()(lambda: forward(images))
