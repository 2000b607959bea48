"""Maps, rollout and distance against plain numpy, and against what the model's attention computes."""

import math
import weakref
from dataclasses import replace
from typing import Any

import jaxtyping
import numpy as np
import pytest
import scipy.ndimage
import torch
from inside import random_images, random_model
from PIL import Image
from torch import Tensor, nn

from vitlab.inspection import attention
from vitlab.inspection.attention import (
    attention_layers,
    attention_maps,
    attention_rollout,
    head_distances,
    mean_attention_distance,
    patch_distances,
    prediction_grid,
    prediction_weights,
    visit_attention,
)
from vitlab.inspection.figures import masked
from vitlab.models import ResNetBody, ResNetConfig, Rotary, ViTConfig
from vitlab.models.attention import Attention
from vitlab.models.position import resize_positions
from vitlab.models.variant import override
from vitlab.models.vit import ViT, build_model

BASE = ViTConfig(image_size=(8, 12), patch_size=4, width=16, depth=2, heads=2, mlp_dim=16, num_classes=5)
AXIAL = replace(BASE, image_size=(12, 20), encoder="axial")
KINDS = {
    "class token, wider than high": replace(BASE, image_size=(12, 20), depth=3, heads=4),
    "dropout": replace(BASE, dropout=0.5, stochastic_depth=0.5),
    "hybrid": replace(BASE, image_size=(32, 48), patch_size=1, stem=ResNetBody((1, 1), width=32)),
    "relative positions, shared, registers": override(
        BASE, position="relative", position_at="shared", position_std=1.0, registers=2, pool="gap"
    ),
    "rotary positions, registers": override(BASE, rotary=Rotary(), registers=2),
    "MAP head, registers": override(BASE, position="sincos2d", pool="map", registers=3),
    "distillation token": override(BASE, distilled=True),
    "class token and mean": override(BASE, pool="token+gap", class_position=False),
    "axial": AXIAL,
    "axial, higher than wide, registers": override(AXIAL, image_size=(20, 8), distilled=True, registers=2),
}


class Sublayer:
    """Inputs and outputs of one attention layer, recorded by hooks; of an axial one over all tokens."""

    def __init__(self, attention: Attention, model: ViT, name: str) -> None:
        self.attention, self.config, self.along = attention, model.config, name.partition(" ")[2]
        attention.register_forward_hook(self.record)

    def record(self, _module: object, args: Any, out: Tensor) -> None:
        _, positions, _ = args
        self.positions = None if positions is None else positions.numpy()
        self.tokens, self.out = self.all_tokens(args[0]).numpy(), self.all_tokens(out)

    def all_tokens(self, tokens: Tensor) -> Tensor:
        """[B n, p + s, D] of n lines to [B, T, D]; the copies of the prefix averaged."""
        if not self.along:
            return tokens
        p, (h, w) = self.config.num_prefix_tokens, self.config.grid
        rows = self.along == "rows"
        tokens = tokens.unflatten(0, (-1, h if rows else w))
        patches = tokens[:, :, p:] if rows else tokens[:, :, p:].transpose(1, 2)
        return torch.cat([tokens[:, :, :p].mean(1), patches.flatten(1, 2)], dim=1)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """The map and the values, query by query, in plain numpy."""
        config, weight, bias = self.config, self.attention.qkv.weight.numpy(), self.attention.qkv.bias.numpy()
        p, (h, w), k = config.num_prefix_tokens, config.grid, config.heads
        qkv = self.tokens.astype(float) @ weight.T.astype(float) + bias
        q, keys, v = qkv.reshape(len(qkv), config.num_tokens, 3, k, -1).transpose(2, 0, 3, 1, 4)
        if config.variant.rotary:
            assert self.positions is not None
            cos, sin = np.split(self.positions, 2, axis=-1)
            for x in (q, keys):
                first, second = np.split(x[:, :, p:], 2, axis=-1)
                turned = (first + 1j * second) * (cos + 1j * sin)
                x[:, :, p:] = np.concatenate([turned.real, turned.imag], axis=-1)
        logits = q @ keys.swapaxes(-1, -2)
        if config.position == "relative":
            assert self.positions is not None
            for query, key in np.ndindex(h * w, h * w):
                offset = self.positions[h * w - 1 + key - query]
                logits[:, :, p + query, p + key] += q[:, :, p + query] @ offset
        logits /= math.sqrt(q.shape[-1])
        maps = np.zeros_like(logits)
        patches = np.arange(h * w).reshape(h, w)
        lines = {"rows": patches, "columns": patches.T, "": patches.reshape(1, -1)}[self.along]
        for line in lines:
            keys_of_line = [*range(p), *(p + line)]
            for query in keys_of_line:
                power = np.exp(logits[:, :, query, keys_of_line])
                copies = len(lines) if query < p else 1  # a copy of the prefix is in every line
                maps[:, :, query, keys_of_line] += power / power.sum(-1, keepdims=True) / copies
        return maps, v


def random_maps(layers: int, images: int, heads: int, tokens: int) -> list[Tensor]:
    return [torch.softmax(2 * torch.randn(images, heads, tokens, tokens), dim=-1) for _ in range(layers)]


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_maps_equal_plain_numpy_and_reproduce_the_fused_output(config: ViTConfig) -> None:
    model, images = random_model(config).eval(), random_images(config)
    names = attention_layers(model)
    halves = (" rows", " columns") if config.encoder == "axial" else ("",)
    assert names == tuple(f"{block}{half}" for block in range(1, config.depth + 1) for half in halves)
    attentions = [module for module in model.blocks.modules() if isinstance(module, Attention)]
    sublayers = [Sublayer(attention, model, name) for attention, name in zip(attentions, names, strict=True)]
    with torch.no_grad():
        for weights, sublayer in zip(attention_maps(model, images), sublayers, strict=True):
            assert weights.shape == (3, config.heads, config.num_tokens, config.num_tokens)
            expected, values = sublayer.expected()
            np.testing.assert_allclose(weights.numpy(), expected, atol=1e-5)
            mixed = (weights @ torch.from_numpy(values).float()).transpose(1, 2).flatten(2)
            torch.testing.assert_close(sublayer.attention.out(mixed), sublayer.out, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["class token, wider than high", "axial"])
def test_a_visitor_gets_each_layer_as_soon_as_it_ran_and_no_map_is_stored(kind: str) -> None:
    model, images = random_model(KINDS[kind]).eval(), random_images(KINDS[kind])
    ran: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            module.register_forward_hook(lambda *_, name=name: ran.append(name))
    alive: list[weakref.ref] = []

    def visit(layer: int, attention: Tensor) -> None:
        assert layer == len(alive) == len(ran), "the layer above must not have run yet"
        assert not any(ref() is not None for ref in alive), "maps of lower layers must be gone"
        alive.append(weakref.ref(attention))

    tokens = visit_attention(model, images, visit)
    assert len(alive) == len(attention_layers(model))
    with torch.no_grad():
        assert torch.equal(tokens, model.forward_features(images))


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(KINDS["relative positions, shared, registers"], pool="map")
    model, images = random_model(config).eval(), random_images(config)
    distances = patch_distances(model.config.grid, 4)

    def numbers() -> list[Tensor]:
        maps = attention_maps(model, images)
        return [*maps, prediction_weights(model, images), *(head_distances(attention, distances) for attention in maps)]

    expected = numbers()
    assert attention._images_per_chunk(expected[0]) > 3
    monkeypatch.setattr(attention, "_images_per_chunk", lambda maps: 2)
    for one, other in zip(numbers(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_model_keeps_its_state_even_after_an_error() -> None:
    config = KINDS["dropout"]
    model, images = random_model(config).train(), random_images(config)
    model.blocks[0].eval()  # modes that differ are restored one by one
    modes = [module.training for module in model.modules()]
    first, second = attention_maps(model, images), attention_maps(model, images)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True)), "dropout must be off"
    assert not first[0].requires_grad
    with pytest.raises(ValueError, match="8x12"):
        attention_maps(model, torch.zeros(1, 3, 16, 16))
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert torch.is_grad_enabled()


def test_maps_are_float32_in_lower_precision() -> None:
    model, images = random_model(BASE), random_images(BASE)
    exact = attention_maps(model, images)
    with torch.autocast("cpu", torch.bfloat16):
        cast = attention_maps(model, images)
    half = attention_maps(model.to(torch.bfloat16), images)
    for maps in (cast, half):
        for weights in maps:
            assert weights.dtype == torch.float32
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-5, rtol=0)
        assert 0 < (maps[0] - exact[0]).abs().max() < 0.1


def test_compiled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the tests' checks cannot be compiled
    model, images = random_model(replace(BASE, depth=1)).eval(), random_images(BASE)
    expected = attention_maps(model, images)
    for block in model.blocks:
        block.compile(backend="eager")
    with torch.no_grad():
        model(images)  # compiled before the hooks come
    assert all(torch.equal(*maps) for maps in zip(attention_maps(model, images), expected, strict=True))


@pytest.mark.parametrize("residual", [True, False])
def test_rollout_equals_plain_numpy(residual: bool) -> None:
    maps = random_maps(layers=4, images=2, heads=3, tokens=7)
    rolled = attention_rollout(maps, residual=residual)
    for b in range(2):
        expected = np.eye(7)
        for layer in maps:
            mean = sum(layer[b, head].numpy().astype(float) for head in range(3)) / 3
            expected = (0.5 * mean + 0.5 * np.eye(7) if residual else mean) @ expected
        np.testing.assert_allclose(rolled[b].numpy(), expected, atol=1e-6)


def test_the_masked_image_is_that_of_the_authors() -> None:
    """As one of them described Fig. 6 when asked: the rollout divided by its maximum, resized by Lanczos, blurred by a
    Gaussian of one patch's side, stretched to 0..1 and multiplied with the image. Deviation: ours is bicubic and not
    blurred, with full brightness from the 95th percentile on, so that its peak is a plateau."""
    side, patch = 12, 16
    rows, columns = np.mgrid[:side, :side]
    attention = np.exp(-((rows - 4) ** 2 + (columns - 7) ** 2) / 8) + 0.3 * np.exp(-((rows - 9) ** 2 + columns**2) / 6)
    size = (side * patch, side * patch)
    mask = Image.fromarray((attention / attention.max()).astype(np.float32)).resize(size, Image.Resampling.LANCZOS)
    blurred = scipy.ndimage.gaussian_filter(np.asarray(mask), patch)
    expected = (blurred - blurred.min()) / np.ptp(blurred)
    ours = masked(np.full((*size, 3), 255, np.uint8), attention)[..., 0] / 255
    blurred = scipy.ndimage.gaussian_filter(ours, patch)
    assert np.corrcoef(blurred.ravel(), expected.ravel())[0, 1] > 0.999
    peaks = [np.argwhere(each >= each.max() - 1 / 255).mean(axis=0) for each in (ours, expected)]
    assert np.abs(peaks[0] - peaks[1]).max() < 1


def plain_prediction_weights(model: ViT, images: Tensor) -> np.ndarray:
    """Written out for each pooling: [B, T]."""
    config, d = model.config, model.config.width
    if model.map is not None:
        with torch.no_grad():
            tokens = model.forward_features(images).numpy().astype(float)
            qkv = model.map.attention.qkv
            weight, bias = qkv.weight.numpy().astype(float), qkv.bias.numpy().astype(float)
            q, side = model.map.probe[0, 0].numpy() @ weight[:d].T + bias[:d], d // config.heads
        expected = np.zeros(tokens.shape[:2])
        for b, head in np.ndindex(len(tokens), config.heads):
            part = slice(d + head * side, d + (head + 1) * side)
            power = np.exp((tokens[b] @ weight[part].T + bias[part]) @ q[head * side :][:side] / math.sqrt(side))
            expected[b] += power / power.sum() / config.heads
        return expected
    prefix, n = config.num_prefix_tokens, config.num_patches
    token, patches = np.eye(config.num_tokens), np.array([0.0] * prefix + [1 / n] * n)
    if config.variant.distilled:
        row = (token[0] + token[1]) / 2
    else:
        row = {"token": token[0], "gap": patches, "token+gap": (token[0] + patches) / 2}[config.pool]
    return np.tile(row, (len(images), 1))


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_prediction_weights_are_those_of_the_pooling(config: ViTConfig) -> None:
    """And exactly of the tokens that `forward_head` reads, which its gradient shows."""
    model, images = random_model(config).eval(), random_images(config)
    weights, expected = prediction_weights(model, images), plain_prediction_weights(model, images)
    np.testing.assert_allclose(weights.numpy(), expected, atol=1e-5)
    tokens = torch.randn(3, config.num_tokens, config.width, requires_grad=True)
    model.forward_head(tokens, pre_logits=True).sum().backward()
    assert tokens.grad is not None
    assert ((tokens.grad.abs().sum(-1) > 0) == (weights > 0)).all()
    attention = torch.rand(3, 2, config.num_tokens, config.num_tokens)
    rows = np.einsum("bt,bkts->bks", expected, attention.numpy())[..., config.num_prefix_tokens :]
    grid = prediction_grid(attention, weights, config.grid).numpy()
    np.testing.assert_allclose(grid, rows.reshape(3, 2, *config.grid), rtol=1e-3)


@pytest.mark.parametrize(("grid", "prefix"), [((2, 3), 1), ((3, 1), 0), ((2, 2), 6)])
def test_distance_equals_plain_numpy(grid: tuple[int, int], prefix: int) -> None:
    patch_size, n = 8, math.prod(grid)
    maps = random_maps(layers=2, images=2, heads=3, tokens=prefix + n)
    distances = mean_attention_distance(maps, grid, patch_size, prefix)
    corners = [(row * patch_size, column * patch_size) for row in range(grid[0]) for column in range(grid[1])]
    for layer, head in np.ndindex(2, 3):
        total = 0.0
        for b, query in np.ndindex(2, n):
            weights = maps[layer][b, head, query + prefix, prefix:].numpy().astype(float)
            weights = weights / weights.sum()
            total += sum(w * math.dist(corners[query], corner) for w, corner in zip(weights, corners, strict=True))
        assert float(distances[layer, head]) == pytest.approx(total / (2 * n), rel=1e-5)


def test_distance_without_attention_to_patches_is_zero() -> None:
    attention = torch.zeros(1, 1, 7, 7)
    attention[..., 0] = 1
    assert float(head_distances(attention, patch_distances((2, 3), 16))) == 0


def test_wrong_grids_and_resnets_raise() -> None:
    with pytest.raises(ValueError, match="grid of 3x3"):
        mean_attention_distance(random_maps(1, 1, 1, 7), (3, 3), 16, prefix=1)
    resnet = build_model(ResNetConfig(image_size=32, body=ResNetBody((1,), width=32), num_classes=2))
    with pytest.raises(ValueError, match="a ResNet has no attention"):
        attention_layers(resnet)


def with_adapters(model: ViT) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["qkv"]))


def with_compiled_blocks(model: ViT) -> ViT:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block)  # pyright: ignore[reportArgumentType]
    return model


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, with_adapters, with_compiled_blocks])
def test_maps_of_a_wrapped_model(wrap: Any) -> None:
    model, images = random_model(BASE), random_images(BASE)
    expected = attention_maps(model, images)
    weights = prediction_weights(model, images)
    wrapped = wrap(model)
    assert attention_layers(wrapped) == ("1", "2")
    for ours, theirs in zip(attention_maps(wrapped, images), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(prediction_weights(wrapped, images), weights)


@pytest.mark.parametrize("settings", [{"rotary": Rotary()}, {"position": "1d", "pool": "gap"}])
def test_maps_of_images_of_another_size(settings: Any) -> None:
    """Of a model that takes any, as of one of that size: also of a grid with as many patches, 3x2 instead of 2x3."""
    model = random_model(override(BASE, dynamic_image_size=True, **settings))
    for size in ((12, 8), (16, 20)):
        fixed = ViT(replace(model.config, image_size=size, dynamic_image_size=False)).eval()
        positions = resize_positions(model.state_dict(), model.config, fixed.config.grid)
        fixed.load_state_dict(model.state_dict() | positions)
        images = torch.rand(2, 3, *size)
        for ours, theirs in zip(attention_maps(model, images), attention_maps(fixed, images), strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(prediction_weights(model, images), prediction_weights(fixed, images))
