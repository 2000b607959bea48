from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from vitlab.errors import UserError
from vitlab.models import Rotary
from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing
from vitlab.weights import ParityError, conversion, convert, load_metadata, load_model, save_model
from vitlab.weights.parity import check_parity


def test_convert_destroys_neither_its_source_nor_other_files(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    save_model(tiny(), tmp_path / "run" / "model")
    (tmp_path / "notes.npz").write_text("mine")
    before = (tmp_path / "run" / "model" / "config.json").read_bytes()
    conversions: list[tuple[str, str, Any, str]] = [
        ("run/model", "run/../run/model", "timm", "is the source"),
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
    metadata = {"preprocessing": Preprocessing.google(12, 16).to_metadata(), "classes": list("abcde")}
    save_model(tiny(), tmp_path / "saved", extra=metadata)
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
    monkeypatch.setattr(conversion, "check_parity", lambda *args: check_parity(*args, tolerance=-1.0))
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
