"""The data sets by name: `DATASETS` is the table, `load_dataset` reads one."""

import dataclasses
import difflib
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from vitlab.data import pixels
from vitlab.data.dataset import Dataset, Splits
from vitlab.data.downloads import cache_folder
from vitlab.data.exclude import leave_out
from vitlab.data.folder import folder_splits, require_folder
from vitlab.data.hub import hub_splits
from vitlab.data.imagenet import ORIGINS, imagenet_splits, objectnet_splits, real_splits, v2_splits
from vitlab.data.remote import is_address, remote_splits
from vitlab.data.shards import shard_splits
from vitlab.data.subsets import (
    CUSTOM_HELD_OUT,
    choose_custom_split,
    choose_split,
    keep_classes,
    part_of,
    stratified_split,
    val_is_test,
    warn_once,
    warn_val_is_test,
)
from vitlab.data.vtab.sources import SOURCES
from vitlab.data.vtab.tasks import load_task, read_published
from vitlab.errors import UserError, quoted

logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "test", "trainval", "all")
CUSTOM = ("folder", "shards", "hub")
"""The kinds of the user's data sets, as in `folder:PATH`."""


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """A row of `DATASETS`. `image_size` is (H, W) in pixels, None for any size; `splits` counts images.

    num_classes: if the table has no names of the `classes`; `splits` has the source's own sizes then. held_out: the
    splits that the source lacks, with the share of its train that stands in for them (stratified, seeded).
    """

    source: str
    license: str
    classes: tuple[str, ...] = ()
    num_classes: int | None = None
    image_size: tuple[int, int] | None = None
    splits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    held_out: Mapping[str, float] = dataclasses.field(default_factory=lambda: CUSTOM_HELD_OUT)


def _published_info(
    name: str, size: tuple[int, int] | None = None, held_out: Mapping[str, float] | None = None
) -> DatasetInfo:
    """A set of `SOURCES`, with its splits as published; val is cut from train if there is none."""
    source = SOURCES[name]
    access = "download, or a folder as published" if source.access == "automatic" else "by hand: a folder as published"
    splits = {"val" if split == "validation" else split: count for split, count in source.sizes.items()}
    if held_out is None:
        held_out = {} if "val" in splits else {"val": 0.1}
    page = f"{source.page}; {access}"
    return DatasetInfo(page, source.license, (), source.classes, image_size=size, splits=splits, held_out=held_out)


def _imagenet_info(name: str, splits: Mapping[str, int], held_out: Mapping[str, float] | None = None) -> DatasetInfo:
    """A set that is evaluated with ImageNet's classes."""
    return DatasetInfo(*ORIGINS[name], num_classes=1000, splits=splits, held_out=held_out or {})


def _cifar_info(reader: pixels.Cifar) -> DatasetInfo:
    return DatasetInfo(
        source=f"University of Toronto; download, or a folder with {reader.archive} or its .bin files",
        license="not stated; cite Krizhevsky 2009",
        classes=pixels.CLASSES[reader.name],
        image_size=(32, 32),
        splits={"train": 49_000, "val": 1_000, "test": 10_000},
        held_out={"val": 0.02},  # Google's fine-tuning trains on train[:98%]
    )


DATASETS: dict[str, DatasetInfo] = {
    "digits": DatasetInfo(
        source="scikit-learn, embedded (UCI Optical Recognition of Handwritten Digits); a fixed split",
        license="CC BY 4.0",
        classes=tuple("0123456789"),
        image_size=(8, 8),
        splits={"train": 1259, "val": 179, "test": 359},
        held_out={"val": 0.125},  # 10 % of all, after the fixed test part
    ),
    "fashion_mnist": DatasetInfo(
        source="Zalando; download, Debian package dataset-fashion-mnist, or a folder with its idx files",
        license="MIT",
        classes=pixels.CLASSES["fashion_mnist"],
        image_size=(28, 28),
        splits={"train": 54_000, "val": 6_000, "test": 10_000},
        held_out={"val": 0.1},
    ),
    "cifar10": _cifar_info(pixels.CIFAR10),
    "cifar100": _cifar_info(pixels.CIFAR100),
    "caltech101": _published_info("caltech101"),
    "dtd": _published_info("dtd"),
    "flowers102": _published_info("flowers102"),
    "pets": _published_info("pets"),
    "sun397": _published_info("sun397"),
    "svhn": _published_info("svhn", (32, 32)),
    "patch_camelyon": _published_info("patch_camelyon", (96, 96)),
    # No split is published: the shares are those of VTAB.
    "eurosat": _published_info("eurosat", (64, 64), {"val": 0.2, "test": 0.2}),
    "resisc45": _published_info("resisc45", (256, 256), {"val": 0.2, "test": 0.2}),
    "diabetic_retinopathy": _published_info("diabetic_retinopathy"),
    "imagenet": _imagenet_info(
        "imagenet", {"train": 1_281_167, "test": 50_000}, {"val": 0.01}
    ),  # Google's: train[:99%]
    "imagenet_real": _imagenet_info("imagenet_real", {"test": 46_837}),  # of 50,000; the others have no label
    "imagenet_v2": _imagenet_info("imagenet_v2", {"test": 10_000}),
    "imagenet_v2_threshold": _imagenet_info("imagenet_v2_threshold", {"test": 10_000}),
    "imagenet_v2_top": _imagenet_info("imagenet_v2_top", {"test": 10_000}),
    "objectnet": _imagenet_info("objectnet", {"test": 18_574}),  # of the 113 classes that it shares with ImageNet
    "vtab:TASK": DatasetInfo(
        splits={"train": 800, "val": 200},
        source="the 19 tasks of VTAB-1k, each from its own: `vitlab list vtab`",
        license="of each task",
        held_out={},
    ),
    "folder:PATH": DatasetInfo(
        source="your images: PATH/CLASS/image.jpg, or PATH/{train,val,test}/CLASS/image.jpg",
        license="yours",
    ),
    "shards:PATH": DatasetInfo(
        source="your WebDataset tars PATH/{train,val,test}-*.tar of KEY.jpg|png|webp and KEY.cls, with the image's "
        "class or several (3 17 42): so ImageNet-21k, and sets like JFT; classes.json. Or on a web server, "
        "https://HOST/FOLDER/, as `vitlab shard` writes them; on the Hugging Face hub, hub:OWNER/NAME",
        license="yours",
    ),
    "hub:OWNER/NAME": DatasetInfo(
        source="a set of the Hugging Face hub (pip install 'vitlab[data]'), or a folder of its package datasets; "
        "OWNER/NAME?image=COLUMN&label=COLUMN&config=NAME&revision=NAME where it does not go without saying",
        license="of each set",
    ),
}


def load_dataset(
    name: str,
    split: str,
    *,
    root: str | os.PathLike[str] | None = None,
    classes: Sequence[int] | None = None,
    download: bool = True,
    on_error: str = "raise",
    exclude: str | os.PathLike[str] | None = None,
    part: float | None = None,
    part_seed: int = 0,
    seed: int = 0,
    whole_train: bool = False,
    partial: bool = False,
) -> Dataset:
    """A data set by its name in `DATASETS`, with PATH filled in.

    split: "train", "val", "test", "trainval" or "all". A split that the source lacks is cut from its train split:
    stratified, by `seed`, so that splits never overlap; "trainval" is all but test, and "all" (not of VTAB's tasks)
    every image of the source once. If the user's data set (`folder:`, `shards:`, `hub:`) has val and no test, val is
    the test: "val" and "test" are the same images, "train" and "trainval" are train.
    root: the folder that holds the set, or will (default: the user's cache); a relative PATH starts there.
    classes: the labels to keep, renumbered 0, 1, ... in the order given; an image stays if it has any of them.
    on_error: "raise" or "skip" for unreadable images of a set that is decoded into memory here.
    exclude: a list of images to leave out, as `vitlab duplicates` writes it.
    part: the share of each class to keep, chosen by `part_seed` from the whole split (see `part_of`), so that a smaller
    part is contained in every larger one, and `classes` and `exclude` only take images away.
    whole_train: "train" of the user's data set gives up nothing for a val split that it lacks.
    partial: images of the test split of `imagenet` and `imagenet_real` may be missing; see `Dataset.full_size`.
    """
    if split not in SPLITS:
        raise UserError(f"the split must be one of {', '.join(SPLITS)}, not {split!r}")
    if on_error not in ("raise", "skip"):
        raise UserError(f"on_error must be 'raise' or 'skip', not {on_error!r}")
    if partial and name not in _PARTIAL_READERS:
        raise UserError(f"partial goes with {' and '.join(_PARTIAL_READERS)}, not with {quoted(name)}; leave it out.")
    kind, _, path = name.partition(":")
    folder = Path(root).expanduser() if root else None
    if kind == "vtab" and path:
        dataset = load_task(path, split, folder or cache_folder(), download)
    elif custom := _custom_splits(name, root):
        dataset = choose_custom_split(name, *custom, split, seed, whole_train)
        if kind in _PATH_READERS and not is_address(path):
            dataset = dataclasses.replace(dataset, folder=str(_resolve(path, root)))
    elif name in _READERS:
        present, read = (_PARTIAL_READERS if partial else _READERS)[name](folder, download)
        dataset = choose_split(present, read, split, DATASETS[name].held_out, seed)
    else:
        raise UserError(_unknown(name, root))
    if not len(dataset):
        raise UserError(f"{name}: no class of train has enough images to cut a {split} split from it; add some")
    if part is not None:
        dataset = part_of(dataset, part, part_seed)
    if classes is not None:
        dataset = keep_classes(dataset, tuple(classes))
    if exclude is not None:
        whole = "all" if kind in CUSTOM else "trainval"
        dataset = leave_out(dataset, exclude, lambda: load_dataset(name, whole, root=root, on_error="skip", seed=seed))
    if kind in CUSTOM:
        _warn_of_small_classes(dataset)
    return dataset.in_memory(on_error)


def check_source(name: str, root: str | os.PathLike[str] | None = None) -> None:
    """Raises UserError for a name that is not a data set's, and for a missing folder. Reads no data."""
    kind, _, path = name.partition(":")
    if kind in _PATH_READERS and path:
        if not is_address(path):
            content = {"folder": "class folders with images", "shards": "shards named train-*.tar"}[kind]
            require_folder(_resolve(path, root), content)
    elif name not in _READERS and not (kind in ("hub", "vtab") and path):
        raise UserError(_unknown(name, root))


def _resolve(path: str, root: str | os.PathLike[str] | None) -> Path:
    return Path(root or "", Path(path).expanduser())


def _unknown(name: str, root: str | os.PathLike[str] | None) -> str:
    hints = []
    if _resolve(name, root).is_dir():
        hints.append(f"for your own images in the folder {quoted(name)} write {quoted('folder:' + name)}")
    if near := difflib.get_close_matches(name, DATASETS, n=2):
        hints.append(f"the nearest: {', '.join(near)}")
    return "; ".join([f"unknown data set {name!r}", *hints]) + f" (there are {', '.join(DATASETS)})"


def _custom_splits(name: str, root: str | os.PathLike[str] | None) -> Splits | None:
    """The splits of the user's data set; None if `name` does not name one."""
    kind, _, path = name.partition(":")
    if not path or kind not in CUSTOM:
        return None
    folder = Path(root).expanduser() if root else None
    if kind == "hub":
        return hub_splits(path, name, folder)
    if kind == "shards" and is_address(path):
        return remote_splits(path, name, folder or cache_folder() / "shards")
    return _PATH_READERS[kind](_resolve(path, root), name)


def splits_to_copy(name: str, splits: Sequence[str], *, root: str | os.PathLike[str] | None = None) -> list[str]:
    """`splits` without test if it is the user's val, so the same images."""
    custom = _custom_splits(name, root) if {"val", "test"} <= set(splits) else None
    if not custom or not val_is_test(custom[0]):
        return list(splits)
    warn_val_is_test(name)
    return [split for split in splits if split != "test"]


def _warn_of_small_classes(dataset: Dataset) -> None:
    counts = np.bincount(dataset.all_labels.values, minlength=len(dataset.classes))
    if len(small := np.flatnonzero(counts < 2)):
        named = ", ".join(f"{quoted(dataset.classes[c])} ({counts[c]})" for c in small[:10])
        more = f", ... ({len(small)} classes)" if len(small) > 10 else ""
        warn_once(f"{quoted(dataset.name)}: classes with fewer than two images in {dataset.split}: {named}{more}")


def require_disjoint(train: Dataset, test: Dataset) -> None:
    """Raises UserError if any image of `test` is also in `train`."""
    common = {train.path(i) for i in range(len(train))} & {test.path(i) for i in range(len(test))}
    if common:
        raise UserError(
            f"{len(common)} of the {len(test)} test images of {quoted(test.name)} are also those to learn from "
            f"({train.split} and {test.split}), first {quoted(min(common))}: choose other splits."
        )


# --------------------------------------------------------------------------------------------------- readers


def _digits(root: Path | None, download: bool) -> Splits:
    from sklearn.datasets import load_digits  # slow to import

    levels, labels = map(np.asarray, load_digits(return_X_y=True))  # 0..16
    gray = np.rint(levels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8)
    fixed = stratified_split(labels, {"test": 0.2}, seed=0)

    def read(split: str) -> Dataset:
        colors = np.repeat(gray[..., None], 3, axis=3)
        return Dataset("digits", split, DATASETS["digits"].classes, labels.astype(np.int64), colors).take(fixed[split])

    return ["train", "test"], read


def _published(name: str) -> Callable[[Path | None, bool], Splits]:
    """A data set of `vtab/readers.py`, with our names of the splits."""
    names = {"val" if split == "validation" else split: split for split in SOURCES[name].sizes}

    def splits(root: Path | None, download: bool) -> Splits:
        folder = root or cache_folder()

        def read(split: str) -> Dataset:
            dataset, _ = read_published(name, folder, names[split], download)
            return dataclasses.replace(dataset, split=split, folder=str(folder))

        return list(names), read

    return splits


_READERS: dict[str, Callable[[Path | None, bool], Splits]] = {
    "digits": _digits,
    "fashion_mnist": pixels.fashion_mnist,
    "cifar10": pixels.CIFAR10,
    "cifar100": pixels.CIFAR100,
    "imagenet": imagenet_splits,
    "imagenet_real": real_splits,
    "imagenet_v2": v2_splits,
    "imagenet_v2_threshold": functools.partial(v2_splits, name="imagenet_v2_threshold"),
    "imagenet_v2_top": functools.partial(v2_splits, name="imagenet_v2_top"),
    "objectnet": objectnet_splits,
    **{name: _published(name) for name, source in SOURCES.items() if source.classes and name != "cifar100"},
}
_PARTIAL_READERS: dict[str, Callable[[Path | None, bool], Splits]] = {
    "imagenet": functools.partial(imagenet_splits, partial=True),
    "imagenet_real": functools.partial(real_splits, partial=True),
}
_PATH_READERS = {"folder": folder_splits, "shards": shard_splits}
