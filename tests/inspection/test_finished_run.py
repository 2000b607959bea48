"""A run's folder read back: its predictions and its test images, or what is missing."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vitlab.data.dataset import Labels
from vitlab.data.registry import load_dataset
from vitlab.inspection.finished_run import Run, run_folders
from vitlab.inspection.run_section import run_section
from vitlab.runs.run import PREDICTIONS


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
    assert sorted(read.test.labels[read.one_per_class(10)].tolist()) == [0, 1, 2]
    assert read.test.labels[read.one_per_class(2)].tolist() == [0, 1]
    labels = [[1], [], [2, 0], *([0] for _ in read.test.labels[3:])]
    firsts = np.array([(row or [0])[0] for row in labels])
    read = replace(read, test=replace(read.test, labels=firsts, label_sets=Labels.of_lists(labels)))
    assert [read.label(row) for row in range(4)] == ["1", "none of the classes", "2, 0", "0"]
    assert read.one_per_class(10).tolist() == [3, 0, 2]


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


def test_corrupt_predictions(folder_run: Path) -> None:
    (folder_run / PREDICTIONS).write_text("corrupt")
    with pytest.raises(ValueError, match=PREDICTIONS):
        Run.read(folder_run)


def test_corrupt_files_give_a_warning(folder_run: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = folder_run / "metrics.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"step": 1', b'"step" 11', 1))
    assert all(record["step"] for record in run_section(Run.read(folder_run)).records)
    assert "metrics.jsonl does not match its checksum" in caplog.text
