"""A checkpoint in float32 and bfloat16, on its device."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vitlab.errors import UserError
from vitlab.evaluate.load import choose_device, device_of, dtype_of, load_for_evaluation
from vitlab.evaluate.options import ModelOptions
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.train.distributed import init_distributed
from vitlab.weights import save_model

BIT = ResNetBody(layers=(1, 2), width=32, version="v2", weight_eps=1e-10, weight_eps_on="variance")
VIT: dict[str, Any] = {"image_size": 32, "width": 64, "depth": 3, "heads": 4, "mlp_dim": 128, "num_classes": 10}
KINDS: dict[str, ModelConfig] = {
    "ViT": ViTConfig(**VIT, patch_size=8),
    "MAP head": ViTConfig(**VIT, patch_size=8, pool="map"),
    "relative positions": ViTConfig(**VIT, patch_size=8, position="relative", position_at="every", registers=2),
    "axial": ViTConfig(**VIT, patch_size=8, encoder="axial", position="sincos2d", class_position=False),
    "hybrid": ViTConfig(**VIT, patch_size=1, stem=ResNetBody(layers=(1, 2), width=32)),
    "BiT": ResNetConfig(image_size=32, num_classes=10, body=BIT),
}
EXACT, ROUNDED = (ModelOptions(precision=precision, device="cpu") for precision in ("float32", "bfloat16"))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_every_kind_of_model(kind: str, tmp_path: Path) -> None:
    """float32 is exact; the rms error of bfloat16 is at most 3 % of that of the logits: some roundings of 0.4 %."""
    model = build_model(KINDS[kind], generator=torch.Generator().manual_seed(0)).eval()
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight, std=0.1)
    save_model(model, tmp_path / "model")
    images = torch.rand(4, 3, 32, 32) * 2 - 1
    exact, rounded = (load_for_evaluation(tmp_path / "model", options).model for options in (EXACT, ROUNDED))
    assert (dtype_of(exact), dtype_of(rounded), device_of(exact)) == ("float32", "bfloat16", torch.device("cpu"))
    assert (exact.training, rounded.training) == (False, False)
    with torch.inference_mode():
        expected, found = exact(images), rounded(images)
        assert torch.equal(expected, model(images))
    assert found.dtype == torch.bfloat16
    error = ((found - expected).square().mean() / expected.square().mean()).sqrt()
    assert 1e-4 < error < 0.03


@pytest.mark.usefixtures("pretrained")
def test_slow_bfloat16_is_warned_of_once(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, in_ranks: Callable[..., list[Any]]
) -> None:
    def has_units(there: bool) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": there}, raising=False)

    has_units(True)
    load_for_evaluation(workdir, ROUNDED)
    has_units(False)
    load_for_evaluation(workdir, EXACT)
    assert caplog.messages == []

    def job() -> list[str]:
        with init_distributed() as world, caplog.at_level(logging.WARNING):
            load_for_evaluation(workdir, ROUNDED, world=world)
        return caplog.messages

    first, second = in_ranks(2, job)
    assert (len(first), second) == (1, [])
    assert "not faster in bfloat16" in first[0]


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu") == torch.device("cpu")
    for count in (0, 2):
        monkeypatch.setattr(torch.cuda, "is_available", lambda count=count: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert choose_device("auto") == torch.device("cuda" if count else "cpu")
        with pytest.raises(UserError, match=f"cuda:2' is missing: torch sees {count} GPUs"):
            choose_device("cuda:2")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    for unknown in ("quantum", "", "gpu", "meta"):
        with pytest.raises(UserError, match=f"device '{unknown}' is unknown; give auto, cpu, cuda"):
            choose_device(unknown)


def test_model_without_weights() -> None:
    assert (dtype_of(nn.Identity()), device_of(nn.Identity())) == ("float32", torch.device("cpu"))
