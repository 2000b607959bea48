"""One pass over images against the functions of `attention` and `embeddings`."""

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
from vitlab.inspection.capture import capture
from vitlab.inspection.embeddings import token_components
from vitlab.models import ResNetBody, ViTConfig
from vitlab.models.variant import override

BASE = ViTConfig(image_size=(8, 12), patch_size=4, width=16, depth=3, heads=2, mlp_dim=16, num_classes=5)
KINDS = {
    "class token": BASE,
    "class token and mean, no head": replace(BASE, pool="token+gap", num_classes=0),
    "MAP head": replace(BASE, pool="map", position="2d", position_at="every"),
    "axial": override(BASE, encoder="axial", registers=1),
    "hybrid": replace(BASE, image_size=(16, 24), patch_size=1, stem=ResNetBody((1, 1), width=32)),
}


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
        logits = model(images[:3]) if config.num_classes else torch.zeros(3, 0)
    rollouts = {"rollout": attention_rollout(first), "rollout_plain": attention_rollout(first, residual=False)}
    expected = {
        "distances": mean_attention_distance(maps, *grids),
        "heads": torch.stack([prediction_grid(attention, weights[:3], config.grid) for attention in first], 1),
        **{name: prediction_grid(rollout, weights[:3], config.grid) for name, rollout in rollouts.items()},
        "components": token_components(tokens[:, config.num_prefix_tokens :].unflatten(1, config.grid).numpy()),
        "image_distances": [mean_attention_distance([a[i : i + 1] for a in maps], *grids).numpy() for i in range(3)],
        "logits": logits,
    }
    assert (captured.count, captured.layers) == (5, attention_layers(model))
    for name, array in expected.items():
        ours = getattr(captured, name)
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, np.asarray(array), rtol=1e-4, atol=1e-4 if name == "components" else 1e-6)


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
    with torch.no_grad():
        model.embedding.bias.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        capture(model, [random_images(BASE, 1)])
