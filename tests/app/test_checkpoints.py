"""Which checkpoints are found, and which of them are in memory."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vitlab.app import checkpoints
from vitlab.app.checkpoints import ModelCache, find_checkpoints
from vitlab.models import ViTConfig, build_model
from vitlab.weights import Checkpoint, convert, save_model

SMALL = ViTConfig(image_size=16, patch_size=8, width=8, depth=1, heads=2, mlp_dim=8, num_classes=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model, a run with one, a Google file, a broken model; and what is no checkpoint."""
    place = tmp_path / "many"
    model = build_model(SMALL)
    save_model(model, place / "saved", extra={"classes": ["a", "b", "c"], "source": "a friend"})
    save_model(model, place / "run" / "model")
    (place / "run" / "config.json").write_text("{}")
    convert(place / "saved", place / "google.npz", to="google")
    (place / "broken").mkdir()
    (place / "broken" / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224"}))
    (place / "broken" / "model.safetensors").write_bytes(b"nothing")
    (place / "unfinished" / "checkpoints").mkdir(parents=True)
    (place / "unfinished" / "config.json").write_text("{}")
    torch.save({}, place / "pickled.pt")
    (place / "notes.txt").write_text("none")
    return place


def test_all_checkpoints_are_found_and_no_pickle(folder: Path) -> None:
    found = find_checkpoints(folder)
    assert list(found) == ["broken", "google.npz", "run", "saved"]
    assert found["run"] == str(folder / "run")


@pytest.mark.parametrize("name", ["saved", "run", "google.npz", "run/model"])
def test_a_checkpoint_by_itself_is_the_only_one(folder: Path, name: str) -> None:
    assert find_checkpoints(folder / name) == {Path(name).name: str(folder / name)}


def test_a_folder_without_one_says_so(folder: Path) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no checkpoint; give .*save_model"):
        find_checkpoints(folder / "empty")
    with pytest.raises(ValueError, match="training that has not ended"):
        find_checkpoints(folder / "unfinished")
    with pytest.raises(ValueError, match="is a pickle"):
        find_checkpoints(folder / "pickled.pt")
    with pytest.raises(ValueError, match="there is nothing at"):
        find_checkpoints(folder / "none")


def test_the_last_used_stay_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads, most = [], 0

    def load(place: str) -> Checkpoint:
        nonlocal most
        loads.append(Path(place).name)
        most = max(most, len(cache._loaded))  # others, while one more comes
        return original(place)

    original = checkpoints.load_checkpoint
    monkeypatch.setattr(checkpoints, "load_checkpoint", load)
    cache = ModelCache(folder, device="cpu")
    assert loads == []
    for name in ("saved", "run", "saved", "google.npz", "saved", "run"):
        assert cache.get(name).name == name
    assert loads == ["saved", "run", "google.npz", "run"]
    assert most == checkpoints.CACHED - 1
    assert len(cache._loaded) == checkpoints.CACHED


def test_classes_source_and_preprocessing_are_those_of_the_card(folder: Path) -> None:
    cache = ModelCache(folder, device="cpu")
    saved, google = cache.get("saved"), cache.get("google.npz")
    assert (saved.classes, saved.source) == (("a", "b", "c"), "a friend")
    assert (google.classes, google.source) == (("0", "1", "2"), str(folder / "google.npz"))
    assert saved.transform.apply([np.zeros((5, 9, 3), np.uint8)]).shape == (1, 3, 16, 16)


def test_a_corrupt_checkpoint_among_others_raises_when_it_is_chosen(folder: Path) -> None:
    cache = ModelCache(folder, device="cpu")
    with pytest.raises(ValueError, match="broken"):
        cache.get("broken")
    assert cache.get("saved").name == "saved"
    with pytest.raises(ValueError, match=r"no checkpoint 'others' here; choose one of broken, google.npz"):
        cache.get("others")


def test_a_corrupt_checkpoint_alone_raises_at_once(folder: Path) -> None:
    with pytest.raises(ValueError, match="broken"):
        ModelCache(folder / "broken")


def test_a_model_without_a_head_has_no_classes(tmp_path: Path) -> None:
    save_model(build_model(ViTConfig(**{**vars(SMALL), "num_classes": 0})), tmp_path / "features")
    assert ModelCache(tmp_path / "features", device="cpu").get("features").classes == ()
