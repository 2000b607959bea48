"""One step of a model in training or inference: ours, and the same model's in timm and Hugging Face.

All contenders have the same weights, batch and dtype. Before a peer is timed, its logits are compared with ours. Each
peer has two variants, with fused attention and with plain matrix products; the faster one counts.
"""

import dataclasses
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
from vitlab.models import ModelConfig, ViTConfig, build_model
from vitlab.models.vit import Model
from vitlab.settings import nearest
from vitlab.train.checkpoint import create_state
from vitlab.train.distributed import SINGLE
from vitlab.train.loop import train_step
from vitlab.train.objectives import create_objective, create_training_model
from vitlab.train.precision import Precision, resolve_precision
from vitlab.weights import ParityError

Mode = Literal["train", "infer"]
OURS = "vitlab"
PACKAGES = {"timm": ("timm", ">=1.0.20"), "huggingface": ("transformers", ">=5")}
"""Peer -> its package and the version to install."""
FUSED, PRODUCTS = "fused attention", "attention as products"
OPTIM = OptimConfig(lr=1e-5, weight_decay=0.05, clip_norm=1.0)
"""The update that all contenders make, with torch's fused AdamW."""
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
        """Our training: in bfloat16 with the precision that `vitlab pretrain` chooses on this device."""
        automatic = resolve_precision("auto", torch.device(self.device))
        lower: Precision = "bfloat16" if automatic == "float32" else automatic
        precision = "float32" if self.dtype == "float32" else lower
        run = TrainConfig(model=self.config, optim=OPTIM, steps=10**9, batch_size=self.batch, precision=precision)
        return dataclasses.replace(run, compile=self.compile)


@dataclass(frozen=True)
class Contender:
    """A model ready to run. `step` goes once through the batch; in inference it returns the logits."""

    name: str
    settings: str
    """A description of the settings it runs with."""
    step: Callable[[], Tensor | None]


def variants(peer: str, config: ModelConfig) -> tuple[str, ...]:
    """The names of a peer's contenders. A model without attention has one."""
    return (f"{peer}, {FUSED}", f"{peer}, {PRODUCTS}") if isinstance(config, ViTConfig) else (peer,)


def check_installed(peer: str) -> None:
    """Raises UserError for an unknown peer and for one whose package is not installed."""
    if peer not in PACKAGES:
        raise UserError(f"unknown peer {peer!r}; {nearest(peer, PACKAGES)}.")
    package, version = PACKAGES[peer]
    if importlib.util.find_spec(package) is None:
        raise UserError(f"--against {peer} requires {package}: pip install '{package}{version}'")


def build(name: str, work: Work) -> Contender:
    """The contender of that name: `vitlab`, or one of `variants`.

    Raises UserError for a model that the peer does not support, ParityError where its logits differ from ours.
    """
    device, model = torch.device(work.device), example_model(work.config)
    if name != OURS:
        ours, (peer, _, variant) = model, name.partition(", ")
        model = {"timm": _timm, "huggingface": _huggingface}[peer](ours, variant != PRODUCTS)
        _check_equal(name, ours, model)
    if work.mode == "infer":
        return Contender(name, f"weights and images in {work.dtype}", _inference_step(work, model, device))
    run = work.run
    if name == OURS:
        settings = f"the step of vitlab pretrain, precision {run.precision}, gradients clipped at 1"
        return Contender(name, settings, training_step(run, device, model))
    cast = "bfloat16 autocast" if work.dtype == "bfloat16" else "float32"
    step = _peer_training_step(work, model.to(device), example_batch(run, device))
    return Contender(name, f"{cast}, fused AdamW, gradients clipped at 1", step)


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


def example_batch(run: TrainConfig, device: torch.device) -> Batch:
    """Images in float32, random labels, and the random numbers that masking needs."""
    generator, size, objective = torch.Generator().manual_seed(2), run.batch_size, create_objective(run)
    labels = torch.randint(max(run.model.num_classes, 1), (size,), generator=generator).to(device)
    draws = torch.rand(size, objective.draws, dtype=torch.float64, generator=generator).to(device)
    images, indices = example_images(run.model, size, device), torch.arange(size, device=device)
    return Batch(images, labels, indices, draws=draws if objective.draws else None)


def training_step(run: TrainConfig, device: torch.device, model: nn.Module | None = None) -> Callable[[], None]:
    """The step of `vitlab pretrain` with these settings, again and again on one random batch."""
    if model is None:
        model = create_training_model(run, torch.Generator().manual_seed(0))
    state, objective = create_state(run, model.to(device), device, SINGLE), create_objective(run)
    batch = example_batch(run, device)

    def step() -> None:
        train_step(run, state, objective, batch, OPTIM.lr, run.batch_size)

    return step


def _inference_step(work: Work, model: nn.Module, device: torch.device) -> Callable[[], Tensor]:
    """A forward pass, of our model and of peers alike."""
    dtype = getattr(torch, work.dtype)
    images = example_images(work.config, work.batch, device, dtype)
    model = model.to(device, dtype).eval()
    forward = torch.compile(model, dynamic=False) if work.compile else model

    def step() -> Tensor:
        with torch.no_grad():
            return forward(images)

    return step


# -------------------------------------------------------------------------------------------------------------- peers


def _check_equal(name: str, ours: Model, theirs: nn.Module) -> None:
    images = example_images(ours.config, 2)
    with torch.inference_mode():
        expected, logits = ours(images), theirs(images)
    difference = float((expected - logits.float()).norm() / expected.norm())
    if not difference <= MAX_DIFFERENCE:
        raise ParityError(f"{name} differs from vitlab with the same weights, by {difference:.1e} of the logits' norm.")


class _Logits(nn.Module):
    """A Hugging Face model that returns only its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits


def _timm(model: Model, fused: bool) -> Any:
    timm, settings = importlib.import_module("timm"), importlib.import_module("timm.layers.config")
    from vitlab.weights.timm import write_timm

    with tempfile.TemporaryDirectory() as folder:
        write_timm(model, folder, {})
        settings.set_fused_attn(fused)  # read when a model is built
        try:
            return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        finally:
            settings.set_fused_attn(True)


def _huggingface(model: Model, fused: bool) -> Any:
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    from vitlab.weights.huggingface import write_huggingface

    attention = {"attn_implementation": "sdpa" if fused else "eager"} if isinstance(model.config, ViTConfig) else {}
    with tempfile.TemporaryDirectory() as folder:
        write_huggingface(model, folder, {})
        auto_model = transformers.AutoModelForImageClassification
        return _Logits(auto_model.from_pretrained(folder, dtype=torch.float32, **attention)).eval()


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
