"""Files of pixels: idx, CIFAR's binary version, SVHN's .mat, HDF5; complete, compressed, corrupt, missing."""

import gzip
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.io
from image_files import pixels_of

from vitlab.data import pixels
from vitlab.data.registry import SPLITS, load_dataset
from vitlab.data.vtab import sources
from vitlab.data.vtab.tasks import READ_ERRORS

rng = np.random.default_rng(0)


# ------------------------------------------------------------------------------------------ Fashion-MNIST


def write_fashion(folder: Path, *, packed: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for split, prefix, n in (("train", "train", 200), ("test", "t10k", 20)):
        written[split] = rng.integers(0, 256, (n, 28, 28), np.uint8), np.arange(n, dtype=np.uint8) % 10
        for content, array in zip(("images", "labels"), written[split], strict=True):
            sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
            data = bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()
            path = folder / f"{prefix}-{content}-idx{array.ndim}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(data) if packed else data)
    return written


@pytest.mark.parametrize(("folder", "packed"), [(".", True), ("FashionMNIST/raw", False)])
def test_fashion_mnist_from_a_folder(tmp_path: Path, folder: str, packed: bool) -> None:
    written = write_fashion(tmp_path / folder, packed=packed)
    sizes = {split: len(load_dataset("fashion_mnist", split, root=tmp_path, download=False)) for split in SPLITS}
    assert sizes == {"train": 180, "val": 20, "test": 20, "trainval": 200, "all": 220}
    test = load_dataset("fashion_mnist", "test", root=tmp_path)
    np.testing.assert_array_equal(pixels_of(test), np.repeat(written["test"][0][..., None], 3, axis=3))
    np.testing.assert_array_equal(test.labels, written["test"][1])
    assert test.classes[9] == "Ankle boot"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: b"x" + d[1:], lambda d: b""])
def test_corrupt_fashion_mnist(tmp_path: Path, damage: Callable[[bytes], bytes], packed: bool) -> None:
    write_fashion(tmp_path, packed=packed)
    path = tmp_path / f"t10k-images-idx3-ubyte{'.gz' if packed else ''}"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"does not hold fashion_mnist's test split"):
        load_dataset("fashion_mnist", "test", root=tmp_path)


# -------------------------------------------------------------------------------------------------- CIFAR


def write_cifar(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tiny files in CIFAR's binary form, and the content of the test file."""
    folder.mkdir(parents=True, exist_ok=True)
    classes, n = len(pixels.CLASSES[name]), 200
    planes = labels = np.empty(0)
    for file in sources.SOURCES[name].required["all"]:  # the test file is the last
        planes, labels = rng.integers(0, 256, (n, 3, 32, 32), np.uint8), np.arange(n) % classes
        heads = [labels] if name == "cifar10" else [np.full(n, 99), labels]  # CIFAR-100's first label is the coarse one
        np.concatenate([np.stack(heads, 1).astype(np.uint8), planes.reshape(n, -1)], axis=1).tofile(folder / file)
    return planes, labels


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_from_its_binary_files(tmp_path: Path, name: str) -> None:
    planes, labels = write_cifar(tmp_path, name)
    test = load_dataset(name, "test", root=tmp_path, download=False)
    np.testing.assert_array_equal(pixels_of(test), planes.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(test.labels, labels)
    n = {"cifar10": 1000, "cifar100": 200}[name]
    val = len(load_dataset(name, "val", root=tmp_path))
    assert val == max(len(test.classes), n // 50)  # 2 %, and one of each class
    assert len(load_dataset(name, "train", root=tmp_path)) == n - val


def test_cifar_is_downloaded_once_and_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path / "made", "cifar10")
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "made", "cifar-10-batches-bin")
    served: list[str] = []

    def copy(url: str, target: Path, digest: str) -> None:
        target.parent.mkdir(parents=True)
        target.write_bytes((tmp_path / target.name).read_bytes())
        served.append(target.name)

    monkeypatch.setattr(sources, "download_file", copy)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"cifar10 needs data_batch_1.bin .*allow the download"):
        load_dataset("cifar10", "test", download=False)
    for _ in range(2):  # the second time nothing is missing
        assert len(load_dataset("cifar10", "test")) == 200
    assert served == ["cifar-10-binary.tar.gz"]
    assert (tmp_path / "cache/vitlab/cifar10/cifar-10-batches-bin/test_batch.bin").is_file()


@pytest.mark.parametrize(
    ("damage", "message"),
    [(lambda d: d[:-1], "614599"), (lambda d: b"", "zero-size"), (lambda d: b"\x0a" + d[1:], "a label 10")],
)
def test_corrupt_cifar(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    write_cifar(tmp_path, "cifar10")
    path = tmp_path / "test_batch.bin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"does not hold cifar10's test split \(.*{message}"):
        load_dataset("cifar10", "test", root=tmp_path)


# --------------------------------------------------------------------------------------------- .mat, HDF5


def test_svhn_matrices(tmp_path: Path) -> None:
    images, labels = rng.integers(0, 256, (32, 32, 3, 12), np.uint8), np.arange(1, 13) % 10 + 1
    scipy.io.savemat(tmp_path / "a.mat", {"X": images, "y": labels[:, None].astype(np.uint8)})
    pixels_read, labels_read = pixels.read_svhn(tmp_path / "a.mat")
    np.testing.assert_array_equal(pixels_read, np.moveaxis(images, 3, 0))
    assert labels_read.tolist() == (labels % 10).tolist()  # the digit 0 is stored as 10
    whole = (tmp_path / "a.mat").read_bytes()
    for count in (0, 50, 200, 3000):
        (tmp_path / "a.mat").write_bytes(whole[:count])
        with pytest.raises(READ_ERRORS):
            pixels.read_svhn(tmp_path / "a.mat")


@pytest.mark.parametrize(("chunks", "packed"), [(None, False), ((16, 4, 4, 3), True)])
def test_hdf5_is_mapped(tmp_path: Path, chunks: tuple[int, ...] | None, packed: bool) -> None:
    content, path = rng.integers(0, 256, (1500, 4, 4, 3), np.uint8), tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=content, chunks=chunks, compression="gzip" if chunks else None)
    if packed:
        (tmp_path / "a.h5.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    for _ in range(2):  # the second time nothing has to be unpacked
        array = pixels.read_h5(path, "x")
        assert isinstance(array, np.memmap)
        np.testing.assert_array_equal(array, content)
    assert not list(tmp_path.glob("*.part"))


def test_corrupt_hdf5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["y"] = np.zeros(5000, np.uint8)
    whole = path.read_bytes()
    for data, name in ((whole, "x"), (b"", "y"), (whole[:100], "y"), (b"x" * 5000, "y")):
        path.write_bytes(data)
        with pytest.raises(READ_ERRORS):
            pixels.read_h5(path, name)
    path.unlink()
    (tmp_path / "a.h5.gz").write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(READ_ERRORS):
        pixels.read_h5(path, "y")
    assert not path.exists()
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ValueError, match=r"h5py is not installed: pip install 'vitlab\[vtab\]'"):
        pixels.read_h5(path, "x")
