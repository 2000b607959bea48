"""Image folders are read completely, or the message says what is wrong."""

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


def fill(folder: Path, counts: dict[str, int], classes: Iterable[str] = "ab") -> str:
    """Images of every class in every split ("" is the folder itself); returns the name of the data set."""
    for value, (split, count) in enumerate(counts.items(), 1):
        for name in classes:
            for i in range(count):
                put(folder / split / name / f"{i}.png", value)
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
    parts = {split: load_dataset(name, split) for split in ("train", "val", "test", "trainval")}
    assert {split: len(part) for split, part in parts.items()} == {"train": 32, "val": 4, "test": 4, "trainval": 36}
    assert len({path for split in ("train", "val", "test") for path in paths_of(parts[split])}) == 40
    for part in parts.values():
        assert (part.name, part.classes) == (name, ("zebra", "Żółw błotny"))
        np.testing.assert_array_equal(pixels_of(part)[:, 0, 0, 0], np.where(part.labels == 0, 10, 20))
    assert "4 files are not images" in caplog.text
    assert "(.txt 1, hidden 1, outside the class folders 1, without a suffix 1)" in caplog.text
    assert caplog.text.count("has no test and no val split: cut from train, stratified, seed 0") == 1
    assert paths(name, "test", seed=0) == paths_of(parts["test"]) != paths(name, "test", seed=1)
    assert load_dataset(f"folder:{tmp_path.name}", "train", root=tmp_path.parent).labels.tolist() == [0] * 16 + [1] * 16
    assert paths(name, "train", whole_train=True) == paths_of(parts["trainval"])


# ------------------------------------------------------------------------------------------------- splits


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
    assert "['extras'] are not splits" in caplog.text


def test_a_val_without_a_test_is_the_test_and_never_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = fill(tmp_path, {"train": 20, "val": 20})
    files = {split: sorted(map(str, (tmp_path / split).rglob("*.png"))) for split in ("train", "val")}
    for split in ("test", "trainval", "train", "val"):
        assert sorted(paths(name, split)) == files["val" if split in ("test", "val") else "train"]
    assert len(paths(name, "all")) == 80
    assert paths(name, "train", whole_train=True) == paths(name, "train")
    assert len([message for message in caplog.messages if "val is used as test" in message]) == 1


def test_a_test_without_a_val(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """trainval is train in its order; val is cut from it, and train is the rest."""
    name = fill(tmp_path, {"train": 20, "test": 5})
    whole = sorted(map(str, (tmp_path / "train").rglob("*.png")))
    assert paths(name, "trainval") == paths(name, "train", whole_train=True) == whole
    assert not caplog.messages
    assert sorted(paths(name, "train") + paths(name, "val")) == whole
    assert (len(paths(name, "val")), len(paths(name, "test"))) == (4, 10)


@pytest.mark.parametrize("counts", [{"": 20}, {"train": 4, "val": 3, "test": 2}])
def test_all_is_every_image_once(tmp_path: Path, counts: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    part = load_dataset(fill(tmp_path, counts), "all")
    assert part.split == "all"
    assert sorted(paths_of(part)) == sorted(map(str, tmp_path.rglob("*.png")))
    assert [Path(path).parent.name for path in paths_of(part)] == [part.classes[label] for label in part.labels]
    assert "cut from train" not in caplog.text


def test_test_images_alone(tmp_path: Path) -> None:
    name = fill(tmp_path, {"test": 1})
    for split in ("test", "all"):
        part = load_dataset(name, split)
        assert (part.classes, part.labels.tolist(), part.split) == (("a", "b"), [0, 1], split)
    for split in ("train", "val", "trainval"):
        with pytest.raises(ValueError, match=r"has no \w+ split, and no train to .* one of test, all"):
            load_dataset(name, split)


@pytest.mark.parametrize(
    ("splits", "strays"),
    [(("train", "val"), ("train/x.jpg", "val/x.jpg")), (("train", "val"), ("val/._x.jpg",)), (("train",), (".x.jpg",))],
)
def test_an_image_next_to_the_classes_of_a_split(
    splits: tuple[str, ...], strays: tuple[str, ...], tmp_path: Path
) -> None:
    """Although there are other folders, the splits are not taken for classes."""
    name = fill(tmp_path, dict.fromkeys(splits, 20))
    (tmp_path / "docs").mkdir()
    for stray in strays:
        put(tmp_path / stray if "/" in stray else tmp_path / "train" / stray)
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


# ------------------------------------------------------------------------------------------- deeper levels


def make(folder: Path, *files: str) -> str:
    """Images; files of other kinds are empty. Returns the name of the data set."""
    for number, file in enumerate(files):
        if file.endswith((".jpg", ".png")):
            put(folder / file, number)
        else:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).touch()
    return f"folder:{folder}"


@pytest.mark.parametrize(
    ("files", "sizes"),
    [
        ("flowers/cat/1.png flowers/dog/1.png flowers.zip", {"all": 2}),
        ("a/b/c/cat/1.png a/b/c/dog/2/1.png", {"all": 2}),
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
        ("data/test/cat/1.png data/test/dog/1.png", {"test": 2}),
        ("test/cat/p1/1.png train/cat/p2/1.png train/dog/1.png", {"trainval": 2, "test": 1}),
    ],
)
def test_wrappers(files: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """As archives of published sets are unpacked."""
    name = make(tmp_path, *files.split())
    for split, size in sizes.items():
        data = load_dataset(name, split, whole_train=True)
        assert (data.classes, len(data)) == (("cat", "dog"), size)
        assert all(f"/{data.classes[label]}/" in path for path, label in zip(paths_of(data), data.labels, strict=True))


def test_a_wrapper_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = make(tmp_path, "flowers/cat/1.png", "flowers/cat/2.png", "flowers/dog/1.png", "flowers/dog/2.png")
    for _ in range(2):
        load_dataset(name, "all")
    assert [m.partition(": all images lie in ")[2] for m in caplog.messages] == [
        f"{tmp_path}/flowers, whose folders are read: cat, dog"
    ]


def test_folders_of_patients_are_merged_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = make(tmp_path, "benign/p1/1.png", "benign/p2/1.png", "malignant/p10/1.png", "malignant/p9/40X/1.png")
    data = load_dataset(name, "all")
    assert (data.classes, data.labels.tolist()) == (("benign", "malignant"), [0, 0, 1, 1])
    assert "merged (p1, p2, p9, p10); if these are the classes, give folder:" in caplog.text


def test_a_folder_is_no_wrapper_beside_a_class_without_images_that_are_read(tmp_path: Path) -> None:
    """Else the patients of one class were the classes."""
    name = make(tmp_path, "benign/p1/1.png", "benign/p2/1.png", "malignant/p3/1.dng")
    with pytest.raises(ValueError, match=r"malignant holds no images .*\.dng 1"):
        load_dataset(name, "all")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("rose/1.png", "lily/1.png", "all/rose/1.png", "all/lily/1.png"), "all are called like the classes .*/all to"),
        (("cat/train/1.png", "cat/test/1.png", "dog/train/1.png", "dog/test/1.png"), r"cat holds splits \(test, train"),
        (("images/cat/1.png", "images/dog/1.png", "masks/cat/1.png"), r"images holds folders .*give folder:.*/images"),
        (("train/cat/1.png", "train/dog/1.png", "test1/1.png", "test1/2.png"), "test1 has no class folders"),
        (("train/cat.1.png", "train/dog.1.png", "test1/1.png"), "train has no class folders: .*csv:PATH"),
        (("train/a/1.png", "x_test/1.png"), "or give folder:.*/train"),
    ],
)
def test_ambiguous_folders(files: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_dataset(make(tmp_path, *files), "test")


# ---------------------------------------------------------------------------------------- what is in folders


def test_classes_with_fewer_than_two_images_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = fill(tmp_path, {"train": 3, "val": 3, "test": 1})
    fill(tmp_path, {"train": 1, "val": 2, "test": 2}, classes="c")
    for split in ("train", "val", "test") * 2:
        load_dataset(name, split)
    assert [message.partition("fewer than two images in ")[2] for message in caplog.messages] == [
        "train: c (1)",
        "test: a (1), b (1)",
    ]


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


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "has no class folders"),
        (("a/1.png", "b/"), "folder .*b holds no images .* fill it"),
        (("car/x.png", "ship/x.png", "train/electric/x.png"), r"train holds folders, .*\['car', 'ship'\]"),
        (("train/1.png", "val/1.png"), "train has no class folders"),
        (("train/a/1.png", "val/a/1.png", "Valid/"), "Valid and .*val are the same split"),
        (("train/a/1.png", "val/"), "val has no class folders: .*remove it to cut val from train"),
        (("train/a/1.png", "val/1.png"), "val has no class folders: add"),
        (("train/a/1.png", "val/c/1.png"), "that are missing in train: c$"),
        (("a/1.png", "a/2.png"), "no class of train has enough images to cut a val split"),
    ],
)
def test_invalid_folders(tmp_path: Path, files: tuple[str, ...], message: str) -> None:
    for file in files:
        if file.endswith("/"):
            (tmp_path / file).mkdir(parents=True)
        else:
            put(tmp_path / file)
    with pytest.raises(ValueError, match=message):
        load_dataset(f"folder:{tmp_path}", "val")
