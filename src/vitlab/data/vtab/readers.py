"""The natural and specialized data sets of VTAB as published.

A reader NAME(folder, split) reads a split of TensorFlow Datasets (TFDS), which VTAB takes its splits from, with the
keys that TFDS gives the examples: their MD5 sums are the benchmark's order. Readers do not check files:
`tasks.read_published` reports what they raise, and checks what they return. torchvision's readers have no keys, and
know one folder layout only.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitlab.data.dataset import Dataset
from vitlab.data.decode import Entry
from vitlab.data.pixels import cifar_splits, read_h5, read_mat, read_svhn
from vitlab.data.vtab.retinopathy import PREPARED, EyeEntry
from vitlab.data.vtab.sources import SOURCES


class Published(NamedTuple):
    """Images in a stable order, and for each the key of its example in TFDS."""

    dataset: Dataset
    keys: list[str]


# ------------------------------------------------------------------------------------------------ natural


def caltech101(folder: Path, split: str) -> Published:
    """102 classes with the background. 30 files of each class are train, the others test.

    TFDS draws the 30 from names in the order of its machine's file system, so that its versions have different
    splits (3.0.0 counts 3,060 and 6,084 images). Deviation: the same draw here is from sorted names, which are the
    same everywhere.
    """
    draws = np.random.RandomState(1234)
    files: list[Path] = []
    for kind in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        names = sorted(path.name for path in kind.iterdir() if path.is_file() and not path.name.startswith("."))
        train = set(draws.choice(names, 30, replace=False).tolist())
        # The background holds a file that is not an image, which takes part in the draw.
        files += [kind / n for n in names if (n in train) == (split == "train") and n.endswith(".jpg")]
    keys = [f"{file.parent.name}/{file.name}" for file in files]
    return _in_files("caltech101", split, files, [file.parent.name.lower() for file in files], keys)


def cifar100(folder: Path, split: str) -> Published:
    """The binary version; a key is the number of the record."""
    return numbered(cifar_splits("cifar100", folder, False)[1](split))


def dtd(folder: Path, split: str) -> Published:
    """The first of the ten official partitions."""
    part = {"train": "train1", "validation": "val1", "test": "test1"}[split]
    keys = (folder / "labels" / f"{part}.txt").read_text().split()  # "banded/banded_0002.jpg"
    return _in_files("dtd", split, [folder / "images" / key for key in keys], [key.split("/")[0] for key in keys], keys)


def flowers102(folder: Path, split: str) -> Published:
    """The official splits of setid.mat; of 8,189 images, most are test."""
    from torchvision.datasets import Flowers102  # slow to import; the data set's files only number the classes

    part = {"train": "trnid", "validation": "valid", "test": "tstid"}[split]
    numbers = read_mat(folder / "setid.mat", part)[0].ravel().astype(int)
    labels = read_mat(folder / "imagelabels.mat", "labels")[0].ravel().astype(int)
    keys = [f"image_{number:05d}.jpg" for number in numbers]
    names, classes = [Flowers102.classes[label - 1] for label in labels[numbers - 1]], tuple(Flowers102.classes)
    return _in_files("flowers102", split, [folder / "jpg" / key for key in keys], names, keys, classes)


def pets(folder: Path, split: str) -> Published:
    """The official splits; TFDS calls trainval "train". A line is NAME CLASS SPECIES BREED."""
    list_file = folder / "annotations" / {"train": "trainval.txt", "test": "test.txt"}[split]
    rows = [line.split() for line in list_file.read_text().splitlines()]
    breeds = {int(label): name.rpartition("_")[0] for name, label, _, _ in rows}
    keys = [f"{name}.jpg" for name, *_ in rows]
    names, classes = [breeds[int(row[1])] for row in rows], tuple(breeds[label] for label in sorted(breeds))
    return _in_files("pets", split, [folder / "images" / key for key in keys], names, keys, classes)


def sun397(folder: Path, split: str) -> Published:
    """TFDS's random split, 70 / 10 / 20 %.

    Deviation: the images are the originals, where TFDS scales them down to 120,000 pixels.
    """
    list_file = folder / SOURCES["sun397"].lists[split][0].rpartition("/")[2]
    keys = list_file.read_text().split()  # "/a/apartment_building/outdoor/sun_aaoljtcmbdcmpcfb.jpg"
    classes = tuple(line[3:] for line in (folder / "ClassName.txt").read_text().split())
    names = [key[3:].rpartition("/")[0] for key in keys]
    return _in_files("sun397", split, [folder / key[1:] for key in keys], names, keys, classes)


def svhn(folder: Path, split: str) -> Published:
    """The cropped digits of 32 x 32; a key is the number of the image."""
    pixels, labels = read_svhn(folder / f"{split}_32x32.mat")
    return numbered(Dataset("svhn", split, tuple("0123456789"), labels, pixels))


# -------------------------------------------------------------------------------------------- specialized


def patch_camelyon(folder: Path, split: str) -> Published:
    """Patches of 96 x 96 with tumor tissue in their middle, or without."""
    part = {"train": "train", "validation": "valid", "test": "test"}[split]
    pixels, labels = (read_h5(folder / f"camelyonpatch_level_2_split_{part}_{kind}.h5", kind) for kind in ("x", "y"))
    dataset = Dataset("patch_camelyon", split, ("no tumor", "tumor"), labels.ravel().astype(np.int64), pixels)
    return Published(dataset, [f"{part}_{i}" for i in range(len(pixels))])


def eurosat(folder: Path, split: str) -> Published:
    """The RGB version; no split is published."""
    return _in_class_folders("eurosat", folder, split)


def resisc45(folder: Path, split: str) -> Published:
    """No split is published."""
    return _in_class_folders("resisc45", folder, split)


def diabetic_retinopathy(folder: Path, split: str) -> Published:
    """Stages 0 to 4; the images are prepared as `retinopathy.py` says, each when it is first read.

    A folder btgraham-300/ beside train/ and test/, or instead of them, holds the prepared ones. validation and test
    are the public and the private part of the competition's test.
    """
    file, part = ("trainLabels.csv", "train") if split == "train" else ("retinopathy_solution.csv", "test")
    usage = {"train": None, "validation": "Public", "test": "Private"}[split]
    with (folder / file).open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if usage is None or row["Usage"] == usage]
    keys = [row["image"] for row in rows]
    entries = [EyeEntry(str(folder / PREPARED / part / f"{key}.jpeg")) for key in keys]
    labels = np.array([int(row["level"]) for row in rows], np.int64)
    return Published(Dataset("diabetic_retinopathy", split, tuple("01234"), labels, entries=entries), keys)


# ---------------------------------------------------------------------------------------------- helpers


def numbered(dataset: Dataset) -> Published:
    """With the images' numbers as keys."""
    return Published(dataset, [str(i) for i in range(len(dataset))])


def _in_class_folders(name: str, folder: Path, split: str) -> Published:
    files = sorted(folder.glob("[!.]*/*.jpg"), key=lambda file: (file.parent.name, file.name))
    keys = [f"{file.parent.name}_{file.name}" for file in files]
    return _in_files(name, split, files, [file.parent.name for file in files], keys)


def _in_files(
    name: str, split: str, files: Sequence[Path], names: Sequence[str], keys: list[str], classes: tuple[str, ...] = ()
) -> Published:
    """Images in files, each with the name of its class; `classes` are the sorted names by default."""
    classes = classes or tuple(sorted(set(names)))
    label = {name: i for i, name in enumerate(classes)}
    labels = np.array([label[name] for name in names], np.int64)
    return Published(Dataset(name, split, classes, labels, entries=[Entry(str(file)) for file in files]), keys)
