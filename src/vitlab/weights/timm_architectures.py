"""What only the name of a timm architecture says: heads, the kind of GELU, eps, rotary positions, other blocks. And
the EVA family's own names and order of tensors."""

import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models import Rotary, ViTConfig
from vitlab.weights.unsupported import family_of_tensors, why_unsupported

HEADS = {
    **{width: width // 64 for width in (192, 256, 320, 384, 512, 640, 768, 832, 896)},
    **dict.fromkeys((1024, 1152, 1280, 1408, 1536, 1664), 16),
}
"""Width -> heads, which is in no tensor."""
OTHER_HEADS = (
    (re.compile(r"vit_giant_.*_(dinov2|tipsv2|lingbot|radio)"), 24),
    (re.compile(r"vit_huge_plus_patch16_dinov3"), 20),
    (re.compile(r"vit_7b_patch16_dinov3"), 32),
    (re.compile(r"vit_base_patch16_gap_224"), 16),
    (re.compile(r"test_vit2?$"), 2),
    (re.compile(r"test_vit3"), 3),
)
"""Architectures that have other numbers of heads."""
TANH = re.compile(r"vit_(base_patch32|large_patch16|so400m_patch16|giantopt_patch16)_siglip_(gap_)?(\d+)")
"""Architectures with the tanh approximation of GELU; of `large_patch16` the one for 512 pixels alone."""
TANH_SHAPES = {(768, 32), (1152, 16), (1536, 16)}
"""Width and patch size of the same architectures, to recognize a bare file without a class token."""
ACTIVATIONS: dict[str, Literal["tanh", "erf", "quick"]] = {"gelu": "erf", "gelu_tanh": "tanh", "quick_gelu": "quick"}
"""timm's `act_layer` -> our `gelu`."""
CLIP = "vit_base_patch16_clip_224"
EPS_5 = re.compile("^vit_.*_clip_|_dinov3|_lingbot|^vit_pe_|^beit3")
"""Architectures whose LayerNorms have an eps of 1e-5."""
NO_NORM = re.compile("_radio_|_intern300m_|^vit_pe_(lang|spatial)_")
"""Architectures without a LayerNorm after the last block."""
ROTARY = (
    (re.compile("_dinov3|_lingbot"), Rotary(), None),
    (re.compile("^eva02_(?!enormous)|_rope_reg._gap_"), Rotary(1e4, "index", (16, 16)), "rows"),
    (re.compile("_rope_(ape_)?224"), Rotary(100.0, "index"), "columns"),
    (re.compile("^vit_pe_(core_(tiny|small|large)_)"), Rotary(1e4, "index", (24, 24), 1.0), "columns"),
    (re.compile("^vit_pe_core_base_"), Rotary(1e4, "index", (14, 14), 1.0), "columns"),
    (re.compile("^vit_pe_.*_gigantic_"), Rotary(1e4, "index", (32, 32)), "columns"),
    (re.compile("^vit_pe_(lang|spatial)_"), Rotary(1e4, "index", (32, 32), 1.0), "columns"),
)
"""Architectures with rotary positions, their angles, and whose pairs come first where a pair's two numbers are
neighbors; None where they are half a head apart, as here. The first that matches counts."""

SUPPORTED = "Supported are plain ViTs, those on a BiT stem, and BiT's ResNets; docs/checkpoints.md lists them."
FAMILIES = ("vit", "deit", "deit3", "flexivit", "eva", "eva02", "beit3", "resnetv2", "test")
"""First words of the architectures that may load."""


def check_architecture(architecture: str) -> None:
    """Raises UserError for an architecture that computes something else, though its tensors may not show it."""
    family = re.split("[_.]", architecture)[0]
    if reason := why_unsupported(architecture):
        raise UserError(f"{reason}.")
    if architecture and family not in FAMILIES:
        raise UserError(f"{family} is a family of other models.")


def rotary_of(architecture: str) -> tuple[Rotary | None, str | None]:
    """The rotary positions of an architecture, and the order of the pairs of neighbors: see `ROTARY`."""
    return next(((rotary, order) for pattern, rotary, order in ROTARY if pattern.search(architecture)), (None, None))


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
        for part in "qv":  # keys have no bias, see `_complete`
            bias = renamed.pop(f"{prefix}{part}_proj.bias", None)
            renamed |= {} if bias is None else {f"{prefix}{part}_bias": bias}
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
