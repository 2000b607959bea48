"""Sets whose files hold pixels: Fashion-MNIST (idx), CIFAR (binary), SVHN (.mat), PatchCamelyon (HDF5).

No pickle is ever loaded; CIFAR is therefore read from its binary version.
"""

import dataclasses
import gzip
import math
import shutil
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vitlab.data.dataset import Dataset, Splits
from vitlab.data.downloads import cache_folder, digest_of
from vitlab.data.downloads import download as download_file
from vitlab.data.vtab.sources import require_download
from vitlab.errors import UserError
from vitlab.io import replacing_file

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
_FASHION = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"

CLASSES: dict[str, tuple[str, ...]] = {
    "fashion_mnist": tuple(_FASHION.split(", ")),
    "cifar10": tuple(_CIFAR10.split()),
    "cifar100": tuple(_CIFAR100.split()),
}
"""The names of the classes, in the order of the labels."""


def fashion_mnist(root: Path | None, download: bool) -> Splits:
    files = {"train": "train-{}-ubyte", "test": "t10k-{}-ubyte"}
    """Reader of Fashion-MNIST: four idx files, packed or not."""
    home = root or cache_folder()
    raw = home / "FashionMNIST" / "raw"  # torchvision's layout
    folders = [home, raw] if root else [Path("/usr/share/datasets/fashion-mnist"), raw]

    def find(part: str) -> Path:
        files = (file for folder in folders for file in (folder / part, folder / f"{part}.gz"))
        if path := next((file for file in files if file.is_file()), None):
            return path
        looked = ", ".join(map(str, folders))
        require_download(f"fashion_mnist needs {part} or {part}.gz; looked in {looked}", download)
        from torchvision.datasets import FashionMNIST  # slow to import, and seldom needed

        md5 = dict(FashionMNIST.resources)[f"{part}.gz"]
        download_file(f"{FashionMNIST.mirrors[0]}{part}.gz", raw / f"{part}.gz", f"md5:{md5}")
        return raw / f"{part}.gz"

    def read(split: str) -> Dataset:
        paths = [find(files[split].format(content)) for content in ("images-idx3", "labels-idx1")]
        pixels, labels = map(_read_idx, paths)
        if pixels.shape != (len(labels), 28, 28) or labels.max() > 9:
            raise UserError(f"{paths[0]} is not Fashion-MNIST: images {pixels.shape}, labels {labels.shape}")
        colors = np.repeat(pixels[..., None], 3, axis=3)
        return Dataset("fashion_mnist", split, CLASSES["fashion_mnist"], labels.astype(np.int64), colors)

    return ["train", "test"], read


def _read_idx(path: Path) -> np.ndarray:
    """An idx file of bytes: two zeros, type 8, number of axes; the axes' sizes, big-endian; the data."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile) as error:
        raise _corrupt(path, error) from error
    start = 4 + 4 * data[3] if data[:3] == b"\0\0\x08" and len(data) > 3 else 0
    shape = np.frombuffer(data[4:start], ">u4").tolist()
    if not shape or len(data) != start + math.prod(shape):
        raise _corrupt(path, f"{len(data)} bytes are not an idx file")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _corrupt(path: Path, reason: object) -> UserError:
    return UserError(f"{path} is corrupt or truncated ({reason}): download it again")


@dataclasses.dataclass(frozen=True)
class Cifar:
    """Reader of a CIFAR set in its binary version: `Cifar()(root, download)`.

    A record is `label_bytes` labels, of which the last counts, and 3 x 32 x 32 bytes of pixels.
    """

    name: str
    folder: str
    archive: str
    digest: str
    pickled: str
    label_bytes: int
    files: Mapping[str, Sequence[str]]

    def __call__(self, root: Path | None, download: bool) -> Splits:
        home = root or cache_folder()

        def read(split: str) -> Dataset:
            folder = self._find(home, download)
            records = np.concatenate([self._records(folder / file) for file in self.files[split]])
            pixels = records[:, self.label_bytes :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            labels = records[:, self.label_bytes - 1].astype(np.int64)
            return Dataset(self.name, split, CLASSES[self.name], labels, np.ascontiguousarray(pixels))

        return ["train", "test"], read

    def _find(self, home: Path, download: bool) -> Path:
        """The folder with the .bin files, which are downloaded and unpacked if missing."""
        folders = [home, home / self.folder]
        for folder in folders:
            if all((folder / file).is_file() for files in self.files.values() for file in files):
                return folder
        archive = home / self.archive
        if not archive.is_file():
            pickled = [p for n in (self.pickled, self.archive.replace("binary", "python")) if (p := home / n).exists()]
            note = f" ({pickled[0]} is the pickled version, and no pickle is ever loaded)" if pickled else ""
            looked = ", ".join(map(str, folders))
            require_download(f"{self.name} needs {self.archive} or its .bin files{note}; looked in {looked}", download)
            download_file(f"https://www.cs.toronto.edu/~kriz/{self.archive}", archive, self.digest)
        if (digest := digest_of(archive, self.digest)) != self.digest:
            raise UserError(f"{archive} has the checksum {digest}, not {self.digest}: remove it and download it again")
        with tarfile.open(archive) as tar:
            tar.extractall(home, filter="data")
        return home / self.folder

    def _records(self, path: Path) -> np.ndarray:
        data = np.fromfile(path, np.uint8)
        size = self.label_bytes + 3 * 32 * 32
        if not data.size or data.size % size:
            raise _corrupt(path, f"{data.size} bytes are not a whole number of records of {size}")
        records = data.reshape(-1, size)
        if (top := records[:, self.label_bytes - 1].max()) >= len(CLASSES[self.name]):
            raise UserError(f"{path} is not {self.name}: it has the label {top}")
        return records


CIFAR10 = Cifar(
    name="cifar10",
    folder="cifar-10-batches-bin",
    archive="cifar-10-binary.tar.gz",
    digest="md5:c32a1d4ab5d03f1284b67883e8d87530",
    pickled="cifar-10-batches-py",
    label_bytes=1,
    files={"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]},
)
CIFAR100 = Cifar(
    name="cifar100",
    folder="cifar-100-binary",
    archive="cifar-100-binary.tar.gz",
    digest="md5:03b5dce01913d631647c71ecec9e9cb8",
    pickled="cifar-100-python",
    label_bytes=2,
    files={"train": ["train.bin"], "test": ["test.bin"]},
)


def read_mat(path: Path, *names: str) -> list[np.ndarray]:
    """The arrays `names` of a MATLAB file. Raises UserError."""
    import scipy.io  # slow to import
    from scipy.io.matlab import MatReadError

    corrupt = (ArithmeticError, EOFError, LookupError, NotImplementedError, OSError, TypeError, ValueError, zlib.error)
    try:
        content = scipy.io.loadmat(path)
    except (*corrupt, MatReadError) as error:
        raise _corrupt(path, error) from error
    if missing := [name for name in names if name not in content]:
        raise UserError(f"{path} has no array {missing[0]!r}: it is another file, or was changed")
    return [content[name] for name in names]


def read_svhn(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [N, 32, 32, 3] and labels int64 [N] of an SVHN file, in which the digit 0 is the label 10."""
    pixels, labels = read_mat(path, "X", "y")
    shaped = pixels.dtype == np.uint8 and pixels.shape[:3] == (32, 32, 3) and labels.shape == (pixels.shape[-1], 1)
    if not shaped or not labels.size or labels.min() < 1 or labels.max() > 10:
        raise UserError(f"{path} is not SVHN's: X {pixels.shape}, y {labels.shape}: {np.unique(labels)[:12].tolist()}")
    return np.ascontiguousarray(pixels.transpose(3, 0, 1, 2)), labels[:, 0].astype(np.int64) % 10


def read_h5(path: Path, name: str) -> np.ndarray:
    """The array `name` of an HDF5 file, or of `path`.gz, which is unpacked beside it first. Raises UserError.

    It is mapped into memory, so that a few images of many cost little. An array that is stored in chunks is therefore
    written out once as an .npy beside the file.
    """
    try:
        import h5py
    except ImportError as error:
        raise UserError(f"{path} is an HDF5 file, and h5py is not installed: pip install 'vitlab[vtab]'") from error
    try:
        if not path.is_file():
            with gzip.open(f"{path}.gz") as packed, replacing_file(path) as file:
                shutil.copyfileobj(packed, file)
        with h5py.File(path) as file:
            array = file.get(name)
            if not isinstance(array, h5py.Dataset):
                raise UserError(f"{path} has no array {name!r}: it is another file, or was changed")
            if (offset := array.id.get_offset()) is not None:
                return np.memmap(path, array.dtype, "r", offset, array.shape)
            plain = path.with_name(f"{path.name}.{name}.npy")
            if not plain.is_file():
                part = plain.with_name(f"{plain.name}.part")
                copy = np.lib.format.open_memmap(part, "w+", array.dtype, array.shape)
                for start in range(0, len(array), 1024):
                    copy[start : start + 1024] = array[start : start + 1024]
                copy.flush()
                part.replace(plain)
            return np.load(plain, "r", allow_pickle=False)
    except (OSError, EOFError, zlib.error) as error:
        raise _corrupt(path, error) from error
