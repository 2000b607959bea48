"""The data sets by name: `DATASETS` is the table, `load_dataset` the one door."""

import dataclasses
import difflib
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from vitlab.data import downloads as fetch
from vitlab.data import pixels
from vitlab.data.dataset import Dataset, Splits, folder_splits, join, require_folder
from vitlab.data.decode import Entry
from vitlab.data.exclude import leave_out
from vitlab.data.hub import hub_splits
from vitlab.data.imagenet import ORIGINS, imagenet_splits, objectnet_splits, real_splits, v2_splits
from vitlab.data.remote import is_address, remote_splits
from vitlab.data.shards import shard_splits
from vitlab.data.subsets import part_of
from vitlab.data.vtab import published
from vitlab.data.vtab.tasks import load_task
from vitlab.errors import UserError, quoted
from vitlab.rng import Stream, philox

logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "test", "trainval", "all")
OWN = ("folder", "shards", "hub")
"""The kinds of the user's own sets, as in `folder:PATH`."""
OWN_HELD_OUT = {"val": 0.1, "test": 0.1}
"""Share of train that stands in for a split that such a set lacks."""


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """A row of `DATASETS`. `image_size` is (H, W) in pixels; `splits` counts images.

    held_out: the splits that the source lacks, with the share of its train that stands in for them
    (stratified, seeded). `classes`, `image_size` and `splits` are empty where the user's folder decides.
    num_classes: where their names are not in the table; `splits` has the source's own sizes then. Without `image_size`
    images are of any size.
    """

    source: str
    license: str
    classes: tuple[str, ...] = ()
    num_classes: int | None = None
    image_size: tuple[int, int] | None = None
    channels: int = 3
    splits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    held_out: Mapping[str, float] = dataclasses.field(default_factory=lambda: OWN_HELD_OUT)


def _row(name: str, size: tuple[int, int] | None = None, held_out: Mapping[str, float] | None = None) -> DatasetInfo:
    """A set of `fetch.SOURCES`, with its splits as published; val is cut from train where there is none."""
    source = fetch.SOURCES[name]
    how = "download, or a folder as published" if source.access == "automatic" else "by hand: a folder as published"
    splits = {"val" if split == "validation" else split: count for split, count in source.sizes.items()}
    return DatasetInfo(
        source=f"{source.page}; {how}",
        license=source.license,
        num_classes=source.classes,
        image_size=size,
        splits=splits,
        held_out=held_out or ({} if "val" in splits else {"val": 0.1}),
    )


def _thousand(name: str, splits: Mapping[str, int], held_out: Mapping[str, float] | None = None) -> DatasetInfo:
    """A set that is judged by ImageNet's classes."""
    return DatasetInfo(*ORIGINS[name], num_classes=1000, splits=splits, held_out=held_out or {})


DATASETS: dict[str, DatasetInfo] = {
    "digits": DatasetInfo(
        classes=tuple("0123456789"),
        image_size=(8, 8),
        channels=1,
        splits={"train": 1259, "val": 179, "test": 359},
        source="scikit-learn, embedded (UCI Optical Recognition of Handwritten Digits); a fixed split",
        license="CC BY 4.0",
        held_out={"val": 0.125},  # 10 % of all, after the fixed test part
    ),
    "fashion_mnist": DatasetInfo(
        classes=pixels.CLASSES["fashion_mnist"],
        image_size=(28, 28),
        channels=1,
        splits={"train": 54_000, "val": 6_000, "test": 10_000},
        source="Zalando; download, Debian package dataset-fashion-mnist, or a folder with its idx files",
        license="MIT",
        held_out={"val": 0.1},
    ),
    "cifar10": DatasetInfo(
        classes=pixels.CLASSES["cifar10"],
        image_size=(32, 32),
        channels=3,
        splits={"train": 49_000, "val": 1_000, "test": 10_000},
        source="University of Toronto; download, or a folder with cifar-10-binary.tar.gz or its .bin files",
        license="not stated; cite Krizhevsky 2009",
        held_out={"val": 0.02},  # Google's fine-tuning trains on train[:98%]
    ),
    "cifar100": DatasetInfo(
        classes=pixels.CLASSES["cifar100"],
        image_size=(32, 32),
        channels=3,
        splits={"train": 49_000, "val": 1_000, "test": 10_000},
        source="University of Toronto; download, or a folder with cifar-100-binary.tar.gz or its .bin files",
        license="not stated; cite Krizhevsky 2009",
        held_out={"val": 0.02},
    ),
    "caltech101": _row("caltech101"),
    "dtd": _row("dtd"),
    "flowers102": _row("flowers102"),
    "pets": _row("pets"),
    "sun397": _row("sun397"),
    "svhn": _row("svhn", (32, 32)),
    "patch_camelyon": _row("patch_camelyon", (96, 96)),
    # No split is published: the shares are those of VTAB.
    "eurosat": _row("eurosat", (64, 64), {"val": 0.2, "test": 0.2}),
    "resisc45": _row("resisc45", (256, 256), {"val": 0.2, "test": 0.2}),
    "diabetic_retinopathy": _row("diabetic_retinopathy"),
    "imagenet": _thousand("imagenet", {"train": 1_281_167, "test": 50_000}, {"val": 0.01}),  # Google's: train[:99%]
    "imagenet_real": _thousand("imagenet_real", {"test": 46_837}),  # of 50,000; the others have no label
    "imagenet_v2": _thousand("imagenet_v2", {"test": 10_000}),
    "imagenet_v2_threshold": _thousand("imagenet_v2_threshold", {"test": 10_000}),
    "imagenet_v2_top": _thousand("imagenet_v2_top", {"test": 10_000}),
    "objectnet": _thousand("objectnet", {"test": 18_574}),  # of the 113 classes that it shares with ImageNet
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
        source="a set of the Hugging Face hub (pip install 'vitlab[hub]'), or a folder of its package datasets; "
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

    split: "train", "val", "test", "trainval" or "all". A split that the source lacks is cut from its train part:
    stratified, by `seed`, so that splits never overlap; "trainval" is all but test, and "all" (not of VTAB's tasks)
    every image of the source once. Of the user's own set (`folder:`, `shards:`, `hub:`) with a val and no test split,
    val is the test: "val" and "test" are the same images, "train" and "trainval" are train. root: the folder that holds
    the set, or is to (default: the user's cache); a relative PATH starts there. classes: the labels to keep, relabeled
    0, 1, ... in the order given; a image stays if it has any of them.
    on_error: "raise" or "skip" for unreadable images of a set that is decoded into memory here. exclude: a list of
    images to leave out, as `vitlab duplicates` writes it. part: the share of each class to keep, chosen by
    `part_seed`, so that a smaller part lies in every larger one (see `part_of`); it is drawn from the whole split, so
    that `classes` and `exclude` take images from a part and bring no others in. whole_train: "train" of the user's
    own set gives up nothing for a val split that it lacks. partial: images of the test split of `imagenet` and
    `imagenet_real` may be missing; `Dataset.full_size` says how many there are in the complete one.
    """
    if split not in SPLITS:
        raise UserError(f"the split must be one of {', '.join(SPLITS)}, not {split!r}")
    if on_error not in ("raise", "skip"):
        raise UserError(f"on_error must be 'raise' or 'skip', not {on_error!r}")
    if partial and name not in _PARTIAL_READERS:
        raise UserError(f"partial goes with {' and '.join(_PARTIAL_READERS)}, not with {quoted(name)}; leave it out.")
    kind, _, path = name.partition(":")
    if kind == "vtab" and path:
        dataset = load_task(path, split, Path(root).expanduser() if root else fetch.cache_folder(), download)
    elif own := _own_splits(name, root):
        dataset = _choose_own(name, *own, split, seed, whole_train)
        if kind in _PATH_READERS and not is_address(path):
            dataset = dataclasses.replace(dataset, folder=str(Path(root or "", Path(path).expanduser())))
    elif name in _READERS:
        readers = _PARTIAL_READERS if partial else _READERS
        present, read = readers[name](Path(root).expanduser() if root else None, download)
        dataset = _choose(present, read, split, DATASETS[name].held_out, seed)
    else:
        raise UserError(_unknown(name, root))
    if not len(dataset):
        raise UserError(f"{name}: no class of train has enough images to cut a {split} split from it; add some")
    if part is not None:
        dataset = part_of(dataset, part, part_seed)
    if classes is not None:
        dataset = _keep_classes(dataset, tuple(classes))
    if exclude is not None:
        whole = functools.partial(
            load_dataset, name, "all" if kind in OWN else "trainval", root=root, on_error="skip", seed=seed
        )
        dataset = leave_out(dataset, exclude, whole)
    if kind in OWN:
        _warn_of_small_classes(dataset)
    return dataset.in_memory(on_error)


def check_source(name: str, root: str | os.PathLike[str] | None = None) -> None:
    """Raises UserError for a name that no data set has, and for a folder that is not there. Reads no data."""
    kind, _, path = name.partition(":")
    if kind in _PATH_READERS and path:
        if not is_address(path):
            require_folder(Path(root or "", Path(path).expanduser()), _PATH_HOLDS[kind])
    elif name not in _READERS and not (kind in ("hub", "vtab") and path):
        raise UserError(_unknown(name, root))


def _unknown(name: str, root: str | os.PathLike[str] | None) -> str:
    hints = []
    if Path(root or "", Path(name).expanduser()).is_dir():
        hints.append(f"for your own images in the folder {quoted(name)} write {quoted('folder:' + name)}")
    if near := difflib.get_close_matches(name, DATASETS, n=2):
        hints.append(f"the nearest: {', '.join(near)}")
    return "; ".join([f"unknown data set {name!r}", *hints]) + f" (there are {', '.join(DATASETS)})"


def _own_splits(name: str, root: str | os.PathLike[str] | None) -> Splits | None:
    """The splits of the user's own set; None if `name` does not name one."""
    kind, _, path = name.partition(":")
    if not path or kind not in OWN:
        return None
    if kind == "hub":
        return hub_splits(path, name, Path(root).expanduser() if root else None)
    if kind == "shards" and is_address(path):
        return remote_splits(path, name, Path(root).expanduser() if root else fetch.cache_folder() / "shards")
    return _PATH_READERS[kind](Path(root or "", Path(path).expanduser()), name)


def splits_to_copy(name: str, splits: Sequence[str], *, root: str | os.PathLike[str] | None = None) -> list[str]:
    """`splits` without test where the user's own set has no test and its val is read as such: it is the same images."""
    own = _own_splits(name, root) if {"val", "test"} <= set(splits) else None
    if not own or not _val_is_test(own[0]):
        return list(splits)
    _warn_val_is_test(name)
    return [split for split in splits if split != "test"]


@functools.cache
def _warn_once(text: str) -> None:
    """A data set is loaded split by split; what is said of the whole set is said once."""
    logger.warning(text)


def _warn_val_is_test(name: str) -> None:
    _warn_once(f"{quoted(name)} has val and no test split: val is the test, and is not trained on")


def require_disjoint(train: Dataset, test: Dataset) -> None:
    """Raises UserError if any image of `test` is also in `train`."""
    common = {train.path(i) for i in range(len(train))} & {test.path(i) for i in range(len(test))}
    if common:
        raise UserError(
            f"{len(common)} of the {len(test)} test images of {quoted(test.name)} are also those to learn from "
            f"({train.split} and {test.split}), first {quoted(min(common))}: choose other splits."
        )


def _warn_of_small_classes(dataset: Dataset) -> None:
    labels = dataset.labels if dataset.label_sets is None else dataset.label_sets.values
    counts = np.bincount(labels, minlength=len(dataset.classes))
    if len(small := np.flatnonzero(counts < 2)):
        named = ", ".join(f"{quoted(dataset.classes[c])} ({counts[c]})" for c in small[:10])
        more = f", ... ({len(small)} classes)" if len(small) > 10 else ""
        _warn_once(f"{quoted(dataset.name)}: classes with fewer than two images in {dataset.split}: {named}{more}")


# ---------------------------------------------------------------------------------------------------- splits


def stratified_split(
    labels: np.ndarray, shares: Mapping[str, float], seed: int, stream: Stream = Stream.SPLIT
) -> dict[str, np.ndarray]:
    """Sorted indices of "train" and of every split in `shares`, which together hold every index once.

    Each class gives each split its share, rounded, and at least one image if it has enough for all splits. (Of
    several labels the first counts.) A part that is split again needs another `stream` of random numbers.
    """
    draws = philox(seed, stream).random_raw(len(labels))
    order = np.lexsort((draws, labels))  # class by class, shuffled within each
    counts = np.bincount(labels)
    place = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    size = np.repeat(counts, counts)
    parts: dict[str, np.ndarray] = {}
    start = np.zeros_like(size)
    for name, share in shares.items():
        stop = start + np.where(size > len(shares), np.maximum(np.rint(share * size), 1), 0).astype(np.int64)
        stop = np.minimum(stop, size - 1)  # train keeps one, however large the shares
        parts[name] = np.sort(order[(place >= start) & (place < stop)])
        start = stop
    return parts | {"train": np.sort(order[place >= start])}


def _val_is_test(present: Sequence[str]) -> bool:
    """Whether the val of the user's own set is its test split, for want of another."""
    return "val" in present and "test" not in present


def _choose_own(
    name: str, present: Sequence[str], read: Callable[[str], Dataset], split: str, seed: int, whole_train: bool
) -> Dataset:
    """The asked split of the user's own set: a val without a test is the test, and what is left is cut from train."""
    if whole_train and split == "train" and "val" not in present:
        split = "trainval"
    if _val_is_test(present):
        if split in ("test", "trainval"):
            _warn_val_is_test(name)
        stored = {"test": "val", "trainval": "train"}.get(split, split)
        return dataclasses.replace(_choose(present, read, stored, {}, seed), split=split)
    if split == "trainval" and "test" in present and "val" not in present:
        return dataclasses.replace(_choose(present, read, "train", {}, seed), split=split)
    return _choose(present, read, split, OWN_HELD_OUT, seed)


def _choose(
    present: Sequence[str],
    read: Callable[[str], Dataset],
    split: str,
    held_out: Mapping[str, float],
    seed: int,
) -> Dataset:
    """The asked split, cut from train where the source lacks it."""
    if split == "all":  # uncut, so a source without train has it too
        whole = functools.reduce(join, (_numbered(read(s)) for s in ("train", "val", "test") if s in present))
        return dataclasses.replace(whole, split=split)
    missing = {s: share for s, share in held_out.items() if s not in present}
    if split == "trainval" and "val" not in missing:
        train, val = (_choose(present, read, s, held_out, seed) for s in ("train", "val"))
        return dataclasses.replace(join(train, val), split=split)
    if split in present and (split != "train" or not missing):
        return _numbered(read(split))
    train = _numbered(read("train"))
    parts = stratified_split(train.labels, missing, seed)
    chosen = np.concatenate([parts["train"], parts["val"]]) if split == "trainval" else parts[split]
    if ":" in train.name:  # the user's own set; what is cut from the others stands in the table
        lacking, size = " and no ".join(sorted(missing)), f"{len(chosen)} of its {len(train)} images"
        _warn_once(
            f"{quoted(train.name)} has no {lacking} split: cut from train, stratified, seed {seed}; {split} has {size}"
        )
    return dataclasses.replace(train.take(chosen), split=split)


def _numbered(dataset: Dataset) -> Dataset:
    """A set without files, with names for its images that stay when others are taken from it."""
    if dataset.entries:
        return dataset
    names = [Entry(f"{dataset.name}/{dataset.split}[{i}]", size=0) for i in range(len(dataset))]
    return dataclasses.replace(dataset, entries=names)


def _keep_classes(dataset: Dataset, classes: tuple[int, ...]) -> Dataset:
    count = len(dataset.classes)
    if not classes or len(set(classes)) < len(classes) or not all(0 <= c < count for c in classes):
        raise UserError(f"classes must be different numbers from 0 to {count - 1} of {dataset.name}, not {classes}")
    relabel = np.full(count, -1)
    relabel[list(classes)] = np.arange(len(classes))
    names = tuple(dataset.classes[c] for c in classes)
    if dataset.label_sets is not None:
        sets = dataset.label_sets.renumber(relabel)
        kept = dataset.take(np.flatnonzero(sets.counts))
        sets = sets.take(np.flatnonzero(sets.counts))
        return dataclasses.replace(kept, classes=names, labels=sets.firsts, label_sets=sets)
    kept = dataset.take(np.flatnonzero(relabel[dataset.labels] >= 0))
    return dataclasses.replace(kept, classes=names, labels=relabel[kept.labels].astype(np.int64))


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
    """Our names for the splits of a reader in `published.py`."""
    names = {"val" if split == "validation" else split: split for split in fetch.SOURCES[name].sizes}
    reader: Callable[[Path, str, bool], published.Published] = getattr(published, name)

    def splits(root: Path | None, download: bool) -> Splits:
        def read(split: str) -> Dataset:
            dataset, _ = reader(root or fetch.cache_folder(), names[split], download)
            return dataclasses.replace(dataset, split=split, folder=str(root or fetch.cache_folder()))

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
    **{name: _published(name) for name, source in fetch.SOURCES.items() if source.classes and name != "cifar100"},
}
_PARTIAL_READERS: dict[str, Callable[[Path | None, bool], Splits]] = {
    "imagenet": functools.partial(imagenet_splits, partial=True),
    "imagenet_real": functools.partial(real_splits, partial=True),
}
_PATH_READERS = {"folder": folder_splits, "shards": shard_splits}
_PATH_HOLDS = {"folder": "class folders with images", "shards": "shards named train-*.tar"}
