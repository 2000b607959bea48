"""VTAB-1k: 19 tasks of 1,000 training examples, in the benchmark's splits.

The benchmark takes its splits from TensorFlow Datasets (TFDS): `train[:800]`, the first 200 of a validation part, the
test part whole. A split's examples are sorted by the MD5 sum of the split's name and the key that the data set's
builder gives the example (`benchmark_order`), so they are computed here without TensorFlow; docs/paper/answers.md
says with what they were compared.
"""

import contextlib
import csv
import dataclasses
import functools
import hashlib
import logging
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from vitlab.data.dataset import Dataset, SplitReader, join, with_image_names
from vitlab.data.decode import Entry
from vitlab.data.downloads import cache_folder
from vitlab.data.folder import SPLIT_OF
from vitlab.data.vtab import readers, structured
from vitlab.data.vtab.sources import SOURCES, Source, locate
from vitlab.errors import UserError
from vitlab.settings import nearest

logger = logging.getLogger(__name__)

TRAIN, VAL = 800, 200
GROUPS = ("natural", "specialized", "structured")
LISTS = {"train": "train800.txt", "val": "val200.txt", "trainval": "train800val200.txt", "test": "test.txt"}
COUNTS = {"train": TRAIN, "val": VAL, "trainval": TRAIN + VAL}
READ_ERRORS = (ArithmeticError, AttributeError, LookupError, OSError, EOFError, TypeError, ValueError, RuntimeError)
READ_ERRORS += (csv.Error, zipfile.BadZipFile, zlib.error)
"""What reading a corrupt file may raise."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One task. `val` and `test` are the TFDS split and the index in it where that part starts; test takes the rest."""

    title: str  # the benchmark's name for it
    group: str
    classes: int
    source: str  # the data set of its images, in `SOURCES`
    folder: str  # the name of its folder of lists, which PyTorch's users have
    val: tuple[str, int]
    test: tuple[str, int] = ("test", 0)

    @property
    def origin(self) -> Source:
        return SOURCES[self.source]

    @property
    def test_size(self) -> int:
        """Images of the test part."""
        return self.origin.sizes[self.test[0]] - self.test[1]


_SPRITES = (("train", 589_824), ("train", 663_552))
_HALVES = (("test", 0), ("test", 12_150))  # SmallNORB's val and test parts are the halves of the official test set
TASKS: dict[str, Task] = {
    "caltech101": Task("Caltech101", "natural", 102, "caltech101", "caltech101", ("train", 2_754)),
    "cifar100": Task("CIFAR-100", "natural", 100, "cifar100", "cifar", ("train", 45_000)),
    "dtd": Task("DTD", "natural", 47, "dtd", "dtd", ("validation", 0)),
    "flowers102": Task("Flowers102", "natural", 102, "flowers102", "oxford_flowers102", ("validation", 0)),
    "pets": Task("Pets", "natural", 37, "pets", "oxford_iiit_pet", ("train", 2_944)),
    "sun397": Task("Sun397", "natural", 397, "sun397", "sun397", ("validation", 0)),
    "svhn": Task("SVHN", "natural", 10, "svhn", "svhn", ("train", 65_931)),
    "patch_camelyon": Task("Camelyon", "specialized", 2, "patch_camelyon", "patch_camelyon", ("validation", 0)),
    "eurosat": Task("EuroSAT", "specialized", 10, "eurosat", "eurosat", ("train", 16_200), ("train", 21_600)),
    "resisc45": Task("Resisc45", "specialized", 45, "resisc45", "resisc45", ("train", 18_900), ("train", 25_200)),
    "diabetic_retinopathy": Task(
        "Retinopathy", "specialized", 5, "diabetic_retinopathy", "diabetic_retinopathy", ("validation", 0)
    ),
    "clevr_count": Task("Clevr-Count", "structured", 8, "clevr", "clevr_count", ("train", 63_000), ("validation", 0)),
    "clevr_distance": Task("Clevr-Dist", "structured", 6, "clevr", "clevr_dist", ("train", 63_000), ("validation", 0)),
    "dmlab": Task("DMLab", "structured", 6, "dmlab", "dmlab", ("validation", 0)),
    "dsprites_location": Task("dSpr-Loc", "structured", 16, "dsprites", "dsprites_loc", *_SPRITES),
    "dsprites_orientation": Task("dSpr-Ori", "structured", 16, "dsprites", "dsprites_ori", *_SPRITES),
    "kitti_distance": Task("KITTI-Dist", "structured", 4, "kitti", "kitti", ("validation", 0)),
    "smallnorb_azimuth": Task("sNORB-Azim", "structured", 18, "smallnorb", "smallnorb_azi", *_HALVES),
    "smallnorb_elevation": Task("sNORB-Elev", "structured", 9, "smallnorb", "smallnorb_ele", *_HALVES),
}


def task_named(name: str) -> Task:
    """The row of `TASKS`. Raises UserError that names the nearest."""
    if name not in TASKS:
        raise UserError(f"unknown VTAB task {name!r}; {nearest(name, TASKS)}. `vitlab list vtab` shows all.")
    return TASKS[name]


def load_task(name: str, split: str, root: Path, download: bool = True) -> Dataset:
    """A part of a task: "train" (800), "val" (200), "trainval" (both) or "test" (all of it).

    root: the folder that holds the data sets as their authors publish them, or, with precedence, the lists and images
    that PyTorch's users have: ROOT/{folder}/{train800,val200,train800val200,test}.txt with lines `images/x.jpg 3`.
    Raises UserError where data is missing or is not the published one.
    """
    task = task_named(name)
    if split not in LISTS:
        raise UserError(f"the split must be one of {', '.join(LISTS)}, not {split!r}")
    if folder := _find_lists(task, root):
        logger.warning("vtab:%s (%s) is read from the lists in %s, whose splits are used as is", name, split, folder)
        return _read_list(name, task, split, folder)
    logger.info("vtab:%s (%s) is read from the published data set in %s", name, split, root)
    slices = {"train": ("train", 0, TRAIN), "val": (*task.val, VAL), "test": (*task.test, task.test_size)}
    wanted: dict[str, list[slice]] = {}  # of each split of TFDS, which is read once
    for part in ("train", "val") if split == "trainval" else (split,):
        tfds_split, start, count = slices[part]
        wanted.setdefault(tfds_split, []).append(slice(start, start + count))
    datasets = []
    for tfds_split, ranges in wanted.items():
        published = read_published(name, root, tfds_split, download)
        size = task.origin.sizes[tfds_split]
        if len(published.keys) != size or len(set(published.keys)) != size:
            raise UserError(  # the order of other images would be another split
                f"vtab:{name}: the {tfds_split} part has {len(published.keys)} images and the published one {size}; "
                f"get it again, {task.origin.how()}"
            )
        order = benchmark_order(published.keys, tfds_split)
        with _reporting_corrupt_files(name, task.origin, root):
            chosen = np.concatenate([order[indices] for indices in ranges])
            datasets.append(with_image_names(published.take(chosen), f"vtab:{name}/{tfds_split}", chosen))
    return dataclasses.replace(functools.reduce(join, datasets), name=f"vtab:{name}", split=split)


def available(name: str, root: Path) -> str:
    """What `load_task` would read without a download: "lists", "published", or "-" for nothing."""
    task = task_named(name)
    if _find_lists(task, root):
        return "lists"
    try:
        for part in {"train", task.val[0], task.test[0]}:
            locate(task.source, part, root, download=False)
    except UserError:
        return "-"
    return "published"


def benchmark_order(keys: Sequence[str], salt: str) -> np.ndarray:
    """Where TFDS puts the examples of a split: `keys[order[0]]` comes first. int64 [n]. salt: the split's name in TFDS
    ("train", "validation", "test"). A counter's key is its decimal digits."""
    start = hashlib.md5(salt.encode())
    sums = []
    for key in keys:
        md5 = start.copy()
        md5.update(key.replace("\\", "/").encode())
        sums.append(md5.digest())
    return np.array(sorted(range(len(keys)), key=sums.__getitem__), np.int64)


def published_splits(name: str, root: Path | None, download: bool) -> SplitReader:
    """A data set of `SOURCES` that is one by name too; TFDS's "validation" is "val"."""
    home = root or cache_folder()
    published = {SPLIT_OF[split]: split for split in SOURCES[name].sizes}

    def read(split: str) -> Dataset:
        dataset = read_published(name, home, published[split], download).dataset
        return dataclasses.replace(dataset, split=split, folder=str(home))

    return list(published), read


def read_published(name: str, root: Path, split: str, download: bool) -> readers.Published:
    """A split of TFDS of the published data set of a task, or of `SOURCES`. Raises UserError where it is missing,
    corrupt or another one."""
    task = TASKS.get(name)
    source_name = task.source if task else name
    source = SOURCES[source_name]
    folder = locate(source_name, split, root, download)
    read = getattr(readers, name, None) or getattr(structured, name)
    with _reporting_corrupt_files(name, source, folder):
        published = read(folder, split)
        _require_consistent(published, task.classes if task else source.classes)
    published = published._replace(dataset=dataclasses.replace(published.dataset, name=name, split=split))
    if len(published.keys) != (size := source.sizes[split]):
        logger.warning("%s: %s has %d images here, and %d as published", name, split, len(published.keys), size)
    return published


@contextlib.contextmanager
def _reporting_corrupt_files(name: str, source: Source, folder: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except READ_ERRORS as error:
        raise UserError(
            f"{folder} does not hold {name} as published ({type(error).__name__}: {error}): get it again, "
            f"{source.how()}"
        ) from error


def _require_consistent(published: readers.Published, num_classes: int | None) -> None:
    """Raises ValueError where classes, labels, keys and images do not fit together."""
    dataset, keys, read_pixels = published
    if len(dataset.classes) != num_classes:
        raise ValueError(f"{len(dataset.classes)} classes, expected {num_classes}")
    images = keys if read_pixels else dataset.entries if dataset.pixels is None else dataset.pixels
    if not len(dataset) == len(keys) == len(images):
        raise ValueError(f"{len(dataset)} labels of {len(images)} images")
    if dataset.labels.min() < 0 or dataset.labels.max() >= len(dataset.classes):
        raise ValueError(f"labels from {dataset.labels.min()} to {dataset.labels.max()}")
    files = {entry.file for entry in dataset.entries if type(entry) is Entry}  # others are made when they are read
    if missing := sorted(file for file in files if not Path(file).is_file()):
        raise ValueError(f"{len(missing)} of the {len(files)} files are missing, first {missing[0]}")


def _find_lists(task: Task, root: Path) -> Path | None:
    """The folder below `root` that holds all of the task's lists."""
    folders = (root / task.folder, root / "vtab-1k" / task.folder)
    return next((folder for folder in folders if all((folder / file).is_file() for file in LISTS.values())), None)


def _read_list(name: str, task: Task, split: str, folder: Path) -> Dataset:
    path = folder / LISTS[split]
    label_of = {str(number): number for number in range(task.classes)}
    labels, entries = [], []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        image, _, label = line.rpartition(" ")
        if not image or label not in label_of:
            raise UserError(f"{path}, line {number}: {line!r} is not an image and a label below {task.classes}")
        labels.append(label_of[label])
        entries.append(Entry(str(folder / image)))
    if len(labels) != (count := COUNTS.get(split, len(labels))):
        raise UserError(f"{path} has {len(labels)} lines, not the {count} of VTAB-1k: download it again")
    if split == "test" and len(labels) != task.test_size:
        text = "%s has %d images and the benchmark's test part %d: accuracies do not compare with others'"
        logger.warning(text, path, len(labels), task.test_size)
    if entries and not Path(entries[0].file).is_file():
        raise UserError(f"{path} lists {entries[0].file}, which is missing: get the images as well")
    return Dataset(f"vtab:{name}", split, tuple(label_of), np.array(labels, np.int64), entries=entries)
