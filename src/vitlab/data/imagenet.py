"""ImageNet, and the sets that judge its 1,000 classes: ReaL labels, ImageNet-V2, ObjectNet (Tables 2 and 5, App. D.9).

Class c is the c-th WordNet id in sorted order, as in every published head of 1,000 outputs. None of these sets can be
fetched without an account or a word of consent, so each is read from the folder in which its owner keeps it.
"""

import collections
import dataclasses
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.data.dataset import Dataset, Labels, Splits, read_class_folders
from vitlab.data.decode import IMAGE_SUFFIXES, Entry
from vitlab.errors import UserError

logger = logging.getLogger(__name__)

CLASSES = 1000
VAL_IMAGES = 50_000
SHARED_CLASSES = 113  # of ObjectNet's 313
BORDER = 2  # pixels at each side of an ObjectNet image that are red, so that nobody trains on it unawares
NUMBERS = tuple(map(str, range(CLASSES)))  # what the classes are called where a set has no names for them

TEST_RESIZE = {"objectnet": (512, 480)}
"""Data set -> (shorter side, center) in pixels, where a set is judged in a way of its own: BiT's, which App. D.9
follows. Other sizes of the center keep the proportion."""


class Origin(NamedTuple):
    """Where a set comes from, and on what terms."""

    source: str
    license: str


_V2 = "github.com/modestyachts/ImageNetV2: a folder with imagenetv2-{}-format-val/0 ... 999"
ORIGINS = {
    "imagenet": Origin(
        "image-net.org (ILSVRC 2012): a folder with train/ and val/, in each 1,000 folders named n01440764 ...",
        "research and education only; registration",
    ),
    "imagenet_real": Origin(
        "github.com/google-research/reassessed-imagenet: real.json beside ImageNet's val/",
        "labels Apache-2.0; images as ImageNet",
    ),
    "imagenet_v2": Origin(_V2.format("matched-frequency"), "labels MIT; images of Flickr's users"),
    "imagenet_v2_threshold": Origin(_V2.format("threshold0.7"), "labels MIT; images of Flickr's users"),
    "imagenet_v2_top": Origin(_V2.format("top-images"), "labels MIT; images of Flickr's users"),
    "objectnet": Origin(
        "objectnet.dev: objectnet-1.0.zip, unpacked: a folder with images/ and mappings/",
        "CC BY 4.0, and: never to be trained on; shown on the web only with its red border",
    ),
}
_V2_FOLDERS = {
    "imagenet_v2": "imagenetv2-matched-frequency-format-val",
    "imagenet_v2_threshold": "imagenetv2-threshold0.7-format-val",
    "imagenet_v2_top": "imagenetv2-top-images-format-val",
}
_NAME_LISTS = ("LOC_synset_mapping.txt", "synset_words.txt")
_WNID = re.compile(r"n\d{8}")
_VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})(?:_n\d{8})?\.jpe?g", re.IGNORECASE)


def answers_imagenet(classes: Sequence[str] | None, dataset: str | None) -> bool:
    """Whether a checkpoint with 1,000 outputs answers with ImageNet's classes, in their order.

    classes: its names of the outputs; dataset: what it was trained on; both None where it does not say, as Google's
    and other people's checkpoints, which are taken at their number of outputs.
    """
    if dataset is None or dataset in ORIGINS:
        return True
    return classes is not None and list(classes) == sorted(classes) and all(map(_WNID.fullmatch, classes))


# ------------------------------------------------------------------------------------------------ ImageNet


def imagenet_splits(root: Path | None, download: bool, partial: bool = False) -> Splits:
    """ILSVRC 2012 as `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`; the val is the test split, for it has the labels.

    CLASS is a WordNet id; or a name, where `LOC_synset_mapping.txt` (or `synset_words.txt`) says whose it is. The
    classes are called by their ids. A split is read, and has to be there, when it is asked for. partial: val may lack
    classes; train/ or the same list of names then tells which of the 1,000 it has.
    """
    below = ("imagenet", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC")
    home = _home("imagenet", root, below, ("train", "val"), enough=any)
    places = {"train": home / "train", "test": home / "val"}

    def read(split: str) -> Dataset:
        wnids = _class_folders(places[split], home, partial and split == "test")
        dataset = read_class_folders(places[split], "imagenet", split, tuple(wnids))
        dataset = dataclasses.replace(dataset, classes=tuple(wnids.values()))
        return _partial(dataset, VAL_IMAGES) if split == "test" else dataset

    return list(places), read


def _partial(dataset: Dataset, whole: int) -> Dataset:
    """`dataset` with its full size where that is another than it has, and a warning."""
    if len(dataset) == whole:
        return dataset
    logger.warning("%s: %s of its %s test images are there", dataset.name, f"{len(dataset):,}", f"{whole:,}")
    return dataclasses.replace(dataset, full_size=whole)


def _class_folders(place: Path, home: Path, partial: bool = False) -> dict[str, str]:
    """Folder -> WordNet id, in the order of the ids. Raises ValueError unless there are 1,000.

    partial: `place` may have fewer; the others, which lack a folder, are among the 1,000 all the same.
    """
    folders = _folders(place)
    if not folders and any(_VAL_IMAGE.fullmatch(path.name) for path in place.iterdir()):
        raise UserError(f"the images of {place} lie side by side: sort them into one folder for each WordNet id")
    if len(folders) != CLASSES and not (partial and folders):
        raise UserError(
            f"{place} has {len(folders)} class folders and ImageNet 1,000: give --partial to evaluate on a "
            f"part of val, or folder:PATH for a part as a data set of its own. {_terms('imagenet')}"
        )
    wnids = {folder: folder for folder in folders}
    if not all(map(_WNID.fullmatch, folders)):
        wnids = _wnids_of_names(folders, home)
    if len(folders) != CLASSES:
        wnids |= {wnid: wnid for wnid in _all_wnids(home) - set(wnids.values())}
        if len(wnids) != CLASSES:
            raise UserError(f"{place} has class folders that are none of ImageNet's 1,000: move them away")
    return dict(sorted(wnids.items(), key=lambda pair: pair[1]))


def _all_wnids(home: Path) -> set[str]:
    """The 1,000 WordNet ids, from train/ or the list of names."""
    path = _name_list(home)
    lines = path.read_text(encoding="utf-8").splitlines() if path else []
    listed = {line.split()[0] for line in lines if line.strip()}
    train = home / "train"
    found = {name for name in listed or (_folders(train) if train.is_dir() else ()) if _WNID.fullmatch(name)}
    if len(found) != CLASSES:
        raise UserError(
            f"{home} does not tell all 1,000 classes, so which of a head's outputs those of val are is unknown: add "
            f"{_NAME_LISTS[0]} of 1,000 lines `n01440764 tench, Tinca tinca`, or train/ with 1,000 class folders"
        )
    return found


def _name_list(home: Path) -> Path | None:
    """The file of lines `n01440764 tench, Tinca tinca`, if there is one."""
    return next((home / name for name in _NAME_LISTS if (home / name).is_file()), None)


def _wnids_of_names(folders: Sequence[str], home: Path) -> dict[str, str]:
    """Folder -> WordNet id, from the list of names: all names of a line, or the first."""
    path = _name_list(home)
    if path is None:
        raise UserError(
            f"the class folders of {home} are not called by WordNet ids (n01440764), and names do not tell the order "
            f"of a head's 1,000 outputs: rename them, or add {_NAME_LISTS[0]} of lines `n01440764 tench, Tinca tinca`"
        )
    known: dict[str, set[str]] = collections.defaultdict(set)
    for line in path.read_text(encoding="utf-8").splitlines():
        wnid, _, names = line.strip().partition(" ")
        for name in (names, names.partition(",")[0], wnid):
            known[name].add(wnid)
    if unclear := [folder for folder in folders if len(known[folder]) != 1]:
        raise UserError(f"{path} does not say which class {unclear[0]!r} is ({len(unclear)} such folders in {home})")
    return {folder: min(known[folder]) for folder in folders}


# --------------------------------------------------------------------------------------------- ReaL and V2


def real_splits(root: Path | None, download: bool, partial: bool = False) -> Splits:
    """ImageNet's val with the labels of "Are we done with ImageNet?": all that a image shows, or none.

    `real.json` has one list of classes for each image, in the order of the images' numbers. Images with an empty
    list are left out, and counted in `Dataset.left_out`. val/ may be flat or in folders, whose names do not matter.
    partial: val may lack images.
    """
    home = _home("imagenet_real", root, ("imagenet",), ("real.json", "val"))

    def read(split: str) -> Dataset:
        _require_test("imagenet_real", split)
        answers = _read_json(home / "real.json", list)
        if len(answers) != VAL_IMAGES or not all(map(_are_classes, answers)):
            raise UserError(
                f"{home / 'real.json'} must hold {VAL_IMAGES:,} lists of class numbers (0 to {CLASSES - 1}) and does "
                f"not: fetch it again. {_terms('imagenet_real')}"
            )
        images = _val_images(home / "val", partial)
        used = [number for number in images if answers[number]]
        sets = Labels.of_lists([answers[number] for number in used])
        left_out = len(images) - len(used)
        logger.info("imagenet_real: %d of %d images have no label and are left out", left_out, len(images))
        dataset = Dataset(
            "imagenet_real", split, NUMBERS, sets.firsts, entries=[images[number] for number in used],
            label_sets=sets, left_out=left_out,
        )  # fmt: skip
        return _partial(dataset, sum(map(bool, answers)))

    return ["test"], read


def _are_classes(labels: Any) -> bool:
    return isinstance(labels, list) and all(type(label) is int and 0 <= label < CLASSES for label in labels)


def _val_images(val: Path, partial: bool) -> dict[int, Entry]:
    """Number, from 0, -> image: ILSVRC2012_val_00000001.JPEG, ... below `val`; all of them, or `partial`, any."""
    found: dict[int, str] = {}
    for parent, _, names in os.walk(val, followlinks=True):
        found |= {int(match[1]): str(Path(parent, name)) for name in names if (match := _VAL_IMAGE.fullmatch(name))}
    there = [number for number in range(1, VAL_IMAGES + 1) if number in found]
    if len(there) < VAL_IMAGES and not (partial and there):
        missing = next(number for number in range(1, VAL_IMAGES + 1) if number not in found)
        raise UserError(
            f"{val} lacks {VAL_IMAGES - len(there):,} of {VAL_IMAGES:,} images, first "
            f"ILSVRC2012_val_{missing:08}.JPEG: the labels go by these names. Give --partial to evaluate on those "
            f"that are there. {_terms('imagenet')}"
        )
    return {number - 1: Entry(found[number]) for number in there}


def v2_splits(root: Path | None, download: bool, name: str = "imagenet_v2") -> Splits:
    """One of ImageNet-V2's three draws, in folders named by the class number: 0, 1, ... 999 (10 comes after 9)."""
    folder = _V2_FOLDERS[name]
    home = _home(name, root, (folder,), ("0", "999"))

    def read(split: str) -> Dataset:
        _require_test(name, split)
        if home.name in _V2_FOLDERS.values() and home.name != folder:
            right = next(other for other, own in _V2_FOLDERS.items() if own == home.name)
            raise UserError(f"{home} is not {name} but {right}: ask for that")
        if odd := sorted(set(_folders(home)) ^ set(NUMBERS)):
            raise UserError(f"{home} must have the folders 0 to 999 and no others; amiss: {', '.join(odd[:5])}")
        return read_class_folders(home, name, split, NUMBERS)

    return ["test"], read


# ---------------------------------------------------------------------------------------------- ObjectNet


def objectnet_splits(root: Path | None, download: bool) -> Splits:
    """ObjectNet's images of the 113 classes that it shares with ImageNet, without their red border.

    An answer is right if it is any of the ImageNet classes that ObjectNet's own files give to the image's class; the
    logits of all 1,000 classes take part. The images of other classes are counted in `Dataset.left_out`.
    """
    home = _home("objectnet", root, ("objectnet-1.0",), ("images", "mappings"))

    def read(split: str) -> Dataset:
        _require_test("objectnet", split)
        classes = objectnet_classes(home / "mappings")
        images = {folder: _images(home / "images" / folder) for folder in _folders(home / "images")}
        if missing := [folder for folder in classes if not images.get(folder)]:
            raise UserError(
                f"{home / 'images'} has no images of {len(missing)} of {len(classes)} classes, first "
                f"{missing[0]!r}: unpack the whole archive. {_terms('objectnet')}"
            )
        shared = [(path, labels) for folder, labels in sorted(classes.items()) for path in images[folder]]
        sets = Labels.of_lists([labels for _, labels in shared])
        left_out = sum(map(len, images.values())) - len(shared)
        logger.info("objectnet: %d images of classes that ImageNet has not are left out", left_out)
        return Dataset(
            "objectnet", split, NUMBERS, sets.firsts, entries=[Entry(path, border=BORDER) for path, _ in shared],
            label_sets=sets, left_out=left_out,
        )  # fmt: skip

    return ["test"], read


def objectnet_classes(mappings: Path) -> dict[str, list[int]]:
    """Folder of images -> the ImageNet classes that it stands for, from the four files of ObjectNet's `mappings/`.

    A folder has an ObjectNet label; a label that ImageNet shares has ImageNet's names for it, with "; " between them;
    a name stands in a line of `imagenet_to_label_2012_v2`; and a line (from 0) belongs to a class.
    """
    labels = _read_json(mappings / "folder_to_objectnet_label.json", dict)
    shared = _read_json(mappings / "objectnet_to_imagenet_1k.json", dict)
    lines = _read_json(mappings / "pytorch_to_imagenet_2012_id.json", dict)
    names = _read_text(mappings / "imagenet_to_label_2012_v2").splitlines()
    if sorted(lines.values()) != list(range(CLASSES)) or len(names) < CLASSES:
        raise UserError(f"{mappings} does not name 1,000 classes: unpack it again. {_terms('objectnet')}")
    numbers: dict[str, list[int]] = collections.defaultdict(list)
    for number, line in lines.items():
        numbers[names[line].strip()].append(int(number))
    wanted = {folder: shared[label].split("; ") for folder, label in labels.items() if label in shared}
    unclear = {name for its in wanted.values() for name in its if len(numbers[name.strip()]) != 1}
    if unclear or len(wanted) != SHARED_CLASSES:
        raise UserError(
            f"{mappings} maps {len(wanted)} classes to ImageNet's and ObjectNet 1.0 {SHARED_CLASSES}; names that stand "
            f"for no class, or for two: {sorted(unclear) or 'none'}. {_terms('objectnet')}"
        )
    return {folder: [numbers[name.strip()][0] for name in its] for folder, its in wanted.items()}


# ------------------------------------------------------------------------------------------------- folders


def _home(
    name: str,
    root: Path | None,
    below: Sequence[str],
    content: Sequence[str],
    enough: Callable[[Iterable[bool]], bool] = all,
) -> Path:
    """`root`, or the first of its sub-folders `below`, that has all (or `any`) of `content`."""
    if root is None:
        raise UserError(f"{name} is not downloaded: give the folder that holds it as the root. {_terms(name)}")
    places = [root, *(root / folder for folder in below)]
    for place in places:
        if enough((place / part).exists() for part in content):
            return place
    needed = (" and " if enough is all else " or ").join(content)
    raise UserError(f"{name} needs {needed}; looked in {', '.join(map(str, places))}. {_terms(name)}")


def _terms(name: str) -> str:
    return f"It comes from {ORIGINS[name].source} (license: {ORIGINS[name].license})."


def _require_test(name: str, split: str) -> None:
    if split != "test":
        raise UserError(f"{name} is there to test and has no other split than test; {split!r} was asked for")


def _folders(place: Path) -> list[str]:
    if not place.is_dir():
        raise UserError(f"there is no folder {place}: unpack the whole set there")
    with os.scandir(place) as found:
        return sorted(entry.name for entry in found if entry.is_dir() and not entry.name.startswith("."))


def _images(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise UserError(f"there is no file {path}: unpack the whole set there")
    return path.read_text(encoding="utf-8")


def _read_json(path: Path, kind: type) -> Any:
    try:
        content = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): fetch it again") from error
    if not isinstance(content, kind):
        raise UserError(f"{path} must be a JSON {kind.__name__}, not {str(content)[:60]!r}: fetch it again")
    return content
