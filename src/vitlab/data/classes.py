"""The classes of a data set: their names, their order, the choice of some of them, and checks.

`require_...` raises before a run; `warn_...` logs, for `load_dataset`, runs and evaluation.
"""

import collections
import contextlib
import dataclasses
import logging
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitlab.checksums import sha256
from vitlab.data.dataset import Dataset, Entries
from vitlab.errors import UserError, first_ten, quoted, warn_once
from vitlab.io import open_regular

END = 2**12
"""Last bytes of files of equal size that are compared first: different compressed images nearly always differ there."""

MAX_CLASSES = 2**20  # most classes without names: a larger label is a mistake
_DIGITS = re.compile("([0-9]+)")

logger = logging.getLogger(__name__)


def natural_order(names: Iterable[str]) -> tuple[str, ...]:
    """The names sorted: numbers in them by value (2 before 10), all else by code point, in NFC, as `sorted` does."""

    def key(name: str) -> tuple[list[Any], str]:
        # Text and numbers alternate. A number is compared by its count of digits, then by these.
        parts: list[Any] = _DIGITS.split(canonical(name))
        parts[1::2] = ((len(digits := part.lstrip("0")), digits) for part in parts[1::2])
        return parts, name

    return tuple(sorted(names, key=key))


def canonical(name: str) -> str:
    """The form for comparing names (NFC): macOS stores an umlaut as two characters, other systems as one."""
    return unicodedata.normalize("NFC", name)


def numbered_classes(top: int, where: str) -> tuple[str, ...]:
    """Names for numbered classes, "0" to `top`. Raises UserError for too many; `where` names their source."""
    if top >= MAX_CLASSES:
        raise UserError(f"{where} has the label {top}; labels count classes from 0, and go up to {MAX_CLASSES - 1:,}")
    return tuple(str(i) for i in range(top + 1))


def keep_classes(dataset: Dataset, classes: Sequence[int | str]) -> Dataset:
    """The images that have any of these classes, which are renumbered in the order given.

    A number is the index of a class. But if any class of the set has a number for a name, all numbers are names.
    Raises UserError for an unknown class, and for one that is given twice.
    """
    names_are_numbers = any(name.isdecimal() for name in dataset.classes)
    index_of: dict[int | str, int] = {canonical(name): index for index, name in enumerate(dataset.classes)}
    if not names_are_numbers:
        index_of |= {index: index for index in range(len(dataset.classes))}
    keys = [canonical(str(c)) if names_are_numbers or isinstance(c, str) else c for c in classes]
    kept = [index_of.get(key, -1) for key in keys]
    if not kept or -1 in kept or len(set(kept)) < len(kept):
        raise UserError(
            f"classes must be different names ({first_ten(dataset.classes)}) or numbers from 0 to "
            f"{len(dataset.classes) - 1} of {dataset.name}, not {tuple(classes)}"
        )
    new_labels = np.full(len(dataset.classes), -1)
    new_labels[kept] = np.arange(len(kept))
    labels = dataset.all_labels.renumber(new_labels)
    indices = np.flatnonzero(labels.counts)
    labels = labels.take(indices)
    return dataclasses.replace(
        dataset.take(indices),
        classes=tuple(dataset.classes[c] for c in kept),
        labels=labels.first_labels,
        label_sets=None if dataset.label_sets is None else labels,
    )


def require_two_classes(train: Dataset) -> None:
    """Raises UserError if all training images have one class and there are no other labels to learn."""
    present = np.unique(train.labels)
    if not train.multi_label and len(present) < 2:
        raise UserError(
            f"{quoted(train.name)} has one class to train on, "
            f"{first_ten([train.classes[label] for label in present])}, and every prediction would be right: give "
            f"images of two classes or more. To tell one kind of image from all others, add a class of others."
        )


class Failure(NamedTuple):
    """An image that could not be read."""

    image: int  # its index
    path: str
    reason: str


def require_classes_left(dataset: Dataset, failures: Sequence[Failure]) -> None:
    """Raises UserError if all images of a class are among the `failures`."""
    if text := _lost_classes(dataset, failures):
        raise UserError(f"{text}. Repair or remove the images, or exclude the class.")


def warn_of_lost_classes(dataset: Dataset, failures: Sequence[Failure]) -> None:
    """Logs classes whose images are all among the `failures`."""
    if text := _lost_classes(dataset, failures):
        logger.warning("%s; the class is not evaluated", text)


def warn_of_skipped_classes(dataset: Dataset, read: np.ndarray) -> None:
    """Logs classes whose images were all skipped; `read`: the indices of the other images, int [n]."""
    if len(read) < len(dataset):
        skipped = np.setdiff1d(np.arange(len(dataset)), read).tolist()
        warn_of_lost_classes(dataset, [Failure(index, dataset.path(index), "it is skipped") for index in skipped])


def _lost_classes(dataset: Dataset, failures: Sequence[Failure]) -> str:
    """Names the classes whose images are all among the `failures`, and the first of these images; "" for no class."""
    labels = dataset.all_labels
    read = np.setdiff1d(np.arange(len(dataset)), [failure.image for failure in failures])
    lost = np.setdiff1d(labels.values, labels.take(read).values)
    if not len(lost):
        return ""
    first = next(failure for failure in failures if np.isin(labels.of_image(failure.image), lost).any())
    return (
        f"no image of {first_ten([dataset.classes[label] for label in lost])} in {dataset.name} ({dataset.split}) can "
        f"be read; the first, {quoted(first.path)}: {first.reason}"
    )


def warn_of_classes(dataset: Dataset) -> None:
    """Logs classes with fewer than two images, and classes whose names differ only in case and spaces."""
    counts = np.bincount(dataset.all_labels.values, minlength=len(dataset.classes))
    if len(small := np.flatnonzero(counts < 2)):
        named = first_ten([f"{dataset.classes[c]} ({counts[c]})" for c in small])
        warn_once(f"{quoted(dataset.name)}: classes with fewer than two images in {dataset.split}: {named}")
    alike = collections.defaultdict[str, list[str]](list)
    for name in dataset.classes:
        alike["".join(name.replace("_", " ").split()).casefold()].append(name)
    if pairs := [" and ".join(map(repr, names)) for names in alike.values() if len(names) > 1]:
        warn_once(f"{quoted(dataset.name)}: {first_ten(pairs)} are different classes; rename them if they are the same")


def warn_of_contradictions(*datasets: Dataset) -> None:
    """Logs files with the same bytes and different labels. Images in shards or memory are not compared.

    Files are compared by size, then by their ends, then as a whole; each step takes the files with different labels
    that were equal in the step before.
    """
    labels_of: dict[str, bytes] = {}  # file -> its sorted labels
    for dataset in datasets:
        labels = dataset.all_labels
        for index, entry in enumerate(() if isinstance(dataset.entries, Entries) else dataset.entries):
            if entry.is_whole_file:
                labels_of[entry.file] = np.sort(labels.of_image(index)).tobytes()
    groups = [list(labels_of)]
    for fingerprint in (os.path.getsize, _end, lambda file: sha256(Path(file))):
        equal = [part for group in groups for part in _group_by(fingerprint, group)]
        groups = [group for group in equal if len({labels_of[file] for file in group}) > 1]
    pairs = [f"{a} = {next(b for b in others if labels_of[b] != labels_of[a])}" for a, *others in groups]
    if pairs:
        text = "%s: %d times the same image has different labels, and one is wrong: %s"
        logger.warning(text, quoted(datasets[0].name), len(pairs), first_ten(pairs))


def _group_by(fingerprint: Callable[[str], object], files: Iterable[str]) -> list[list[str]]:
    """Groups of files with the same fingerprint; unreadable files are dropped."""
    groups = collections.defaultdict[object, list[str]](list)
    for file in files:
        with contextlib.suppress(OSError, UserError):  # reading the image raises
            groups[fingerprint(file)].append(file)
    return list(groups.values())


def _end(file: str) -> bytes:
    with open_regular(file) as opened:
        opened.seek(max(0, os.fstat(opened.fileno()).st_size - END))
        return opened.read()
