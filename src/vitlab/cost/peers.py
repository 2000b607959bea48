"""One step of a model in training or inference: ours, and the same model's in timm and Hugging Face at their defaults.

All contenders have the same weights, batch and dtype. Training clips the gradients and updates by torch's fused AdamW:
ours is the step of `vitlab pretrain`, and peers run under autocast. A peer's logits are compared with ours first.
"""

import importlib
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.config import OptimConfig, TrainConfig
from vitlab.data.loader import Batch
from vitlab.errors import UserError
from vitlab.models import ModelConfig
from vitlab.models.vit import Model, build_model
from vitlab.train.checkpoint import create_state
from vitlab.train.distributed import SINGLE
from vitlab.train.objectives import blank_batch, create_objective, create_training_model
from vitlab.train.step import train_step
from vitlab.weights import ParityError

Mode = Literal["train", "infer"]
OURS = "vitlab"
PEERS = {"timm": ("timm", ">=1.0.20"), "huggingface": ("transformers", ">=5")}
"""Peer -> its package and the version to install."""
OPTIM = OptimConfig(lr=1e-5, weight_decay=0.05, clip_norm=1.0)
MAX_DIFFERENCE = 1e-3
"""Of a peer's logits from ours in float32, relative to their norm."""


@dataclass(frozen=True)
class Work:
    """What every contender computes."""

    config: ModelConfig
    mode: Mode
    batch: int
    dtype: Literal["float32", "bfloat16"]
    compile: bool = False
    device: str = "cpu"

    @property
    def run(self) -> TrainConfig:
        """Our training, with the precision that `vitlab pretrain` has for this dtype on this device."""
        lower = "autocast" if self.device.startswith("cuda") else "bfloat16"
        return TrainConfig(
            model=self.config,
            optim=OPTIM,
            steps=10**9,
            batch_size=self.batch,
            precision="float32" if self.dtype == "float32" else lower,
            compile=self.compile,
        )


def check_installed(peer: str) -> None:
    """Raises UserError where the peer's package is not installed."""
    package, version = PEERS[peer]
    if importlib.util.find_spec(package) is None:
        raise UserError(f"--against {peer} requires {package}: pip install '{package}{version}'")


def build(name: str, work: Work) -> Callable[[], Tensor | None]:
    """The step of `vitlab` or of a peer: computes one batch, and returns the logits in inference.

    Raises ValueError for a model that the peer does not support, ParityError where its logits differ from ours.
    """
    device, model = torch.device(work.device), example_model(work.config)
    if name != OURS:
        ours, model = model, {"timm": _timm, "huggingface": _huggingface}[name](model)
        _check_equal(name, ours, model)
    if work.mode == "infer":
        return _inference_step(work, model, device)
    if name == OURS:
        return training_step(work.run, device, model)
    images = example_images(work.config, work.batch, device)
    return _peer_training_step(work, model.to(device), blank_batch(create_objective(work.run), images))


# --------------------------------------------------------------------------------------------------------------- ours


def example_model(config: ModelConfig) -> Model:
    """Our model, the same at every call, with a random head: a new one returns zeros."""
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
    """The step of `vitlab pretrain` with these settings, again and again on one batch."""
    if model is None:
        model = create_training_model(run.model, run.masking, torch.Generator().manual_seed(0))
    state, objective = create_state(run, model.to(device), device, SINGLE), create_objective(run)
    batch = blank_batch(objective, example_images(run.model, run.batch_size, device))

    def step() -> None:
        train_step(run, state, objective, batch, OPTIM.lr, run.batch_size)

    return step


def _inference_step(work: Work, model: nn.Module, device: torch.device) -> Callable[[], Tensor]:
    dtype = getattr(torch, work.dtype)
    images = example_images(work.config, work.batch, device, dtype)
    model = model.to(device, dtype).eval()
    forward = torch.compile(model, dynamic=False) if work.compile else model
    return torch.no_grad()(lambda: forward(images))


# -------------------------------------------------------------------------------------------------------------- peers


def _check_equal(name: str, ours: Model, theirs: nn.Module) -> None:
    images = example_images(ours.config, 2)
    with torch.inference_mode():
        expected, logits = ours(images), theirs(images)
    difference = float((expected - logits).norm() / expected.norm())
    if not difference <= MAX_DIFFERENCE:
        raise ParityError(f"{name} differs from vitlab with the same weights, by {difference:.1e} of the logits' norm.")


class _Logits(nn.Module):
    """A Hugging Face model that returns only its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits


def _timm(model: Model) -> Any:
    from vitlab.weights.timm import write_timm

    with tempfile.TemporaryDirectory() as folder:
        write_timm(model, folder, {})
        return importlib.import_module("timm").create_model(f"local-dir:{folder}", pretrained=True).eval()


def _huggingface(model: Model) -> Any:
    from vitlab.weights.huggingface import write_huggingface

    transformers = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        write_huggingface(model, folder, {})
        auto_model = transformers.AutoModelForImageClassification
        return _Logits(auto_model.from_pretrained(folder, dtype=torch.float32)).eval()


def _peer_training_step(work: Work, model: nn.Module, batch: Batch) -> Callable[[], None]:
    """A training step as a user of the peer writes it."""
    parameters, max_norm = list(model.parameters()), OPTIM.clip_norm or float("inf")
    optimizer = torch.optim.AdamW(parameters, lr=OPTIM.lr, weight_decay=OPTIM.weight_decay, fused=True)
    forward = torch.compile(model.train()) if work.compile else model.train()

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(batch.images.device.type, torch.bfloat16, enabled=work.dtype == "bfloat16"):
            loss = F.cross_entropy(forward(batch.images), batch.labels)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()

    return step
