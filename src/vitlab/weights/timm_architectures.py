"""What the names of timm's architectures say, in timm's own arguments, and the families of models that are refused.
`ARCHITECTURES` is read to build a model here, and to choose the architecture of a model of ours."""

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

from vitlab.errors import UserError
from vitlab.models import Rotary

HEADS = {
    **{width: width // 64 for width in (192, 256, 320, 384, 512, 640, 768, 832, 896)},
    **dict.fromkeys((1024, 1152, 1280, 1408, 1536, 1664), 16),
}
"""Width -> heads, which is in no tensor, of architectures that the table does not name."""
ROTARY: dict[str, Any] = {
    "rope_type": "cat",
    "rope_temperature": 1e4,
    "rope_grid_indexing": "ij",
    "rope_grid_offset": 0.0,
    "rope_rotate_half": False,
    "ref_feat_shape": None,
}
"""timm's arguments of rotary positions, and their defaults."""
_DINOV3 = {"rope_type": "dinov3", "rope_temperature": 100.0, "rope_rotate_half": True}
_PE = {"rope_grid_indexing": "xy", "rope_grid_offset": 1.0, "ref_feat_shape": (32, 32)}
ARCHITECTURES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("^vit_giant_.*_(dinov2|tipsv2|lingbot|radio)", {"num_heads": 24}),
    ("^vit_huge_plus_patch16_dinov3", {"num_heads": 20}),
    ("^vit_7b_patch16_dinov3", {"num_heads": 32}),
    ("^vit_base_patch16_gap_224", {"num_heads": 16}),
    ("^test_vit2?$", {"num_heads": 2}),
    ("^test_vit3", {"num_heads": 3}),
    ("^vit_(base_patch32|so400m_patch16|giantopt_patch16)_siglip_", {"act_layer": "gelu_tanh"}),
    ("^vit_large_patch16_siglip_(gap_)?512", {"act_layer": "gelu_tanh"}),
    ("_quickgelu_", {"act_layer": "quick_gelu"}),
    ("^vit_.*_clip_|_dinov3|_lingbot|^vit_pe_|^beit3", {"eps": 1e-5}),
    ("_radio_|_intern300m_|^vit_pe_(lang|spatial)_", {"final_norm": False}),
    ("_dinov3|_lingbot", {"use_rot_pos_emb": True, **_DINOV3}),
    ("^eva02_(?!enormous)|_rope_reg._gap_", {"use_rot_pos_emb": True, "ref_feat_shape": (16, 16)}),
    ("_rope_(ape_)?224", {"use_rot_pos_emb": True, "rope_temperature": 100.0, "rope_grid_indexing": "xy"}),
    ("^vit_pe_", {"use_rot_pos_emb": True, **_PE, "attn_pool_num_heads": 8}),
    ("^vit_pe_core_(tiny|small|large)_", {"ref_feat_shape": (24, 24)}),
    ("^vit_pe_core_base_", {"ref_feat_shape": (14, 14)}),
    ("^vit_pe_.*_gigantic_", {"rope_grid_offset": 0.0}),
)
"""Pattern of an architecture -> timm's arguments of its models; of several rows that match, a later one counts more.
`eps` is LayerNorm's, which no argument sets: 1e-6 where no row has it."""
ACTIVATIONS: dict[str, Literal["tanh", "erf", "quick"]] = {"gelu": "erf", "gelu_tanh": "tanh", "quick_gelu": "quick"}
"""timm's `act_layer` -> our `gelu`."""
SIGLIP = {
    (768, 32): "base_patch32",
    (1024, 16): "large_patch16",
    (1152, 16): "so400m_patch16",
    (1536, 16): "giantopt_patch16",
}
"""Width and patch size -> the middle of an architecture, to recognize a bare file without a class token."""
WRITTEN = {
    "vit": ("vit_base_patch16_224", "vit_base_patch16_clip_224"),
    "distilled": ("deit_base_distilled_patch16_224",),
    "eva": ("eva02_base_patch14_224", "vit_small_patch16_dinov3"),
}
"""Architectures that are written, with arguments for all that differs but `eps`."""
FAMILIES = ("vit", "deit", "deit3", "flexivit", "eva", "eva02", "beit3", "resnetv2", "test")
"""First words of the architectures that may load."""
SUPPORTED = "Supported are plain ViTs, those on a BiT stem, and BiT's ResNets; docs/checkpoints.md lists them."
REFUSED = (
    ("^(beit(v2)?_|beit$|data2vec)", "BEiT, BEiTv2 and Data2Vec add a learned relative position bias to the attention"),
    ("^aimv2", "AIMv2's blocks have RMSNorm in place of LayerNorm"),
    ("^(naflexvit|siglip2)", "NaFlex models take images of any aspect ratio as sequences of patches"),
    ("^cait", "CaiT mixes attention heads (talking heads) and ends with class-attention blocks"),
    ("^xcit", "XCiT's attention is between channels (cross-covariance), not between tokens"),
    ("^swin", "Swin's attention is within shifted windows, and its stages merge patches"),
    ("^eva02_enormous|_rpn_", "its blocks have LayerNorm after each branch"),
    ("_xp_|_dp_|parallel|_18x2_|_d?pwee_", "the branches of its blocks are parallel"),
    ("_dwee_|_dlittle_", "its attention is differential"),
    ("_sapiens2|^test_vit4", "its blocks have RMSNorm"),
    ("_rope_mixed_", "its rotary positions are learned"),
    ("_s?relpos_", "its relative positions are biases of the attention"),
    ("^resnetv2_(?!.*_bit)", "it is not a ResNet of BiT"),
    ("_resnet|_mci_", "its stem is not BiT's"),
)
"""Pattern of timm's `architecture` or Hugging Face's `model_type`, and what is different."""
REFUSED_TENSORS = (
    (r"^blocks\..*relative_position_bias_table$|^rel_pos_bias\.", "beit"),
    (r"^layers\.\d+\.blocks\.\d+\.attn\.", "swin"),
    (r"^embeds\.", "naflexvit"),
    (r"^blocks_token_only\.", "cait"),
    (r"^cls_attn_blocks\.", "xcit"),
)
"""Pattern of a tensor in timm's checkpoints that only one of these families has."""


def named_args(*architectures: str) -> dict[str, Any]:
    """The arguments of models with these names."""
    rows = (args for pattern, args in ARCHITECTURES if any(re.search(pattern, name) for name in architectures))
    return {name: value for args in rows for name, value in args.items()}


def written_eps(kind: str) -> dict[float, str]:
    """LayerNorm's eps -> the architecture of this kind that is written for it."""
    return {named_args(name).get("eps", 1e-6): name for name in WRITTEN[kind]}


def check_architecture(name: str, architecture: str) -> str:
    """What errors call the checkpoint `name`. Raises UserError for an architecture that computes something else."""
    where = f"{name} ({architecture})" if architecture else name
    family = re.split("[_.]", architecture)[0]
    if reason := why_unsupported(architecture):
        raise UserError(f"{where}: {reason}. {SUPPORTED}")
    if architecture and family not in FAMILIES:
        raise UserError(f"{where}: {family} is a family of other models. {SUPPORTED}")
    return where


def why_unsupported(name: str) -> str:
    """What is different in the models of an `architecture` or `model_type`; empty where nothing is known to be."""
    return next((reason for pattern, reason in REFUSED if re.search(pattern, name)), "")


def check_family(where: str, names: Collection[str]) -> None:
    """Raises UserError where the tensors of a file without a config.json have names of a refused family."""
    families = [family for pattern, family in REFUSED_TENSORS if any(re.search(pattern, name) for name in names)]
    if "blocks.0.norm1.weight" in names and not any(name.endswith("norm1.bias") for name in names):
        families = ["aimv2"]
    if families:
        raise UserError(f"{where}: {why_unsupported(families[0])}. {SUPPORTED}")


def check_bare(where: str, names: Collection[str]) -> None:
    """Raises UserError for a bare file of a refused family, or of models with RoPE."""
    check_family(where, names)
    for name in names:
        if re.search(r"\.attn\.(q_bias|q_proj\.|norm\.)|\.mlp\.norm\.|\.gamma_1$", name):
            raise UserError(
                f"{where} has {name}, as models of the EVA family. Their rotary positions are in no tensor: give the "
                f"folder, with the architecture in config.json."
            )


def rotary_of(args: Mapping[str, Any]) -> tuple[Rotary | None, str | None]:
    """The rotary positions of a model with these arguments, and the `order` of `reorder_pairs`: whether the pairs of
    its `rows` or of its `columns` come first where pairs are interleaved; None where they are half a head apart."""
    if not args.get("use_rot_pos_emb"):
        return None, None
    values = {name: args.get(name, default) for name, default in ROTARY.items()}
    rotary = Rotary(
        base=float(values["rope_temperature"]),
        coordinates="centered" if values["rope_type"] == "dinov3" else "index",
        reference=values["ref_feat_shape"] and tuple(values["ref_feat_shape"]),
        offset=float(values["rope_grid_offset"]),
    )
    order = "rows" if values["rope_grid_indexing"] == "ij" else "columns"
    return rotary, None if values["rope_rotate_half"] else order


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
