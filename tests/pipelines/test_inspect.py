"""Looking inside a checkpoint: one call writes the page, the figures and the numbers."""

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from irregular import irregular
from markup import check
from PIL import Image

from vitlab.config import DataConfig, TrainConfig
from vitlab.data.registry import load_dataset
from vitlab.data.transforms import EvalTransform
from vitlab.inspect.capture import capture
from vitlab.inspect.drawings import FIGURES
from vitlab.models import ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.pipelines.inspect import DISTANCE_IMAGES, as_text, inspect_checkpoint
from vitlab.pipelines.pretrain import pretrain
from vitlab.preprocessing import Preprocessing
from vitlab.weights import load_model, save_model

SIZES: dict[str, Any] = {
    "image_size": 16, "patch_size": 4, "width": 16, "depth": 2, "heads": 2, "mlp_dim": 16, "num_classes": 3,
    "head_std": 0.5,
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Saves a small random model, with settings to change and what its card says; its folder."""

    def save(extra: dict[str, Any] | None = None, **settings: Any) -> Path:
        model = build_model(ViTConfig(**SIZES | settings), generator=torch.Generator().manual_seed(0))
        save_model(model, tmp_path / "model", extra={"classes": ["a", "b", "c"]} if extra is None else extra)
        return tmp_path / "model"

    return save


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """A folder of five digits."""
    data = load_dataset("digits", "test")
    (tmp_path / "digits").mkdir()
    for i in range(5):
        Image.fromarray(data.image(i)).save(tmp_path / "digits" / f"{i}.png")
    return tmp_path / "digits"


def inspect(checkpoint: Path, *sources: Path | str, **options: Any) -> tuple[dict[str, Any], Path]:
    out = checkpoint.parent / "out"
    return inspect_checkpoint(checkpoint, [str(each) for each in sources], out, device="cpu", **options), out


def test_a_run_s_own_result_is_not_written_over(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    before = (tmp_path / "run" / "result.json").read_bytes()
    with pytest.raises(ValueError, match=r"holds a run or a model.*run/look"):
        inspect_checkpoint(tmp_path / "run", [], tmp_path / "run", device="cpu")
    assert (tmp_path / "run" / "result.json").read_bytes() == before
    inspect_checkpoint(tmp_path / "run", [], tmp_path / "run" / "look", device="cpu")


def test_page_figures_and_numbers(checkpoint: Callable[..., Path], digits: Path) -> None:
    folder = checkpoint()
    found, out = inspect(folder, digits, shown=3, top=2, batch_size=2)
    assert json.loads((out / "result.json").read_text()) == found
    assert found["images"] == 5
    assert [each["path"] for each in found["shown"]] == [str(digits / f"{i}.png") for i in range(3)]
    assert found["figures"] == [f"figures/{name}" for name in FIGURES]
    written = {path.name for path in (out / "figures").iterdir()}
    assert written == {f"{name}.{suffix}" for name in FIGURES for suffix in ("png", "svg", "npz")}
    for name in FIGURES:
        assert Image.open(out / "figures" / f"{name}.png").format == "PNG"
        assert (out / "figures" / f"{name}.svg").read_bytes().startswith(b"<?xml")
    page = check((out / "index.html").read_text())
    assert len(page.all("canvas")) == 3
    assert "the first 3 of 5 images" in page.words
    assert found["page"] == str((out / "index.html").resolve())

    model = load_model(folder)
    pixels = [np.array(Image.open(digits / f"{i}.png").convert("RGB")) for i in range(5)]
    expected = capture(model, [EvalTransform(16).apply(pixels)], keep=3)
    arrays = {name: dict(np.load(out / "figures" / f"{name}.npz", allow_pickle=False)) for name in FIGURES}
    np.testing.assert_allclose(arrays["distances"]["distances"], expected.distances, rtol=1e-4)
    np.testing.assert_allclose(arrays["heads"]["heads"], expected.heads, atol=1e-6)
    np.testing.assert_allclose(arrays["attention"]["rollout"], expected.rollout, atol=1e-6)
    np.testing.assert_allclose(arrays["attention"]["rollout_plain"], expected.rollout_plain, atol=1e-6)
    assert arrays["components"]["components"].shape == (3, 4, 4, 3)
    assert arrays["filters"]["components"].shape == (15, 4, 4, 3)
    assert arrays["positions"]["similarity"].shape == (1, 4, 4, 4, 4)
    np.testing.assert_allclose(list(found["distances"].values()), expected.distances, rtol=1e-4)
    assert expected.probabilities is not None
    for each, row in zip(found["shown"], expected.probabilities, strict=True):
        best = np.argsort(-row)[:2]
        assert [answer["class"] for answer in each["answers"]] == ["abc"[i] for i in best]
        assert [answer["probability"] for answer in each["answers"]] == pytest.approx(row[best], abs=1e-5)

    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert inspect(folder, digits, shown=3, top=2, batch_size=2)[0] == found
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before, "again, the same bytes"


def test_broken_images_are_named_and_left_out(checkpoint: Callable[..., Path], digits: Path, tmp_path: Path) -> None:
    folder = checkpoint()
    (digits / "2.png").write_bytes(b"no image")
    (digits / "3 <b>.png").touch()
    found, out = inspect(folder, digits)
    assert found["images"] == 4
    assert [each["path"] for each in found["unreadable"]] == [str(digits / "2.png"), str(digits / "3 <b>.png")]
    page = check((out / "index.html").read_text())
    assert str(digits / "3 <b>.png") in page.words
    assert "zero bytes" in page.words
    assert "not an image" in as_text(found)
    for name in ("0", "1", "3", "4"):
        (digits / f"{name}.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"none of the 6 images can be read; the first, .*0\.png: the file is empty"):
        inspect_checkpoint(folder, [str(digits)], tmp_path / "none", device="cpu")
    assert not (tmp_path / "none").exists()


def test_what_is_no_regular_file_is_left_out(checkpoint: Callable[..., Path], digits: Path, tmp_path: Path) -> None:
    irregular("pipe", digits / "x\ny.png", tmp_path)
    found, _ = inspect(checkpoint(), digits)
    assert found["images"] == 5
    (left,) = found["unreadable"]
    assert left["path"] == str(digits / "x\ny.png")
    assert left["reason"].startswith("it is a named pipe")
    assert f"{left['path']!r}: cannot be read: it is a named pipe" in as_text(found)


def test_without_images(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    (folder.parent / "out" / "figures").mkdir(parents=True)
    for name in ("heads.png", "heads.svg", "own.png"):
        (folder.parent / "out" / "figures" / name).touch()
    found, out = inspect(folder)
    assert found["images"] == 0
    assert found["figures"] == ["figures/filters", "figures/positions"]
    assert {path.stem for path in (out / "figures").iterdir()} == {
        "filters",
        "positions",
        "own",
    }, "an earlier look's are gone, anything else is not"
    assert "shown" not in found
    page = check((out / "index.html").read_text())
    assert f"{found['parameters']:,}" in page.words
    assert as_text(found).splitlines() == ["ViT/4: 4,547 parameters, 8.31e-05 GMACs an image", found["page"]]


@pytest.mark.parametrize(
    "settings",
    [
        {"num_classes": 0, "position": "none"},
        {"pool": "gap", "position": "2d", "position_at": "every"},
        {"encoder": "axial"},
        {"registers": 2, "pool": "map"},
        {"image_size": (32, 16), "stem": ResNetBody((1,), width=32), "patch_size": 1},
    ],
    ids=["no head", "gap, positions in every block", "axial", "map and registers", "hybrid"],
)
def test_every_kind_of_model(checkpoint: Callable[..., Path], digits: Path, settings: dict[str, Any]) -> None:
    found, out = inspect(checkpoint({}, **settings), digits / "0.png")
    page = check((out / "index.html").read_text())
    assert len(page.all("canvas")) == 1
    assert ("it makes no predictions" in page.words) == (settings.get("num_classes") == 0)
    assert ("figures/positions" in found["figures"]) == (settings.get("position") != "none")
    assert len(found["distances"]) == (4 if "encoder" in settings else 2)


def test_as_the_card_says(checkpoint: Callable[..., Path], digits: Path) -> None:
    folder = checkpoint({"eval_resize": 24, "source": "a far place"})
    _, out = inspect(folder, digits / "0.png")
    assert "a far place" in check((out / "index.html").read_text()).words
    resized = np.load(out / "figures" / "attention.npz")["rollout"]
    pixels = [np.array(Image.open(digits / "0.png").convert("RGB"))]
    expected = capture(load_model(folder), [EvalTransform(16, Preprocessing.google(16, 24)).apply(pixels)]).rollout
    np.testing.assert_allclose(resized, expected, atol=1e-6)
    found, _ = inspect(folder, image_size=24)
    assert (found["image_size"], found["grid"]) == ([24, 24], [6, 6])


def test_a_image_on_the_standard_input(
    checkpoint: Callable[..., Path], digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (digits / "0.png").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    found, _ = inspect(checkpoint(), "-")
    assert [each["path"] for each in found["shown"]] == ["<stdin>"]


def test_what_cannot_be_looked_into(checkpoint: Callable[..., Path], digits: Path, tmp_path: Path) -> None:
    folder = checkpoint()
    for name in ("shown", "top", "batch_size"):
        with pytest.raises(ValueError, match=f"{name} is 0; give at least 1"):
            inspect(folder, digits, **{name: 0})
    with pytest.raises(ValueError, match="there is no file or folder"):
        inspect(folder, tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file; give a folder"):
        inspect_checkpoint(folder, [str(digits)], tmp_path / "file")
    body = ResNetBody((1, 1), width=32, version="v2")
    save_model(build_model(ResNetConfig(image_size=16, body=body, num_classes=3)), tmp_path / "resnet")
    with pytest.raises(ValueError, match="is a ResNet, which has no attention"):
        inspect_checkpoint(tmp_path / "resnet", [str(digits)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_shows_its_own_test_images_and_how_it_went(run: Path, tmp_path: Path) -> None:
    found = inspect_checkpoint(run, [], tmp_path / "out", shown=4, device="cpu")
    assert found["images"] == min(DISTANCE_IMAGES, len(load_dataset("digits", "test", classes=(0, 1, 2))))
    assert len(found["shown"]) == 4
    assert all(re.fullmatch(r"digits/test\[\d+\], [012]", each["path"]) for each in found["shown"])
    page = check((tmp_path / "out" / "index.html").read_text())
    for words in ("Trained from scratch on digits", "Test accuracy", "Confusion matrix"):
        assert words in page.words
    assert "pixels in layer 1" in as_text(found)
    assert found["image_size"] == [8, 8]
    larger = inspect_checkpoint(run, [], tmp_path / "out", shown=1, image_size=16, device="cpu")
    assert (larger["image_size"], larger["images"]) == ([16, 16], found["images"])


def test_a_search_shows_each_of_its_runs(run: Path, tmp_path: Path) -> None:
    """The folder of several runs has the first one's model for its own."""
    shutil.copytree(run / "model", tmp_path / "search" / "model")
    for name in ("run-0", "run-1"):
        shutil.copytree(run, tmp_path / "search" / name)
    found = inspect_checkpoint(tmp_path / "search", [], tmp_path / "out", shown=1, device="cpu")
    page = check((tmp_path / "out" / "index.html").read_text())
    assert "run-0: Trained from scratch on digits" in page.words
    assert "run-1: Trained from scratch on digits" in page.words
    assert found["images"] > 1


def test_a_resnets_run_shows_how_it_went(tmp_path: Path) -> None:
    config = TrainConfig(
        model=ResNetConfig(image_size=16, body=ResNetBody((1, 1), width=32, version="v2")),
        data=DataConfig(classes=(0, 1, 2)), steps=1, batch_size=8, log_every=1,
    )  # fmt: skip
    pretrain(config, tmp_path / "run", device="cpu", tensorboard=False)
    found = inspect_checkpoint(tmp_path / "run", [], tmp_path / "out", device="cpu")
    page = check((tmp_path / "out" / "index.html").read_text())
    for words in ("Trained from scratch on digits", "Confusion matrix", "Results by class", "Wrong predictions"):
        assert words in page.words
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == found
    assert as_text(found).startswith("ResNet: ")
    assert found["figures"] == []
    with pytest.raises(ValueError, match="is a ResNet, which has no attention"):
        inspect_checkpoint(tmp_path / "run", [str(tmp_path)], tmp_path / "out", device="cpu")
