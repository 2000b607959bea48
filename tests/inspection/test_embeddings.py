"""Position similarity and principal components against plain numpy."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vitlab.inspection.embeddings import filter_components, filters_of, positions_of, token_components
from vitlab.models import ResNetBody, ViTConfig
from vitlab.models.variant import override
from vitlab.models.vit import ViT

BASE = ViTConfig(image_size=(8, 12), patch_size=4, width=32, depth=3, heads=2, mlp_dim=8, num_classes=5)


def test_components_are_the_principal_ones() -> None:
    weight = torch.randn(40, 3, 2, 2, requires_grad=True) * torch.linspace(0.2, 2, 12).reshape(3, 2, 2)
    components = filter_components(weight, n=5).numpy()
    assert components.shape == (5, 2, 2, 3)
    filters = weight.detach().numpy().astype(float).transpose(0, 2, 3, 1).reshape(40, 12)
    values, vectors = np.linalg.eigh(np.cov(filters.T))
    for i, component in enumerate(components):
        expected = vectors[:, np.argsort(-values)[i]]
        expected = expected * np.sign(expected[np.abs(expected).argmax()])
        expected = (expected - expected.min()) / (expected.max() - expected.min())
        np.testing.assert_allclose(component.reshape(-1), expected, atol=1e-4)


def test_filters_are_those_of_the_patch_embedding_or_of_a_hybrids_first_convolution() -> None:
    plain = ViT(BASE).to(torch.bfloat16)  # 28 of its 31, fewer where there are fewer dimensions
    assert np.array_equal(filters_of(plain), filter_components(plain.embedding.weight).numpy())
    assert filter_components(torch.randn(64, 3, 2, 2)).shape == (12, 2, 2, 3)
    model = ViT(replace(BASE, image_size=32, patch_size=1, stem=ResNetBody((1,), width=64)))
    assert model.stem is not None
    weight = model.stem.root.weight.detach().double()
    flat = weight.flatten(1)
    standard = ((flat - flat.mean(1, keepdim=True)) / flat.std(1, correction=0, keepdim=True)).reshape(weight.shape)
    components = filters_of(model)
    assert components.shape == (28, 7, 7, 3)
    np.testing.assert_allclose(components[:4], filter_components(standard.float()).numpy()[:4], atol=5e-3)


@pytest.mark.parametrize(
    ("position", "at", "copies", "prefix"),
    [("1d", "stem", 1, {"distilled": True, "registers": 1}), ("2d", "every", 3, {"pool": "gap"})],
)
def test_positions_of_a_model(position, at, copies: int, prefix: dict) -> None:
    """What the model adds to tokens of zeros, by cosines."""
    model = ViT(override(BASE, position=position, position_at=at, position_std=1.0, **prefix))
    similarity = positions_of(model)
    assert similarity is not None
    assert similarity.shape == (copies, 2, 3, 2, 3)
    for layer in range(copies):
        with torch.no_grad():
            added = model.position(torch.zeros(1, BASE.num_patches + model.config.num_prefix_tokens, 32), layer)
        rows = added[0, model.config.num_prefix_tokens :].numpy().astype(float)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        np.testing.assert_allclose(similarity[layer].reshape(6, 6), rows @ rows.T, atol=1e-5)


@pytest.mark.parametrize(("position", "at"), [("none", "stem"), ("relative", "every"), ("relative", "shared")])
def test_positions_that_are_not_added_have_no_similarity(position, at) -> None:
    assert positions_of(ViT(replace(BASE, position=position, position_at=at))) is None


def plain_components(tokens: np.ndarray) -> np.ndarray:
    """By singular values."""
    rows = tokens.reshape(-1, tokens.shape[-1]).astype(float)
    rows = rows - rows.mean(0)
    u, s, _ = np.linalg.svd(rows, full_matrices=False)
    colors = np.full((len(rows), 3), 0.5)
    for i in range(min(3, (s > 1e-5 * s[0]).sum())):
        score = u[:, i] * s[i]
        score = score * np.sign(next(x for x in score if abs(x) > 0.999 * max(abs(score))))
        low, high = np.quantile(score, [0.01, 0.99])
        colors[:, i] = np.clip((score - low) / (high - low), 0, 1)
    return colors.reshape(*tokens.shape[:3], 3)


@pytest.mark.parametrize("shape", [(4, 5, 6, 8), (2, 2, 3, 40), (1, 1, 2, 6), (2, 1, 2, 2)])
def test_token_components_equal_plain_numpy(shape: tuple[int, ...]) -> None:
    """More patches than numbers, fewer, and fewer than three of either."""
    rng = np.random.default_rng(0)
    tokens = (rng.standard_normal(shape) * np.linspace(3, 1, shape[-1]) + 5).astype(np.float32)
    colors = token_components(tokens)
    assert colors.dtype == np.float32
    np.testing.assert_allclose(colors, plain_components(tokens), atol=1e-4)


def test_one_far_patch_does_not_take_all_the_contrast() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((1, 20, 20, 1)).astype(np.float32)
    tokens[0, 0, 0] = 1000
    assert token_components(tokens)[..., 0].std() > 0.2
    assert token_components(tokens)[0, 0, 0, 0] == 1
