"""One pass over images against the functions of `attention` and `embeddings`, and against closed forms."""

import weakref
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from inside import random_images, random_model
from torch import Tensor

from vitlab.inspection.attention import (
    attention_layers,
    attention_maps,
    attention_rollout,
    mean_attention_distance,
    prediction_grid,
    prediction_weights,
)
from vitlab.inspection.capture import Capture, capture
from vitlab.inspection.embeddings import token_components
from vitlab.models import ResNetBody, ResNetConfig, ViTConfig
from vitlab.models.variant import override
from vitlab.models.vit import ViT, build_model

BASE = ViTConfig(image_size=(8, 12), patch_size=4, width=16, depth=3, heads=2, mlp_dim=16, num_classes=5)
KINDS = {
    "class token": BASE,
    "class token and mean, no head": replace(BASE, pool="token+gap", num_classes=0),
    "MAP head": replace(BASE, pool="map", position="2d", position_at="every"),
    "axial": override(BASE, encoder="axial", registers=1),
    "hybrid": replace(BASE, image_size=(16, 24), patch_size=1, stem=ResNetBody((1, 1), width=32)),
}
ARRAYS = ("distances", "heads", "rollout", "rollout_plain", "components", "image_distances", "logits")


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_a_capture_equals_the_functions_on_all_maps(config: ViTConfig) -> None:
    model, images = random_model(config).train(), random_images(config, 5)
    captured = capture(model, [images[:2], images[2:]], keep=3)
    assert model.training
    model.eval()
    maps, weights = attention_maps(model, images), prediction_weights(model, images)
    first = [attention[:3] for attention in maps]
    grids = (config.grid, config.stride, config.num_prefix_tokens)
    with torch.no_grad():
        tokens = model.forward_features(images[:3])
        patches = tokens[:, config.num_prefix_tokens :].unflatten(1, config.grid).numpy()
        logits = model(images[:3]) if config.num_classes else torch.zeros(3, 0)
    layers = attention_layers(model)
    expected = Capture(
        count=5,
        layers=layers,
        distances=mean_attention_distance(maps, *grids).numpy(),
        heads=torch.stack([prediction_grid(attention, weights[:3], config.grid) for attention in first], 1).numpy(),
        rollout=prediction_grid(attention_rollout(first), weights[:3], config.grid).numpy(),
        rollout_plain=prediction_grid(attention_rollout(first, residual=False), weights[:3], config.grid).numpy(),
        components=token_components(patches),
        image_distances=np.stack([mean_attention_distance([a[i : i + 1] for a in maps], *grids) for i in range(3)]),
        logits=logits.numpy(),
    )
    assert (captured.count, captured.layers) == (expected.count, expected.layers)
    for name in ARRAYS:
        first, second = getattr(captured, name), getattr(expected, name)
        assert first.dtype == np.float32
        np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-4 if name == "components" else 1e-6)


def without_queries(config: ViTConfig) -> ViT:
    """Every token attends to all tokens alike."""
    model = random_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".qkv." in name:
                parameter[: config.width] = 0
    return model


@pytest.mark.parametrize("pool", ["token", "gap"])
def test_uniform_attention_has_the_closed_form(pool) -> None:
    config = ViTConfig(patch_size=32, width=8, depth=2, heads=2, mlp_dim=8, num_classes=3, pool=pool)
    captured = capture(without_queries(config), [random_images(config, 2)])
    assert captured.heads.shape[-2:] == (7, 7)
    assert captured.distances == pytest.approx(115.5, rel=1e-3)
    np.testing.assert_allclose(captured.heads, 1 / config.num_tokens, rtol=1e-4)
    np.testing.assert_allclose(captured.rollout_plain, 1 / config.num_tokens, rtol=1e-4)
    # With the residual, 1/4 of the weight of two layers stays on the token itself.
    mixed = (1 - 0.5**config.depth) / config.num_tokens
    direct = 0 if pool == "token" else 0.5**config.depth / config.num_patches
    np.testing.assert_allclose(captured.rollout, mixed + direct, rtol=1e-4)


def test_uniform_attention_along_an_axis_has_the_closed_form() -> None:
    config = ViTConfig(image_size=(64, 96), width=8, depth=1, heads=2, mlp_dim=8, num_classes=3, encoder="axial")
    captured = capture(without_queries(config), [random_images(config, 2)])
    assert captured.layers == ("1 rows", "1 columns")
    for patches, distances in zip((6, 4), captured.distances, strict=True):
        assert distances == pytest.approx(16 * (patches**2 - 1) / (3 * patches), rel=1e-4)
    # The columns' attention to the class token is out of the image, the rows' is lost on the way.
    assert captured.rollout_plain.sum() == pytest.approx(2 * (4 / 5 * 6 / 7 + 1 / 5 * 6 / 7), rel=1e-4)


def test_a_stream_is_not_stored() -> None:
    """At most one earlier batch is alive when the next is requested."""
    alive: list[weakref.ref] = []

    def stream() -> Iterator[Tensor]:
        for _ in range(6):
            assert sum(ref() is not None for ref in alive) <= 1
            images = random_images(BASE, 2)
            alive.append(weakref.ref(images))
            yield images
            del images

    captured = capture(random_model(BASE), stream(), keep=3)
    assert (captured.count, len(captured.rollout)) == (12, 3)


def test_invalid_inputs_raise() -> None:
    model = random_model(BASE)
    with pytest.raises(ValueError, match="no images"):
        capture(model, [])
    resnet = build_model(ResNetConfig(image_size=32, body=ResNetBody((1,), width=32), num_classes=2))
    with pytest.raises(ValueError, match="a ResNet has no attention"):
        capture(resnet, [torch.zeros(1, 3, 32, 32)])
    with torch.no_grad():
        model.embedding.bias.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        capture(model, [random_images(BASE, 1)])
