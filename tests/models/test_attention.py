from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.models import attention as module
from vitlab.models.attention import Attention, attention, attention_backend, matmul_attention


def qkv(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(*shape, dtype=dtype, requires_grad=True) for _ in range(3))
    return q, k, v


def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@pytest.mark.parametrize("biased", [False, True])
def test_both_paths_are_equal_forward_and_backward(biased: bool) -> None:
    inputs, weight = [*qkv(2, 3, 7, 4)], torch.randn(2, 3, 7, 4, dtype=torch.float64)
    inputs += [torch.randn(2, 3, 7, 7, dtype=torch.float64, requires_grad=True)] if biased else []
    outputs = []
    for path in (matmul_attention, fused):
        out = path(*inputs)
        outputs.append((out, *torch.autograd.grad((out * weight).sum(), inputs)))
    for ours, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradgradcheck(matmul_attention, [tensor[:1, :1, :4] for tensor in inputs[:3]])


def test_the_path_follows_device_gradient_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert attention_backend("cpu", True, dtype) == "matmul"
        assert attention_backend("cuda", True, dtype) == attention_backend("cuda", False, dtype) == "fused"
    assert attention_backend("cpu", False) == "fused"
    for has_amx, expected in ((False, ["matmul", "fused"]), (True, ["fused", "fused"])):
        monkeypatch.setattr(module, "HAS_AMX", has_amx)
        assert [attention_backend("cpu", False, torch.bfloat16, numel) for numel in (2**27, 2**27 + 1)] == expected


@pytest.mark.parametrize("biased", [False, True])
def test_attention_takes_its_path(monkeypatch: pytest.MonkeyPatch, biased: bool) -> None:
    monkeypatch.setattr(module, "HAS_AMX", False)
    calls: list[str] = []
    inputs, bias = qkv(1, 1, 2, 2), torch.randn(1, 1, 2, 2, dtype=torch.float64) if biased else None

    def spy(*args: Any, attn_mask: Tensor | None) -> Tensor:
        calls.append("fused")
        return original(*args, attn_mask=attn_mask)

    original = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    expected = attention(*inputs, bias)
    assert calls == []
    with torch.no_grad():
        torch.testing.assert_close(attention(*inputs, bias), expected)
        assert calls == ["fused"]
        q, k, v = (tensor.bfloat16() for tensor in inputs)
        low = attention(q, k, v, None if bias is None else bias.bfloat16())
        torch.testing.assert_close(low.double(), expected, rtol=0.02, atol=0.02)
    assert calls == ["fused"]  # the last was computed by matrix products
    q, k, v = (tensor.detach() for tensor in inputs)
    attention(q, k, v, bias)
    assert calls == ["fused", "fused"]


def test_relative_attention_has_the_derivative_of_its_formula() -> None:
    """softmax(q (k + r) / sqrt(Dh)) v, with r gathered for every pair; the first two tokens have no position."""
    layer, count = Attention(8, 2).double(), 5
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    tokens = torch.randn(2, 2 + count, 8, dtype=torch.float64, requires_grad=True)
    table = torch.randn(2 * count - 1, 4, dtype=torch.float64, requires_grad=True)
    q, k, v = layer.project(tokens)
    offsets = torch.arange(count)[None, :] - torch.arange(count)[:, None] + count - 1
    r = F.pad(table[offsets], (0, 0, 2, 0, 2, 0))  # [query, key, Dh]
    weights = torch.softmax((q[..., None, :] * (k[:, :, None] + r)).sum(-1) / 2, dim=-1)
    expected = layer.out((weights @ v).transpose(1, 2).flatten(2))
    ours = layer(tokens, table, 2)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(layer(tokens, table, 2), expected, rtol=1e-10, atol=1e-10)
    weight, inputs = torch.randn_like(expected), [tokens, table, *layer.parameters()]
    exact = torch.autograd.grad((expected * weight).sum(), inputs)
    for mine, theirs in zip(torch.autograd.grad((ours * weight).sum(), inputs), exact, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
