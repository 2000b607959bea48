"""Folders and shards are read whole, or the message says what is wrong."""

import io
import json
import logging
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitlab.data import sources
from vitlab.data.datasets import load_dataset
from vitlab.data.pictures import PictureError
from vitlab.data.sources import Dataset, Labels

# ------------------------------------------------------------------------------------------ image folders


def put(path: Path, value: int = 0, side: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), (value, value, value)).save(path)


def test_plain_class_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(20):
        put(tmp_path / "zebra" / f"{i}.png", 10)
        put(tmp_path / "Żółw błotny" / "deep down" / f"ü {i}.PNG", 20)
    (tmp_path / "zebra" / "notes.txt").write_text("no picture")
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
        np.testing.assert_array_equal(part.picture(1), part.pixels[1])
    assert "4 files are no pictures" in caplog.text
    assert "(.txt 1, README 1, hidden 1, outside the class folders 1)" in caplog.text
    assert "has no test and no val split: cut from train, stratified, seed 0" in caplog.text


def test_another_seed_cuts_another_split(tmp_path: Path) -> None:
    for i in range(30):
        put(tmp_path / "a" / f"{i}.png")
    cut = [load_dataset(f"folder:{tmp_path}", "test", seed=seed) for seed in (0, 0, 1)]
    paths = [[part.path(i) for i in range(len(part))] for part in cut]
    assert paths[0] == paths[1]
    assert paths[0] != paths[2]


def test_ready_made_splits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for split, value in (("train", 1), ("validation", 2), ("test", 3)):
        for name in ("b", "a"):
            put(tmp_path / split / name / "x.png", value)
    put(tmp_path / "extras" / "x.png")
    for split, value in (("train", 1), ("val", 2), ("test", 3)):
        part = load_dataset(f"folder:{tmp_path}", split)
        assert part.classes == ("a", "b")
        assert [part.picture(i).max() for i in range(len(part))] == [value, value]
    assert len(load_dataset(f"folder:{tmp_path}", "trainval")) == 4
    assert "['extras'] are no splits" in caplog.text


def test_a_missing_split_is_cut_from_train(tmp_path: Path) -> None:
    for i in range(20):
        put(tmp_path / "train" / "a" / f"{i}.png", 1)
        put(tmp_path / "val" / "a" / f"{i}.png", 2)
    sizes = {s: len(load_dataset(f"folder:{tmp_path}", s)) for s in ("train", "val", "test", "trainval")}
    assert sizes == {"train": 18, "val": 20, "test": 2, "trainval": 38}


def test_classes_too_small_to_cut(tmp_path: Path) -> None:
    put(tmp_path / "a" / "1.png")
    put(tmp_path / "a" / "2.png")
    assert len(load_dataset(f"folder:{tmp_path}", "train")) == 2
    with pytest.raises(ValueError, match="no class of train has enough pictures to cut a test split"):
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
        (lambda p: (put(p / "a" / "1.png"), (p / "b").mkdir()), "class folder .*b holds no pictures"),
        (lambda p: put(p / "val" / "a" / "1.png"), r"\['val'\] but no train"),
        (
            lambda p: (put(p / "train" / "a" / "1.png"), put(p / "val" / "c" / "1.png")),
            r"that train lacks: \['c'\]; train's are \['a'\]",
        ),
    ],
    ids=["empty", "missing", "file", "empty-class", "no-train", "strange-class"],
)
def test_bad_folders_say_what_is_wrong(tmp_path: Path, build: Callable[[Path], object], message: str) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    build(folder)
    with pytest.raises(ValueError, match=message):
        load_dataset(f"folder:{folder}", "val")


def test_a_class_without_a_folder_in_val_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for place in ("train/a", "train/b", "val/b"):
        put(tmp_path / place / "1.png")
    assert load_dataset(f"folder:{tmp_path}", "val").labels.tolist() == [1]
    assert "no folder for the class 'a'" in caplog.text


def test_large_or_uneven_pictures_stay_on_disk(tmp_path: Path) -> None:
    for i, side in enumerate((8, 9)):
        put(tmp_path / "uneven" / "a" / f"{i}.png", side=side)
        put(tmp_path / "large" / "a" / f"{i}.png", side=sources.MEMORY_SIDE + 1)
    for name in ("uneven", "large"):
        part = load_dataset(f"folder:{tmp_path / name}", "train")
        assert part.pixels is None
        assert part.picture(0).shape[2] == 3


def test_unreadable_pictures_of_a_small_set(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        put(tmp_path / split / "a" / "0.png")
    (tmp_path / "train" / "a" / "1.png").write_bytes(b"")
    with pytest.raises(PictureError, match=r"1\.png: the file is empty"):
        load_dataset(f"folder:{tmp_path}", "train")
    part = load_dataset(f"folder:{tmp_path}", "train", on_error="skip")
    assert part.pixels is not None
    assert list(part.failures) == [1]
    assert part.picture(0).max() == 0
    with pytest.raises(PictureError, match="zero bytes"):
        part.picture(1)


# ------------------------------------------------------------------------------------------------- shards


def write_shard(path: Path, members: list[tuple[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def pair(key: str, label: object, value: int = 0, side: int = 8) -> list[tuple[str, bytes]]:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (value, value, value)).save(buffer, "PNG")
    return [(f"{key}.png", buffer.getvalue()), (f"{key}.cls", str(label).encode())]


@pytest.mark.parametrize("side", [8, sources.MEMORY_SIDE + 1])
def test_shards(tmp_path: Path, side: int, caplog: pytest.LogCaptureFixture) -> None:
    long = "a/folder/" + "with a very long name/" * 10 + "0001"
    write_shard(tmp_path / "train-01.tar", pair("b", 1, 11, side) + pair("dir/b", "2\n", 12, side))
    write_shard(tmp_path / "train-00.tar", [("a.json", b"{}"), *pair("a", 0, 10, side), *pair(long, 2, 13, side)])
    write_shard(tmp_path / "validation-0.tar", pair("a", 1, 20, side))
    write_shard(tmp_path / "test-0.tar", pair("a", 0, 30, side))
    (tmp_path / "classes.json").write_text(json.dumps(["cat", "dog", "gnu"]))
    train = load_dataset(f"shards:{tmp_path}", "trainval")
    assert (train.pixels is None) == (side > sources.MEMORY_SIDE)
    val = load_dataset(f"shards:{tmp_path}", "val")
    assert train.classes == val.classes == ("cat", "dog", "gnu")
    assert train.labels.tolist()[-1] == val.labels.tolist()[0] == 1
    seen = {(int(train.labels[i]), int(train.picture(i).max())) for i in range(len(train))}
    assert seen == {(0, 10), (2, 13), (1, 11), (2, 12), (1, 20)}
    assert train.path(0).startswith(str(tmp_path / "train-0"))
    assert "(.json 1)" in caplog.text


def test_shards_with_several_labels(tmp_path: Path) -> None:
    """In one form or another; the first one counts where one label is wanted, and one named twice counts once."""
    members = [*pair("a", "3 0"), *pair("b", 1), *pair("c", "2,0"), *pair("d", " 2, 1\n0 2 ")]
    write_shard(tmp_path / "train-0.tar", members)
    write_shard(tmp_path / "val-0.tar", pair("a", 1))
    write_shard(tmp_path / "test-0.tar", [*pair("a", "1"), *pair("b", "1 5")])
    train = load_dataset(f"shards:{tmp_path}", "train")
    assert train.classes == ("0", "1", "2", "3")
    assert sets_of(train) == [[3, 0], [1], [2, 0], [2, 1, 0]]
    assert train.labels.tolist() == [3, 1, 2, 2]
    assert load_dataset(f"shards:{tmp_path}", "val").label_sets is None
    assert sets_of(load_dataset(f"shards:{tmp_path}", "trainval")) == [[3, 0], [1], [2, 0], [2, 1, 0], [1]]
    part = load_dataset(f"shards:{tmp_path}", "train", classes=(0, 3))
    assert (part.classes, sets_of(part), part.labels.tolist()) == (("0", "3"), [[1, 0], [0], [0]], [1, 0, 0])
    with pytest.raises(ValueError, match=r"test-0.tar/b.png has the label 5, but train's classes are 0 to 3"):
        load_dataset(f"shards:{tmp_path}", "test")


def sets_of(dataset: Dataset) -> list[list[int]]:
    assert dataset.label_sets is not None
    assert len(dataset.label_sets) == len(dataset)
    return [dataset.label_sets.of(i).tolist() for i in range(len(dataset))]


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=8), st.data())
def test_label_sets_against_lists(lists: list[list[int]], data: st.DataObject) -> None:
    labels = Labels.of_lists(lists)
    assert [labels.of(i).tolist() for i in range(len(labels))] == lists
    assert labels.firsts.tolist() == [each[0] for each in lists]
    chosen = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=10))
    taken = labels.take(np.array(chosen, np.int64))
    assert [taken.of(i).tolist() for i in range(len(taken))] == [lists[i] for i in chosen]
    both = labels.join(taken)
    assert [both.of(i).tolist() for i in range(len(both))] == lists + [lists[i] for i in chosen]
    new = np.array([2, -1, 0, -1, 1, -1])
    fewer = labels.renumber(new)
    expected = [[int(new[label]) for label in each if new[label] >= 0] for each in lists]
    assert [fewer.of(i).tolist() for i in range(len(fewer))] == expected
    hot = labels.multi_hot(np.array(chosen, np.int64), 6)
    assert hot.tolist() == [[c in lists[i] for c in range(6)] for i in chosen]


def test_shards_without_names_count_their_classes_on_train(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-0.tar", pair("a", 0) + pair("b", 3))
    write_shard(tmp_path / "val-0.tar", pair("a", 1))
    write_shard(tmp_path / "test-0.tar", pair("a", 4))
    assert load_dataset(f"shards:{tmp_path}", "val").classes == ("0", "1", "2", "3")
    with pytest.raises(ValueError, match=r"test-0.tar/a.png has the label 4, but train's classes are 0 to 3"):
        load_dataset(f"shards:{tmp_path}", "test")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.png", b"x")], "1 keys lack a picture or a .cls, first 'a'"),
        ([("a.cls", b"0")], "1 keys lack a picture or a .cls, first 'a'"),
        (pair("a", "cat"), "must hold a class number .* not b'cat'"),
        (pair("a", -1), "must hold a class number"),
        (pair("a", ""), "must hold a class number"),
        (pair("a", "1;2"), r"or several: 3 17 42; not b'1;2'"),
        ([("a.txt", b"x")], "no pictures in"),
        (pair("a", 0) + pair("a", 1), "more than one picture or .cls of the key 'a'"),
    ],
)
def test_bad_shards_say_what_is_wrong(tmp_path: Path, members: list[tuple[str, bytes]], message: str) -> None:
    write_shard(tmp_path / "train-0.tar", members)
    with pytest.raises(ValueError, match=message):
        load_dataset(f"shards:{tmp_path}", "trainval")


@pytest.mark.parametrize("keep", [700, 1024, 2000, 2048, 2560, 3000])
def test_a_cut_shard_is_never_read_in_part(tmp_path: Path, keep: int) -> None:
    whole = tmp_path / "train-0.tar"
    write_shard(whole, pair("a", 0) + pair("b", 1))  # four members of 1,024 bytes each, then the end
    whole.write_bytes(whole.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"train-0\.tar is damaged or cut off"):
        load_dataset(f"shards:{tmp_path}", "trainval")


@pytest.mark.parametrize("text", ["{", "{}", "[1, 2]", "[]"])
def test_bad_class_names(tmp_path: Path, text: str) -> None:
    write_shard(tmp_path / "train-0.tar", pair("a", 0))
    (tmp_path / "classes.json").write_text(text)
    with pytest.raises(ValueError, match=r"classes\.json"):
        load_dataset(f"shards:{tmp_path}", "train")


def test_shards_missing(tmp_path: Path) -> None:
    write_shard(tmp_path / "pictures.tar", pair("a", 0))
    with pytest.raises(ValueError, match=r"has no train-\*.tar \(its tars: \['pictures.tar'\]\)"):
        load_dataset(f"shards:{tmp_path}", "train")
    with pytest.raises(ValueError, match="does not exist"):
        load_dataset(f"shards:{tmp_path / 'gone'}", "train")


def test_the_real_flowers(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    sizes = {}
    for split in ("train", "val", "test"):
        part = load_dataset("shards:flowers102", split, root=shared / "data")
        sizes[split] = len(part)
        assert len(part.classes) == 102
        assert min(part.picture(len(part) - 1).shape[:2]) == 224
    assert sizes == {"train": 1020, "val": 1020, "test": 1000}
    assert not caplog.text
