"""Lists of images to leave out of training: what `vitlab duplicates` writes and `DataConfig.exclude` names.

One image a line, by a name that is the same in every run: its path below the data set's folder (in a shard,
`train-00.tar/00017.jpg`); its whole path if the set has no folder; its index in the source's split
(`cifar10/train[17]`) for sets without files. Or a table with these names in a column `image`: `suspects.csv` of a
fine-tuning job, without the rows of images to keep.
"""

import csv
import hashlib
import io
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from vitlab.data.dataset import Dataset
from vitlab.errors import UserError
from vitlab.io import from_cell, read_regular, replacing_file

logger = logging.getLogger(__name__)

MAX_LIST_BYTES = 2**26  # largest list that is read: about a million names


def image_id(dataset: Dataset, index: int) -> str:
    """The name of image `index` in lists."""
    path = dataset.path(index)
    if dataset.folder:
        return path.removeprefix(f"{dataset.folder}{os.sep}")
    in_a_file = dataset.entries and not dataset.entries[index].is_in_memory
    return str(Path(path).absolute()) if in_a_file else path


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Writes a text file atomically; names that are not UTF-8 keep their bytes."""
    with replacing_file(path) as file:
        file.writelines(f"{line}\n".encode(errors="surrogateescape") for line in lines)


def read_exclusion(path: str | os.PathLike[str]) -> list[str]:
    """The names in a list, without repetitions. Raises UserError if it cannot be read."""
    try:
        text = read_regular(path, MAX_LIST_BYTES).decode(errors="surrogateescape")
    except OSError as error:
        raise UserError(
            f"cannot read the list of images to leave out, {path} ({error.strerror}): give a text file with one "
            f"image a line, as `vitlab duplicates` writes it."
        ) from error
    if Path(path).suffix.lower() == ".csv":
        try:
            table = csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline=""))
            if "image" not in (table.fieldnames or ()):
                raise UserError(f"{path} has no column `image`; its columns are {', '.join(table.fieldnames or ())}.")
            return list(dict.fromkeys(from_cell(row["image"]) for row in table if row["image"]))
        except csv.Error as error:
            raise UserError(f"{path} is not a CSV table ({error}).") from error
    return list(dict.fromkeys(line for line in text.replace("\r\n", "\n").split("\n") if line))


def list_fingerprint(path: str | os.PathLike[str]) -> dict[str, str | int]:
    """What stands for a list in a run's settings: its length and content, not its path."""
    names = read_exclusion(path)
    digest = hashlib.sha256("\n".join(sorted(names)).encode(errors="surrogateescape")).hexdigest()
    return {"listed": len(names), "sha256": digest}


def leave_out(dataset: Dataset, path: str | os.PathLike[str], load_all: Callable[[], Dataset]) -> Dataset:
    """`dataset` without the images that the list `path` names.

    load_all: loads the whole training part of the same set, called only if some names are not in `dataset`: images of
    its other splits and classes may be listed. Raises UserError for unknown names, and if no image remains.
    """
    listed = set(read_exclusion(path))
    ids = [image_id(dataset, i) for i in range(len(dataset))]
    unknown = listed.difference(ids)
    if unknown:
        everything = load_all()
        unknown.difference_update(image_id(everything, i) for i in range(len(everything)))
    name = f"{dataset.name} ({dataset.split})"
    if unknown:
        raise UserError(
            f"{len(unknown)} of the {len(listed)} images listed in {path} are not in the training part of {name}: "
            f"{', '.join(sorted(unknown)[:3])}. Its names look like {ids[0]}; give the list that was made for this set."
        )
    remaining = np.array([i for i, image in enumerate(ids) if image not in listed], np.int64)
    if not len(remaining):
        raise UserError(f"{path} lists all {len(ids)} images of {name}: none is left.")
    logger.warning(
        "%s: %d of %d images are left out, as %s lists them", name, len(ids) - len(remaining), len(ids), path
    )
    return dataset.take(remaining)
