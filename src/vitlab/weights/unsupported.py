"""Families of vision models that compute something else, and what: for the messages that reject their checkpoints."""

import re
from collections.abc import Collection

FAMILIES = (
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
TENSORS = (
    (r"^blocks\..*relative_position_bias_table$|^rel_pos_bias\.", "beit"),
    (r"^layers\.\d+\.blocks\.\d+\.attn\.", "swin"),
    (r"^embeds\.", "naflexvit"),
    (r"^blocks_token_only\.", "cait"),
    (r"^cls_attn_blocks\.", "xcit"),
)
"""Pattern of a tensor in timm's checkpoints that only one of these families has."""


def why_unsupported(name: str) -> str:
    """What is different in the models of an `architecture` or `model_type`; empty where nothing is known to be."""
    return next((reason for pattern, reason in FAMILIES if re.search(pattern, name)), "")


def family_of_tensors(names: Collection[str]) -> str:
    """The unsupported family of a file without a config.json, from the names of timm's tensors; empty for others."""
    if "blocks.0.norm1.weight" in names and not any(name.endswith("norm1.bias") for name in names):
        return "aimv2"
    return next((family for pattern, family in TENSORS if any(re.search(pattern, name) for name in names)), "")
