"""The data sets by name: `DATASETS` is the table, `load_dataset` the one door.

No pickle is ever loaded; CIFAR is therefore read from its binary version.
"""

import dataclasses
import difflib
import gzip
import hashlib
import logging
import math
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from vitlab.data.sources import Dataset, Splits, folder_splits, join, shard_splits

logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "test", "trainval")


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """A row of `DATASETS`. `image_size` is (H, W) in pixels; `splits` counts pictures.

    held_out: the splits that the source lacks, with the share of its train that stands in for them
    (stratified, seeded). `classes`, `image_size` and `splits` are empty where the user's folder decides.
    """

    source: str
    licence: str
    classes: tuple[str, ...] = ()
    image_size: tuple[int, int] | None = None
    channels: int = 3
    splits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    held_out: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"val": 0.1, "test": 0.1})


_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel
    can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
    dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion
    lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter
    palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road
    rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower
    sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
    willow_tree wolf woman worm
"""
_FASHION = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"

DATASETS: dict[str, DatasetInfo] = {
    "digits": DatasetInfo(
        classes=tuple("0123456789"),
        image_size=(8, 8),
        channels=1,
        splits={"train": 1259, "val": 179, "test": 359},
        source="scikit-learn, embedded (UCI Optical Recognition of Handwritten Digits); a fixed split",
        licence="CC BY 4.0",
        held_out={"val": 0.125},  # 10 % of all, after the fixed test part
    ),
    "fashion_mnist": DatasetInfo(
        classes=tuple(_FASHION.split(", ")),
        image_size=(28, 28),
        channels=1,
        splits={"train": 54_000, "val": 6_000, "test": 10_000},
        source="Zalando; download, Debian package dataset-fashion-mnist, or a folder with its idx files",
        licence="MIT",
        held_out={"val": 0.1},
    ),
    "cifar10": DatasetInfo(
        classes=tuple(_CIFAR10.split()),
        image_size=(32, 32),
        channels=3,
        splits={"train": 49_000, "val": 1_000, "test": 10_000},
        source="University of Toronto; download, or a folder with cifar-10-binary.tar.gz or its .bin files",
        licence="not stated; cite Krizhevsky 2009",
        held_out={"val": 0.02},  # Google's fine-tuning trains on train[:98%]
    ),
    "cifar100": DatasetInfo(
        classes=tuple(_CIFAR100.split()),
        image_size=(32, 32),
        channels=3,
        splits={"train": 49_000, "val": 1_000, "test": 10_000},
        source="University of Toronto; download, or a folder with cifar-100-binary.tar.gz or its .bin files",
        licence="not stated; cite Krizhevsky 2009",
        held_out={"val": 0.02},
    ),
    "folder:PATH": DatasetInfo(
        source="your pictures: PATH/CLASS/picture.jpg, or PATH/{train,val,test}/CLASS/picture.jpg",
        licence="yours",
    ),
    "shards:PATH": DatasetInfo(
        source="WebDataset tars PATH/{train,val,test}-*.tar of KEY.jpg|png|webp and KEY.cls; classes.json",
        licence="yours",
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
    seed: int = 0,
) -> Dataset:
    """A data set by its name in `DATASETS`, with PATH filled in.

    split: "train", "val", "test" or "trainval". A split that the source lacks is cut from its train part:
    stratified, by `seed`, so that splits never overlap; "trainval" is all but test. root: the folder that
    holds the set, or is to (default: the user's cache); a relative PATH starts there. classes: the labels to
    keep, relabelled 0, 1, ... in the order given. on_error: "raise" or "skip" for unreadable pictures of a
    set that is decoded into memory here.
    """
    if split not in SPLITS:
        raise ValueError(f"the split must be one of {', '.join(SPLITS)}, not {split!r}")
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', not {on_error!r}")
    kind, _, path = name.partition(":")
    if kind in _PATH_READERS and path:
        present, read = _PATH_READERS[kind](Path(root or "", Path(path).expanduser()), name)
        dataset = _choose(present, read, split, DATASETS[f"{kind}:PATH"].held_out, seed)
    elif name in _READERS:
        present, read = _READERS[name](Path(root).expanduser() if root else None, download)
        dataset = _choose(present, read, split, DATASETS[name].held_out, seed)
    else:
        raise ValueError(_unknown(name))
    if not len(dataset):
        raise ValueError(f"{name}: no class of train has enough pictures to cut a {split} split from it; add some")
    if classes is not None:
        dataset = _keep_classes(dataset, tuple(classes))
    return dataset.in_memory(on_error)


def _unknown(name: str) -> str:
    hint = ""
    if near := difflib.get_close_matches(name, DATASETS, n=2):
        hint = f"; the nearest: {', '.join(near)}"
    elif Path(name).expanduser().is_dir():
        hint = f"; for your own pictures write folder:{name}"
    return f"unknown data set {name!r}{hint} (there are {', '.join(DATASETS)})"


# ---------------------------------------------------------------------------------------------------- splits


def stratified_split(labels: np.ndarray, shares: Mapping[str, float], seed: int) -> dict[str, np.ndarray]:
    """Sorted indices of "train" and of every split in `shares`, which together hold every index once.

    Each class gives each split its share, rounded, and at least one picture if it has enough for all splits.
    """
    key = np.array([seed, 0], np.uint64)  # the counter keeps it apart from the loader's draws
    draws = np.random.Philox(key=key, counter=[0, 0, 2, 0]).random_raw(len(labels))
    order = np.lexsort((draws, labels))  # class by class, shuffled within each
    counts = np.bincount(labels)
    place = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    size = np.repeat(counts, counts)
    parts: dict[str, np.ndarray] = {}
    start = np.zeros_like(size)
    for name, share in shares.items():
        stop = start + np.where(size > len(shares), np.maximum(np.rint(share * size), 1), 0).astype(np.int64)
        parts[name] = np.sort(order[(place >= start) & (place < stop)])
        start = stop
    return parts | {"train": np.sort(order[place >= start])}


def _choose(
    present: Sequence[str],
    read: Callable[[str], Dataset],
    split: str,
    held_out: Mapping[str, float],
    seed: int,
) -> Dataset:
    """The asked split, cut from train where the source lacks it."""
    if split == "trainval":
        train, val = (_choose(present, read, s, held_out, seed) for s in ("train", "val"))
        return dataclasses.replace(join(train, val), split=split)
    missing = {s: share for s, share in held_out.items() if s not in present}
    if split in present and (split != "train" or not missing):
        return read(split)
    train = read("train")
    parts = stratified_split(train.labels, missing, seed)
    if ":" in train.name:  # the user's own set; what is cut from the others stands in the table
        lacking, size = " and no ".join(sorted(missing)), f"{len(parts[split])} of its {len(train)} pictures"
        logger.warning(
            "%s has no %s split: cut from train, stratified, seed %d; %s has %s", train.name, lacking, seed, split, size
        )
    return dataclasses.replace(train.take(parts[split]), split=split)


def _keep_classes(dataset: Dataset, classes: tuple[int, ...]) -> Dataset:
    count = len(dataset.classes)
    if not classes or len(set(classes)) < len(classes) or not all(0 <= c < count for c in classes):
        raise ValueError(f"classes must be different numbers from 0 to {count - 1} of {dataset.name}, not {classes}")
    relabel = np.full(count, -1)
    relabel[list(classes)] = np.arange(len(classes))
    kept = dataset.take(np.flatnonzero(relabel[dataset.labels] >= 0))
    names = tuple(dataset.classes[c] for c in classes)
    return dataclasses.replace(kept, classes=names, labels=relabel[kept.labels].astype(np.int64))


# --------------------------------------------------------------------------------------------------- readers


def _digits(root: Path | None, download: bool) -> Splits:
    from sklearn.datasets import load_digits  # slow to import

    grey, labels = load_digits(return_X_y=True)  # grey values 0..16
    pixels = np.rint(grey * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8)
    fixed = stratified_split(labels, {"test": 0.2}, seed=0)

    def read(split: str) -> Dataset:
        return _grey("digits", split, labels.astype(np.int64), pixels).take(fixed[split])

    return ["train", "test"], read


def _grey(name: str, split: str, labels: np.ndarray, pixels: np.ndarray) -> Dataset:
    return Dataset(name, split, DATASETS[name].classes, labels, np.repeat(pixels[..., None], 3, axis=3))


def _fashion_mnist(root: Path | None, download: bool) -> Splits:
    files = {"train": "train-{}-ubyte", "test": "t10k-{}-ubyte"}
    home = root or _cache()
    raw = home / "FashionMNIST" / "raw"  # torchvision's layout
    places = [home, raw] if root else [Path("/usr/share/datasets/fashion-mnist"), raw]

    def find(part: str) -> Path | None:
        return next((p for folder in places for p in (folder / part, folder / f"{part}.gz") if p.is_file()), None)

    def read(split: str) -> Dataset:
        parts = [files[split].format(what) for what in ("images-idx3", "labels-idx1")]
        for part in parts:
            if not find(part):
                _require_download("fashion_mnist", f"{part} or {part}.gz", places, download)
                from torchvision.datasets import FashionMNIST  # slow to import, and seldom needed

                md5 = dict(FashionMNIST.resources)[f"{part}.gz"]
                _download([f"{mirror}{part}.gz" for mirror in FashionMNIST.mirrors], raw, md5)
        pixels, labels = (_read_idx(path) for part in parts if (path := find(part)))
        if pixels.shape != (len(labels), 28, 28) or labels.max() > 9:
            raise ValueError(f"{find(parts[0])} is not Fashion-MNIST: pictures {pixels.shape}, labels {labels.shape}")
        return _grey("fashion_mnist", split, labels.astype(np.int64), pixels)

    return ["train", "test"], read


def _read_idx(path: Path) -> np.ndarray:
    """An idx file of bytes: two zeros, type 8, number of axes; the axes' sizes, big-endian; the data."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged or cut off ({error}): fetch it again") from error
    start = 4 + 4 * data[3] if data[:3] == b"\0\0\x08" else 0
    shape = np.frombuffer(data[4:start], ">u4").tolist()
    if not shape or len(data) != start + math.prod(shape):
        raise ValueError(f"{path} is no whole idx file of bytes (it has {len(data)}): fetch it again")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


@dataclasses.dataclass(frozen=True)
class _Cifar:
    """Reader of one CIFAR set in its binary version.

    A record is `label_bytes` labels, of which the last counts, and 3 x 32 x 32 bytes of pixels.
    """

    name: str
    folder: str
    archive: str
    md5: str
    pickled: str
    label_bytes: int
    files: Mapping[str, Sequence[str]]

    def __call__(self, root: Path | None, download: bool) -> Splits:
        home = root or _cache()

        def read(split: str) -> Dataset:
            folder = self._find(home, download)
            records = np.concatenate([self._records(folder / file) for file in self.files[split]])
            pixels = records[:, self.label_bytes :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            labels = records[:, self.label_bytes - 1].astype(np.int64)
            return Dataset(self.name, split, DATASETS[self.name].classes, labels, np.ascontiguousarray(pixels))

        return ["train", "test"], read

    def _find(self, home: Path, download: bool) -> Path:
        """The folder with the .bin files, unpacked or downloaded where need be."""
        every = [file for files in self.files.values() for file in files]
        for folder in (home, home / self.folder):
            if all((folder / file).is_file() for file in every):
                return folder
        archive = home / self.archive
        if not archive.is_file():
            pickled = [p for n in (self.pickled, self.archive.replace("binary", "python")) if (p := home / n).exists()]
            note = f" ({pickled[0]} is the pickled version, and no pickle is ever loaded)" if pickled else ""
            _require_download(
                self.name, f"{self.archive} or its .bin files{note}", [home, home / self.folder], download
            )
            _download([f"https://www.cs.toronto.edu/~kriz/{self.archive}"], home, self.md5)
        with archive.open("rb") as file:
            if (found := hashlib.file_digest(file, "md5").hexdigest()) != self.md5:
                raise ValueError(f"{archive} has the MD5 sum {found}, not {self.md5}: remove it and fetch it again")
        with tarfile.open(archive) as tar:
            tar.extractall(home, filter="data")
        return home / self.folder

    def _records(self, path: Path) -> np.ndarray:
        data = np.fromfile(path, np.uint8)
        size = self.label_bytes + 3 * 32 * 32
        if not data.size or data.size % size:
            raise ValueError(f"{path} is damaged: {data.size} bytes are no whole number of records of {size}")
        records = data.reshape(-1, size)
        if (top := records[:, self.label_bytes - 1].max()) >= len(DATASETS[self.name].classes):
            raise ValueError(f"{path} is not {self.name}: it has the label {top}")
        return records


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vitlab"


def _require_download(name: str, what: str, places: Sequence[Path], download: bool) -> None:
    looked = f"{name} needs {what}; looked in {', '.join(map(str, places))}"
    if not download:
        raise ValueError(f"{looked}: put it there, give another root, or allow the download")
    logger.warning("%s: downloading it", looked)


def _download(urls: Sequence[str], folder: Path, md5: str) -> None:
    """Fetch a file from the first of `urls` that answers."""
    from torchvision.datasets.utils import download_url  # slow to import, and seldom needed

    errors = []
    for url in urls:
        try:
            return download_url(url, str(folder), md5=md5)
        except (OSError, RuntimeError) as error:  # no network, a refusal, a wrong MD5 sum
            errors.append(f"{url}: {error}")
    raise ValueError(f"could not download ({'; '.join(errors)}): fetch the file elsewhere and put it into {folder}")


_READERS: dict[str, Callable[[Path | None, bool], Splits]] = {
    "digits": _digits,
    "fashion_mnist": _fashion_mnist,
    "cifar10": _Cifar(
        name="cifar10",
        folder="cifar-10-batches-bin",
        archive="cifar-10-binary.tar.gz",
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        pickled="cifar-10-batches-py",
        label_bytes=1,
        files={"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]},
    ),
    "cifar100": _Cifar(
        name="cifar100",
        folder="cifar-100-binary",
        archive="cifar-100-binary.tar.gz",
        md5="03b5dce01913d631647c71ecec9e9cb8",
        pickled="cifar-100-python",
        label_bytes=2,
        files={"train": ["train.bin"], "test": ["test.bin"]},
    ),
}
_PATH_READERS = {"folder": folder_splits, "shards": shard_splits}
