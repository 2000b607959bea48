"""Classes: the order of their names, their Unicode forms, the choice of some, and the checks of classes and labels."""

import shutil
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import put

from vitlab.data.classes import keep_classes, natural_order, require_two_classes, warn_of_contradictions
from vitlab.data.dataset import Dataset, Labels
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError

NFC = "Übung"
NFD = unicodedata.normalize("NFD", NFC)


def dataset(*classes: str) -> Dataset:
    """An image of each class."""
    return Dataset("mine", "train", classes, np.arange(len(classes)), np.zeros((len(classes), 1, 1, 3), np.uint8))


@pytest.mark.parametrize(
    "ordered",
    [
        [str(i) for i in range(12)],
        ["Zebra", "ant", "bee"],  # as PyTorch's ImageFolder
        ["Zebra", "ant", NFD],  # as NFC, whose "Ü" is one character beyond ASCII
        ["01", "1", "2a", "2b", "10", "a", "a2", "a2b1", "a10", "²"],
        ["day 9", "day 10", "day 10b", "day " + "9" * 5000],  # more digits than Python takes for a number
    ],
)
def test_natural_order(ordered: list[str]) -> None:
    assert natural_order(reversed(ordered)) == tuple(ordered)


@pytest.mark.parametrize(("train", "test"), [(NFD, NFC), (NFC, NFD)])
def test_forms_of_a_name_are_one_class(train: str, test: str, tmp_path: Path) -> None:
    """In folders; in tables, which may name a file in another form than it has."""
    for folder in (f"train/{train}", "train/a", f"test/{test}", "test/a"):
        put(tmp_path / folder / "1.png")
    for split in ("train", "test"):
        data = load_dataset(f"folder:{tmp_path}", split, whole_train=True)
        assert (data.classes, data.labels.tolist()) == (natural_order(["a", train]), [0, 1])
    rows = f"train/a/1.png,a,train\ntrain/{test}/1.png,{train},train\ntest/{train}/1.png,{test},test\n"
    (tmp_path / "t.csv").write_text(f"file,label,split\n{rows}")
    data = load_dataset(f"csv:{tmp_path}/t.csv", "test")
    assert [data.classes[label] for label in data.labels] == [train]
    assert Path(data.path(0)).exists()
    put(tmp_path / "train" / test / "1.png")
    with pytest.raises(UserError, match="two folders for the class"):
        load_dataset(f"folder:{tmp_path}", "all")


@pytest.mark.parametrize(
    ("names", "chosen", "kept"),
    [
        (("ant", NFD, "cat"), (NFC, 0), (NFD, "ant")),
        (("1", "2", "12"), (1, 12), ("1", "12")),  # names of numbers are names, not indices
        (("1", "2", "12"), ("2",), ("2",)),
        (("ant", "bee"), ("cat",), None),
        (("ant", "bee"), (2,), None),
        (("1", "2", "12"), (0, 1), None),
        (("ant", "bee"), (0, "ant"), None),
    ],
)
def test_classes_by_name_or_number(names: tuple[str, ...], chosen: tuple[int | str, ...], kept: Any) -> None:
    if kept is None:
        with pytest.raises(UserError, match=f"{names[0]}, {names[1]}"):
            keep_classes(dataset(*names), chosen)
        return
    part = keep_classes(dataset(*names), chosen)
    assert (part.classes, part.labels.tolist()) == (kept, sorted(range(len(kept)), key=lambda i: names.index(kept[i])))


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
