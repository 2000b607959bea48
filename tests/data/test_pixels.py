"""Files of pixels: idx, CIFAR's binary version, SVHN's .mat, HDF5; complete, compressed, corrupt, missing."""

import gzip
import hashlib
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

rng = np.random.default_rng(0)


def serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes downloads copy from `folder`; returns the names and digests of the files, filled when they are read."""
    served: list[str] = []

    def copy(url: str, target: Path, digest: str) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((folder / url.rpartition("/")[2]).read_bytes())
        served.append(f"{target.name} {digest}")

    monkeypatch.setattr(pixels, "download_file", copy)
    return served


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


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: d[: len(d) // 2], lambda d: b"x" + d[1:], lambda d: b""]
)
def test_corrupt_fashion_mnist(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    for packed in (True, False):
        write_fashion(tmp_path, packed=packed)
        path = tmp_path / f"t10k-images-idx3-ubyte{'.gz' if packed else ''}"
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte.*corrupt"):
            load_dataset("fashion_mnist", "test", root=tmp_path)
        path.unlink()


def test_fashion_mnist_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fashion(tmp_path / "served", packed=True)
    served = serve(tmp_path / "served", monkeypatch)
    with pytest.raises(ValueError, match=r"fashion_mnist needs train-images-idx3-ubyte.*allow the download"):
        load_dataset("fashion_mnist", "train", root=tmp_path / "root", download=False)
    for _ in range(2):
        assert len(load_dataset("fashion_mnist", "test", root=tmp_path / "root")) == 20
    assert [text.partition(" md5:")[0] for text in served] == ["t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]


# -------------------------------------------------------------------------------------------------- CIFAR


def write_cifar(folder: Path, name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Tiny files in CIFAR's binary form, and their content."""
    source = pixels.CIFAR[name]
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for split, files in source.files.items():
        n = 200 * len(files)
        planes = rng.integers(0, 256, (n, 3, 32, 32), np.uint8)
        labels = np.arange(n) % len(source.classes)
        heads = [np.full(n, 99)] * (source.label_bytes - 1) + [labels]  # CIFAR-100's first label is the coarse one
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
    val = len(load_dataset(name, "val", root=tmp_path))
    assert val == max(len(test.classes), n // 50)  # 2 %, and one of each class
    assert len(load_dataset(name, "train", root=tmp_path)) == n - val


def test_cifar_archive_is_downloaded_checked_and_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path / "made", "cifar10")
    root, archive = tmp_path / "cache" / "vitlab", tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "made", "cifar-10-batches-bin")
    digest = f"md5:{hashlib.md5(archive.read_bytes()).hexdigest()}"
    served = serve(tmp_path, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"needs cifar-10-binary.tar.gz .*not the pickled"):
        load_dataset("cifar10", "test", download=False)
    with pytest.raises(ValueError, match=f"has the checksum {digest}, not md5:c32a1d4a"):
        load_dataset("cifar10", "test")
    (root / archive.name).unlink()
    monkeypatch.setitem(pixels.CIFAR, "cifar10", pixels.CIFAR["cifar10"]._replace(digest=digest))
    for _ in range(2):  # the second time nothing is missing
        assert len(load_dataset("cifar10", "test")) == 200
    assert served[1:] == [f"{archive.name} {digest}"]
    assert (root / "cifar-10-batches-bin" / "test_batch.bin").is_file()


def test_corrupt_cifar(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar10")
    path = tmp_path / "test_batch.bin"
    whole = path.read_bytes()
    for data, message in (
        (whole[:-1], "corrupt .*614599"),
        (b"", "corrupt"),
        (b"\x0a" + whole[1:], "not hold cifar10: there is a label 10"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            load_dataset("cifar10", "test", root=tmp_path)


# --------------------------------------------------------------------------------------------- .mat, HDF5


def test_svhn_matrices(tmp_path: Path) -> None:
    images, labels = rng.integers(0, 256, (32, 32, 3, 12), np.uint8), np.arange(1, 13) % 10 + 1
    scipy.io.savemat(tmp_path / "a.mat", {"X": images, "y": labels[:, None].astype(np.uint8)})
    pixels_read, labels_read = pixels.read_svhn(tmp_path / "a.mat")
    np.testing.assert_array_equal(pixels_read, np.moveaxis(images, 3, 0))
    assert labels_read.tolist() == (labels % 10).tolist()  # the digit 0 is stored as 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, "corrupt .*'y'"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[0], [1]])}, r"is not SVHN's.*: \[0, 1\]"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[11], [1]])}, r"is not SVHN's.*: \[1, 11\]"),
        ({"X": np.zeros((28, 28, 3, 2), np.uint8), "y": np.array([[1], [1]])}, r"is not SVHN's: X \(28, 28, 3, 2\)"),
        ({"X": np.zeros((32, 32, 3, 2)), "y": np.array([[1], [1]])}, "is not SVHN's"),
    ],
)
def test_other_matrices(tmp_path: Path, content: dict[str, np.ndarray], message: str) -> None:
    scipy.io.savemat(tmp_path / "a.mat", content)
    with pytest.raises(ValueError, match=message):
        pixels.read_svhn(tmp_path / "a.mat")


@pytest.mark.parametrize(("part", "compressed"), [(0, False), (50, True), (200, False), (3000, True)])
def test_truncated_matrices(tmp_path: Path, part: int, compressed: bool) -> None:
    content = {"X": rng.integers(0, 256, (32, 32, 3, 2), np.uint8), "y": np.array([[1], [1]], np.uint8)}
    scipy.io.savemat(tmp_path / "a.mat", content, do_compression=compressed)
    (tmp_path / "a.mat").write_bytes((tmp_path / "a.mat").read_bytes()[:part])
    with pytest.raises(ValueError, match=r"a\.mat is corrupt"):
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
        with pytest.raises(ValueError, match=r"a\.h5 is corrupt"):
            pixels.read_h5(path, name)
    path.unlink()
    (tmp_path / "a.h5.gz").write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(ValueError, match=r"a\.h5 is corrupt"):
        pixels.read_h5(path, "y")
    assert not path.exists()
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ValueError, match=r"h5py is not installed: pip install 'vitlab\[vtab\]'"):
        pixels.read_h5(path, "x")
