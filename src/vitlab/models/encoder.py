"""App. A and Eq. 2-3: attention and the encoder block, of which there is one each, for every model.

The letters are the paper's: B images, T tokens, D width, k heads, Dh = D / k.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, cast, no_type_check

import torch
import torch.fx
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad

from vitlab.models.config import ViTConfig

AttentionPath = Literal["fused", "matmul"]
Heads = tuple[Float[Tensor, "B k T Dh"], Float[Tensor, "B k S Dh"], Float[Tensor, "B k S Dh"]]


MOST_NUMBERS = 2**27
"""Up to so many numbers in the matrices of all heads (B k T S) a CPU without AMX attends by products in bfloat16; more
take too much memory, of which fused attention needs next to none."""


def cpu_units() -> Mapping[str, Any]:
    """What torch says of this processor's units, `amx_bf16` and others; nothing where its version cannot tell."""
    return torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}


HAS_AMX = bool(cpu_units().get("amx_bf16"))


def attention_path(
    device_type: str, needs_grad: bool, dtype: torch.dtype = torch.float32, numbers: int | torch.SymInt = 0
) -> AttentionPath:
    """The faster of two equal ways to compute attention, whose matrices hold so many `numbers`, B k T S.

    `fused` is torch's scaled_dot_product_attention, best on every GPU. On a CPU its backward takes several times as
    long as plain matrix products do (`benchmarks/train_cpu.py`), and without AMX so does its forward in bfloat16, if
    less so; in float32 its forward is the faster one (`benchmarks/attention.py`).
    """
    if device_type != "cpu":
        return "fused"
    products = needs_grad or (dtype == torch.bfloat16 and not HAS_AMX and numbers <= MOST_NUMBERS)
    return "matmul" if products else "fused"


@torch.fx.wrap  # one node of a symbolic trace, which cannot ask a tensor for its device
def attention(
    q: Float[Tensor, "B k T Dh"],
    k: Float[Tensor, "B k S Dh"],
    v: Float[Tensor, "B k S Dh"],
    bias: Float[Tensor, "B k T S"] | None = None,
) -> Float[Tensor, "B k T Dh"]:
    """softmax(q k^T / sqrt(Dh) + bias) v (App. A, Eq. 6-7), by the path that is faster here."""
    # torch.jit.trace compares a trace with gradients to one without: both have to take one path.
    tracing = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    learns = q.requires_grad or k.requires_grad or v.requires_grad
    needs_grad = learns and torch.is_grad_enabled() and not tracing
    forward_mode = forward_ad._current_level >= 0  # fused attention has no forward-mode derivative
    path = attention_path(q.device.type, needs_grad, q.dtype, math.prod(q.shape[:-1]) * k.shape[-2])
    if path == "fused" and not forward_mode:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    if needs_grad and not forward_mode:
        return MatmulAttention.apply(q, k, v, bias)[0]
    return attention_weights(q * q.shape[-1] ** -0.5, k, bias) @ v


def attention_weights(
    scaled_q: Float[Tensor, "B k T Dh"], k: Float[Tensor, "B k S Dh"], bias: Float[Tensor, "B k T S"] | None
) -> Float[Tensor, "B k T S"]:
    """A of Eq. 6, of queries that are already divided by sqrt(Dh)."""
    logits = scaled_q @ k.transpose(-2, -1)
    return torch.softmax(logits if bias is None else logits + bias, dim=-1)


@no_type_check  # at run time: torch.compile cannot follow checks inside such a function
class MatmulAttention(torch.autograd.Function):
    """Attention as plain matrix products, with its derivative written out; keeps the attention matrix.

    The attention matrix is a second output: what is saved can only be differentiated again if it is an input or an
    output, and a gradient penalty needs that.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        weights = attention_weights(q * q.shape[-1] ** -0.5, k, bias)
        return weights @ v, weights

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)  # the first derivative needs no zeros for the attention matrix
        ctx.save_for_backward(*inputs[:3], output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, grad_weights = grads
        q, k, v, weights = ctx.saved_tensors
        scale, grad_v = q.shape[-1] ** -0.5, None
        if grad is None and grad_weights is None:
            return None, None, None, None
        if grad is not None:
            grad_v = weights.transpose(-2, -1) @ grad
            through_output = grad @ v.transpose(-2, -1)
            grad_weights = through_output if grad_weights is None else grad_weights + through_output
        grad_logits = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        grad_q = (grad_logits @ k) * scale
        grad_k = grad_logits.transpose(-2, -1) @ (q * scale)
        return grad_q, grad_k, grad_v, grad_logits if ctx.needs_input_grad[3] else None


def relative_logits(
    q: Float[Tensor, "B k T Dh"], table: Float[Tensor, "R Dh"], prefix: int = 0
) -> Float[Tensor, "B k T T"]:
    """q . r(p_q - p_k) / sqrt(Dh) for every query and key: what relative positions add to the logits (App. D.4).

    Row N - 1 + p_k - p_q of `table` is the embedding of that offset, so R = 2 N - 1 for N places in a row. The first
    `prefix` tokens stand nowhere: nothing is added where one of them asks or answers.
    """
    places = q.shape[-2] - prefix
    logits = (q[:, :, prefix:] * q.shape[-1] ** -0.5) @ table.T  # by offset: [B, k, N, 2N - 1]
    # Read with a stride that is shorter by one, each row starts one offset earlier: [q, offset] becomes [q, k].
    flat = F.pad(F.pad(logits, (0, 1)).flatten(2), (0, places - 1))
    logits = flat.unflatten(2, (places + 1, 2 * places - 1))[:, :, :places, places - 1 :]
    return F.pad(logits, (prefix, 0, prefix, 0))


def linear(inputs: int, outputs: int) -> nn.Linear:
    """An `nn.Linear` with parameters that are not drawn yet: `init_weights` draws them all."""
    return cast(nn.Linear, nn.utils.skip_init(nn.Linear, inputs, outputs, device=torch.get_default_device()))


class Attention(nn.Module):
    """MSA, multi-head self-attention (App. A); `relative` adds relative positions (App. D.4)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width)

    def project(self, tokens: Float[Tensor, "B T D"]) -> Heads:
        """Queries, keys and values of every head (Eq. 5)."""
        return self.split(self.qkv(tokens))

    def split(self, qkv: Float[Tensor, "B T D3"]) -> Heads:
        """What `qkv` put out, by heads."""
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(
        self, tokens: Float[Tensor, "B T D"], relative: Float[Tensor, "R Dh"] | None = None, prefix: int = 0
    ) -> Float[Tensor, "B T D"]:
        q, k, v = self.project(tokens)
        bias = None if relative is None else relative_logits(q, relative, prefix)
        return self._merge(attention(q, k, v, bias))

    def answer(self, queries: Float[Tensor, "B S D"], tokens: Float[Tensor, "B T D"]) -> Float[Tensor, "B S D"]:
        """Attention of other queries to the tokens."""
        return self._merge(attention(*self.project_apart(queries, tokens)))

    def project_apart(self, queries: Float[Tensor, "B T D"], tokens: Float[Tensor, "B S D"]) -> Heads:
        """Queries of some, keys and values of other tokens. The whole of `qkv` projects both and a third of each
        product is not used: hooks, adapters and quantized layers act on the module, not on its weights."""
        q, _, _ = self.project(queries)
        _, k, v = self.project(tokens)
        return q, k, v

    def _merge(self, heads: Float[Tensor, "B k T Dh"]) -> Float[Tensor, "B T D"]:
        return self.out(heads.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two dense layers with a GELU between them."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.fc1 = linear(config.width, config.mlp_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.fc2 = linear(config.mlp_dim, config.width)

    def forward(self, tokens: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.fc2(self.dropout(F.gelu(self.fc1(tokens), approximate=self.approximate)))


class Branch(nn.Module):
    """What happens to a branch of a block before it is added: LayerScale, dropout, stochastic depth."""

    def __init__(self, config: ViTConfig, skip: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(config.width)) if config.layer_scale is not None else None
        self.dropout = nn.Dropout(config.dropout)
        self.skips = skip > 0
        self.skip: float | Tensor = skip

    def forward(self, tokens: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        tokens = self.dropout(tokens if self.scale is None else tokens * self.scale)
        if not (self.training and self.skips):
            return tokens
        kept = torch.rand_like(tokens[:, :1, :1], dtype=torch.get_default_dtype()) >= self.skip
        return tokens * (kept / (1 - self.skip)).to(tokens.dtype)


class Block(nn.Module):
    """One encoder block: Eq. 2 and Eq. 3, normalized before each part. `skip` is its rate of stochastic depth."""

    def __init__(self, config: ViTConfig, skip: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.attention = Attention(config.width, config.heads)
        self.branch1 = Branch(config, skip)
        self.norm2 = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.mlp = MLP(config)
        self.branch2 = Branch(config, skip)
        self.prefix = config.num_prefix_tokens

    def forward(
        self, tokens: Float[Tensor, "B T D"], relative: Float[Tensor, "R Dh"] | None = None
    ) -> Float[Tensor, "B T D"]:
        tokens = tokens + self.branch1(self.attention(self.norm1(tokens), relative, self.prefix))  # Eq. 2
        return tokens + self.branch2(self.mlp(self.norm2(tokens)))  # Eq. 3


class MAPHead(nn.Module):
    """Multi-head attention pooling (big_vision): one learned query looks at all tokens, then an MLP."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.empty(1, 1, config.width))
        self.attention = Attention(config.width, config.heads)
        self.norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, tokens: Float[Tensor, "B T D"]) -> Float[Tensor, "B D"]:
        pooled = self.attention.answer(self.probe.to(tokens.dtype).expand(tokens.shape[0], -1, -1), tokens)
        return (pooled + self.mlp(self.norm(pooled)))[:, 0]
