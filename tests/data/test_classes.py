"""Checks of classes: their names, the images that a training needs, and contradictory labels."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from image_files import put

from vitlab.data.classes import keep_classes
from vitlab.data.classes import require_two_classes, warn_of_contradictions
from vitlab.data.dataset import Dataset, Labels
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError


def dataset(*classes: str) -> Dataset:
    count = len(classes)
    return Dataset("folder:mine", "train", classes, np.arange(count), np.zeros((count, 1, 1, 3), np.uint8))


def test_names_that_differ_in_case_or_spaces_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("cat", "Cat", "cat ", "big dog", "big_dog", "cow", "cow-2"):
        put(tmp_path / name / "1.png")
    assert len(load_dataset(f"folder:{tmp_path}", "all").classes) == 7
    assert "'Cat' and 'cat' and 'cat ', 'big dog' and 'big_dog' are" in caplog.text


def test_one_class_is_not_enough() -> None:
    require_two_classes(data := dataset("a", "b"))
    for one in (dataset("a"), data.take(np.array([1, 1])), keep_classes(data, ("b",))):
        with pytest.raises(UserError, match=r"has one class .*two classes or more"):
            require_two_classes(one)
    tags = Labels.of_lists([[0], []])  # one label, which an image has or not
    require_two_classes(Dataset("m", "train", ("a",), tags.first_labels, data.pixels, label_sets=tags))


def test_the_same_image_in_two_classes_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i, name in enumerate(("train/a/1.png", "train/b/2.png", "test/a/3.png", "test/b/4.png")):
        put(tmp_path / name, i)  # of one size
    splits = [load_dataset(f"folder:{tmp_path}", split, whole_train=True) for split in ("train", "test")]
    caplog.clear()
    warn_of_contradictions(*splits)
    assert not caplog.messages
    shutil.copy(tmp_path / "train" / "a" / "1.png", tmp_path / "test" / "b" / "4.png")
    shutil.copy(tmp_path / "train" / "b" / "2.png", tmp_path / "train" / "b" / "5.png")  # in one class
    warn_of_contradictions(*splits)
    (message,) = caplog.messages
    assert f"{tmp_path}/train/a/1.png = {tmp_path}/test/b/4.png" in message
