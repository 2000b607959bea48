"""What only the name of a timm architecture says: heads, the kind of GELU, eps, rotary positions, other blocks. And
the EVA family's own names and order of tensors."""

import re
from collections.abc import Mapping
from typing import Any, Literal

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
_PE = {"rope_grid_indexing": "xy", "rope_grid_offset": 1.0}
EVA: dict[float, str] = {1e-6: "eva02_base_patch14_224", 1e-5: "vit_small_patch16_dinov3"}
"""LayerNorm's eps, which no argument sets, -> an architecture of the EVA family with it."""
ROTARY_DEFAULTS: dict[str, Any] = {
    "rope_type": "cat",
    "rope_temperature": 1e4,
    "rope_grid_indexing": "ij",
    "rope_grid_offset": 0.0,
    "rope_rotate_half": False,
    "ref_feat_shape": None,
}
"""timm's arguments of rotary positions."""
ROTARY: tuple[tuple[re.Pattern[str], dict[str, Any]], ...] = (
    (
        re.compile("_dinov3|_lingbot"),
        {"rope_type": "dinov3", "rope_temperature": 100.0, "rope_rotate_half": True},
    ),
    (re.compile("^eva02_(?!enormous)|_rope_reg._gap_"), {"ref_feat_shape": (16, 16)}),
    (re.compile("_rope_(ape_)?224"), {"rope_temperature": 100.0, "rope_grid_indexing": "xy"}),
    (re.compile("^vit_pe_core_(tiny|small|large)_"), {"ref_feat_shape": (24, 24), **_PE}),
    (re.compile("^vit_pe_core_base_"), {"ref_feat_shape": (14, 14), **_PE}),
    (re.compile("^vit_pe_.*_gigantic_"), {"ref_feat_shape": (32, 32), "rope_grid_indexing": "xy"}),
    (re.compile("^vit_pe_(lang|spatial)_"), {"ref_feat_shape": (32, 32), **_PE}),
)
"""Architectures with rotary positions, and their other values of these. The first that matches counts."""

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


def rotary_of(architecture: str, args: Mapping[str, Any]) -> tuple[Rotary | None, str | None]:
    """The rotary positions of a model, and whether the pairs of its `rows` or of its `columns` come first where a
    pair's two numbers are neighbors; None where they are half a head apart, as here."""
    named = next((values for pattern, values in ROTARY if pattern.search(architecture)), None)
    if not args.get("use_rot_pos_emb", named is not None):
        return None, None
    values = ROTARY_DEFAULTS | (named or {}) | {name: args[name] for name in ROTARY_DEFAULTS if name in args}
    reference = values["ref_feat_shape"]
    rotary = Rotary(
        base=float(values["rope_temperature"]),
        coordinates="centered" if values["rope_type"] == "dinov3" else "index",
        reference=None if reference is None else (reference[0], reference[1]),
        offset=float(values["rope_grid_offset"]),
    )
    if values["rope_rotate_half"]:
        return rotary, None
    return rotary, "rows" if values["rope_grid_indexing"] == "ij" else "columns"


def rotary_args(rotary: Rotary | None) -> dict[str, Any]:
    """timm's arguments of these rotary positions, with pairs as here."""
    if rotary is None:
        return {"use_rot_pos_emb": False}
    return {
        "use_rot_pos_emb": True,
        "rope_type": "dinov3" if rotary.coordinates == "centered" else "cat",
        "rope_temperature": rotary.base,
        "rope_grid_indexing": "ij",
        "rope_grid_offset": rotary.offset,
        "rope_rotate_half": True,
        "ref_feat_shape": rotary.reference and list(rotary.reference),
    }


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
