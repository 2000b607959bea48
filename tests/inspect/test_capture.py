"""One pass over images against the functions of `attention` and `embeddings`, and against closed forms."""

import gc
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitlab.inspect.attention import (
    answer_grid,
    answer_weights,
    attention_layers,
    attention_maps,
    attention_rollout,
    mean_attention_distance,
)
from vitlab.inspect.capture import Capture, capture
from vitlab.inspect.embeddings import token_components
from vitlab.models import ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.models.vit import ViT

BASE = ViTConfig(image_size=(8, 12), patch_size=4, width=16, depth=3, heads=2, mlp_dim=16, num_classes=5)
KINDS = {
    "class token": BASE,
    "mean, registers": replace(BASE, pool="gap", registers=2),
    "class token and mean, no head": replace(BASE, pool="token+gap", num_classes=0),
    "distillation token": replace(BASE, distilled=True),
    "MAP head": replace(BASE, pool="map", position="2d", position_at="every"),
    "relative positions": replace(BASE, position="relative", position_at="shared", position_std=1.0),
    "axial": replace(BASE, encoder="axial", registers=1),
    "hybrid": replace(BASE, image_size=(16, 24), patch_size=1, stem=ResNetBody((1, 1), width=32)),
}


def random_model(config: ViTConfig) -> ViT:
    """A model whose attention is far from uniform."""
    model = ViT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model


def random_images(config: ViTConfig, n: int) -> Tensor:
    return torch.rand(n, 3, *config.image_hw) * 2 - 1


def compare(found: Capture, expected: Capture) -> None:
    assert (found.count, found.layers) == (expected.count, expected.layers)
    names = ["distances", "heads", "rollout", "rollout_plain", "components", "image_distances", "probabilities"]
    for name in names:
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 if name == "components" else 1e-6)


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_a_capture_equals_the_functions_on_all_maps(config: ViTConfig) -> None:
    model, images = random_model(config).train(), random_images(config, 5)
    seen = capture(model, [images[:2], images[2:]], keep=3)
    assert model.training
    model.eval()
    maps, (h, w), k = attention_maps(model, images), config.grid, config.heads
    weights = answer_weights(model, images)
    shown = [attention[:3] for attention in maps]
    assert seen.count == 5
    assert seen.layers == attention_layers(model)
    assert seen.heads.shape == (3, len(maps), k, h, w)
    for layer, attention in enumerate(shown):
        grid = answer_grid(attention, weights[:3], config.grid)
        np.testing.assert_allclose(seen.heads[:, layer], grid.numpy(), atol=1e-6)
    for residual, found in ((True, seen.rollout), (False, seen.rollout_plain)):
        grid = answer_grid(attention_rollout(shown, residual), weights[:3], config.grid)
        np.testing.assert_allclose(found, grid.numpy(), atol=1e-6)
    place = (config.grid, config.stride, config.num_prefix_tokens)
    np.testing.assert_allclose(seen.distances, mean_attention_distance(maps, *place).numpy(), rtol=1e-5)
    for image in range(3):
        alone = mean_attention_distance([attention[image : image + 1] for attention in maps], *place)
        np.testing.assert_allclose(seen.image_distances[image], alone.numpy(), rtol=1e-4)
    with torch.no_grad():
        tokens = model.forward_features(images[:3])
        patches = tokens[:, config.num_prefix_tokens :].reshape(3, h, w, -1).numpy()
        np.testing.assert_allclose(seen.components, token_components(patches), atol=1e-4)
        if not config.num_classes:
            assert seen.probabilities is None
        else:
            assert seen.probabilities is not None
            expected = torch.softmax(model(images[:3]), dim=-1).numpy()
            np.testing.assert_allclose(seen.probabilities, expected, atol=1e-6)
    for array in (seen.distances, seen.heads, seen.rollout, seen.rollout_plain, seen.components):
        assert array.dtype == np.float32


@settings(max_examples=10)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any), st.integers(1, 8))
def test_batches_do_not_matter(sizes: list[int], keep: int) -> None:
    torch.manual_seed(0)
    config = KINDS["MAP head"]
    model, images = random_model(config), random_images(config, sum(sizes))
    ends = list(itertools.accumulate(sizes))
    batches = [images[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    compare(capture(model, batches, keep=keep), capture(model, [images], keep=keep))


@pytest.mark.parametrize(("grid", "patch_size", "pixels"), [((14, 14), 16, 116.5), ((7, 7), 32, 115.5)])
@pytest.mark.parametrize("pool", ["token", "gap"])
def test_uniform_attention_has_the_closed_form(grid: tuple[int, int], patch_size: int, pixels: float, pool) -> None:
    config = ViTConfig(patch_size=patch_size, width=8, depth=2, heads=2, mlp_dim=8, num_classes=3, pool=pool)
    model = without_queries(config)
    seen = capture(model, [random_images(config, 2)])
    assert seen.heads.shape[-2:] == grid
    assert seen.distances == pytest.approx(pixels, rel=1e-3)
    np.testing.assert_allclose(seen.heads, 1 / config.num_tokens, rtol=1e-4)
    np.testing.assert_allclose(seen.rollout_plain, 1 / config.num_tokens, rtol=1e-4)
    # Half of each layer stays where it is: with a class token three quarters of 1 / T are at every patch.
    share = (1 - 0.5**config.depth) / config.num_tokens
    own = 0 if pool == "token" else 0.5**config.depth / config.num_patches
    np.testing.assert_allclose(seen.rollout, share + own, rtol=1e-4)


def test_uniform_attention_along_an_axis_has_the_closed_form() -> None:
    config = ViTConfig(image_size=(64, 96), width=8, depth=1, heads=2, mlp_dim=8, num_classes=3, encoder="axial")
    seen = capture(without_queries(config), [random_images(config, 2)])
    assert seen.layers == ("1 rows", "1 columns")
    for places, distances in zip((6, 4), seen.distances, strict=True):
        assert distances == pytest.approx(16 * (places**2 - 1) / (3 * places), rel=1e-4)
    # The columns' attention to the class token is out of the image, the rows' is lost on the way.
    assert seen.rollout_plain.sum() == pytest.approx(2 * (4 / 5 * 6 / 7 + 1 / 5 * 6 / 7), rel=1e-4)


def without_queries(config: ViTConfig) -> ViT:
    """Every token looks at all tokens alike."""
    model = random_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".qkv." in name:
                parameter[: config.width] = 0
    return model


def test_a_stream_is_not_stored() -> None:
    """At most one earlier batch is alive when the next is requested."""
    model = random_model(BASE)
    alive: list[weakref.ref] = []

    def stream() -> Iterator[Tensor]:
        for _ in range(6):
            gc.collect()
            assert sum(ref() is not None for ref in alive) <= 1
            images = random_images(BASE, 2)
            alive.append(weakref.ref(images))
            yield images
            del images

    seen = capture(model, stream(), keep=3)
    assert seen.count == 12
    assert len(seen.rollout) == 3


def test_bfloat16_is_close() -> None:
    config = KINDS["MAP head"]
    model, images = random_model(config), random_images(config, 3)
    exact = capture(model, [images])
    with torch.autocast("cpu", torch.bfloat16):
        cast = capture(model, [images])
    half = capture(model.to(torch.bfloat16), [images])
    for seen in (cast, half):
        assert seen.rollout.dtype == np.float32
        np.testing.assert_allclose(seen.distances, exact.distances, rtol=0.1)
        assert np.abs(seen.rollout - exact.rollout).max() < 0.05


def test_invalid_inputs_raise() -> None:
    model = random_model(BASE)
    with pytest.raises(ValueError, match="no images"):
        capture(model, [])
    with pytest.raises(ValueError, match="no images"):
        capture(model, iter([torch.zeros(0, 3, 8, 12)]))
    with pytest.raises(ValueError, match="keep is 0"):
        capture(model, [random_images(BASE, 1)], keep=0)
    with pytest.raises(ValueError, match="8x12"):
        capture(model, [torch.zeros(1, 3, 12, 8)])
    resnet = build_model(ResNetConfig(image_size=32, body=ResNetBody((1,), width=32), num_classes=2))
    with pytest.raises(ValueError, match="a ResNet has no attention"):
        capture(resnet, [torch.zeros(1, 3, 32, 32)])
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        capture(model, [random_images(BASE, 1)])
