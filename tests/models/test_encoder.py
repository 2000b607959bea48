import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.models import ViTConfig, encoder
from vitlab.models.encoder import (
    Attention,
    Block,
    Branch,
    MAPHead,
    MatmulAttention,
    attention,
    attention_path,
    relative_logits,
)
from vitlab.models.vit import ViT

CONFIG = ViTConfig(image_size=16, patch_size=4, width=8, depth=1, heads=2, mlp_dim=12)


def qkv(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(*shape, dtype=dtype, requires_grad=True) for _ in range(3))
    return q, k, v


def stir(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter)


# --- the two ways to compute attention ---------------------------------------------------------------------------


def by_products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    return MatmulAttention.apply(q, k, v, bias)[0]  # pyright: ignore[reportIndexIssue, reportOptionalSubscript]


def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def test_matmul_attention_has_the_right_derivative() -> None:
    assert torch.autograd.gradcheck(by_products, qkv(2, 3, 5, 4))
    bias = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(by_products, (*qkv(2, 3, 5, 4), bias))
    q, (_, k, v) = torch.randn(2, 3, 1, 4, dtype=torch.float64, requires_grad=True), qkv(2, 3, 5, 4)
    assert torch.autograd.gradcheck(by_products, (q, k, v))


@pytest.mark.parametrize("biased", [False, True])
def test_both_paths_are_equal_forward_and_backward(biased: bool) -> None:
    inputs, weight = [*qkv(2, 3, 7, 4)], torch.randn(2, 3, 7, 4, dtype=torch.float64)
    inputs += [torch.randn(2, 3, 7, 7, dtype=torch.float64, requires_grad=True)] if biased else []
    answers = []
    for path in (by_products, fused):
        out = path(*inputs)
        answers.append((out, *torch.autograd.grad((out * weight).sum(), inputs)))
    for ours, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_path_follows_device_gradient_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    bf16 = torch.bfloat16
    for dtype in (torch.float32, bf16):
        assert attention_path("cpu", True, dtype) == "matmul"
        assert attention_path("cuda", True, dtype) == attention_path("cuda", False, dtype) == "fused"
    assert attention_path("cpu", False) == "fused"
    for has_amx, answers in ((False, ("matmul", "fused")), (True, ("fused", "fused"))):
        monkeypatch.setattr(encoder, "HAS_AMX", has_amx)
        assert tuple(attention_path("cpu", False, bf16, numbers) for numbers in (2**27, 2**27 + 1)) == answers


@pytest.mark.parametrize("biased", [False, True])
def test_attention_takes_its_path(monkeypatch: pytest.MonkeyPatch, biased: bool) -> None:
    monkeypatch.setattr(encoder, "HAS_AMX", False)
    calls: list[str] = []
    true, inputs = F.scaled_dot_product_attention, qkv(1, 1, 2, 2)
    bias = torch.randn(1, 1, 2, 2, dtype=torch.float64) if biased else None

    def spy(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
        calls.append("fused")
        return true(q, k, v, attn_mask=attn_mask)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    expected = attention(*inputs, bias)
    assert calls == []
    with torch.no_grad():
        torch.testing.assert_close(attention(*inputs, bias), expected)
        assert calls == ["fused"]
        q, k, v = (each.bfloat16() for each in inputs)
        low = attention(q, k, v, None if bias is None else bias.bfloat16())
        torch.testing.assert_close(low.double(), expected, rtol=0.02, atol=0.02)
    assert calls == ["fused"]  # products
    q, k, v = (each.detach() for each in inputs)
    attention(q, k, v, bias)
    assert calls == ["fused", "fused"]


def test_both_paths_train_under_autocast() -> None:
    """Half precision forward, and a backward outside of the autocast, as in training."""
    inputs, weight = qkv(2, 3, 7, 4, dtype=torch.float32), torch.randn(2, 3, 7, 4)
    exact = torch.autograd.grad((attention(*inputs) * weight).sum(), inputs)
    for path in (by_products, fused):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            q, k, v = (each.bfloat16() for each in inputs)
            out = path(q, k, v)
        assert out.dtype == torch.bfloat16
        for ours, theirs in zip(torch.autograd.grad((out.float() * weight).sum(), inputs), exact, strict=True):
            assert (ours - theirs).norm() < 0.03 * theirs.norm()


def test_matmul_attention_has_the_right_second_derivative() -> None:
    q, (_, k, v) = torch.randn(2, 3, 2, 4, dtype=torch.float64, requires_grad=True), qkv(2, 3, 5, 4)
    bias = torch.randn(2, 3, 2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(by_products, (q, k, v))
    assert torch.autograd.gradgradcheck(by_products, (q, k, v, bias))


def test_a_trained_step_keeps_its_bits() -> None:
    """The first derivative, product by product, as it has always been computed."""
    q, k, v = qkv(2, 3, 10, 4, dtype=torch.float32)
    grad = torch.randn(2, 3, 10, 4)
    found = torch.autograd.grad(by_products(q, k, v), (q, k, v), grad)
    scaled = q * 4**-0.5
    weights = torch.softmax(scaled @ k.transpose(-2, -1), dim=-1)
    logits = torch.ops.aten._softmax_backward_data(grad @ v.transpose(-2, -1), weights, -1, torch.float32)
    expected = ((logits @ k) * 4**-0.5, logits.transpose(-2, -1) @ scaled, weights.transpose(-2, -1) @ grad)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


# --- relative positions (App. D.4) -------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("places", [1, 2, 5])
def test_relative_logits_are_those_of_every_pair(places: int, prefix: int) -> None:
    q, table = torch.randn(2, 3, prefix + places, 4), torch.randn(2 * places - 1, 4)
    ours = relative_logits(q, table, prefix)
    assert ours.shape == (2, 3, prefix + places, prefix + places)
    expected = torch.zeros_like(ours)
    for asks in range(places):
        for answers in range(places):
            offset = table[places - 1 + answers - asks]
            expected[:, :, prefix + asks, prefix + answers] = q[:, :, prefix + asks] @ offset / 2  # sqrt(4)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("prefix", [0, 2])
def test_relative_attention_is_its_formula_with_its_derivative(prefix: int) -> None:
    """softmax(q (k + r) / sqrt(Dh)) v, written out head by head and query by query."""
    layer, places = Attention(8, 2).double(), 5
    stir(layer)
    tokens = torch.randn(2, prefix + places, 8, dtype=torch.float64, requires_grad=True)
    table = torch.randn(2 * places - 1, 4, dtype=torch.float64, requires_grad=True)
    images = []
    for image in tokens:
        heads = []
        q, k, v = (image @ layer.qkv.weight.T + layer.qkv.bias).chunk(3, dim=1)
        for head in (slice(0, 4), slice(4, 8)):
            answers = []
            for asks in range(prefix + places):
                keys = list(k[:, head])
                for other in range(prefix, prefix + places):
                    if asks >= prefix:
                        keys[other] = keys[other] + table[places - 1 + other - asks]
                weights = torch.softmax(torch.stack(keys) @ q[asks, head] / 2, dim=0)
                answers.append(weights @ v[:, head])
            heads.append(torch.stack(answers))
        images.append(torch.cat(heads, dim=1) @ layer.out.weight.T + layer.out.bias)
    expected, ours = torch.stack(images), layer(tokens, table, prefix)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(layer(tokens, table, prefix), expected, rtol=1e-10, atol=1e-10)
    weight, learned = torch.randn_like(expected), [tokens, table, *layer.parameters()]
    theirs = torch.autograd.grad((expected * weight).sum(), learned)
    for mine, exact in zip(torch.autograd.grad((ours * weight).sum(), learned), theirs, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-9)


# --- the block ---------------------------------------------------------------------------------------------------


def test_the_order_of_tokens_does_not_matter_to_a_block() -> None:
    block, order = Block(CONFIG), torch.randperm(7)
    stir(block)
    tokens = torch.randn(2, 7, 8)
    torch.testing.assert_close(block(tokens[:, order]), block(tokens)[:, order], rtol=1e-4, atol=1e-4)


def test_layer_scale_multiplies_each_branch() -> None:
    block, tokens = Block(ViTConfig(width=8, heads=2, mlp_dim=12, layer_scale=0.1)), torch.randn(2, 5, 8)
    stir(block)
    assert block.branch1.scale is not None
    assert block.branch2.scale is not None
    first = tokens + block.branch1.scale * block.attention(block.norm1(tokens))
    torch.testing.assert_close(block(tokens), first + block.branch2.scale * block.mlp(block.norm2(first)))
    nn.init.zeros_(block.branch1.scale)
    nn.init.zeros_(block.branch2.scale)
    assert torch.equal(block(tokens), tokens)


def test_stochastic_depth_drops_whole_images_and_keeps_the_mean() -> None:
    branch, tokens = Branch(CONFIG, 0.3), torch.randn(4000, 3, 8)
    assert torch.equal(branch.eval()(tokens), tokens)
    out = branch.train()(tokens)
    kept = (out != 0).flatten(1)
    assert torch.equal(kept.any(1), kept.all(1))
    assert kept.all(1).float().mean().item() == pytest.approx(0.7, abs=0.03)
    torch.testing.assert_close(out[kept.all(1)], tokens[kept.all(1)] / 0.7)
    assert branch(tokens.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(Branch(CONFIG, 0.0).train()(tokens), tokens)


def test_stochastic_depth_grows_from_none_at_the_first_block(small: Callable[..., ViT]) -> None:
    model = small(depth=5, stochastic_depth=0.4)
    rates = [branch.skip for branch in model.modules() if isinstance(branch, Branch)]
    assert rates == pytest.approx([0.0, 0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4])
    images = torch.randn(16, 3, 24, 32)
    assert torch.equal(model(images), model(images))
    assert not torch.equal(model.train()(images), model(images))
    assert [branch.skip for branch in small(depth=1, stochastic_depth=0.4).modules() if isinstance(branch, Branch)] == [
        0.0,
        0.0,
    ]


# --- attention pooling -------------------------------------------------------------------------------------------


def test_attention_pooling_is_one_query_s_answer_and_an_mlp() -> None:
    head = MAPHead(CONFIG).double()
    stir(head)
    tokens = torch.randn(3, 6, 8, dtype=torch.float64)
    w = {name: parameter.detach().numpy() for name, parameter in head.named_parameters()}
    q = w["attention.qkv.weight"][:8] @ w["probe"][0, 0] + w["attention.qkv.bias"][:8]
    for image, ours in zip(tokens.numpy(), head(tokens), strict=True):
        k = image @ w["attention.qkv.weight"][8:16].T + w["attention.qkv.bias"][8:16]
        v = image @ w["attention.qkv.weight"][16:].T + w["attention.qkv.bias"][16:]
        answers = []
        for part in (slice(0, 4), slice(4, 8)):
            a = np.exp(k[:, part] @ q[part] / 2)
            answers.append(a / a.sum() @ v[:, part])
        y = w["attention.out.weight"] @ np.concatenate(answers) + w["attention.out.bias"]
        x = (y - y.mean()) / np.sqrt(y.var() + 1e-6) * w["norm.weight"] + w["norm.bias"]
        x = w["mlp.fc1.weight"] @ x + w["mlp.fc1.bias"]
        x = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        expected = y + w["mlp.fc2.weight"] @ x + w["mlp.fc2.bias"]
        np.testing.assert_allclose(ours.detach().numpy(), expected, rtol=1e-10, atol=1e-10)


def test_attention_pooling_looks_at_all_tokens_with_one_probe() -> None:
    head, tokens = MAPHead(CONFIG), torch.randn(2, 6, 8)
    stir(head)
    answer = head(tokens)
    assert answer.shape == (2, 8)
    torch.testing.assert_close(head(tokens[:, torch.randperm(6)]), answer, rtol=1e-4, atol=1e-4)
    for place in range(6):
        changed = tokens.clone()
        changed[:, place] += 1
        assert not torch.allclose(head(changed), answer)


@pytest.mark.parametrize(
    "settings",
    [{"pool": "map"}, {"pool": "map", "encoder": "axial"}, {"position": "relative", "position_at": "every"}],
)
def test_dense_layers_are_called(small: Callable[..., ViT], settings: dict[str, Any]) -> None:
    """So hooks, LoRA adapters and quantized layers act: each layer is called, and what replaces it is used."""
    model, images, called = small(**settings).double(), torch.randn(2, 3, 24, 32).double(), set()
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    for name, layer in layers.items():
        layer.register_forward_hook(lambda *_, name=name: called.add(name))
    before = model(images)
    assert called == set(layers)
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, Doubled(layer))
        assert not torch.allclose(model(images), before), name
        setattr(model.get_submodule(parent), own, layer)


class Doubled(nn.Module):
    """Stands for a layer without a weight of its own, as a quantized one."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.inner = layer

    def forward(self, given: Tensor) -> Tensor:
        return 2 * self.inner(given)


def test_dense_layers_are_torch_s_own() -> None:
    """`quantize_dynamic` replaces by exact type."""
    head = MAPHead(CONFIG)
    assert type(head.attention.qkv) is type(head.mlp.fc1) is nn.Linear
    with torch.device("meta"):
        assert MAPHead(CONFIG).attention.qkv.weight.is_meta


@pytest.mark.parametrize(
    "settings", [{"pool": "map"}, {"encoder": "axial"}, {"position": "relative", "position_at": "every"}]
)
def test_every_lora_adapter_learns_and_merges(small: Callable[..., ViT], settings: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    images = torch.randn(2, 3, 24, 32)
    targets = ["qkv", "out", "fc1", "fc2"]
    adapted = peft.get_peft_model(small(**settings), peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.0))
    adapters = {name: each for name, each in adapted.named_parameters() if "lora_" in name}
    for each in adapters.values():
        nn.init.normal_(each, std=0.1)
    logits = adapted(images)
    logits.square().sum().backward()
    assert all(each.grad is not None and each.grad.any() for each in adapters.values())
    with torch.no_grad():
        merged = adapted.merge_and_unload()(images)
    assert (merged - logits).square().mean().sqrt() < 1e-5 * logits.square().mean().sqrt()
