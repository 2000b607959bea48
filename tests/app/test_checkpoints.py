"""Which checkpoints are offered, and which of them are in memory."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vitlab.app import checkpoints
from vitlab.app.checkpoints import CACHED, ModelCache, find_checkpoints
from vitlab.models import ViTConfig, build_model
from vitlab.weights import Checkpoint, convert, save_model

SMALL = ViTConfig(image_size=16, patch_size=8, width=8, depth=1, heads=2, mlp_dim=8, num_classes=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model, a run with one, a Google file, a corrupt model; and what is not a checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = build_model(SMALL)
    save_model(model, folder / "saved", extra={"classes": ["a", "b", "c"], "source": "a friend"})
    save_model(model, folder / "run" / "model")
    (folder / "run" / "config.json").write_text("{}")
    convert(folder / "saved", folder / "google.npz", to="google")
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224"}))
    (folder / "broken" / "model.safetensors").write_bytes(b"nothing")
    (folder / "unfinished" / "checkpoints").mkdir(parents=True)
    (folder / "unfinished" / "config.json").write_text("{}")
    (folder / "empty").mkdir()
    torch.save({}, folder / "pickled.pt")
    (folder / "notes.txt").write_text("none")
    return folder


def test_all_checkpoints_of_a_folder_but_no_pickle(folder: Path) -> None:
    paths = find_checkpoints(folder)
    assert list(paths) == ["broken", "google.npz", "run", "saved"]
    assert paths["run"] == str(folder / "run")


@pytest.mark.parametrize("name", ["saved", "run", "google.npz", "run/model"])
def test_one_checkpoint(folder: Path, name: str) -> None:
    assert find_checkpoints(folder / name) == {Path(name).name: str(folder / name)}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("empty", "empty holds no checkpoint; give .*save_model"),
        ("unfinished", "training that has not ended"),
        ("pickled.pt", "is a pickle"),
        ("none", "there is nothing at"),
    ],
)
def test_a_path_without_a_checkpoint_raises(folder: Path, name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        find_checkpoints(folder / name)


def test_the_last_used_stay_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[tuple[str, int]] = []

    def load(path: str) -> Checkpoint:
        loads.append((Path(path).name, len(cache._loaded)))
        return original(path)

    original = checkpoints.load_checkpoint
    monkeypatch.setattr(checkpoints, "load_checkpoint", load)
    cache = ModelCache(folder, device="cpu")
    for name in ("saved", "run", "saved", "google.npz", "saved", "run"):
        assert cache.get(name).name == name
    assert loads == [("saved", 0), ("run", 1), ("google.npz", 1), ("run", 1)], "memory is freed before loading"
    assert len(cache._loaded) == CACHED


def test_classes_source_and_preprocessing_are_those_of_the_card(folder: Path) -> None:
    cache = ModelCache(folder, device="cpu")
    saved, google = cache.get("saved"), cache.get("google.npz")
    assert (saved.classes, saved.source) == (("a", "b", "c"), "a friend")
    assert (google.classes, google.source) == (("0", "1", "2"), str(folder / "google.npz"))
    assert saved.transform.apply([np.zeros((5, 9, 3), np.uint8)]).shape == (1, 3, 16, 16)


def test_a_model_without_a_head_has_no_classes(tmp_path: Path) -> None:
    save_model(build_model(replace(SMALL, num_classes=0)), tmp_path / "features")
    assert ModelCache(tmp_path / "features", device="cpu").get("features").classes == ()


def test_corrupt_and_unknown_checkpoints_raise(folder: Path) -> None:
    cache = ModelCache(folder, device="cpu")
    with pytest.raises(ValueError, match="broken"):
        cache.get("broken")
    assert cache.get("saved").name == "saved"
    with pytest.raises(ValueError, match=r"no checkpoint 'others' here; choose one of broken, google.npz"):
        cache.get("others")
    with pytest.raises(ValueError, match="broken"):
        ModelCache(folder / "broken")
