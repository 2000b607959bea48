import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vitlab.models import ViTConfig
from vitlab.models.encoder import Block, Branch, MAPHead
from vitlab.models.vit import ViT

CONFIG = ViTConfig(image_size=16, patch_size=4, width=8, depth=1, heads=2, mlp_dim=12)


def stir(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter)


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
    pooled = head(tokens)
    assert pooled.shape == (2, 8)
    torch.testing.assert_close(head(tokens[:, torch.randperm(6)]), pooled, rtol=1e-4, atol=1e-4)
    for index in range(6):
        changed = tokens.clone()
        changed[:, index] += 1
        assert not torch.allclose(head(changed), pooled)


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
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, Doubled(layer))
        assert not torch.allclose(model(images), before), name
        setattr(model.get_submodule(parent), leaf, layer)


class Doubled(nn.Module):
    """Stands for a layer without a weight of its own, as a quantized one."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.inner = layer

    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * self.inner(inputs)


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
