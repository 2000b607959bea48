"""Image folders are read completely, or the message says what is wrong."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from irregular import irregular
from PIL import Image

from vitlab.data.decode import ImageError
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError


def put(path: Path, value: int = 0, side: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), (value, value, value)).save(path)


def test_plain_class_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(20):
        put(tmp_path / "zebra" / f"{i}.png", 10)
        put(tmp_path / "Żółw błotny" / "deep down" / f"ü {i}.PNG", 20)
    (tmp_path / "zebra" / "notes.txt").write_text("no image")
    (tmp_path / "zebra" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "zebra" / "README").write_bytes(b"x")
    (tmp_path / "stray.png").write_bytes(b"x")
    name = f"folder:{tmp_path}"
    parts = {split: load_dataset(name, split) for split in ("train", "val", "test", "trainval")}
    assert parts["train"].classes == ("zebra", "Żółw błotny")
    assert {split: len(part) for split, part in parts.items()} == {"train": 32, "val": 4, "test": 4, "trainval": 36}
    paths = [part.path(i) for s in ("train", "val", "test") for part in [parts[s]] for i in range(len(part))]
    assert len(set(paths)) == 40
    for part in parts.values():
        assert part.name == name
        assert part.pixels is not None
        np.testing.assert_array_equal(part.pixels[:, 0, 0, 0], np.where(part.labels == 0, 10, 20))
        np.testing.assert_array_equal(part.image(1), part.pixels[1])
    assert "4 files are not images" in caplog.text
    assert "(.txt 1, README 1, hidden 1, outside the class folders 1)" in caplog.text
    assert "has no test and no val split: cut from train, stratified, seed 0" in caplog.text


def test_another_seed_cuts_another_split(tmp_path: Path) -> None:
    for i in range(30):
        put(tmp_path / "a" / f"{i}.png")
    cut = [load_dataset(f"folder:{tmp_path}", "test", seed=seed) for seed in (0, 0, 1)]
    paths = [[part.path(i) for i in range(len(part))] for part in cut]
    assert paths[0] == paths[1]
    assert paths[0] != paths[2]


def fill(folder: Path, counts: dict[str, int], classes: Iterable[str] = "ab") -> str:
    """Images of each class in each split ("" is the folder itself); returns the name of the data set."""
    for value, (split, count) in enumerate(counts.items(), 1):
        for name in classes:
            for i in range(count):
                put(folder / split / name / f"{i}.png", value)
    return f"folder:{folder}"


def paths(name: str, split: str, **options: Any) -> list[str]:
    part = load_dataset(name, split, **options)
    assert part.split == split or options
    return [part.path(i) for i in range(len(part))]


def test_a_val_without_a_test_is_the_test_and_never_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = fill(tmp_path, {"train": 20, "val": 20})
    there = {split: sorted(map(str, (tmp_path / split).rglob("*.png"))) for split in ("train", "val")}
    for split in ("test", "trainval", "train", "val"):
        assert sorted(paths(name, split)) == there["val" if split in ("test", "val") else "train"]
    assert len(paths(name, "all")) == 80
    assert paths(name, "train", whole_train=True) == paths(name, "train")
    assert caplog.messages == [f"{name} has val and no test split: val is the test, and is not trained on"]


def test_a_test_without_a_val(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """trainval is train, in the order of its own; a val that is asked for is cut from it, and train is the rest."""
    name = fill(tmp_path, {"train": 20, "test": 5})
    whole = sorted(map(str, (tmp_path / "train").rglob("*.png")))
    assert paths(name, "trainval") == whole
    assert not caplog.messages
    assert sorted(paths(name, "train") + paths(name, "val")) == whole
    assert (len(paths(name, "val")), len(paths(name, "test"))) == (4, 10)
    assert paths(name, "train", whole_train=True) == whole


def test_the_whole_train_gives_up_nothing_for_val(tmp_path: Path) -> None:
    name = fill(tmp_path / "plain", {"": 20})
    whole = paths(name, "train", whole_train=True)
    assert whole == paths(name, "trainval") == paths(name, "train") + paths(name, "val")
    assert len(whole) == 36
    assert not set(whole) & set(paths(name, "test"))
    name = fill(tmp_path / "split", {"train": 3, "val": 3, "test": 3})
    assert paths(name, "train", whole_train=True) == paths(name, "train")


def test_classes_with_fewer_than_two_images_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = fill(tmp_path, {"train": 3, "val": 3, "test": 1})
    fill(tmp_path, {"train": 1, "val": 2, "test": 2}, classes="c")
    for split in ("train", "val", "test") * 2:
        load_dataset(name, split)
    assert caplog.messages == [
        f"{name}: classes with fewer than two images in train: c (1)",
        f"{name}: classes with fewer than two images in test: a (1), b (1)",
    ]


def test_names_with_line_breaks_or_escapes_are_quoted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = fill(tmp_path / "two\nlines", {"train": 2, "test": 2, "val": 1}, classes=["a", "\x1b[31mred"])
    shown = repr(str(tmp_path / "two\nlines"))
    assert load_dataset(name, "val").classes == ("\x1b[31mred", "a")  # exact
    (said,) = caplog.messages
    assert said == f"{name!r}: classes with fewer than two images in val: '\\x1b[31mred' (1), a (1)"
    (tmp_path / "two\nlines" / "val" / "a" / "0.png").write_bytes(b"")
    with pytest.raises(ImageError, match="zero bytes") as error:
        load_dataset(name, "val")
    assert str(error.value).startswith(f"cannot read the image {shown[:-1]}/val/a/0.png'")
    assert error.value.path == str(tmp_path / "two\nlines" / "val" / "a" / "0.png")
    with pytest.raises(UserError, match="does not exist") as missing:
        load_dataset(f"folder:{tmp_path}/no\nwhere", "val")
    assert str(missing.value).isprintable()


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to a pipe", "link to a device"])
def test_what_is_no_regular_file_is_never_opened(kind: str, tmp_path: Path) -> None:
    """Opening the pipe would wait for ever, and reading the device fill the memory."""
    name = fill(tmp_path / "set", {"train": 2, "test": 2}, classes="a")
    path = tmp_path / "set" / "train" / "a" / "x.jpg"
    irregular(kind, path, tmp_path)
    part = load_dataset(name, "trainval", on_error="skip")
    kind = kind.removeprefix("link to a ").replace("pipe", "named pipe")
    (error,) = part.failures.values()
    assert str(error).startswith(f"cannot read the image {path}: ")
    with pytest.raises(ImageError, match=f"is a {kind}"):
        load_dataset(name, "trainval")


@pytest.mark.parametrize(
    "names",
    [("train", "valid", "test"), ("Train", "Val", "Test"), ("training", "validation", "testing"), ("TRAIN", "dev")],
)
def test_splits_and_their_names(tmp_path: Path, names: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    for value, place in enumerate(names):
        put(tmp_path / place / "b" / "x.png", value)
        put(tmp_path / place / "a" / "x.png", value)
    put(tmp_path / "extras" / "x.png")
    name = f"folder:{tmp_path}"
    for value, split in enumerate(("train", "val", "test")[: len(names)]):
        part = load_dataset(name, split)
        assert part.classes == ("a", "b")
        assert [part.image(i).max() for i in range(len(part))] == [value, value]
    assert len(load_dataset(name, "trainval")) == (4 if len(names) == 3 else 2)
    assert "['extras'] are not splits" in caplog.text


def test_a_split_beside_a_folder_without_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path, {"Train": 1})
    (tmp_path / "annotations").mkdir()
    assert load_dataset(f"folder:{tmp_path}", "train").classes == ("a", "b")
    assert "['annotations'] are not splits" in caplog.text


def test_a_split_or_a_class(tmp_path: Path) -> None:
    """Either would be a guess, after which a set is learned that nobody meant."""
    for place in ("car", "ship", "train/electric", "train/steam"):
        put(tmp_path / place / "x.png")
    with pytest.raises(ValueError, match=r"train holds folders, .* images in \['car', 'ship'\] .*another name"):
        load_dataset(f"folder:{tmp_path}", "train")


@pytest.mark.parametrize("names", [("dev", "prod", "test"), ("car", "ship", "train"), ("Valid", "car", "ship")])
def test_classes_that_are_called_like_splits(tmp_path: Path, names: tuple[str, ...]) -> None:
    for place in names:
        put(tmp_path / place / "x.png")
    if "prod" not in names:  # several splits would be splits then
        put(tmp_path / names[-1] / "more" / "x.png")
        put(tmp_path / names[0] / "more" / "x.png")
    part = load_dataset(f"folder:{tmp_path}", "train")
    assert part.classes == names
    assert len(part) == (3 if "prod" in names else 5)


def test_all_is_every_image_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for place, count in (("plain", 20), ("split/train", 4), ("split/val", 3), ("split/test", 2)):
        for i in range(count):
            put(tmp_path / place / "a" / f"{i}.png")
            put(tmp_path / place / "b" / f"{i}.png")
    for place in ("plain", "split"):
        part = load_dataset(f"folder:{tmp_path / place}", "all")
        assert part.split == "all"
        paths = [part.path(i) for i in range(len(part))]
        assert sorted(paths) == sorted(map(str, (tmp_path / place).rglob("*.png")))
        assert [Path(path).parent.name for path in paths] == [part.classes[label] for label in part.labels]
    assert "cut from train" not in caplog.text


def test_test_images_alone(tmp_path: Path) -> None:
    for place in ("a", "b"):
        put(tmp_path / "test" / place / "1.png")
    for split in ("test", "all"):
        part = load_dataset(f"folder:{tmp_path}", split)
        assert (part.classes, part.labels.tolist(), part.split) == (("a", "b"), [0, 1], split)
    for split in ("train", "val", "trainval"):
        with pytest.raises(ValueError, match=r"\['test'\] but no train: add .*, or use one of .*\(test, all\)"):
            load_dataset(f"folder:{tmp_path}", split)


def test_links_are_followed_but_not_in_circles_nor_into_hidden_folders(tmp_path: Path) -> None:
    own, linked = tmp_path / "pets" / "cat" / "1.png", tmp_path / "elsewhere" / "2.png"
    for path in (own, linked, own.parent / ".ipynb_checkpoints" / "1-checkpoint.png"):
        put(path)
    for name, target in (("more", linked.parent), ("self", own.parent), ("above", tmp_path / "pets")):
        (own.parent / name).symlink_to(target)
    (linked.parent / "back").symlink_to(own.parent)
    part = load_dataset(f"folder:{tmp_path / 'pets'}", "train")
    assert [part.path(i) for i in range(len(part))] == [str(own), str(own.parent / "more" / "2.png")]


def test_a_class_whose_name_is_no_text(tmp_path: Path) -> None:
    put(tmp_path / os.fsdecode(b"caf\xe9") / "1.png", 1)
    put(tmp_path / "dog" / "1.png", 2)
    part = load_dataset(f"folder:{tmp_path}", "train")
    assert part.classes == ("caf\\xe9", "dog")
    assert [part.image(i).max() for i in range(2)] == [1, 2]


def test_classes_too_small_to_cut(tmp_path: Path) -> None:
    put(tmp_path / "a" / "1.png")
    put(tmp_path / "a" / "2.png")
    assert len(load_dataset(f"folder:{tmp_path}", "train")) == 2
    with pytest.raises(ValueError, match="no class of train has enough images to cut a test split"):
        load_dataset(f"folder:{tmp_path}", "test")


def test_relative_path_starts_at_root(tmp_path: Path) -> None:
    put(tmp_path / "pets" / "cat" / "1.png")
    assert load_dataset("folder:pets", "train", root=tmp_path).classes == ("cat",)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: None, "has no class folders"),
        (lambda p: p.rmdir(), "does not exist"),
        (lambda p: (p.rmdir(), p.write_text("x")), "is a file"),
        (lambda p: (put(p / "a" / "1.png"), (p / "b").mkdir()), "class folder .*b holds no images"),
        (lambda p: put(p / "test" / "a" / "1.png"), r"\['test'\] but no train"),
        (lambda p: (put(p / "test" / "a" / "1.png"), put(p / "a" / "1.png")), r"test holds folders, .* in \['a'\]"),
        (lambda p: (put(p / "train" / "1.png"), put(p / "val" / "1.png")), "train has no class folders"),
        (
            lambda p: (put(p / "train" / "a" / "1.png"), put(p / "val" / "a" / "1.png"), (p / "Valid").mkdir()),
            "Valid and .*val are both the val split: put their images together",
        ),
        (
            lambda p: (put(p / "train" / "a" / "1.png"), (p / "val").mkdir()),
            "val is empty: add .*val/CLASS/image.jpg, or remove it to cut val from train",
        ),
        (lambda p: (put(p / "train" / "a" / "1.png"), put(p / "val" / "1.png")), "val has no class folders: add"),
        (
            lambda p: (put(p / "train" / "a" / "1.png"), put(p / "val" / "c" / "1.png")),
            r"that train lacks: \['c'\]; train's are \['a'\]",
        ),
    ],
)
def test_bad_folders_say_what_is_wrong(tmp_path: Path, build: Callable[[Path], object], message: str) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    build(folder)
    with pytest.raises(ValueError, match=message):
        load_dataset(f"folder:{folder}", "val")


def test_a_class_without_a_folder_in_val_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for place in ("train/a", "train/b", "val/b"):
        put(tmp_path / place / "1.png")
    assert load_dataset(f"folder:{tmp_path}", "val").labels.tolist() == [1]
    assert "has no folder for 1 of the 2 classes: 'a'" in caplog.text
