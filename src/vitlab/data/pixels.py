"""Sets whose files hold pixels: Fashion-MNIST (idx), CIFAR (binary), SVHN (.mat), PatchCamelyon (HDF5).

No pickle is ever loaded; CIFAR is therefore read from its binary version.
"""

import dataclasses
import gzip
import shutil
import zlib
from pathlib import Path

import numpy as np

from vitlab.data.dataset import Dataset, SplitReader
from vitlab.data.downloads import cache_folder
from vitlab.data.vtab.sources import SOURCES, locate
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
CLASSES = {
    "fashion_mnist": tuple(_FASHION.split(", ")),
    "cifar10": tuple(_CIFAR10.split()),
    "cifar100": tuple(_CIFAR100.split()),
}


def published_splits(name: str, root: Path | None, download: bool) -> SplitReader:
    """A set of VTAB's sources as a data set, by its reader in `vtab/readers.py`."""
    from vitlab.data.vtab.tasks import read_published

    home = root or cache_folder()
    published = {split.removesuffix("idation"): split for split in SOURCES[name].sizes}

    def read(split: str) -> Dataset:
        dataset = read_published(name, home, published[split], download).dataset
        return dataclasses.replace(dataset, split=split, folder=str(home))

    return list(published), read


def array_splits(name: str, root: Path | None, download: bool) -> SplitReader:
    """Fashion-MNIST or CIFAR."""
    reader = read_fashion_mnist if name == "fashion_mnist" else read_cifar

    def read(split: str) -> Dataset:
        folder = locate(name, split, root or cache_folder(), download)
        try:
            return reader(name, folder, split)
        except (EOFError, OSError, ValueError, IndexError, zlib.error) as error:
            raise UserError(f"{folder} does not hold {name}'s {split} split ({error}): download it again") from error

    return ["train", "test"], read


def read_fashion_mnist(name: str, folder: Path, split: str) -> Dataset:
    """Two idx files, compressed or not."""
    prefix = {"train": "train", "test": "t10k"}[split]
    pixels, labels = (_read_idx(folder / f"{prefix}-{part}-ubyte") for part in ("images-idx3", "labels-idx1"))
    if pixels.shape != (len(labels), 28, 28):
        raise ValueError(f"images {pixels.shape}, labels {labels.shape}")
    return Dataset(name, split, CLASSES[name], labels.astype(np.int64), np.repeat(pixels[..., None], 3, axis=3))


def _read_idx(path: Path) -> np.ndarray:
    """An idx file of bytes: two zeros, type 8, number of axes; the axes' sizes, big-endian; the data."""
    data = path.read_bytes() if path.is_file() else gzip.decompress(Path(f"{path}.gz").read_bytes())
    if data[:3] != b"\0\0\x08":
        raise ValueError(f"{path.name} is not an idx file of bytes")
    shape = np.frombuffer(data, ">u4", data[3], offset=4).tolist()
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def read_cifar(name: str, folder: Path, split: str) -> Dataset:
    """The binary version: records of one label (CIFAR-100: two, the second counts) and 3 x 32 x 32 pixels."""
    label_bytes = 2 if name == "cifar100" else 1
    files = [file for file in SOURCES[name].required["all"] if file.startswith("test") == (split == "test")]
    records = np.concatenate([np.fromfile(folder / file, np.uint8) for file in files])
    records = records.reshape(-1, label_bytes + 3 * 32 * 32)
    labels = records[:, label_bytes - 1].astype(np.int64)
    if labels.max() >= len(CLASSES[name]):
        raise ValueError(f"there is a label {labels.max()}")
    pixels = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Dataset(name, split, CLASSES[name], labels, np.ascontiguousarray(pixels))


def read_mat(path: Path, *names: str) -> list[np.ndarray]:
    """The arrays `names` of a MATLAB file. A corrupt file raises one of many errors."""
    import scipy.io  # slow to import
    from scipy.io.matlab import MatReadError

    try:
        content = scipy.io.loadmat(path)
    except MatReadError as error:
        raise ValueError(f"{path.name}: {error}") from error
    return [content[name] for name in names]


def read_svhn(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [N, 32, 32, 3] and labels int64 [N] of an SVHN file, in which the digit 0 is the label 10."""
    pixels, labels = read_mat(path, "X", "y")
    return np.ascontiguousarray(pixels.transpose(3, 0, 1, 2)), labels[:, 0].astype(np.int64) % 10


def read_h5(path: Path, name: str) -> np.ndarray:
    """The array `name` of an HDF5 file, or of `path`.gz, which is unpacked beside it first.

    It is mapped into memory, so that a few images of many cost little: from an .npy beside the file, as the published
    files are compressed. A corrupt file raises one of many errors.
    """
    try:
        import h5py
    except ImportError as error:
        raise UserError(f"{path} is an HDF5 file, and h5py is not installed: pip install 'vitlab[vtab]'") from error
    plain = path.with_name(f"{path.name}.{name}.npy")
    if not path.is_file():
        with gzip.open(f"{path}.gz") as packed, replacing_file(path) as file:
            shutil.copyfileobj(packed, file)
    if not plain.is_file():
        part = plain.with_name(f"{plain.name}.part")
        with h5py.File(path) as file:
            array = file[name]
            assert isinstance(array, h5py.Dataset)
            copy = np.lib.format.open_memmap(part, "w+", array.dtype, array.shape)
            for start in range(0, len(array), 1024):
                copy[start : start + 1024] = array[start : start + 1024]
        copy.flush()
        part.replace(plain)
    return np.load(plain, "r", allow_pickle=False)
