"""Another representation of a ViT: fewer blocks, or another pooling of the tokens.

Pure functions of the configuration. `weights/adapt.py` changes the weights, `evaluation/readouts.py` compares the
representations.

    change_readout(vitlab.get_config("ViT-B/16", num_classes=0), depth=8, pool="token+gap")
"""

from dataclasses import replace
from typing import get_args

from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, Pool, ViTConfig
from vitlab.models.variant import override


def change_readout(config: ModelConfig, depth: int | None = None, pool: Pool | None = None) -> ViTConfig:
    """The configuration of the first `depth` blocks, with `pool`; None leaves either as it is.

    Where `pool` no longer reads the class token, it stays in the sequence as the first register, and the reverse.
    Raises UserError for a depth or pooling that the model cannot have.
    """
    if not isinstance(config, ViTConfig):
        raise UserError(f"depth={depth}, pool={pool!r}: a ResNet has neither blocks nor tokens; leave them out.")
    if depth is not None and not 1 <= depth <= config.depth:
        raise UserError(f"depth is {depth}; allowed: 1 to {config.depth}.")
    if pool is not None and pool not in get_args(Pool):
        raise UserError(f"pool is {pool!r}; allowed: {', '.join(get_args(Pool))}.")
    if (depth or config.depth, pool or config.pool) == (config.depth, config.pool):
        return config
    if config.representation_size or config.pool == "map":
        is_map = config.pool == "map"
        trained = "attention pooling" if is_map else "the layer before the head (pre_logits)"
        hint = "leave it out" if is_map else "add pre_logits='drop', or leave it out"
        raise UserError(f"depth={depth}, pool={pool!r} changes the input of {trained}; {hint}.")
    config = replace(config, depth=depth or config.depth)
    return config if pool in (None, config.pool) else _change_pool(config, pool)


def _change_pool(config: ViTConfig, pool: Pool) -> ViTConfig:
    """The configuration with `pool`; the class token becomes a register, or a register the class token."""
    variant, pooled = config.variant, replace(config, pool=pool)
    if variant.final_norm != "tokens" or variant.distilled:
        raise UserError(f"pool={pool!r} requires a LayerNorm on all tokens, and no distillation token; leave it out.")
    if pooled.has_class_token == config.has_class_token:
        return pooled
    if not pooled.has_class_token:
        if config.position_at != "stem":
            raise UserError("pool='gap' requires position embeddings before the first block alone; leave it out.")
        return override(config, pool=pool, registers=variant.registers + 1)
    if not variant.registers:
        raise UserError(f"pool={pool!r} requires a class token beside the patches; give pool='gap' or leave it out.")
    return override(config, pool=pool, registers=variant.registers - 1, class_position=False)
