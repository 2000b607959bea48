"""Sec. 3.1: the Vision Transformer, Eq. 1-4.

The letters are the paper's: B pictures, H x W pixels, P patch side, N patches, T tokens, D width, k heads, K classes.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitlab.models.config import ViTConfig, check_divisible
from vitlab.models.position import PositionEmbedding

AttentionPath = Literal["fused", "matmul"]


def attention_path(device_type: str, needs_grad: bool) -> AttentionPath:
    """The faster of two equal ways to compute attention.

    `fused` is torch's scaled_dot_product_attention, best everywhere but in training on a CPU: its backward there
    takes several times as long as plain matrix products do (`benchmarks/train_cpu.py` has whole training steps).
    """
    return "matmul" if device_type == "cpu" and needs_grad else "fused"


def attention(
    q: Float[Tensor, "B k T Dh"], k: Float[Tensor, "B k S Dh"], v: Float[Tensor, "B k S Dh"]
) -> Float[Tensor, "B k T Dh"]:
    """softmax(q k^T / sqrt(Dh)) v (App. A, Eq. 6-7), by the path that is faster here."""
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if attention_path(q.device.type, needs_grad) == "matmul":
        return MatmulAttention.apply(q, k, v)
    return F.scaled_dot_product_attention(q, k, v)


class MatmulAttention(torch.autograd.Function):
    """Attention as plain matrix products, with its derivative written out; keeps the attention matrix."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * q.shape[-1] ** -0.5
        weights = torch.softmax(q @ k.transpose(-2, -1), dim=-1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (grad,) = grads
        q, k, v, weights = ctx.saved_tensors
        grad_v = weights.transpose(-2, -1) @ grad
        grad_logits = torch.ops.aten._softmax_backward_data(grad @ v.transpose(-2, -1), weights, -1, weights.dtype)
        grad_q = (grad_logits @ k) * q.shape[-1] ** -0.5
        grad_k = grad_logits.transpose(-2, -1) @ q
        return grad_q, grad_k, grad_v


class Linear(nn.Linear):
    """A dense layer whose numbers are not drawn twice: `init_weights` draws them all."""

    def reset_parameters(self) -> None:
        pass


class PatchEmbedding(nn.Module):
    """E of Eq. 1: cuts the picture into patches and projects each to D numbers, as one matrix product."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.weight = nn.Parameter(torch.empty(config.width, 3, config.patch_size, config.patch_size))
        self.bias = nn.Parameter(torch.empty(config.width))

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N D"]:
        batch, channels, height, width = images.shape
        p = self.patch_size
        patches = images.reshape(batch, channels, height // p, p, width // p, p)
        patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * p * p)
        return F.linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class Attention(nn.Module):
    """MSA, multi-head self-attention (App. A)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.width, 3 * config.width)
        self.out = Linear(config.width, config.width)

    def project(
        self, tokens: Float[Tensor, "B T D"]
    ) -> tuple[Float[Tensor, "B k T Dh"], Float[Tensor, "B k T Dh"], Float[Tensor, "B k T Dh"]]:
        """Queries, keys and values of every head (Eq. 5)."""
        q, k, v = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, tokens: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        heads = attention(*self.project(tokens))
        return self.out(heads.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two dense layers with a GELU between them."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.fc1 = Linear(config.width, config.mlp_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.fc2 = Linear(config.mlp_dim, config.width)

    def forward(self, tokens: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.fc2(self.dropout(F.gelu(self.fc1(tokens), approximate=self.approximate)))


class Block(nn.Module):
    """One encoder block: Eq. 2 and Eq. 3, normalised before each part."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        tokens = tokens + self.dropout(self.attention(self.norm1(tokens)))  # Eq. 2
        return tokens + self.dropout(self.mlp(self.norm2(tokens)))  # Eq. 3


class ViT(nn.Module):
    """The Vision Transformer: `ViT(config)` is freshly initialised; `vitlab.load_model` brings trained ones."""

    def __init__(self, config: ViTConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = PatchEmbedding(config)
        self.cls = nn.Parameter(torch.empty(1, 1, config.width)) if config.pool == "token" else None
        self.position = PositionEmbedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        rep = config.representation_size
        self.pre_logits = Linear(config.width, rep) if rep else None
        self.head = Linear(rep or config.width, config.num_classes) if config.num_classes else None
        init_weights(self, generator)

    def forward_features(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B T D"]:
        """Tokens after the last LayerNorm, class token first if there is one; images hold values in [-1, 1]."""
        height, width = images.shape[-2:]
        if (height, width) != self.config.image_hw:
            raise ValueError(self._wrong_size((height, width)))
        tokens = self.embedding(images)
        if self.cls is not None:
            tokens = torch.cat([self.cls.to(tokens.dtype).expand(tokens.shape[0], -1, -1), tokens], dim=1)
        tokens = self.dropout(self.position(tokens))  # Eq. 1
        for block in self.blocks:
            tokens = block(tokens)
        return self.norm(tokens)

    def forward_head(
        self, tokens: Float[Tensor, "B T D"], pre_logits: bool = False
    ) -> Float[Tensor, "B K"] | Float[Tensor, "B Dr"]:
        """Logits from the tokens of `forward_features`; with `pre_logits`, what the head would have seen."""
        pooled = tokens[:, 0] if self.config.pool == "token" else tokens.mean(dim=1)  # Eq. 4, or App. D.3
        if self.pre_logits is not None:
            pooled = torch.tanh(self.pre_logits(pooled))
        return pooled if pre_logits or self.head is None else self.head(pooled)

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B K"]:
        return self.forward_head(self.forward_features(images))

    def _wrong_size(self, given: tuple[int, int]) -> str:
        height, width = self.config.image_hw
        check_divisible(given, self.config.patch_size)
        return (
            f"the model was built for {height}x{width} pixels and the images have {given[0]}x{given[1]}; resize them, "
            f"or load the model with image_size={given if given[0] != given[1] else given[0]}, which interpolates "
            f"its position embeddings."
        )


@torch.no_grad()
def init_weights(model: ViT, generator: torch.Generator | None = None) -> None:
    """Draws every parameter as Google's code does (Flax's initialisers), in place.

    | parameter | initial value |
    |---|---|
    | patch embedding, pre-logits | LeCun normal, truncated at two standard deviations; bias 0 |
    | class token | 0 |
    | position embedding | normal, sd 0.02 (`position_std`) |
    | q, k, v, out | Xavier uniform, each D x D by itself; bias 0 |
    | MLP | Xavier uniform; bias normal, sd 1e-6 |
    | LayerNorm | scale 1, bias 0 |
    | head | 0; bias `head_bias` |
    """
    if model.norm.weight.is_meta:
        return  # shapes without numbers; the first normal draw on this device would import for seconds
    _lecun_normal(model.embedding.weight, generator)
    nn.init.zeros_(model.embedding.bias)
    if model.cls is not None:
        nn.init.zeros_(model.cls)
    if model.position.table is not None:
        nn.init.normal_(model.position.table, std=model.config.position_std, generator=generator)
    for block in model.blocks:
        assert isinstance(block, Block)
        for matrix in (*block.attention.qkv.weight.chunk(3), block.attention.out.weight):
            nn.init.xavier_uniform_(matrix, generator=generator)
        nn.init.zeros_(block.attention.qkv.bias)
        nn.init.zeros_(block.attention.out.bias)
        for dense in (block.mlp.fc1, block.mlp.fc2):
            nn.init.xavier_uniform_(dense.weight, generator=generator)
            nn.init.normal_(dense.bias, std=1e-6, generator=generator)
    if model.pre_logits is not None:
        _lecun_normal(model.pre_logits.weight, generator)
        nn.init.zeros_(model.pre_logits.bias)
    if model.head is not None:
        nn.init.zeros_(model.head.weight)
        nn.init.constant_(model.head.bias, model.config.head_bias)


def _lecun_normal(weight: Tensor, generator: torch.Generator | None) -> None:
    """Variance 1 / fan_in after truncation at +-2 sd, which alone would leave 0.8796 of the sd."""
    std = math.sqrt(1.0 / weight[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)
