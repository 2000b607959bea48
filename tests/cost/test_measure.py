"""Interleaved timing, the products of a model, and the commit of a measurement."""

import subprocess
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.cost import measure
from vitlab.cost.measure import (
    Product,
    commit,
    count_products,
    environment,
    product_flops,
    products_step,
    ratio,
    spread,
    time_interleaved,
)
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig

SMALL = ViTConfig(image_size=16, patch_size=4, width=32, depth=2, heads=2, mlp_dim=64, num_classes=5)
CONFIGS: dict[str, ModelConfig] = {
    "ViT": SMALL,
    "mean": ViTConfig(image_size=(8, 16), patch_size=4, width=8, depth=1, heads=2, mlp_dim=12, pool="gap"),
    "relative": ViTConfig(
        image_size=16, patch_size=4, width=8, depth=1, heads=2, mlp_dim=12, position="relative", position_at="every"
    ),
    "axial": ViTConfig(image_size=16, patch_size=4, width=8, depth=1, heads=2, mlp_dim=12, encoder="axial"),
    "ResNet": ResNetConfig(image_size=33, body=ResNetBody(layers=(1, 2), width=32, version="v2"), num_classes=5),
    "hybrid": ViTConfig(
        image_size=32, patch_size=1, width=8, depth=1, heads=2, mlp_dim=12, stem=ResNetBody(layers=(1, 1), width=32)
    ),
}


def test_rounds_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[tuple[str, int]] = []

    def timer(step: Callable[[], str]) -> Any:
        def timeit(count: int) -> Any:
            counts.append((step(), count))
            return types.SimpleNamespace(mean={"slow": 0.02, "fast": 0.002}[step()])

        return types.SimpleNamespace(timeit=timeit)

    monkeypatch.setattr(measure, "timer", timer)
    rates = time_interleaved({"slow": lambda: "slow", "fast": lambda: "fast"}, 0.03, 2)
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0])["quartiles"] == [2.0, 4.0]
    assert ratio([4.0, 2.0], [2.0, 1.0])["all"] == [2.0, 2.0]  # by rounds
    assert rates == {"slow": pytest.approx([50, 50]), "fast": pytest.approx([500, 500])}
    assert counts == [("slow", 1), ("fast", 1), *2 * [("slow", 2), ("fast", 15)]]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_products_are_those_of_the_formula(config: ModelConfig) -> None:
    """With their gradients in training; without attention there are the dense layers' alone."""
    for training, factor in ((False, 3), (True, 9)):
        products = count_products(config, 3, training)
        macs = sum(p.batch * p.m * p.k * p.n * times for p, times in products.items())
        assert macs == factor * config.forward_macs
        assert product_flops(products) == 2 * macs
        if config is SMALL:
            dense = count_products(SMALL, 3, training, attention=False)
            attention = 2 * 2 * (3 * 2) * 17 * 17 * 16  # two layers, two products each
            assert product_flops(products) - product_flops(dense) == factor // 3 * 2 * attention
            assert all(product.batch == 1 for product in dense)


def test_shapes_of_a_vit() -> None:
    tokens, width = 3 * 17, 32
    assert count_products(SMALL, 3, training=False) == Counter(
        {
            Product(1, 3 * 16, 48, width): 1,  # E of Eq. 1
            Product(1, tokens, width, 3 * width): 2,
            Product(3 * 2, 17, 16, 17): 2,
            Product(3 * 2, 17, 17, 16): 2,
            Product(1, tokens, width, width): 2,
            Product(1, tokens, width, 64): 2,
            Product(1, tokens, 64, width): 2,
            Product(1, 3, width, 5): 1,
        }
    )


def test_a_step_computes_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    products, seen, matmul = count_products(SMALL, 3, training=True), Counter[Product](), torch.matmul

    def counted(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        *batch, m, k = a.shape
        seen[Product(batch[0] if batch else 1, m, k, b.shape[-1])] += 1
        assert (a.dtype, out.dtype) == (torch.bfloat16, torch.bfloat16)
        return matmul(a, b, out=out)

    monkeypatch.setattr(torch, "matmul", counted)
    products_step(products, torch.bfloat16, torch.device("cpu"))()
    assert seen == products


def test_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "src" / "vitlab" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text("1\n")
    monkeypatch.setattr(measure.vitlab, "__file__", str(package))
    assert commit() is None  # no repository
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "a")
    git("tag", "v1")
    assert commit() == git("rev-parse", "HEAD") == environment("torch")["commit"]
    package.write_text("2\n")
    assert commit() == git("rev-parse", "HEAD") + "-dirty"
    monkeypatch.setenv("PATH", "")
    assert commit() is None
