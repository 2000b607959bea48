"""ImageNet, and the test sets of its 1,000 classes: ReaL labels, ImageNet-V2, ObjectNet (Tables 2 and 5, App. D.9).

Class c is the c-th WordNet id in sorted order, as in every published head of 1,000 outputs. None of these sets can be
downloaded without an account or consent to its terms, so each is read from a folder as its authors publish it.
"""

import collections
import dataclasses
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitlab.data.contents import images_below, subfolders
from vitlab.data.dataset import Dataset, Labels, SplitReader
from vitlab.data.decode import Entry
from vitlab.data.folder import read_class_folders
from vitlab.data.registry import DATASETS
from vitlab.errors import UserError
from vitlab.io import read_json

logger = logging.getLogger(__name__)

CLASSES = 1000
VAL_IMAGES = 50_000
SHARED_CLASSES = 113  # of ObjectNet's 313
EDGE = 2  # pixels at each side of an ObjectNet image that are red, a mark against training on these images by accident
NUMBERS = tuple(map(str, range(CLASSES)))  # the class names of sets without names
_V2_FOLDERS = {
    "imagenet_v2": "imagenetv2-matched-frequency-format-val",
    "imagenet_v2_threshold": "imagenetv2-threshold0.7-format-val",
    "imagenet_v2_top": "imagenetv2-top-images-format-val",
}
_CLASS_LIST = "LOC_synset_mapping.txt"
_WNID = re.compile(r"n\d{8}")
_VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})(?:_n\d{8})?\.jpe?g", re.IGNORECASE)


def has_imagenet_classes(name: str) -> bool:
    """Whether the data set `name` is ImageNet or one of its test sets."""
    return name in DATASETS and DATASETS[name].reader.startswith("imagenet:")


def predicts_imagenet(classes: Sequence[str] | None, dataset: str | None) -> bool:
    """Whether the 1,000 outputs of a checkpoint are ImageNet's classes, in their order.

    classes: its names of the outputs; dataset: what it was trained on; both None if unknown, as for checkpoints of
    Google and others, which are assumed to be.
    """
    if dataset is None or has_imagenet_classes(dataset):
        return True
    names = list(classes or ())
    return names != [] and names == sorted(names) and all(re.fullmatch(r"n\d{8}", name) for name in names)


def _find_root(name: str, root: Path | None, below: tuple[str, ...], content: tuple[str, ...]) -> Path:
    """`root`, or the first of its sub-folders `below`, that has any of `content`."""
    if root is None:
        raise UserError(f"{name} is not downloaded: give the folder that holds it as the root. {_terms(name)}")
    homes = [root, *(root / folder for folder in below)]
    if home := next((home for home in homes if any((home / part).exists() for part in content)), None):
        return home
    raise UserError(f"{name} needs {' and '.join(content)}; looked in {', '.join(map(str, homes))}. {_terms(name)}")


def _terms(name: str) -> str:
    return f"It comes from {DATASETS[name].source} (license: {DATASETS[name].license})."


def _read_json(path: Path, kind: type) -> Any:
    content = read_json(path) if path.is_file() else None
    if not isinstance(content, kind):
        raise UserError(f"{path} must be a JSON {kind.__name__}, and is not, or is missing: unpack the whole set there")
    return content


def _with_full_size(dataset: Dataset, full_size: int) -> Dataset:
    """`dataset` with its full size, and a warning, if images are missing."""
    if len(dataset) == full_size:
        return dataset
    logger.warning("%s: %s of its %s test images are there", dataset.name, f"{len(dataset):,}", f"{full_size:,}")
    return dataclasses.replace(dataset, full_size=full_size)


def imagenet_splits(name: str, root: Path | None, download: bool, partial: bool = False) -> SplitReader:
    """ILSVRC 2012 as `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`; val is the test split, because it has the labels.

    CLASS is a WordNet id. A split is read, and has to be there, only when requested. partial: classes of val may be
    missing; `LOC_synset_mapping.txt` or train/ then gives the 1,000.
    """
    home = _find_root(name, root, ("imagenet", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC"), ("train", "val"))
    folders = {"train": home / "train", "test": home / "val"}

    def read(split: str) -> Dataset:
        wnids = _wnids(folders[split], home, partial and split == "test")
        dataset = read_class_folders(folders[split], name, split, wnids)
        return _with_full_size(dataset, VAL_IMAGES) if split == "test" else dataset

    return list(folders), read


def _wnids(folder: Path, home: Path, allow_missing: bool) -> tuple[str, ...]:
    """The 1,000 WordNet ids in sorted order; with `allow_missing` some may be missing in `folder`."""
    present = subfolders(folder)
    if len(present) != CLASSES and not (allow_missing and present):
        raise UserError(
            f"{folder} has {len(present)} class folders, named by WordNet id, and ImageNet 1,000: give --partial to "
            f"evaluate on a part of val, or folder:PATH for a part as another data set. {_terms('imagenet')}"
        )
    if invalid := [name for name in present if not _WNID.fullmatch(name)]:
        raise UserError(f"the class folder {folder / invalid[0]} is not named by a WordNet id, such as n01440764")
    if len(present) == CLASSES:
        return tuple(present)
    if (home / _CLASS_LIST).is_file():
        wnids = {line.partition(" ")[0] for line in (home / _CLASS_LIST).read_text(encoding="utf-8").splitlines()}
    else:
        wnids = set(subfolders(home / "train")) if (home / "train").is_dir() else set()
    if len(wnids) != CLASSES or not wnids.issuperset(present):
        raise UserError(
            f"which of a head's 1,000 outputs the classes of {folder} are is unknown: add {_CLASS_LIST} with 1,000 "
            f"lines `n01440764 tench, Tinca tinca`, or train/ with 1,000 class folders"
        )
    return tuple(sorted(wnids))


def real_splits(name: str, root: Path | None, download: bool, partial: bool = False) -> SplitReader:
    """ImageNet's val with the labels of "Are we done with ImageNet?": all that an image shows, or none.

    `real.json` has one list of classes for each image, in the order of the images' numbers. Images with an empty
    list are left out, and counted in `Dataset.left_out`. val/ may be flat or in folders, whose names do not matter.
    partial: images of val may be missing.
    """
    home = _find_root(name, root, ("imagenet",), ("real.json", "val"))

    def read(split: str) -> Dataset:
        labels = _read_json(home / "real.json", list)
        are_lists = len(labels) == VAL_IMAGES and all(isinstance(several, list) for several in labels)
        if not (are_lists and all(type(c) is int and 0 <= c < CLASSES for several in labels for c in several)):
            raise UserError(
                f"{home / 'real.json'} must hold {VAL_IMAGES:,} lists of class numbers (0 to {CLASSES - 1}) and does "
                f"not: download it again. {_terms(name)}"
            )
        images = _val_images(home / "val", partial)
        used = [number for number in images if labels[number]]
        left_out = len(images) - len(used)
        logger.info("%s: %d of %d images have no label and are left out", name, left_out, len(images))
        dataset = _with_alternatives(name, [(images[number], labels[number]) for number in used], left_out)
        return _with_full_size(dataset, sum(map(bool, labels)))

    return ["test"], read


def _with_alternatives(name: str, images: Sequence[tuple[Entry, list[int]]], left_out: int) -> Dataset:
    """The test split of images; any of an image's labels is right."""
    sets = Labels.of_lists([labels for _, labels in images])
    entries, labels = [entry for entry, _ in images], sets.first_labels
    dataset = Dataset(name, "test", NUMBERS, labels, entries=entries, left_out=left_out)
    return dataclasses.replace(dataset, label_sets=sets, labels_are_alternatives=True)


def _val_images(val: Path, allow_missing: bool) -> dict[int, Entry]:
    """Number, from 0, -> image: ILSVRC2012_val_00000001.JPEG, ... below `val`; all, or with `allow_missing` any."""
    paths = images_below(val)
    numbers = {int(match[1]): path for path in paths if (match := _VAL_IMAGE.fullmatch(path.rpartition("/")[2]))}
    missing = [number for number in range(1, VAL_IMAGES + 1) if number not in numbers]
    if missing and (not allow_missing or len(missing) == VAL_IMAGES):
        raise UserError(
            f"{len(missing):,} of {VAL_IMAGES:,} images are missing in {val}, first ILSVRC2012_val_{missing[0]:08}.JPEG"
            f" (labels go by these names). Give --partial to evaluate on those that are there. {_terms('imagenet')}"
        )
    return {number - 1: Entry(numbers[number]) for number in range(1, VAL_IMAGES + 1) if number in numbers}


def v2_splits(name: str, root: Path | None, download: bool) -> SplitReader:
    """One of ImageNet-V2's three draws, in folders named by the class number: 0, 1, ... 999 (10 comes after 9)."""
    home = _find_root(name, root, (_V2_FOLDERS[name],), ("0", "999"))

    def read(split: str) -> Dataset:
        if other := next((n for n, folder in _V2_FOLDERS.items() if folder == home.name and n != name), None):
            raise UserError(f"{home} is not {name} but {other}: evaluate on that")
        if wrong := sorted(set(subfolders(home)) ^ set(NUMBERS)):
            raise UserError(f"{home} must have the folders 0 to 999 and no others; wrong: {', '.join(wrong[:5])}")
        return read_class_folders(home, name, "test", NUMBERS)

    return ["test"], read


def objectnet_splits(name: str, root: Path | None, download: bool) -> SplitReader:
    """ObjectNet's images of the 113 classes that it shares with ImageNet, without their red edge.

    A prediction is right if it is any of the ImageNet classes that ObjectNet's files give to the image's class; the
    logits of all 1,000 classes take part. The images of other classes are counted in `Dataset.left_out`.
    """
    home = _find_root(name, root, ("objectnet-1.0",), ("images", "mappings"))

    def read(split: str) -> Dataset:
        classes = objectnet_classes(home / "mappings")
        images = {folder: images_below(home / "images" / folder) for folder in subfolders(home / "images")}
        if missing := [folder for folder in classes if not images.get(folder)]:
            raise UserError(
                f"{home / 'images'} has no images of {len(missing)} of {len(classes)} classes, first "
                f"{missing[0]!r}: unpack the whole archive. {_terms(name)}"
            )
        shared = [(Entry(p, edge=EDGE), labels) for folder, labels in sorted(classes.items()) for p in images[folder]]
        left_out = sum(map(len, images.values())) - len(shared)
        logger.info("%s: %d images of classes that are not ImageNet's are left out", name, left_out)
        return _with_alternatives(name, shared, left_out)

    return ["test"], read


def objectnet_classes(mappings: Path) -> dict[str, list[int]]:
    """Folder of images -> the ImageNet classes that it stands for, from the four files of ObjectNet's `mappings/`.

    folder_to_objectnet_label.json    folder -> ObjectNet's label: alarm_clock -> Alarm clock
    objectnet_to_imagenet_1k.json     label -> ImageNet's names, if it has any: analog clock; digital clock
    imagenet_to_label_2012_v2         a name in each line, counted from 0
    pytorch_to_imagenet_2012_id.json  class -> line
    """
    label_of = _read_json(mappings / "folder_to_objectnet_label.json", dict)
    names_of = _read_json(mappings / "objectnet_to_imagenet_1k.json", dict)
    line_of_class = _read_json(mappings / "pytorch_to_imagenet_2012_id.json", dict)
    path = mappings / "imagenet_to_label_2012_v2"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    classes_of_name: dict[str, list[int]] = collections.defaultdict(list)
    if sorted(line_of_class.values()) == list(range(CLASSES)) and len(lines) >= CLASSES:
        for number, line in line_of_class.items():
            classes_of_name[lines[line].strip()].append(int(number))
    classes_of_names = {
        folder: [classes_of_name[name.strip()] for name in names_of[label].split("; ")]
        for folder, label in label_of.items()
        if label in names_of
    }
    is_unique = all(len(same_name) == 1 for names in classes_of_names.values() for same_name in names)
    if len(classes_of_names) != SHARED_CLASSES or not is_unique:
        raise UserError(
            f"{mappings} does not map each of {SHARED_CLASSES} folders to classes of ImageNet: unpack it again. "
            f"{_terms('objectnet')}"
        )
    return {folder: [number for (number,) in names] for folder, names in classes_of_names.items()}
