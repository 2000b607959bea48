"""The order of class names, names in several Unicode forms, and classes by name or number."""

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import put

from vitlab.data.classes import keep_classes, natural_order
from vitlab.data.dataset import Dataset
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError

NFC = "Übung"
NFD = unicodedata.normalize("NFD", NFC)


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


# ------------------------------------------------------------------------------------------- Unicode forms


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


# ---------------------------------------------------------------------------------------- classes to keep


def dataset(*classes: str) -> Dataset:
    count = len(classes)
    return Dataset("folder:mine", "train", classes, np.arange(count), np.zeros((count, 1, 1, 3), np.uint8))


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
