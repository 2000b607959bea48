"""Shards are read completely or not at all; and a million images are a few arrays."""

import json
import os
import pickle
import tarfile
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
from image_files import grays
from irregular import irregular
from shard_files import pair, write_shard

from vitlab.data import dataset as dataset_module
from vitlab.data import shards
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError

LARGE = dataset_module.MEMORY_SIDE + 1


def label_lists(dataset: Dataset) -> list[list[int]]:
    assert dataset.label_sets is not None
    return [dataset.label_sets.of_image(i).tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("side", [8, LARGE])
def test_shards(tmp_path: Path, side: int, caplog: pytest.LogCaptureFixture) -> None:
    long = "a/folder/" + "with a very long name/" * 10 + "0001"
    write_shard(tmp_path / "train-01.tar", pair("b", 1, 11, side) + pair("dir/b", "2\n", 12, side))
    write_shard(tmp_path / "train-00.tar", [("a.json", b"{}"), *pair("a", 0, 10, side), *pair(long, 2, 13, side)])
    write_shard(tmp_path / "validation-0.tar", [*pair("a", 1, 20, side), ("a.json", b"{}")])
    write_shard(tmp_path / "test-0.tar", pair("a", 0, 30, side))
    (tmp_path / "classes.json").write_text(json.dumps(["cat", "dog", "gnu"]))
    train, val = (load_dataset(f"shards:{tmp_path}", split) for split in ("trainval", "val"))
    assert (train.pixels is None) == (side == LARGE)
    assert train.classes == val.classes == ("cat", "dog", "gnu")
    rows = [(int(train.labels[i]), int(train.image(i).max())) for i in range(len(train))]
    assert rows == [(0, 10), (2, 13), (1, 11), (2, 12), (1, 20)]
    assert train.path(3) == str(tmp_path / "train-01.tar" / "dir/b.png")
    assert "(.json 1)" in caplog.text


def test_several_labels(tmp_path: Path) -> None:
    """In one form or another, a list before the .cls; a label that is named twice counts once."""
    members = [*pair("a", 3), ("a.labels.json", b"[3, 0]"), *pair("b", 1), *pair("c", "2,0"), *pair("d", " 2, 1\n0 2 ")]
    write_shard(tmp_path / "train-0.tar", members)
    write_shard(tmp_path / "val-0.tar", pair("a", 1))
    write_shard(tmp_path / "test-0.tar", [*pair("a", "1"), *pair("b", "1 5")])
    train = load_dataset(f"shards:{tmp_path}", "train")
    assert train.classes == ("0", "1", "2", "3")  # counted on train
    assert label_lists(train) == [[3, 0], [1], [2, 0], [2, 1, 0]]
    assert train.labels.tolist() == [3, 1, 2, 2]
    val = load_dataset(f"shards:{tmp_path}", "val")
    assert (label_lists(val), val.classes) == ([[1]], train.classes)  # as in train, several labels
    assert label_lists(load_dataset(f"shards:{tmp_path}", "trainval"))[-1] == [1]
    part = load_dataset(f"shards:{tmp_path}", "train", classes=(0, 3))
    assert (part.classes, label_lists(part), part.labels.tolist()) == (("0", "3"), [[1, 0], [0], [0]], [1, 0, 0])
    with pytest.raises(ValueError, match=r"test-0.tar/b.png has the label 5, but train's classes are 0 to 3"):
        load_dataset(f"shards:{tmp_path}", "test")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.png", b"x")], "1 keys lack an image or a .cls, first 'a'"),
        ([("a.cls", b"0")], "1 keys lack an image or a .cls, first 'a'"),
        *((pair("a", text), "class number") for text in ("cat", "", "1.5")),
        ([("a.labels.json", b"[true]")], "a.labels.json must hold"),
        ([("a.txt", b"x")], "no images in"),
        (pair("a", 0) + pair("a", 1), "more than one image or .cls of the key 'a'"),
    ],
)
def test_invalid_shards(tmp_path: Path, members: list[tuple[str, bytes]], message: str) -> None:
    write_shard(tmp_path / "train-0.tar", members)
    with pytest.raises(ValueError, match=message):
        load_dataset(f"shards:{tmp_path}", "trainval")


def test_corrupt_shards(tmp_path: Path) -> None:
    """A cut one is never read in part; at a negative size the reader of tars would read the same header for ever."""
    path = tmp_path / "train-0.tar"
    write_shard(path, pair("a", 0) + pair("b", 1))  # four members of 1,024 bytes each, then the end
    whole = path.read_bytes()
    text, image = tarfile.TarInfo("a.txt"), tarfile.TarInfo("a.png")
    image.size = -tarfile.BLOCKSIZE
    negative = b"".join(info.tobuf(tarfile.GNU_FORMAT) for info in (text, image))
    for content in (negative, whole[:700], whole[:1024], whole[:2560]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"train-0\.tar is corrupt or truncated"):
            load_dataset(f"shards:{tmp_path}", "trainval")


def test_images_without_labels(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-0.tar", [*pair("a", "0 2"), *pair("b", 1)])
    write_shard(tmp_path / "val-0.tar", [pair("a", 0)[0], ("a.labels.json", b"[]")])
    val = load_dataset(f"shards:{tmp_path}", "val")
    assert (label_lists(val), len(val.classes)) == ([[]], 3)
    (tmp_path / "val-0.tar").rename(tmp_path / "train-0.tar")
    with pytest.raises(UserError, match=r"no image of .*, train, has a label"):
        load_dataset(f"shards:{tmp_path}", "trainval")


def test_missing_shards_and_pipes(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-1.tar", pair("a", 0))
    data = read_train(tmp_path)
    (tmp_path / "train-1.tar").unlink()
    with pytest.raises(ImageError, match=r"train-1\.tar/a\.png"):
        data.image(0)
    write_shard(tmp_path / "images.tar", pair("a", 0))
    with pytest.raises(ValueError, match=r"has no train-\*.tar \(its tars: \['images.tar'\]\)"):
        load_dataset(f"shards:{tmp_path}", "train")
    with pytest.raises(ValueError, match="does not exist"):
        load_dataset(f"shards:{tmp_path / 'gone'}", "train")
    irregular("pipe", tmp_path / "train-0.tar", tmp_path)
    with pytest.raises(ValueError, match=r"train-0.tar is a named pipe"):
        load_dataset(f"shards:{tmp_path}", "train")


def read_train(path: Path) -> Dataset:
    """All images of the train shards, without a val and test split cut from them."""
    return shards.shard_splits(path, f"shards:{path}")[1]("train")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of 20 images each, of which number i is gray i and has the label i mod 7."""
    folder = tmp_path_factory.mktemp("large")
    for shard in (0, 1):
        members = [m for i in range(20 * shard, 20 * shard + 20) for m in pair(f"{i:03d}", i % 7, i, LARGE)]
        write_shard(folder / f"train-{shard}.tar", members)
    return folder


def test_parts_share_the_arrays(large: Path) -> None:
    train = read_train(large)
    part = train.take(np.array([39, 3, 3, 20]))
    assert grays(part) == [39, 3, 3, 20]
    assert part.path(0) == str(large / "train-1.tar" / "039.png")
    assert isinstance(part.entries, shards.ShardEntries)
    assert isinstance(train.entries, shards.ShardEntries)
    assert part.entries.locations is train.entries.locations


def test_other_processes_get_arrays_only(large: Path) -> None:
    """No object per image is sent along: what is sent grows by some bytes an image."""
    data = read_train(large)
    assert isinstance(data.entries, shards.ShardEntries)
    one, two = (ForkingPickler.dumps(data.entries.take(np.arange(n))) for n in (1, 40))
    assert (len(two) - len(one)) / 39 < 48
    assert pickle.loads(two)[5].read()[0, 0, 0] == 5  # noqa: S301


def test_a_file_is_not_closed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another thread lets go of it; its number would be that of the next file."""
    for name in "ab":
        (tmp_path / name).write_text(name * 9)
    pread, others = os.pread, []

    def pread_late(number: int, size: int, offset: int) -> bytes:
        shards._opened.cache_clear()
        others.append(shards.OpenFile(str(tmp_path / "b")))
        return pread(number, size, offset)

    monkeypatch.setattr(os, "pread", pread_late)
    assert shards._opened(str(tmp_path / "a")).read(2, 3) == b"aaa"
