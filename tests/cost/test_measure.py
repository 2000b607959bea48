"""Interleaved timing, the products of a model, the parts of a step, and the commit of a measurement."""

import gc
import subprocess
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vitlab.cost import measure
from vitlab.cost.measure import (
    PARTS,
    REST,
    Product,
    commit,
    count_products,
    environment,
    fastest_batch,
    part_of,
    products_step,
    profile_step,
    ratio,
    seconds_per_step,
    shares,
    spread,
    time_interleaved,
)  # fmt: skip
from vitlab.cost.peers import OURS, Work, build
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


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Passes time on the clock of the measurements."""
    now = [0.0]
    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return sleep


def test_rounds_are_interleaved(sleep: Callable[[float], None]) -> None:
    calls: list[str] = []
    said: list[str] = []

    def step(name: str, seconds: float) -> None:
        calls.append(name)
        sleep(seconds)

    steps = {"slow": lambda: step("slow", 0.02), "fast": lambda: step("fast", 0.002)}
    rates = time_interleaved(steps, 0.03, 2, said.append)
    assert rates == {"slow": pytest.approx([50, 50]), "fast": pytest.approx([500, 500])}
    assert (calls.count("slow"), calls.count("fast")) == (3 + 2 * (1 + 2), 3 + 2 * (1 + 15))
    order = [name for name, before in zip(calls, ["", *calls], strict=False) if name != before]
    assert order == ["slow", "fast"] * 3  # warm-up and two rounds
    assert said[:3] == ["warming up slow", "warming up fast", "round 1 of 2, slow"]


def test_timing_is_not_disturbed_by_garbage_collection() -> None:
    enabled: list[bool] = []
    assert seconds_per_step(lambda: enabled.append(gc.isenabled()), 3) > 0
    assert enabled[2:] == [False] * 3
    assert gc.isenabled()


def test_spread_and_ratio() -> None:
    values = [4.0, 1.0, 2.0, 3.0, 5.0]
    assert spread(values) == {"median": 3.0, "quartiles": [2.0, 4.0], "all": values}
    assert ratio([4.0, 2.0], [2.0, 1.0])["all"] == [2.0, 2.0]  # of each round


@pytest.mark.parametrize(
    ("rates", "most", "best", "tried"),
    [
        ({1: 10, 2: 20, 4: 30, 8: 30.5, 16: 30.8, 32: 99}, 64, 4, [1, 2, 4, 8, 16]),
        ({1: 10, 2: 9, 4: 30, 8: 10, 16: 10}, 64, 4, [1, 2, 4, 8, 16]),  # one doubling without a gain is skipped
        ({1: 10, 2: 20, 4: 40}, 5, 4, [1, 2, 4]),
        ({1: 10}, 1, 1, [1]),
    ],
)
def test_fastest_batch(rates: dict[int, float], most: int, best: int, tried: list[int]) -> None:
    seen: list[int] = []
    assert fastest_batch(lambda batch: seen.append(batch) or rates[batch], most) == best
    assert seen == tried


# ------------------------------------------------------------------------------------------------------------ ceiling


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_products_are_those_of_the_formula(config: ModelConfig) -> None:
    for training, factor in ((False, 3), (True, 9)):
        products = count_products(config, 3, training)
        assert sum(product.macs * times for product, times in products.items()) == factor * config.forward_macs


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


def test_copy_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "COPY_BYTES", 2**20)
    assert 1e7 < measure.copy_bandwidth(torch.device("cpu")) < 1e13


# ------------------------------------------------------------------------------------------------------------ profile


def test_parts() -> None:
    assert part_of("aten::addmm") == "matrix products"
    assert part_of("aten::bmm") == "attention"
    assert part_of("aten::_softmax_backward_data") == "attention"
    assert part_of("aten::_log_softmax") == "loss"
    assert part_of("autograd::engine::evaluate_function: AddmmBackward0") == REST
    found = shares([("aten::mm", 5.0), ("aten::addmm", 1.0), ("aten::gelu", 2.0), ("unknown", 2.0)])
    expected = {"matrix products": 0.6, "activation functions": 0.2, REST: 0.2}
    assert found == dict.fromkeys([*PARTS, REST], 0.0) | expected


def test_a_training_step_has_every_part() -> None:
    step = build(OURS, Work(SMALL, "train", 4, "bfloat16")).step
    found = profile_step(step, torch.device("cpu"), count=2)
    assert sum(found.values()) == pytest.approx(1)
    assert set(found) == {*PARTS, REST}
    assert all(share > 0 for share in found.values()), found


# -------------------------------------------------------------------------------------------------------- environment


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment("torch", "numpy")
    assert list(found) == ["commit", "cpu", "cores", "torch", "numpy"]
    assert found["cores"] >= 1
    monkeypatch.setenv("PATH", "")
    assert commit() is None  # without git


def test_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", *identity, *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    package, installed = tmp_path / "src" / "vitlab", tmp_path / ".venv" / "vitlab"
    package.mkdir(parents=True)
    installed.mkdir(parents=True)
    monkeypatch.setattr(measure, "PACKAGE", package)
    assert commit() is None  # no repository
    (package / "a.py").write_text("1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "a")
    git("tag", "v1")
    assert commit() == git("rev-parse", "HEAD")
    (package / "a.py").write_text("2\n")
    assert commit() == git("rev-parse", "HEAD") + "-dirty"
    monkeypatch.setattr(measure, "PACKAGE", installed)
    assert commit() is None  # installed inside of another project's repository
