"""The natural and specialized data sets of VTAB as published, each split with its example keys.

A reader NAME(root, split, download) looks at `root` and at the sub-folders where torchvision and others unpack the data
set. `split` is a split of its builder in TensorFlow Datasets (TFDS), which VTAB takes its splits from, and `keys` are
the keys that this builder gives the examples: their MD5 sums are the benchmark's order. Missing or corrupt files raise
a UserError that says what to download, and where. torchvision's own readers have no keys and know one layout only.
"""

import csv
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitlab.data.dataset import Dataset
from vitlab.data.decode import Entry
from vitlab.data.downloads import download as download_file
from vitlab.data.exclude import MAX_LIST_BYTES
from vitlab.data.pixels import cifar_splits, read_h5, read_mat, read_svhn
from vitlab.data.vtab.retinopathy import PREPARED, EyeEntry
from vitlab.data.vtab.sources import SOURCES, locate, require_download, require_split
from vitlab.errors import UserError
from vitlab.io import read_regular

logger = logging.getLogger(__name__)


class Published(NamedTuple):
    """Images in a stable order, and for each the key of its example in TFDS."""

    dataset: Dataset
    keys: list[str]


SUN397_LISTS = {  # split of TFDS -> the list's short name and digest
    "train": ("tr", "md5:2e8dd4c1bc68ece3d8510c22085c3777"),
    "validation": ("va", "md5:cf69489da6db30ebc6e36730a2fd499b"),
    "test": ("te", "md5:2a9dce8a9102a225ab264ae2d8057af8"),
}
SUN397_URL = "https://raw.githubusercontent.com/tensorflow/datasets/master/tensorflow_datasets/image_classification/"


# ------------------------------------------------------------------------------------------------ natural


def caltech101(root: Path, split: str, download: bool) -> Published:
    """102 classes with the background. 30 files of each class are train, the others test.

    TFDS draws the 30 from names in the order of its machine's file system, so that its versions have different
    splits (3.0.0 counts 3,060 and 6,084 images). Deviation: the same draw here is from sorted names, which are the
    same everywhere.
    """
    draws = np.random.RandomState(1234)
    files: list[Path] = []
    for folder in _class_folders("caltech101", locate("caltech101", split, root, download)):
        names = sorted(p.name for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
        if len(names) < 30:
            raise UserError(
                f"{folder} has {len(names)} files, fewer than the 30 that are drawn for train: unpack it again"
            )
        train = set(draws.choice(names, 30, replace=False).tolist())
        # The background holds a file that is not an image, which takes part in the draw.
        files += [folder / n for n in names if (n in train) == (split == "train") and n.endswith(".jpg")]
    keys = [f"{file.parent.name}/{file.name}" for file in files]
    return _in_files("caltech101", split, files, [file.parent.name.lower() for file in files], keys)


def cifar100(root: Path, split: str, download: bool) -> Published:
    """The binary version; a key is the number of the record."""
    require_split("cifar100", split)
    return _numbered(cifar_splits("cifar100", root, download)[1](split))


def dtd(root: Path, split: str, download: bool) -> Published:
    """The first of the ten official partitions."""
    folder = locate("dtd", split, root, download)
    lines = folder / "labels" / {"train": "train1.txt", "validation": "val1.txt", "test": "test1.txt"}[split]
    keys = _lines(lines)
    if invalid := [key for key in keys if key.count("/") != 1]:
        raise UserError(f"{lines} has the line {invalid[0]!r}, expected CLASS/IMAGE.jpg: download it again")
    files = [folder / "images" / key for key in keys]
    return _in_files("dtd", split, files, [key.split("/")[0] for key in keys], keys, lines)


def flowers102(root: Path, split: str, download: bool) -> Published:
    """The official splits of setid.mat; of 8,189 images, most are test."""
    from torchvision.datasets import Flowers102  # slow to import; the data set's own files only number the classes

    folder, names = locate("flowers102", split, root, download), tuple(Flowers102.classes)
    ids, labeled = folder / "setid.mat", folder / "imagelabels.mat"
    part = {"train": "trnid", "validation": "valid", "test": "tstid"}[split]
    numbers, labels = read_mat(ids, part)[0].ravel().astype(int), read_mat(labeled, "labels")[0].ravel()
    if not numbers.size or numbers.min() < 1 or numbers.max() > len(labels):
        raise UserError(f"{ids} names images that {labeled}, with {len(labels)}, has no label of: download both again")
    keys = [f"image_{number:05d}.jpg" for number in numbers]
    chosen = labels[numbers - 1].astype(np.int64) - 1
    if chosen.min() < 0 or chosen.max() >= len(names):
        raise UserError(f"{labeled} has labels beyond 1 to {len(names)}: download it again")
    files = [folder / "jpg" / key for key in keys]
    return _in_files("flowers102", split, files, [names[label] for label in chosen], keys, ids, names)


def pets(root: Path, split: str, download: bool) -> Published:
    """The official splits; TFDS calls trainval "train"."""
    folder = locate("pets", split, root, download)
    lines = folder / "annotations" / {"train": "trainval.txt", "test": "test.txt"}[split]
    rows = [line.split() for line in _lines(lines)]
    if invalid := [row for row in rows if len(row) != 4 or not row[1].isdecimal() or len(row[1]) > 9]:
        raise UserError(f"{lines} has the line {' '.join(invalid[0])!r}, expected NAME CLASS SPECIES BREED")
    breeds = {int(label): name.rpartition("_")[0] for name, label, *_ in rows}
    names = [name.rpartition("_")[0] for name, *_ in rows]
    if sorted(breeds) != list(range(1, 38)) or [breeds[int(label)] for _, label, *_ in rows] != names:
        raise UserError(f"{lines} does not give each of 37 breeds its own number from 1 to 37: download it again")
    keys = [f"{name}.jpg" for name, *_ in rows]
    classes = tuple(breeds[label] for label in sorted(breeds))
    return _in_files("pets", split, [folder / "images" / key for key in keys], names, keys, lines, classes)


def sun397(root: Path, split: str, download: bool) -> Published:
    """TFDS's own random split, 70 / 10 / 20 %, whose lists of images are not part of the data set: downloaded too.

    Deviation: the images are the originals, where TFDS scales them down to 120,000 pixels.
    """
    folder = locate("sun397", split, root, download)
    short, digest = SUN397_LISTS[split]
    file = f"sun397_tfds_{short}.txt"
    lines = next((path for path in (folder / file, root / file) if path.is_file()), root / file)
    if not lines.is_file():
        require_download(
            f"sun397 needs TFDS's list of the split, {SUN397_URL}{file}; looked in {folder}, {root}", download
        )
        download_file(f"{SUN397_URL}{file}", lines, digest)
    keys = _lines(lines)  # "/a/apartment_building/outdoor/sun_aaoljtcmbdcmpcfb.jpg"
    classes = tuple(line[3:] for line in _lines(folder / "ClassName.txt"))
    files = [folder / key[1:] for key in keys]
    return _in_files("sun397", split, files, [key[3:].rpartition("/")[0] for key in keys], keys, lines, classes)


def svhn(root: Path, split: str, download: bool) -> Published:
    """The cropped digits of 32 x 32; a key is the number of the image."""
    pixels, labels = read_svhn(locate("svhn", split, root, download) / f"{split}_32x32.mat")
    return _numbered(Dataset("svhn", split, tuple("0123456789"), labels, pixels))


# -------------------------------------------------------------------------------------------- specialized


def patch_camelyon(root: Path, split: str, download: bool) -> Published:
    """Patches of 96 x 96 with tumor tissue in their middle, or without."""
    folder = locate("patch_camelyon", split, root, download)
    short = {"train": "train", "validation": "valid", "test": "test"}[split]
    files = [folder / f"camelyonpatch_level_2_split_{short}_{part}.h5" for part in ("x", "y")]
    pixels, labels = read_h5(files[0], "x"), read_h5(files[1], "y")
    if pixels.shape[1:] != (96, 96, 3) or pixels.dtype != np.uint8 or labels.shape != (len(pixels), 1, 1, 1):
        raise UserError(f"{files[0]} is not PatchCamelyon's: x {pixels.shape}, y {labels.shape}")
    dataset = Dataset("patch_camelyon", split, ("no tumor", "tumor"), labels.ravel().astype(np.int64), pixels)
    return _counted(Published(dataset, [f"{short}_{i}" for i in range(len(pixels))]))


def eurosat(root: Path, split: str, download: bool) -> Published:
    """The RGB version; no split is published."""
    return _in_class_folders("eurosat", root, split, download)


def resisc45(root: Path, split: str, download: bool) -> Published:
    """No split is published."""
    return _in_class_folders("resisc45", root, split, download)


def diabetic_retinopathy(root: Path, split: str, download: bool) -> Published:
    """Stages 0 to 4; the images are prepared as `retinopathy.py` says, each when it is first read.

    A folder btgraham-300/ beside train/ and test/, or instead of them, holds the prepared ones. validation and test
    are the public and the private part of the competition's test.
    """
    folder = locate("diabetic_retinopathy", split, root, download)
    file, part = ("trainLabels.csv", "train") if split == "train" else ("retinopathy_solution.csv", "test")
    usage = {"train": None, "validation": "Public", "test": "Private"}[split]
    with (folder / file).open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if usage is None or row.get("Usage") == usage]
    if not rows or any(not row.get("image") or row.get("level") not in set("01234") for row in rows):
        columns = "image,level" if split == "train" else "image,level,Usage"
        raise UserError(f"{folder / file} is not a table of {columns} with levels 0 to 4: download it again")
    keys = [row["image"] for row in rows]
    prepared = [folder / PREPARED / part / f"{key}.jpeg" for key in keys]
    present = [path if path.is_file() else folder / part / path.name for path in prepared]
    stages, levels = tuple("01234"), [row["level"] for row in rows]
    published = _in_files("diabetic_retinopathy", split, present, levels, keys, folder / file, stages)
    entries = [EyeEntry(str(path)) for path in prepared]
    return Published(dataclasses.replace(published.dataset, entries=entries), keys)


# -------------------------------------------------------------------------------------------------- parts


def _class_folders(name: str, folder: Path) -> list[Path]:
    folders = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if len(folders) != (count := SOURCES[name].classes):
        raise UserError(f"{folder} has {len(folders)} class folders, not the {count} of {name}: unpack it again")
    return folders


def _in_class_folders(name: str, root: Path, split: str, download: bool) -> Published:
    folders = _class_folders(name, locate(name, split, root, download))
    files = [file for folder in folders for file in sorted(folder.glob("*.jpg"))]
    keys = [f"{file.parent.name}_{file.name}" for file in files]
    return _in_files(name, split, files, [file.parent.name for file in files], keys)


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in read_regular(path, MAX_LIST_BYTES).decode().splitlines() if line.strip()]
    except ValueError as error:  # bytes that are not text
        raise UserError(f"{path} is corrupt ({error}): download it again") from error


def _in_files(
    name: str,
    split: str,
    files: Sequence[Path],
    names: Sequence[str],
    keys: list[str],
    lines: Path | None = None,
    classes: tuple[str, ...] = (),
) -> Published:
    """Images in files, each with the name of its class; `classes` are the sorted names by default.

    lines: the file that lists the images.
    """
    source = SOURCES[name]
    classes = classes or tuple(sorted(set(names)))
    label = {name: i for i, name in enumerate(classes)}
    if len(classes) != source.classes or not label.keys() >= set(names):
        unknown = sorted(set(names) - label.keys())[:3]
        raise UserError(
            f"{lines or name} has {len(classes)} classes{f' and others ({unknown})' if unknown else ''}, not the "
            f"{source.classes} of {name}: download it again"
        )
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(
            f"{name} lacks {len(missing)} of the {len(files)} images that {lines} lists, first {missing[0]}: unpack "
            f"its images again (from {source.page})"
        )
    labels = np.array([label[name] for name in names], np.int64)
    return _counted(Published(Dataset(name, split, classes, labels, entries=[Entry(str(f)) for f in files]), keys))


def _numbered(dataset: Dataset) -> Published:
    """With the images' numbers as keys."""
    return _counted(Published(dataset, [str(i) for i in range(len(dataset))]))


def _counted(published: Published) -> Published:
    """Warns of an incomplete data set: the benchmark's order is that of all its images."""
    dataset = published.dataset
    if len(dataset) != (size := SOURCES[dataset.name].sizes[dataset.split]):
        logger.warning(
            "%s: %s has %d images here, and %d as published", dataset.name, dataset.split, len(dataset), size
        )
    return published
