import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing
from vitlab.weights import load_card, load_model, save_model
from vitlab.weights.folder import read_folder


def edit_card(folder: Path, **changes: Any) -> None:
    card = json.loads((folder / "config.json").read_text())
    card.update(changes)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in card.items() if value is not ...}))


@pytest.fixture
def saved(tmp_path: Path, tiny: Callable[..., ViT]) -> Path:
    save_model(tiny(), tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pool": "gap", "position": "none", "image_size": (8, 16)},
        {"representation_size": 6, "dropout": 0.1, "gelu": "erf", "layer_norm_eps": 1e-5, "head_bias": -10.0},
        {"num_classes": 0},
    ],
)
def test_a_model_comes_back_to_the_bit(tmp_path: Path, tiny: Callable[..., ViT], settings: dict[str, Any]) -> None:
    model = tiny(**settings)
    save_model(model, tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["config.json", "model.safetensors"]
    loaded = load_model(tmp_path / "saved")
    assert loaded.config == model.config
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], each) for name, each in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    images = torch.randn(2, 3, *model.config.image_hw)
    assert torch.equal(loaded(images), model(images))


def test_half_precision_is_kept_in_the_file_and_loaded_as_float32(tmp_path: Path, tiny: Any) -> None:
    model = tiny().bfloat16()
    save_model(model, tmp_path / "half")
    assert {each.dtype for each in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}
    loaded = load_model(tmp_path / "half")
    assert all(torch.equal(a, b.float()) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def test_the_card_says_what_it_was_given(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    prepared = Preprocessing(12, 16, interpolation="bicubic").to_card()
    extra = {"classes": ["a", "b", "ç", "d", "e"], "preprocessing": prepared, "source": "digits", "more": {"x": [None]}}
    save_model(tiny(), tmp_path / "saved", extra=extra)
    assert load_card(tmp_path / "saved") == extra
    card = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (card["format"], card["version"]) == ("vitlab model", 1)
    assert card["model"] == dataclasses.asdict(tiny().config)
    save_model(tiny(), tmp_path / "plain")
    assert load_card(tmp_path / "plain") == {"preprocessing": Preprocessing(12).to_card()}


def test_names_that_are_no_text_come_back(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    extra = {"dataset": os.fsdecode(b"folder:caf\xe9"), "classes": [os.fsdecode(b"\xff"), "b", "ç", "d", "e"]}
    save_model(tiny(), tmp_path / "saved", extra=extra)
    assert load_card(tmp_path / "saved") == extra | {"preprocessing": Preprocessing(12).to_card()}


def test_everyone_who_may_read_the_folder_may_read_the_weights(saved: Path) -> None:
    assert (saved / "model.safetensors").stat().st_mode & 0o777 == saved.stat().st_mode & 0o666
    assert (saved / "model.safetensors").stat().st_mode == (saved / "config.json").stat().st_mode


def test_a_saved_model_is_replaced_and_anything_else_is_not(saved: Path, tiny: Callable[..., ViT]) -> None:
    other = tiny(width=16)
    save_model(other, saved)
    assert load_model(saved).config == other.config
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"already holds notes\.txt; give a new folder"):
        save_model(tiny(), saved)
    assert (saved / "notes.txt").read_text() == "mine"
    assert load_model(saved).config == other.config
    with pytest.raises(ValueError, match="is a file; give the name of a folder"):
        save_model(tiny(), saved / "notes.txt")


def test_an_empty_folder_and_missing_parents_are_fine(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "a" / "b"):
        save_model(tiny(), folder)
        load_model(folder)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"classes": ["a", "b"]}, "names 2 classes and the model has 5 outputs"),
        ({"when": {1, 2}}, "what JSON can say"),
        ({"loss": float("nan")}, "what JSON can say"),
    ],
)
def test_a_card_that_cannot_be_is_refused_before_anything_is_written(
    saved: Path, tiny: Callable[..., ViT], extra: dict[str, Any], said: str
) -> None:
    before = (saved / "config.json").read_bytes()
    with pytest.raises(ValueError, match=said):
        save_model(tiny(width=16), saved, extra=extra)
    assert (saved / "config.json").read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]
    load_model(saved)


def test_other_numbers_of_names_than_of_outputs_are_refused(saved: Path) -> None:
    edit_card(saved, extra={"classes": ["a", "b"]})
    with pytest.raises(ValueError, match=r"config\.json names 2 classes and the model has 5 outputs"):
        load_model(saved)


def test_a_changed_byte_is_told(saved: Path) -> None:
    weights = saved / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged.*Take another copy"):
        load_model(saved)


def test_truncated_or_missing_weights_are_told(saved: Path) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="is damaged"):
        load_model(saved)
    weights.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        read_folder(saved)


def replace_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Other weights with a checksum that fits, as a program that writes this format wrongly would leave."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    edit_card(folder, sha256=digest)


def test_weights_of_another_model_are_listed(saved: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        del state["norm.bias"]
        state["fc.weight"] = torch.zeros(2)
        state["cls"] = torch.zeros(1, 1, 7)

    replace_weights(saved, change)
    with pytest.raises(ValueError) as caught:
        load_model(saved)
    said = str(caught.value)
    assert "describes a model of" in said
    assert "1 missing: norm.bias" in said
    assert "1 unknown: fc.weight" in said
    assert "1 of another shape: cls has shape (1, 1, 7) instead of (1, 1, 8)" in said


def test_a_file_that_only_claims_to_be_safetensors_is_told(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(b"nonsense" * 1000)
    edit_card(saved, sha256=hashlib.sha256(b"nonsense" * 1000).hexdigest())
    with pytest.raises(ValueError, match="no safetensors file"):
        load_model(saved)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "version 2, and this vitlab reads version 1"),
        ({"version": ...}, "version None"),
        ({"sha256": ...}, "lacks sha256"),
        ({"model": 3}, "lacks model"),
        ({"model": {"width": 8, "widht": 9}}, r"unknown setting 'widht'.*width"),
        ({"model": {"width": "8"}}, r"width is '8'; allowed: int"),
        ({"model": {"image_size": [8, 9], "patch_size": 4}}, "multiple of 4"),
        ({"format": "other"}, r"a config\.json of something else"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_card_that_is_not_ours_is_told(saved: Path, changes: dict[str, Any], said: str) -> None:
    edit_card(saved, **changes)
    with pytest.raises(ValueError, match=said):
        load_model(saved)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_a_damaged_card_is_told(saved: Path, text: str) -> None:
    (saved / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model(saved)
