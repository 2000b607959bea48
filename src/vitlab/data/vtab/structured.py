"""The data sets of VTAB's structured tasks as published: readers as in `readers.py`, one for each task.

Labels come from annotations by bins that are closed above: a value on a threshold belongs to the lower bin. Depths and
distances are compared in float32, as the benchmark stores them.
"""

import functools
import gzip
import itertools
import json
import mmap
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from vitlab.data.dataset import Dataset
from vitlab.data.decode import Entry
from vitlab.data.vtab.readers import Published, of_files, of_pixels
from vitlab.data.vtab.sources import SOURCES

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
SPRITES_CHUNK = 1024  # images of 4 KiB
KITTI_DISTANCE = ("vehicle up to 8 m", "vehicle over 8 to 20 m", "vehicle over 20 m", "no vehicle")
KITTI_METERS = (8.0, 20.0, 999.0)
KITTI_VEHICLES = ("Car", "Van", "Truck")
NO_VEHICLE = 1000.0  # meters
NORB_TYPES = {0x1E3D4C55: np.dtype("u1"), 0x1E3D4C54: np.dtype("<i4")}
SMALLNORB_AZIMUTH = tuple(f"{20 * i} degrees" for i in range(18))
SMALLNORB_ELEVATION = tuple(f"{30 + 5 * i} degrees" for i in range(9))


def clevr_count(folder: Path, split: str) -> Published:
    """How many objects: 8 classes. Splits "train" and "validation"; the test part has no annotations."""
    images, depths = _clevr(folder, split)
    return of_files(images, [len(objects) - 3 for objects in depths.values()], CLEVR_COUNT, list(depths))


def clevr_distance(folder: Path, split: str) -> Published:
    """How far the nearest object, by its third pixel coordinate: 6 classes. Splits as for `clevr_count`."""
    images, depths = _clevr(folder, split)
    labels = _bins([min(objects) for objects in depths.values()], CLEVR_DEPTHS)
    return of_files(images, labels, CLEVR_DISTANCE, list(depths))


def _clevr(folder: Path, split: str) -> tuple[list[Path], dict[str, list[float]]]:
    """The images, sorted by name; and for each name the depths of its objects."""
    images, scenes = (folder / part for part in SOURCES["clevr"].required[split])
    content = json.loads(scenes.read_bytes(), object_hook=_clevr_object)
    depths = dict(sorted(content["scenes"]))
    return [images / name for name in depths], depths


def _clevr_object(content: dict) -> object:
    """Reduces each JSON object, as it is parsed, to what is needed: all of it would take gigabytes."""
    if "pixel_coords" in content:
        return float(content["pixel_coords"][2])
    if "image_filename" in content:
        return content["image_filename"], content["objects"]
    return content if "scenes" in content else None


def dmlab(folder: Path, split: str) -> Published:
    """Close, far or very far from a reward or a penalty: 6 classes. Splits "train", "validation" and "test". The images
    stay in the TFRecord files; only their offsets are stored."""
    entries: list[Entry] = []
    labels: list[int] = []
    for file in sorted(folder.glob(f"dmlab-{split}.tfrecord*")):
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for example in _examples(data):
                image, key = example["image"], data[example["filename"]].decode()
                entries.append(Entry(str(file), key, image.start, image.stop - image.start))
                labels.append(int(example["label"]))
    dataset = Dataset("", "", DMLAB, np.array(labels, np.int64), entries=entries)
    return Published(dataset, [entry.member for entry in entries])


def _examples(data: bytes | mmap.mmap) -> Iterator[dict[str, Any]]:
    """The first value of each feature of the `tf.train.Example` messages in a TFRecord file, bytes as their slices.

    A record is the length of its message (8 bytes), a checksum of these (4), the message, and a checksum of that (4),
    all little-endian. Checksums are not compared: an image is checked by its decoder.
    """
    start = 0
    while start < len(data):
        message = slice(start + 12, start + 12 + int.from_bytes(data[start : start + 8], "little"))
        start = message.stop + 4
        if start > len(data):
            raise EOFError("it ends within a record")
        ((_, features),) = _fields(data, message)
        example = {}
        for _, feature in _fields(data, features):  # of the map from names to features
            (_, name), (_, value) = _fields(data, feature)
            ((kind, values),) = _fields(data, value)  # 1: byte strings, 2: floats, 3: integers
            first = next(_fields(data, values))[1]
            packed = kind == 3 and isinstance(first, slice)
            example[data[name].decode()] = _varint(data, first.start)[0] if packed else first
        yield example


def _fields(data: bytes | mmap.mmap, message: slice) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message: an int, or the slice of `data` that holds another value."""
    at = message.start
    while at < message.stop:
        tag, at = _varint(data, at)
        number, kind = divmod(tag, 8)
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
        else:
            size, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            yield number, slice(at, at + size)
            at += size
    if at > message.stop:
        raise EOFError("a field ends beyond its message")


def _varint(data: bytes | mmap.mmap, at: int) -> tuple[int, int]:
    """An unsigned number of seven bits per byte, the lowest first, and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def kitti_distance(folder: Path, split: str) -> Published:
    """How far the nearest car, van or truck: 4 classes. Splits "train", "validation" and "test". All are parts of the
    published training images, as KITTI's test images have no labels."""
    images, labels, rand, mapping = (folder / part for part in SOURCES["kitti"].required["all"])
    # For each image, separated by commas, the line (from 1) of `mapping`: date, video and number of the image in it.
    videos = [line.split(" ")[1] for line in mapping.read_text().splitlines()]
    ids = [f"{n:06d}" for n in kitti_splits([videos[int(n) - 1] for n in rand.read_text().split(",")])[split]]
    distances = _bins([_kitti_nearest(labels / f"{number}.txt") for number in ids], KITTI_METERS)
    keys = [f"{number}.png" for number in ids]
    return of_files([images / key for key in keys], distances, KITTI_DISTANCE, keys)


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


def _kitti_nearest(path: Path) -> float:
    """The least z of the vehicles, in meters. An object is a line of 15 fields: type first, x, y, z from the 12th."""
    rows = [line.split() for line in path.read_text().splitlines()]
    return min([float(row[13]) for row in rows if row[0] in KITTI_VEHICLES], default=NO_VEHICLE)


def dsprites_location(folder: Path, split: str) -> Published:
    """Where the sprite is from left to right, 0 to 31, two to a class. One split, "train"."""
    return _dsprites(folder, DSPRITES_LOCATION, lambda latents: latents[:, 4] // 2)


def dsprites_orientation(folder: Path, split: str) -> Published:
    """How the sprite is turned, floor(orientation / 2.5): 16 classes. One split, "train"."""
    return _dsprites(folder, DSPRITES_ORIENTATION, lambda latents: latents[:, 3] * 2 // 5)


def _dsprites(folder: Path, classes: Sequence[str], label: Callable[[np.ndarray], np.ndarray]) -> Published:
    """label: int64 [N, 6] (color, shape, scale, orientation, x, y) -> int64 [N]."""
    path = folder / SOURCES["dsprites"].required["all"][0]
    with np.load(path, allow_pickle=False) as arrays:  # its "metadata" is a pickle, and stays unread
        labels = label(arrays["latents_classes"].astype(np.int64))
    read_pixels = functools.partial(_read_sprites, path, len(labels))
    return of_pixels(None, labels, classes)._replace(read_pixels=read_pixels)


def _read_sprites(path: Path, count: int, indices: np.ndarray) -> np.ndarray:
    """uint8 [n, 64, 64, 3]. The array is decompressed in chunks, because all images take 3 GB."""
    pixels = np.empty((len(indices), 64, 64, 3), np.uint8)
    with zipfile.ZipFile(path) as archive, archive.open("imgs.npy") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        if (shape, dtype) != ((count, 64, 64), np.uint8):
            raise ValueError(f"{count} labels and images {dtype} {shape}")
        for start in range(0, count, SPRITES_CHUNK):
            chunk = np.frombuffer(file.read(SPRITES_CHUNK * 64 * 64), np.uint8).reshape(-1, 64, 64, 1)
            rows = np.flatnonzero((indices >= start) & (indices < start + SPRITES_CHUNK))
            pixels[rows] = chunk[indices[rows] - start] * 255
    return pixels


def smallnorb_azimuth(folder: Path, split: str) -> Published:
    """From which side the toy is seen, stored as 0, 2, ..., 34: 18 classes. Splits "train" and "test"."""
    pixels, info = _smallnorb(folder, split)
    return of_pixels(pixels, info[:, 2] // 2, SMALLNORB_AZIMUTH)


def smallnorb_elevation(folder: Path, split: str) -> Published:
    """From how high the toy is seen: 9 classes. Splits "train" and "test"."""
    pixels, info = _smallnorb(folder, split)
    return of_pixels(pixels, info[:, 1], SMALLNORB_ELEVATION)


def _smallnorb(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """The left camera's pixels uint8 [N, 96, 96, 3]; instance, elevation, azimuth and lighting, int64 [N, 4]."""
    plain = [folder / alternatives.partition(" or ")[0] for alternatives in SOURCES["smallnorb"].required[split]]
    pairs, info = (_norb_matrix(path if path.is_file() else path.with_name(f"{path.name}.gz")) for path in plain)
    gray = pairs[:, 0, :, :, None]
    return np.broadcast_to(gray, (*gray.shape[:3], 3)), info.astype(np.int64)  # a view, until images are taken of it


def _norb_matrix(path: Path) -> np.ndarray:
    """A .mat or .mat.gz file in the format of NORB. Little-endian int32: a number that stands for the type, the number
    of axes, their sizes (three at least); the data."""
    with cast(IO[bytes], gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
        magic, axes = np.frombuffer(file.read(8), "<i4").tolist()
        sizes = np.frombuffer(file.read(4 * max(3, axes)), "<i4")[:axes]
        return np.frombuffer(file.read(), NORB_TYPES[magic]).reshape(sizes)


def _bins(values: Sequence[float], thresholds: tuple[float, ...]) -> np.ndarray:
    """How many thresholds lie below each value."""
    return np.searchsorted(np.array(thresholds, np.float32), np.array(values, np.float32), side="left")
