"""What fine-tuning takes from a pre-trained checkpoint (Sec. 3.2): its model, its weights, its identity."""

import dataclasses
import hashlib
import logging
from pathlib import Path
from typing import Any, TypeVar

import torch

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.models.image_size import ImageSize, nearest_image_size
from vitlab.models.init import redraw_positions
from vitlab.models.vit import Model
from vitlab.weights import load_model

logger = logging.getLogger(__name__)
Config = TypeVar("Config", bound=TrainConfig)


def adapt_config(source: ModelConfig, config: Config, num_classes: int, image_size: ImageSize | None = None) -> Config:
    """`config` with the model of a checkpoint, at `image_size` or the recipe's resolution, and the recipe's dropout.

    If patches do not divide the recipe's resolution, the next larger one is taken, with a warning. Raises UserError
    where the recipe's resolution is far from the checkpoint's and `image_size` is not given.
    """
    side, recipe_side = max(source.image_hw), config.model.image_hw[0]
    if image_size is None and recipe_side**2 > 16 * side**2:
        raise UserError(
            f"the recipe's {recipe_side} pixels are far from the {side} of the checkpoint's training and would cost it "
            f"{(recipe_side / side) ** 2:.0f} times the patches; give the size, e.g. --image-size {2 * side}."
        )
    size = config.model.image_size if image_size is None else image_size
    if image_size is None and isinstance(source, ViTConfig) and isinstance(size, int):
        nearest = nearest_image_size(size, source.patch_size, source.stem)
        if nearest != size:
            message = "the recipe's %d pixels cannot be cut into patches of %d: taking %d (--image-size sets another)"
            logger.warning(message, size, source.patch_size, nearest)
        size = nearest
    model = dataclasses.replace(source, image_size=size, num_classes=num_classes, head_bias=0.0)
    if isinstance(model, ViTConfig):
        assert isinstance(config.model, ViTConfig), "every fine-tuning recipe has the settings of a ViT"
        hidden = model.representation_size if isinstance(config, FinetuneConfig) and config.pre_logits else None
        model = dataclasses.replace(model, representation_size=hidden, dropout=config.model.dropout)
    elif isinstance(config.model, ViTConfig) and config.model.dropout:
        raise UserError(f"dropout={config.model.dropout}: the checkpoint is a ResNet, which has none; leave it out.")
    return dataclasses.replace(config, model=model)


def init_from_checkpoint(
    checkpoint: str | Path, config: ModelConfig, new_positions: torch.Generator | None = None
) -> Model:
    """The model `config` (see `adapt_config`) with the weights of a checkpoint and a new head of zeros.

    Position embeddings are interpolated, or drawn from `new_positions` except that of the class token.
    """
    options: dict[str, Any] = {"image_size": config.image_size, "num_classes": config.num_classes, "pre_logits": "drop"}
    if isinstance(config, ViTConfig):
        options |= {"pre_logits": "keep"} if config.representation_size else {}
        options |= {"dropout": config.dropout, "interpolation": config.position_interpolation}
    model = load_model(checkpoint, reset_head=True, **options)
    assert model.config == config, f"{model.config} is not {config}"
    if new_positions is not None:
        assert isinstance(config, ViTConfig), "`finetune` checks it"
        redraw_positions(model, config, new_positions)
    return model


def fingerprint(model: Model) -> str:
    """A short name for exactly these weights, whatever file they were in."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return f"sha256:{digest.hexdigest()[:16]}"
