"""Names and order of the tensors in timm's checkpoints: `timm_layout` has those of its ViTs and ResNets. The EVA family
has others, which `rename_eva` and `reorder_pairs` convert to them, and `eva_names` back."""

import dataclasses
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from vitlab.models import ModelConfig, ResNetConfig, ViTConfig
from vitlab.weights.layout import Layout, renamed_layout

BACKBONE = "patch_embed.backbone."
"""In front of the names of a hybrid's stem."""
NAME_MAP = (
    (r"^(stem|body)\.root\.", "stem.conv."),
    (r"^(stem|body)\.root_norm\.", "stem.norm."),
    (r"^(stem|body)\.stages\.(\d+)\.", r"stages.\2.blocks."),
    (r"\.shortcut\.", ".downsample.conv."),
    (r"\.shortcut_norm\.", ".downsample.norm."),
    (r"^embedding\.", "patch_embed.proj."),
    (r"^pre_norm\.", "norm_pre."),
    (r"^cls$", "cls_token"),
    (r"^distillation$", "dist_token"),
    (r"^registers$", "reg_token"),
    (r"^position\.table$", "pos_embed"),
    (r"^map\.probe$", "attn_pool.latent"),
    (r"^map\.attention\.out\.", "attn_pool.proj."),
    (r"^map\.(attention\.)?", "attn_pool."),
    (r"\.attention\.qkv\.", ".attn.qkv."),
    (r"\.attention\.out\.", ".attn.proj."),
    (r"\.attention\.norm\.", ".attn.norm."),
    (r"\.branch(\d)\.scale$", r".ls\1.gamma"),
    (r"^head_distilled\.", "head_dist."),
)
"""Our names -> timm's; all others are the same."""


def timm_layout(config: ModelConfig) -> Layout:
    """timm's tensor names and shapes for `config`."""

    def rename(ours: str) -> dict[str, int]:
        name = _timm_name(ours, config)
        if ours.startswith("map.attention.qkv."):
            return {name.replace(".qkv.", ".q."): 1, name.replace(".qkv.", ".kv."): 2}
        return {name: 1}

    layout = renamed_layout(config, rename)
    if "head.fc.weight" in layout:  # a ResNet's head is a 1x1 convolution
        slot = layout["head.fc.weight"]
        layout["head.fc.weight"] = dataclasses.replace(slot, shape=(*slot.shape, 1, 1))
    if isinstance(config, ViTConfig) and config.variant.pre_norm:  # timm's CLIP has no bias there
        del layout["patch_embed.proj.bias"]
    return layout


def _timm_name(ours: str, config: ModelConfig) -> str:
    name = ours
    for pattern, replacement in NAME_MAP:
        name = re.sub(pattern, replacement, name)
    if isinstance(config, ResNetConfig):
        return name.replace("head.", "head.fc.")
    if config.variant.final_norm == "mean" and ours.startswith("norm."):
        return f"fc_{ours}"
    if config.stem is None or not ours.startswith("stem."):
        return name
    return BACKBONE + (name if config.stem.layers else name.removeprefix("stem."))


def rename_eva(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the EVA family by the names of timm's other ViTs: LayerScale; queries, keys and values, and the
    two halves of SwiGLU's first layer, which may be stored one by one."""
    renamed = {re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name): tensor for name, tensor in tensors.items()}
    for name in [name for name in renamed if ".mlp.fc1_g." in name]:
        halves = [renamed.pop(name), renamed.pop(name.replace("fc1_g", "fc1_x"))]
        renamed[name.replace("fc1_g", "fc1")] = torch.cat(halves)
    for name in [name for name in renamed if name.endswith(".attn.q_proj.weight")]:
        prefix = name.removesuffix("q_proj.weight")
        renamed[f"{prefix}qkv.weight"] = torch.cat([renamed.pop(f"{prefix}{part}_proj.weight") for part in "qkv"])
        for part in "qv":  # keys have no bias: see `_with_all_biases` of timm.py
            if f"{prefix}{part}_proj.bias" in renamed:
                renamed[f"{prefix}{part}_bias"] = renamed.pop(f"{prefix}{part}_proj.bias")
    return renamed


def eva_names(tensors: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """The inverse of `rename_eva`: with a norm in the MLP, timm keeps the halves of SwiGLU's first layer apart."""
    renamed = {re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", name): tensor for name, tensor in tensors.items()}
    if config.variant.swiglu and config.variant.mlp_norm:
        for name in [name for name in renamed if ".mlp.fc1." in name]:
            halves = [half.clone() for half in renamed.pop(name).chunk(2)]
            renamed |= {name.replace("fc1", part): half for part, half in zip(("fc1_g", "fc1_x"), halves, strict=True)}
    return renamed


def reorder_pairs(tensors: dict[str, Tensor], config: ViTConfig, order: str | None) -> dict[str, Tensor]:
    """The tensors with the rows of queries and keys permuted, so that RoPE's pairs are half a head apart, as here.

    `order` says whether interleaved pairs of the image's `rows` or of its `columns` come first; None changes nothing.
    Of a head of 8 channels, pairs 01 23 45 67, `rows` makes 0246 1357, and `columns` 4602 5713.
    """
    if order is None:
        return tensors
    pairs = torch.arange(config.width // config.heads // 2)
    pairs = pairs if order == "rows" else pairs.roll(len(pairs) // 2)
    permutation = torch.cat([2 * pairs, 2 * pairs + 1])
    tensors = dict(tensors)
    for name in [name for name in tensors if re.search(r"\.attn\.qkv\.(weight|bias)$", name)]:
        parts = tensors[name].unflatten(0, (3, config.heads, -1))
        tensors[name] = torch.cat([parts[:2, :, permutation], parts[2:]]).flatten(0, 2)
    return tensors
