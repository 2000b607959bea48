"""Images without a label in every form: files, folders, patterns, addresses, encoded bytes, pixels."""

import glob
import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlab.data.contents import contents_of, images_below, no_images_error
from vitlab.data.dataset import Dataset
from vitlab.data.decode import CORRUPT, ImageError, Levels, decode_image, read_bytes, to_array
from vitlab.data.downloads import check_address, read_url
from vitlab.errors import UserError, quoted

MAX_BYTES = 50 * 2**20
"""Largest downloaded image."""
ADDRESS = re.compile(r"[a-z0-9]+://")
ImageSource = str | Path | bytes | bytearray | memoryview | io.IOBase | Image.Image | np.ndarray | Tensor
"""Images in RGB. A path of a file, of a folder (searched recursively), or a pattern such as `photos/*.jpg`; an address
such as https://HOST/IMAGE; an encoded file as bytes or opened in binary mode; a PIL image; uint8 pixels [H, W, 3],
[H, W, 4] or gray [H, W], or a batch [B, H, W, C]; a tensor [C, H, W] or [B, C, H, W], uint8 or of floats from 0 to 1
(as torchvision's `ToTensor` returns)."""


def find_images(sources: Iterable[ImageSource]) -> Iterator[tuple[str, ImageSource | UserError]]:
    """Name and source of each image in `sources`, for `read_image`; nothing is decoded. Those in memory are called
    `image N` by their position.

    Raises UserError for a missing file, for what is not an image, and if there are no sources. With an iterator, from
    which images come one by one, the error replaces the image.
    """
    count = 0
    for source in sources:
        try:
            images = list(_expand(source, count))
        except UserError as error:
            if isinstance(sources, Sequence):
                raise
            images = [(str(source) if isinstance(source, (str, Path)) else f"image {count}", error)]
        yield from images
        count += len(images)
    if not count:
        raise UserError("there are no images; give images or folders of them.")


def read_image(source: ImageSource | UserError, name: str, levels: Levels | None = None) -> np.ndarray:
    """One image of `find_images`: uint8 [H, W, 3], converted as by `decode_image`. Raises ImageError.

    A str is an address, which is downloaded; files are Paths, and tensors are arrays by now (`_expand`).
    """
    if isinstance(source, UserError):
        raise ImageError(name, str(source))
    if isinstance(source, (Image.Image, np.ndarray)):
        try:
            return to_array(Image.fromarray(source) if isinstance(source, np.ndarray) else source, name, levels)
        except ImageError:
            raise
        except CORRUPT as error:  # what reading the pixels of an opened image raises
            raise ImageError(name, f"corrupt or truncated ({error})") from error
    data: Any = _download(source) if isinstance(source, str) else source
    if isinstance(source, io.IOBase):
        if source.seekable():
            source.seek(0)
        data = source.read()
    return decode_image(data if isinstance(data, Path) else bytes(data), path=name, levels=levels)


@dataclass
class SourceDataset(Dataset):
    """Images in any form of `ImageSource`."""

    sources: Sequence[tuple[str, Any]] = ()
    """Name and source of each image, as `find_images` returns them."""

    @classmethod
    def of(
        cls, X: Any, labels: Any = None, classes: tuple[str, ...] = (), levels: Levels | None = None
    ) -> "SourceDataset":
        """A data set with one image for each row of X. labels: default all 0. Raises UserError for folders, and for
        what is not an image."""
        if isinstance(X, (str, Path)) or not hasattr(X, "__len__"):
            raise UserError(f"X is {X!r:.60}; give a list or an array of images: paths, PIL images or pixels.")
        found: list[tuple[str, Any]] = []
        for row, source in enumerate(X):
            found += _expand(source, row)
            if len(found) != row + 1:
                raise UserError(f"{source!r:.60} is {len(found) - row} images; give one image in each row of X.")
        labels = np.zeros(len(found), np.int64) if labels is None else labels
        return cls("X", "train", classes or ("image",), labels, levels=levels, sources=found)

    def path(self, index: int) -> str:
        return self.sources[index][0]

    def image(self, index: int) -> np.ndarray:
        name, source = self.sources[index]
        return read_image(source, name, self.levels)

    def take(self, indices: np.ndarray) -> "SourceDataset":
        return replace(self, labels=self.labels[indices], sources=[self.sources[index] for index in indices])

    def key(self, index: int) -> str:
        """SHA-256 of the content of an image. Raises ImageError."""
        name, source = self.sources[index]
        if isinstance(source, Path):
            data = read_bytes(str(source))
        elif isinstance(source, (bytes, bytearray, memoryview)):
            data = bytes(source)
        else:  # PIL images, pixels, open files, addresses: what is read of them
            pixels = read_image(source, name, self.levels)
            data = f"{pixels.shape}".encode() + pixels.tobytes()
        return hashlib.sha256(data).hexdigest()


def _expand(source: ImageSource, count: int) -> Iterator[tuple[str, ImageSource]]:
    """The images of one source; images in memory are numbered from `count`."""
    name = f"image {count}"
    if isinstance(source, (str, Path)):
        yield from _files(str(source))
    elif isinstance(source, (np.ndarray, Tensor)):
        yield from ((f"image {count + row}", pixels) for row, pixels in enumerate(_pixels(source, name)))
    elif isinstance(source, io.TextIOBase):
        raise UserError(f"{name} is a file opened as text; open it in binary mode ('rb').")
    elif isinstance(source, (bytes, bytearray, memoryview, io.IOBase, Image.Image)):
        yield name, source
    else:
        raise UserError(
            f"{name} has the type {type(source).__name__}; give a path, bytes, a PIL image, an array or a tensor."
        )


def _files(source: str) -> Iterator[tuple[str, str | Path]]:
    """The image at a path or an address, those below a folder, or those that match a pattern."""
    path = Path(source)
    if ADDRESS.match(source):
        check_address(source)
        yield source, source
    elif path.is_dir():
        files = sorted(map(Path, images_below(path)))
        if not files:
            raise no_images_error(path, contents_of(path).others)
        yield from ((str(file), file) for file in files)
    elif path.exists():  # anything but a regular file is an error of its reader
        yield str(path), path
    elif glob.has_magic(source):
        matches = sorted(glob.glob(source, recursive=True))  # noqa: PTH207  # Path.glob takes no absolute pattern
        if "**" in source:  # which matches folders and all in them
            matches = [match for match in matches if not Path(match).is_dir()]
        if not matches:
            raise UserError(f"no file matches {quoted(source)}; give images, folders or another pattern.")
        for match in matches:
            yield from _files(match)
    else:
        raise UserError(f"there is no file or folder {quoted(source)}.")


def _pixels(values: np.ndarray | Tensor, name: str) -> Iterable[np.ndarray]:
    """Images as uint8 [H, W], [H, W, 3] or [H, W, 4]. Raises UserError for other types, shapes and ranges."""
    given = f"{name} is {str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        if values.ndim not in (3, 4):
            raise UserError(f"{given}; give a tensor [3, height, width] or [images, 3, height, width].")
        if values.is_floating_point() and values.numel():
            low, high = values.min().item(), values.max().item()
            if not 0 <= low <= high <= 1:
                raise UserError(
                    f"{given} with values from {low:.3g} to {high:.3g}; give floats from 0 to 1, or uint8, which are "
                    "preprocessed here. Images that are preprocessed already go to the model itself."
                )
            values = (255 * values.float()).round().to(torch.uint8)
        values = values.movedim(-3, -1).numpy()
    channels = values.shape[-1] if values.ndim > 2 else 1
    if values.dtype != np.uint8 or values.ndim not in (2, 3, 4) or channels not in (1, 3, 4) or not values.size:
        raise UserError(
            f"{given}; give uint8 [height, width, 3] in RGB, or a tensor [3, height, width], with no dimension 0."
        )
    if channels == 1 and values.ndim > 2:
        values = values[..., 0]
        return [values] if values.ndim == 2 else values
    return values if values.ndim == 4 else [values]


def _download(url: str) -> bytes:
    """The file at an address, of at most MAX_BYTES. Raises ImageError."""
    try:
        data = read_url(url, MAX_BYTES + 1) or b""
    except UserError as error:
        raise ImageError(url, str(error)) from error
    if len(data) > MAX_BYTES:
        raise ImageError(url, f"more than {MAX_BYTES >> 20} MiB")
    return data
