"""Shards are read whole, or the message says what is wrong; and a million images are a few arrays."""

import functools
import json
import logging
import multiprocessing
import os
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
from irregular import irregular
from shard_files import pair, write_shard

from vitlab.data import dataset as sources
from vitlab.data import shards
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.registry import load_dataset


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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
    seen = {(int(train.labels[i]), int(train.image(i).max())) for i in range(len(train))}
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
        ([("a.png", b"x")], "1 keys lack an image or a .cls, first 'a'"),
        ([("a.cls", b"0")], "1 keys lack an image or a .cls, first 'a'"),
        (pair("a", "cat"), "must hold a class number.* not b'cat'"),
        (pair("a", -1), "must hold a class number"),
        (pair("a", ""), "must hold a class number"),
        (pair("a", "1;2"), "or several.* not b'1;2'"),
        ([("a.txt", b"x")], "no images in"),
        (pair("a", 0) + pair("a", 1), "more than one image or .cls of the key 'a'"),
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
    with pytest.raises(ValueError, match=r"train-0\.tar is corrupt or cut off"):
        load_dataset(f"shards:{tmp_path}", "trainval")


@pytest.mark.parametrize("text", ["{", "{}", "[1, 2]", "[]"])
def test_bad_class_names(tmp_path: Path, text: str) -> None:
    write_shard(tmp_path / "train-0.tar", pair("a", 0))
    (tmp_path / "classes.json").write_text(text)
    with pytest.raises(ValueError, match=r"classes\.json"):
        load_dataset(f"shards:{tmp_path}", "train")


def test_shards_missing(tmp_path: Path) -> None:
    write_shard(tmp_path / "images.tar", pair("a", 0))
    with pytest.raises(ValueError, match=r"has no train-\*.tar \(its tars: \['images.tar'\]\)"):
        load_dataset(f"shards:{tmp_path}", "train")
    with pytest.raises(ValueError, match="does not exist"):
        load_dataset(f"shards:{tmp_path / 'gone'}", "train")


def test_a_shard_that_is_a_pipe(tmp_path: Path) -> None:
    irregular("pipe", tmp_path / "train-0.tar", tmp_path)
    with pytest.raises(ValueError, match=r"train-0.tar is a named pipe"):
        load_dataset(f"shards:{tmp_path}", "train")


def test_the_real_flowers(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    sizes = {}
    for split in ("train", "val", "test"):
        part = load_dataset("shards:flowers102", split, root=shared / "data")
        sizes[split] = len(part)
        assert len(part.classes) == 102
        assert min(part.image(len(part) - 1).shape[:2]) == 224
    assert sizes == {"train": 1020, "val": 1020, "test": 1000}
    (said,) = caplog.messages
    assert said == "shards:flowers102: classes with fewer than two images in test: 8 (1), 26 (1)"


# ------------------------------------------------------------------------------------- a list in place of .cls


def test_a_list_of_labels_counts_before_the_cls(tmp_path: Path) -> None:
    """As `vitlab shard` writes several labels: a reader that knows only `.cls` finds the first."""
    members = [*pair("a", 3), ("a.labels.json", b"[3, 0]"), *pair("b", 1)]
    write_shard(tmp_path / "train-0.tar", members)
    data = load_dataset(f"shards:{tmp_path}", "trainval")
    assert sets_of(data) == [[3, 0], [1]]


@pytest.mark.parametrize("text", ["[]", "3", "[-1]", "[true]", "[1.5]", "{"])
def test_bad_lists_of_labels(tmp_path: Path, text: str) -> None:
    write_shard(tmp_path / "train-0.tar", [*pair("a", 3), ("a.labels.json", text.encode())])
    with pytest.raises(ValueError, match=r"a.labels.json must hold a list of class numbers"):
        load_dataset(f"shards:{tmp_path}", "trainval")


def test_other_members_of_a_image_are_counted_wherever_they_stand(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """webdataset's own writer sorts by name: cls, jpg, json."""
    write_shard(tmp_path / "train-0.tar", [*pair("a", 0), ("a.json", b"{}"), *pair("b", 0), ("b.json", b"{}")])
    assert len(load_dataset(f"shards:{tmp_path}", "trainval")) == 2
    assert "(.json 2)" in caplog.text


# --------------------------------------------------------------------------------------------- many of them


def whole(path: Path) -> Dataset:
    """All that is in the train shards, with nothing cut off for val and test."""
    return shards.shard_splits(path, f"shards:{path}")[1]("train")


def many(path: Path, count: int = 40) -> list[int]:
    """Two shards of images, of which number i is gray i; returns their labels."""
    labels = [i % 7 for i in range(count)]
    side = sources.MEMORY_SIDE + 1
    for shard, part in enumerate((range(count // 2), range(count // 2, count))):
        members = [member for i in part for member in pair(f"{i:03d}", labels[i], i, side)]
        write_shard(path / f"train-{shard}.tar", members)
    return labels


def test_parts_and_unions_share_the_arrays(tmp_path: Path) -> None:
    labels = many(tmp_path)
    write_shard(tmp_path / "val-0.tar", pair("z", 0, 99, sources.MEMORY_SIDE + 1))
    write_shard(tmp_path / "test-0.tar", pair("z", 0, 100, sources.MEMORY_SIDE + 1))
    whole = load_dataset(f"shards:{tmp_path}", "train")
    assert whole.pixels is None
    part = whole.take(np.array([39, 3, 3, 20]))
    assert [int(part.image(i)[0, 0, 0]) for i in range(4)] == [39, 3, 3, 20]
    assert part.path(0) == str(tmp_path / "train-1.tar" / "039.png")
    assert isinstance(part.entries, shards.ShardEntries)
    assert isinstance(whole.entries, shards.ShardEntries)
    assert part.entries.places is whole.entries.places
    both = load_dataset(f"shards:{tmp_path}", "trainval")
    assert [int(both.image(i)[0, 0, 0]) for i in (0, 39, 40)] == [0, 39, 99]
    assert both.path(40) == str(tmp_path / "val-0.tar" / "z.png")
    fewer = load_dataset(f"shards:{tmp_path}", "train", classes=(2,))
    assert [int(fewer.image(i)[0, 0, 0]) for i in range(len(fewer))] == [i for i in range(40) if labels[i] == 2]
    assert [entry.member for entry in whole.entries[38:99]] == ["038.png", "039.png"]
    assert whole.entries[-1].member == "039.png"
    with pytest.raises(IndexError):
        whole.entries[40]


def test_a_process_keeps_few_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(8):
        write_shard(tmp_path / f"train-{i}.tar", pair("a", 0, i, 70))
    monkeypatch.setattr(shards, "_opened", functools.lru_cache(3)(shards.OpenFile))
    data = whole(tmp_path)

    def open_tars() -> int:
        links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
        return sum(os.readlink(link).startswith(str(tmp_path)) for link in links if os.path.lexists(link))  # noqa: PTH115

    for i in (*range(8), 0, 7, 7):
        assert int(data.image(i)[0, 0, 0]) == i
        assert open_tars() <= 3
    assert open_tars() == 3


def test_images_are_read_alike_in_spawned_processes(tmp_path: Path) -> None:
    """No object for each image is sent along: what is sent grows by some bytes an image."""
    many(tmp_path, 40)
    many(tmp_path / "more", 400)
    data, more = (whole(path) for path in (tmp_path, tmp_path / "more"))
    sizes = [len(ForkingPickler.dumps(each.entries)) for each in (data, more)]
    per_image = (sizes[1] - sizes[0]) / (len(more) - len(data))
    assert 20 < per_image < 48
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(data.image, (5,))[0, 0, 0] == data.image(5)[0, 0, 0]


def test_a_shard_that_is_gone_is_a_image_that_cannot_be_read(tmp_path: Path) -> None:
    many(tmp_path)
    data = whole(tmp_path)
    (tmp_path / "train-1.tar").unlink()
    with pytest.raises(ImageError, match=r"train-1.tar/039.png: No such file"):
        data.take(np.array([len(data) - 1])).image(0)


def test_large_sets_are_looked_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    labels = many(tmp_path)
    monkeypatch.setattr(shards, "CACHE_FROM", 40)
    first = whole(tmp_path)
    looked = []
    scan = shards.scan
    monkeypatch.setattr(shards, "scan", lambda tars: looked.append(tars) or scan(tars))
    again = whole(tmp_path)
    assert not looked
    assert again.labels.tolist() == first.labels.tolist()
    assert sorted(again.labels.tolist()) == sorted(labels)
    assert again.path(7) == first.path(7)
    np.testing.assert_array_equal(again.image(33), first.image(33))
    (kept,) = (tmp_path / "cache" / "vitlab" / "shard-indexes").iterdir()
    kept.write_bytes(kept.read_bytes()[:-100])  # damaged
    assert whole(tmp_path).labels.tolist() == first.labels.tolist()
    assert len(looked) == 1
    write_shard(tmp_path / "train-1.tar", pair("z", 6, 200, 70))  # another shard under the same name
    assert whole(tmp_path).labels.tolist()[-1] == 6
    assert len(looked) == 2
    monkeypatch.setattr(shards, "CACHE_FROM", 10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "train-0.tar"))  # nothing can be kept there
    assert len(whole(tmp_path)) == 21
    assert "cannot cache the scan" in caplog.text


def test_many_small_images_are_not_all_decoded_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(tmp_path / "train-0.tar", [member for i in range(6) for member in pair(f"{i}", 0, i)])
    assert whole(tmp_path).in_memory("raise").pixels is not None
    monkeypatch.setattr(sources, "MEMORY_FILES", 5)
    assert whole(tmp_path).in_memory("raise").pixels is None


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
