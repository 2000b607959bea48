"""The ceiling computes the products that the models count, no more and no less."""

from collections import Counter

import pytest
import torch

from vitlab.cost.ceiling import Product, copy_bandwidth, product_step, products
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig

SMALL = ViTConfig(image_size=16, patch_size=4, width=8, depth=2, heads=2, mlp_dim=12, num_classes=5)
BODY = ResNetBody(layers=(1, 2), width=32, version="v2")
CONFIGS: dict[str, ModelConfig] = {
    "ViT": SMALL,
    "mean": ViTConfig(image_size=(8, 16), patch_size=4, width=8, depth=1, heads=2, mlp_dim=12, pool="gap"),
    "relative": ViTConfig(
        image_size=16, patch_size=4, width=8, depth=1, heads=2, mlp_dim=12, position="relative", position_at="every"
    ),
    "axial": ViTConfig(image_size=16, patch_size=4, width=8, depth=1, heads=2, mlp_dim=12, encoder="axial"),
    "ResNet": ResNetConfig(image_size=33, body=BODY, num_classes=5),
    "hybrid": ViTConfig(
        image_size=32, patch_size=1, width=8, depth=1, heads=2, mlp_dim=12, stem=ResNetBody(layers=(1, 1), width=32)
    ),
}


def macs(found: Counter[Product]) -> int:
    return sum(each.macs * times for each, times in found.items())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_products_are_those_of_the_formula(config: ModelConfig) -> None:
    assert macs(products(config, 3, training=False)) == 3 * config.forward_macs
    assert macs(products(config, 3, training=True)) == 9 * config.forward_macs


def test_shapes_of_a_vit() -> None:
    tokens, width = 3 * 17, 8
    assert products(SMALL, 3, training=False) == Counter(
        {
            Product(1, 3 * 16, 48, width): 1,  # E of Eq. 1
            Product(1, tokens, width, 3 * width): 2,
            Product(3 * 2, 17, 4, 17): 2,
            Product(3 * 2, 17, 17, 4): 2,
            Product(1, tokens, width, width): 2,
            Product(1, tokens, width, 12): 2,
            Product(1, tokens, 12, width): 2,
            Product(1, 3, width, 5): 1,
        }
    )


def test_a_step_computes_each_as_often_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found, seen = products(SMALL, 3, training=True), Counter[Product]()
    product = torch.matmul

    def counted(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        *lead, m, k = a.shape
        seen[Product(lead[0] if lead else 1, m, k, b.shape[-1])] += 1
        assert (a.dtype, out.dtype) == (torch.bfloat16, torch.bfloat16)
        return product(a, b, out=out)

    monkeypatch.setattr(torch, "matmul", counted)
    product_step(found, torch.bfloat16, torch.device("cpu"))()
    assert seen == found


def test_copying_takes_time() -> None:
    assert 1e8 < copy_bandwidth(torch.device("cpu"), rounds=1) < 1e13
