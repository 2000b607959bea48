"""Float32 weights are what is trained, in whatever numbers the model computes."""

import platform
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitlab.models import ViTConfig
from vitlab.models.packed import PackedLinear
from vitlab.models.vit import ViT
from vitlab.train import precision as module
from vitlab.train.precision import (
    MasterWeights,
    frozen_dtype,
    keep_freed_memory,
    prepare_for_inference,
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


@pytest.mark.parametrize("expected", ["bfloat16", "float32"])
def test_auto_is_what_multiplies_faster(expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_is_faster_in_bfloat16", lambda: expected == "bfloat16")
    assert resolve_precision("auto", CPU) == expected
    assert frozen_dtype("auto", CPU) == getattr(torch, expected)
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


@pytest.mark.parametrize("faster", [torch.float32, torch.bfloat16])
def test_inference_packs_where_that_is_faster(model: ViT, faster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_is_faster_packed", lambda dtype: dtype == faster)
    prepare_for_inference(model, CPU, torch.float32)
    assert isinstance(model.head, PackedLinear) == (faster == torch.float32)
    unpacked = ViT(CONFIG)
    prepare_for_inference(unpacked, CPU, faster, pack=False)
    assert type(unpacked.head) is nn.Linear
    assert next(unpacked.parameters()).dtype == faster
