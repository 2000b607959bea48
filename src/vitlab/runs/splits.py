"""The images of a run: its splits, without those that cannot be read."""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitlab.config import DataConfig
from vitlab.data.classes import Failure, require_classes_left, warn_of_contradictions, warn_of_lost_classes
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.levels import measure_range, warn_of_narrow_range
from vitlab.data.registry import load_dataset, require_disjoint
from vitlab.data.splits import warn_of_shared_groups
from vitlab.display import ProgressDisplay
from vitlab.errors import UserError, quoted
from vitlab.train.distributed import SINGLE, World


@dataclass(frozen=True)
class Splits:
    """The data sets of a run, each loaded once."""

    train: Dataset
    val: Dataset
    test: Dataset
    unreadable: list[dict[str, str]] | None = None
    """Path and reason of each image that `drop_unreadable` dropped; None where it was not called."""

    @property
    def record(self) -> dict[str, Any]:
        """The dropped images for `result.json`."""
        return {} if self.unreadable is None else {"unreadable": self.unreadable}


def with_measured_range(data: DataConfig, world: World = SINGLE) -> DataConfig:
    """`data` with numbers for `range="auto"`, measured in the whole training split: `subset_fraction` may change."""
    if data.range != "auto":
        return data
    options: dict[str, Any] = {name: getattr(data, name) for name in ("root", "classes", "exclude", "partial")}

    def measure() -> tuple[int, int]:
        return measure_range(load_dataset(data.name, data.train_split, on_error="skip", read=data, **options))

    with world.rank_0_first():
        data = dataclasses.replace(data, range=measure())
    return data


def load_splits(data: DataConfig, world: World = SINGLE, multi_label: bool = False) -> Splits:
    """The splits of a run; `exclude` and `subset_fraction` apply to the training split only.

    multi_label: as in `load_dataset`. Groups of images in training and test are logged.
    """
    options: dict[str, Any] = {
        name: getattr(data, name) for name in ("root", "classes", "on_error", "partial", "levels")
    }
    options |= {"read": data, "multi_label": multi_label}
    with world.rank_0_first():
        names = dict.fromkeys((data.eval_split, "test"))
        splits = {split: load_dataset(data.name, split, **options) for split in names}
        train_set = splits.get(data.train_split) if data.exclude is None and data.subset_fraction is None else None
        if train_set is None:
            options |= {"subset_fraction": data.subset_fraction, "subset_seed": data.subset_seed or 0}
            train_set = load_dataset(data.name, data.train_split, exclude=data.exclude, **options)
        if data.range is None and ":" in data.name and world.is_rank_0:
            warn_of_narrow_range(train_set)
    if data.train_split == "val":  # your own images without a test split: test is an alias of val
        require_disjoint(train_set, splits["test"])
    warn_of_shared_groups(train_set, splits["test"])
    return Splits(train_set, splits[data.eval_split], splits["test"])


def drop_unreadable(splits: Splits, world: World = SINGLE) -> Splits:
    """The splits without unreadable images, which are listed; every image is decoded once.

    Rank 0 decodes for all, so that all processes have the same images.
    """
    reasons: dict[str, str] = {}

    def readable(dataset: Dataset) -> Dataset:
        failures = [Failure(*each) for each in world.broadcast_object(lambda: _find_unreadable(dataset))]
        reasons.update({failure.path: failure.reason for failure in failures})
        if len(failures) == len(dataset):
            raise UserError(
                f"none of the {len(dataset):,} images of {dataset.name} ({dataset.split}) can be read; the first, "
                f"{quoted(failures[0].path)}: {failures[0].reason}."
            )
        check_classes = require_classes_left if dataset is splits.train else warn_of_lost_classes
        check_classes(dataset, failures)
        return dataset.take(np.setdiff1d(np.arange(len(dataset)), [failure.image for failure in failures]))

    train_set, test = readable(splits.train), readable(splits.test)
    val = test if splits.val is splits.test else readable(splits.val)
    if world.is_rank_0:
        warn_of_contradictions(train_set, val, test)
    return Splits(train_set, val, test, [{"path": path, "reason": reasons[path]} for path in sorted(reasons)])


def require_readable_classes(train: Dataset, world: World = SINGLE) -> None:
    """Raises UserError for a class without a readable image. Decodes one of each class, on rank 0 and for all, and more
    where it cannot be read. Remote shards, which would be downloaded, are not checked."""
    if train.is_remote:
        return
    labels = train.all_labels
    order = np.argsort(labels.values, kind="stable")
    images = np.repeat(np.arange(len(train)), labels.counts)[order]
    classes = np.split(images, np.flatnonzero(np.diff(labels.values[order])) + 1)

    def find_first(indices: np.ndarray) -> list[Failure]:
        failures = []
        for index in indices.tolist():
            if (failure := _failure_of(train, index)) is None:
                break
            failures.append(failure)
        return failures

    def find() -> list[Failure]:
        with ThreadPoolExecutor() as pool:
            return [failure for failures in pool.map(find_first, classes) for failure in failures]

    require_classes_left(train, [Failure(*each) for each in world.broadcast_object(find)])


def _failure_of(dataset: Dataset, index: int) -> Failure | None:
    """Why an image cannot be decoded, if it cannot."""
    try:
        dataset.image(index)
    except ImageError as error:
        return Failure(index, error.path, error.reason)
    return None


def _find_unreadable(dataset: Dataset) -> list[Failure]:
    """Every image that cannot be decoded."""
    failures = {index: Failure(index, error.path, error.reason) for index, error in dataset.failures.items()}
    if dataset.pixels is None:
        display = ProgressDisplay(f"checking that the images of {dataset.split} can be read", len(dataset))
        with display, ThreadPoolExecutor() as pool:  # decoding releases the GIL
            for start in range(0, len(dataset), 512):  # millions of tasks at once would fill the memory
                block = range(start, min(start + 512, len(dataset)))
                found = pool.map(functools.partial(_failure_of, dataset), block)
                failures |= {failure.image: failure for failure in found if failure is not None}
                display.update(block.stop)
    return list(failures.values())
