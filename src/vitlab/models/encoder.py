"""The encoder block, Eq. 2 and Eq. 3: z' = MSA(LN(z)) + z, then z = MLP(LN(z')) + z'. All models share it.

Besides, the axial block (App. D.6), which attends along the rows of patches and then along the columns, and attention
pooling, a head of big_vision. `ViT` builds `config.depth` blocks. B images, T tokens, D width.

    Block(vitlab.get_config("ViT-B/16"))  # [B, T, 768] -> [B, T, 768]
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitlab.models.attention import Attention
from vitlab.models.blocks import RepeatedBlock
from vitlab.models.config import ViTConfig
from vitlab.models.init import linear
from vitlab.models.variant_layers import Activation, layer_norm


class MLP(nn.Module):
    """Two dense layers with a GELU between them."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = linear(config.width, config.mlp_dim * (2 if config.variant.swiglu else 1))
        self.activation: nn.Module = Activation(config.variant)
        self.norm = layer_norm(config, config.variant.mlp_norm, config.mlp_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.fc2 = linear(config.mlp_dim, config.width)

    def forward(self, tokens: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.fc2(self.norm(self.dropout(self.activation(self.fc1(tokens)))))


class ResidualBranch(nn.Module):
    """Output of a residual branch before the addition: LayerScale, dropout, DropPath (stochastic depth)."""

    def __init__(self, config: ViTConfig, drop_prob: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(config.width)) if config.variant.layer_scale is not None else None
        self.dropout = nn.Dropout(config.dropout)
        self.has_drop_path = drop_prob > 0
        self.drop_prob: float | Tensor = drop_prob

    def forward(self, tokens: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        tokens = self.dropout(tokens if self.scale is None else tokens * self.scale)
        if not (self.training and self.has_drop_path):
            return tokens
        mask = torch.rand_like(tokens[:, :1, :1], dtype=torch.get_default_dtype()) >= self.drop_prob
        return tokens * (mask / (1 - self.drop_prob)).to(tokens.dtype)


class Block(RepeatedBlock):
    """One pre-norm encoder block, Eq. 2 and Eq. 3. `drop_prob` is its rate of stochastic depth."""

    def __init__(self, config: ViTConfig, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.norm1 = layer_norm(config)
        norm = layer_norm(config, config.variant.attention_norm)
        self.attention = Attention(config.width, config.heads, norm, config.variant.rotary is not None)
        self.branch1 = ResidualBranch(config, drop_prob)
        self.norm2 = layer_norm(config)
        self.mlp = MLP(config)
        self.branch2 = ResidualBranch(config, drop_prob)
        self.num_prefix_tokens = config.num_prefix_tokens

    def forward(
        self, tokens: Float[Tensor, "B T D"], positions: Float[Tensor, "R Dh"] | None = None
    ) -> Float[Tensor, "B T D"]:
        tokens = tokens + self.branch1(self.attention(self.norm1(tokens), positions, self.num_prefix_tokens))  # Eq. 2
        return tokens + self.branch2(self.mlp(self.norm2(tokens)))  # Eq. 3


class AxialBlock(nn.Module):
    """Replaces one encoder block: a block along the rows of patches, then one along the columns (App. D.6).

    The paper does not describe the class token. Here every row gets a copy of the prefix tokens, which attend and are
    attended to like its patches; after the rows the copies are averaged, and the same with columns.
    """

    def __init__(self, config: ViTConfig, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.grid = config.grid
        self.num_prefix_tokens = config.num_prefix_tokens
        self.rows = Block(config, drop_prob)
        self.columns = Block(config, drop_prob)

    def forward(
        self, tokens: Float[Tensor, "B T D"], positions: Float[Tensor, "R Dh"] | None = None
    ) -> Float[Tensor, "B T D"]:
        assert positions is None, "ViTConfig rejects it"
        prefix_tokens, patches = tokens.tensor_split([self.num_prefix_tokens], dim=1)
        prefix_tokens, patches = _apply_along_rows(self.rows, prefix_tokens, patches.unflatten(1, self.grid))
        prefix_tokens, columns = _apply_along_rows(self.columns, prefix_tokens, patches.transpose(1, 2))
        return torch.cat([prefix_tokens, columns.transpose(1, 2).flatten(1, 2)], dim=1)


def _apply_along_rows(
    block: nn.Module, prefix_tokens: Float[Tensor, "B p D"], rows: Float[Tensor, "B n s D"]
) -> tuple[Float[Tensor, "B p D"], Float[Tensor, "B n s D"]]:
    """Applies the block to n rows of s patches, every row a sequence after a copy of the prefix tokens."""
    batch, count = rows.shape[:2]
    p = prefix_tokens.shape[1]
    copies = prefix_tokens[:, None].expand(-1, count, -1, -1)
    out = block(torch.cat([copies, rows], dim=2).flatten(0, 1)).unflatten(0, (batch, count))
    return out[:, :, :p].mean(dim=1), out[:, :, p:]


class MAPHead(nn.Module):
    """Multi-head attention pooling (big_vision): one learned query attends to all tokens, then an MLP."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.empty(1, 1, config.width))
        self.attention = Attention(config.width, config.variant.map_heads or config.heads)
        self.norm = layer_norm(config)
        self.mlp = MLP(config)

    def forward(self, tokens: Float[Tensor, "B T D"]) -> Float[Tensor, "B D"]:
        pooled = self.attention.cross_attention(self.probe.to(tokens.dtype).expand(tokens.shape[0], -1, -1), tokens)
        return (pooled + self.mlp(self.norm(pooled)))[:, 0]
