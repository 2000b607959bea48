"""Lists of images to leave out: names that are the same in every run, and lists of another data set."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from image_files import put

from vitlab.data.dataset import Dataset
from vitlab.data.exclude import image_id, list_fingerprint, read_exclusion, write_lines
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten images of each of two classes, with a class folder inside another's."""
    for name, number in itertools.product(("cats", "dogs/cats"), range(10)):
        put(tmp_path / "pets" / name / f"{number}.png", 20 * number + len(name))
    return tmp_path / "pets"


def ids(dataset: Dataset) -> list[str]:
    return [image_id(dataset, i) for i in range(len(dataset))]


def write(path: Path, *names: str) -> str:
    write_lines(path, names)
    return str(path)


def test_names_do_not_change_with_the_way_to_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ids(load_dataset(f"folder:{folder}", "train"))
    assert {"cats/", "dogs/"} == {name[:5] for name in names}
    monkeypatch.chdir(folder.parent)
    assert ids(load_dataset("folder:pets", "train")) == names
    assert ids(load_dataset("folder:pets", "train", root=folder.parent)) == names
    monkeypatch.chdir(folder)
    assert ids(load_dataset("folder:.", "train")) == names


def test_listed_images_are_left_out(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A list is made for the whole set: images of other splits and classes may be in it."""
    name = f"folder:{folder}"
    train, val, test = (load_dataset(name, split) for split in ("train", "val", "test"))
    listed = write(tmp_path / "list.txt", ids(train)[0], ids(train)[-1], *ids(val), *ids(test))
    left = load_dataset(name, "train", exclude=listed)
    assert ids(left) == ids(train)[1:-1]
    np.testing.assert_array_equal(left.labels, train.labels[1:-1])
    assert f"2 of {len(train)} images" in caplog.text


def test_a_list_for_another_set_is_refused(folder: Path, tmp_path: Path) -> None:
    name, train = f"folder:{folder}", ids(load_dataset(f"folder:{folder}", "train"))
    for listed, message in (
        (write(tmp_path / "list.txt", train[0], "cats/x.png", "birds/1.png"), r"2 of the 3 .* birds/1\.png, cats/x"),
        (write(tmp_path / "all.txt", *train), "none is left"),
        (str(tmp_path / "nowhere.txt"), r"nowhere\.txt"),
    ):
        with pytest.raises(UserError, match=message):
            load_dataset(name, "train", exclude=listed)


def test_a_list_is_identified_by_its_content(tmp_path: Path) -> None:
    names = ["a b/ä #1.png", os.fsdecode(b"broken-\xff.png"), " led by a space.png"]
    first = write(tmp_path / "one.txt", *names)
    assert read_exclusion(first) == names
    second = tmp_path / "two.txt"
    second.write_bytes(b"\r\n".join(os.fsencode(name) for name in [*reversed(names), names[0], ""]))
    assert set(read_exclusion(second)) == set(names)
    assert list_fingerprint(first) == list_fingerprint(second)
    assert list_fingerprint(first)["listed"] == 3
    assert list_fingerprint(write(second, *names[:2])) != list_fingerprint(first)
    assert read_exclusion(write(second)) == []
