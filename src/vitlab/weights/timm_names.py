"""What timm calls the parameters of a model, and how it stores them."""

import re
from dataclasses import dataclass

import torch

from vitlab.models import ModelConfig, ResNetConfig, build_model

RENAMED = (
    (r"^(stem|body)\.root\.", "stem.conv."),
    (r"^(stem|body)\.root_norm\.", "stem.norm."),
    (r"^(stem|body)\.stages\.(\d+)\.", r"stages.\2.blocks."),
    (r"\.shortcut\.", ".downsample.conv."),
    (r"\.shortcut_norm\.", ".downsample.norm."),
    (r"^embedding\.", "patch_embed.proj."),
    (r"^cls$", "cls_token"),
    (r"^distillation$", "dist_token"),
    (r"^registers$", "reg_token"),
    (r"^position\.table$", "pos_embed"),
    (r"^map\.probe$", "attn_pool.latent"),
    (r"^map\.attention\.out\.", "attn_pool.proj."),
    (r"^map\.attention\.", "attn_pool."),
    (r"^map\.", "attn_pool."),
    (r"\.attention\.qkv\.", ".attn.qkv."),
    (r"\.attention\.out\.", ".attn.proj."),
    (r"\.branch(\d)\.scale$", r".ls\1.gamma"),
    (r"^head_distilled\.", "head_dist."),
)
"""Our names -> timm's; what is not here has the same name."""

# timm's stems and ResNets standardize weights and features with these, and no argument of theirs changes it.
WEIGHT_EPS, GROUP_NORM_EPS = 1e-8, 1e-5
BACKBONE = "patch_embed.backbone."


@dataclass(frozen=True)
class Slot:
    """One of timm's tensors, and the parameter of ours that holds it."""

    shape: tuple[int, ...]
    ours: str


def timm_layout(config: ModelConfig) -> dict[str, Slot]:
    """Every tensor of a model: timm's name -> its shape there and our parameter.

    Where several hold one parameter they follow each other, and are its rows in this order.
    """
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in build_model(config).state_dict().items()}
    slots = {}
    for ours, shape in shapes.items():
        theirs = spell(ours, config)
        if ours.startswith("map.attention.qkv."):
            rows = shape[0] // 3
            slots[theirs.replace(".qkv.", ".q.")] = Slot((rows, *shape[1:]), ours)
            slots[theirs.replace(".qkv.", ".kv.")] = Slot((2 * rows, *shape[1:]), ours)
        elif theirs == "head.fc.weight":  # a ResNet's head is a 1x1 convolution
            slots[theirs] = Slot((*shape, 1, 1), ours)
        else:
            slots[theirs] = Slot(shape, ours)
    return slots


def spell(ours: str, config: ModelConfig) -> str:
    theirs = ours
    for pattern, name in RENAMED:
        theirs = re.sub(pattern, name, theirs)
    if isinstance(config, ResNetConfig):
        return theirs.replace("head.", "head.fc.")
    if config.stem is None or not ours.startswith("stem."):
        return theirs
    return BACKBONE + (theirs if config.stem.layers else theirs.removeprefix("stem."))
