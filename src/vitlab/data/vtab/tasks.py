"""VTAB-1k: 19 tasks of 1,000 training examples, in the benchmark's own splits.

The benchmark takes its splits from TensorFlow Datasets (TFDS): `train[:800]`, the first 200 of a validation part, the
test part whole. What comes first does not depend on the machine: a split's examples are sorted by the MD5 sum of the
split's name and the key that the data set's builder gives the example (`benchmark_order`), whatever the number of
files, and none of these builders turns that off. So the splits are computed here without TensorFlow.

How sure that is. Rule and keys were read in the source of TFDS 4.9, and compared with what others have published:
the rule gives the first 16 examples of `cifar10` as tutorials print them; and the lists of file names that VPT's
authors wrote out of TFDS (2022) agree in every name compared, 12 to 89 a task: CIFAR-100, CLEVR, EuroSAT and Resisc45
(train and val), PatchCamelyon and SUN397 (train). Where the keys are not known without the data (DTD, Pets, DMLab,
Retinopathy) the names compared have sums as low as they must. For SVHN, dSprites and SmallNORB, whose keys are plain
counters, nothing to compare with was found, nor for the order of Caltech101, Flowers102 and KITTI.

Two data sets had other splits in the paper's time: TFDS 4.0 (2020) hashed the whole paths of EuroSAT's and Resisc45's
images, so that each machine had an order of its own. KITTI was split anew in November 2020 (711 test images, 632
or 634 before): older numbers do not compare.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitlab.data.dataset import Dataset, join
from vitlab.data.decode import Entry
from vitlab.data.vtab.sources import SOURCES, Source
from vitlab.errors import UserError
from vitlab.settings import nearest

if TYPE_CHECKING:
    from vitlab.data.vtab.readers import Published

logger = logging.getLogger(__name__)

TRAIN, VAL = 800, 200
GROUPS = ("natural", "specialized", "structured")
LISTS = {"train": "train800.txt", "val": "val200.txt", "trainval": "train800val200.txt", "test": "test.txt"}
COUNTS = {"train": TRAIN, "val": VAL, "trainval": TRAIN + VAL}


@dataclasses.dataclass(frozen=True)
class Task:
    """One task. `val` and `test` say in which TFDS split that part starts, and where; test runs to the split's end.

    csv: the benchmark's name for it. folder: what PyTorch's users call it. source: the data set of its images.
    """

    csv: str
    group: str
    classes: int
    source: str
    folder: str
    val: tuple[str, int]
    test: tuple[str, int] = ("test", 0)

    @property
    def origin(self) -> Source:
        return SOURCES[self.source]

    @property
    def test_size(self) -> int:
        """Images of the test part."""
        return self.origin.sizes[self.test[0]] - self.test[1]

    def how(self) -> str:
        """How its data is obtained, in a line."""
        ways = {"automatic": "downloaded when needed", "by hand": "by hand", "license": "by hand, with consent"}
        return f"{ways[self.origin.access]}, from {self.origin.page}; license: {self.origin.license}"


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
    "dsprites_location": Task(
        "dSpr-Loc", "structured", 16, "dsprites", "dsprites_loc", ("train", 589_824), ("train", 663_552)
    ),
    "dsprites_orientation": Task(
        "dSpr-Ori", "structured", 16, "dsprites", "dsprites_ori", ("train", 589_824), ("train", 663_552)
    ),
    "kitti_distance": Task("KITTI-Dist", "structured", 4, "kitti", "kitti", ("validation", 0)),
    # SmallNORB's validation part is the first half of the official test set, its test part the second.
    "smallnorb_azimuth": Task(
        "sNORB-Azim", "structured", 18, "smallnorb", "smallnorb_azi", ("test", 0), ("test", 12_150)
    ),
    "smallnorb_elevation": Task(
        "sNORB-Elev", "structured", 9, "smallnorb", "smallnorb_ele", ("test", 0), ("test", 12_150)
    ),
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
    Where one of these lists is missing, a published data set has precedence.
    Raises UserError where data is missing or is not the published one.
    """
    task = task_named(name)
    if split not in LISTS:
        raise UserError(f"the split must be one of {', '.join(LISTS)}, not {split!r}")
    folder, complete = _find_lists(task, root)
    if folder and not complete:
        with contextlib.suppress(UserError):  # a stray list beside the published data set does not hide it
            return _from_published(name, task, split, root, download=False)
    if folder:
        logger.warning(
            "vtab:%s (%s) is read from the lists in %s, whose splits are taken as they are", name, split, folder
        )
        return _from_list(name, task, split, folder)
    logger.info("vtab:%s (%s) is read from the published data set in %s", name, split, root)
    return _from_published(name, task, split, root, download)


def found(name: str, root: Path) -> str:
    """What `load_task` would read without a download: "lists", "published", or "-" for nothing."""
    task = task_named(name)
    folder, complete = _find_lists(task, root)
    if complete:
        return "lists"
    try:
        _from_published(name, task, "train", root, download=False)
    except ValueError:
        return "lists" if folder else "-"
    return "published"


# ---------------------------------------------------------------------------------------------------- lists


def _find_lists(task: Task, root: Path) -> tuple[Path | None, bool]:
    """Where the task's lists lie below `root`, if they do, and whether all do."""
    for folder in (root / task.folder, root / "vtab-1k" / task.folder):
        present = [(folder / file).is_file() for file in LISTS.values()]
        if any(present):
            return folder, all(present)
    return None, False


def _from_list(name: str, task: Task, split: str, folder: Path) -> Dataset:
    path = folder / LISTS[split]
    labels, entries = _read_list(path, task.classes)
    count = COUNTS.get(split)
    if count and len(labels) != count:
        raise UserError(f"{path} has {len(labels)} lines, not the {count} of VTAB-1k: download it again")
    if split == "test" and len(labels) != (size := task.test_size):
        text = "%s has %d images and the benchmark's test part %d: accuracies do not compare with others'"
        logger.warning(text, path, len(labels), size)
    classes = tuple(str(number) for number in range(task.classes))
    return Dataset(f"vtab:{name}", split, classes, labels, entries=entries)


def _read_list(path: Path, classes: int) -> tuple[np.ndarray, list[Entry]]:
    if not path.is_file():
        raise UserError(f"{path} is missing: a task's folder needs {', '.join(LISTS.values())} and its images")
    labels, entries = [], []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        image, _, label = line.rpartition(" ")
        if not image or not label.isdecimal() or len(label) > 9 or int(label) >= classes:
            raise UserError(f"{path}, line {number}: {line!r} is not an image and a label below {classes}")
        labels.append(int(label))
        entries.append(Entry(str(path.parent / image)))
    if entries and not Path(entries[0].file).is_file():
        raise UserError(f"{path} lists {entries[0].file}, which is missing: get the images as well")
    return np.array(labels, np.int64), entries


# -------------------------------------------------------------------------------------- published data sets


def _from_published(name: str, task: Task, split: str, root: Path, download: bool) -> Dataset:
    @functools.cache
    def read(part: str) -> "Published":
        return _checked(name, task, part, _reader(name, task)(root, part, download))

    def head(part: str, start: int, count: int, kind: str) -> Dataset:
        """`count` images from `start` on in TFDS's order: by the stored keys where there are some."""
        keys = read(part).keys
        if task.source not in SPLITS_SHA256:
            return read(part).dataset.take(benchmark_order(keys, part)[start : start + count])
        position = {key: i for i, key in enumerate(keys)}
        wanted = stored_splits(task.source)[kind]
        if missing := [key for key in wanted if key not in position]:
            raise UserError(f"vtab:{name}: {root} lacks the {part} image {missing[0]!r}; get the data set again")
        return read(part).dataset.take(np.array([position[key] for key in wanted], np.int64))

    if split == "test":
        part, start = task.test
        dataset = read(part).dataset.take(benchmark_order(read(part).keys, part)[start:])
    else:
        heads = {"train": ("train", 0, TRAIN, "train800"), "val": (*task.val, VAL, "val200")}
        names = ("train", "val") if split == "trainval" else (split,)
        dataset = functools.reduce(join, (head(*heads[name]) for name in names))
    return dataclasses.replace(dataset, name=f"vtab:{name}", split=split)


def _reader(name: str, task: Task) -> "Callable[[Path, str, bool], Published]":
    """The function of the task's name that reads a TFDS split of the published data set."""
    from vitlab.data.vtab import readers, structured  # slow to import

    return getattr(structured if task.group == "structured" else readers, name)


def _checked(name: str, task: Task, part: str, published: "Published") -> "Published":
    """Refuses a data set that is not the whole published one: another number of images would be another split."""
    size = task.origin.sizes[part]
    if len(published.keys) != size or len(set(published.keys)) != size:
        raise UserError(
            f"vtab:{name}: the {part} part has {len(published.keys)} images and the published one {size}; get it "
            f"again, {task.how()}"
        )
    assert len(published.dataset) == size, f"{name}: {len(published.dataset)} images for {size} keys"
    assert len(published.dataset.classes) == task.classes, f"{name}: {len(published.dataset.classes)} classes"
    return published


# --------------------------------------------------------------------------------------------------- splits


def benchmark_order(keys: Sequence[str], salt: str) -> np.ndarray:
    """Where TFDS puts the examples of a split: `keys[order[0]]` comes first. int64 [n].

    salt: the split's name in TFDS ("train", "validation", "test"). A counter's key is its decimal digits.
    """
    start = hashlib.md5(salt.encode())
    sums = []
    for key in keys:
        md5 = start.copy()
        md5.update(key.replace("\\", "/").encode())
        sums.append(md5.digest())
    return np.array(sorted(range(len(keys)), key=sums.__getitem__), np.int64)


# The SHA-256 sums of splits/{source}.json.
SPLITS_SHA256 = {
    "cifar100": "04ebb3c962eead2e060a559b94efab27ac2382b759139d8593251480e7f51184",
    "svhn": "8df54b113d476219c61c1c53764ae5f39192763bfd05cf12c5805d88c7ab729b",
    "patch_camelyon": "b3d770050c18924b8f7976953f2344c42a2d7b2ae679837a834b3ada7e8d700d",
    "eurosat": "053cad9115ddb1be306ff9c384884a691335ee9a7fce4f03ece25ffcc4994498",
    "resisc45": "65e52bf38d4d72109eda07e7456b374d0e73a51c75247d3bf3697f7118db8aab",
    "clevr": "0638706a226d62903c1a33f800536412921002262ed97f70894fd315a19312df",
    "dsprites": "368b8abc31a71765ead5f28b304f0294fcf1107519e9eb635ded22a04a4c8690",
    "smallnorb": "47cdd51e6ebcbadc2fa60213522132ca333efadd8373b8cb6d0a8f51390c93f3",
}


def stored_splits(source: str, folder: Path = Path(__file__).parent / "splits") -> dict[str, list[str]]:
    """The keys of "train800" and of "val200" in their order. Raises UserError for a file that was changed."""
    path = folder / f"{source}.json"
    data = path.read_bytes()
    if (digest := hashlib.sha256(data).hexdigest()) != SPLITS_SHA256[source]:
        raise UserError(f"{path} has the SHA-256 {digest}, expected {SPLITS_SHA256[source]}: install vitlab again")
    return json.loads(data)
