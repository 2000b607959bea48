"""Maps, rollout and distance against plain numpy, and against what the model's own attention computes."""

import math

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitlab.inspect.attention import (
    attention_maps,
    attention_rollout,
    class_attention_grid,
    mean_attention_distance,
)
from vitlab.models import ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.models.encoder import Attention, Block
from vitlab.models.vit import ViT

SMALL = ViTConfig(image_size=(12, 20), patch_size=4, width=24, depth=3, heads=4, mlp_dim=48, num_classes=5)
KINDS = {
    "class token, wider than high": SMALL,
    "mean over patches": ViTConfig(
        image_size=16, patch_size=4, width=24, depth=2, heads=3, mlp_dim=24, num_classes=5, pool="gap"
    ),
    "no positions, one head, pre-logits, no head": ViTConfig(
        image_size=8, patch_size=4, width=16, depth=1, heads=1, mlp_dim=16, num_classes=0, position="none",
        representation_size=8, gelu="erf",
    ),
    "dropout": ViTConfig(
        image_size=8, patch_size=2, width=16, depth=2, heads=2, mlp_dim=16, num_classes=5, dropout=0.5
    ),
}  # fmt: skip


def awake(config: ViTConfig) -> ViT:
    """A model whose attention is far from uniform."""
    model = ViT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model


def pictures(config: ViTConfig, n: int = 3) -> Tensor:
    return torch.rand(n, 3, *config.image_hw) * 2 - 1


def seen(model: ViT, images: Tensor) -> list[tuple[Attention, Tensor]]:
    """Each attention layer with its input, by walking through the blocks one by one."""
    tokens = model.embedding(images)
    if model.cls is not None:
        tokens = torch.cat([model.cls.expand(len(images), -1, -1), tokens], dim=1)
    tokens, out = model.position(tokens), []
    for block in model.blocks:
        assert isinstance(block, Block)
        out.append((block.attention, block.norm1(tokens)))
        tokens = block(tokens)
    return out


def random_maps(layers: int, pictures: int, heads: int, tokens: int) -> list[Tensor]:
    return [torch.softmax(2 * torch.randn(pictures, heads, tokens, tokens), dim=-1) for _ in range(layers)]


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_maps_equal_plain_numpy_and_reproduce_the_fused_output(config: ViTConfig) -> None:
    model, images = awake(config).eval(), pictures(config)
    maps = attention_maps(model, images)
    assert len(maps) == config.depth
    with torch.no_grad():
        for weights, (layer, tokens) in zip(maps, seen(model, images), strict=True):
            assert weights.shape == (3, config.heads, config.num_tokens, config.num_tokens)
            assert weights.dtype == torch.float32
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-5, rtol=0)

            qkv = tokens.numpy() @ layer.qkv.weight.numpy().T + layer.qkv.bias.numpy()
            q, k, v = qkv.reshape(3, config.num_tokens, 3, config.heads, -1).transpose(2, 0, 3, 1, 4)
            power = np.exp(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]))
            expected = power / power.sum(axis=-1, keepdims=True)
            np.testing.assert_allclose(weights.numpy(), expected, atol=1e-5)

            mixed = (weights @ torch.from_numpy(v)).transpose(1, 2).flatten(2)
            torch.testing.assert_close(layer.out(mixed), layer(tokens), atol=1e-5, rtol=1e-5)


def test_the_model_is_left_as_it_was() -> None:
    config = KINDS["dropout"]
    model, images = awake(config).train(), pictures(config)
    model.blocks[0].eval()  # modes that differ are put back one by one
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, second = attention_maps(model, images), attention_maps(model, images)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other), "dropout must rest"
        assert not one.requires_grad
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.is_grad_enabled()


def test_hooks_go_and_modes_return_after_an_error() -> None:
    model = awake(SMALL).train()
    with pytest.raises(ValueError, match="12x20"):
        attention_maps(model, torch.zeros(1, 3, 16, 16))
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(module.training for module in model.modules())


def test_maps_are_float32_in_lower_precision() -> None:
    model, images = awake(SMALL), pictures(SMALL)
    exact = attention_maps(model, images)
    with torch.autocast("cpu", torch.bfloat16):
        cast = attention_maps(model, images)
    half = attention_maps(model.to(torch.bfloat16), images)
    for maps in (cast, half):
        for weights in maps:
            assert weights.dtype == torch.float32
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-5, rtol=0)
        assert 0 < (maps[0] - exact[0]).abs().max() < 0.1


def test_compiled_blocks_are_seen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the tests' own checks cannot be compiled
    model, images = awake(SMALL).eval(), pictures(SMALL)
    expected = attention_maps(model, images)
    for block in model.blocks:
        block.compile(backend="eager")
    with torch.no_grad():
        model(images)  # compiled before the hooks come
    maps = attention_maps(model, images)
    assert all(torch.equal(one, other) for one, other in zip(maps, expected, strict=True))


@pytest.mark.parametrize("residual", [True, False])
def test_rollout_equals_plain_numpy(residual: bool) -> None:
    maps = random_maps(layers=4, pictures=2, heads=3, tokens=7)
    rolled = attention_rollout(maps, residual=residual)
    for b in range(2):
        expected = np.eye(7)
        for layer in maps:
            mean = sum(layer[b, head].numpy().astype(float) for head in range(3)) / 3
            expected = (0.5 * mean + 0.5 * np.eye(7) if residual else mean) @ expected
        np.testing.assert_allclose(rolled[b].numpy(), expected, atol=1e-6)


@settings(max_examples=25)
@given(layers=st.integers(1, 6), tokens=st.integers(1, 20), residual=st.booleans())
def test_rows_of_a_rollout_sum_to_one(layers: int, tokens: int, residual: bool) -> None:
    rolled = attention_rollout(random_maps(layers, 1, 2, tokens), residual=residual)
    torch.testing.assert_close(rolled.sum(-1), torch.ones(1, tokens), atol=1e-5, rtol=0)
    assert (rolled >= 0).all()


@pytest.mark.parametrize("residual", [True, False])
def test_rollout_of_identity_is_identity(residual: bool) -> None:
    identity = torch.eye(6).expand(2, 3, 6, 6)
    assert torch.equal(attention_rollout([identity] * 5, residual=residual), torch.eye(6).expand(2, 6, 6))


def test_class_attention_is_the_class_tokens_row_at_the_patches_places() -> None:
    attention = torch.rand(2, 7, 7)
    grid = class_attention_grid(attention, (2, 3), prefix=1)
    for row in range(2):
        for column in range(3):
            assert torch.equal(grid[:, row, column], attention[:, 0, 1 + 3 * row + column])


def test_class_attention_without_a_class_token_is_the_mean_over_queries() -> None:
    attention = torch.rand(2, 6, 6)
    expected = attention.numpy().mean(axis=1).reshape(2, 2, 3)
    np.testing.assert_allclose(class_attention_grid(attention, (2, 3), prefix=0).numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("grid", "patch_size", "pixels"), [((14, 14), 16, 116.5), ((7, 7), 32, 115.5), ((8, 8), 4, 16.55)]
)
@pytest.mark.parametrize("prefix", [0, 1])
def test_distance_of_uniform_attention(grid: tuple[int, int], patch_size: int, pixels: float, prefix: int) -> None:
    tokens = prefix + grid[0] * grid[1]
    uniform = torch.full((1, 2, tokens, tokens), 1 / tokens)
    distances = mean_attention_distance([uniform] * 3, grid, patch_size, prefix)
    assert distances.shape == (3, 2)
    assert distances.numpy() == pytest.approx(pixels, rel=1e-3)


def test_distance_of_identity_attention_is_zero() -> None:
    identity = torch.eye(13).expand(2, 3, 13, 13)
    assert torch.equal(mean_attention_distance([identity], (3, 4), 16, prefix=1), torch.zeros(1, 3))


def test_distance_equals_plain_numpy() -> None:
    grid, patch_size, prefix = (2, 3), 8, 1
    maps = random_maps(layers=2, pictures=2, heads=3, tokens=7)
    found = mean_attention_distance(maps, grid, patch_size, prefix)
    places = [(row * patch_size, column * patch_size) for row in range(2) for column in range(3)]
    for layer, head in np.ndindex(2, 3):
        total = 0.0
        for b, query in np.ndindex(2, 6):
            weights = maps[layer][b, head, query + 1, 1:].numpy().astype(float)
            weights = weights / weights.sum()
            total += sum(w * math.dist(places[query], place) for w, place in zip(weights, places, strict=True))
        assert float(found[layer, head]) == pytest.approx(total / 12, rel=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="7 tokens does not fit 0 prefix tokens and a grid of 2x3"):
        class_attention_grid(torch.rand(1, 7, 7), (2, 3), prefix=0)
    with pytest.raises(ValueError, match="grid of 3x3"):
        mean_attention_distance(random_maps(1, 1, 1, 7), (3, 3), 16, prefix=1)
    with pytest.raises(ValueError, match="no maps"):
        attention_rollout([])
    with pytest.raises(ValueError, match="no maps"):
        mean_attention_distance([], (3, 3), 16, prefix=1)


def test_what_has_no_attention_of_all_tokens_is_refused() -> None:
    resnet = build_model(ResNetConfig(image_size=32, body=ResNetBody((1,), width=32), num_classes=2))
    with pytest.raises(ValueError, match="a ResNet has no attention to look at"):
        attention_maps(resnet, torch.zeros(1, 3, 32, 32))
    axial = ViT(ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, encoder="axial"))
    with pytest.raises(ValueError, match="an axial encoder attends along rows and columns"):
        attention_maps(axial, torch.zeros(1, 3, 8, 8))


def test_relative_positions_are_in_the_maps() -> None:
    """What the layer hands to its output projection is made of the maps and its values."""
    config = ViTConfig(
        image_size=(8, 12), patch_size=4, width=8, depth=2, heads=2, mlp_dim=8, position="relative",
        position_at="every", position_std=1.0,
    )  # fmt: skip
    model = ViT(config).eval()
    seen: list[torch.Tensor] = []
    layer = model.blocks[1].attention
    assert isinstance(layer, Attention)
    handles = [
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0])),
        layer.out.register_forward_pre_hook(lambda _, args: seen.append(args[0])),
    ]
    images = torch.rand(2, 3, 8, 12) * 2 - 1
    with torch.no_grad():
        model(images)
        for handle in handles:
            handle.remove()
        maps = attention_maps(model, images)[1]
        _, _, values = layer.project(seen[0])
        torch.testing.assert_close((maps @ values).transpose(1, 2).flatten(2), seen[1])
