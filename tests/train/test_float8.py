"""Products of the blocks in float8: rounded as said, there and nowhere else, and a run like any other around them."""

import contextlib
import dataclasses
import functools
import itertools
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitlab.config import DataConfig, MaskingConfig, OptimConfig, TrainConfig
from vitlab.data.registry import load_dataset
from vitlab.models import ResNetBody, ViTConfig, build_model
from vitlab.models.config import ResNetConfig
from vitlab.settings import to_dict
from vitlab.train import loop
from vitlab.train.float8 import dense_layers, describe_float8, has_float8_units, to_float8
from vitlab.train.loop import StoppedError, train
from vitlab.train.objectives import create_training_model
from vitlab.train.workdir import Workdir

MODEL = ViTConfig(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp_dim=32, num_classes=10, head_std=0.1)
CONFIG = TrainConfig(
    model=MODEL,
    data=DataConfig(crop="none", flip=False),
    optim=OptimConfig(lr=3e-3),
    steps=5,
    batch_size=10,
    log_every=1,
    checkpoint_every=2,
    precision="float32",
    float8=True,
)
CPU = torch.device("cpu")
digits = functools.cache(lambda: load_dataset("digits", "train"))


def fresh(config: TrainConfig = CONFIG) -> Any:
    return create_training_model(config, torch.Generator().manual_seed(0))


def run(config: TrainConfig, folder: Path) -> Any:
    with Workdir(folder, to_dict(config), tensorboard=False) as workdir:
        return train(config, workdir, fresh(config), dataset=digits())


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def identical(one: nn.Module, two: nn.Module) -> bool:
    ours, theirs = one.state_dict(), two.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def rounded(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """What float8 leaves of a tensor whose largest number is brought to the largest of that kind."""
    scale = torch.finfo(kind).max / tensor.abs().max()
    return (tensor * scale).to(kind).float() / scale


# -------------------------------------------------------------------------------------------- one layer, and all


def test_a_product_is_that_of_rounded_factors() -> None:
    """Activations and weights e4m3, gradients e5m2, each scaled by its own largest number; the bias as it is."""
    model = fresh()
    to_float8(model, CPU)
    layer, generator = model.blocks[0].mlp.fc1, torch.Generator().manual_seed(1)
    nn.init.normal_(layer.bias, generator=generator)
    x = torch.randn(3, 5, 16, generator=generator).requires_grad_()
    gradient = torch.randn(3, 5, 32, generator=generator)
    out = layer(x)
    out.backward(gradient)
    kept, weight = rounded(x.detach(), torch.float8_e4m3fn), rounded(layer.weight.detach(), torch.float8_e4m3fn)
    given = rounded(gradient, torch.float8_e5m2)
    assert x.grad is not None
    torch.testing.assert_close(out, kept @ weight.T + layer.bias)
    torch.testing.assert_close(x.grad, given @ weight)
    torch.testing.assert_close(layer.weight.grad, given.flatten(0, 1).T @ kept.flatten(0, 1))
    torch.testing.assert_close(layer.bias.grad, gradient.sum(dim=(0, 1)))
    exact = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert 0.005 < ((out - exact).norm() / exact.norm()).item() < 0.05  # e4m3 keeps three binary digits


def test_the_blocks_layers_and_no_others() -> None:
    """Also in axial blocks; not the patches, the convolutions before them, pooling by attention, or the head."""
    config = dataclasses.replace(
        MODEL, image_size=32, patch_size=1, stem=ResNetBody((1,), 32), encoder="axial", pool="map",
        representation_size=16,
    )  # fmt: skip
    model = build_model(config, generator=torch.Generator().manual_seed(0))
    before = dict(model.named_parameters())
    to_float8(model, CPU)
    changed = [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]
    places = ("attention.qkv", "attention.out", "mlp.fc1", "mlp.fc2")
    assert changed == [
        f"blocks.{n}.{part}.{place}" for n, part, place in itertools.product(range(2), ("rows", "columns"), places)
    ]
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)


def test_layers_that_do_not_fit_stay() -> None:
    model = fresh(dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, mlp_dim=24)))
    to_float8(model, CPU)
    kinds = {name: type(layer) is nn.Linear for name, layer in dense_layers(model).items()}
    assert {name for name, stays in kinds.items() if stays} == {
        f"{n}.mlp.{part}" for n in "01" for part in ("fc1", "fc2")
    }
    assert len(kinds) == 8
    assert describe_float8(model, CPU) == (
        "float8 products in every block's qkv, out (not in fc1, fc2: a side is no multiple of 16), emulated: this "
        "device has no units for them, so they round alike and gain no time"
    )


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (dataclasses.replace(MODEL, width=24), 8),
        (ResNetConfig(image_size=32, body=ResNetBody((1,), 32), num_classes=4), 0),
    ],
)
def test_a_model_without_any_that_fits(config: Any, count: int) -> None:
    with pytest.raises(ValueError, match=rf"multiples of 16, and none of this model's {count} is one"):
        to_float8(build_model(config), CPU)


def test_torchao_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchao", "torchao.float8"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"torchao, which is not installed: pip install 'vitlab\[float8\]'"):
        to_float8(fresh(), CPU)


@pytest.mark.parametrize(("capability", "has"), [((9, 0), True), ((8, 9), True), ((8, 6), False), ((10, 0), True)])
def test_which_devices_have_units(capability: tuple[int, int], has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert has_float8_units(torch.device("cuda")) == has
    assert has_float8_units(CPU) is False
    assert ("emulated" in describe_float8(fresh(), torch.device("cuda"))) == (not has)
    monkeypatch.setattr(torch.version, "cuda", None)  # AMD's capabilities are numbered otherwise
    assert has_float8_units(torch.device("cuda")) is False


# -------------------------------------------------------------------------------------------- a run


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_a_run_ends_with_a_plain_model(precision: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It learns about the same, says at the start in what it computes, and leaves float32 weights and usual layers."""
    config = dataclasses.replace(CONFIG, precision=precision, average_decay=0.5)
    model = run(config, tmp_path / "float8")
    told = capsys.readouterr().err
    assert f"{precision} on cpu, float8 products in every block's qkv, out, fc1, fc2, emulated: this device" in told
    plain = run(dataclasses.replace(config, float8=False), tmp_path / "plain")
    assert "float8" not in capsys.readouterr().err
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not identical(model, plain)
    assert losses(tmp_path / "float8") == pytest.approx(losses(tmp_path / "plain"), rel=0.03)
    assert losses(tmp_path / "float8") != pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


def test_it_continues_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(CONFIG, tmp_path / "whole")
    asked = iter([False, False, True])
    event = types.SimpleNamespace(is_set=lambda: next(asked, False))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "stop_signals", lambda: contextlib.nullcontext(event))
        with pytest.raises(StoppedError, match="step 2/5"):
            run(CONFIG, tmp_path / "stopped")
    assert identical(run(CONFIG, tmp_path / "stopped"), whole)
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def test_with_blocks_computed_again(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, dropout=0.2), steps=3)
    again = dataclasses.replace(config, activation_checkpointing=True)
    assert identical(run(config, tmp_path / "kept"), run(again, tmp_path / "again"))


def test_masked_patch_prediction(tmp_path: Path) -> None:
    model = dataclasses.replace(MODEL, num_classes=0)
    config = dataclasses.replace(CONFIG, model=model, masking=MaskingConfig(), steps=2)
    plain = run(dataclasses.replace(config, float8=False), tmp_path / "plain")
    found = run(config, tmp_path / "float8")
    assert not identical(found, plain)
    assert losses(tmp_path / "float8") == pytest.approx(losses(tmp_path / "plain"), rel=0.03)


@pytest.mark.slow
def test_compiled(tmp_path: Path) -> None:
    """The same products but for the order of sums, which float8 may round to the next number; CUDA graphs change
    nothing where there is no CUDA."""
    run(CONFIG, tmp_path / "eager")
    compiled = dataclasses.replace(CONFIG, compile=True)
    model = run(compiled, tmp_path / "compiled")
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=2e-3)
    assert identical(run(dataclasses.replace(compiled, cuda_graphs=True), tmp_path / "graphs"), model)
