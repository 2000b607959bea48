"""Names of classes: which are the same, their order (for the readers of data sets), and the choice of some of them."""

import dataclasses
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vitlab.data.dataset import Dataset
from vitlab.errors import UserError, first_ten

MAX_CLASSES = 2**20
"""Most classes without names: a larger label is a mistake."""
_DIGITS = re.compile("([0-9]+)")


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
