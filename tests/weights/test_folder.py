import copy
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
from small_disk import small_disk
from states import same

from vitlab.errors import WriteError
from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing
from vitlab.weights import load_metadata, load_model, save_model
from vitlab.weights.folder import processed_size


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
def test_a_model_is_saved_and_loaded(tmp_path: Path, tiny: Callable[..., ViT], settings: dict[str, Any]) -> None:
    model, folder = tiny(**settings), tmp_path / "a" / "saved"
    save_model(model, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    # The weights have the permissions of the folder.
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    loaded = load_model(folder)
    assert loaded.config == model.config
    assert same(loaded.state_dict(), model)
    images = torch.randn(2, 3, *model.config.image_hw)
    assert torch.equal(loaded(images), model(images))


def test_the_card_holds_extra(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    prepared = Preprocessing(12, 16, interpolation="bicubic").to_metadata()
    classes = [os.fsdecode(b"\xff"), "b", "ç", "d", "e"]  # also names that are not valid text
    extra = {"classes": classes, "preprocessing": prepared, "source": "digits", "more": {"x": [None]}}
    save_model(tiny(), tmp_path / "saved", extra=extra)
    assert load_metadata(tmp_path / "saved") == extra
    card = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (card["format"], card["version"]) == ("vitlab model", 1)
    assert card["model"] == dataclasses.asdict(tiny().config)


@pytest.mark.parametrize(("crop", "expected"), [(None, 12), (12, 12), (15, 15), (16, 12), ((13, 20), 12)])
def test_a_crop_of_which_patches_cover_more_warns(
    tiny: Callable[..., ViT], caplog: pytest.LogCaptureFixture, crop: Any, expected: int
) -> None:
    assert processed_size(Preprocessing(12, crop_size=crop), tiny().config) == (expected, expected)
    assert ("is not written" in caplog.text) == (expected == 12 and crop not in (None, 12))


def test_a_corrupt_copy_is_replaced_beside_its_card(saved: Path, tiny: Callable[..., ViT]) -> None:
    """Whichever of its files is corrupt; what a killed process has left there is removed."""
    model = copy.deepcopy(load_model(saved))  # not in the file, which is damaged
    (saved / "README.md").write_text("edited")
    for damage in ("model.safetensors", "config.json"):
        (saved / damage).write_bytes(b"{")
        (saved / ".README.md.0123456789abcdef.new").touch()
        save_model(model, saved)
        assert (saved / "README.md").read_text() == "edited"
        assert {path.name for path in saved.iterdir()} == {"model.safetensors", "config.json", "README.md"}
    assert load_model(saved).config == model.config


def test_a_full_disk(saved: Path, tiny: Callable[..., ViT]) -> None:
    """Where safetensors writes; the earlier model stays."""
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(WriteError, match=r"\(File too large\): [\d,]+ bytes are required"), small_disk():
        save_model(tiny(width=64), saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert list(saved.parent.iterdir()) == [saved]


def test_only_a_saved_model_is_replaced(saved: Path, tiny: Callable[..., ViT]) -> None:
    other = tiny(width=16)
    (saved / "README.md").write_text("of the model that is replaced")
    save_model(other, saved)
    assert load_model(saved).config == other.config
    assert {path.name for path in saved.iterdir()} == {"model.safetensors", "config.json"}
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"already holds notes\.txt"):
        save_model(tiny(), saved)
    assert load_model(saved).config == other.config
    (saved.parent / "project").mkdir()
    (saved.parent / "project" / "README.md").write_text("of no model")
    with pytest.raises(ValueError, match=r"already holds README\.md"):
        save_model(tiny(), saved.parent / "project")
    with pytest.raises(ValueError, match="is a file"):
        save_model(tiny(), saved / "notes.txt")
    assert (saved / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("extra", "problem"),
    [({"classes": ["a", "b"]}, "2 names.* 5 outputs"), ({"when": {1, 2}}, "JSON"), ({"x": float("nan")}, "JSON")],
)
def test_an_invalid_card_is_refused_before_anything_is_written(
    saved: Path, tiny: Callable[..., ViT], extra: dict[str, Any], problem: str
) -> None:
    before = (saved / "config.json").read_bytes()
    with pytest.raises(ValueError, match=problem):
        save_model(tiny(width=16), saved, extra=extra)
    assert (saved / "config.json").read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


def edit_card(folder: Path, **changes: Any) -> None:
    """Changes entries of config.json; `...` removes one."""
    card = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in card.items() if value is not ...}))


def test_corrupt_or_missing_weights(saved: Path) -> None:
    weights = saved / "model.safetensors"
    data = weights.read_bytes()
    for content, problem in (
        (data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], r"model\.safetensors is corrupt.*another copy"),
        (data[:100], "is corrupt"),
    ):
        weights.write_bytes(content)
        with pytest.raises(ValueError, match=problem):
            load_model(saved)
    weights.write_bytes(data)
    state = load_file(weights)
    del state["norm.bias"]
    save_file({**state, "fc.weight": torch.zeros(2), "cls": torch.zeros(1, 1, 7)}, weights)
    edit_card(saved, sha256=hashlib.sha256(weights.read_bytes()).hexdigest())
    with pytest.raises(ValueError, match=r"1 missing: norm.bias; 1 unknown: fc.weight; .*cls has shape \(1, 1, 7\)"):
        load_model(saved)
    weights.write_bytes(b"nonsense" * 1000)
    edit_card(saved, sha256=hashlib.sha256(weights.read_bytes()).hexdigest())
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        load_model(saved)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": 2}, "version 2"),
        ({"sha256": ...}, "sha256"),
        ({"model": {"width": 8, "widht": 9}}, r"unknown setting 'widht'.*width"),
        ({"extra": {"classes": ["a", "b"]}}, r"config\.json: .* 2 names, and the model has 5 outputs"),
        ({"format": "other"}, "of another program"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_an_invalid_card_is_refused(saved: Path, changes: dict[str, Any], problem: str) -> None:
    edit_card(saved, **changes)
    with pytest.raises(ValueError, match=problem):
        load_model(saved)


@pytest.mark.parametrize("text", ["", "[1]", "\x00"])
def test_a_corrupt_card_is_refused(saved: Path, text: str) -> None:
    (saved / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model(saved)
