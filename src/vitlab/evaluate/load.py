"""Loading a checkpoint for evaluation: size, precision, device.

There is no automatic precision: a result must not depend on the machine. In float32 the model computes exactly as its
checkpoint; in bfloat16 weights and activations have 8 significant bits, and logits and features are cast to float32.
"""

import logging
from pathlib import Path

import torch
from torch import nn

from vitlab.errors import UserError
from vitlab.evaluate.options import ModelOptions
from vitlab.train.distributed import SINGLE, World
from vitlab.train.precision import keep_freed_memory, resolve_precision
from vitlab.weights import Checkpoint, load_checkpoint

logger = logging.getLogger(__name__)


def load_for_evaluation(
    checkpoint: str | Path, options: ModelOptions, *, require_head: bool = False, world: World = SINGLE
) -> Checkpoint:
    """A checkpoint in evaluation mode on the device of this process, its weights cast to `options.precision`.

    Warns on rank 0 where bfloat16 gains no time. Raises UserError for a missing device and, with `require_head`, for a
    model without a head.
    """
    device = choose_device(world.device(options.device))
    if options.precision == "bfloat16" and world.is_rank_0 and resolve_precision("auto", device) == "float32":
        logger.warning("this %s is not faster in bfloat16 than in float32, which is exact", device.type.upper())
    if device.type == "cpu":
        keep_freed_memory()  # every batch allocates blocks of the same sizes
    loaded = load_checkpoint(checkpoint, image_size=options.image_size, interpolation=options.interpolation)
    if require_head and loaded.model.head is None:
        raise UserError(f"{checkpoint} has no head and predicts no classes; fine-tune it first (`vitlab finetune`).")
    loaded.model.to(device=device, dtype=getattr(torch, options.precision))
    return loaded


def choose_device(name: str) -> torch.device:
    """`auto` is the first GPU, or the CPU. Raises UserError for an unknown or missing device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is unknown; give auto, cpu, cuda or cuda:1.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {name!r} is missing: torch sees {torch.cuda.device_count()} GPUs; `vitlab doctor` says more."
        )
    return device


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's weights; the CPU where it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def dtype_of(model: nn.Module) -> str:
    """The type of the model's weights, such as `bfloat16`; float32 where it has none."""
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    return str(dtype).removeprefix("torch.")
