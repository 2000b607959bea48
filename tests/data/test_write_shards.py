"""Every image is written once, as it was, in balance; an interrupted write is never taken for complete."""

import hashlib
import io
import json
import multiprocessing
import re
import shutil
import tarfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from shard_files import pair, write_folders, write_shard

from vitlab.data import write_shards as module
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError, decode_image
from vitlab.data.registry import load_dataset
from vitlab.data.write_shards import ShardSettings, assign_to_shards, encode, write_shards
from vitlab.errors import UserError

SMALL = ShardSettings(records=10)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`pets`, 30 JPEGs of three classes, imbalanced, of 70 to 72 pixels; and in shards, `out`."""
    folder = tmp_path_factory.mktemp("written")
    write_folders(folder / "pets", {"ant": 15, "bee": 10, "cat": 5})
    write_shards(f"folder:{folder / 'pets'}", folder / "out", SMALL)
    return folder


@pytest.fixture
def pets(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written / "pets", tmp_path / "pets")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_bits_that_are_lost_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where images are resized; else all bytes are copied."""
    for name in ("a", "b"):
        for split in ("train", "val", "test"):
            (tmp_path / "set" / split / name).mkdir(parents=True)
            Image.fromarray(np.full((80, 80), 1, np.uint16)).save(tmp_path / "set" / split / name / "1.png")
    for size in (None, 32):
        write_shards(f"folder:{tmp_path / 'set'}", tmp_path / str(size), ShardSettings(size=size))
        assert ("16-bit images have 8 bits" in caplog.text) == (size == 32)


def test_a_copy_equals_its_source(pets: Path, tmp_path: Path) -> None:
    reports = []
    result = write_shards(f"folder:{pets}", tmp_path / "out", SMALL, report=lambda *report: reports.append(report))
    sizes = {split: (part["images"], part["shards"]) for split, part in result["splits"].items()}
    assert sizes == {"train": (22, 3), "val": (4, 1), "test": (4, 1)}
    assert (reports[-1], sorted(reports)) == ((30, 30), reports)
    files = contents(tmp_path / "out")
    lines = files.pop("SHA256SUMS").decode().splitlines()
    del files["index.json"]
    assert sorted(lines) == sorted(f"{hashlib.sha256(data).hexdigest()}  {name}" for name, data in files.items())
    listed = {split: load_dataset(f"shards:{tmp_path / 'out'}", split) for split in sizes}
    (tmp_path / "out" / "index.json").unlink()
    for split, copy in listed.items():
        source, scanned = load_dataset(f"folder:{pets}", split), load_dataset(f"shards:{tmp_path / 'out'}", split)
        assert copy.classes == source.classes == ("ant", "bee", "cat")
        keys = [int(Path(copy.path(i)).stem) for i in range(len(copy))]
        assert sorted(keys) == list(range(len(source)))
        for i, key in enumerate(keys):
            assert copy.labels[i] == source.labels[key] == scanned.labels[i]
            assert copy.path(i) == scanned.path(i)
            assert copy.entries[i].data() == Path(source.path(key)).read_bytes()


def test_a_val_that_is_also_the_test_is_written_once(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_folders(tmp_path / "pets" / split, {"ant": 4, "bee": 4})
    result = write_shards(f"folder:{tmp_path / 'pets'}", tmp_path / "out", SMALL)
    assert {split: part["images"] for split, part in result["splits"].items()} == {"train": 8, "val": 8}
    sizes = {split: len(load_dataset(f"shards:{tmp_path / 'out'}", split)) for split in ("trainval", "test", "all")}
    assert sizes == {"trainval": 8, "test": 8, "all": 16}


def test_the_package_webdataset_reads_it(tmp_path: Path) -> None:
    """Several labels too."""
    wds = pytest.importorskip("webdataset", reason="needs the package webdataset, to compare with")
    lists = {10: [3, 0], 20: [1], 30: [2, 0]}
    source = [m for gray, labels in lists.items() for m in pair(f"{gray}", " ".join(map(str, labels)), gray, 70)]
    write_shard(tmp_path / "in" / "train-0.tar", source)
    write_shard(tmp_path / "in" / "test-0.tar", pair("t", 1, 40, 70))
    write_shards(f"shards:{tmp_path / 'in'}", tmp_path / "out", ShardSettings(), splits=("train", "test"))
    data = load_dataset(f"shards:{tmp_path / 'out'}", "train")
    assert data.label_sets is not None
    assert {int(data.image(i)[0, 0, 0]): data.label_sets.of_image(i).tolist() for i in range(len(data))} == lists
    tars = sorted(str(path) for path in (tmp_path / "out").glob("train-*.tar"))
    rows = list(wds.WebDataset(tars, shardshuffle=False).decode("rgb8"))
    assert {int(row["png"][0, 0, 0]): row["labels.json"] for row in rows} == lists
    assert all(row["cls"] == row["labels.json"][0] for row in rows)
    (row,) = wds.WebDataset(str(tmp_path / "out" / "test-000000.tar"), shardshuffle=False).decode("rgb8")
    assert (row["cls"], row["labels.json"]) == (1, [1])


def test_the_bytes_are_the_same_each_time(written: Path, tmp_path: Path) -> None:
    for name, settings in (("b", SMALL), ("c", ShardSettings(records=10, seed=1))):
        write_shards(f"folder:{written / 'pets'}", tmp_path / name, settings)
    assert contents(written / "out") == contents(tmp_path / "b")
    assert contents(written / "out")["train-000000.tar"] != contents(tmp_path / "c")["train-000000.tar"]
    with tarfile.open(written / "out" / "train-000000.tar") as tar:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.mode) for m in tar} == {(0, 0, 0, "", 0o644)}
        names = tar.getnames()
    assert names[::2] == [f"{name.partition('.')[0]}.cls" for name in names[1::2]]  # an image's members in sequence


@given(st.integers(1, 300), st.integers(1, 9), st.integers(0, 2**64 - 1))
def test_shards_are_balanced_and_shuffled(n: int, shards: int, seed: int) -> None:
    labels = np.random.default_rng(seed).integers(0, 1 + n % 6, n)
    parts = assign_to_shards(labels, shards, seed)
    assert len(parts) == shards
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    assert np.ptp([len(part) for part in parts]) <= 1
    assert np.ptp([np.bincount(labels[part], minlength=6) for part in parts], axis=0).max() <= 1
    (whole,) = assign_to_shards(np.repeat([0, 1], 500), 1, seed)
    assert 200 < (whole[:500] < 500).sum() < 300


def one_image(tmp_path: Path, name: str, image: Image.Image, **options: Any) -> Dataset:
    path = tmp_path / name / "train" / "a" / name
    path.parent.mkdir(parents=True)
    image.save(path, **options)
    return load_dataset(f"folder:{tmp_path / name}", "train")


def gradient(width: int, height: int) -> Image.Image:
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, (x + y) / 2], axis=2).astype(np.uint8))


@pytest.mark.parametrize(
    ("width", "height", "small"), [(200, 100, (128, 64)), (100, 300, (64, 192)), (64, 500, (64, 500))]
)
def test_larger_images_are_resized(tmp_path: Path, width: int, height: int, small: tuple[int, int]) -> None:
    data = one_image(tmp_path, "a.png", gradient(width, height))
    suffix, encoded = encode(data, 0, ShardSettings(size=64))
    with Image.open(io.BytesIO(encoded)) as image:
        assert (image.size, suffix, image.format) == ((small, "png", "PNG") if width == 64 else (small, "jpg", "JPEG"))
    error = np.abs(decode_image(encoded).astype(float) - np.asarray(gradient(*small), float))
    assert error.mean() < 3
    assert width == 64 or len(encode(data, 0, ShardSettings(size=64, quality=20))[1]) < len(encoded)


@pytest.mark.parametrize(
    ("name", "kind", "suffix"),
    [("rotated.jpg", "JPEG", "jpg"), ("b.jpg", "PNG", "png"), ("c.webp", "WEBP", "webp"), ("d.bmp", "BMP", "")],
)
def test_formats(tmp_path: Path, name: str, kind: str, suffix: str) -> None:
    """JPEG, PNG and WebP stay, whatever the file is called; others become PNG."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = one_image(tmp_path, name, gradient(80, 90), format=kind, **({"exif": exif} if "rotated" in name else {}))
    for settings in (ShardSettings(), ShardSettings(size=80)):
        stored = encode(data, 0, settings)
        if suffix:
            assert stored == (suffix, Path(data.path(0)).read_bytes())
        else:
            assert stored[0] == "png"
            np.testing.assert_array_equal(decode_image(stored[1]), data.image(0))


def test_unreadable_images(pets: Path, tmp_path: Path) -> None:
    for i in (3, 8):
        (pets / "ant" / f"{i:03d}.jpg").write_bytes(b"not an image")
    with pytest.raises(ImageError, match=r"ant/003.jpg"):
        write_shards(f"folder:{pets}", tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()
    result = write_shards(f"folder:{pets}", tmp_path / "out", SMALL, on_error="skip")
    assert sum(part["unreadable"] for part in result["splits"].values()) == 2
    assert np.bincount(load_dataset(f"shards:{tmp_path / 'out'}", "all").labels).tolist() == [13, 10, 5]
    for path in pets.rglob("*.jpg"):
        path.write_bytes(b"not an image")
    with pytest.raises(UserError, match="no images"):
        write_shards(f"folder:{pets}", tmp_path / "none", SMALL, on_error="skip")
    assert not (tmp_path / "none").exists()


class Tars:
    """Counts the tars that are written, and interrupts after `limit` of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int = 99) -> None:
        self.limit, self.written, self.write = limit, list[str](), module._write_tar
        monkeypatch.setattr(module, "_write_tar", self)

    def __call__(self, path: Path, *further: Any) -> None:
        if len(self.written) == self.limit:
            (path.parent / f".{path.name}.1.new").write_bytes(b"the beginning of a tar")  # as a kill leaves it
            raise KeyboardInterrupt
        self.written.append(path.name)
        self.write(path, *further)


@pytest.mark.parametrize("count", [4, 5])
def test_an_interrupted_call_is_resumed(
    written: Path, tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complete tars are not written again, and the files end up the same to the byte. After the fifth and last tar it
    is the writing of the index that is interrupted."""
    pets, tars = written / "pets", Tars(monkeypatch, count)
    with monkeypatch.context() as patch:
        if count == 5:
            patch.setattr(module, "write_locations", tars)
        with pytest.raises(KeyboardInterrupt):
            write_shards(f"folder:{pets}", tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()
    tars.limit = 99
    write_shards(f"folder:{pets}", tmp_path / "out", SMALL)
    assert len(tars.written) == len(set(tars.written)) == 5
    assert contents(tmp_path / "out") == contents(written / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("change", ["settings", "images"])
def test_the_tars_of_another_call_are_not_reused(
    pets: Path, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(f"folder:{pets}", tmp_path / "expected", SMALL)
    image = pets / "cat" / "000.jpg"
    before = image.read_bytes()
    if change == "images":
        image.write_bytes((pets / "cat" / "001.jpg").read_bytes())
    tars = Tars(monkeypatch, 4)
    with pytest.raises(KeyboardInterrupt):
        write_shards(f"folder:{pets}", tmp_path / "out", ShardSettings(records=10, seed=int(change == "settings")))
    tars.limit = 99
    image.write_bytes(before)
    write_shards(f"folder:{pets}", tmp_path / "out", SMALL)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_a_finished_data_set_is_not_written_again(pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may be empty, or a link to another disk."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "set")
    (tmp_path / "empty").mkdir()
    for name in ("out", "empty"):
        result = write_shards(f"folder:{pets}", tmp_path / name, SMALL)
        with monkeypatch.context() as patch:
            Tars(patch, 0)
            assert write_shards(f"folder:{pets}", tmp_path / name, SMALL) == result
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["set"]
    (tmp_path / "file").write_text("")
    resized = ShardSettings(records=10, size=32)
    for other, settings, problem in (
        (tmp_path / "out", resized, r"other settings \(size\)"),
        (pets, SMALL, "not empty"),
        (tmp_path / "file", SMALL, "a file"),
    ):
        with pytest.raises(UserError, match=problem):
            write_shards(f"folder:{pets}", other, settings)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_call_that_was_overtaken(pets: Path, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finishes the data set while this one reads the source."""
    lock = module.lock_file

    def finish_first(path: Path) -> Any:
        monkeypatch.setattr(module, "lock_file", lock)
        expected.append(write_shards(f"folder:{pets}", tmp_path / "out", ShardSettings(records=10, seed=seed)))
        return lock(path)

    expected, tars = list[dict[str, Any]](), Tars(monkeypatch)
    monkeypatch.setattr(module, "lock_file", finish_first)
    if seed:
        with pytest.raises(UserError, match="seed"):
            write_shards(f"folder:{pets}", tmp_path / "out", SMALL)
    else:
        assert [write_shards(f"folder:{pets}", tmp_path / "out", SMALL)] == expected
        assert {path.name for path in tmp_path.iterdir()} == {"pets", "out"}
    assert len(tars.written) == 5


def test_two_processes_do_not_write_the_same_folder(
    pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second, with other settings, would delete the tars that the first has written, while it writes the index."""
    context = multiprocessing.get_context("fork")
    messages: list[str] = []

    def write_other(pipe: Connection) -> None:
        try:
            write_shards(f"folder:{pets}", tmp_path / "out", ShardSettings(records=10, seed=1))
        except UserError as error:
            pipe.send(str(error))

    def scan_beside_another(tars: Any) -> Any:
        if not messages:
            receiver, sender = context.Pipe(duplex=False)
            other = context.Process(target=write_other, args=(sender,))
            other.start()
            messages.append(receiver.recv() if receiver.poll(60) else "written")
            other.join()
        return scan(tars)

    scan = module.scan
    monkeypatch.setattr(module, "scan", scan_beside_another)
    write_shards(f"folder:{pets}", tmp_path / "out", SMALL)
    assert re.match(r"another process is writing .*out", messages[0])
    assert len(load_dataset(f"shards:{tmp_path / 'out'}", "all")) == 30
    assert {path.name for path in tmp_path.iterdir()} == {"pets", "out"}


def edit_index(change: Any) -> Any:
    return lambda path: path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train-000001.tar", lambda path: path.write_bytes(path.read_bytes()[:-512]), r"\(train-000001.tar\)"),
        ("train-000001.tar", Path.unlink, r"\(train-000001.tar\)"),
        ("train-000003.tar", Path.touch, r"\(train-000003.tar\)"),
        ("train.index.npz", lambda path: path.write_bytes(b""), r"\(train.index.npz\)"),
        ("index.json", lambda path: path.write_text("<html>"), "not an index of shards"),
        ("index.json", edit_index(lambda index: index | {"format": "else"}), "'else', not 'vitlab-shards-1'"),
        ("index.json", edit_index(lambda index: {"format": index["format"]}), "KeyError"),
        *(("classes.json", lambda path, text=text: path.write_text(text), "classes") for text in ("{", "[1, 2]", "[]")),
    ],
)
def test_files_that_do_not_match_the_index(written: Path, tmp_path: Path, name: str, change: Any, message: str) -> None:
    shutil.copytree(written / "out", tmp_path / "out")
    change(tmp_path / "out" / name)
    with pytest.raises(UserError, match=message):
        load_dataset(f"shards:{tmp_path / 'out'}", "train")


def test_invalid_settings() -> None:
    for name, value in {"size": 0, "quality": 101, "records": 0, "seed": -1}.items():
        with pytest.raises(UserError, match=f"{name} is"):
            ShardSettings(**{name: value})
