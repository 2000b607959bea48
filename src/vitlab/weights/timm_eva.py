"""The EVA family in timm: its own names and order of tensors."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models import ViTConfig
from vitlab.weights.timm_architectures import SUPPORTED
from vitlab.weights.unsupported import family_of_tensors, why_unsupported


def check_bare(where: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises UserError for a bare file with tensors that only other families have, or models with RoPE."""
    if family := family_of_tensors(tensors.keys()):
        raise UserError(f"{where}: {why_unsupported(family)}. {SUPPORTED}")
    for name in tensors:
        if re.search(r"\.attn\.(q_bias|q_proj\.|norm\.)|\.mlp\.norm\.|\.gamma_1$", name):
            raise UserError(
                f"{where} has {name}, as models of the EVA family. Their rotary positions are in no tensor: give the "
                f"folder, with the architecture in config.json."
            )


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
        for part in "qv":  # keys have no bias, see `_complete_biases` of timm.py
            bias = renamed.pop(f"{prefix}{part}_proj.bias", None)
            renamed |= {} if bias is None else {f"{prefix}{part}_bias": bias}
    return renamed


def eva_names(tensors: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """The inverse of `rename_eva`: with a norm in the MLP, timm keeps the halves of SwiGLU's first layer apart."""
    renamed = {re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", name): tensor for name, tensor in tensors.items()}
    if config.variant.swiglu and config.variant.mlp_norm:
        for name in [name for name in renamed if ".mlp.fc1." in name]:
            halves = [half.clone() for half in renamed.pop(name).chunk(2)]
            renamed |= {name.replace("fc1", part): half for part, half in zip(("fc1_g", "fc1_x"), halves, strict=True)}
    return renamed


def reorder_pairs(tensors: dict[str, Tensor], config: ViTConfig, order: str | None) -> None:
    """Permutes the rows of queries and keys, in place, from rotated pairs of neighbors to pairs half a head apart.

    `order` says whether the pairs of the `rows` or of the `columns` come first; None leaves the rows as they are.
    """
    if order is None:
        return
    pairs = torch.arange(config.width // config.heads // 2)
    pairs = pairs if order == "rows" else pairs.roll(len(pairs) // 2)
    permutation = torch.cat([2 * pairs, 2 * pairs + 1])
    for name in [name for name in tensors if re.search(r"\.attn\.qkv\.(weight|bias)$", name)]:
        parts = tensors[name].unflatten(0, (3, config.heads, -1))
        tensors[name] = torch.cat([parts[:2, :, permutation], parts[2:]]).flatten(0, 2)
