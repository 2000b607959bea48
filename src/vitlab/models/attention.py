"""Multi-head self-attention, Eq. 5-8 (App. A).

[q, k, v] = z U_qkv; A = softmax(q k^T / sqrt(Dh)); SA(z) = A v; the heads are joined and multiplied by U_msa.

`attention_weights` is Eq. 6 as it stands, for training on a CPU and for the figures. `attention` chooses between it and
torch's fused kernel, which computes the same. The softmax is in the dtype of q and k: float32, or bfloat16 where the
weights are; figures take float32. `Block` calls `Attention`; `inspection/attention.py` reads its maps.

Letters as in the paper: B images, T tokens, S tokens attended to, D width, k heads, Dh = D / k.

    Attention(width=768, heads=12)(torch.zeros(1, 197, 768))  # [1, 197, 768]
"""

import math
from typing import Any, Literal, no_type_check

import torch
import torch.fx
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad

from vitlab.models.init import linear
from vitlab.models.variant_layers import rotate

AttentionBackend = Literal["fused", "matmul"]
Heads = tuple[Float[Tensor, "B k T Dh"], Float[Tensor, "B k S Dh"], Float[Tensor, "B k S Dh"]]

MAX_ATTENTION_ELEMENTS = 2**27
"""Largest attention matrices (B k T S numbers) that a CPU without AMX computes by matrix products in bfloat16. Larger
ones take too much memory; fused attention needs almost none."""
HAS_AMX = bool(torch.cpu.get_capabilities().get("amx_bf16"))


def attention_backend(
    device_type: str, needs_grad: bool, dtype: torch.dtype = torch.float32, numel: int | torch.SymInt = 0
) -> AttentionBackend:
    """The faster of two equivalent implementations, for attention matrices of `numel` = B k T S numbers.

    `fused` is torch's scaled_dot_product_attention, the fastest on every GPU. On a CPU its backward takes several times
    as long as plain matrix products (`benchmarks/train_cpu.py`), and so, to a lesser degree, does its bfloat16 forward
    without AMX; its float32 forward is faster (`benchmarks/attention.py`).
    """
    if device_type != "cpu":
        return "fused"
    slow_bfloat16 = dtype == torch.bfloat16 and not HAS_AMX and numel <= MAX_ATTENTION_ELEMENTS
    return "matmul" if needs_grad or slow_bfloat16 else "fused"


@torch.fx.wrap  # one node of a symbolic trace, in which a tensor has no device
def attention(
    q: Float[Tensor, "B k T Dh"],
    k: Float[Tensor, "B k S Dh"],
    v: Float[Tensor, "B k S Dh"],
    bias: Float[Tensor, "B k T S"] | None = None,
) -> Float[Tensor, "B k T Dh"]:
    """softmax(q k^T / sqrt(Dh) + bias) v (Eq. 6-7), by the implementation that `attention_backend` chooses."""
    # torch.jit.trace compares a trace with gradients to one without: both have to take the same backend.
    tracing = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    requires_grad = q.requires_grad or k.requires_grad or v.requires_grad
    needs_grad = requires_grad and torch.is_grad_enabled() and not tracing
    forward_mode = forward_ad._current_level >= 0  # fused attention does not support forward-mode AD
    backend = attention_backend(q.device.type, needs_grad, q.dtype, math.prod(q.shape[:-1]) * k.shape[-2])
    if backend == "fused" and not forward_mode:  # a GPU, or a CPU without gradients
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    if needs_grad and not forward_mode:  # training on a CPU: Eq. 6 with a backward pass of its own
        return matmul_attention(q, k, v, bias)
    # bfloat16 without gradients on a CPU, and forward-mode derivatives; strided keys and values are slower to multiply
    return attention_weights(q * q.shape[-1] ** -0.5, k.contiguous(), bias) @ v.contiguous()


def attention_weights(
    scaled_q: Float[Tensor, "B k T Dh"], k: Float[Tensor, "B k S Dh"], bias: Float[Tensor, "B k T S"] | None
) -> Float[Tensor, "B k T S"]:
    """The attention matrix A of Eq. 6; `scaled_q` is q / sqrt(Dh)."""
    logits = scaled_q @ k.transpose(-2, -1)
    return torch.softmax(logits if bias is None else logits + bias, dim=-1)


def matmul_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """`attention` as plain matrix products, for training; shapes as there."""
    # Keys and values of a `qkv` layer are strided: each product would copy them, those of the backward pass again.
    return MatmulAttention.apply(q * q.shape[-1] ** -0.5, k.contiguous(), v.contiguous(), bias)[0]


@no_type_check  # at run time: torch.compile cannot follow checks inside such a function
class MatmulAttention(torch.autograd.Function):
    """softmax(scaled_q k^T + bias) v with an explicit backward; saves the attention matrix.

    The attention matrix is an output as well, because other saved tensors cannot be differentiated a second time.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(scaled_q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        weights = attention_weights(scaled_q, k, bias)
        return weights @ v, weights

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)  # the first derivative needs no zeros for the attention matrix
        ctx.save_for_backward(*inputs[:3], output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, grad_weights = grads
        scaled_q, k, v, weights = ctx.saved_tensors
        grad_v = None
        if grad is None and grad_weights is None:
            return None, None, None, None
        if grad is not None:
            grad = grad.contiguous()
            grad_v = weights.transpose(-2, -1) @ grad
            through_output = grad @ v.transpose(-2, -1)
            grad_weights = through_output if grad_weights is None else grad_weights + through_output
        grad_logits = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        grad_k = grad_logits.transpose(-2, -1) @ scaled_q
        return grad_logits @ k, grad_k, grad_v, grad_logits if ctx.needs_input_grad[3] else None


def relative_logits(
    q: Float[Tensor, "B k T Dh"], table: Float[Tensor, "R Dh"], num_prefix_tokens: int = 0
) -> Float[Tensor, "B k T T"]:
    """q . r(p_q - p_k) / sqrt(Dh) of every query and key: what relative positions add to the logits (App. D.4).

    Row N - 1 + p_k - p_q of `table` is the embedding of that offset, so R = 2 N - 1 for N positions in reading order.
    Prefix tokens have no position: their rows and columns are zero.
    """
    count, p = q.shape[-2] - num_prefix_tokens, num_prefix_tokens
    logits = (q[:, :, p:] * q.shape[-1] ** -0.5) @ table.T  # by offset: [B, k, N, 2N - 1]
    # Skewing: [q, offset] becomes [q, k] without a gather. For N = 2, queries a, b and offsets -1, 0, 1 the padded rows
    # (a- a0 a+ 0) (b- b0 b+ 0) (0), read by threes, are (a- a0 a+) (0 b- b0) (b+ 0 0): a0 a+ and b- b0 are by key.
    flat = F.pad(F.pad(logits, (0, 1)).flatten(2), (0, count - 1))
    logits = flat.unflatten(2, (count + 1, 2 * count - 1))[:, :, :count, count - 1 :]
    return F.pad(logits, (p, 0, p, 0))


class Attention(nn.Module):
    """MSA, multi-head self-attention (App. A). `norm` acts on the heads' outputs; the paper has none.

    `positions`: the relative position table (App. D.4), or with `rotary` the table of `rotary_table`.
    """

    def __init__(self, width: int, heads: int, norm: nn.Module | None = None, rotary: bool = False) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.qkv = linear(width, 3 * width)
        self.norm = norm or nn.Identity()
        self.out = linear(width, width)

    def project(self, tokens: Float[Tensor, "B T D"]) -> Heads:
        """Queries, keys and values of every head (Eq. 5)."""
        return self.split(self.qkv(tokens))

    def split(self, qkv: Float[Tensor, "B T D3"]) -> Heads:
        """The output of the module `qkv` by heads."""
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).unbind(2)  # whose derivative is written in one pass
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def add_positions(
        self,
        q: Float[Tensor, "B k T Dh"],
        k: Float[Tensor, "B k S Dh"],
        positions: Float[Tensor, "R Dh"] | None,
        num_prefix_tokens: int,
    ) -> tuple[Tensor, Tensor, Float[Tensor, "B k T S"] | None]:
        """Applies `positions`: RoPE rotates q and k; relative positions return an attention bias."""
        if positions is None:
            return q, k, None
        if self.rotary:
            return rotate(q, positions, num_prefix_tokens), rotate(k, positions, num_prefix_tokens), None
        return q, k, relative_logits(q, positions, num_prefix_tokens)

    def weights(
        self,
        q: Float[Tensor, "B k T Dh"],
        k: Float[Tensor, "B k S Dh"],
        positions: Float[Tensor, "R Dh"] | None,
        num_prefix_tokens: int,
    ) -> Float[Tensor, "B k T S"]:
        """The attention matrix of queries and keys, in float32 whatever their precision."""
        positions = None if positions is None else positions.float()
        q, k, bias = self.add_positions(q.float(), k.float(), positions, num_prefix_tokens)
        return attention_weights(q * q.shape[-1] ** -0.5, k, bias)

    def forward(
        self, tokens: Float[Tensor, "B T D"], positions: Float[Tensor, "R Dh"] | None = None, num_prefix_tokens: int = 0
    ) -> Float[Tensor, "B T D"]:
        q, k, v = self.project(tokens)
        q, k, bias = self.add_positions(q, k, positions, num_prefix_tokens)
        return self._merge(attention(q, k, v, bias))

    def cross_attention(
        self, queries: Float[Tensor, "B T D"], tokens: Float[Tensor, "B S D"]
    ) -> Float[Tensor, "B T D"]:
        """Cross-attention from `queries` to `tokens`."""
        return self._merge(attention(*self.project_cross(queries, tokens)))

    def project_cross(self, queries: Float[Tensor, "B T D"], tokens: Float[Tensor, "B S D"]) -> Heads:
        """Queries of `queries`, keys and values of `tokens`. The whole `qkv` layer is applied to both, because hooks,
        adapters and quantized layers wrap the module, not its weights."""
        q, _, _ = self.project(queries)
        _, k, v = self.project(tokens)
        return q, k, v

    def _merge(self, heads: Float[Tensor, "B k T Dh"]) -> Float[Tensor, "B T D"]:
        return self.out(self.norm(heads.transpose(1, 2).flatten(2)))  # Eq. 8
