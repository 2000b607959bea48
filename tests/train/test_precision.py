"""Float32 weights are what is trained, in whatever numbers the model computes."""

import json
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from vitlab.models import ViTConfig
from vitlab.models.vit import ViT
from vitlab.train import precision as module
from vitlab.train.precision import (
    MasterWeights,
    _product_seconds,
    cpu_is_faster_in_bfloat16,
    frozen_dtype,
    keep_freed_memory,
    resolve_precision,
)

CONFIG = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, num_classes=3)
IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def model() -> ViT:
    model = ViT(CONFIG, generator=torch.Generator().manual_seed(0))
    assert model.head is not None
    nn.init.normal_(model.head.weight)
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_masters_are_float32_and_the_model_a_copy(model: ViT) -> None:
    """A step too small for bfloat16 adds up in the masters, and the copy follows once it shows."""
    before = state(model)
    weights = MasterWeights(model, "bfloat16")
    assert same({name: master.detach() for name, master in weights.masters.items()}, before)
    assert all(master.dtype == torch.float32 and master.requires_grad for master in weights.masters.values())
    assert same(state(model), {name: tensor.bfloat16() for name, tensor in before.items()})
    with weights.autocast():
        assert model(IMAGES).dtype == torch.bfloat16
    copy, master = model.get_parameter("norm.weight"), weights.masters["norm.weight"]  # all ones
    for _ in range(100):
        with torch.no_grad():
            master.add_(1e-4)
        weights.copy_masters_to_model()
    assert master[0].item() == pytest.approx(1.01, abs=1e-5)
    assert 1 < copy[0].item() == pytest.approx(1.01, abs=0.004)


def test_gradients_add_up_in_float32(model: ViT) -> None:
    weights = MasterWeights(model, "bfloat16")
    parts = []
    for scale in (1.0, 1e-3):
        (model(IMAGES).float().sum() * scale).backward()
        parts.append({name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None})
        weights.accumulate_gradients()
        assert all(parameter.grad is None for parameter in model.parameters())
    for name, master in weights.masters.items():
        assert master.grad is not None
        assert master.grad.dtype == torch.float32
        assert torch.equal(master.grad, parts[0][name] + parts[1][name])
    weights.zero_grad()
    assert all(master.grad is None for master in weights.masters.values())


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.dtype]]:
    """The products that have been measured, in seconds of a made-up processor."""
    products: list[torch.dtype] = []

    def seconds(dtype: torch.dtype) -> float:
        products.append(dtype)
        return 1.0 if dtype == torch.float32 else 0.5

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_product_seconds", seconds)
    monkeypatch.setattr(module, "cpu_is_faster_in_bfloat16", cpu_is_faster_in_bfloat16)  # not the stand-in of all tests
    cpu_is_faster_in_bfloat16.cache_clear()
    yield products
    cpu_is_faster_in_bfloat16.cache_clear()


@pytest.mark.parametrize(("bfloat16", "expected"), [(0.5, "bfloat16"), (0.9, "float32")])
def test_auto_is_what_multiplies_faster(
    bfloat16: float, expected: str, measured: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_product_seconds", lambda dtype: 1.0 if dtype == torch.float32 else bfloat16)
    assert resolve_precision("auto", CPU) == expected
    assert frozen_dtype("auto", CPU) == getattr(torch, expected)
    assert 1e-6 < _product_seconds(torch.float32) < 1  # the imported one, which measures
    assert not measured
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


def test_the_speed_of_products_is_measured_once(
    measured: list[torch.dtype], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first of all processes; again where its file is corrupt, or for another processor."""

    def in_another_process() -> bool:
        cpu_is_faster_in_bfloat16.cache_clear()
        return cpu_is_faster_in_bfloat16()

    assert in_another_process()
    assert in_another_process()
    assert len(measured) == 2
    (file,) = (tmp_path / "vitlab" / "bfloat16").iterdir()
    file.write_text(json.dumps({"speedup": 1.1}))
    assert not in_another_process()
    file.write_text("[]")
    assert in_another_process()
    assert len(measured) == 4
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": "another"})
    assert in_another_process()
    assert len(measured) == 6
    assert len(list(file.parent.iterdir())) == 2
