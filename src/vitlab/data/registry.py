"""Data sets by name: the table `DATASETS`, and `load_dataset`. Every command reads images by it: it opens the
stored splits (`_open`), reads the images of the requested one (`_choose_split`), and leaves out those not wanted."""

import dataclasses
import functools
import importlib
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitlab.config.data import ReadConfig
from vitlab.data.classes import keep_classes, warn_of_classes
from vitlab.data.dataset import Dataset, SplitReader, join, with_image_names
from vitlab.data.decode import Levels
from vitlab.data.downloads import cache_folder
from vitlab.data.exclude import leave_out
from vitlab.data.folder import SPLIT_OF, folder_splits
from vitlab.data.hub import hub_splits
from vitlab.data.levels import with_levels
from vitlab.data.shards import shard_splits
from vitlab.data.splits import group_by, stratified_split, stratified_subset
from vitlab.data.table import csv_splits, metadata_splits
from vitlab.data.vtab.sources import SOURCES
from vitlab.errors import UserError, quoted, warn_once
from vitlab.settings import nearest

SPLITS = ("train", "val", "test", "trainval", "all")
CUSTOM = ("folder", "csv", "shards", "hub")  # the kinds of the user's data sets, as in `folder:PATH`
_CONTENT = {
    "folder": "a folder of class folders with images, or a table of images as csv:PATH",
    "csv": "a CSV file with the columns file and label",
    "shards": "a folder of shards named train-*.tar",
}
Root = str | os.PathLike[str] | None
"""The folder that relative paths start at; None for here, or for the user's cache."""
PARTIAL = ("imagenet", "imagenet_real")  # the data sets whose test images may be missing (`partial`)


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """A row of `DATASETS`."""

    source: str
    license: str
    reader: str = ""
    """MODULE:FUNCTION of `vitlab.data`, from (name, root, download) to `SplitReader`; "" for the kinds in `CUSTOM`."""
    num_classes: int | None = None  # None if it varies
    image_size: tuple[int, int] | None = None  # (H, W) in pixels, None for any size
    splits: Mapping[str, int] = dataclasses.field(default_factory=dict)  # numbers of images
    held_out: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Splits missing from the source, with the fraction of train that is held out for them."""
    eval_resize: tuple[int, int] | None = None
    """(shorter side, center) in pixels if the set is evaluated at another proportion than the model's."""


def _read_table() -> dict[str, DatasetInfo]:
    """`datasets.toml`; rows without a source are filled from `vtab/sources.toml`."""
    rows = tomllib.loads((Path(__file__).parent / "datasets.toml").read_text())
    for name, row in rows.items():
        if "source" not in row:
            source = SOURCES[name]
            access = "download, or" if source.access == "automatic" else "by hand:"
            row |= {
                "reader": "vtab.tasks:published_splits",
                "source": f"{source.page}; {access} a folder as published",
                "license": source.license,
                "num_classes": source.classes,
                "splits": {SPLIT_OF[split]: count for split, count in source.sizes.items()},
            }
        row |= {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    return {name: DatasetInfo(**row) for name, row in rows.items()}


DATASETS = _read_table()  # the data sets that have a name; a reader is imported when a set needs it


def load_dataset(
    name: str,
    split: str,
    *,
    root: Root = None,
    classes: Sequence[int | str] | None = None,
    download: bool = True,
    on_error: str = "raise",
    exclude: str | os.PathLike[str] | None = None,
    subset_fraction: float | None = None,
    subset_seed: int = 0,
    seed: int = 0,
    whole_train: bool = False,
    partial: bool = False,
    levels: Levels | None = None,
    read: ReadConfig = ReadConfig(),
    multi_label: bool = False,
) -> Dataset:
    """A data set by its name in `DATASETS`, with PATH filled in.

    split: "train", "val", "test", "trainval" (all but test) or "all" (every image once; not of VTAB's tasks). A split
    that is missing from the source is held out from its train, stratified, by `seed`, so that splits never overlap.
    Where the user's data set (`folder:` and the like) has val and no test, val is used as test, and trainval is train.
    root: the folder that holds the set, or will (default: the user's cache); a relative PATH starts there.
    classes: the classes to keep, see `keep_classes`. exclude: a list of images to leave out (`vitlab duplicates`).
    on_error: "raise" or "skip" for unreadable images of a set that is decoded into memory here.
    subset_fraction: the fraction of each class to keep, drawn by `subset_seed` from the whole split, before `classes`
    and `exclude` remove images. A smaller subset is contained in every larger one.
    whole_train: hold out no val from the user's "train". partial: images of the test split may be missing (`PARTIAL`).
    levels: the black and white of the images, see `Dataset`. read: how a table and groups are read.
    multi_label: images of a table may have several labels or none, as the model or its loss says.
    """
    for given, value, allowed in (("split", split, SPLITS), ("on_error", on_error, ("raise", "skip"))):
        if value not in allowed:
            raise UserError(f"{given} must be one of {', '.join(allowed)}, not {value!r}")
    if partial and name not in PARTIAL:
        raise UserError(f"partial goes with {' and '.join(PARTIAL)}, not with {quoted(name)}; leave it out.")
    if name.startswith("vtab:"):
        from vitlab.data.vtab.tasks import load_task

        if read.read_settings:
            raise UserError(f"{', '.join(read.read_settings)} have no effect on the published splits of {name}")
        dataset = load_task(name.removeprefix("vtab:"), split, _expanded(root) or cache_folder(), download)
    else:
        opened = _open(name, root, read, download, partial, multi_label)
        dataset = _choose_split(name, opened, split, seed, whole_train)
    if not len(dataset):
        unit = "images" if dataset.groups is None else "groups of images"
        raise UserError(f"{name}: train has too few {unit} per class to hold out a {split} split; add some")
    if subset_fraction is not None:
        dataset = stratified_subset(dataset, subset_fraction, subset_seed)
    if classes is not None:
        dataset = keep_classes(dataset, tuple(classes))
    if exclude is not None:
        options: dict[str, Any] = {"root": root, "seed": seed, "read": read, "multi_label": multi_label}
        every = "all" if _is_custom(name) else "trainval"
        dataset = leave_out(dataset, exclude, lambda: load_dataset(name, every, on_error="skip", **options))
    if _is_custom(name):
        warn_of_classes(dataset)
    return with_levels(dataset, levels).read_if_small(on_error)


def check_source(name: str, root: Root = None) -> None:
    """Raises UserError for an unknown data set and for a missing folder. Reads no data."""
    kind, _, path = name.partition(":")
    if path and (kind in ("hub", "vtab") or (kind == "shards" and _is_address(path))):
        return
    if path and kind in _CONTENT:
        found, form = _resolve(path, root), "file" if kind == "csv" else "folder"
        actual = "is a folder" if found.is_dir() else "is a file" if found.exists() else "does not exist"
        if actual != f"is a {form}":
            raise UserError(f"the {form} {quoted(str(found))} {actual} (in {Path.cwd()}): give {_CONTENT[kind]}")
    elif name not in DATASETS or not DATASETS[name].reader:
        hints = [f"unknown data set {name!r}"]
        if _resolve(name, root).is_file():
            hints.append(f"for the images that the file {quoted(name)} lists write {quoted('csv:' + name)}")
        if _resolve(name, root).is_dir():
            hints.append(f"for your own images in the folder {quoted(name)} write {quoted('folder:' + name)}")
        raise UserError("; ".join([*hints, nearest(name, DATASETS)]) + ". `vitlab list datasets` shows all.")


def require_disjoint(train: Dataset, test: Dataset) -> None:
    """Raises UserError if any image of `test` is also in `train`."""
    common = {train.path(i) for i in range(len(train))} & {test.path(i) for i in range(len(test))}
    if common:
        raise UserError(
            f"{len(common)} of the {len(test)} test images of {quoted(test.name)} are also in the training split "
            f"({train.split} and {test.split}), first {quoted(min(common))}: choose other splits."
        )


def splits_to_copy(name: str, splits: Sequence[str], *, root: Root = None, read: ReadConfig) -> list[str]:
    """`splits` without "test" if val is used as test, which is logged: what `vitlab shard` copies."""
    if {"val", "test"} <= set(splits) and _val_is_test(name, _open(name, root, read)[0]):
        _warn_that_val_is_test(name)
        return [split for split in splits if split != "test"]
    return list(splits)


def digits_splits(name: str, root: Path | None, download: bool) -> SplitReader:
    """scikit-learn's digits; a fifth of each class is the test split, whatever the seed of a run."""
    from sklearn.datasets import load_digits  # slow to import

    values, labels = map(np.asarray, load_digits(return_X_y=True))  # 0..16
    gray = np.rint(values * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    fixed = stratified_split(labels, {"test": 0.2}, seed=0)

    def read(split: str) -> Dataset:
        colors = np.repeat(gray, 3, axis=3)
        return Dataset(name, split, tuple("0123456789"), labels.astype(np.int64), colors).take(fixed[split])

    return ["train", "test"], read


def _expanded(root: Root) -> Path | None:
    return Path(root).expanduser() if root else None


def _resolve(path: str, root: Root) -> Path:
    return Path(_expanded(root) or "", Path(path).expanduser())


def _is_address(path: str) -> bool:
    """Whether shards are at an address (`https://`, `hf://`) or on the hub (`hub:OWNER/NAME`)."""
    return re.match(r"hub:|[a-z0-9]+://", path) is not None


def _is_custom(name: str) -> bool:
    kind, _, path = name.partition(":")
    return kind in CUSTOM and path != ""


def _open(
    name: str, root: Root, read: ReadConfig, download: bool = True, partial: bool = False, multi_label: bool = False
) -> SplitReader:
    """The splits of a data set as they are stored, with their groups."""
    check_source(name, root)
    kind, _, path = name.partition(":")
    table = None
    if kind in ("csv", "folder"):
        open_table = csv_splits if kind == "csv" else metadata_splits
        table = open_table(_resolve(path, root), name, read, multi_label)
    unused = [setting for setting in ("label_separator", "test_fold") if setting in read.read_settings]
    if table is None and unused:
        settings = " and ".join(unused)
        raise UserError(f"{settings} have no effect on {quoted(name)}, which is not a table; leave them out")
    present, read_split = table or _open_source(name, root, download, partial, multi_label)
    pattern = read.group_by
    return present, read_split if pattern is None else lambda split: group_by(read_split(split), pattern)


def _open_source(name: str, root: Root, download: bool, partial: bool, multi_label: bool) -> SplitReader:
    """As `_open`, for anything but a table, and without groups."""
    kind, _, path = name.partition(":")
    folder = _expanded(root)
    if kind == "hub":
        return hub_splits(path, name, folder, multi_label)
    if kind == "folder":
        return folder_splits(_resolve(path, root), name)
    if kind == "shards" and _is_address(path):
        from vitlab.data.remote import remote_splits

        return remote_splits(path, name, folder or cache_folder() / "shards")
    if kind == "shards":
        return shard_splits(_resolve(path, root), name)
    module, function = DATASETS[name].reader.split(":")
    read = getattr(importlib.import_module(f"vitlab.data.{module}"), function)
    return read(name, folder, download, partial=True) if partial else read(name, folder, download)


def _choose_split(name: str, opened: SplitReader, split: str, seed: int, whole_train: bool) -> Dataset:
    """The images of the requested split; `whole_train`: see `load_dataset`."""
    present, read = opened
    if whole_train and split == "train" and _is_custom(name) and "val" not in present:
        split = "trainval"
    if split in ("test", "trainval") and _val_is_test(name, present):
        _warn_that_val_is_test(name)
    parts = [_read_part(part, read, seed) for part in _recipe(name, present, split)]
    dataset = functools.reduce(join, parts)
    has_val = split == "trainval" and len(parts) == 2 and _is_custom(name)
    from_val = np.arange(len(dataset)) >= len(parts[0]) if has_val else None
    return dataclasses.replace(dataset, split=split, from_val=from_val)


class _Part(NamedTuple):
    """Images of a stored split: all, or if splits are cut from it, those of the `chosen` ones."""

    stored: str
    held_out: Mapping[str, float] = {}  # the splits that are cut, with their fractions
    chosen: tuple[str, ...] = ()  # "train" is what remains


def _recipe(name: str, present: Sequence[str], split: str) -> list[_Part]:
    """The images of the requested split, for stored splits that are `present`. Raises UserError if there are none.

    Of the user's data sets, where images are `cut` from train and the `rest` remains:

        present          train  val  test  trainval
        train            rest   cut  cut   rest + val cut
        train, test      rest   cut  test  train
        train, val       train  val  val   train
        train, val, test train  val  test  train + val

    Of a published set with train and test, trainval is rest + val cut: the images of train in another order.
    """
    if split == "all":
        return [_Part(stored) for stored in ("train", "val", "test") if stored in present]
    held_out = DATASETS["folder:PATH" if _is_custom(name) else name].held_out
    if _val_is_test(name, present):  # the third row
        split, held_out = {"test": "val", "trainval": "train"}.get(split, split), {}
    elif split == "trainval" and _is_custom(name) and "test" in present and "val" not in present:  # the second row
        split, held_out = "train", {}
    if split not in present and "train" not in present:
        allowed = ", ".join([*present, "all"])
        raise UserError(f"{quoted(name)} has no {split} split, and no train to cut it from; give one of {allowed}.")
    cut = {each: fraction for each, fraction in held_out.items() if each not in present}
    if split == "trainval" and "val" not in cut:
        return _recipe(name, present, "train") + _recipe(name, present, "val")
    if split in present and (split != "train" or not cut):
        return [_Part(split)]
    return [_Part("train", cut, ("train", "val") if split == "trainval" else (split,))]


def _val_is_test(name: str, present: Sequence[str]) -> bool:
    """Whether val is used as test: the user's data has no other test images."""
    return _is_custom(name) and "val" in present and "test" not in present


def _warn_that_val_is_test(name: str) -> None:
    warn_once(f"{quoted(name)} has no test split: val is used as test and excluded from training")


def _read_part(part: _Part, read: Callable[[str], Dataset], seed: int) -> Dataset:
    """The images of a part. That splits are cut from the user's data set is logged."""
    stored = with_image_names(read(part.stored))
    if not part.held_out:
        return stored
    indices = stratified_split(stored.labels, part.held_out, seed, groups=stored.groups)
    if _is_custom(stored.name):  # `vitlab list datasets` shows it of the others
        absent = " and no ".join(sorted(part.held_out))
        drawn = "stratified" if stored.groups is None else "stratified, in whole groups"
        warn_once(
            f"{quoted(stored.name)} has no {absent} split: cut from train, {drawn}, seed {seed}; {len(stored)} images"
        )
    return stored.take(np.concatenate([indices[split] for split in part.chosen]))
