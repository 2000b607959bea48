import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import torch
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects
from states import Bomb

from vitlab.checksums import write_sums
from vitlab.errors import UserError
from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing
from vitlab.weights import load_checkpoint, load_metadata, load_model, save_model
from vitlab.weights.detect import download_checkpoint
from vitlab.weights.google import write_google


def test_the_format_follows_from_the_content(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    model = tiny()
    write_google(model, tmp_path / "vit.npz")
    (tmp_path / "unknown_suffix").write_bytes((tmp_path / "vit.npz").read_bytes())
    save_model(model, tmp_path / "run" / "model", extra={"source": "a test"})
    (tmp_path / "run" / "config.json").write_text('{"model": {}}')  # the run's settings
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    images = torch.randn(2, 3, 12, 12)
    google, ours = Preprocessing.google().to_metadata(), Preprocessing(12).to_metadata()
    for path in ("vit.npz", "unknown_suffix", "run", "run/model", "run/model/model.safetensors"):
        loaded = load_model(str(tmp_path / path))
        assert loaded.config == model.config
        assert not loaded.training
        assert torch.equal(loaded(images), model(images))
        expected = {"source": "a test", "preprocessing": ours} if "run" in path else {"preprocessing": google}
        assert load_metadata(tmp_path / path) == expected


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    np.save(tmp_path / "array.npy", np.zeros(3))
    for name, problem in (
        ("absent", "no file or folder"),
        ("empty", "not a checkpoint"),
        ("array.npy", "not a checkpoint"),
    ):
        with pytest.raises(UserError, match=problem):
            load_model(tmp_path / name)


@pytest.mark.parametrize("name", ["model.pt", "model.npz", "model.safetensors"])
@pytest.mark.parametrize("writer", ["torch", "old torch", "pickle"])
def test_a_pickle_is_never_loaded(tmp_path: Path, name: str, writer: str) -> None:
    path, mark = tmp_path / name, tmp_path / "exploded"
    if writer == "pickle":
        path.write_bytes(pickle.dumps(Bomb(mark)))
    else:
        torch.save({"weights": Bomb(mark)}, path, _use_new_zipfile_serialization=writer == "torch")
    with pytest.raises(ValueError, match=rf"is a pickle.*`vitlab convert \S+{name} OUT`"):
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
    files = {"metrics.jsonl": "", "config.json": "{}"}
    for changes, problem in (
        ({}, "holds no checkpoint"),
        (files, "training that has not ended"),
        ({"metrics.jsonl": None, "config.json": '{"model_type": "vit"}'}, r"holds no model\.safetensors"),
        ({"pytorch_model.bin": ""}, r"`vitlab convert \S+/pytorch_model\.bin OUT`"),
        ({"a.pth": "12", "best.pth": "1", "optimizer.pt": "123", "config.json": None}, r"/best\.pth OUT`"),
    ):
        for name, text in changes.items():
            (tmp_path / name).unlink() if text is None else (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=problem):
            load_model(tmp_path)


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


# --- names on a hub: an imitation of it, and its real cache; nothing here requires a network -----------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RESPONSE: Any = SimpleNamespace(headers={}, request=None)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`requests` to the hub, and the `response` to all of them."""
    hub = SimpleNamespace(requests=[], response=None)
    download_checkpoint.cache_clear()

    def snapshot_download(repository: str, **settings: Any) -> str:
        hub.requests.append({"repository": repository, **settings})
        if isinstance(hub.response, Exception):
            raise hub.response
        return str(hub.response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return hub


@pytest.mark.parametrize(
    ("spec", "repository", "revision"),
    [
        ("hub:google/vit-base-patch16-224", "google/vit-base-patch16-224", None),
        ("hub:a/b@refs/pr/1", "a/b", "refs/pr/1"),
        ("timm:vit_tiny.a@main", "timm/vit_tiny.a", "main"),
    ],
)
def test_no_pickle_and_no_code_is_downloaded(
    spec: str, repository: str, revision: str | None, hub: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").touch()
    hub.response = tmp_path
    assert download_checkpoint(spec) == tmp_path
    (request,) = hub.requests
    assert (request["repository"], request["revision"]) == (repository, revision)
    patterns = {name: request[name] for name in ("allow_patterns", "ignore_patterns")}
    wanted = ["config.json", "processor_config.json", "a.safetensors", "B_16.npz", "model.safetensors.index.json"]
    wanted += ["preprocessor_config.json", "open_clip_config.json"]
    others = ["pytorch_model.bin", "model.pth", "modeling.py", "a/model.safetensors", "tokenizer.json"]
    assert list(filter_repo_objects([*wanted, *others], **patterns)) == wanted


@pytest.mark.parametrize(
    ("spec", "response", "message"),
    [
        *((spec, None, "is not a name on a hub") for spec in ("hub:vit", "hub:a/b/c", "timm:a/b")),
        ("timm:vit_x", errors.RepositoryNotFoundError("404\nRequest ID: 1", response=RESPONSE), "NotFoundError.*log"),
        ("timm:vit_x", errors.HFValidationError("id must be shorter"), "id must be shorter"),
        ("timm:vit_x", OSError(28, "No space left"), "No space left"),
    ],
)
def test_errors_of_a_hub_say_what_to_do(spec: str, response: Any, message: str, hub: SimpleNamespace) -> None:
    hub.response = response
    with pytest.raises(UserError, match=message) as raised:
        load_model(spec)
    assert "\n" not in str(raised.value)


def test_files_of_a_repository(hub: SimpleNamespace, tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    hub.response = tmp_path
    (tmp_path / "config.json").touch()
    with pytest.raises(UserError, match=r"`vitlab convert FOLDER/pytorch_model\.bin OUT`"):
        download_checkpoint("hub:a/b")
    (tmp_path / "B_16.npz").touch()
    assert download_checkpoint("hub:a/b") == tmp_path / "B_16.npz"
    (tmp_path / "L_16.npz").touch()
    with pytest.raises(UserError, match=r"B_16\.npz, L_16\.npz"):
        download_checkpoint("hub:a/c")
    save_model(tiny(), tmp_path / "model", extra={"source": "a commit"})
    hub.response = tmp_path / "model"
    hub.requests.clear()
    assert load_checkpoint("hub:a/d").metadata["source"] == load_metadata("hub:a/d", image_size=24)["source"]
    assert len(hub.requests) == 1  # so that card and weights are of the same commit


def test_the_cache_requires_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., ViT]
) -> None:
    download_checkpoint.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    save_model(tiny(), folder / "snapshots" / COMMIT)
    assert download_checkpoint("hub:owner/name") == download_checkpoint(f"hub:owner/name@{COMMIT}")
    assert load_model("hub:owner/name").config == tiny().config
    with pytest.raises(UserError, match="hub:a/b cannot be downloaded"):
        download_checkpoint("hub:a/b")
