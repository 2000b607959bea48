"""Parameters and multiply-accumulates (MACs) of a ViT, from its configuration alone; `resnet_config` counts ResNets.

A MAC is 2 FLOPs, and training takes 3 times the FLOPs of a forward pass: 6 FLOPs a MAC. `config` is a `ViTConfig`; its
module imports this one, and not the reverse. Importing this does not import torch. The exaFLOPs of a whole run, as
Table 6 counts them, are `studies/spec.exaflops`.
"""

from typing import Any


def count_parameters(config: Any) -> int:
    """Trained numbers, counted without building the model."""
    d, variant = config.width, config.variant
    stem = config.stem.num_parameters(config.image_hw) if config.stem else 0
    channels = config.stem.channels if config.stem else config.in_chans
    embedding = d * (channels * config.patch_size**2 + 1) + d * config.num_prefix_tokens
    norm = 2 * d
    attention = 4 * d * (d + 1)  # queries, keys, values, output
    mlp = (d + 1) * config.mlp_dim * (2 if variant.swiglu else 1) + (config.mlp_dim + 1) * d
    mlp += 2 * config.mlp_dim if variant.mlp_norm else 0
    block = norm + attention + norm + mlp
    block += norm if variant.attention_norm else 0
    block += 2 * d if variant.layer_scale is not None else 0  # a factor on each of two branches
    blocks = config.depth * (2 if config.encoder == "axial" else 1)
    pooling = d + attention + norm + mlp if config.pool == "map" else 0  # d is the learned query
    rep = config.representation_size or 0
    pre_logits = rep * (config.pooled_dim + 1)
    heads = (2 if variant.distilled else 1) * (config.num_features + 1) * config.num_classes
    encoder = blocks * block + norm * (int(variant.pre_norm) + int(variant.final_norm != "none"))
    return stem + embedding + _position_parameters(config) + encoder + pooling + pre_logits + heads


def _position_parameters(config: Any) -> int:
    d, (h, w) = config.width, config.grid
    rows = {
        "1d": d * (config.num_position_prefix + config.num_patches),
        "2d": d * config.num_position_prefix + (h + w) * d // 2,
        "relative": (2 * config.num_patches - 1) * d // config.heads,
    }
    return rows.get(config.position, 0) * (config.depth if config.position_at == "every" else 1)


def count_macs(config: Any, kept_patches: int | None = None) -> int:
    """Multiply-accumulates of the products in one forward pass of one image, with all patches or `kept_patches`."""
    d, n, p, variant = config.width, config.num_patches, config.num_prefix_tokens, config.variant
    t = p + (n if kept_patches is None else kept_patches)
    mlp = (3 if variant.swiglu else 2) * d * config.mlp_dim
    channels = config.stem.channels if config.stem else config.in_chans
    stem = config.stem.forward_macs(config.image_hw) if config.stem else 0
    embed = n * channels * config.patch_size**2 * d
    dense = 4 * d * d + mlp  # a token's queries, keys, values and output, and its MLP
    if config.encoder == "full":
        encoder = config.depth * (t * dense + 2 * t * t * d)  # the products of t tokens with t keys, then t values
        if config.position == "relative":
            encoder += config.depth * n * (2 * n - 1) * d
    else:  # along an axis of s positions there are n / s sequences, all with a copy of the prefix
        encoder = config.depth * sum(n // s * ((s + p) * dense + 2 * (s + p) ** 2 * d) for s in config.grid)
    # The layer of queries, keys and values is applied to the learned query and to all tokens (`project_cross`).
    pooling = 3 * d * d * (1 + t) + 2 * t * d + d * d + mlp if config.pool == "map" else 0
    rep = config.representation_size or 0
    head = config.pooled_dim * rep + (2 if variant.distilled else 1) * config.num_features * config.num_classes
    return stem + embed + encoder + pooling + head
