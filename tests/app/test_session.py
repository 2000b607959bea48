"""Which checkpoints are offered, what is accepted as an image, and what the page shows of one."""

import html
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.app import session as module
from vitlab.app.session import Session, find_checkpoints, inspect_image, read_image
from vitlab.data.transforms import EvalTransform
from vitlab.inspection.capture import capture
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig
from vitlab.models.vit import ViT, build_model
from vitlab.weights import Checkpoint, class_names, convert, load_checkpoint, save_model
from vitlab.weights.detect import find_checkpoint

SMALL = ViTConfig(image_size=(16, 24), patch_size=8, width=8, depth=3, heads=2, mlp_dim=8, num_classes=7)
PHOTO = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)


def save(path: Path, config: ModelConfig, **card: object) -> Path:
    model = build_model(config)
    for parameter in model.parameters():  # the head of a new model is zero
        torch.nn.init.normal_(parameter, std=0.5)
    save_model(model, path, extra=card)
    return path


def load(path: Path, config: ModelConfig, **card: object) -> Checkpoint:
    return load_checkpoint(save(path / "model", config, **card))


def png(image: np.ndarray) -> bytes:
    Image.fromarray(image).save(out := io.BytesIO(), format="PNG")
    return out.getvalue()


# ---- checkpoints ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two saved models, a run with one, a Google file, two corrupt models; and what is not a checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoints")
    config = replace(SMALL, depth=1, num_classes=3)
    save(folder / "saved", replace(config, image_size=16), classes=["a", "b", "c"], source="a friend")
    save(folder / "other", replace(config, num_classes=2))
    save(folder / "run" / "model", config)
    (folder / "run" / "config.json").write_text("{}")
    convert(folder / "saved", folder / "google.npz", to="google")
    save(folder / "lost", config)
    (folder / "lost" / "model.safetensors").write_bytes(b"{")
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224"}))
    (folder / "broken" / "model.safetensors").write_bytes(b"nothing")
    (folder / "unfinished" / "checkpoints").mkdir(parents=True)
    (folder / "unfinished" / "config.json").write_text("{}")
    (folder / "empty").mkdir()
    torch.save({}, folder / "pickled.pt")
    (folder / "notes.txt").write_text("none")
    return folder


def test_all_checkpoints_of_a_folder_but_no_pickle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = find_checkpoints(folder)
    assert list(paths) == ["broken", "google.npz", "lost", "other", "run", "saved"]
    assert paths["run"] == str(folder / "run")
    for name in ("run", "google.npz", "run/model"):
        assert find_checkpoints(folder / name) == {Path(name).name: str(folder / name)}
    for name in ("empty", "pickled.pt"):
        with pytest.raises(ValueError, match=name):
            find_checkpoints(folder / name)

    def find(path: str | Path) -> object:
        if Path(path).name == "lost":
            raise PermissionError(13, "Permission denied", str(path))
        return find_checkpoint(path)

    monkeypatch.setattr("vitlab.app.session.find_checkpoint", find)
    assert list(find_checkpoints(folder)) == ["broken", "google.npz", "other", "run", "saved"]


def test_parts_of_the_page(folder: Path) -> None:
    session = Session(folder, device="cpu")
    parts = session.inspect("saved", "a.png", png(PHOTO))
    assert 'role="status">a.png<' in parts["message"]
    assert sorted(name for name, _ in predictions(parts["result"])) == ["a", "b", "c"]
    for words in ("ViT/8", "<dd>16 × 16</dd>", "<dd>2 × 2</dd>", "GMACs", "a friend"):
        assert words in parts["model"]
    assert len(predictions(session.inspect("other", "a.png", png(PHOTO))["result"])) == 2
    assert len(session._loaded) == 1
    assert str(folder / "google.npz") in session.inspect("google.npz", "", b"")["model"]
    parts = session.inspect("saved", "b <i>.jpg", b"Dear all")
    assert 'role="alert"' in parts["message"]
    assert "b &lt;i&gt;.jpg: not " in parts["message"]
    assert parts["result"] == ""
    parts = session.inspect("saved", "", b"")
    assert "Allowed are JPEG, PNG, " in parts["message"]
    assert parts["result"] == ""


@pytest.mark.parametrize("name", ["lost", "others"])
def test_checkpoints_that_cannot_be_loaded(folder: Path, name: str) -> None:
    parts = Session(folder, device="cpu").inspect(name, "a.png", png(PHOTO))
    assert 'role="alert"' in parts["message"]
    assert name in parts["message"]
    assert (parts["result"], parts["model"]) == ("", "")
    with pytest.raises(ValueError, match=name):
        Session(folder / name)


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("load_for_evaluation", RuntimeError("out of memory")),
        ("inspect_image", torch.OutOfMemoryError("tried 9 GB")),
        ("inspect_image", MemoryError()),
    ],
)
def test_any_error_is_a_message(folder: Path, function: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise error

    session = Session(folder, device="cpu")
    monkeypatch.setattr(f"vitlab.app.session.{function}", fail)
    parts = session.inspect("saved", "a.png", png(PHOTO))
    assert 'role="alert"' in parts["message"]
    assert (str(error) or "MemoryError") in parts["message"]


# ---- images ----


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (read_image(png(PHOTO), "a.png") == PHOTO).all()
    monkeypatch.setattr(module, "MAX_BYTES", 2**20)
    for data, reason in (
        (b"Dear all,\n", "not an image"),
        (png(np.zeros((20, 660, 3), np.uint8)), "660 x 20 pixels"),
        (bytes(2**20 + 1), "more than 1 MiB"),
    ):
        with pytest.raises(ValueError, match=rf"a\.png.*{reason}"):
            read_image(data, "a.png")


def predictions(text: str) -> list[tuple[str, str]]:
    return re.findall(r'<li><span class="name">(.*?)</span> <span class="share">(.*?)%</span>', text)


def test_the_result_holds_predictions_maps_and_distances(tmp_path: Path) -> None:
    vit = load(tmp_path, SMALL, classes=["crane", "<b>", "c", "d", "e", "f", "crane"])
    text = inspect_image(vit, PHOTO, "cat <1>.png")
    assert isinstance(vit.model, ViT)
    captured = capture(vit.model, [EvalTransform((16, 24), vit.preprocessing).apply([PHOTO])])
    (probabilities,) = torch.from_numpy(captured.logits).softmax(dim=1).numpy()
    order = np.argsort(-probabilities)[:5]
    names = class_names(vit.metadata, 7)
    assert predictions(text) == [(html.escape(names[i]), f"{probabilities[i]:.1%}"[:-1]) for i in order]
    row, column = np.unravel_index(captured.rollout[0].argmax(), captured.rollout[0].shape)
    for words in (
        "7 classes",
        "40 × 30 pixels; the model sees 24 × 16.",
        "cat &lt;1&gt;.png, as the model sees it",
        f'data-peaks="[[{row + 1},{column + 1},',
        f"{captured.image_distances[0, 0].mean():.1f} pixels in the first layer",
    ):
        assert words in text


def test_labels_that_are_set(tmp_path: Path) -> None:
    """Of a model of several labels per image, whose probabilities are no softmax."""
    thresholds = [0.0] * 2 + [1.0] * 5
    checkpoint = load(tmp_path, SMALL, multi_label=True, classes=list("abcdefg"), label_thresholds=thresholds)
    text = html.unescape(inspect_image(checkpoint, PHOTO, "photo"))
    assert re.search(r"<p>Labels: (a, b|b, a)</p>", text)
    assert "softmax" not in text
    none = replace(checkpoint, metadata=checkpoint.metadata | {"label_thresholds": [1.0] * 7})
    assert "<p>Labels: none</p>" in inspect_image(none, PHOTO, "photo")
    headless = inspect_image(load(tmp_path / "headless", replace(SMALL, num_classes=0)), PHOTO, "a.png")
    assert "data-sprite" in headless
    assert predictions(headless) == []
    resnet = ResNetConfig(image_size=32, body=ResNetBody((1, 1), width=32), num_classes=4)
    with pytest.raises(ValueError, match="ResNet"):
        inspect_image(load(tmp_path / "resnet", resnet), PHOTO, "a.png")
