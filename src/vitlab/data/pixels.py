"""Sets whose files hold pixels: Fashion-MNIST (idx), CIFAR (binary), SVHN (.mat), PatchCamelyon (HDF5).

No pickle is ever loaded; CIFAR is therefore read from its binary version.
"""

import gzip
import shutil
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitlab.data.dataset import Dataset, Splits
from vitlab.data.downloads import cache_folder, digest_of
from vitlab.data.downloads import download as download_file
from vitlab.data.vtab.sources import require_download
from vitlab.errors import UserError
from vitlab.io import replacing_file

_FASHION = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel
    can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
    dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion
    lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter
    palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road
    rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower
    sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
    willow_tree wolf woman worm
"""


def _corrupt(path: Path, reason: object) -> UserError:
    return UserError(f"{path} is corrupt or truncated ({reason}): download it again")


def fashion_mnist_splits(name: str, root: Path | None, download: bool) -> Splits:
    """Fashion-MNIST: four idx files, compressed or not."""
    raw = (root or cache_folder()) / "FashionMNIST" / "raw"  # torchvision's layout
    folders = [root, raw] if root else [Path("/usr/share/datasets/fashion-mnist"), raw]

    def find(file: str) -> Path:
        for path in (folder / variant for folder in folders for variant in (file, f"{file}.gz")):
            if path.is_file():
                return path
        looked = ", ".join(map(str, folders))
        require_download(f"{name} needs {file} or {file}.gz; looked in {looked}", download)
        from torchvision.datasets import FashionMNIST  # slow to import, and seldom needed

        md5 = dict(FashionMNIST.resources)[f"{file}.gz"]
        download_file(f"{FashionMNIST.mirrors[0]}{file}.gz", raw / f"{file}.gz", f"md5:{md5}")
        return raw / f"{file}.gz"

    def read(split: str) -> Dataset:
        prefix = {"train": "train", "test": "t10k"}[split]
        paths = [find(f"{prefix}-{content}-ubyte") for content in ("images-idx3", "labels-idx1")]
        pixels, labels = map(_read_idx, paths)
        if pixels.shape != (len(labels), 28, 28) or labels.max() > 9:
            raise UserError(f"{paths[0]} is not Fashion-MNIST: images {pixels.shape}, labels {labels.shape}")
        colors = np.repeat(pixels[..., None], 3, axis=3)
        return Dataset(name, split, tuple(_FASHION.split(", ")), labels.astype(np.int64), colors)

    return ["train", "test"], read


def _read_idx(path: Path) -> np.ndarray:
    """An idx file of bytes: two zeros, type 8, number of axes; the axes' sizes, big-endian; the data."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if data[:3] != b"\0\0\x08":
            raise ValueError("not an idx file of bytes")
        shape = np.frombuffer(data, ">u4", data[3], offset=4).tolist()
        return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
    except (EOFError, OSError, ValueError, IndexError, zlib.error) as error:
        raise _corrupt(path, error) from error


class Cifar(NamedTuple):
    """The binary version of a CIFAR set: records of `label_bytes` labels, the last counts, and 3 x 32 x 32 pixels."""

    classes: tuple[str, ...]
    folder: str
    archive: str
    digest: str
    label_bytes: int
    files: Mapping[str, Sequence[str]]


CIFAR = {
    "cifar10": Cifar(
        tuple(_CIFAR10.split()),
        folder="cifar-10-batches-bin",
        archive="cifar-10-binary.tar.gz",
        digest="md5:c32a1d4ab5d03f1284b67883e8d87530",
        label_bytes=1,
        files={"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]},
    ),
    "cifar100": Cifar(
        tuple(_CIFAR100.split()),
        folder="cifar-100-binary",
        archive="cifar-100-binary.tar.gz",
        digest="md5:03b5dce01913d631647c71ecec9e9cb8",
        label_bytes=2,
        files={"train": ["train.bin"], "test": ["test.bin"]},
    ),
}


def cifar_splits(name: str, root: Path | None, download: bool) -> Splits:
    """CIFAR-10 or CIFAR-100 from its .bin files, which are unpacked from the archive if missing."""
    source, home = CIFAR[name], root or cache_folder()

    def read(split: str) -> Dataset:
        paths = [_find_cifar(name, home, download) / file for file in source.files[split]]
        try:
            files = [np.fromfile(path, np.uint8) for path in paths]
            records = np.concatenate([file.reshape(-1, source.label_bytes + 3 * 32 * 32) for file in files])
            labels = records[:, source.label_bytes - 1].astype(np.int64)
            top = labels.max()
        except ValueError as error:  # not a whole number of records, or none
            raise _corrupt(paths[0].parent, error) from error
        if top >= len(source.classes):
            raise UserError(f"{paths[0].parent} does not hold {name}: there is a label {top}")
        pixels = records[:, source.label_bytes :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return Dataset(name, split, source.classes, labels, np.ascontiguousarray(pixels))

    return ["train", "test"], read


def _find_cifar(name: str, home: Path, download: bool) -> Path:
    source = CIFAR[name]
    folders = [home, home / source.folder]
    for folder in folders:
        if all((folder / file).is_file() for files in source.files.values() for file in files):
            return folder
    archive = home / source.archive
    if not archive.is_file():
        looked = ", ".join(map(str, folders))
        need = f"{name} needs {source.archive} or its .bin files (not the pickled version); looked in {looked}"
        require_download(need, download)
        download_file(f"https://www.cs.toronto.edu/~kriz/{source.archive}", archive, source.digest)
    if (digest := digest_of(archive, source.digest)) != source.digest:
        raise UserError(f"{archive} has the checksum {digest}, not {source.digest}: remove it and download it again")
    with tarfile.open(archive) as tar:
        tar.extractall(home, filter="data")
    return home / source.folder


def read_mat(path: Path, *names: str) -> list[np.ndarray]:
    """The arrays `names` of a MATLAB file. Raises UserError."""
    import scipy.io  # slow to import
    from scipy.io.matlab import MatReadError

    # scipy has no error for a corrupt file: these are what its reader raises at one changed byte or another.
    corrupt = (ArithmeticError, EOFError, LookupError, NotImplementedError, OSError, TypeError, ValueError, zlib.error)
    try:
        content = scipy.io.loadmat(path)
        return [content[name] for name in names]
    except (*corrupt, MatReadError) as error:  # LookupError also for a missing array
        raise _corrupt(path, error) from error


def read_svhn(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [N, 32, 32, 3] and labels int64 [N] of an SVHN file, in which the digit 0 is the label 10."""
    pixels, labels = read_mat(path, "X", "y")
    if (
        pixels.dtype != np.uint8
        or pixels.shape != (32, 32, 3, len(labels))
        or not 1 <= labels.min() <= labels.max() <= 10
    ):
        raise UserError(f"{path} is not SVHN's: X {pixels.shape}, y {labels.shape}: {np.unique(labels)[:12].tolist()}")
    return np.ascontiguousarray(pixels.transpose(3, 0, 1, 2)), labels[:, 0].astype(np.int64) % 10


def read_h5(path: Path, name: str) -> np.ndarray:
    """The array `name` of an HDF5 file, or of `path`.gz, which is unpacked beside it first. Raises UserError.

    It is mapped into memory, so that a few images of many cost little: from an .npy beside the file, as the published
    files are compressed.
    """
    try:
        import h5py
    except ImportError as error:
        raise UserError(f"{path} is an HDF5 file, and h5py is not installed: pip install 'vitlab[vtab]'") from error
    plain = path.with_name(f"{path.name}.{name}.npy")
    try:
        if not path.is_file():
            with gzip.open(f"{path}.gz") as packed, replacing_file(path) as file:
                shutil.copyfileobj(packed, file)
        if not plain.is_file():
            part = plain.with_name(f"{plain.name}.part")
            with h5py.File(path) as file:
                array: Any = file[name]
                copy = np.lib.format.open_memmap(part, "w+", array.dtype, array.shape)
                for start in range(0, len(array), 1024):
                    copy[start : start + 1024] = array[start : start + 1024]
            copy.flush()
            part.replace(plain)
        return np.load(plain, "r", allow_pickle=False)
    except (OSError, EOFError, KeyError, zlib.error) as error:  # KeyError for a missing array
        raise _corrupt(path, error) from error
