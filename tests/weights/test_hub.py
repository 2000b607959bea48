"""Names on a hub, with a stand-in for the hub and with its real cache; nothing here needs a network."""

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
def hub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was asked of the hub; its answer is what stands under "answer" in the first entry."""
    asked: list[dict[str, Any]] = [{}]

    def snapshot_download(repository: str, **settings: Any) -> str:
        asked.append({"repository": repository, **settings})
        answer = asked[0]["answer"]
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """The hub's own cache, cut off from the network: makes the snapshot's folder of a repository."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def snapshot(repository: str) -> Path:
        folder = tmp_path / "cache" / f"models--{repository.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(COMMIT)
        (folder / "snapshots" / COMMIT).mkdir(parents=True)
        return folder / "snapshots" / COMMIT

    return snapshot


def refusal(kind: type[errors.HfHubHTTPError], said: str = "404 Client Error.\nRequest ID: 1") -> Exception:
    """The library's own exception, as it raises it on an answer of the server."""
    response: Any = SimpleNamespace(headers={}, request=None)
    return kind(said, response=response)


@pytest.mark.parametrize(
    ("spec", "repository", "revision"),
    [
        ("hub:google/vit-base-patch16-224", "google/vit-base-patch16-224", None),
        ("hub:a_b/c.d@v1.0", "a_b/c.d", "v1.0"),
        ("hub:a/b@refs/pr/1", "a/b", "refs/pr/1"),
        ("timm:vit_base_patch16_224.augreg_in21k", "timm/vit_base_patch16_224.augreg_in21k", None),
        ("timm:vit_tiny@main", "timm/vit_tiny", "main"),
    ],
)
def test_what_is_asked_of_the_hub(
    spec: str, repository: str, revision: str | None, hub: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").touch()
    hub[0]["answer"] = tmp_path
    assert download_checkpoint(spec) == tmp_path
    (asked,) = hub[1:]
    assert (asked["repository"], asked["revision"]) == (repository, revision)
    wanted = [
        "config.json",
        "preprocessor_config.json",
        "model.safetensors",
        "B_16.npz",
        "model.safetensors.index.json",
    ]
    unwanted = [
        "pytorch_model.bin",
        "model.pth",
        "modeling.py",
        "a/model.safetensors",
        "tokenizer.json",
        "model.npz.pkl",
    ]
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*wanted, *unwanted], **patterns)) == wanted


@pytest.mark.parametrize(
    "spec", ["hub:", "hub:vit", "hub:a/b/c", "hub:a/b@", "timm:", "timm:a/b", "google/vit", "HUB:a/b"]
)
def test_what_is_no_name_is_said(spec: str, hub: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match=r"is not a name on a hub; write hub:OWNER/NAME.*timm:NAME\.TAG"):
        download_checkpoint(spec)
    assert len(hub) == 1


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("hub:a/b", refusal(errors.RepositoryNotFoundError), "a/b does not exist or is private.*log in"),
        ("timm:vit_x.a", refusal(errors.RepositoryNotFoundError), "timm/vit_x.a does not exist"),
        ("timm:vit_x", refusal(errors.RepositoryNotFoundError), "timm:vit_x.TAG"),
        ("hub:a/b", refusal(errors.GatedRepoError), "page of a/b.*HF_TOKEN"),
        ("hub:a/b@v9", refusal(errors.RevisionNotFoundError), "a/b has no revision 'v9'"),
        ("hub:a/b", errors.HFValidationError("Repo id must be shorter"), "Repo id must be shorter"),
        ("hub:a/b", refusal(errors.HfHubHTTPError, "503 Busy.\nMore"), "503 Busy.*network.*download"),
        ("hub:a/b", errors.LocalEntryNotFoundError("no snapshot"), "no snapshot"),
        ("hub:a/b", OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_errors_say_what_to_do(spec: str, error: Exception, message: str, hub: list[dict[str, Any]]) -> None:
    hub[0]["answer"] = error
    with pytest.raises(UserError, match=message) as raised:
        download_checkpoint(spec)
    assert str(raised.value).startswith(spec)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("files", "found", "said"),
    [
        (["config.json", "model.safetensors", "old.npz"], "", ""),
        (["model-00001-of-00002.safetensors", "model.safetensors.index.json"], "", ""),
        (["B_16.npz"], "B_16.npz", ""),
        (["B_16.npz", "L_16.npz"], None, r"several checkpoints: give one of B_16\.npz, L_16\.npz in .*files"),
        (["config.json"], None, r"no \.safetensors and no \.npz.*pickle"),
        (None, None, r"no \.safetensors and no \.npz"),
    ],
)
def test_what_a_repository_holds(
    files: list[str] | None, found: str | None, said: str, hub: list[dict[str, Any]], tmp_path: Path
) -> None:
    hub[0]["answer"] = folder = tmp_path / "files"
    for name in files or ():
        folder.mkdir(exist_ok=True)
        (folder / name).touch()
    if found is not None:
        assert download_checkpoint("hub:a/b") == folder / found
    else:
        with pytest.raises(ValueError, match=said):
            download_checkpoint("hub:a/b")


def test_what_is_cached_needs_no_network(cache: Callable[[str], Path], tiny: Callable[..., ViT]) -> None:
    model, folder = tiny(), cache("owner/name")
    save_model(model, folder)
    assert download_checkpoint("hub:owner/name") == download_checkpoint(f"hub:owner/name@{COMMIT}") == folder
    loaded = load_model("hub:owner/name")
    assert all(torch.equal(loaded.state_dict()[name], each) for name, each in model.state_dict().items())


def test_without_a_network(cache: Callable[[str], Path]) -> None:
    cache("owner/name")
    for spec in ("hub:a/b", "hub:owner/name@v1"):
        with pytest.raises(UserError, match=rf"{spec} cannot be downloaded.*or download config\.json"):
            download_checkpoint(spec)
