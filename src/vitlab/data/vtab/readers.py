"""The natural and specialized data sets of VTAB as published, and two small ones.

A reader NAME(folder, split) reads a split of TensorFlow Datasets (TFDS), which VTAB takes its splits from, with the
keys that TFDS gives the examples: their MD5 sums are the benchmark's order. Readers do not check files:
`tasks.read_published` reports what they raise, checks what they return, and names the data set. No pickle is
ever loaded; CIFAR is therefore read from its binary version. torchvision's readers have no keys, and know one folder
layout only.
"""

import csv
import dataclasses
import gzip
import io
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image

from vitlab.data.dataset import Dataset
from vitlab.data.decode import Entry, ImageError, Levels, decode_image
from vitlab.data.vtab.sources import SOURCES
from vitlab.errors import UserError
from vitlab.io import replacing_file, write_bytes

FASHION_MNIST = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
PREPARED, EYE_RADIUS, EYE_QUALITY = "btgraham-300", 300, 72  # folder; pixels; of the JPEG
CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel
    can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
    dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion
    lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter
    palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road
    rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower
    sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
    willow_tree wolf woman worm
"""


class Published(NamedTuple):
    """Images in a stable order, and for each the key of its example in TFDS."""

    dataset: Dataset
    keys: list[str]
    read_pixels: Callable[[np.ndarray], np.ndarray] | None = None
    """Reads the images of some indices, if not all fit into memory; `dataset` has none then."""

    def take(self, indices: np.ndarray) -> Dataset:
        """The images `indices`, in that order."""
        part = self.dataset.take(indices)
        return dataclasses.replace(part, pixels=self.read_pixels(indices)) if self.read_pixels else part


# ------------------------------------------------------------------------------------------------ natural


def caltech101(folder: Path, split: str) -> Published:
    """102 classes with the background. 30 files of each class are train, the others test.

    TFDS draws the 30 from names in the order of its machine's file system, so that its versions have different
    splits (3.0.0 counts 3,060 and 6,084 images). Deviation: the same draw here is from sorted names, which are the
    same everywhere.
    """
    draws = np.random.RandomState(1234)
    keys: list[str] = []
    for kind in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        names = sorted(path.name for path in kind.iterdir() if path.is_file() and not path.name.startswith("."))
        train = set(draws.choice(names, 30, replace=False).tolist())
        # The background holds a file that is not an image, which takes part in the draw.
        keys += [f"{kind.name}/{n}" for n in names if (n in train) == (split == "train") and n.endswith(".jpg")]
    return of_classes([folder / key for key in keys], [key.partition("/")[0].lower() for key in keys], keys)


def cifar100(folder: Path, split: str) -> Published:
    """The binary version, whose records have a coarse label and a fine one, which counts."""
    return of_pixels(*read_cifar([folder / f"{split}.bin"], label_bytes=2), CIFAR100.split())


def cifar10(folder: Path, split: str) -> Published:
    """The binary version."""
    files = ["test_batch.bin"] if split == "test" else [f"data_batch_{i}.bin" for i in range(1, 6)]
    return of_pixels(*read_cifar([folder / file for file in files], label_bytes=1), CIFAR10.split())


def fashion_mnist(folder: Path, split: str) -> Published:
    """Two idx files of each split; gray is repeated to RGB."""
    prefix = {"train": "train", "test": "t10k"}[split]
    pixels, labels = (read_idx(folder / f"{prefix}-{part}-ubyte") for part in ("images-idx3", "labels-idx1"))
    return of_pixels(np.repeat(pixels[..., None], 3, axis=3), labels, FASHION_MNIST.split(", "))


def dtd(folder: Path, split: str) -> Published:
    """The first of the ten official partitions."""
    part = {"train": "train1", "validation": "val1", "test": "test1"}[split]
    keys = (folder / "labels" / f"{part}.txt").read_text().split()  # "banded/banded_0002.jpg"
    return of_classes([folder / "images" / key for key in keys], [key.partition("/")[0] for key in keys], keys)


def flowers102(folder: Path, split: str) -> Published:
    """The official splits of setid.mat; of 8,189 images, most are test."""
    from torchvision.datasets import Flowers102  # slow to import; the data set's files only number the classes

    part = {"train": "trnid", "validation": "valid", "test": "tstid"}[split]
    numbers = read_mat(folder / "setid.mat", part)[0].ravel().astype(int)
    labels = read_mat(folder / "imagelabels.mat", "labels")[0].ravel().astype(int)
    keys = [f"image_{number:05d}.jpg" for number in numbers]
    return of_files([folder / "jpg" / key for key in keys], labels[numbers - 1] - 1, Flowers102.classes, keys)


def pets(folder: Path, split: str) -> Published:
    """The official splits; TFDS calls trainval "train". A line is NAME CLASS SPECIES BREED."""
    list_file = folder / "annotations" / {"train": "trainval.txt", "test": "test.txt"}[split]
    rows = [line.split() for line in list_file.read_text().splitlines()]
    breeds = {int(label): name.rpartition("_")[0] for name, label, _, _ in rows}
    keys = [f"{name}.jpg" for name, *_ in rows]
    names = [breeds[int(label)] for _, label, _, _ in rows]
    classes = [breeds[label] for label in sorted(breeds)]
    return of_classes([folder / "images" / key for key in keys], names, keys, classes)


def sun397(folder: Path, split: str) -> Published:
    """TFDS's random split, 70 / 10 / 20%. Deviation: the images are the originals, where TFDS scales them down to
    120,000 pixels."""
    list_file = folder / SOURCES["sun397"].lists[split][0].rpartition("/")[2]
    keys = list_file.read_text().split()  # "/a/apartment_building/outdoor/sun_aaoljtcmbdcmpcfb.jpg"
    classes = [line[3:] for line in (folder / "ClassName.txt").read_text().split()]
    names = [key[3:].rpartition("/")[0] for key in keys]
    return of_classes([folder / key[1:] for key in keys], names, keys, classes)


def svhn(folder: Path, split: str) -> Published:
    """The cropped digits of 32 x 32; the digit 0 has the label 10. A key is the number of the image."""
    pixels, labels = read_mat(folder / f"{split}_32x32.mat", "X", "y")
    return of_pixels(np.ascontiguousarray(pixels.transpose(3, 0, 1, 2)), labels[:, 0] % 10, "0123456789")


# -------------------------------------------------------------------------------------------- specialized


def patch_camelyon(folder: Path, split: str) -> Published:
    """Patches of 96 x 96 with tumor tissue in their middle, or without."""
    part = {"train": "train", "validation": "valid", "test": "test"}[split]
    pixels, labels = (read_h5(folder / f"camelyonpatch_level_2_split_{part}_{kind}.h5", kind) for kind in ("x", "y"))
    return of_pixels(pixels, labels.ravel(), ("no tumor", "tumor"), f"{part}_")


def eurosat(folder: Path, split: str) -> Published:
    """The RGB version in folders of the classes; no split is published."""
    files = sorted(folder.glob("[!.]*/*.jpg"), key=lambda file: (file.parent.name, file.name))
    names = [file.parent.name for file in files]
    return of_classes(files, names, [f"{file.parent.name}_{file.name}" for file in files])


resisc45 = eurosat


# ------------------------------------------------------------------------------- Diabetic Retinopathy
#
# As VTAB takes it: "btgraham-300", the preparation of the winner of Kaggle's competition (2015). A photograph of an eye
# is scaled so that the eye's radius is 300 pixels, its local average is subtracted, and what lies outside 90% of the
# radius is made gray and cropped. The result is stored as JPEG of quality 72 when it is first read, since the original
# takes about a second.
#
# Deviation: SciPy's blur, and Pillow's resize and JPEG, stand in for OpenCV's. Before the JPEG the pixels differ from
# the same steps in OpenCV 5 by 4 levels at most: one level of the local average, which is taken four times.


class EyeEntry(Entry):
    """An image ROOT/btgraham-300/SPLIT/NAME, made from ROOT/SPLIT/NAME unless it exists."""

    __slots__ = ()

    def read(self, levels: Levels | None = None) -> np.ndarray:
        prepared = Path(self.file)
        if not prepared.is_file():
            original = prepared.parents[2] / prepared.parent.name / prepared.name
            buffer = io.BytesIO()
            Image.fromarray(prepare_eye(decode_image(original))).save(buffer, "JPEG", quality=EYE_QUALITY)
            try:
                write_bytes(prepared, buffer.getvalue(), clear=False)  # several workers may make the same image
            except OSError as error:
                raise ImageError(self.file, f"the prepared image cannot be written ({error.strerror})") from error
        return super().read(levels)


def prepare_eye(image: np.ndarray, radius: int = EYE_RADIUS) -> np.ndarray:
    """uint8 [H, W, 3] -> uint8 [h, w, 3], at most 1.8 `radius` each way, the eye in the middle."""
    from scipy.ndimage import gaussian_filter  # slow to import

    scaled = _resize_eye(image, radius / eye_radius(image))
    # A kernel of 3 standard deviations each way, mirrored at the edges, as OpenCV's is for bytes.
    blurred = gaussian_filter(scaled.astype(np.float32), (radius / 30, radius / 30, 0), mode="mirror", truncate=3)
    contrast = np.clip(4 * (scaled - np.rint(blurred)) + 128, 0, 255).astype(np.uint8)
    height, width = contrast.shape[:2]
    shown = int(0.9 * radius)
    down, right = np.ogrid[:height, :width]
    contrast[(down - height // 2) ** 2 + (right - width // 2) ** 2 > shown**2] = 128
    top, left = max(height // 2 - shown, 0), max(width // 2 - shown, 0)
    return contrast[top : height // 2 + shown, left : width // 2 + shown]


def eye_radius(image: np.ndarray) -> float:
    """Half the number of pixels on the middle row that are brighter than a tenth of its mean; of a black row H / 2."""
    row = image[len(image) // 2].sum(axis=1, dtype=np.int64)
    radius = float((row > row.mean() / 10).sum()) / 2
    return radius if radius >= 1 else len(image) / 2


def _resize_eye(image: np.ndarray, scale: float) -> np.ndarray:
    """Bilinear without smoothing: the pixel at x + 1/2 is read at (x + 1/2) / scale."""
    height, width = (max(1, round(side * scale)) for side in image.shape[:2])
    affine = (1 / scale, 0, 0, 0, 1 / scale, 0)
    resized = Image.fromarray(image)
    return np.asarray(resized.transform((width, height), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR))


def diabetic_retinopathy(folder: Path, split: str) -> Published:
    """Stages 0 to 4; validation and test are the public and the private part of the competition's test. btgraham-300/
    holds the images as `prepare_eye` returns them, each when it is first read."""
    file, part = ("trainLabels.csv", "train") if split == "train" else ("retinopathy_solution.csv", "test")
    usage = {"train": None, "validation": "Public", "test": "Private"}[split]
    with (folder / file).open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if usage is None or row["Usage"] == usage]
    keys = [row["image"] for row in rows]
    files = [folder / PREPARED / part / f"{key}.jpeg" for key in keys]
    return of_files(files, [int(row["level"]) for row in rows], "01234", keys, EyeEntry)


# ---------------------------------------------------------------------------------------------- helpers


def of_files(
    files: Iterable[Path], labels: ArrayLike, classes: Sequence[str], keys: list[str], kind: type[Entry] = Entry
) -> Published:
    """Images in files, with the numbers of their classes."""
    entries = [kind(str(file)) for file in files]
    return Published(Dataset("", "", tuple(classes), np.asarray(labels, np.int64), entries=entries), keys)


def of_classes(
    files: Iterable[Path], names: Sequence[str], keys: list[str], classes: Sequence[str] | None = None
) -> Published:
    """Images in files, with the names of their classes; `classes` are the sorted names by default."""
    classes = classes or sorted(set(names))
    label = {name: i for i, name in enumerate(classes)}
    return of_files(files, [label[name] for name in names], classes, keys)


def of_pixels(pixels: np.ndarray | None, labels: ArrayLike, classes: Sequence[str], prefix: str = "") -> Published:
    """Images in memory, with the numbers of their classes; a key is `prefix` and the image's number."""
    dataset = Dataset("", "", tuple(classes), np.asarray(labels, np.int64), pixels)
    return Published(dataset, [f"{prefix}{i}" for i in range(len(dataset))])


def read_idx(path: Path) -> np.ndarray:
    """An idx file of bytes, or PATH.gz: two zeros, type 8, number of axes; the axes' sizes, big-endian; the data."""
    data = path.read_bytes() if path.is_file() else gzip.decompress(Path(f"{path}.gz").read_bytes())
    if data[:3] != b"\0\0\x08":
        raise ValueError(f"{path.name} is not an idx file of bytes")
    shape = np.frombuffer(data, ">u4", data[3], offset=4).tolist()
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def read_cifar(files: list[Path], label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [N, 32, 32, 3] and labels int64 [N]: records of labels (the last counts) and 3 planes."""
    records = np.concatenate([np.fromfile(file, np.uint8) for file in files]).reshape(-1, label_bytes + 3 * 32 * 32)
    pixels = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pixels), records[:, label_bytes - 1].astype(np.int64)


def read_mat(path: Path, *names: str) -> list[np.ndarray]:
    """The arrays `names` of a MATLAB file."""
    import scipy.io  # slow to import
    from scipy.io.matlab import MatReadError

    try:
        content = scipy.io.loadmat(path)
    except MatReadError as error:
        raise ValueError(f"{path.name}: {error}") from error
    return [content[name] for name in names]


def read_h5(path: Path, name: str) -> np.ndarray:
    """The array `name` of an HDF5 file, or of `path`.gz, which is unpacked beside it first.

    It is mapped into memory, so that a few images of many cost little: from an .npy beside the file, as the published
    files are compressed.
    """
    try:
        import h5py
    except ImportError as error:
        raise UserError(f"{path} is an HDF5 file, and h5py is not installed: install vitlab's extra vtab") from error
    plain = path.with_name(f"{path.name}.{name}.npy")
    if not path.is_file():
        with gzip.open(f"{path}.gz") as packed, replacing_file(path) as file:
            shutil.copyfileobj(packed, file)
    if not plain.is_file():
        with h5py.File(path) as file, replacing_file(plain) as copy:
            array = file[name]
            assert isinstance(array, h5py.Dataset)
            header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
            np.lib.format.write_array_header_1_0(copy, header)
            for start in range(0, len(array), 1024):
                copy.write(array[start : start + 1024].tobytes())
    return np.load(plain, "r", allow_pickle=False)
