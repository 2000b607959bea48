"""In which numbers a checkpoint is judged. There is no `auto`: what is found must not depend on the machine.

`float32`: as the checkpoint is; exact.
`bfloat16`: weights and activations have 8 significant bits; logits and features become float32 again before anything is
made of them. Faster on a GPU, and on a CPU with AMX or AMD's AVX-512 for it; images near a tie may change sides.
"""

import logging
from pathlib import Path

import torch
from torch import nn

from vitlab.errors import UserError
from vitlab.models.config import ImageSize, Interpolation
from vitlab.train.distributed import SINGLE, World
from vitlab.train.precision import keep_freed_memory, resolve_precision
from vitlab.weights import Checkpoint, load_checkpoint

logger = logging.getLogger(__name__)

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_for_judging(
    checkpoint: str | Path,
    device: torch.device,
    precision: str = "float32",
    *,
    image_size: ImageSize | None = None,
    interpolation: Interpolation | None = None,
    world: World = SINGLE,
) -> Checkpoint:
    """A checkpoint on its device, in evaluation mode, its weights cast to `precision`; sizes as in `load_checkpoint`.

    Where that gains no time over float32, rank 0 says so. Raises ValueError for an unknown precision.
    """
    if precision not in PRECISIONS:
        raise UserError(f"precision is {precision!r}; a checkpoint is judged in {' or '.join(PRECISIONS)}.")
    if precision == "bfloat16" and world.is_rank_0 and resolve_precision("auto", device) == "float32":
        logger.warning("this %s is not faster in bfloat16: float32 takes no longer, and is exact", device.type.upper())
    if device.type == "cpu":
        keep_freed_memory()  # a large batch asks for the same blocks again and again
    found = load_checkpoint(checkpoint, image_size=image_size, interpolation=interpolation)
    found.model.to(device=device, dtype=PRECISIONS[precision])
    return found


def computes_in(model: nn.Module) -> str:
    """The type of the model's weights; float32 where it has none."""
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    return str(dtype).removeprefix("torch.")


def recorded(computed_in: str) -> dict[str, str]:
    """What a record says of the numbers that were computed in: nothing of float32."""
    return {} if computed_in == "float32" else {"computed_in": computed_in}


def noted(computed_in: str) -> str:
    """The same at the end of a table's last line."""
    return "" if computed_in == "float32" else f" · computed in {computed_in}"
