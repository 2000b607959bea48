"""Classes: the order of their names, which names are the same, which classes are kept, and what a training needs."""

import collections
import contextlib
import dataclasses
import logging
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.checksums import sha256
from vitlab.data.dataset import Dataset, Entries
from vitlab.data.splits import warn_once
from vitlab.errors import UserError, first_ten, quoted
from vitlab.io import open_regular

MAX_CLASSES = 2**20
"""Most classes without names: a larger label is a mistake."""
HASHED_END = 2**12
"""Bytes at the end of files of one size, which differ wherever compressed images do."""
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
    """The form in which names are compared (NFC): macOS stores an umlaut as two characters, other systems as one."""
    return unicodedata.normalize("NFC", name)


def numbered_classes(top: int, where: str) -> tuple[str, ...]:
    """Names for numbered classes, "0" to `top`; `where` is for messages. Raises UserError for too many."""
    if top >= MAX_CLASSES:
        raise UserError(f"{where} has the label {top}; labels count classes from 0, and go up to {MAX_CLASSES - 1:,}")
    return tuple(str(i) for i in range(top + 1))


def keep_classes(dataset: Dataset, classes: Sequence[int | str]) -> Dataset:
    """The images of these classes, which are renumbered in the order given; an image stays if it has any of them. A
    number is an index, unless names of classes are numbers: then it is a name. Raises UserError."""
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
            f"{quoted(train.name)} has one class in its {train.split} split, "
            f"{first_ten([train.classes[label] for label in present])}, and every prediction would be right: give "
            f"images of two classes or more. To tell one kind of image from all others, add a class of others."
        )


def require_classes_left(dataset: Dataset, rest: Dataset, failures: Sequence[Sequence[Any]], *, train: bool) -> None:
    """Raises UserError, or logs without `train`, if no image of a class is left.

    rest: the images of `dataset` that could be read; failures: index, path and reason of the others.
    """
    lost = np.setdiff1d(dataset.all_labels.values, rest.all_labels.values)
    if not len(lost):
        return
    _, path, reason = next(each for each in failures if np.isin(dataset.all_labels.of_image(each[0]), lost).any())
    text = (
        f"no image of {first_ten([dataset.classes[label] for label in lost])} in {dataset.name} ({dataset.split}) can "
        f"be read; the first, {quoted(path)}: {reason}"
    )
    if train:
        raise UserError(f"{text}. Repair or remove the images, or exclude the class.")
    logger.warning("%s; the class is not evaluated", text)


def warn_of_skipped_classes(dataset: Dataset, read: np.ndarray) -> None:
    """Logs classes without an image among those that were `read` (indices, int [n]); the others were skipped."""
    if len(read) < len(dataset):
        skipped = np.setdiff1d(np.arange(len(dataset)), read).tolist()
        failures = [(index, dataset.path(index), "it is skipped") for index in skipped]
        require_classes_left(dataset, dataset.take(read), failures, train=False)


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

    Files are grouped by size, then by their ends, then by their whole content; after each step, files without another
    label in their group are done.
    """
    labels: dict[str, bytes] = {}  # of each file
    for dataset in datasets:
        if not isinstance(dataset.entries, Entries):
            files = [entry.file if entry.is_whole_file else "" for entry in dataset.entries]
            labels |= {file: np.sort(dataset.all_labels.of_image(i)).tobytes() for i, file in enumerate(files) if file}
    groups = [list(labels)]
    for fingerprint in (os.path.getsize, _end, lambda file: sha256(Path(file))):
        alike = collections.defaultdict[object, list[str]](list)
        for number, files in enumerate(groups):
            for file in files:
                with contextlib.suppress(OSError, UserError):  # reading the image raises
                    alike[number, fingerprint(file)].append(file)
        groups = [files for files in alike.values() if len({labels[file] for file in files}) > 1]
    pairs = [f"{a} = {next(b for b in others if labels[b] != labels[a])}" for a, *others in groups]
    if pairs:
        text = "%s: %d times the same image has different labels, and one is wrong: %s"
        logger.warning(text, quoted(datasets[0].name), len(pairs), first_ten(pairs))


def _end(file: str) -> bytes:
    with open_regular(file) as opened:
        opened.seek(max(0, os.fstat(opened.fileno()).st_size - HASHED_END))
        return opened.read()
