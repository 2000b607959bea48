import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from vitlab.errors import UserError
from vitlab.models import Rotary
from vitlab.models.variant import override
from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing
from vitlab.weights import (
    ParityError,
    checkpoint,
    convert,
    load_checkpoint,
    load_metadata,
    load_model,
    save_model,
)
from vitlab.weights.google import write_google
from vitlab.weights.parity import check_parity


def test_options_reach_the_model(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    save_model(tiny(representation_size=6), tmp_path / "saved")
    options: dict[str, Any] = {"image_size": 20, "head_bias": -2.0, "dropout": 0.25, "patch_dropout": 0.5}
    model = load_model(tmp_path / "saved", reset_head=True, pre_logits="drop", **options)
    assert model.config == tiny(**options).config
    assert isinstance(model, ViT)
    assert model.dropout.p == 0.25
    assert torch.equal(model(torch.randn(2, 3, 20, 20)), torch.full((2, 5), -2.0))


def test_loaded_weights_are_trainable_and_separate(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    write_google(tiny(), tmp_path / "vit.npz")
    random_state = torch.get_rng_state()
    model = load_model(tmp_path / "vit.npz")
    assert torch.equal(torch.get_rng_state(), random_state)  # draws no random numbers
    model(torch.randn(2, 3, 12, 12)).sum().backward()
    assert len({parameter.data_ptr() for parameter in model.parameters()}) == len(list(model.parameters()))
    assert all(parameter.grad is not None and parameter.is_contiguous() for parameter in model.parameters())


def test_convert_destroys_neither_its_source_nor_other_files(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    save_model(tiny(), tmp_path / "run" / "model")
    (tmp_path / "notes.npz").write_text("mine")
    before = (tmp_path / "run" / "model" / "config.json").read_bytes()
    conversions: list[tuple[str, str, Any, str]] = [
        *(("run/model", path, "timm", "is the source") for path in ("run/model", "run/../run/model")),
        ("run", "run/model", "timm", "is the source"),
        ("run/model", "", "google", "is a folder"),
        ("run", "notes.npz", "google", "exists"),
    ]
    for source, destination, to, problem in conversions:
        with pytest.raises(ValueError, match=problem):
            convert(tmp_path / source, tmp_path / destination, to=to)
    assert (tmp_path / "notes.npz").read_text() == "mine"
    assert (tmp_path / "run" / "model" / "config.json").read_bytes() == before


def test_convert_to_another_size(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    """The copy says where the checkpoint is from."""
    save_model(tiny(), tmp_path / "saved", extra={"eval_resize": 16, "classes": list("abcde")})
    report = convert(tmp_path / "saved", tmp_path / "wide", to="vitlab", image_size=(12, 20))
    assert load_model(tmp_path / "wide").config.image_size == (12, 20)
    prepared = Preprocessing.google((12, 20), 27)  # 16 of 12 pixels
    card = {"classes": list("abcde"), "source": str(tmp_path / "saved"), "preprocessing": prepared.to_metadata()}
    assert load_metadata(tmp_path / "wide") == card
    assert report["difference"] == 0
    assert report["parameters"] == load_model(tmp_path / "wide").config.num_parameters
    save_model(tiny(), tmp_path / "saved", extra={"source": "hub:owner/name"})
    convert(tmp_path / "saved", tmp_path / "copy", to="vitlab")
    assert load_metadata(tmp_path / "copy")["source"] == "hub:owner/name"


def test_positions_are_resampled_once(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    """A model of any size does so from the checkpoint's own; at another size it has that one alone."""
    extra = {"preprocessing": Preprocessing(8).to_metadata()}
    save_model(tiny(dynamic_image_size=True), tmp_path / "any", extra=extra)
    save_model(tiny(), tmp_path / "one", extra=extra)
    images = torch.rand(2, 3, 16, 8)
    expected = load_model(tmp_path / "one", image_size=(16, 8))(images)
    loaded = load_checkpoint(tmp_path / "one", dynamic_image_size=True)
    assert torch.equal(loaded.model(images), expected)
    assert loaded.preprocessing.image_size == 8
    assert load_checkpoint(tmp_path / "any").model.config.image_size == 8
    for path in ("any", "one"):
        with pytest.raises(ValueError, match="leave out one of the two"):
            load_model(tmp_path / path, image_size=8, dynamic_image_size=True)
        assert load_model(tmp_path / path, image_size=12, dynamic_image_size=True)(images).shape == (2, 5)
        with pytest.raises(ValueError, match=r"load the model with image_size=\(16, 8\)"):
            load_model(tmp_path / path, image_size=8)(images)
    convert(tmp_path / "any", tmp_path / "copy", to="vitlab", image_size=8)
    assert load_model(tmp_path / "copy").config == load_model(tmp_path / "one", image_size=8).config


def test_a_range_that_a_format_cannot_say_is_named(tmp_path: Path, tiny: Callable[..., ViT], caplog: Any) -> None:
    save_model(tiny(), tmp_path / "saved", extra={"preprocessing": Preprocessing(8, range=(40, 4095)).to_metadata()})
    formats: tuple[Any, ...] = ("vitlab", "google", "timm", "huggingface")
    for to in formats:
        convert(tmp_path / "saved", tmp_path / f"{to}.npz", to=to)
        assert ("black at 40, white at 4095" in caplog.text) == (to != "vitlab")
        caplog.clear()


@pytest.mark.parametrize("to", ["google", "timm"])
def test_a_conversion_that_fails_leaves_the_destination(
    tmp_path: Path, tiny: Callable[..., ViT], to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tiny(), tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "theirs", to=to)
    before = load_model(tmp_path / "theirs").state_dict()["cls"]
    save_model(tiny(), tmp_path / "other")
    monkeypatch.setattr(checkpoint, "check_parity", lambda *args: check_parity(*args, tolerance=-1.0))
    with pytest.raises(ParityError, match=r"theirs \(not written\)"):
        convert(tmp_path / "other", tmp_path / "theirs", to=to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "saved", "theirs"]
    assert torch.equal(load_model(tmp_path / "theirs").state_dict()["cls"], before)
    monkeypatch.undo()
    convert(tmp_path / "other", tmp_path / "theirs", to=to)
    assert not torch.equal(load_model(tmp_path / "theirs").state_dict()["cls"], before)
    if to == "timm":
        (tmp_path / "theirs" / "notes").touch()
        with pytest.raises(ValueError, match="already holds notes"):
            convert(tmp_path / "other", tmp_path / "theirs", to=to)


# --- cards -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_loaded_at_its_evaluation_size(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    model, prepared = tiny(image_size=20, position_interpolation="bicubic"), Preprocessing(12, 16)
    save_model(model, tmp_path / "saved", extra={"preprocessing": prepared.to_metadata(), "source": "here"})
    checkpoint = load_checkpoint(tmp_path / "saved")
    assert (checkpoint.model.config.image_size, checkpoint.preprocessing) == (12, prepared)
    assert checkpoint.metadata["source"] == "here"
    images = torch.randn(2, 3, 12, 12)
    expected = load_model(tmp_path / "saved", image_size=12, interpolation="bicubic")
    assert torch.equal(checkpoint.model(images), expected(images))
    larger = load_checkpoint(tmp_path / "saved", image_size=24, interpolation="corners")
    assert larger.preprocessing == Preprocessing(24, 32)
    assert larger.model.config == override(model.config, image_size=24, position_interpolation="corners")
    assert load_model(tmp_path / "saved").config == model.config
    (tmp_path / "saved" / "model.safetensors").write_bytes(b"corrupt")  # which the metadata do not need
    assert load_metadata(tmp_path / "saved", image_size=24)["preprocessing"] == prepared.at(24).to_metadata()


# --- weights and options of a conversion ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_weights_that_are_not_finite(value: float, tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    """In any format; a number that float32 cannot hold as well. A sum that overflows is fine."""
    model = tiny()
    with torch.no_grad():
        model.cls.fill_(3e38)  # pyright: ignore[reportOptionalMemberAccess]
    save_model(model, tmp_path / "large")
    load_model(tmp_path / "large")
    name = next(name for name in model.state_dict() if name.startswith("blocks.1.") and name.endswith("qkv.bias"))
    with torch.no_grad():
        model.double().get_parameter(name)[3] = value
    write_google(model, tmp_path / "saved")
    with pytest.raises(UserError, match=r"saved holds weights that are NaN .* in 1 of .*: blocks\.1\.\S*qkv\.bias"):
        load_model(tmp_path / "saved")
    load_model(tmp_path / "large", num_classes=0)


@pytest.mark.parametrize("to", ["timm", "huggingface"])
def test_pre_logits_of_a_conversion(to: Any, tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    model = tiny(representation_size=6)
    save_model(model, tmp_path / "saved", extra={"classes": list("abcde")})
    with pytest.raises(UserError, match="--pre-logits drop"):
        convert(tmp_path / "saved", tmp_path / "out", to=to)
    convert(tmp_path / "saved", tmp_path / "out", to=to, pre_logits="drop")
    images = torch.randn(2, 3, 12, 12)
    tokens = load_model(tmp_path / "out", num_classes=0)(images)
    torch.testing.assert_close(tokens, model.forward_features(images)[:, 0], rtol=1e-4, atol=1e-5)
    weights = tmp_path / "out" / "model.safetensors"  # the depth is counted from the tensors, and must be the card's
    state = safetensors.torch.load(weights.read_bytes())
    block = {"timm": "blocks.1.", "huggingface": "encoder.layer.1."}[to]
    safetensors.torch.save_file({name: tensor for name, tensor in state.items() if block not in name}, weights)
    with pytest.raises(ValueError, match=r"(depth|num_hidden_layers)=2 and the (tensors|arrays) are for 1"):
        load_model(tmp_path / "out")


def test_pool_of_a_conversion(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    """timm's DINOv3 averages its patches; Hugging Face's takes the class token, which is a register until then."""
    settings = {"rotary": Rotary(), "position": "none", "num_classes": 0, "layer_scale": 1.0, "gelu": "erf"}
    token = tiny(**settings, pool="token", registers=4)
    mean = tiny(**settings, pool="gap", registers=5)
    state = token.state_dict()
    mean.load_state_dict(state | {"registers": torch.cat([state["cls"], state["registers"]], dim=1)}, strict=False)
    save_model(mean, tmp_path / "saved")
    with pytest.raises(UserError, match="--pool token"):
        convert(tmp_path / "saved", tmp_path / "out", to="huggingface")
    convert(tmp_path / "saved", tmp_path / "out", to="huggingface", pool="token")
    images = torch.randn(2, 3, 12, 12)
    torch.testing.assert_close(load_model(tmp_path / "out")(images), token(images), rtol=1e-4, atol=1e-5)
    save_model(tiny(pool="gap"), tmp_path / "head")
    with pytest.raises(UserError, match="requires a class token"):
        load_model(tmp_path / "head", pool="token")
