"""Names on a hub, with an imitation of the hub and with its real cache; nothing here requires a network."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects

from vitlab.errors import UserError
from vitlab.models.vit import ViT
from vitlab.weights import load_model, save_model
from vitlab.weights.hub import download_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`requests` to the hub, and the `response` to all of them."""
    hub = SimpleNamespace(requests=[], response=None)

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
        ("timm:vit_base_patch16_224.augreg_in21k", "timm/vit_base_patch16_224.augreg_in21k", None),
        ("timm:vit_tiny@main", "timm/vit_tiny", "main"),
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
    wanted = ["config.json", "preprocessor_config.json", "a.safetensors", "B_16.npz", "model.safetensors.index.json"]
    others = ["pytorch_model.bin", "model.pth", "modeling.py", "a/model.safetensors", "tokenizer.json"]
    assert list(filter_repo_objects([*wanted, *others], **patterns)) == wanted


@pytest.mark.parametrize("spec", ["hub:vit", "hub:a/b/c", "hub:a/b@", "timm:", "timm:a/b", "google/vit"])
def test_invalid_names_are_refused(spec: str, hub: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=r"is not a name on a hub; write hub:OWNER/NAME.*timm:NAME\.TAG"):
        download_checkpoint(spec)
    assert not hub.requests


RESPONSE: Any = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.RepositoryNotFoundError("404\nRequest ID: 1", response=RESPONSE), "RepositoryNotFoundError.*log"),
        (errors.GatedRepoError("401", response=RESPONSE), "GatedRepoError.*HF_TOKEN"),
        (errors.HFValidationError("Repo id must be shorter"), "Repo id must be shorter"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_errors_say_what_to_do(error: Exception, message: str, hub: SimpleNamespace) -> None:
    hub.response = error
    with pytest.raises(UserError, match=message) as raised:
        download_checkpoint("timm:vit_x")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("files", "result"),
    [
        (["config.json", "model.safetensors", "old.npz"], ""),
        (["B_16.npz"], "B_16.npz"),
        (["B_16.npz", "L_16.npz"], ValueError("several checkpoints: give one of B_16.npz, L_16.npz")),
        (["config.json"], ValueError("no .safetensors and no .npz.*pickle")),
    ],
)
def test_files_of_a_repository(files: list[str], result: str | Exception, hub: SimpleNamespace, tmp_path: Path) -> None:
    hub.response = tmp_path
    for name in files:
        (tmp_path / name).touch()
    if isinstance(result, str):
        assert download_checkpoint("hub:a/b") == tmp_path / result
    else:
        with pytest.raises(ValueError, match=str(result)):
            download_checkpoint("hub:a/b")


def test_the_cache_requires_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., ViT]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    snapshot, model = folder / "snapshots" / COMMIT, tiny()
    save_model(model, snapshot)
    assert download_checkpoint("hub:owner/name") == download_checkpoint(f"hub:owner/name@{COMMIT}") == snapshot
    loaded = load_model("hub:owner/name")
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    for spec in ("hub:a/b", "hub:owner/name@v1"):
        with pytest.raises(UserError, match=rf"{spec} cannot be downloaded.*[Oo]r download config\.json"):
            download_checkpoint(spec)
