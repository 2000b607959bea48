"""One step of a model in training or inference: ours, and the same model's in timm and Hugging Face at their defaults.

All contenders have the same weights, batch and dtype. Training clips the gradients and updates by torch's fused AdamW:
ours is the step of `vitlab pretrain`, and peers run under autocast. A peer's logits are compared with ours first.
"""

import importlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.cost import step
from vitlab.cost.step import OPTIM, StepSpec, example_images, example_model, inference_step
from vitlab.data.loader import Batch
from vitlab.models.vit import Model
from vitlab.train.objectives import blank_batch, create_objective
from vitlab.weights import ParityError
from vitlab.weights.huggingface import write_huggingface
from vitlab.weights.timm import write_timm

OURS = "vitlab"
MAX_DIFFERENCE = 1e-3
"""Of a peer's logits from ours in float32, relative to their norm."""


def build(name: str, spec: StepSpec) -> Callable[[], Tensor | None]:
    """The step of `vitlab` or of a peer: computes one batch, and returns the logits in inference.

    Raises ValueError for a model that the peer does not support, ParityError where its logits differ from ours.
    """
    if name == OURS:
        return step.build(spec)
    ours = example_model(spec.config)
    model = PEERS[name](ours)
    _check_equal(name, ours, model)
    if spec.mode == "infer":
        return inference_step(spec, model)
    device = torch.device(spec.device)
    images = example_images(spec.config, spec.batch, device)
    return _training_step(spec, model.to(device), blank_batch(create_objective(spec.train_config), images))


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
    with tempfile.TemporaryDirectory() as folder:
        write_timm(model, folder, {})
        return importlib.import_module("timm").create_model(f"local-dir:{folder}", pretrained=True).eval()


def _huggingface(model: Model) -> Any:
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        write_huggingface(model, folder, {})
        auto_model = transformers.AutoModelForImageClassification
        return _Logits(auto_model.from_pretrained(folder, dtype=torch.float32)).eval()


PEERS: dict[str, Callable[[Model], Any]] = {"timm": _timm, "huggingface": _huggingface}


def _training_step(spec: StepSpec, model: nn.Module, batch: Batch) -> Callable[[], None]:
    """A training step as a user of the peer writes it."""
    parameters, max_norm = list(model.parameters()), OPTIM.clip_norm or float("inf")
    optimizer = torch.optim.AdamW(parameters, lr=OPTIM.lr, weight_decay=OPTIM.weight_decay, fused=True)
    forward = torch.compile(model.train()) if spec.compile else model.train()

    def train() -> None:
        optimizer.zero_grad()
        with torch.autocast(batch.images.device.type, torch.bfloat16, enabled=spec.dtype == "bfloat16"):
            loss = F.cross_entropy(forward(batch.images), batch.labels)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()

    return train
