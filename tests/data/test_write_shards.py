"""What is written holds every image once, as it was, in balance; a write cut short is never taken for whole."""

import io
import json
import multiprocessing
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from shard_files import pair, write_folders, write_shard

from vitlab.data import write_shards as module
from vitlab.data.dataset import Dataset, Labels
from vitlab.data.decode import ImageError, decode_image
from vitlab.data.registry import load_dataset
from vitlab.data.shard_index import check_shards
from vitlab.data.write_shards import ShardSettings, deal, encode, write_shards

SMALL = ShardSettings(records=10)


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """30 JPEGs of three classes, uneven, of 70 to 72 pixels."""
    write_folders(tmp_path / "pets", {"ant": 15, "bee": 10, "cat": 5})
    return tmp_path / "pets"


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # pyright: ignore[reportOptionalMemberAccess]


# ---------------------------------------------------------------------------------------------- what is written


def test_a_set_reads_as_its_source(pets: Path, tmp_path: Path) -> None:
    heard = []
    made = write_shards(f"folder:{pets}", tmp_path / "out", SMALL, report=lambda *words: heard.append(words))
    sizes = {split: each["images"] for split, each in made["splits"].items()}
    assert sizes == {"train": 22, "val": 4, "test": 4}
    assert {split: each["shards"] for split, each in made["splits"].items()} == {"train": 3, "val": 1, "test": 1}
    assert heard[-1] == (30, 30)
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
    assert not check_shards(tmp_path / "out")["wrong"]
    for split in sizes:
        source, copy = load_dataset(f"folder:{pets}", split), load_dataset(f"shards:{tmp_path / 'out'}", split)
        assert copy.classes == source.classes == ("ant", "bee", "cat")
        keys = [int(Path(copy.path(i)).stem) for i in range(len(copy))]
        assert sorted(keys) == list(range(len(source)))
        for i, key in enumerate(keys):
            assert copy.labels[i] == source.labels[key]
            assert copy.entries[i].data() == Path(source.path(key)).read_bytes()
            np.testing.assert_array_equal(copy.image(i), source.image(key))


def test_a_val_that_is_also_the_test_is_written_once(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_folders(tmp_path / "pets" / split, {"ant": 4, "bee": 4})
    made = write_shards(f"folder:{tmp_path / 'pets'}", tmp_path / "out", SMALL)
    assert {split: each["images"] for split, each in made["splits"].items()} == {"train": 8, "val": 8}
    sizes = {split: len(load_dataset(f"shards:{tmp_path / 'out'}", split)) for split in ("trainval", "test", "all")}
    assert sizes == {"trainval": 8, "test": 8, "all": 16}


def test_systems_that_do_not_tell_which_cores_may_be_used(
    pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert write_shards(f"folder:{pets}", tmp_path / "out", SMALL)["splits"]["train"]["images"] == 22


def test_it_also_reads_without_its_index(pets: Path, tmp_path: Path) -> None:
    """By looking through the tars, as anybody's."""
    write_shards(f"folder:{pets}", tmp_path / "out", SMALL, splits=("train",))
    listed = load_dataset(f"shards:{tmp_path / 'out'}", "trainval")
    (tmp_path / "out" / "index.json").unlink()
    looked = load_dataset(f"shards:{tmp_path / 'out'}", "trainval")
    assert [looked.path(i) for i in range(len(looked))] == [listed.path(i) for i in range(len(listed))]
    assert looked.labels.tolist() == listed.labels.tolist()
    np.testing.assert_array_equal(looked.image(5), listed.image(5))


def test_the_package_webdataset_reads_it(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset", reason="needs the package webdataset, to compare with")
    source = [*pair("a", "3 0", 10, 70), *pair("b", 1, 20, 70), *pair("c", "2,0", 30, 70)]
    write_shard(tmp_path / "in" / "train-0.tar", source)
    write_shard(tmp_path / "in" / "test-0.tar", pair("t", 1, 40, 70))
    write_shards(f"shards:{tmp_path / 'in'}", tmp_path / "out", ShardSettings(), splits=("train", "test"))
    expected = {}
    for i in range(len(data := load_dataset(f"shards:{tmp_path / 'out'}", "train"))):
        assert data.label_sets is not None
        expected[Path(data.path(i)).stem] = (
            int(data.labels[i]),
            data.label_sets.of(i).tolist(),
            data.image(i)[0, 0, 0],
        )
    tars = sorted(str(path) for path in (tmp_path / "out").glob("train-*.tar"))
    found = {
        row["__key__"]: (row["cls"], row["labels.json"], row["png"][0, 0, 0])
        for row in wds.WebDataset(tars, shardshuffle=False).decode("rgb8")
    }
    assert found == expected
    assert len(found) == 3
    (row,) = wds.WebDataset(str(tmp_path / "out" / "test-000000.tar"), shardshuffle=False).decode("rgb8")
    assert (row["cls"], "labels.json" in row) == (1, False)  # of this split none has several


def test_the_bytes_are_the_same_each_time(pets: Path, tmp_path: Path) -> None:
    for name, settings in (("a", SMALL), ("b", SMALL), ("c", ShardSettings(records=10, seed=1))):
        write_shards(f"folder:{pets}", tmp_path / name, settings)
    files = {name: {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in "abc"}
    assert files["a"] == files["b"]
    assert files["a"]["train-000000.tar"] != files["c"]["train-000000.tar"]
    with tarfile.open(tmp_path / "a" / "train-000000.tar") as tar:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.mode) for m in tar} == {(0, 0, 0, "", 0o644)}
        names = tar.getnames()
    assert names[::2] == [f"{name.partition('.')[0]}.cls" for name in names[1::2]]  # an image's members stand together


@given(st.lists(st.integers(0, 5), min_size=1, max_size=300), st.integers(1, 9), st.integers(0, 2**64 - 1))
def test_shards_are_balanced(labels: list[int], shards: int, seed: int) -> None:
    parts = deal(np.array(labels), shards, seed)
    assert len(parts) == shards
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for label in set(labels):
        counts = [int((np.array(labels)[part] == label).sum()) for part in parts]
        assert max(counts) - min(counts) <= 1
    again = deal(np.array(labels), shards, seed)
    assert all(np.array_equal(one, two) for one, two in zip(parts, again, strict=True))


def test_a_shard_is_shuffled() -> None:
    (part,) = deal(np.repeat([0, 1], 500), 1, 0)
    runs = 1 + int((np.diff(np.repeat([0, 1], 500)[part]) != 0).sum())
    assert 430 < runs < 570  # of a fair shuffle 501, with a deviation of 16


def test_about_so_many_megabytes(pets: Path, tmp_path: Path) -> None:
    write_shards(f"folder:{pets}", tmp_path / "out", ShardSettings(megabytes=0.02), splits=("train",))
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("train-*.tar")]
    assert len(sizes) > 2
    assert all(14_000 < size < 26_000 for size in sizes), sizes


# ------------------------------------------------------------------------------------------------ the images


def one_image(tmp_path: Path, name: str, data: bytes | Image.Image, **options: Any) -> Dataset:
    path = tmp_path / "own" / "train" / "a" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(data, Image.Image):
        data.save(path, **options)
    else:
        path.write_bytes(data)
    return load_dataset(f"folder:{tmp_path / 'own'}", "train")


def gradient(width: int, height: int) -> Image.Image:
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, (x + y) / 2], axis=2).astype(np.uint8))


@pytest.mark.parametrize(
    ("width", "height", "small"), [(200, 100, (128, 64)), (100, 300, (64, 192)), (64, 500, (64, 500))]
)
def test_larger_images_become_smaller(tmp_path: Path, width: int, height: int, small: tuple[int, int]) -> None:
    data = one_image(tmp_path, "a.png", gradient(width, height))
    suffix, encoded = encode(data, 0, ShardSettings(size=64))
    with Image.open(io.BytesIO(encoded)) as image:
        assert image.size == small
        assert (suffix, image.format) == (("png", "PNG") if width == 64 else ("jpg", "JPEG"))
    error = np.abs(decode_image(encoded).astype(float) - np.asarray(gradient(*small), float))
    assert error.mean() < 3
    rough = encode(data, 0, ShardSettings(size=64, quality=20))[1]
    assert len(rough) < len(encoded) or width == 64


def test_what_is_kept_as_it_is(tmp_path: Path) -> None:
    """Whatever the file is called; a turned JPEG stays turned, and reads upright."""
    image = gradient(80, 90)
    turned = Image.Exif()
    turned[0x0112] = 6
    for name, kind, suffix, options in (
        ("a.jpg", "JPEG", "jpg", {"exif": turned}), ("b.jpg", "PNG", "png", {}), ("c.webp", "WEBP", "webp", {}),
    ):  # fmt: skip
        data = one_image(tmp_path / name, name, image, format=kind, **options)
        assert encode(data, 0, ShardSettings()) == (suffix, Path(data.path(0)).read_bytes())
        assert encode(data, 0, ShardSettings(size=80)) == (suffix, Path(data.path(0)).read_bytes())


def test_other_formats_and_images_in_memory_become_png(tmp_path: Path) -> None:
    for name in ("a.bmp", "b.tiff", "c.gif"):
        data = one_image(tmp_path / name, name, gradient(80, 90))
        suffix, encoded = encode(data, 0, ShardSettings())
        assert suffix == "png"
        np.testing.assert_array_equal(decode_image(encoded), data.image(0))
    digits = load_dataset("digits", "test")
    suffix, encoded = encode(digits, 5, ShardSettings())
    assert suffix == "png"
    np.testing.assert_array_equal(decode_image(encoded), digits.image(5))


def test_unreadable_images(pets: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in (3, 8):
        (pets / "ant" / f"{i:03d}.jpg").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"ant/003.jpg: not an image"):
        write_shards(f"folder:{pets}", tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()
    made = write_shards(f"folder:{pets}", tmp_path / "out", SMALL, on_error="skip")
    assert sum(each["unreadable"] for each in made["splits"].values()) == 2
    assert sum(each["images"] for each in made["splits"].values()) == 28
    assert caplog.text.count("ant/003.jpg: not an image") == 1
    copies = [load_dataset(f"shards:{tmp_path / 'out'}", split) for split in ("train", "val", "test")]
    assert Counter(np.concatenate([copy.labels for copy in copies]).tolist()) == {0: 13, 1: 10, 2: 5}
    for path in pets.rglob("*.jpg"):
        path.write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"none of the 22 images of .* can be read: cannot read"):
        write_shards(f"folder:{pets}", tmp_path / "none", SMALL, on_error="skip")
    assert not (tmp_path / "none").exists()


# ------------------------------------------------------------------------------------------ stopping, going on


@pytest.mark.parametrize("tars", [0, 1, 3, 4])
def test_an_interrupted_call_goes_on(pets: Path, tmp_path: Path, tars: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tars are not written again, and the files end up the same to the byte."""
    write_shards(f"folder:{pets}", tmp_path / "whole", SMALL)
    written: list[str] = []
    write_tar = module._write_tar

    def stop_after(count: int) -> Callable[..., Any]:
        def write(path: Path, *further: Any) -> Any:
            if len(written) == count:
                (path.parent / f".{path.name}.1.new").write_bytes(b"the beginning of a tar")  # as a kill leaves it
                raise KeyboardInterrupt
            written.append(path.name)
            return write_tar(path, *further)

        return write

    monkeypatch.setattr(module, "_write_tar", stop_after(tars))
    with pytest.raises(KeyboardInterrupt):
        write_shards(f"folder:{pets}", tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(module, "_write_tar", stop_after(99))
    write_shards(f"folder:{pets}", tmp_path / "out", SMALL)
    assert sorted(written) == sorted(set(written))
    assert len(written) == 5
    files = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("whole", "out")]
    assert files[0] == files[1]
    assert {path.name for path in tmp_path.iterdir()} == {"pets", "whole", "out"}


def test_leftovers_of_another_call_are_no_part_of_it(
    pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of other settings, nor of other images under the same name."""
    write_shards(f"folder:{pets}", tmp_path / "whole", SMALL)
    monkeypatch.setattr(module, "_write_places", lambda *_: 1 / 0)
    for settings, change in ((ShardSettings(records=10, seed=1), False), (SMALL, True)):
        before = (pets / "cat" / "000.jpg").read_bytes()
        if change:
            (pets / "cat" / "000.jpg").write_bytes((pets / "cat" / "001.jpg").read_bytes())
        with pytest.raises(ZeroDivisionError):
            write_shards(f"folder:{pets}", tmp_path / "out", settings)
        (pets / "cat" / "000.jpg").write_bytes(before)
    monkeypatch.undo()
    write_shards(f"folder:{pets}", tmp_path / "out", SMALL)
    whole, out = (members(tmp_path / name / "train-000000.tar") for name in ("whole", "out"))
    assert whole == out
    assert not check_shards(tmp_path / "out")["wrong"]


def test_a_tar_that_was_damaged_meanwhile_is_written_again(
    pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_write_places", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_shards(f"folder:{pets}", tmp_path / "out", SMALL)
    monkeypatch.undo()
    tar = tmp_path / ".out.unfinished" / "train-000001.tar"
    whole = tar.read_bytes()
    tar.write_bytes(whole[:1000] + b"x" + whole[1001:])
    write_shards(f"folder:{pets}", tmp_path / "out", SMALL)
    assert (tmp_path / "out" / tar.name).read_bytes() == whole


def test_a_finished_set_is_let_be(pets: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()  # empty: as good as new
    made = write_shards(f"folder:{pets}", tmp_path / "out", SMALL)
    before = (tmp_path / "out" / "train-000000.tar").stat().st_mtime_ns
    assert write_shards(f"folder:{pets}", tmp_path / "out", SMALL) == made
    assert (tmp_path / "out" / "train-000000.tar").stat().st_mtime_ns == before
    with pytest.raises(
        ValueError, match=r"out already holds a data set in shards, written with other settings \(size\)"
    ):
        write_shards(f"folder:{pets}", tmp_path / "out", ShardSettings(records=10, size=32))
    with pytest.raises(ValueError, match="pets is not empty; give the name of a new folder"):
        write_shards(f"folder:{pets}", pets, SMALL)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file; give the name of a new folder"):
        write_shards(f"folder:{pets}", tmp_path / "file", SMALL)


def write(source: Path, folder: Path, heard: Queue) -> None:
    try:
        write_shards(f"folder:{source}", folder, ShardSettings(records=10, seed=1))
    except ValueError as error:
        heard.put(str(error))
    else:
        heard.put("written")


def test_two_do_not_write_the_same_set(pets: Path, tmp_path: Path) -> None:
    """The second, with other settings, would throw away what the first has written."""
    context = multiprocessing.get_context("fork")
    heard: Queue = context.Queue()

    def begin_another(done: int, of: int) -> None:
        if done == 15:
            other = context.Process(target=write, args=(pets, tmp_path / "out", heard))
            other.start()
            other.join()

    write_shards(f"folder:{pets}", tmp_path / "out", SMALL, report=begin_another)
    assert re.match(r"another process is writing .*out", heard.get(timeout=10))
    assert not check_shards(tmp_path / "out")["wrong"]
    assert {path.name for path in tmp_path.iterdir()} == {"pets", "out"}


@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_another_disk(pets: Path, tmp_path: Path, there: bool) -> None:
    (tmp_path / "disk").mkdir()
    if there:
        (tmp_path / "disk" / "set").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "set")
    made = write_shards(f"folder:{pets}", tmp_path / "out", SMALL)
    assert not check_shards(tmp_path / "disk" / "set")["wrong"]
    assert write_shards(f"folder:{pets}", tmp_path / "out", SMALL) == made
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["set"]


@pytest.mark.parametrize("change", ["cut", "gone", "more", "index"])
def test_a_set_that_is_not_whole_is_not_read(pets: Path, tmp_path: Path, change: str) -> None:
    out = tmp_path / "out"
    write_shards(f"folder:{pets}", out, SMALL)
    tar = out / "train-000001.tar"
    match change:
        case "cut":
            tar.write_bytes(tar.read_bytes()[:-512])
        case "gone":
            tar.unlink()
        case "more":
            (out / "train-000003.tar").write_bytes(tar.read_bytes())
        case "index":
            (out / "train.index.npz").write_bytes(b"")
    message = "train.index.npz is missing or corrupt" if change == "index" else "index.json does not match the shards"
    with pytest.raises(ValueError, match=message):
        load_dataset(f"shards:{out}", "train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size is 0"),
        ({"quality": 101}, "quality is 101"),
        ({"records": 5, "megabytes": 1.0}, "both limit a tar; give one"),
        ({"records": 0}, "expected more than 0"),
        ({"megabytes": 0.0}, "expected more than 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_wrong_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardSettings(**options)


def test_several_labels_stay(tmp_path: Path) -> None:
    lists = [[3, 0], [1], [2, 0], [0]]
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (4, 8, 8, 3)).astype(np.uint8)
    sets = Labels.of_lists(lists)
    data = Dataset("made", "train", tuple("abcd"), sets.firsts, pixels, label_sets=sets)
    assert dict(module._label_members(data, 0)) == {"cls": b"3", "labels.json": json.dumps([3, 0]).encode()}
    source = [member for i, each in enumerate(lists) for member in pair(f"{i}", " ".join(map(str, each)), i, 8)]
    write_shard(tmp_path / "in" / "train-0.tar", source)
    write_shard(tmp_path / "in" / "val-0.tar", pair("v", 1))
    write_shard(tmp_path / "in" / "test-0.tar", pair("t", 1))
    write_shards(f"shards:{tmp_path / 'in'}", tmp_path / "out", ShardSettings(records=2))
    copy = load_dataset(f"shards:{tmp_path / 'out'}", "train")
    assert copy.label_sets is not None
    for i in range(4):
        assert copy.label_sets.of(i).tolist() == lists[copy.image(i)[0, 0, 0]]
