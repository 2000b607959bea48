"""The table tells the truth, splits are stratified and never overlap, and every set is found or asked for by name."""

import gzip
import hashlib
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitlab.data import datasets
from vitlab.data.datasets import DATASETS, SPLITS, load_dataset, stratified_split
from vitlab.data.sources import Dataset

rng = np.random.default_rng(0)


def pixels_of(data: Dataset) -> np.ndarray:
    assert data.pixels is not None
    return data.pixels


# ------------------------------------------------------------------------------------------------- splits


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.floats(0.01, 0.4), st.integers(0, 2**64 - 1))
def test_stratified_split(labels: list[int], share: float, seed: int) -> None:
    given_labels = np.array(labels)
    parts = stratified_split(given_labels, {"val": share, "test": 0.2}, seed)
    np.testing.assert_array_equal(np.sort(np.concatenate(list(parts.values()))), np.arange(len(labels)))
    for name, wanted in (("val", share), ("test", 0.2)):
        for label in set(labels):
            size = labels.count(label)
            got = int((given_labels[parts[name]] == label).sum())
            assert got == (max(1, round(wanted * size)) if size > 2 else 0)
    again = stratified_split(given_labels, {"val": share, "test": 0.2}, seed)
    assert all(np.array_equal(parts[name], again[name]) for name in parts)


def test_digits() -> None:
    info = DATASETS["digits"]
    parts = {split: load_dataset("digits", split) for split in SPLITS}
    assert {s: len(parts[s]) for s in ("train", "val", "test")} == info.splits
    assert len(parts["trainval"]) == info.splits["train"] + info.splits["val"]
    for data in parts.values():
        assert data.classes == info.classes
        assert pixels_of(data).shape[1:] == (8, 8, 3)
        assert np.bincount(data.labels, minlength=10).min() >= len(data) / 10 * 0.9  # stratified
        np.testing.assert_array_equal(data.picture(3), pixels_of(data)[3])
        assert data.path(3) == f"digits/{data.split}[3]"
    every = np.concatenate([pixels_of(parts[s]) for s in ("train", "val", "test")]).reshape(1797, -1)
    assert len(np.unique(every, axis=0)) == 1797  # no picture in two splits
    assert every.max() == 255


def test_the_digits_test_split_is_fixed_and_val_is_seeded() -> None:
    test, val = ([load_dataset("digits", split, seed=s) for s in (0, 1)] for split in ("test", "val"))
    np.testing.assert_array_equal(test[0].pixels, test[1].pixels)
    assert not np.array_equal(pixels_of(val[0]), pixels_of(val[1]))


def test_classes_are_kept_and_relabelled_in_the_order_given() -> None:
    whole, part = load_dataset("digits", "test"), load_dataset("digits", "test", classes=(7, 2))
    assert part.classes == ("7", "2")
    np.testing.assert_array_equal(pixels_of(part)[part.labels == 0], pixels_of(whole)[whole.labels == 7])
    np.testing.assert_array_equal(pixels_of(part)[part.labels == 1], pixels_of(whole)[whole.labels == 2])
    assert len(part) == np.isin(whole.labels, (2, 7)).sum()


@pytest.mark.parametrize("classes", [(), (0, 10), (-1,), (3, 3)])
def test_wrong_classes(classes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="classes must be different numbers from 0 to 9 of digits"):
        load_dataset("digits", "test", classes=classes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar", "unknown data set 'cifar'; the nearest: cifar10, cifar100"),
        ("fashionmnist", "the nearest: fashion_mnist"),
        ("folder:", "the nearest: folder:PATH"),
        ("imagenet2012", r"unknown data set 'imagenet2012' \(there are digits, fashion_mnist"),
        ("hub:x", "unknown data set 'hub:x'"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_dataset(name, "train")


def test_a_bare_folder_is_pointed_to_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"write folder:{tmp_path}"):
        load_dataset(str(tmp_path), "train")


def test_wrong_split_and_policy() -> None:
    with pytest.raises(ValueError, match="split must be one of train, val, test, trainval, not 'validation'"):
        load_dataset("digits", "validation")
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'skip', not 'warn'"):
        load_dataset("digits", "train", on_error="warn")


# ------------------------------------------------------------------------------------------ Fashion-MNIST


def write_fashion(folder: Path, *, packed: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for split, prefix, n in (("train", "train", 200), ("test", "t10k", 20)):
        images, labels = rng.integers(0, 256, (n, 28, 28), np.uint8), np.arange(n, dtype=np.uint8) % 10
        for what, array in (("images", images), ("labels", labels)):
            head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            data = head + array.tobytes()
            path = folder / f"{prefix}-{what}-idx{array.ndim}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(data) if packed else data)
        written[split] = images, labels
    return written


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("place", [".", "FashionMNIST/raw"])
def test_fashion_mnist_from_a_folder(tmp_path: Path, place: str, packed: bool) -> None:
    written = write_fashion(tmp_path / place, packed=packed)
    sizes = {s: len(load_dataset("fashion_mnist", s, root=tmp_path, download=False)) for s in SPLITS}
    assert sizes == {"train": 180, "val": 20, "test": 20, "trainval": 200}
    test = load_dataset("fashion_mnist", "test", root=tmp_path)
    np.testing.assert_array_equal(pixels_of(test), np.repeat(written["test"][0][..., None], 3, axis=3))
    np.testing.assert_array_equal(test.labels, written["test"][1])
    assert test.classes[9] == "Ankle boot"


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d[: len(d) // 2], lambda d: b"x" + d[1:]])
def test_damaged_fashion_mnist(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    for packed in (True, False):
        write_fashion(tmp_path, packed=packed)
        path = tmp_path / f"t10k-images-idx3-ubyte{'.gz' if packed else ''}"
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte.*fetch it again"):
            load_dataset("fashion_mnist", "test", root=tmp_path)
        path.unlink()


def test_fashion_mnist_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fashion(tmp_path / "served", packed=True)
    asked = []

    def fetch(urls: list[str], folder: Path, md5: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = urls[0].rpartition("/")[2]
        (folder / name).write_bytes((tmp_path / "served" / name).read_bytes())
        asked.append((name, len(md5)))

    monkeypatch.setattr(datasets, "_download", fetch)
    for _ in range(2):
        assert len(load_dataset("fashion_mnist", "test", root=tmp_path / "root")) == 20
    assert asked == [("t10k-images-idx3-ubyte.gz", 32), ("t10k-labels-idx1-ubyte.gz", 32)]


def test_missing_fashion_mnist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"fashion_mnist needs train-images-idx3-ubyte.*allow the download"):
        load_dataset("fashion_mnist", "train", root=tmp_path, download=False)


# -------------------------------------------------------------------------------------------------- CIFAR


def write_cifar(folder: Path, name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Tiny files in CIFAR's binary form, and what they hold."""
    reader = datasets._READERS[name]
    assert isinstance(reader, datasets._Cifar)
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for split, files in reader.files.items():
        n = 200 * len(files)
        planes = rng.integers(0, 256, (n, 3, 32, 32), np.uint8)
        labels = np.arange(n) % len(DATASETS[name].classes)
        heads = [np.full(n, 99)] * (reader.label_bytes - 1) + [labels]  # CIFAR-100's first label is the coarse one
        records = np.concatenate([np.stack(heads, 1).astype(np.uint8), planes.reshape(n, -1)], axis=1)
        for file, part in zip(files, np.split(records, len(files)), strict=True):
            (folder / file).write_bytes(part.tobytes())
        written[split] = planes, labels
    return written


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_from_its_binary_files(tmp_path: Path, name: str) -> None:
    written = write_cifar(tmp_path, name)
    test = load_dataset(name, "test", root=tmp_path, download=False)
    np.testing.assert_array_equal(pixels_of(test), written["test"][0].transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(test.labels, written["test"][1])
    n = len(written["train"][0])
    held = len(load_dataset(name, "val", root=tmp_path))
    assert held == max(len(test.classes), n // 50)  # 2 %, and one of each class
    assert len(load_dataset(name, "train", root=tmp_path)) == n - held


def pack(folder: Path, archive: Path, inside: str) -> str:
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, inside)
    return hashlib.md5(archive.read_bytes()).hexdigest()


def test_cifar_archive_is_checked_and_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path / "made", "cifar10")
    root = tmp_path / "root"
    root.mkdir()
    md5 = pack(tmp_path / "made", root / "cifar-10-binary.tar.gz", "cifar-10-batches-bin")
    with pytest.raises(ValueError, match=f"has the MD5 sum {md5}, not c32a1d4a.*fetch it again"):
        load_dataset("cifar10", "test", root=root)
    reader = datasets._READERS["cifar10"]
    assert isinstance(reader, datasets._Cifar)
    monkeypatch.setitem(datasets._READERS, "cifar10", datasets.dataclasses.replace(reader, md5=md5))
    assert len(load_dataset("cifar10", "test", root=root)) == 200
    assert (root / "cifar-10-batches-bin" / "test_batch.bin").is_file()


def test_cifar_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path / "made", "cifar10")
    md5 = pack(tmp_path / "made", tmp_path / "served.tar.gz", "cifar-10-batches-bin")
    reader = datasets._READERS["cifar10"]
    assert isinstance(reader, datasets._Cifar)
    monkeypatch.setitem(datasets._READERS, "cifar10", datasets.dataclasses.replace(reader, md5=md5))

    def fetch(urls: list[str], folder: Path, md5: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / "served.tar.gz").rename(folder / urls[0].rpartition("/")[2])

    monkeypatch.setattr(datasets, "_download", fetch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):  # the second time there is nothing left to fetch
        assert len(load_dataset("cifar10", "test")) == 200
    assert (tmp_path / "cache" / "vitlab" / "cifar-10-batches-bin").is_dir()


def test_without_a_network_the_message_says_what_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"could not download \(http://127.0.0.1:9/x.gz: .*put it into"):
        datasets._download(["http://127.0.0.1:9/x.gz"], tmp_path, "0" * 32)


@pytest.mark.parametrize("there", ["cifar-10-batches-py", "cifar-10-python.tar.gz"])
def test_pickled_cifar_is_named_and_not_read(tmp_path: Path, there: str) -> None:
    (tmp_path / there).mkdir()
    with pytest.raises(ValueError, match=f"needs cifar-10-binary.tar.gz.*{there} is the pickled version.*no pickle"):
        load_dataset("cifar10", "test", root=tmp_path, download=False)


def test_damaged_cifar(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar10")
    path = tmp_path / "test_batch.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"test_batch.bin is damaged: 614599 bytes are no whole number of records"):
        load_dataset("cifar10", "test", root=tmp_path)
    path.write_bytes(b"\x0a" + whole[1:])
    with pytest.raises(ValueError, match="is not cifar10: it has the label 10"):
        load_dataset("cifar10", "test", root=tmp_path)


# -------------------------------------------------------------------------------------------------- table


def test_the_table_is_complete() -> None:
    for name, info in DATASETS.items():
        assert info.source
        assert info.licence
        assert len(set(info.classes)) == len(info.classes)
        assert bool(info.splits) == (":" not in name) == bool(info.classes) == bool(info.image_size)
    assert [len(info.classes) for info in DATASETS.values()] == [10, 10, 10, 100, 0, 0]
    assert list(DATASETS["cifar100"].classes) == sorted(DATASETS["cifar100"].classes)


def test_the_real_cifar10_shards(shared: Path) -> None:
    data = load_dataset("shards:cifar10", "test", root=shared / "data")
    assert data.classes == DATASETS["cifar10"].classes
    assert np.bincount(data.labels).tolist() == [1000] * 10
    assert pixels_of(data).shape == (10_000, 32, 32, 3)
    assert data.path(0).endswith("test-00.tar/00000.png")
