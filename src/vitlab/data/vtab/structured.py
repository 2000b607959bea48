"""The sets of VTAB's structured tasks in their published layouts, each with its split and its example keys.

A reader TASK(root, split, download) looks at `root` and at the usual sub-folders. `split` is a split of the set's
builder in TensorFlow Datasets (TFDS), and `keys` are the keys that this builder gives the examples. Missing or
damaged files are a `ValueError` that says what to fetch, and where.
"""

import json
import mmap
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitlab.data import downloads as fetch
from vitlab.data.dataset import Dataset
from vitlab.data.decode import Entry
from vitlab.data.vtab import gray as gray
from vitlab.data.vtab import labels as structured_labels
from vitlab.data.vtab import tfrecord
from vitlab.data.vtab.gray import GrayEntries
from vitlab.data.vtab.published import Published
from vitlab.errors import UserError

# ----------------------------------------------------------------------------------------------------- CLEVR


def clevr_count(root: Path, split: str, download: bool) -> Published:
    """How many objects: 8 classes. Splits "train" and "validation"; the set's test part has no annotations."""
    folder, depths = _clevr(root, split, download)
    labels = structured_labels.clevr_count(np.array([len(each) for each in depths.values()]))
    return _in_folder("clevr_count", split, structured_labels.CLEVR_COUNT, labels, folder, list(depths))


def clevr_distance(root: Path, split: str, download: bool) -> Published:
    """How far the nearest object: 6 classes. Splits as for `clevr_count`."""
    folder, depths = _clevr(root, split, download)
    labels = structured_labels.clevr_distance(np.array([min(each, default=np.nan) for each in depths.values()]))
    return _in_folder("clevr_distance", split, structured_labels.CLEVR_DISTANCE, labels, folder, list(depths))


def _clevr(root: Path, split: str, download: bool) -> tuple[Path, dict[str, list[float]]]:
    """The folder of the images; and for each, sorted by name, the depths of its objects."""
    parts = {"train": "train", "validation": "val"}
    fetch.require_split("clevr", split)
    images, scenes = f"images/{parts[split]}", f"scenes/CLEVR_{parts[split]}_scenes.json"
    home = fetch.locate("clevr", split, root, download, needed=[images, scenes])
    try:
        found = json.loads((home / scenes).read_bytes(), object_hook=_clevr_object)
        depths = dict(sorted((str(name), list(each)) for name, each in found["scenes"]))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise UserError(f"{home / scenes} is damaged or no list of scenes ({error}): fetch it again") from error
    there = {path.name for path in (home / images).iterdir() if path.suffix == ".png"}
    if not depths:
        raise UserError(f"{home / scenes} has no scenes: fetch it again")
    if strange := sorted(there ^ depths.keys()):
        raise UserError(
            f"{len(strange)} images in {home / images} and scenes in {home / scenes} have no counterpart, "
            f"first {strange[0]!r}: unpack the set again"
        )
    return home / images, depths


def _clevr_object(found: dict) -> object:
    """Keeps of each JSON object what is needed, at once, as all of it would take gigabytes."""
    if "pixel_coords" in found:
        return float(found["pixel_coords"][2])
    if "image_filename" in found:
        return found["image_filename"], found["objects"]
    return found if "scenes" in found else None


def _in_folder(
    name: str, split: str, classes: tuple[str, ...], labels: np.ndarray, folder: Path, files: list[str]
) -> Published:
    """Images of a folder, whose keys are the names of their files."""
    return Published(Dataset(name, split, classes, labels, entries=[Entry(str(folder / f)) for f in files]), files)


# ----------------------------------------------------------------------------------------------------- DMLab


def dmlab(root: Path, split: str, download: bool) -> Published:
    """Close, far or very far from a reward or a penalty: 6 classes. Splits "train", "validation" and "test".

    The images stay in the TFRecord files; only their places are taken down.
    """
    pattern = f"dmlab-{split}.tfrecord*"
    files = sorted(fetch.locate("dmlab", split, root, download, needed=[pattern]).glob(pattern))
    for file in files:  # dmlab-train.tfrecord-00000-of-00010
        if (of := re.search(r"-of-(\d+)$", file.name)) and int(of[1]) != len(files):
            raise UserError(f"{file.parent} has {len(files)} of {int(of[1])} files {pattern}: unpack the set again")
    entries: list[Entry] = []
    labels: list[int] = []
    keys: list[str] = []
    for file in files:
        if not file.stat().st_size:
            raise UserError(f"{file} is empty: fetch it again")
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for example in tfrecord.examples(data, file):
                image, key, label = (example.get(name, [None])[0] for name in ("image", "filename", "label"))
                if not (isinstance(image, slice) and isinstance(key, slice) and isinstance(label, int)):
                    raise UserError(f"{file} has an example with {sorted(example)}, not image, filename and label")
                keys.append(data[key].decode())
                labels.append(label)
                entries.append(Entry(str(file), keys[-1], image.start, image.stop - image.start))
    if strange := sorted(set(labels) - set(range(6))):
        raise UserError(f"{files[0].parent} is not dmlab: {pattern} have the label {strange[0]}")
    return Published(
        Dataset("dmlab", split, structured_labels.DMLAB, np.array(labels, np.int64), entries=entries), keys
    )


# ----------------------------------------------------------------------------------------------------- KITTI


def kitti_distance(root: Path, split: str, download: bool) -> Published:
    """How far the nearest car, van or truck: 4 classes. Splits "train", "validation" and "test".

    All are parts of the published training images, as KITTI's own test images have no labels.
    """
    home = fetch.locate("kitti", split, root, download)
    images, labels, rand, mapping = (home / part for part in fetch.SOURCES["kitti"].needed)
    splits = kitti_splits(_kitti_videos(rand, mapping))
    sizes, published = {name: len(ids) for name, ids in splits.items()}, fetch.SOURCES["kitti"].sizes
    if sum(sizes.values()) == sum(published.values()) and sizes != published:
        raise UserError(f"{mapping.parent} splits KITTI into {sizes}, not {published}: fetch devkit_object.zip again")
    ids = [f"{number:06d}" for number in splits[split]]
    for folder, suffix in ((images, ".png"), (labels, ".txt")):
        there = {path.name for path in folder.iterdir()}
        if missing := [f"{each}{suffix}" for each in ids if f"{each}{suffix}" not in there]:
            raise UserError(f"{folder} lacks {len(missing)} files, first {missing[0]}: unpack the set again")
    metres = np.array([_kitti_nearest(labels / f"{each}.txt") for each in ids])
    found = structured_labels.kitti_distance(metres)
    names = [f"{each}.png" for each in ids]
    return _in_folder("kitti_distance", split, structured_labels.KITTI_DISTANCE, found, images, names)


def kitti_splits(videos: Sequence[str]) -> dict[str, np.ndarray]:
    """Sorted numbers of the images of each split, from the video of each image: whole videos stay together.

    The rule of TFDS since November 2020: a tenth of the videos, by their sorted names, drawn for test, as many of the
    others for validation. The generator is the one whose draws NumPy promises never to change.
    """
    random = np.random.RandomState(123)
    names = sorted(set(videos))
    share = max(1, len(names) // 10)
    test = set(random.choice(names, share, replace=False).tolist())
    validation = set(random.choice(sorted(set(names) - test), share, replace=False).tolist())
    part = np.array(["test" if v in test else "validation" if v in validation else "train" for v in videos])
    return {name: np.flatnonzero(part == name) for name in ("train", "validation", "test")}


def _kitti_videos(rand: Path, mapping: Path) -> list[str]:
    """The video that each training image is from.

    train_rand.txt holds, by commas, the line (from 1) of train_mapping.txt for each image; a line of that is the
    date, the video and the number of the image in it.
    """
    lines = mapping.read_text().splitlines()
    try:
        numbers = [int(number) for number in rand.read_text().split(",")]
        if min(numbers) < 1:
            raise IndexError(f"line {min(numbers)}")
        return [lines[number - 1].split(" ")[1] for number in numbers]
    except (ValueError, IndexError) as error:
        raise UserError(f"{rand} or {mapping.name} beside it is damaged ({error}): fetch devkit_object.zip") from error


def _kitti_nearest(path: Path) -> float:
    """The least z of the vehicles, in metres. An object is a line of 15 fields: type first, x, y, z from the 12th."""
    metres = [structured_labels.NO_VEHICLE]
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fields = line.split()
        try:
            if len(fields) != 15:
                raise UserError(f"{len(fields)} fields")
            if fields[0] in structured_labels.KITTI_VEHICLES:
                metres.append(float(fields[13]))
        except ValueError as error:
            raise UserError(f"{path}, line {number}, is no object of KITTI ({error}): unpack it again") from error
    return min(metres)


# -------------------------------------------------------------------------------------------------- dSprites

_DSPRITES_URL = "https://github.com/google-deepmind/dsprites-dataset/raw/master"
_DSPRITES_DIGEST = "md5:7da33b31b13a06f4b04a70402ce90c2e"


def dsprites_location(root: Path, split: str, download: bool) -> Published:
    """Where the sprite is from left to right: 16 classes. One split, "train"."""
    return _dsprites("dsprites_location", root, split, download)


def dsprites_orientation(root: Path, split: str, download: bool) -> Published:
    """How the sprite is turned: 16 classes. One split, "train"."""
    return _dsprites("dsprites_orientation", root, split, download)


def _dsprites(name: str, root: Path, split: str, download: bool) -> Published:
    (file,) = fetch.SOURCES["dsprites"].needed
    path = fetch.locate("dsprites", split, root, download, {f"{_DSPRITES_URL}/{file}": _DSPRITES_DIGEST}) / file
    try:
        with np.load(path, allow_pickle=False) as arrays:  # its "metadata" is a pickle, and stays unread
            latents = arrays["latents_classes"]  # color, shape, scale, orientation, x, y
        bits = gray.packed_images(path)
        if latents.ndim != 2 or latents.shape[1] != 6 or len(latents) != len(bits):
            raise UserError(f"latents {latents.shape} for {len(bits)} images")
        if name == "dsprites_location":
            classes, labels = structured_labels.DSPRITES_LOCATION, structured_labels.dsprites_location(latents[:, 4])
        else:
            classes = structured_labels.DSPRITES_ORIENTATION
            labels = structured_labels.dsprites_orientation(latents[:, 3])
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged or not dSprites ({error}): fetch it again") from error
    keys = [str(i) for i in range(len(labels))]
    return Published(Dataset(name, split, classes, labels, entries=GrayEntries(str(path), bits, bits=True)), keys)


# ------------------------------------------------------------------------------------------------- SmallNORB

_NORB = {"train": "smallnorb-5x46789x9x18x6x2x96x96-training", "test": "smallnorb-5x01235x9x18x6x2x96x96-testing"}
_NORB_SHA256 = {
    ("train", "dat"): "5ffd6272a07d32695ee1082a26a41a93a37aab8c28da047f8c34ed348d214873",
    ("train", "info"): "de7eb932ebe7a4ee16217fead60660d0eb3d23632c2f4d1c51f88c501c17bf32",
    ("test", "dat"): "cf7104eed3e51174d2f65b66d1e5878b9da233b886f161b0d88f4510ba2c7474",
    ("test", "info"): "16adf314226327ee006d1a44db8cfef52773c06c829951d5653a9f6f310248a2",
}


def smallnorb_azimuth(root: Path, split: str, download: bool) -> Published:
    """From which side the toy is seen: 18 classes. Splits "train" and "test"."""
    path, pixels, info = _smallnorb(root, split, download)
    labels = structured_labels.smallnorb_azimuth(info[:, 2])
    return _norb_images("smallnorb_azimuth", split, structured_labels.SMALLNORB_AZIMUTH, labels, path, pixels)


def smallnorb_elevation(root: Path, split: str, download: bool) -> Published:
    """From how high the toy is seen: 9 classes. Splits "train" and "test"."""
    path, pixels, info = _smallnorb(root, split, download)
    labels = structured_labels.smallnorb_elevation(info[:, 1])
    return _norb_images("smallnorb_elevation", split, structured_labels.SMALLNORB_ELEVATION, labels, path, pixels)


def _norb_images(
    name: str, split: str, classes: tuple[str, ...], labels: np.ndarray, path: Path, pixels: np.ndarray
) -> Published:
    keys = [str(i) for i in range(len(labels))]
    return Published(Dataset(name, split, classes, labels, entries=GrayEntries(str(path), pixels)), keys)


def _smallnorb(root: Path, split: str, download: bool) -> tuple[Path, np.ndarray, np.ndarray]:
    """The file of the images; the left camera's, uint8 [N, 96, 96]; instance, elevation, azimuth, lighting [N, 4]."""
    fetch.require_split("smallnorb", split)
    files = {kind: f"{_NORB[split]}-{kind}.mat" for kind in ("dat", "info")}
    archives = {
        f"https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/{file}.gz": f"sha256:{_NORB_SHA256[split, kind]}"
        for kind, file in files.items()
    }
    needed = [f"{file} or {file}.gz" for file in files.values()]
    home = fetch.locate("smallnorb", split, root, download, archives, needed)
    plain = [home / file for file in files.values()]
    dat, info = (path if path.is_file() else path.with_name(f"{path.name}.gz") for path in plain)
    pixels, annotation = gray.norb_matrix(dat, first=True), gray.norb_matrix(info)
    if pixels.shape[1:] != (96, 96) or pixels.dtype != np.uint8 or annotation.shape != (len(pixels), 4):
        raise UserError(f"{dat} is not smallnorb: images {pixels.shape}, annotations {annotation.shape}")
    return dat, pixels, annotation
