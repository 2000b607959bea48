"""The photographic sets of VTAB in their published layouts, each with its split and its example keys.

A reader NAME(root, split, download) looks at `root` and at the sub-folders where torchvision and others unpack the
set. `split` is a split of the set's builder in TensorFlow Datasets (TFDS), which VTAB takes its splits from, and `keys`
are the keys that this builder gives the examples: their MD5 sums are the benchmark's order. Missing or damaged files
are a `ValueError` that says what to fetch, and where.
"""

import csv
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitlab.data import downloads as fetch
from vitlab.data.dataset import Dataset
from vitlab.data.decode import Entry
from vitlab.data.exclude import MAX_LIST_BYTES
from vitlab.data.pixels import CIFAR100, read_h5, read_mat, read_svhn
from vitlab.data.vtab.retinopathy import PREPARED, EyeEntry
from vitlab.errors import UserError
from vitlab.io import read_regular

logger = logging.getLogger(__name__)


class Published(NamedTuple):
    """Images in a stable order, and for each the key of its example in TFDS."""

    dataset: Dataset
    keys: list[str]


_FLOWERS = """
    pink primrose, hard-leaved pocket orchid, canterbury bells, sweet pea, english marigold, tiger lily, moon
    orchid, bird of paradise, monkshood, globe thistle, snapdragon, colt's foot, king protea, spear thistle, yellow
    iris, globe-flower, purple coneflower, peruvian lily, balloon flower, giant white arum lily, fire lily,
    pincushion flower, fritillary, red ginger, grape hyacinth, corn poppy, prince of wales feathers, stemless
    gentian, artichoke, sweet william, carnation, garden phlox, love in the mist, mexican aster, alpine sea holly,
    ruby-lipped cattleya, cape flower, great masterwort, siam tulip, lenten rose, barbeton daisy, daffodil, sword
    lily, poinsettia, bolero deep blue, wallflower, marigold, buttercup, oxeye daisy, common dandelion, petunia,
    wild pansy, primula, sunflower, pelargonium, bishop of llandaff, gaura, geranium, orange dahlia, pink-yellow
    dahlia?, cautleya spicata, japanese anemone, black-eyed susan, silverbush, californian poppy, osteospermum,
    spring crocus, bearded iris, windflower, tree poppy, gazania, azalea, water lily, rose, thorn apple, morning
    glory, passion flower, lotus, toad lily, anthurium, frangipani, clematis, hibiscus, columbine, desert-rose, tree
    mallow, magnolia, cyclamen, watercress, canna lily, hippeastrum, bee balm, ball moss, foxglove, bougainvillea,
    camellia, mallow, mexican petunia, bromelia, blanket flower, trumpet creeper, blackberry lily
"""
FLOWERS = tuple(" ".join(_FLOWERS.split()).split(", "))
"""The flowers by label; the set's own files only number them."""

SUN397_URL = "https://raw.githubusercontent.com/tensorflow/datasets/master/tensorflow_datasets/image_classification/"
SUN397_LISTS = {  # split of TFDS -> its short name, MD5 sum of the list
    "train": ("tr", "2e8dd4c1bc68ece3d8510c22085c3777"),
    "validation": ("va", "cf69489da6db30ebc6e36730a2fd499b"),
    "test": ("te", "2a9dce8a9102a225ab264ae2d8057af8"),
}
SVHN_MD5 = {"train": "e26dedcc434d2e4c54c9b2d4a06d8373", "test": "eb5a983be6a315427106f1b164d9cef3"}
PATCH_CAMELYON_MD5 = {
    "train_x": "1571f514728f59376b705fc836ff4b63",
    "train_y": "35c2d7259d906cfc8143347bb8e05be7",
    "valid_x": "d5b63470df7cfa627aeec8b9dc0c066e",
    "valid_y": "2b85f58b927af9964a4c15b8f7e8f179",
    "test_x": "d8c2d60d490dbd479f8199bdfa0cf6ec",
    "test_y": "60a7035772fbdb7f34eb86d4420cf66a",
}


# ------------------------------------------------------------------------------------------------ natural


def caltech101(root: Path, split: str, download: bool) -> Published:
    """102 classes with the background. 30 files of each class are train, the others test.

    TFDS draws the 30 from names in the order of its machine's file system, so that its versions have different
    splits (3.0.0 counts 3,060 and 6,084 images). Deviation: the same draw here is from sorted names, which are the
    same everywhere.
    """
    folder = fetch.locate("caltech101", split, root, download, "Caltech101")
    draws = np.random.RandomState(1234)
    files: list[Path] = []
    for place in _class_folders("caltech101", folder):
        names = sorted(p.name for p in place.iterdir() if p.is_file() and not p.name.startswith("."))
        if len(names) < 30:
            raise UserError(
                f"{place} has {len(names)} files, fewer than the 30 that are drawn for train: unpack it again"
            )
        train = set(draws.choice(names, 30, replace=False).tolist())
        # The background holds a file that is no image, which takes part in the draw.
        files += [place / n for n in names if (n in train) == (split == "train") and n.endswith(".jpg")]
    keys = [f"{file.parent.name}/{file.name}" for file in files]
    return _published("caltech101", split, files, [file.parent.name.lower() for file in files], keys)


def cifar100(root: Path, split: str, download: bool) -> Published:
    """The binary version; a key is the number of the record."""
    fetch.require_split("cifar100", split)
    dataset = CIFAR100(root, download)[1](split)
    return Published(dataset, _numbers(len(dataset)))


def dtd(root: Path, split: str, download: bool) -> Published:
    """The first of the ten official partitions."""
    folder = fetch.locate("dtd", split, root, download, "DTD")
    short = {"train": "train", "validation": "val", "test": "test"}[split]
    listed = folder / "labels" / f"{short}1.txt"
    keys = _lines(listed)
    if wrong := [key for key in keys if key.count("/") != 1]:
        raise UserError(f"{listed} has the line {wrong[0]!r}, which is not CLASS/IMAGE.jpg: fetch it again")
    files = [folder / "images" / key for key in keys]
    return _published("dtd", split, files, [key.split("/")[0] for key in keys], keys, listed)


def flowers102(root: Path, split: str, download: bool) -> Published:
    """The official splits of setid.mat; of 8,189 images, most are test."""
    folder = fetch.locate("flowers102", split, root, download, "Flowers102")
    listed, labeled = folder / "setid.mat", folder / "imagelabels.mat"
    part = {"train": "trnid", "validation": "valid", "test": "tstid"}[split]
    numbers, labels = read_mat(listed, part)[0].ravel().astype(int), read_mat(labeled, "labels")[0].ravel()
    if not numbers.size or numbers.min() < 1 or numbers.max() > len(labels):
        raise UserError(f"{listed} names images that {labeled}, with {len(labels)}, has no label of: fetch both again")
    keys = [f"image_{number:05d}.jpg" for number in numbers]
    label_of = labels[numbers - 1].astype(np.int64) - 1
    if label_of.min() < 0 or label_of.max() >= len(FLOWERS):
        raise UserError(f"{labeled} has labels beyond 1 to {len(FLOWERS)}: fetch it again")
    names = [FLOWERS[label] for label in label_of]
    return _published("flowers102", split, [folder / "jpg" / key for key in keys], names, keys, listed, FLOWERS)


def pets(root: Path, split: str, download: bool) -> Published:
    """The official splits; TFDS calls trainval "train"."""
    folder = fetch.locate("pets", split, root, download, "OxfordIIITPet")
    listed = folder / "annotations" / {"train": "trainval.txt", "test": "test.txt"}[split]
    rows = [line.split() for line in _lines(listed)]
    if wrong := [row for row in rows if len(row) != 4 or not row[1].isdecimal() or len(row[1]) > 9]:
        raise UserError(f"{listed} has the line {' '.join(wrong[0])!r}, which is not NAME CLASS SPECIES BREED")
    breeds = {int(label): name.rpartition("_")[0] for name, label, *_ in rows}
    names = [name.rpartition("_")[0] for name, *_ in rows]
    if sorted(breeds) != list(range(1, 38)) or [breeds[int(label)] for _, label, *_ in rows] != names:
        raise UserError(f"{listed} does not give each of 37 breeds a number of its own from 1 to 37: fetch it again")
    keys = [f"{name}.jpg" for name, *_ in rows]
    classes = tuple(breeds[label] for label in sorted(breeds))
    return _published("pets", split, [folder / "images" / key for key in keys], names, keys, listed, classes)


def sun397(root: Path, split: str, download: bool) -> Published:
    """TFDS's own random split, 70 / 10 / 20 %, whose lists of images are no part of the set: they are fetched too.

    Deviation: the images are the originals, where TFDS scales them down to 120,000 pixels.
    """
    folder = fetch.locate("sun397", split, root, download, "SUN397")
    short, md5 = SUN397_LISTS[split]
    file = f"sun397_tfds_{short}.txt"
    places = [folder, root]
    listed = next((place / file for place in places if (place / file).is_file()), None)
    if not listed:
        fetch.require_download("sun397", f"TFDS's list of the split, {SUN397_URL}{file}", places, download)
        fetch.download_file([f"{SUN397_URL}{file}"], root, f"md5:{md5}")
        listed = root / file
    keys = _lines(listed)  # "/a/apartment_building/outdoor/sun_aaoljtcmbdcmpcfb.jpg"
    classes = tuple(line[3:] for line in _lines(folder / "ClassName.txt"))
    files = [folder / key[1:] for key in keys]
    return _published("sun397", split, files, [key[3:].rpartition("/")[0] for key in keys], keys, listed, classes)


def svhn(root: Path, split: str, download: bool) -> Published:
    """The cropped digits of 32 x 32; a key is the number of the image."""
    fetch.require_split("svhn", split)
    file = f"{split}_32x32.mat"
    files = {f"http://ufldl.stanford.edu/housenumbers/{file}": f"md5:{SVHN_MD5[split]}"}
    folder = fetch.locate("svhn", split, root, download, files, [file])
    pixels, labels = read_svhn(folder / file)
    return _in_memory("svhn", split, tuple("0123456789"), pixels, labels, _numbers(len(labels)))


# -------------------------------------------------------------------------------------------- specialized


def patch_camelyon(root: Path, split: str, download: bool) -> Published:
    """Patches of 96 x 96 with tumor tissue in their middle, or without."""
    fetch.require_split("patch_camelyon", split)
    short = {"train": "train", "validation": "valid", "test": "test"}[split]
    files = {what: f"camelyonpatch_level_2_split_{short}_{what}.h5" for what in ("x", "y")}
    packed = {
        f"https://zenodo.org/record/2546921/files/{file}.gz": f"md5:{PATCH_CAMELYON_MD5[f'{short}_{what}']}"
        for what, file in files.items()
    }
    needed = [f"{file} or {file}.gz" for file in files.values()]
    folder = fetch.locate("patch_camelyon", split, root, download, packed, needed)
    pixels, labels = (read_h5(folder / file, what) for what, file in files.items())
    if pixels.shape[1:] != (96, 96, 3) or pixels.dtype != np.uint8 or labels.shape != (len(pixels), 1, 1, 1):
        raise UserError(f"{folder / files['x']} is not PatchCamelyon's: x {pixels.shape}, y {labels.shape}")
    keys = [f"{short}_{i}" for i in range(len(pixels))]
    return _in_memory("patch_camelyon", split, ("no tumor", "tumor"), pixels, labels.ravel().astype(np.int64), keys)


def eurosat(root: Path, split: str, download: bool) -> Published:
    """The RGB version; no split is published."""
    return _by_class("eurosat", split, fetch.locate("eurosat", split, root, download, "EuroSAT"))


def resisc45(root: Path, split: str, download: bool) -> Published:
    """No split is published."""
    return _by_class("resisc45", split, fetch.locate("resisc45", split, root, download))


def _by_class(name: str, split: str, folder: Path) -> Published:
    files = [file for place in _class_folders(name, folder) for file in sorted(place.glob("*.jpg"))]
    names = [file.parent.name for file in files]
    keys = [f"{file.parent.name}_{file.name}" for file in files]
    return _published(name, split, files, names, keys)


def diabetic_retinopathy(root: Path, split: str, download: bool) -> Published:
    """Stages 0 to 4; the images are prepared as `retinopathy.py` says, each when it is first read.

    A folder btgraham-300/ beside train/ and test/, or instead of them, holds the prepared ones. validation and test
    are the public and the private part of the competition's test.
    """
    file, place = ("trainLabels.csv", "train") if split == "train" else ("retinopathy_solution.csv", "test")
    needed = [file, f"{place} or {PREPARED}/{place}"]
    folder = fetch.locate("diabetic_retinopathy", split, root, download, needed=needed)
    wanted = {"train": None, "validation": "Public", "test": "Private"}[split]
    with (folder / file).open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if wanted is None or row.get("Usage") == wanted]
    if not rows or any(not row.get("image") or row.get("level") not in set("01234") for row in rows):
        columns = "image,level" if split == "train" else "image,level,Usage"
        raise UserError(f"{folder / file} is not a table of {columns} with levels 0 to 4: fetch it again")
    keys = [row["image"] for row in rows]
    originals = [folder / place / f"{key}.jpeg" for key in keys]
    prepared = [folder / PREPARED / place / f"{key}.jpeg" for key in keys]
    there = [new if new.is_file() else old for new, old in zip(prepared, originals, strict=True)]
    stages = tuple("01234")
    made = _published("diabetic_retinopathy", split, there, [row["level"] for row in rows], keys, folder / file, stages)
    entries = [EyeEntry(str(path)) for path in prepared]
    return Published(dataclasses.replace(made.dataset, entries=entries), keys)


# -------------------------------------------------------------------------------------------------- parts


def _class_folders(name: str, folder: Path) -> list[Path]:
    found = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if len(found) != fetch.SOURCES[name].classes:
        raise UserError(
            f"{folder} has {len(found)} class folders, not the {fetch.SOURCES[name].classes} of {name}: unpack it again"
        )
    return found


def _lines(path: Path) -> list[str]:
    try:
        lines = read_regular(path, MAX_LIST_BYTES).decode().splitlines()
        return [line.strip() for line in lines if line.strip()]
    except ValueError as error:  # bytes that are no text
        raise UserError(f"{path} is damaged ({error}): fetch it again") from error


def _numbers(count: int) -> list[str]:
    return [str(i) for i in range(count)]


def _published(
    name: str,
    split: str,
    files: Sequence[Path],
    names: Sequence[str],
    keys: list[str],
    listed: Path | None = None,
    classes: tuple[str, ...] = (),
) -> Published:
    """Images in files, each with the name of its class; the classes are the sorted names where none are given.

    listed: the file that names the images.
    """
    classes = classes or tuple(sorted(set(names)))
    label = {name: i for i, name in enumerate(classes)}
    if len(classes) != fetch.SOURCES[name].classes or not label.keys() >= set(names):
        strange = sorted(set(names) - label.keys())[:3]
        raise UserError(
            f"{listed or name} has {len(classes)} classes{f' and others ({strange})' if strange else ''}, not the "
            f"{fetch.SOURCES[name].classes} of {name}: fetch it again"
        )
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(
            f"{name} lacks {len(missing)} of the {len(files)} images that {listed} names, first {missing[0]}: unpack "
            f"its images again (from {fetch.SOURCES[name].page})"
        )
    labels = np.array([label[name] for name in names], np.int64)
    return _counted(Published(Dataset(name, split, classes, labels, entries=[Entry(str(f)) for f in files]), keys))


def _in_memory(
    name: str, split: str, classes: tuple[str, ...], pixels: np.ndarray, labels: np.ndarray, keys: list[str]
) -> Published:
    return _counted(Published(Dataset(name, split, classes, labels, pixels), keys))


def _counted(published: Published) -> Published:
    """Warn of a set that is not whole: the benchmark's order is that of all its images."""
    dataset = published.dataset
    if len(dataset) != (size := fetch.SOURCES[dataset.name].sizes[dataset.split]):
        logger.warning(
            "%s: %s has %d images here, and %d as published", dataset.name, dataset.split, len(dataset), size
        )
    return published
