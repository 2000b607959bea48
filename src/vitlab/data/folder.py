"""Image folders: which of their folders are splits, which are classes, and the images below."""

import collections
import dataclasses
import logging
import os
from pathlib import Path

import numpy as np

from vitlab.data.dataset import Dataset, SplitReader
from vitlab.data.decode import IMAGE_SUFFIXES, Entry
from vitlab.errors import UserError, first_ten, quoted

logger = logging.getLogger(__name__)

SPLIT_FOLDERS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}


def folder_splits(path: Path, name: str) -> SplitReader:
    """`PATH/CLASS/**/image`, or the same below `train/`, `val/` and `test/`, or other names of `SPLIT_FOLDERS`.

    The classes are the sorted folder names (of `train/`, where there is one); all splits share them.
    """
    splits = _split_folders(path) or {"train": path}
    roots = [splits["train"]] if "train" in splits else list(splits.values())
    classes = tuple(sorted({folder for root in roots for folder in subfolders(root)}))
    if not classes:
        root = quoted(str(roots[0]))
        raise UserError(
            f"{root} has no class folders: expected {root}/CLASS/image.jpg, or metadata.csv with file_name and label"
        )
    # Checkpoints need names in valid UTF-8: a byte that is not is written as \xe9.
    shown = tuple(name.encode(errors="surrogateescape").decode(errors="backslashreplace") for name in classes)

    def read(split: str) -> Dataset:
        dataset = read_class_folders(splits[split], name, split, classes)
        return dataclasses.replace(dataset, classes=shown, folder=str(path))

    return list(splits), read


def _split_folders(path: Path) -> dict[str, Path]:
    """Split -> its folder; empty if `path` holds class folders.

    One folder among others that is named like a split and holds images itself is a class.
    """
    present = subfolders(path)
    named = {split: [path / n for n in present if n.lower() in names] for split, names in SPLIT_FOLDERS.items()}
    named = {split: folders for split, folders in named.items() if folders}
    folders = [folder for same in named.values() for folder in same]
    others = sorted(set(present).difference(folder.name for folder in folders))
    several = len(named) > 1 and any(map(subfolders, folders))
    if not (several or (folders and not others) or any(map(_holds_classes, folders))):
        return {}
    if same := next((same for same in named.values() if len(same) > 1), None):
        raise UserError(f"{' and '.join(quoted(str(folder)) for folder in same)} are the same split: rename one")
    if len(named) == 1 and any(images_below(path / other) for other in others):
        raise UserError(
            f"{folders[0]} holds folders, as a split with classes does, and there are images in {others} too: "
            f"rename {folders[0].name} if it is a class, or move the others away"
        )
    if others:
        logger.warning("%s: the folders %s are not splits and are not read", quoted(str(path)), others)
    return {split: folder for split, (folder,) in named.items()}


def _holds_classes(path: Path) -> bool:
    """Whether there are folders in it, and no images at the same level."""
    visible = [p for p in path.iterdir() if not p.name.startswith(".")]
    return any(p.is_dir() for p in visible) and not any(p.suffix.lower() in IMAGE_SUFFIXES for p in visible)


def read_class_folders(path: Path, name: str, split: str, classes: tuple[str, ...]) -> Dataset:
    """The images of `PATH/CLASS/`, a folder for each of `classes`; one that is missing is logged."""
    present, shown = subfolders(path), quoted(str(path))
    if unknown := sorted(set(present) - set(classes)):
        raise UserError(f"{shown} has class folders that are missing in train: {first_ten(unknown)}")
    if not present:
        raise UserError(
            f"{shown} has no class folders: add {shown}/CLASS/image.jpg, or remove it to cut {split} from train"
        )
    if missing := [folder for folder in classes if folder not in present]:
        text = "%s has no folder for %d of the %d classes: %s"
        logger.warning(text, shown, len(missing), len(classes), first_ten(list(map(repr, missing))))
    ignored = collections.Counter("outside the class folders" for p in path.iterdir() if p.is_file())
    images = {folder: images_below(path / folder, ignored) for folder in present}
    if empty := [folder for folder in present if not images[folder]]:
        suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
        raise UserError(f"the class folder {quoted(str(path / empty[0]))} holds no images ({suffixes}): remove it")
    report_ignored(path, ignored)
    entries = [Entry(image) for folder in classes for image in images.get(folder, ())]
    labels = np.repeat(np.arange(len(classes)), [len(images.get(folder, ())) for folder in classes])
    return Dataset(name, split, classes, labels, entries=entries)


def images_below(folder: Path, ignored: collections.Counter[str] | None = None) -> list[str]:
    """All images in `folder` and below it, sorted by path; other files are counted by kind in `ignored`.

    Links are followed, each folder is read once, hidden ones are skipped. Raises UserError.
    """

    def fail(error: OSError) -> None:
        raise UserError(f"cannot list the folder {quoted(str(error.filename))}: {error.strerror}")

    files, seen, others = [], set[str](), collections.Counter[str]() if ignored is None else ignored
    for parent, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if (real := os.path.realpath(parent)) in seen:  # a link back: following it would have no end
            folders.clear()
            continue
        seen.add(real)
        for file in (Path(parent, name) for name in names):
            if file.name.startswith("."):
                others["hidden"] += 1
            elif file.suffix.lower() in IMAGE_SUFFIXES:
                files.append(str(file))
            else:
                others[file.suffix.lower() or file.name] += 1
    return sorted(files)


def report_ignored(path: Path, ignored: collections.Counter[str]) -> None:
    """Logs the counts of files by kind that are left out."""
    if ignored:
        kinds = ", ".join(f"{quoted(kind)} {count}" for kind, count in sorted(ignored.items()))
        logger.warning("%s: %d files are not images and are skipped (%s)", quoted(str(path)), ignored.total(), kinds)


def subfolders(path: Path) -> list[str]:
    """The sorted names of the folders in `path` that are not hidden. Raises UserError if there is no such folder."""
    if not path.is_dir():
        raise UserError(f"there is no folder {quoted(str(path))}")
    return sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
