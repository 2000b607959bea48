"""What a checkpoint brings to another task (Sec. 3.2), and what that task's size decides (BiT's rule)."""

import dataclasses
import functools
import hashlib
import logging
import math
from pathlib import Path
from typing import TypeVar

import torch

from vitlab.errors import UserError
from vitlab.models.config import ImageSize, ModelConfig, ViTConfig, nearest_image_size
from vitlab.models.encoder import attention_path
from vitlab.models.initial import LEARNT_POSITIONS, redraw_positions
from vitlab.models.stages import ResNetBody
from vitlab.models.vit import Model
from vitlab.train.config import FinetuneConfig, TrainConfig
from vitlab.transfer.evaluate import choose_device
from vitlab.weights import load_model

logger = logging.getLogger(__name__)

MICROBATCH_BYTES = 8 * 2**30
"""Room for what the backward pass needs of a micro-batch, counted in float32; in bfloat16 it takes half."""

Config = TypeVar("Config", bound=TrainConfig)


def by_size(config: FinetuneConfig, examples: int) -> FinetuneConfig:
    """`config` with what it leaves to the number of training pictures: BiT's rule (HyperRule, big_transfer).

    500 steps below 20,000 pictures, 10,000 below 500,000, else 20,000; warm-up 100 or 500 steps, and never more than a
    fifth of them; mixup 0.1 from 20,000 pictures on. Deviation: the batch is the power of two up to an eighth of the
    pictures, from 32 to 512; BiT's is 512.
    """
    small, asked = examples < 20_000, config.automatic
    if "batch_size" in asked:
        config = dataclasses.replace(config, batch_size=min(max(_power_of_two(examples / 8), 32), 512))
    if "steps" in asked:
        steps = 500 if small else 10_000 if examples < 500_000 else 20_000
        config = dataclasses.replace(config, steps=steps, epochs=None)
    if "warmup_steps" in asked:
        warmup = min(100 if small else 500, config.total_steps(examples) // 5)
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, warmup_steps=warmup))
    if "mixup" in asked:
        config = dataclasses.replace(config, mixup=0.0 if small else 0.1)
    return dataclasses.replace(config, automatic=())


def adapted(
    source: ModelConfig, config: Config, num_classes: int, image_size: ImageSize | None = None, device: str = "auto"
) -> Config:
    """`config` with the model of a checkpoint: its own shape, at the recipe's resolution or `image_size`.

    Where patches do not divide the recipe's resolution, the nearest larger one is taken, with a warning.

    A batch that the memory of `device` may not hold is cut into micro-batches, unless `config` says how.
    Raises ValueError where the recipe's resolution is far from the checkpoint's, and none was asked for.
    """
    side = max(source.image_hw)
    if image_size is None and config.model.image_hw[0] ** 2 > 16 * side**2:
        raise UserError(
            f"the recipe's {config.model.image_hw[0]} pixels are far from the {side} that the checkpoint was trained "
            f"at, and would cost it {(config.model.image_hw[0] / side) ** 2:.0f} times the patches; say which size "
            f"you want, e.g. --image-size {2 * side}."
        )
    size = image_size
    if size is None:
        size = config.model.image_size
        if isinstance(source, ViTConfig) and isinstance(size, int):
            size = _divided(size, source.patch_size, source.stem)
    model = dataclasses.replace(source, image_size=size, num_classes=num_classes, head_bias=0.0)
    if isinstance(model, ViTConfig):
        assert isinstance(config.model, ViTConfig), "every fine-tuning recipe has a ViT's settings"
        model = dataclasses.replace(model, representation_size=None, dropout=config.model.dropout)
    elif isinstance(config.model, ViTConfig) and config.model.dropout:
        raise UserError(f"dropout={config.model.dropout}: the checkpoint is a ResNet, which has none; leave it out.")
    fits = _power_of_two(MICROBATCH_BYTES / activation_bytes(model, choose_device(device).type))
    micro = fits if config.microbatch is None and fits < config.batch_size else config.microbatch
    return dataclasses.replace(config, model=model, microbatch=micro)


@functools.cache  # to be said once
def _divided(size: int, patch_size: int, stem: ResNetBody | None) -> int:
    """The recipe's size, or the nearest larger one that patches divide."""
    nearest = nearest_image_size(size, patch_size, stem)
    if nearest != size:
        logger.warning(
            "the recipe's %d pixels cannot be cut into patches of %d: taking the nearest larger size, %d "
            "(--image-size sets another)", size, patch_size, nearest,
        )  # fmt: skip
    return nearest


def activation_bytes(model: ModelConfig, device_type: str) -> int:
    """What one picture leaves in memory for the backward pass, in float32 and about: each block's or unit's maps, and
    where attention is computed as plain products, every block's matrices, with two gradients of those at work."""
    body = model.stem if isinstance(model, ViTConfig) else model.body
    numbers = 0
    for unit in body.units() if body else ():
        before = math.prod(unit.grid(model.image_hw))
        numbers += 4 * before * (unit.channels_in + unit.inner) + 4 * before // unit.stride**2 * unit.inner
    if isinstance(model, ViTConfig):
        halves = 1 if model.encoder == "full" else 2
        numbers += halves * model.depth * model.num_tokens * (8 * model.width + 2 * model.mlp_dim)
        if attention_path(device_type, needs_grad=True) == "matmul":
            numbers += (model.depth + 2) * model.heads * _pairs(model)
    return 4 * max(numbers, 1)


def _pairs(model: ViTConfig) -> int:
    """Numbers of one head's attention matrices of one picture in a block."""
    if model.encoder == "full":
        return model.num_tokens**2
    (rows, columns), prefix = model.grid, model.num_prefix_tokens
    return rows * (columns + prefix) ** 2 + columns * (rows + prefix) ** 2


def _power_of_two(most: float) -> int:
    """The largest power of two up to `most`; at least 1."""
    return 2 ** max(math.floor(math.log2(most)), 0)


def carried(checkpoint: str | Path, wanted: ModelConfig, new_positions: torch.Generator | None = None) -> Model:
    """The model `wanted` (see `adapted`) with the weights of a checkpoint and a new head of zeros.

    `new_positions` draws position embeddings for its grid in place of the interpolated ones; only the class token's
    stays (see `redraw_positions`).
    """
    dropout = wanted.dropout if isinstance(wanted, ViTConfig) else None
    model = load_model(
        checkpoint, image_size=wanted.image_size, num_classes=wanted.num_classes, reset_head=True,
        pre_logits="drop", dropout=dropout,
    )  # fmt: skip
    assert model.config == wanted, f"{model.config} is not {wanted}"
    if new_positions is not None:
        assert isinstance(wanted, ViTConfig), "see `check_positions`"
        redraw_positions(model, wanted, new_positions)
    return model


def check_positions(model: ModelConfig) -> None:
    """Raises ValueError for a model without position embeddings that could be drawn anew."""
    if not isinstance(model, ViTConfig) or model.position not in LEARNT_POSITIONS:
        kind = f"position={model.position!r}" if isinstance(model, ViTConfig) else "a ResNet"
        raise UserError(
            f"fresh_positions draws learnt position embeddings anew, and the checkpoint has none ({kind}); leave it "
            f"out."
        )


def identity(model: Model) -> tuple[ModelConfig, str]:
    """A model's shape, and a short name for exactly its weights, whatever file they came in."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return model.config, f"sha256:{digest.hexdigest()[:16]}"
