"""The data sets of VTAB's structured tasks as published: readers as in `readers.py`, one for each task.

Labels come from annotations by bins that are closed above: a value on a threshold belongs to the lower bin. Depths and
distances are compared in float32, as the benchmark stores them.
"""

import itertools
import json
import mmap
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitlab.data.dataset import Dataset
from vitlab.data.decode import Entry
from vitlab.data.vtab import tfrecord
from vitlab.data.vtab.gray import GrayEntries, norb_matrix, packed_images
from vitlab.data.vtab.readers import Published
from vitlab.data.vtab.sources import SOURCES, locate
from vitlab.errors import UserError

CLEVR_COUNT = tuple(f"{n} objects" for n in range(3, 11))
CLEVR_DEPTHS = (8.0, 8.5, 9.0, 9.5, 10.0)
CLEVR_DISTANCE = (
    "up to 8",
    *(f"over {low:g} to {high:g}" for low, high in itertools.pairwise(CLEVR_DEPTHS)),
    "over 10",
)
DMLAB = tuple(f"{where} {what}" for what in ("reward", "penalty") for where in ("close", "far", "very far"))
DSPRITES_LOCATION = tuple(f"x {2 * i} or {2 * i + 1} of 31" for i in range(16))
DSPRITES_ORIENTATION = tuple(  # 40 orientations from 0 to 360 degrees, three and two to a class in turn
    f"{np.ceil(2.5 * i) * 360 / 39:.0f} to {(np.ceil(2.5 * i + 2.5) - 1) * 360 / 39:.0f} degrees" for i in range(16)
)
KITTI_DISTANCE = ("vehicle up to 8 m", "vehicle over 8 to 20 m", "vehicle over 20 m", "no vehicle")
KITTI_METERS = (8.0, 20.0, 999.0)
KITTI_VEHICLES = ("Car", "Van", "Truck")
NO_VEHICLE = 1000.0  # meters
SMALLNORB_AZIMUTH = tuple(f"{20 * i} degrees" for i in range(18))
SMALLNORB_ELEVATION = tuple(f"{30 + 5 * i} degrees" for i in range(9))


# ----------------------------------------------------------------------------------------------------- CLEVR


def clevr_count(root: Path, split: str, download: bool) -> Published:
    """How many objects: 8 classes. Splits "train" and "validation"; the test part has no annotations."""
    folder, depths = _clevr(root, split, download)
    labels = np.array([len(objects) for objects in depths.values()]) - 3
    return _in_folder("clevr_count", split, CLEVR_COUNT, labels, folder, list(depths))


def clevr_distance(root: Path, split: str, download: bool) -> Published:
    """How far the nearest object, by its third pixel coordinate: 6 classes. Splits as for `clevr_count`."""
    folder, depths = _clevr(root, split, download)
    labels = _bins([min(objects, default=np.nan) for objects in depths.values()], CLEVR_DEPTHS)
    return _in_folder("clevr_distance", split, CLEVR_DISTANCE, labels, folder, list(depths))


def _clevr(root: Path, split: str, download: bool) -> tuple[Path, dict[str, list[float]]]:
    """The folder of the images; and for each, sorted by name, the depths of its objects."""
    home = locate("clevr", split, root, download)
    images, scenes = (home / part for part in SOURCES["clevr"].required[split])
    try:
        content = json.loads(scenes.read_bytes(), object_hook=_clevr_object)
        depths = dict(sorted((str(name), list(objects)) for name, objects in content["scenes"]))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise UserError(f"{scenes} is corrupt or not a list of scenes ({error}): download it again") from error
    present = {path.name for path in images.iterdir() if path.suffix == ".png"}
    if not depths:
        raise UserError(f"{scenes} has no scenes: download it again")
    if unpaired := sorted(present ^ depths.keys()):
        raise UserError(
            f"{len(unpaired)} images in {images} and scenes in {scenes} have no counterpart, first {unpaired[0]!r}: "
            "unpack the data set again"
        )
    return images, depths


def _clevr_object(found: dict) -> object:
    """Reduces each JSON object, as it is parsed, to what is needed: all of it would take gigabytes."""
    if "pixel_coords" in found:
        return float(found["pixel_coords"][2])
    if "image_filename" in found:
        return found["image_filename"], found["objects"]
    return found if "scenes" in found else None


# ----------------------------------------------------------------------------------------------------- DMLab


def dmlab(root: Path, split: str, download: bool) -> Published:
    """Close, far or very far from a reward or a penalty: 6 classes. Splits "train", "validation" and "test".

    The images stay in the TFRecord files; only their places are stored.
    """
    pattern = f"dmlab-{split}.tfrecord*"
    files = sorted(locate("dmlab", split, root, download).glob(pattern))
    entries: list[Entry] = []
    labels: list[int] = []
    for file in files:  # dmlab-train.tfrecord-00000-of-00010
        if (of := re.search(r"-of-(\d+)$", file.name)) and int(of[1]) != len(files):
            raise UserError(
                f"{file.parent} has {len(files)} of {int(of[1])} files {pattern}: unpack the data set again"
            )
        if not file.stat().st_size:
            raise UserError(f"{file} is empty: download it again")
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for example in tfrecord.examples(data, file):
                image, key, label = (example.get(name, [None])[0] for name in ("image", "filename", "label"))
                if not (isinstance(image, slice) and isinstance(key, slice) and isinstance(label, int)):
                    raise UserError(f"{file} has an example with {sorted(example)}, not image, filename and label")
                entries.append(Entry(str(file), data[key].decode(), image.start, image.stop - image.start))
                labels.append(label)
    return _published("dmlab", split, DMLAB, np.array(labels), entries, [entry.member for entry in entries])


# ----------------------------------------------------------------------------------------------------- KITTI


def kitti_distance(root: Path, split: str, download: bool) -> Published:
    """How far the nearest car, van or truck: 4 classes. Splits "train", "validation" and "test".

    All are parts of the published training images, as KITTI's own test images have no labels.
    """
    source = SOURCES["kitti"]
    home = locate("kitti", split, root, download)
    images, labels, rand, mapping = (home / part for part in source.required["all"])
    splits = kitti_splits(_kitti_videos(rand, mapping))
    sizes = {name: len(numbers) for name, numbers in splits.items()}
    if sum(sizes.values()) == sum(source.sizes.values()) and sizes != source.sizes:
        raise UserError(
            f"{mapping.parent} splits KITTI into {sizes}, not {source.sizes}: download devkit_object.zip again"
        )
    ids = [f"{number:06d}" for number in splits[split]]
    for folder, suffix in ((images, ".png"), (labels, ".txt")):
        present = {path.name for path in folder.iterdir()}
        if missing := [f"{number}{suffix}" for number in ids if f"{number}{suffix}" not in present]:
            raise UserError(f"{folder} lacks {len(missing)} files, first {missing[0]}: unpack the data set again")
    distances = _bins([_kitti_nearest(labels / f"{number}.txt") for number in ids], KITTI_METERS)
    names = [f"{number}.png" for number in ids]
    return _in_folder("kitti_distance", split, KITTI_DISTANCE, distances, images, names)


def kitti_splits(videos: Sequence[str]) -> dict[str, np.ndarray]:
    """Sorted numbers of the images of each split, from the video of each image: whole videos stay together.

    The rule of TFDS since November 2020: a tenth of the videos, by their sorted names, drawn for test, as many of the
    others for validation. The generator is the one whose draws NumPy promises never to change.
    """
    random = np.random.RandomState(123)
    names = sorted(set(videos))
    count = max(1, len(names) // 10)
    test = set(random.choice(names, count, replace=False).tolist())
    validation = set(random.choice(sorted(set(names) - test), count, replace=False).tolist())
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
        raise UserError(f"{rand} or {mapping.name} is corrupt ({error}): download devkit_object.zip") from error


def _kitti_nearest(path: Path) -> float:
    """The least z of the vehicles, in meters. An object is a line of 15 fields: type first, x, y, z from the 12th."""
    meters = [NO_VEHICLE]
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fields = line.split()
        try:
            if len(fields) != 15:
                raise ValueError(f"{len(fields)} fields")
            if fields[0] in KITTI_VEHICLES:
                meters.append(float(fields[13]))
        except ValueError as error:
            raise UserError(f"{path}, line {number}, is not an object of KITTI ({error}): unpack it again") from error
    return min(meters)


# -------------------------------------------------------------------------------------------------- dSprites


def dsprites_location(root: Path, split: str, download: bool) -> Published:
    """Where the sprite is from left to right, 0 to 31, two to a class. One split, "train"."""
    return _dsprites("dsprites_location", root, split, download)


def dsprites_orientation(root: Path, split: str, download: bool) -> Published:
    """How the sprite is turned, floor(orientation / 2.5): 16 classes. One split, "train"."""
    return _dsprites("dsprites_orientation", root, split, download)


def _dsprites(name: str, root: Path, split: str, download: bool) -> Published:
    path = locate("dsprites", split, root, download) / SOURCES["dsprites"].required["all"][0]
    try:
        with np.load(path, allow_pickle=False) as arrays:  # its "metadata" is a pickle, and stays unread
            latents = arrays["latents_classes"]  # color, shape, scale, orientation, x, y
        bits = packed_images(path)
        if latents.ndim != 2 or latents.shape[1] != 6 or len(latents) != len(bits):
            raise ValueError(f"latents {latents.shape} for {len(bits)} images")
        if name == "dsprites_location":
            classes, labels = DSPRITES_LOCATION, latents[:, 4] // 2
        else:
            classes, labels = DSPRITES_ORIENTATION, latents[:, 3] * 2 // 5
        return _published(name, split, classes, labels, GrayEntries(str(path), bits, bits=True))
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is corrupt or not dSprites ({error}): download it again") from error


# ------------------------------------------------------------------------------------------------- SmallNORB


def smallnorb_azimuth(root: Path, split: str, download: bool) -> Published:
    """From which side the toy is seen, stored as 0, 2, ..., 34: 18 classes. Splits "train" and "test"."""
    path, pixels, info = _smallnorb(root, split, download)
    if (info[:, 2] % 2).any():
        raise UserError(f"{path}: azimuths are even numbers, not {info[info[:, 2] % 2 > 0][0, 2]}")
    return _published("smallnorb_azimuth", split, SMALLNORB_AZIMUTH, info[:, 2] // 2, GrayEntries(str(path), pixels))


def smallnorb_elevation(root: Path, split: str, download: bool) -> Published:
    """From how high the toy is seen: 9 classes. Splits "train" and "test"."""
    path, pixels, info = _smallnorb(root, split, download)
    return _published("smallnorb_elevation", split, SMALLNORB_ELEVATION, info[:, 1], GrayEntries(str(path), pixels))


def _smallnorb(root: Path, split: str, download: bool) -> tuple[Path, np.ndarray, np.ndarray]:
    """The file of the images; the left camera's, uint8 [N, 96, 96]; instance, elevation, azimuth, lighting [N, 4]."""
    home = locate("smallnorb", split, root, download)
    plain = [home / alternatives.partition(" or ")[0] for alternatives in SOURCES["smallnorb"].required[split]]
    dat, info = (path if path.is_file() else path.with_name(f"{path.name}.gz") for path in plain)
    pixels, annotation = norb_matrix(dat, first=True), norb_matrix(info)
    if pixels.shape[1:] != (96, 96) or pixels.dtype != np.uint8 or annotation.shape != (len(pixels), 4):
        raise UserError(f"{dat} is not smallnorb: images {pixels.shape}, annotations {annotation.shape}")
    return dat, pixels, annotation


# ----------------------------------------------------------------------------------------------------- parts


def _in_folder(
    name: str, split: str, classes: tuple[str, ...], labels: np.ndarray, folder: Path, files: list[str]
) -> Published:
    """Images of a folder, whose keys are the names of their files."""
    return _published(name, split, classes, labels, [Entry(str(folder / file)) for file in files], files)


def _published(
    name: str,
    split: str,
    classes: tuple[str, ...],
    labels: np.ndarray,
    entries: Sequence[Entry],
    keys: list[str] | None = None,
) -> Published:
    """keys: default: the numbers of the images."""
    labels = labels.astype(np.int64)
    if invalid := sorted(set(labels.tolist()) - set(range(len(classes)))):
        raise UserError(f"the labels of {name} are 0 to {len(classes) - 1}, not {invalid[0]}: download it again")
    return Published(
        Dataset(name, split, classes, labels, entries=entries), keys or [str(i) for i in range(len(labels))]
    )


def _bins(values: Sequence[float], thresholds: tuple[float, ...]) -> np.ndarray:
    """How many thresholds lie below each value."""
    array = np.array(values, np.float32)
    if not np.isfinite(array).all():
        raise UserError(f"distances are finite numbers, not {array[~np.isfinite(array)][0]}")
    return np.searchsorted(np.array(thresholds, np.float32), array, side="left")
