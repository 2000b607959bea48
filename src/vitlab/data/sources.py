"""Where pictures lie, and how one is read: decoding, image folders, shards.

A picture is uint8 [H, W, 3], RGB, upright, whatever the file was. A file that cannot be read is a
`PictureError` with its path and the reason; nothing is dropped in silence.
"""

import collections
import dataclasses
import io
import json
import logging
import os
import struct
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

logger = logging.getLogger(__name__)

MAX_PIXELS = 89_478_485  # 256 MiB of RGB: larger pictures are refused as bombs (Pillow's own bound)
MEMORY_SIDE = 64  # pixels: sets of one size up to this side are decoded once, if they stay below ...
MEMORY_BYTES = 2**30  # ... this many bytes
# What is read, and nothing else: Pillow also knows formats that run other programs.
PICTURE_FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm"),
    "AVIF": (".avif",),
}
PICTURE_SUFFIXES = frozenset(suffix for suffixes in PICTURE_FORMATS.values() for suffix in suffixes)
SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "validation"), "test": ("test",)}

# What Pillow's readers raise on damaged data.
_DAMAGE = (
    ArithmeticError,
    AssertionError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,  # and its NotImplementedError
    OSError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)


class PictureError(ValueError):
    """A picture that cannot be read: `path` says which one, `reason` why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"cannot read the picture {self.path}: {self.reason}"


# ---------------------------------------------------------------------------------------------- decoding


def decode(data: bytes | Path, *, path: str = "<bytes>", max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Encoded picture -> uint8 [H, W, 3] RGB. Raises `PictureError`.

    EXIF orientation is applied, transparency is laid over white, 16-bit grey is scaled to 8 bits, grey and
    CMYK become RGB, and of an animation the first frame is taken. `path` names the picture in errors.
    """
    if isinstance(data, Path):
        path = str(data)
        data = _read_bytes(path)
    if not data:
        raise PictureError(path, "the file is empty (zero bytes)")
    try:
        with Image.open(io.BytesIO(data), formats=tuple(PICTURE_FORMATS)) as image:
            if image.width * image.height > max_pixels:
                raise PictureError(path, _bomb(f"{image.width} x {image.height}", max_pixels))
            image.load()
            return np.array(_to_rgb(_upright(image), path))
    except PictureError:
        raise
    except Image.UnidentifiedImageError:
        raise PictureError(path, f"not a picture of a known format ({', '.join(PICTURE_FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise PictureError(path, _bomb("too many", max_pixels)) from None
    except _DAMAGE as error:
        raise PictureError(path, f"damaged or cut off ({error or type(error).__name__})") from error


def _bomb(size: str, max_pixels: int) -> str:
    return f"{size} pixels, more than the {max_pixels:,} allowed: a decompression bomb, or to be scaled down"


def _read_bytes(path: str, offset: int = 0, size: int = -1) -> bytes:
    try:
        with Path(path).open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except OSError as error:
        raise PictureError(path, error.strerror or str(error)) from error


def _upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation; an EXIF block that cannot be parsed is as good as none."""
    if not image.info:  # no metadata at all: saves a third of the time of a small PNG
        return image
    try:
        turned = image.getexif().get(0x0112, 1) != 1
        return ImageOps.exif_transpose(image) if turned else image
    except (SyntaxError, ValueError, TypeError, KeyError, struct.error):
        return image


def _to_rgb(image: Image.Image, path: str) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # I;16, I;16B, I: Pillow's own conversion clips these instead of scaling
        grey = np.asarray(image).astype(np.int64)
        grey[grey == image.info.get("transparency", -1)] = 65535
        if grey.min() < 0 or grey.max() > 65535:
            raise PictureError(path, "32-bit grey values have no agreed range: store it with 8 or 16 bits")
        return Image.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise PictureError(path, "floating-point grey values have no agreed range: store it with 8 or 16 bits")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        if image.mode in ("RGBa", "La"):  # premultiplied alpha
            image = image.convert({"RGBa": "RGBA", "La": "LA"}[image.mode])
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


# ------------------------------------------------------------------------------------------- picture sets


class Entry(NamedTuple):
    """The bytes of one picture: a whole file, or a member of a tar at `offset` with `size` bytes."""

    file: str
    member: str = ""
    offset: int = 0
    size: int = -1

    @property
    def path(self) -> str:
        return f"{self.file}/{self.member}" if self.member else self.file

    def read(self) -> np.ndarray:
        return decode(_read_bytes(self.file, self.offset, self.size), path=self.path)


@dataclasses.dataclass
class Dataset:
    """N labelled pictures, in files (`entries`) or in memory (`pixels`).

    labels: int64 [N], indices into `classes`. pixels: uint8 [N, H, W, 3], or None when the set is not held in
    memory. failures: the pictures of `pixels` that could not be read; `picture` raises them.
    """

    name: str
    split: str
    classes: tuple[str, ...]
    labels: np.ndarray
    pixels: np.ndarray | None = None
    entries: Sequence[Entry] = ()
    failures: dict[int, PictureError] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        """What to call picture `index` when talking to the user."""
        return self.entries[index].path if self.entries else f"{self.name}/{self.split}[{index}]"

    def picture(self, index: int) -> np.ndarray:
        """uint8 [H, W, 3]. Raises `PictureError`."""
        if index in self.failures:
            raise self.failures[index]
        return self.entries[index].read() if self.pixels is None else self.pixels[index]

    def take(self, indices: np.ndarray) -> "Dataset":
        """The pictures `indices`, in that order."""
        return dataclasses.replace(
            self,
            labels=self.labels[indices],
            pixels=None if self.pixels is None else self.pixels[indices],
            entries=[self.entries[i] for i in indices] if self.entries else (),
            failures={j: self.failures[i] for j, i in enumerate(indices.tolist()) if i in self.failures},
        )

    def in_memory(self, on_error: str) -> "Dataset":
        """The same set with `pixels`, if its pictures are small and of one size; else the set as it is.

        With `on_error="raise"` the first unreadable picture is raised; with "skip" it is left to the loader.
        """
        pixels, failures = None, {}
        for i in range(len(self) if self.pixels is None else 0):
            try:
                picture = self.picture(i)
            except PictureError as error:
                if on_error == "raise":
                    raise
                failures[i] = error
                continue
            if pixels is None:
                if max(picture.shape) > MEMORY_SIDE or picture.nbytes * len(self) > MEMORY_BYTES:
                    return self
                pixels = np.zeros((len(self), *picture.shape), np.uint8)
            if picture.shape != pixels.shape[1:]:
                return self
            pixels[i] = picture
        return self if pixels is None else dataclasses.replace(self, pixels=pixels, failures=failures)


def join(first: Dataset, second: Dataset) -> Dataset:
    """The pictures of `first`, then those of `second`."""
    assert first.classes == second.classes
    assert not first.failures | second.failures, "sets are joined before their pictures are read"
    pixels = [p for p in (first.pixels, second.pixels) if p is not None]
    return dataclasses.replace(
        first,
        labels=np.concatenate([first.labels, second.labels]),
        pixels=np.concatenate(pixels) if len(pixels) == 2 else None,
        entries=[*first.entries, *second.entries],
    )


# A source that is split on disk: the splits that are there, and a function that reads one of them.
Splits = tuple[list[str], Callable[[str], Dataset]]


# ------------------------------------------------------------------------------------------- image folders


def folder_splits(path: Path, name: str) -> Splits:
    """`PATH/CLASS/**/picture`, or the same below `train/`, `val/` (or `validation/`) and `test/`.

    The classes are the sorted folder names (of `train/`, where there is one); all splits share them.
    """
    _require_folder(path, "class folders with pictures, or train/, val/ and test/ with class folders")
    found = set(_subfolders(path))
    places = {split: path / n for split, names in SPLIT_FOLDERS.items() for n in names if n in found}
    names = {place.name for place in places.values()}
    if "train" in places and (len(places) > 1 or len(found) == 1):
        if others := sorted(found - names):
            logger.warning("%s: the folders %s are no splits and stay unread", path, others)
    elif names and names == found:
        raise ValueError(f"the folder {path} has {sorted(names)} but no train: add {path / 'train'}/CLASS/picture.jpg")
    else:
        places = {"train": path}  # plain class folders
    classes = tuple(_subfolders(places["train"]))
    if not classes:
        raise ValueError(f"{places['train']} has no class folders: expected {places['train']}/CLASS/picture.jpg")
    return list(places), lambda split: _read_class_folders(places[split], name, split, classes)


def _read_class_folders(path: Path, name: str, split: str, classes: tuple[str, ...]) -> Dataset:
    if strange := sorted(set(_subfolders(path)) - set(classes)):
        raise ValueError(f"{path} has class folders that train lacks: {strange}; train's are {list(classes)}")
    entries: list[Entry] = []
    labels: list[int] = []
    ignored = collections.Counter("outside the class folders" for p in path.iterdir() if p.is_file())
    for label, folder in enumerate(classes):
        if not (path / folder).is_dir():
            logger.warning("%s has no folder for the class %r of train", path, folder)
            continue
        pictures = _pictures_below(path / folder, ignored)
        if not pictures:
            raise ValueError(
                f"the class folder {path / folder} holds no pictures: "
                f"add some ({', '.join(sorted(PICTURE_SUFFIXES))}) or remove the folder"
            )
        entries += pictures
        labels += [label] * len(pictures)
    _report(path, ignored)
    return Dataset(name, split, classes, np.array(labels, np.int64), entries=entries)


def _pictures_below(folder: Path, ignored: collections.Counter[str]) -> list[Entry]:
    """All pictures in `folder` and below it, sorted by path; other files are counted by kind in `ignored`."""
    files = []
    for parent, _, names in os.walk(folder, onerror=_raise, followlinks=True):
        for file in (Path(parent, name) for name in names):
            if file.name.startswith("."):
                ignored["hidden"] += 1
            elif file.suffix.lower() in PICTURE_SUFFIXES:
                files.append(str(file))
            else:
                ignored[file.suffix.lower() or file.name] += 1
    return [Entry(file) for file in sorted(files)]


def _raise(error: OSError) -> None:
    raise ValueError(f"cannot list the folder {error.filename}: {error.strerror}")


def _report(path: Path, ignored: collections.Counter[str]) -> None:
    if ignored:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(ignored.items()))
        logger.warning("%s: %d files are no pictures to learn and left out (%s)", path, ignored.total(), kinds)


def _subfolders(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _require_folder(path: Path, content: str) -> None:
    if not path.is_dir():
        state = "is a file" if path.exists() else "does not exist"
        raise ValueError(f"the folder {path} {state} (taken from {Path.cwd()}): give a folder of {content}")


# ---------------------------------------------------------------------------------------------------- shards


def shard_splits(path: Path, name: str) -> Splits:
    """WebDataset tars `train-*.tar`, `val-*.tar`, `test-*.tar` of `KEY.jpg|png|webp` and `KEY.cls` members.

    Class names come from `classes.json` (a list, in label order) or are the numbers up to train's largest
    label.
    """
    _require_folder(path, "shards named train-*.tar (and val-*.tar, test-*.tar)")
    tars = {
        split: files
        for split, names in SPLIT_FOLDERS.items()
        if (files := sorted(file for n in names for file in path.glob(f"{n}-*.tar")))
    }
    if "train" not in tars:
        there = sorted(tar.name for tar in path.glob("*.tar"))
        raise ValueError(f"the folder {path} has no train-*.tar (its tars: {there}): name shards by split")
    named = _class_names(path / "classes.json")

    def read(split: str) -> Dataset:
        entries, labels = _index_shards(tars[split])
        classes = named
        if not classes:
            largest = max(labels if split == "train" else _index_shards(tars["train"])[1])
            classes = tuple(str(i) for i in range(largest + 1))
        if (top := max(labels)) >= len(classes):
            where = entries[labels.index(top)].path
            raise ValueError(f"{where} has the label {top}, but train's classes are 0 to {len(classes) - 1}")
        return Dataset(name, split, classes, np.array(labels, np.int64), entries=entries)

    return list(tars), read


def _class_names(path: Path) -> tuple[str, ...]:
    """The names in `path`, or none where there is no such file."""
    if not path.exists():
        return ()
    try:
        names = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): write a list of class names") from error
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path} must be a list of class names in label order, not {str(names)[:60]}")
    return tuple(names)


def _index_shards(tars: Sequence[Path]) -> tuple[list[Entry], list[int]]:
    entries: list[Entry] = []
    labels: list[int] = []
    ignored: collections.Counter[str] = collections.Counter()
    for tar in tars:
        pictures, numbers = _index_shard(tar, ignored)
        if unpaired := sorted(pictures.keys() ^ numbers.keys()):
            raise ValueError(f"{tar}: {len(unpaired)} keys lack a picture or a .cls, first {unpaired[0]!r}")
        entries += pictures.values()
        labels += [numbers[key] for key in pictures]
    _report(tars[0].parent, ignored)
    if not entries:
        raise ValueError(f"no pictures in {', '.join(map(str, tars))}: expected KEY.jpg|png|webp with KEY.cls")
    return entries, labels


def _index_shard(path: Path, ignored: collections.Counter[str]) -> tuple[dict[str, Entry], dict[str, int]]:
    """Key -> place of the picture, and key -> label. The tar is read once and never unpacked."""
    pictures: dict[str, Entry] = {}
    numbers: dict[str, int] = {}
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                folder, slash, base = member.name.rpartition("/")
                stem, _, kind = base.partition(".")
                key = folder + slash + stem
                if key in (numbers if kind == "cls" else pictures):
                    raise ValueError(f"{path} has more than one picture or .cls of the key {key!r}: keys are unique")
                if kind == "cls":
                    file.seek(member.offset_data)
                    numbers[key] = _label(file.read(member.size), f"{path}/{member.name}")
                elif f".{kind.lower()}" in PICTURE_SUFFIXES:
                    pictures[key] = Entry(str(path), member.name, member.offset_data, member.size)
                else:
                    ignored[f".{kind}"] += 1
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                raise tarfile.ReadError("it ends without the closing block")
    except tarfile.TarError as error:
        raise ValueError(f"the shard {path} is damaged or cut off ({error}): fetch or write it again") from error
    return pictures, numbers


def _label(text: bytes, path: str) -> int:
    if not text.strip().isdigit():
        raise ValueError(f"{path} must hold a class number (0, 1, 2, ...), not {text[:40]!r}")
    return int(text)
