"""A run's folder read back: the page gets what the run computed, or what is missing."""

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.config import DataConfig, OptimConfig, TrainConfig
from vitlab.data.dataset import Labels
from vitlab.data.registry import load_dataset
from vitlab.data.transforms import to_range
from vitlab.inspection import finished_run
from vitlab.inspection.capture import capture
from vitlab.inspection.figures import fit, masked
from vitlab.inspection.finished_run import Run, run_folders
from vitlab.models import ViTConfig
from vitlab.runs.pretrain import pretrain
from vitlab.runs.run import PREDICTIONS
from vitlab.weights import load_model


def test_folders_of_runs(run: Path, tmp_path: Path) -> None:
    assert run_folders(run) == [run]
    assert run_folders(str(run)) == [run]
    for name in ("run-0", "run-1", "sweep"):
        shutil.copytree(run, tmp_path / "search" / name)
    (tmp_path / "search" / "run-1" / "result.json").unlink()  # has not ended
    assert run_folders(tmp_path / "search") == [tmp_path / "search" / "run-0"]
    for number in range(1, 12):
        shutil.copytree(run, tmp_path / "many" / f"run-{number}")
    assert [folder.name for folder in run_folders(tmp_path / "many")] == [f"run-{number}" for number in range(1, 12)]
    assert run_folders(run / "model") == []
    assert run_folders(run / "result.json") == []
    assert run_folders("hub:owner/name") == []


def test_phase_holds_what_the_run_computed(run: Path) -> None:
    section = Run.read(run).section()
    result = json.loads((run / "result.json").read_text())["test"]
    numbers = section.numbers.values()
    for name in ("accuracy", "balanced_accuracy", "expected_calibration_error"):
        assert f"{result[name]:.1%}" in numbers
    low, high = result["accuracy_interval"]
    assert f"{low:.1%} to {high:.1%}" in numbers
    assert f"{json.loads((run / 'config.json').read_text())['examples']:,}" in numbers
    assert section.calibration is not None
    assert section.calibration[0].sum() == result["images"]
    assert [record["step"] for record in section.records] == [1, 2, 3, 3]  # the last is the evaluation
    assert (list(section.classes), section.per_class) == (["0", "1", "2"], result["per_class"])
    assert section.confusion is not None
    assert np.trace(section.confusion) == round(result["accuracy"] * result["images"])
    assert section.mistakes is not None
    assert 0 < len(section.mistakes) <= 24
    captions = [image.caption for image in section.mistakes]
    assert not [caption for caption in captions if re.match(r"predicted (.)\n.*\nlabel \1", caption)]
    confidences = [int(re.findall(r"(\d+)% sure", caption)[0]) for caption in captions]
    assert confidences == sorted(confidences, reverse=True)


def test_mistakes_beside_their_attention(run: Path) -> None:
    """On the left the image, on the right the same under its own rollout."""
    plain, attended = Run.read(run).section(), Run.read(run).section(device=torch.device("cpu"))
    assert (plain.attended, attended.attended) == (False, True)
    assert plain.mistakes is not None
    assert attended.mistakes is not None
    assert [image.caption for image in attended.mistakes] == [image.caption for image in plain.mistakes]
    model = load_model(run)
    for one, two in zip(plain.mistakes, attended.mistakes, strict=True):
        small = np.array(Image.open(io.BytesIO(one.data)).convert("RGB"))
        pixels = np.array(Image.open(io.BytesIO(two.data)).convert("RGB"), np.int64)
        rollout = capture(model, [to_range(torch.from_numpy(small).permute(2, 0, 1)[None].float())]).rollout[0]
        large = fit(small, 224, enlarge=True)
        assert pixels.shape == (224, 2 * 224 + 8, 3)
        assert np.abs(pixels[:, :224] - large).mean() < 4  # WebP is not exact
        assert np.abs(pixels[:, 232:] - masked(large, rollout)).mean() < 4


def test_images_of_rows(run: Path) -> None:
    read = Run.read(run)
    test = load_dataset("digits", "test", classes=(0, 1, 2))
    rows = np.array([5, 0, 17])
    images, preprocessed = read.images(rows), read.preprocessed(rows)
    assert list(images) == list(preprocessed) == [5, 0, 17]
    for row, image in images.items():
        assert preprocessed[row].shape == (8, 8, 3)
        np.testing.assert_array_equal(image, test.image(int(read.test.indices[row])))


def test_labels_of_rows(run: Path) -> None:
    """One image of each class; and of several labels or none."""
    read = Run.read(run)
    assert sorted(read.test.labels[read.one_of_each(10)].tolist()) == [0, 1, 2]
    assert read.test.labels[read.one_of_each(2)].tolist() == [0, 1]
    labels = [[1], [], [2, 0], *([0] for _ in read.test.labels[3:])]
    firsts = np.array([(row or [0])[0] for row in labels])
    read = replace(read, test=replace(read.test, labels=firsts, label_sets=Labels.of_lists(labels)))
    assert [read.label(row) for row in range(4)] == ["1", "none of the classes", "2, 0", "0"]
    assert read.one_of_each(10).tolist() == [3, 0, 2]


@pytest.fixture
def folder_run(tmp_path: Path) -> Path:
    """A run on a folder of images, of which the test part's first has gone since and the rest is there."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("test", 3)):
        for name in ("dark", "bright"):
            (tmp_path / "set" / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 90, (90, 70, 3)) + (150 if name == "bright" else 0)
                Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "set" / split / name / f"{i}.png")
    model = ViTConfig(image_size=(8, 12), patch_size=4, width=8, depth=1, heads=2, mlp_dim=8)
    data = DataConfig(name=f"folder:{tmp_path / 'set'}", crop="none")
    config = TrainConfig(model=model, data=data, optim=OptimConfig(lr=1e-9), steps=1, batch_size=4, log_every=1)
    pretrain(config, tmp_path / "run", device="cpu", tensorboard=False)
    return tmp_path / "run"


def test_near_duplicates_of_the_test(folder_run: Path) -> None:
    """A mirrored copy of a test image in train."""
    section = Run.read(folder_run).data_section()
    assert (section.numbers["Pairs"], section.pairs, section.unreadable) == ("0", [], None)
    folder = folder_run.parent / "set"
    copy = Image.open(folder / "test/dark/1.png").transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    copy.save(folder / "train/bright/copy.png")
    result = json.loads((folder_run / "result.json").read_text())
    (folder_run / "result.json").write_text(json.dumps(result | {"unreadable": [{"path": "a", "reason": "b"}]}))
    section = Run.read(folder_run).data_section()
    assert section.numbers["Test images with a duplicate"] == "1 of 6 (16.67%)"
    assert section.numbers["Pairs with conflicting labels"] == "1"
    assert "train/bright/copy.png" in section.pairs[0].caption
    assert section.unreadable == [("a", "b")]


def test_what_is_not_searched(run: Path, folder_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would take long, tiny images, and lost data: the page says why not."""
    folder = folder_run.parent / "set"
    shutil.copy(folder / "test/dark/1.png", folder / "train/dark/3.png")
    for name, most, reason in (("MAX_COMPARED", 11, "there are 12 training"), ("MAX_CANDIDATES", 0, "1 pairs")):
        with monkeypatch.context() as patch:
            patch.setattr(finished_run, name, most)
            section = Run.read(folder_run).data_section()
        assert reason in section.explanation
        assert f"`vitlab duplicates folder:{folder} folder:{folder} --train-split train`" in section.explanation
        assert not section.numbers
    assert "fewer than 32 pixels" in Run.read(run).data_section().explanation
    shutil.rmtree(folder)
    assert not Run.read(folder_run).data_section().numbers


def test_images_that_have_gone(folder_run: Path) -> None:
    """The others are identified by their names, not by position."""
    read = Run.read(folder_run)
    everything = np.arange(6)
    before = read.preprocessed(everything)
    assert [image.shape for image in before.values()] == [(8, 12, 3)] * 6
    (folder_run.parent / "set/test/bright/1.png").unlink()
    (folder_run.parent / "set/test/dark/0.png").write_bytes(b"no image")
    after = read.preprocessed(everything)
    assert list(after) == [0, 2, 4, 5]
    for row, image in after.items():
        np.testing.assert_array_equal(image, before[row])


def test_a_data_set_that_has_gone_and_corrupt_predictions(folder_run: Path) -> None:
    shutil.rmtree(folder_run.parent / "set")
    section = Run.read(folder_run).section("A name", "A sentence.")
    assert section.name == "A name"
    assert section.explanation.startswith("A sentence.\n\n")
    assert (section.mistakes, section.confusion is None) == (None, False)
    (folder_run / PREDICTIONS).write_text("corrupt")
    with pytest.raises(ValueError, match=PREDICTIONS):
        Run.read(folder_run)


def test_corrupt_files_give_a_warning(folder_run: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = folder_run / "metrics.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"step": 1', b'"step" 11', 1))
    assert all(record["step"] for record in Run.read(folder_run).section().records)
    assert "metrics.jsonl does not match its checksum" in caplog.text
