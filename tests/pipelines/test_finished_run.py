"""A run's folder read back: the page gets what the run computed, or what is missing."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.config import DataConfig, OptimConfig, TrainConfig
from vitlab.data.registry import load_dataset
from vitlab.models import ViTConfig
from vitlab.pipelines.finished_run import Run, run_folders
from vitlab.pipelines.pretrain import PREDICTIONS, pretrain


def test_folders_of_runs(run: Path, tmp_path: Path) -> None:
    assert run_folders(run) == [run]
    assert run_folders(str(run)) == [run]
    for name in ("run-0", "run-1", "sweep"):
        shutil.copytree(run, tmp_path / "search" / name)
    (tmp_path / "search" / "run-1" / "result.json").unlink()  # has not ended
    assert run_folders(tmp_path / "search") == [tmp_path / "search" / "run-0"]
    assert run_folders(run / "model") == []
    assert run_folders(run / "result.json") == []
    assert run_folders("hub:owner/name") == []


def test_phase_holds_what_the_run_computed(run: Path) -> None:
    phase = Run.read(run).phase()
    result = json.loads((run / "result.json").read_text())["test"]
    assert phase.name == "Trained from scratch on digits"
    assert phase.numbers["Test accuracy"] == f"{result['accuracy']:.1%}"
    assert phase.numbers["Training steps"] == "3"
    assert [record["step"] for record in phase.records] == [1, 2, 3, 3]  # the last is the evaluation
    assert list(phase.classes) == ["0", "1", "2"]
    assert phase.per_class == result["per_class"]
    assert phase.confusion is not None
    assert np.trace(phase.confusion) == round(result["accuracy"] * result["images"])
    assert phase.mistakes is not None
    assert 0 < len(phase.mistakes.predictions) <= 24
    assert (phase.mistakes.predictions != phase.mistakes.labels).all()
    assert (np.diff(phase.mistakes.confidence) <= 0).all()


def test_wrong_answers_are_shown_as_the_model_saw_them(run: Path) -> None:
    read = Run.read(run)
    test = load_dataset("digits", "test", classes=(0, 1, 2))
    rows = np.array([5, 0, 17])
    shown = read.images(rows)
    assert list(shown) == [5, 0, 17]
    for row, image in shown.items():
        assert image.shape == (8, 8, 3)
        np.testing.assert_array_equal(image, test.image(int(read.test.indices[row])))


def test_a_task_of_vtab_is_a_fine_tuning(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    settings = json.loads((run / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings | {"command": "vtab"}))
    assert Run.read(tmp_path / "run").title == "Fine-tuned on digits"


def test_one_of_each(run: Path) -> None:
    read = Run.read(run)
    assert sorted(read.test.labels[read.one_of_each(10)].tolist()) == [0, 1, 2]
    assert read.test.labels[read.one_of_each(2)].tolist() == [0, 1]


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


def test_images_that_have_gone(folder_run: Path) -> None:
    """The others are identified by their names, not by position."""
    read = Run.read(folder_run)
    everything = np.arange(6)
    before = read.images(everything)
    assert [image.shape for image in before.values()] == [(8, 12, 3)] * 6
    (folder_run.parent / "set/test/bright/1.png").unlink()
    (folder_run.parent / "set/test/dark/0.png").write_bytes(b"no image")
    after = read.images(everything)
    assert list(after) == [0, 2, 4, 5]
    for row, image in after.items():
        np.testing.assert_array_equal(image, before[row])


def test_a_data_set_that_has_gone(folder_run: Path) -> None:
    shutil.rmtree(folder_run.parent / "set")
    phase = Run.read(folder_run).phase("A name", "A sentence.")
    assert phase.name == "A name"
    assert phase.explanation.startswith("A sentence.\n\nThe wrong predictions cannot be shown: ")
    assert phase.mistakes is None
    assert phase.confusion is not None


def test_damaged_predictions(folder_run: Path) -> None:
    (folder_run / PREDICTIONS).write_text("damaged")
    with pytest.raises(ValueError, match="is not a table of predictions"):
        Run.read(folder_run)


@pytest.mark.parametrize(
    ("name", "old", "new"), [("metrics.jsonl", b'"step": 1', b'"step" 11'), ("config.json", b'"seed": 0', b'"seed": 1')]
)
def test_damage_is_warned_of(
    folder_run: Path, name: str, old: bytes, new: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = folder_run / name
    assert old in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(old, new, 1))
    damaged = Run.read(folder_run)
    assert f"{name} does not match its checksum" in caplog.text
    assert all(record["step"] for record in damaged.phase().records)
