"""What fine-tuning takes from a pre-trained checkpoint (Sec. 3.2): its weights, its identity."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.models.init import redraw_positions
from vitlab.models.vit import Model
from vitlab.weights import load_model


def init_from_checkpoint(
    checkpoint: str | Path, config: ModelConfig, new_positions: torch.Generator | None = None
) -> Model:
    """The model `config` (see `adapt_config`) with the weights of a checkpoint and a new head of zeros.

    Its first blocks are kept if `config` has fewer. Position embeddings are interpolated, or drawn from
    `new_positions` except the class token's.
    """
    options: dict[str, Any] = {"image_size": config.image_size, "num_classes": config.num_classes, "pre_logits": "drop"}
    if isinstance(config, ViTConfig):
        options |= {"pre_logits": "keep"} if config.representation_size else {}
        options |= {"dropout": config.dropout, "interpolation": config.variant.position_interpolation}
        options |= {"dynamic_image_size": config.dynamic_image_size, "depth": config.depth} | (
            {} if config.pool == "map" else {"pool": config.pool}
        )
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
