import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from vitlab.io import write_sums
from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing
from vitlab.weights import load_card, load_checkpoint, load_model, save_model
from vitlab.weights.google import write_google

ALLOWED = r"give a Google \.npz, a folder of save_model, timm or Hugging Face"


def test_the_format_follows_from_the_content(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    model = tiny()
    write_google(model, tmp_path / "vit.npz")
    (tmp_path / "unknown_suffix").write_bytes((tmp_path / "vit.npz").read_bytes())
    save_model(model, tmp_path / "run" / "model", extra={"source": "a test"})
    (tmp_path / "run" / "config.json").write_text('{"model": {}}')  # the run's settings
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    images = torch.randn(2, 3, 12, 12)
    google, ours = Preprocessing.google().to_card(), Preprocessing(12).to_card()
    for path in ("vit.npz", "unknown_suffix", "run", "run/model", "run/model/model.safetensors"):
        loaded = load_model(str(tmp_path / path))
        assert loaded.config == model.config
        assert not loaded.training
        assert torch.equal(loaded(images), model(images))
        expected = {"source": "a test", "preprocessing": ours} if "run" in path else {"preprocessing": google}
        assert load_card(tmp_path / path) == expected


@pytest.mark.parametrize("name", ["empty", "text.txt", "half.npz", "array.npy"])
def test_other_files_are_refused(tmp_path: Path, name: str) -> None:
    for load in (load_model, load_card):
        with pytest.raises(ValueError, match=rf"nothing at .*{name}; {ALLOWED}"):
            load(tmp_path / name)
    (tmp_path / name).write_bytes(b"" if name == "empty" else b"some words")
    if name == "array.npy":
        np.save(tmp_path / name, np.zeros(3))
    with pytest.raises(ValueError, match=rf"{name} is not a checkpoint.*{ALLOWED}"):
        load_model(tmp_path / name)


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["model.pt", "model", "model.npz", "model.safetensors"])
@pytest.mark.parametrize("writer", ["torch", "old torch", "pickle"])
def test_a_pickle_is_never_loaded(tmp_path: Path, name: str, writer: str) -> None:
    path, mark = tmp_path / name, tmp_path / "exploded"
    if writer == "pickle":
        path.write_bytes(pickle.dumps(Bomb(mark)))
    else:
        torch.save({"weights": Bomb(mark)}, path, _use_new_zipfile_serialization=writer == "torch")
    with pytest.raises(ValueError, match=r"is a pickle.*never loaded; convert it to safetensors"):
        load_model(path)
    assert not mark.exists()


@pytest.mark.parametrize("length", [0x280, 0x480])
def test_a_header_length_may_begin_as_a_pickle(tmp_path: Path, length: int) -> None:
    data = safetensors.torch.save({"patch_embed.proj.weight": torch.zeros(8, 3, 2, 2)})
    end = 8 + int.from_bytes(data[:8], "little")
    path = tmp_path / "weights.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + data[8:end].ljust(length) + data[end:])  # may end in blanks
    assert path.read_bytes()[0] == 0x80
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.fc1\.weight is missing"):  # it is read
        load_model(path)


def test_folders_of_something_else(tmp_path: Path) -> None:
    def check(problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            load_model(tmp_path)

    check(rf"holds no checkpoint; {ALLOWED}")
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "config.json").write_text("{}")
    check("training that has not ended")
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    check(r"holds no model\.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    check(r"pytorch_model\.bin is a pickle")


def test_a_folder_whose_writer_was_killed(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    """Between renaming the old model and renaming the new one; and with only the old one left."""
    model, images = tiny(), torch.randn(2, 3, 12, 12)
    for leftover in ("new", "old"):
        folder = tmp_path / leftover / "run" / "model"
        save_model(model, folder)
        folder.rename(folder.with_name(f".model.0123456789abcdef.{leftover}"))
        if leftover == "new":
            save_model(tiny(), folder.with_name(".model.0123456789abcdef.old"))
        loaded = load_model(folder.parent if leftover == "new" else folder)
        assert torch.equal(loaded(images), model(images))
        assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_changed_card_of_a_run(tmp_path: Path, tiny: Callable[..., ViT], caplog: pytest.LogCaptureFixture) -> None:
    save_model(tiny(), tmp_path / "model", extra={"source": "a test"})
    write_sums(tmp_path, ["model/config.json", "model/model.safetensors"])
    load_model(tmp_path)
    assert caplog.text == ""
    card = tmp_path / "model" / "config.json"
    card.write_text(card.read_text().replace("a test", "a text"))
    load_model(tmp_path)
    assert "model/config.json does not match its checksum" in caplog.text


def test_a_hub_is_queried_once(tmp_path: Path, tiny: Callable[..., ViT], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that card and weights are of the same commit."""
    queries: list[str] = []

    def fetch(spec: str) -> Path:
        queries.append(spec)
        folder = tmp_path / f"{len(queries)}"
        save_model(tiny(width=8 * len(queries)), folder, extra={"source": f"commit {len(queries)}"})
        return folder

    monkeypatch.setattr("vitlab.weights.hub.download_checkpoint", fetch)
    checkpoint = load_checkpoint("hub:a/queried-once")
    model, card = load_model("hub:a/queried-once", image_size=24), load_card("hub:a/queried-once", image_size=24)
    assert queries == ["hub:a/queried-once"]
    assert checkpoint.card["source"] == card["source"] == "commit 1"
    assert model.config.width == 8  # pyright: ignore[reportAttributeAccessIssue]
