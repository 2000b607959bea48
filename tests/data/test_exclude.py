"""Lists of images to leave out: names that are the same in every run, and lists of another data set."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.data.dataset import Dataset
from vitlab.data.exclude import identity, image_id, read_exclusion, write_lines
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten images of each of two classes, with a class folder inside another's."""
    for name in ("cats", "dogs/cats"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(10):
            color = (20 * number, 10, len(name))
            Image.new("RGB", (8, 8), color).save(tmp_path / "pets" / name / f"{number}.png")
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


def test_names_of_images_without_files_are_their_indices_in_the_source() -> None:
    train, val, both = (load_dataset("digits", split) for split in ("train", "val", "trainval"))
    assert sorted(ids(train) + ids(val)) == sorted(ids(both)) == sorted(f"digits/train[{i}]" for i in range(len(both)))
    where = ids(both).index(image_id(val, 3))
    np.testing.assert_array_equal(both.image(where), val.image(3))
    some = load_dataset("digits", "train", classes=(4, 2))
    np.testing.assert_array_equal(train.image(ids(train).index(image_id(some, 5))), some.image(5))


def test_listed_images_are_left_out(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A list is made for the whole set: images of other splits and classes may be in it."""
    name = f"folder:{folder}"
    train, val, test = (load_dataset(name, split) for split in ("train", "val", "test"))
    listed = write(tmp_path / "list.txt", ids(train)[0], ids(train)[-1], *ids(val), *ids(test))
    left = load_dataset(name, "train", exclude=listed)
    assert ids(left) == ids(train)[1:-1]
    np.testing.assert_array_equal(left.labels, train.labels[1:-1])
    np.testing.assert_array_equal(left.image(0), train.image(1))
    assert f"2 of {len(train)} images are left out" in caplog.text
    assert len(load_dataset(name, "train", classes=(1,), exclude=listed)) == 7


def test_a_list_for_another_set_is_refused(folder: Path, tmp_path: Path) -> None:
    name = f"folder:{folder}"
    listed = write(
        tmp_path / "list.txt", ids(load_dataset(name, "train"))[0], "cats/x.png", "birds/1.png", "cats/z.png"
    )
    with pytest.raises(UserError, match=r"3 of the 4 .* birds/1\.png, cats/x\.png, cats/z\.png\. Its names look like"):
        load_dataset(name, "train", exclude=listed)
    with pytest.raises(UserError, match=r"lists all 16 images .*: none is left"):
        load_dataset(name, "train", exclude=write(tmp_path / "all.txt", *ids(load_dataset(name, "train"))))
    with pytest.raises(UserError, match=r"cannot read the list .*nowhere\.txt \(No such file"):
        load_dataset(name, "train", exclude=tmp_path / "nowhere.txt")


def test_a_list_is_identified_by_its_content(tmp_path: Path) -> None:
    names = ["a b/ä #1.png", os.fsdecode(b"broken-\xff.png"), " led by a space.png"]
    first = write(tmp_path / "one.txt", *names)
    assert read_exclusion(first) == names
    second = tmp_path / "two.txt"
    second.write_bytes(b"\r\n".join(os.fsencode(name) for name in [*reversed(names), names[0], ""]))
    assert set(read_exclusion(second)) == set(names)
    assert identity(first) == identity(second)
    assert identity(first)["listed"] == 3
    assert identity(write(second, *names[:2])) != identity(first)
    assert read_exclusion(write(second)) == []
