"""The data sets by name: `DATASETS` is the table (`datasets.toml`), `load_dataset` reads one.

A reader is imported when a set needs it.
"""

import dataclasses
import difflib
import functools
import importlib
import logging
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vitlab.data.dataset import Dataset, SplitReader, join, keep_classes, part_of, stratified_split
from vitlab.data.decode import Entry
from vitlab.errors import UserError, quoted

logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "test", "trainval", "all")
CUSTOM = ("folder", "shards", "hub")
"""The kinds of the user's data sets, as in `folder:PATH`."""
PARTIAL = ("imagenet", "imagenet_real")
"""The data sets of which test images may be missing."""


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """A row of `DATASETS`.

    reader: "MODULE:FUNCTION" of `vitlab.data` that takes (name, root, download) and returns `SplitReader`; "" for the
    kinds of the user's data sets. num_classes: None if it varies. image_size: (H, W) in pixels, None for any size.
    splits: numbers of images. held_out: splits the source lacks, with the share of its train that is taken for them.
    eval_resize: (shorter side, center) in pixels if the set is evaluated at another proportion than the model's.
    """

    source: str
    license: str
    reader: str = ""
    num_classes: int | None = None
    image_size: tuple[int, int] | None = None
    splits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    held_out: Mapping[str, float] = dataclasses.field(default_factory=dict)
    eval_resize: tuple[int, int] | None = None


def _read_table() -> dict[str, DatasetInfo]:
    """`datasets.toml`; rows without a source are filled from `vtab/sources.toml`."""
    rows, published = (
        tomllib.loads((Path(__file__).parent / file).read_text()) for file in ("datasets.toml", "vtab/sources.toml")
    )
    for name, row in rows.items():
        if "source" not in row:
            source = published[name]
            access = "by hand: a folder as published" if "access" in source else "download, or a folder as published"
            row |= {
                "reader": "pixels:published_splits",
                "source": f"{source['page']}; {access}",
                "license": source["license"],
                "num_classes": source["classes"],
                "splits": {split.removesuffix("idation"): count for split, count in source["sizes"].items()},
            }
        row |= {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    return {name: DatasetInfo(**row) for name, row in rows.items()}


DATASETS = _read_table()


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
    whole_train: no val split is cut from "train" of the user's data set where it lacks one.
    partial: images of the test split of `imagenet` and `imagenet_real` may be missing; see `Dataset.full_size`.
    """
    if split not in SPLITS:
        raise UserError(f"the split must be one of {', '.join(SPLITS)}, not {split!r}")
    if on_error not in ("raise", "skip"):
        raise UserError(f"on_error must be 'raise' or 'skip', not {on_error!r}")
    if partial and name not in PARTIAL:
        raise UserError(f"partial goes with {' and '.join(PARTIAL)}, not with {quoted(name)}; leave it out.")
    custom = _custom_splits(name, root)
    if custom:
        dataset = _choose_custom_split(name, custom, split, seed, whole_train)
    elif name.startswith("vtab:"):
        from vitlab.data.vtab.tasks import load_task

        dataset = load_task(name.removeprefix("vtab:"), split, data_folder(root), download)
    else:
        splits = _read_named(name, root, download, **({"partial": True} if partial else {}))
        dataset = _choose_split(splits, split, DATASETS[name].held_out, seed)
    if not len(dataset):
        raise UserError(f"{name}: no class of train has enough images to cut a {split} split from it; add some")
    if part is not None:
        dataset = part_of(dataset, part, part_seed)
    if classes is not None:
        dataset = keep_classes(dataset, tuple(classes))
    if exclude is not None:
        from vitlab.data.exclude import leave_out

        whole = "all" if custom else "trainval"
        dataset = leave_out(dataset, exclude, lambda: load_dataset(name, whole, root=root, on_error="skip", seed=seed))
    if custom:
        _warn_of_small_classes(dataset)
    return dataset.in_memory(on_error)


def _read_named(name: str, root: str | os.PathLike[str] | None, download: bool, **options: bool) -> SplitReader:
    check_source(name, root)
    module, function = DATASETS[name].reader.split(":")
    return getattr(importlib.import_module(f"vitlab.data.{module}"), function)(
        name, _expanded(root), download, **options
    )


def check_source(name: str, root: str | os.PathLike[str] | None = None) -> None:
    """Raises UserError for a name that is not a data set's, and for a missing folder. Reads no data."""
    kind, _, path = name.partition(":")
    if kind in ("folder", "shards") and path:
        if not _is_address(path):
            from vitlab.data.folder import require_folder

            content = {"folder": "class folders with images", "shards": "shards named train-*.tar"}[kind]
            require_folder(_resolve(path, root), content)
    elif not (kind in ("hub", "vtab") and path) and (name not in DATASETS or not DATASETS[name].reader):
        hints = [f"unknown data set {name!r}"]
        if _resolve(name, root).is_dir():
            hints.append(f"for your own images in the folder {quoted(name)} write {quoted('folder:' + name)}")
        if similar := difflib.get_close_matches(name, DATASETS, n=2):
            hints.append(f"the nearest: {', '.join(similar)}")
        raise UserError("; ".join(hints) + f" (there are {', '.join(DATASETS)})")


def has_imagenet_classes(name: str) -> bool:
    """Whether the data set `name` is ImageNet or one of its test sets."""
    return name in DATASETS and DATASETS[name].reader.startswith("imagenet:")


def predicts_imagenet(classes: Sequence[str] | None, dataset: str | None) -> bool:
    """Whether the 1,000 outputs of a checkpoint are ImageNet's classes, in their order.

    classes: its names of the outputs; dataset: what it was trained on; both None if unknown, as for checkpoints of
    Google and others, which are assumed to be.
    """
    if dataset is None or has_imagenet_classes(dataset):
        return True
    names = list(classes or ())
    return names != [] and names == sorted(names) and all(re.fullmatch(r"n\d{8}", name) for name in names)


def require_disjoint(train: Dataset, test: Dataset) -> None:
    """Raises UserError if any image of `test` is also in `train`."""
    common = {train.path(i) for i in range(len(train))} & {test.path(i) for i in range(len(test))}
    if common:
        raise UserError(
            f"{len(common)} of the {len(test)} test images of {quoted(test.name)} are also those to learn from "
            f"({train.split} and {test.split}), first {quoted(min(common))}: choose other splits."
        )


def splits_to_copy(name: str, splits: Sequence[str], *, root: str | os.PathLike[str] | None = None) -> list[str]:
    """`splits` without test if it is the user's val, so the same images."""
    custom = _custom_splits(name, root) if {"val", "test"} <= set(splits) else None
    same = custom is not None and _val_is_test(name, custom[0])
    return [split for split in splits if split != "test" or not same]


def digits_splits(name: str, root: Path | None, download: bool) -> SplitReader:
    """scikit-learn's digits; a fifth of each class is the test split, whatever the seed of a run."""
    from sklearn.datasets import load_digits  # slow to import

    levels, labels = map(np.asarray, load_digits(return_X_y=True))  # 0..16
    gray = np.rint(levels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    fixed = stratified_split(labels, {"test": 0.2}, seed=0)

    def read(split: str) -> Dataset:
        colors = np.repeat(gray, 3, axis=3)
        return Dataset(name, split, tuple("0123456789"), labels.astype(np.int64), colors).take(fixed[split])

    return ["train", "test"], read


# ----------------------------------------------------------------------------------------------- folders


def data_folder(root: str | os.PathLike[str] | None) -> Path:
    """The folder of the published data sets: `root`, by default the user's cache."""
    from vitlab.data.downloads import cache_folder

    return _expanded(root) or cache_folder()


def _expanded(root: str | os.PathLike[str] | None) -> Path | None:
    return Path(root).expanduser() if root else None


def _resolve(path: str, root: str | os.PathLike[str] | None) -> Path:
    return Path(root or "", Path(path).expanduser())


def _is_address(path: str) -> bool:
    """Whether shards are at an address (`https://`, `s3://`, `gs://`, `hf://`) or on the hub (`hub:OWNER/NAME`)."""
    return re.match(r"hub:|[a-z0-9]+://", path) is not None


# ------------------------------------------------------------------------------------------------ splits


def _custom_splits(name: str, root: str | os.PathLike[str] | None) -> SplitReader | None:
    """The splits of the user's data set; None if `name` does not name one."""
    kind, _, path = name.partition(":")
    if not path or kind not in CUSTOM:
        return None
    if kind == "hub":
        from vitlab.data.hub import hub_splits

        return hub_splits(path, name, _expanded(root))
    if kind == "folder":
        from vitlab.data.folder import folder_splits

        return folder_splits(_resolve(path, root), name)
    if _is_address(path):
        from vitlab.data.remote import remote_splits

        return remote_splits(path, name, _expanded(root) or data_folder(None) / "shards")
    from vitlab.data.shards import shard_splits

    return shard_splits(_resolve(path, root), name)


def _choose_custom_split(name: str, splits: SplitReader, split: str, seed: int, whole_train: bool) -> Dataset:
    """A split of the user's data set: val without test is the test; any other missing split is cut from train."""
    present, held_out = splits[0], DATASETS["folder:PATH"].held_out
    if whole_train and split == "train" and "val" not in present:
        split = "trainval"
    stored = split
    if _val_is_test(name, present, warn=split in ("test", "trainval")):
        stored, held_out = {"test": "val", "trainval": "train"}.get(split, split), {}
    elif split == "trainval" and "test" in present and "val" not in present:
        stored, held_out = "train", {}  # in its order
    return dataclasses.replace(_choose_split(splits, stored, held_out, seed), split=split)


def _choose_split(splits: SplitReader, split: str, held_out: Mapping[str, float], seed: int) -> Dataset:
    """The requested split, cut from train if the source lacks it."""
    present, read = splits
    if split == "all":  # uncut, so a source without train has it too
        whole = functools.reduce(join, (_numbered(read(s)) for s in ("train", "val", "test") if s in present))
        return dataclasses.replace(whole, split=split)
    missing = {s: share for s, share in held_out.items() if s not in present}
    if split == "trainval" and "val" not in missing:
        train, val = (_choose_split(splits, s, held_out, seed) for s in ("train", "val"))
        return dataclasses.replace(join(train, val), split=split)
    if split in present and (split != "train" or not missing):
        return _numbered(read(split))
    train = _numbered(read("train"))
    parts = stratified_split(train.labels, missing, seed)
    chosen = np.concatenate([parts["train"], parts["val"]]) if split == "trainval" else parts[split]
    if ":" in train.name:  # the user's data set; the table has what is cut from the others
        absent, size = " and no ".join(sorted(missing)), f"{len(chosen)} of its {len(train)} images"
        _warn_once(
            f"{quoted(train.name)} has no {absent} split: cut from train, stratified, seed {seed}; {split} has {size}"
        )
    return dataclasses.replace(train.take(chosen), split=split)


def _numbered(dataset: Dataset) -> Dataset:
    """A set without files, with names for its images that do not change in subsets."""
    if dataset.entries:
        return dataset
    names = [Entry(f"{dataset.name}/{dataset.split}[{i}]", size=0) for i in range(len(dataset))]
    return dataclasses.replace(dataset, entries=names)


def _val_is_test(name: str, present: Sequence[str], warn: bool = True) -> bool:
    """Whether val stands in for the test split that the user's data set lacks, which is logged."""
    if "val" not in present or "test" in present:
        return False
    if warn:
        _warn_once(f"{quoted(name)} has val and no test split: val is the test, and is not trained on")
    return True


def _warn_of_small_classes(dataset: Dataset) -> None:
    counts = np.bincount(dataset.all_labels.values, minlength=len(dataset.classes))
    if len(small := np.flatnonzero(counts < 2)):
        named = ", ".join(f"{quoted(dataset.classes[c])} ({counts[c]})" for c in small[:10])
        more = f", ... ({len(small)} classes)" if len(small) > 10 else ""
        _warn_once(f"{quoted(dataset.name)}: classes with fewer than two images in {dataset.split}: {named}{more}")


@functools.cache
def _warn_once(text: str) -> None:
    """A data set is loaded split by split; what holds for the whole set is logged once."""
    logger.warning(text)
