"""Interleaved timing, the products of a model, and the commit of a measurement."""

import gc
import subprocess
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

from vitlab.cost import measure
from vitlab.cost.measure import (
    Product,
    commit,
    count_products,
    environment,
    products_step,
    ratio,
    seconds_per_step,
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
    now, calls, messages = [0.0], list[str](), list[str]()
    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def step(name: str, seconds: float) -> None:
        calls.append(name)
        now[0] += seconds

    steps = {"slow": lambda: step("slow", 0.02), "fast": lambda: step("fast", 0.002)}
    rates = time_interleaved(steps, 0.03, 2, messages.append)
    assert rates == {"slow": pytest.approx([50, 50]), "fast": pytest.approx([500, 500])}
    assert (calls.count("slow"), calls.count("fast")) == (3 + 2 * (1 + 2), 3 + 2 * (1 + 15))
    order = [name for name, before in zip(calls, ["", *calls], strict=False) if name != before]
    assert order == ["slow", "fast"] * 3  # warm-up and two rounds
    assert messages[:3] == ["warming up slow", "warming up fast", "round 1 of 2, slow"]


def test_timing_is_not_disturbed_by_garbage_collection() -> None:
    enabled: list[bool] = []
    assert seconds_per_step(lambda: enabled.append(gc.isenabled()), 3) > 0
    assert enabled[2:] == [False] * 3
    assert gc.isenabled()


def test_spread_and_ratio() -> None:
    values = [4.0, 1.0, 2.0, 3.0, 5.0]
    assert spread(values) == {"median": 3.0, "quartiles": [2.0, 4.0], "all": values}
    assert ratio([4.0, 2.0], [2.0, 1.0])["all"] == [2.0, 2.0]  # by rounds


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_products_are_those_of_the_formula(config: ModelConfig) -> None:
    for training, factor in ((False, 3), (True, 9)):
        products = count_products(config, 3, training)
        macs = sum(p.batch * p.m * p.k * p.n * times for p, times in products.items())
        assert macs == factor * config.forward_macs


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
