"""Image folders (`folder:PATH` of `load_dataset`): which folders are splits and classes, and the images in them."""

import collections
import dataclasses
import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from vitlab.data.classes import canonical, natural_order
from vitlab.data.contents import (
    contents_of,
    has_images,
    look_again,
    no_images_error,
    report_ignored,
    require_no_broken_links,
    subfolders,
)
from vitlab.data.dataset import Dataset, SplitReader
from vitlab.data.decode import Entry
from vitlab.errors import UserError, first_ten, quoted, warn_once

logger = logging.getLogger(__name__)

SPLIT_FOLDERS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
SPLIT_OF = {name: split for split, names in SPLIT_FOLDERS.items() for name in names}  # name of a folder -> its split
_SPLIT_NAME = re.compile(rf"(?:(.+)[_ .-])?({'|'.join(SPLIT_OF)})(?:[_ .-]?(?:set|data|dataset|images?|imgs?))?\d*")
"""`test`, `test_set`, `val2017`, and with a name before it `seg_test`."""
_WRAPPERS = ("data", "dataset", "datasets", "images", "image", "imgs", "img", "photos", "pictures")
"""Folders of class folders, which are not classes themselves."""


def folder_splits(path: Path, name: str) -> SplitReader:
    """`PATH/CLASS/**/image`, or the same below `train/`, `val/` and `test/`, or other names of splits (`_SPLIT_NAME`).

    A folder that only wraps another one is skipped (`_unwrap`). The classes are the names of the folders in `train/`,
    or without it in all splits, in `natural_order`; all splits share them.
    """
    look_again()
    home = _unwrap(path, _split_folders)
    folders = _split_folders(home) or {"train": home}
    if "train" in folders:
        folders["train"] = _unwrap(folders["train"])
    class_roots = [folders["train"]] if "train" in folders else list(folders.values())
    classes = natural_order({canonical(folder): folder for root in class_roots for folder in subfolders(root)}.values())
    if not classes:
        shown = quoted(str(class_roots[0]))
        raise UserError(
            f"{shown} has no class folders: expected {shown}/CLASS/image.jpg, or metadata.csv with file_name and "
            f"label, or a table as csv:PATH. Images without labels are for `vitlab predict`"
        )
    known = set(map(canonical, classes))
    splits = {
        split: _unwrap(root, lambda f: known & set(map(canonical, subfolders(f)))) for split, root in folders.items()
    }
    for root in class_roots:
        _report_nesting(root, subfolders(root))
    # Checkpoints need names in valid UTF-8: a byte that is not is written as \xe9.
    names = tuple(name.encode(errors="surrogateescape").decode(errors="backslashreplace") for name in classes)

    def read(split: str) -> Dataset:
        dataset = read_class_folders(splits[split], name, split, classes)
        return dataclasses.replace(dataset, classes=names, folder=str(path))

    return list(splits), read


def _unwrap(path: Path, is_sought: Callable[[Path], object] = lambda _: False) -> Path:
    """The folder that is read for `path`: the one with all its images, any number of levels down, if it `is_sought` or
    holds several folders of images; otherwise `path` itself.

        flowers/data/{train,test}/   data, as split folders are sought
        train/images/{rose,tulip}/   images, of several folders
        test/images/rose/            images, as a folder with the classes of train is sought
        train/rose/                  train
    """
    inner = path
    while not is_sought(inner) and (wrapped := _wrapped_folder(inner)):
        inner = wrapped
    if inner == path or not (is_sought(inner) or _folders_with_images(inner)):
        return path
    folders = first_ten(natural_order(subfolders(inner)))
    warn_once(f"{quoted(str(path))}: all images lie in {quoted(str(inner))}, whose folders are read: {folders}")
    return inner


def _wrapped_folder(path: Path) -> Path | None:
    """The folder with all images of `path`: its only folder, or one named as in `_WRAPPERS` beside others without."""
    names = _folders_with_images(path)
    is_wrapped = len(names) == 1 and (names == subfolders(path) or names[0].lower() in _WRAPPERS)
    return path / names[0] if is_wrapped else None


def _folders_with_images(path: Path) -> list[str]:
    """The first two folders in `path` that hold images; none if `path` holds images itself."""
    names = (folder for folder in subfolders(path) if has_images(path / folder))
    return [] if has_images(path, below=False) else list(itertools.islice(names, 2))


def _split_folders(path: Path) -> dict[str, Path]:
    """Split -> its folder; empty if `path` holds class folders. Folders without a prefix (`train`) are taken first;
    otherwise folders with a prefix (`seg_train`, `seg_test`) are splits if at least two of them share it."""
    present = subfolders(path)
    by_prefix = collections.defaultdict[str, dict[str, list[Path]]](dict)  # "seg" -> "train" -> folders, as seg_train
    for folder in present:
        if match := _SPLIT_NAME.fullmatch(folder.lower()):
            by_prefix[match[1] or ""].setdefault(SPLIT_OF[match[2]], []).append(path / folder)
    named = by_prefix.get("") or next((splits for splits in by_prefix.values() if len(splits) > 1), {})
    others = sorted(set(present).difference(folder.name for same in named.values() for folder in same))
    if not _are_splits(named, others):
        return {}
    if same := next((same for same in named.values() if len(same) > 1), None):
        raise UserError(f"{' and '.join(quoted(str(folder)) for folder in same)} are the same split: rename one")
    splits = {split: named[split][0] for split in SPLIT_FOLDERS if split in named}
    if len(splits) == 1 and any(has_images(path / other) for other in others):
        (folder,) = splits.values()
        raise UserError(
            f"{folder} holds folders, as a split with classes does, and there are images in {others} too: "
            f"rename {folder.name} if it is a class, or move the others away, or give folder:{folder}"
        )
    if others:
        warn_once(f"{quoted(str(path))}: the folders {others} are not splits and are not read")
    return splits


def _are_splits(named: Mapping[str, Sequence[Path]], others: Sequence[str]) -> bool:
    """Whether folders are splits, not classes. named: split -> the folders with its name; others: all other folders.

    test1/x.jpg test2/x.jpg                 classes: all names are of one split
    train/ test/                            splits, whatever they hold
    train/cat/x.jpg test/x.jpg docs/        splits: one holds folders
    train/cat/x.jpg docs/                   a split: it holds folders and no images
    train/x.jpg train/more/x.jpg car/x.jpg  classes
    """
    folders = [folder for same in named.values() for folder in same]
    if len(named) == 1 and len(folders) > 1:
        return False
    if not others:
        return bool(folders)
    if len(named) > 1 and any(map(subfolders, folders)):
        return True
    return any(subfolders(folder) and not has_images(folder, below=False) for folder in folders)


def _report_nesting(root: Path, classes: Sequence[str]) -> None:
    """Logs that folders in class folders are merged. Raises UserError if they seem to be the classes, or splits."""
    indirect = [folder for folder in classes if not has_images(root / folder, below=False)]
    nested = {folder: inner for folder in indirect if (inner := subfolders(root / folder))}
    direct = set(map(canonical, classes)).difference(map(canonical, nested))
    for folder, inner in nested.items():
        reason = ""
        if len({SPLIT_OF[name.lower()] for name in inner if name.lower() in SPLIT_OF}) > 1:
            reason = f"{folder} holds splits ({first_ten(inner)})"
        elif len(direct.intersection(map(canonical, inner))) > max(1, len(inner) / 2):
            reason = f"the folders in {folder} are called like the classes beside it"
        elif folder.lower() in _WRAPPERS and len(classes) > 1:
            reason = f"{folder} holds folders ({first_ten(inner)}), as a data set does"
        if reason:
            raise UserError(
                f"{quoted(str(root))} would be read as the classes {first_ten(classes)}, but {reason}: give "
                f"folder:{quoted(str(root / folder))} to read that alone, or move or rename it"
            )
    if nested:
        inner = first_ten(natural_order({name for names in nested.values() for name in names}))
        warn_once(
            f"{quoted(str(root))}: the folders in the classes {first_ten(list(nested))} are merged ({inner}); if these "
            f"are the classes, give folder:{quoted(str(root / next(iter(nested))))}"
        )


def read_class_folders(path: Path, name: str, split: str, classes: tuple[str, ...]) -> Dataset:
    """The images in `PATH/CLASS/`, a folder for each of `classes`; a missing one is logged. The names may have another
    Unicode form. Raises UserError for folders that are not among `classes`, hold no images, or have broken links."""
    shown = quoted(str(path))
    folders = subfolders(path)
    present = {canonical(folder): folder for folder in folders}
    if twice := [folder for folder in folders if folder != present[canonical(folder)]]:
        raise UserError(f"{shown} has two folders for the class {first_ten(twice)}, in two Unicode forms: merge them")
    known = set(map(canonical, classes))
    if unknown := [folder for key, folder in present.items() if key not in known]:
        raise UserError(f"{shown} has class folders that are missing in train: {first_ten(unknown)}")
    if not present:
        raise UserError(
            f"{shown} has no class folders: add {shown}/CLASS/image.jpg, or remove it to cut {split} from train"
        )
    if missing := [folder for folder in classes if canonical(folder) not in present]:
        names = first_ten(list(map(repr, missing)))
        logger.warning("%s has no folder for %d of the %d classes: %s", shown, len(missing), len(classes), names)
    ignored = collections.Counter("outside the class folders" for p in path.iterdir() if p.is_file())
    by_class = {key: contents_of(path / folder) for key, folder in present.items()}
    require_no_broken_links(path, [link for contents in by_class.values() for link in contents.broken_links])
    for key, contents in by_class.items():
        if not contents.images:
            raise no_images_error(path / present[key], contents.others)
        ignored += contents.others
    report_ignored(path, ignored)
    images = [by_class[key].images if key in by_class else [] for key in map(canonical, classes)]
    labels = np.repeat(np.arange(len(classes)), list(map(len, images)))
    return Dataset(name, split, classes, labels, entries=[Entry(image) for same in images for image in same])
