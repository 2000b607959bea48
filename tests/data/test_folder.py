"""Image folders are read completely, or the message says what is wrong."""

import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import paths_of, pixels_of, put
from irregular import irregular

from vitlab.data.decode import ImageError
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError


def fill(folder: Path, counts: dict[str, int], classes: Iterable[str] = "ab") -> str:
    """Images of every class in every split; returns the name of the data set."""
    for value, (split, count) in enumerate(counts.items(), 1):
        for name, i in itertools.product(classes, range(count)):
            put(folder / split / name / f"{i}.png", value)
    return f"folder:{folder}"


def make(folder: Path, files: str) -> str:
    """Images, other files, which are empty, and folders, by their names; returns the name of the data set."""
    for number, file in enumerate(files.split()):
        if file.endswith(".png"):
            put(folder / file, number)
        else:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).mkdir() if file.endswith("/") else (folder / file).touch()
    return f"folder:{folder}"


def paths(name: str, split: str, **options: Any) -> list[str]:
    return paths_of(load_dataset(name, split, **options))


def test_class_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(20):
        put(tmp_path / "zebra" / f"{i}.png", 10)
        put(tmp_path / "Żółw błotny" / "deep down" / f"ü {i}.PNG", 20)
    for file in ("zebra/notes.txt", "zebra/.DS_Store", "zebra/README", "stray.png"):
        (tmp_path / file).write_bytes(b"x")
    name = f"folder:{tmp_path}"
    parts = {split: load_dataset(name, split) for split in ("train", "val", "test", "trainval", "all")}
    sizes = {"train": 32, "val": 4, "test": 4, "trainval": 36, "all": 40}
    assert {split: len(part) for split, part in parts.items()} == sizes
    assert len({path for split in ("train", "val", "test") for path in paths_of(parts[split])}) == 40
    for part in parts.values():
        assert (part.name, part.classes) == (name, ("zebra", "Żółw błotny"))
        np.testing.assert_array_equal(pixels_of(part)[:, 0, 0, 0], np.where(part.labels == 0, 10, 20))
    assert "(.txt 1, hidden 1, outside the class folders 1, without a suffix 1)" in caplog.text
    assert paths(name, "test", seed=0) == paths_of(parts["test"]) != paths(name, "test", seed=1)
    assert load_dataset(f"folder:{tmp_path.name}", "train", root=tmp_path.parent).labels.tolist() == [0] * 16 + [1] * 16
    assert paths(name, "train", whole_train=True) == paths_of(parts["trainval"])


@pytest.mark.parametrize(
    "names",
    [("train", "valid", "test"), ("Train", "Val", "Test"), ("training", "validation", "testing"), ("TRAIN", "dev")],
)
def test_splits_and_their_names(tmp_path: Path, names: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    name = fill(tmp_path, dict.fromkeys(names, 1), classes="ba")
    put(tmp_path / "extras" / "x.png")
    for value, split in enumerate(("train", "val", "test")[: len(names)], 1):
        part = load_dataset(name, split)
        assert part.classes == ("a", "b")
        assert [part.image(i).max() for i in range(len(part))] == [value, value]
    assert len(load_dataset(name, "trainval")) == (4 if len(names) == 3 else 2)
    assert "extras" in caplog.text


@pytest.mark.parametrize(
    ("counts", "origins"),
    [
        # val is the test too, and never trained on
        ({"train": 20, "val": 20}, {"train": "train", "trainval": "train", "val": "val", "test": "val"}),
        # val is cut from train, and train is the rest
        ({"train": 20, "test": 5}, {"trainval": "train", "train+val": "train", "test": "test"}),
    ],
)
def test_a_missing_split(counts: dict[str, int], origins: dict[str, str], tmp_path: Path) -> None:
    name = fill(tmp_path, counts)
    for split, origin in origins.items():
        found = [path for part in split.split("+") for path in paths(name, part)]
        assert sorted(found) == sorted(map(str, (tmp_path / origin).rglob("*.png")))
    assert sorted(paths(name, "all")) == sorted(map(str, tmp_path.rglob("*.png")))
    assert paths(name, "train", whole_train=True) == paths(name, "trainval")


def test_test_images_alone(tmp_path: Path) -> None:
    name = fill(tmp_path, {"test": 1})
    for split in ("test", "all"):
        part = load_dataset(name, split)
        assert (part.classes, part.labels.tolist(), part.split) == (("a", "b"), [0, 1], split)
    for split in ("train", "val", "trainval"):
        with pytest.raises(UserError, match="one of test, all"):
            load_dataset(name, split)


@pytest.mark.parametrize("strays", ["train/x.png val/x.png", "val/._x.png", "train/.x.png"])
def test_an_image_next_to_the_classes_of_a_split(strays: str, tmp_path: Path) -> None:
    """Although there are other folders, the splits are not taken for classes."""
    name = fill(tmp_path, {"train": 3} if strays == "train/.x.png" else {"train": 3, "val": 3})
    make(tmp_path, f"docs/ {strays}")
    assert load_dataset(name, "train").classes == ("a", "b")


@pytest.mark.parametrize(
    "names", [("dev", "prod", "test"), ("car", "ship", "train"), ("Valid", "car", "ship"), ("test1", "test2", "test10")]
)
def test_classes_that_are_called_like_splits(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        put(tmp_path / name / "x.png")
    if {"car", "ship"} < set(names):  # several splits would be splits then
        put(tmp_path / names[-1] / "more" / "x.png")
        put(tmp_path / names[0] / "more" / "x.png")
    part = load_dataset(f"folder:{tmp_path}", "train")
    assert (part.classes, len(part)) == (names, 5 if "car" in names else 3)


@pytest.mark.parametrize(
    ("files", "sizes"),
    [
        ("a/b/c/cat/1.png a/b/c/dog/2/1.png flowers.zip", {"all": 2}),
        ("images/cat/1.png images/dog/1.png annotations/1.xml README.md", {"all": 2}),
        (
            "training_set/training_set/cat/1.png training_set/training_set/dog/1.png test_set/test_set/cat/1.png",
            {"trainval": 2, "test": 1},
        ),
        (
            "seg_train/seg_train/cat/1.png seg_train/seg_train/dog/1.png seg_test/seg_test/dog/1.png "
            "seg_test/seg_test/cat/1.png seg_pred/seg_pred/1.png",
            {"trainval": 2, "test": 2},
        ),
        ("wrap/Training/cat/1.png wrap/Training/dog/1.png wrap/Testing/dog/1.png", {"trainval": 2, "test": 1}),
        ("train_images/cat/1.png train_images/dog/1.png val2017/dog/1.png", {"train": 2, "test": 1}),
        ("test/cat/p1/1.png train/cat/p2/1.png train/dog/1.png", {"trainval": 2, "test": 1}),
        ("cat/p1/1.png cat/p2/1.png dog/p10/1.png dog/p9/40X/1.png", {"all": 4}),  # patients
    ],
)
def test_wrappers(files: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """As archives of published sets are unpacked."""
    name = make(tmp_path, files)
    for split, size in sizes.items():
        data = load_dataset(name, split, whole_train=True)
        assert (data.classes, len(data)) == (("cat", "dog"), size)
        assert all(f"/{data.classes[label]}/" in path for path, label in zip(paths_of(data), data.labels, strict=True))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("rose/1.png lily/1.png all/rose/1.png all/lily/1.png", "all are called like the classes"),
        ("cat/train/1.png cat/test/1.png dog/train/1.png dog/test/1.png", r"cat holds splits \(test, train"),
        ("images/cat/1.png images/dog/1.png masks/cat/1.png", "give folder:.*/images"),
        ("train/cat/1.png train/dog/1.png test1/1.png test1/2.png", "test1 has no class folders"),
        ("train/cat.1.png train/dog.1.png test1/1.png", "train has no class folders: .*csv:PATH"),
        ("train/a/1.png x_test/1.png", "folder:.*/train"),
        ("cat/p1/1.png cat/p2/1.png dog/p3/1.dng", r"dog holds no images .*\.dng 1"),  # else the patients were classes
        ("", "has no class folders"),
        ("a/1.png b/", "b holds no images"),
        ("car/x.png ship/x.png train/electric/x.png", r"\['car', 'ship'\]"),
        ("train/1.png test/1.png", "train has no class folders"),
        ("train/a/1.png val/a/1.png Valid/", "Valid and .*val are the same split"),
        ("train/a/1.png test/", "test has no class folders: .*remove it"),
        ("train/a/1.png test/c/1.png", "missing in train: c$"),
        ("a/1.png a/2.png", "train has too few images per class"),
    ],
)
def test_ambiguous_or_invalid_folders(files: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_dataset(make(tmp_path, files), "test")


def test_names_with_line_breaks_or_escapes_are_quoted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = fill(tmp_path / "two\nlines", {"train": 2, "test": 2, "val": 1}, classes=["a", "\x1b[31mred"])
    (tmp_path / "two\nlines" / "val" / "a" / "x.\ny").touch()
    assert load_dataset(name, "val").classes == ("\x1b[31mred", "a")  # exact
    corrupt = tmp_path / "two\nlines" / "val" / "a" / "0.png"
    corrupt.write_bytes(b"")
    with pytest.raises(ImageError) as error:
        load_dataset(name, "val")
    assert error.value.path == str(corrupt)
    with pytest.raises(ValueError, match="does not exist") as missing:
        load_dataset(f"folder:{tmp_path}/no\nfolder", "val")
    assert all(text.isprintable() for text in (*caplog.messages, str(error.value), str(missing.value)))
    assert caplog.messages


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to a pipe", "link to a device"])
def test_irregular_files_are_never_opened(kind: str, tmp_path: Path) -> None:
    """Opening the pipe would wait for ever, and reading the device fill the memory."""
    name = fill(tmp_path / "set", {"train": 2, "test": 2}, classes="a")
    path = tmp_path / "set" / "train" / "a" / "x.jpg"
    irregular(kind, path, tmp_path)
    (error,) = load_dataset(name, "trainval", on_error="skip").failures.values()
    kind = kind.removeprefix("link to a ").replace("pipe", "named pipe")
    assert error.path == str(path)
    assert kind in error.reason


def test_links_are_followed_but_not_in_circles_nor_into_hidden_folders(tmp_path: Path) -> None:
    image, linked = tmp_path / "pets" / "cat" / "1.png", tmp_path / "elsewhere" / "2.png"
    for path in (image, linked, image.parent / ".ipynb_checkpoints" / "1-checkpoint.png"):
        put(path)
    for name, target in (("more", linked.parent), ("self", image.parent), ("above", tmp_path / "pets")):
        (image.parent / name).symlink_to(target)
    (linked.parent / "back").symlink_to(image.parent)
    assert paths(f"folder:{tmp_path / 'pets'}", "train") == [str(image), str(image.parent / "more" / "2.png")]


def test_a_class_whose_name_is_not_utf8(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And one without a folder in val."""
    put(tmp_path / "train" / os.fsdecode(b"caf\xe9") / "1.png", 1)
    put(tmp_path / "train" / "dog" / "1.png", 2)
    put(tmp_path / "val" / "dog" / "1.png", 3)
    train, val = (load_dataset(f"folder:{tmp_path}", split) for split in ("train", "val"))
    assert train.classes == ("caf\\xe9", "dog")
    assert [train.image(i).max() for i in range(2)] == [1, 2]
    assert val.labels.tolist() == [1]
    assert r"has no folder for 1 of the 2 classes: 'caf\udce9'" in caplog.text
