"""Inspecting a checkpoint: one call writes the page, the figures and the numbers."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from irregular import irregular
from markup import check
from PIL import Image

from vitlab.checksums import find_corrupt_files
from vitlab.config import DataConfig, TrainConfig
from vitlab.data.registry import load_dataset
from vitlab.data.transforms import EvalTransform
from vitlab.display import ProgressDisplay
from vitlab.inspection import run_section, write_pages
from vitlab.inspection.capture import capture
from vitlab.inspection.figures import FIGURES
from vitlab.inspection.write_pages import as_text, inspect_checkpoint, report
from vitlab.models import ResNetBody, ResNetConfig, ViTConfig
from vitlab.models.variant import override
from vitlab.models.vit import build_model
from vitlab.preprocessing import Preprocessing
from vitlab.runs.pretrain import pretrain
from vitlab.train.workdir import Workdir
from vitlab.weights import load_model, save_model

pytestmark = pytest.mark.usefixtures("unrendered")
SIZES: dict[str, Any] = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 2, "heads": 2, "mlp_dim": 16}
RESNET = ResNetConfig(image_size=16, body=ResNetBody((1, 1), width=32, version="v2"))


@pytest.fixture(autouse=True)
def _few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_section, "MAX_SHOWN", 2)
    monkeypatch.setattr(write_pages, "DISTANCE_IMAGES", {"whole": 8, "short": 8})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Saves a small random model with these settings and this card; returns its folder."""

    def save(card: dict[str, Any], **settings: Any) -> Path:
        config = override(ViTConfig(), **SIZES | {"num_classes": 3, "head_std": 0.5} | settings)
        save_model(build_model(config, generator=torch.Generator().manual_seed(0)), tmp_path / "model", extra=card)
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
    return inspect_checkpoint(checkpoint, [str(source) for source in sources], out, device="cpu", **options), out


def test_page_figures_and_numbers(checkpoint: Callable[..., Path], digits: Path) -> None:
    folder = checkpoint({"classes": ["a", "b", "c"]})
    result, out = inspect(folder, digits, shown=3, top=2, batch_size=2)
    assert json.loads((out / "result.json").read_text()) == result
    assert result["images"] == 5
    assert [image["path"] for image in result["shown"]] == [str(digits / f"{i}.png") for i in range(3)]
    assert result["figures"] == [f"figures/{name}" for name in FIGURES]
    written = {path.name for path in (out / "figures").iterdir()}
    assert written == {f"{name}.{suffix}" for name in FIGURES for suffix in ("png", "svg", "npz")}
    page = check((out / "index.html").read_text())
    assert len(page.all("canvas")) == 3
    assert "the first 3 of 5 images" in page.words

    pixels = [np.array(Image.open(digits / f"{i}.png").convert("RGB")) for i in range(5)]
    expected = capture(load_model(folder), [EvalTransform(16).apply(pixels)], keep=3)
    arrays = {name: dict(np.load(out / "figures" / f"{name}.npz", allow_pickle=False)) for name in FIGURES}
    np.testing.assert_allclose(arrays["distances"]["distances"], expected.distances, rtol=1e-4)
    np.testing.assert_allclose(arrays["heads"]["heads"], expected.heads, atol=1e-6)
    np.testing.assert_allclose(arrays["attention"]["rollout"], expected.rollout, atol=1e-6)
    assert arrays["components"]["components"].shape == (3, 4, 4, 3)
    assert arrays["filters"]["components"].shape == (15, 4, 4, 3)
    assert arrays["positions"]["similarity"].shape == (1, 4, 4, 4, 4)
    np.testing.assert_allclose(list(result["distances"].values()), expected.distances, rtol=1e-4)
    for image, row in zip(result["shown"], torch.from_numpy(expected.logits).softmax(dim=1).numpy(), strict=True):
        best = np.argsort(-row)[:2]
        assert [prediction["class"] for prediction in image["predictions"]] == ["abc"[i] for i in best]
        assert [prediction["probability"] for prediction in image["predictions"]] == pytest.approx(row[best], abs=1e-5)


def test_unreadable_images_are_named_and_left_out(
    checkpoint: Callable[..., Path], digits: Path, tmp_path: Path
) -> None:
    """From a model without a head and without position embeddings; none readable is an error."""
    folder = checkpoint({}, num_classes=0, position="none")
    (digits / "2.png").write_bytes(b"no image")
    (digits / "3 <b>.png").touch()
    irregular("pipe", digits / "x\ny.png", tmp_path)
    result, out = inspect(folder, digits)
    assert (result["images"], "figures/positions" in result["figures"]) == (4, False)
    unreadable = [str(digits / name) for name in ("2.png", "3 <b>.png", "x\ny.png")]
    assert [image["path"] for image in result["unreadable"]] == unreadable
    page = check((out / "index.html").read_text())
    assert unreadable[1] in page.words
    assert "makes no predictions" in page.words
    assert f"{unreadable[2]!r}: " in as_text(result)
    for name in ("0", "1", "3", "4"):
        (digits / f"{name}.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"none of the 7 images .*0\.png"):
        inspect_checkpoint(folder, [str(digits)], tmp_path / "none", device="cpu")
    assert not (tmp_path / "none").exists()


def test_unreadable_images_advance_the_progress_display(
    checkpoint: Callable[..., Path], digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("2.png", "4.png"):
        (digits / name).write_bytes(b"no image")
    done: list[int] = []
    monkeypatch.setattr(ProgressDisplay, "update", lambda _, number: done.append(number))
    result, _ = inspect(checkpoint({}), digits, batch_size=2)
    assert (result["images"], done) == (3, [1, 2, 3, 4, 5])


def test_without_images(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint({})
    (folder.parent / "out" / "figures").mkdir(parents=True)
    for name in ("heads.png", "mine.png"):
        (folder.parent / "out" / "figures" / name).touch()
    result, out = inspect(folder, image_size=24)
    assert (result["images"], result["image_size"], result["grid"]) == (0, [24, 24], [6, 6])
    assert {path.stem for path in (out / "figures").iterdir()} == {"filters", "positions", "mine"}
    assert f"{result['parameters']:,}" in check((out / "index.html").read_text()).words
    assert as_text(result).splitlines() == ["ViT/4: 4,867 parameters, 0.000229 GMACs an image", result["page"]]


def test_images_are_preprocessed_as_the_card_says(checkpoint: Callable[..., Path], digits: Path) -> None:
    """By an axial model, which has two layers a block."""
    card = {"preprocessing": Preprocessing.google(16, 24).to_metadata(), "source": "a far place"}
    folder = checkpoint(card, encoder="axial", pool="map", registers=2)
    result, out = inspect(folder, digits / "0.png")
    assert len(result["distances"]) == 4
    assert "a far place" in check((out / "index.html").read_text()).words
    rollout = np.load(out / "figures" / "attention.npz")["rollout"]
    pixels = [np.array(Image.open(digits / "0.png").convert("RGB"))]
    expected = capture(load_model(folder), [EvalTransform(16, Preprocessing.google(16, 24)).apply(pixels)]).rollout
    np.testing.assert_allclose(rollout, expected, atol=1e-6)


def test_what_cannot_be_inspected(run: Path, digits: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shown is 0"):
        inspect(run, digits, shown=0)
    with pytest.raises(ValueError, match="holds a run or a model"):
        inspect_checkpoint(run, [], run, device="cpu")
    save_model(build_model(RESNET), tmp_path / "resnet")
    with pytest.raises(ValueError, match="ResNet"):
        inspect_checkpoint(tmp_path / "resnet", [str(digits)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_sweep_shows_its_test_images_and_each_of_its_runs(run: Path, tmp_path: Path) -> None:
    """Also at another image size than that of the runs."""
    search = tmp_path / "search"
    shutil.copytree(run / "model", search / "model")
    for name in ("run-0", "run-1", "sweep/lr-0.1"):
        shutil.copytree(run, search / name)
    result = inspect_checkpoint(search, [], tmp_path / "out", shown=4, image_size=16, device="cpu")
    assert result["image_size"] == [16, 16]
    assert result["images"] == 8
    assert len(result["shown"]) == 4
    assert all(re.fullmatch(r"digits/test\[\d+\], [012]", image["path"]) for image in result["shown"])
    page = check((tmp_path / "out" / "index.html").read_text())
    assert all(f"{name}: Trained from scratch on digits" in page.words for name in ("run-0", "run-1"))
    assert page.words.count("95% confidence interval") == 2
    assert report(search, kind="none") == {"card": str((card := search / "model" / "README.md").resolve())}
    assert card.is_file()


def test_the_report_of_a_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page and the model card are beside what the run wrote, which stays intact; the card's code runs; and a card
    that was edited stays."""
    folder = tmp_path / "flowers"
    shutil.copytree(run, folder)
    result = report(folder, device="cpu")
    assert result["page"] == str(folder / "report" / "index.html")
    assert "95% confidence interval" in check((folder / "report" / "index.html").read_text()).words
    card = folder / "model" / "README.md"
    assert result["card"] == str(card)
    assert f"{json.loads((folder / 'result.json').read_text())['test']['accuracy']:.2%}" in card.read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", card.read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(card.parent)
    exec(code, names := {})
    assert names["model"].config == load_model(folder).config == load_model(run).config
    assert find_corrupt_files(folder) == {}
    card.write_text("edited")
    (folder / "SHA256SUMS").unlink()
    settings = json.loads((folder / "config.json").read_text())
    with Workdir(folder, settings, tensorboard=False) as opened:  # writes the checksums again
        assert opened.finished
    assert "README" not in (folder / "SHA256SUMS").read_text()
    assert "note" not in report(folder, tmp_path / "elsewhere", device="cpu", kind="short")
    assert (tmp_path / "elsewhere" / "index.html").exists()
    assert card.read_text() == "edited"


def test_an_error_of_the_report_is_a_note(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "UserError: " in report(tmp_path / "nowhere")["note"]

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(write_pages, "make_figures", fail)
    note = report(run, tmp_path / "out", device="cpu")["note"]
    assert "out of memory" in note
    assert f"`vitlab inspect {run} --out {tmp_path / 'out'}`" in note


def test_a_resnets_run_shows_its_training(tmp_path: Path) -> None:
    data = DataConfig(classes=(0, 1, 2))
    config = TrainConfig(model=RESNET, data=data, steps=1, batch_size=8, log_every=1)
    pretrain(config, tmp_path / "run", device="cpu", tensorboard=False)
    result = inspect_checkpoint(tmp_path / "run", [], tmp_path / "out", device="cpu")
    page = check((tmp_path / "out" / "index.html").read_text())
    assert "Trained from scratch on digits" in page.words
    assert as_text(result).startswith("ResNet: ")
    assert result["figures"] == []
