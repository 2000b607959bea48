"""Float32 weights are what is trained, in whatever numbers the model computes."""

import platform
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitlab.models import ViTConfig
from vitlab.models.vit import ViT
from vitlab.train.precision import MasterWeights, cpu_is_faster_in_bfloat16, keep_freed_memory, resolve_precision

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
    before = state(model)
    weights = MasterWeights(model, "bfloat16")
    assert same({name: master.detach() for name, master in weights.masters.items()}, before)
    assert all(master.dtype == torch.float32 and master.requires_grad for master in weights.masters.values())
    assert same(state(model), {name: tensor.bfloat16() for name, tensor in before.items()})
    with weights.autocast():
        assert model(IMAGES).dtype == torch.bfloat16


def test_small_steps_are_not_lost(model: ViT) -> None:
    """A step too small for bfloat16 adds up in the masters, and the copy follows once it shows."""
    weights = MasterWeights(model, "bfloat16")
    copy, master = model.get_parameter("norm.weight"), weights.masters["norm.weight"]  # all ones
    for _ in range(100):
        with torch.no_grad():
            master.add_(1e-4)
        weights.copy_masters_to_model()
    assert master[0].item() == pytest.approx(1.01, abs=1e-5)
    assert copy[0].item() == pytest.approx(1.01, abs=0.004)
    assert copy[0].item() > 1


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


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"amx_bf16": True}, "bfloat16"),
        ({"avx512_bf16": True}, "bfloat16"),
        ({"avx512_bf16": True, "cpu_name": "AMD EPYC"}, "bfloat16"),
        ({"avx512_bf16": True, "cpu_name": "Intel Xeon"}, "float32"),
        ({"avx512_bf16": True, "amx_bf16": True, "cpu_name": "Intel Xeon"}, "bfloat16"),
        ({"amx_bf16": False, "avx2": True}, "float32"),
        ({}, "float32"),
    ],
)
def test_auto_on_a_processor(monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, Any], expected: str) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert resolve_precision("auto", CPU) == expected
    assert cpu_is_faster_in_bfloat16() == (expected == "bfloat16")


def test_freed_memory_is_kept_where_glibc_manages_it() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
