"""Layers that read `Variant`: other activations and LayerNorms, and rotary positions, which the paper does not have.

B images, T tokens, N patches, m `mlp_dim`, k heads, Dh = D / k.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitlab.models.config import ViTConfig
from vitlab.models.variant import Rotary, Variant

FLOAT64: Any = {"dtype": torch.float64, "device": "cpu"}
"""Where fixed positions are computed, also those of a model on the meta device."""


def layer_norm(config: ViTConfig, exists: bool = True, width: int | None = None) -> nn.LayerNorm | nn.Identity:
    """A LayerNorm of tokens, or of `width` numbers; nothing where it does not exist."""
    return nn.LayerNorm(width or config.width, eps=config.variant.layer_norm_eps) if exists else nn.Identity()


class Activation(nn.Module):
    """The nonlinearity of an MLP: GELU; with `swiglu`, half of the first layer gates the other."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.kind = "swiglu" if variant.swiglu else variant.gelu

    def forward(self, hidden: Float[Tensor, "B T h"]) -> Float[Tensor, "B T m"]:
        match self.kind:
            case "swiglu":
                gate, hidden = hidden.chunk(2, dim=-1)
                return F.silu(gate) * hidden
            case "quick":
                return hidden * torch.sigmoid(1.702 * hidden)
            case kind:
                return F.gelu(hidden, approximate="tanh" if kind == "tanh" else "none")


def rotate(
    x: Float[Tensor, "B k T Dh"], rotation: Float[Tensor, "N Dh"], num_prefix_tokens: int = 0
) -> Float[Tensor, "B k T Dh"]:
    """Rotary position embedding (RoPE): rotates the channel pairs (i, i + Dh/2) of patch tokens, and no prefix tokens.
    `rotation` is the table of `rotary_table`: cosines, then sines."""
    cos, sin = rotation.chunk(2, dim=-1)
    first, second = x[:, :, num_prefix_tokens:].chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([x[:, :, :num_prefix_tokens], rotated.to(x.dtype)], dim=2)


def rotary_table(grid: tuple[int, int], head_dim: int, rotary: Rotary) -> Float[Tensor, "N Dh"]:
    """The rotation of every patch: cosines, then sines, of Dh/4 angles of its row and Dh/4 of its column."""
    axes = []
    for side, reference in zip(grid, rotary.reference or grid, strict=True):
        index = torch.arange(side, **FLOAT64)
        centered = 2 * math.pi * (2 * (index + 0.5) / side - 1)
        axes.append(centered if rotary.coordinates == "centered" else (index + rotary.offset) * reference / side)
    coordinates = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
    periods = rotary.base ** (torch.arange(head_dim // 4, **FLOAT64) / (head_dim // 4))
    angles = (coordinates[:, :, None] / periods).flatten(1)
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()
