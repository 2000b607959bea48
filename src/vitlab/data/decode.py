"""How a image is read, from whatever file it is in.

A image is uint8 [H, W, 3], RGB, upright, whatever the file was. A file that cannot be read is a
`ImageError` with its path and the reason; nothing is dropped in silence.

Pillow reads every format. Nearly all photographs are plain JPEGs, though, and for those libjpeg-turbo is called
directly (simplejpeg): the same bytes come out, sooner, and only as many rows as a crop needs have to be decoded.
"""

import io
import os
import stat
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import simplejpeg
from PIL import Image, ImageOps

from vitlab.errors import UserError, quoted

MAX_PIXELS = 89_478_485  # 256 MiB of RGB: larger images are refused as bombs (Pillow's own bound)
# What is read, and nothing else: Pillow also knows formats that run other programs.
IMAGE_FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm"),
    "AVIF": (".avif",),
}
IMAGE_SUFFIXES = frozenset(suffix for suffixes in IMAGE_FORMATS.values() for suffix in suffixes)

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


class ImageError(UserError):
    """A image that cannot be read: `path` says which one, `reason` why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"cannot read the image {quoted(self.path)}: {self.reason}"


# ---------------------------------------------------------------------------------------------- decoding


def decode_image(data: bytes | Path, *, path: str = "<bytes>", max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Encoded image -> uint8 [H, W, 3] RGB. Raises `ImageError`.

    EXIF orientation is applied, transparency is laid over white, 16-bit gray is scaled to 8 bits, gray and
    CMYK become RGB, and of an animation the first frame is taken. `path` names the image in errors.
    """
    if isinstance(data, Path):
        path = str(data)
        data = read_bytes(path)
    image = plain_jpeg(data, path=path, max_pixels=max_pixels)
    if image is None:
        return _decode_with_pillow(data, path, max_pixels=max_pixels)
    return image.rows(image.height)


def _decode_with_pillow(data: bytes, path: str, shrink: int = 1, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """As `decode`; a JPEG at 1 / `shrink` of its size."""
    if not data:
        raise ImageError(path, "the file is empty (zero bytes)")
    try:
        with Image.open(io.BytesIO(data), formats=tuple(IMAGE_FORMATS)) as image:
            if image.width * image.height > max_pixels:
                raise ImageError(path, _bomb(f"{image.width} x {image.height}", max_pixels))
            if shrink > 1:
                image.draft(None, (image.width // shrink, image.height // shrink))
            image.load()
            return np.array(_to_rgb(_upright(image), path))
    except ImageError:
        raise
    except Image.UnidentifiedImageError:
        raise ImageError(path, f"not a image of a known format ({', '.join(IMAGE_FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError(path, _bomb("too many", max_pixels)) from None
    except _DAMAGE as error:
        raise ImageError(path, f"damaged or cut off ({error or type(error).__name__})") from error


def _bomb(size: str, max_pixels: int) -> str:
    return f"{size} pixels, more than the {max_pixels:,} allowed: a decompression bomb, or to be scaled down"


def read_bytes(path: str, offset: int = 0, size: int = -1) -> bytes:
    """`size` bytes of a regular file, all unless given. Raises `ImageError`."""
    try:
        if kind := irregular(path):
            raise ImageError(path, f"it is {kind}, not a regular file")
        with Path(path).open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except OSError as error:
        raise ImageError(path, error.strerror or str(error)) from error


def irregular(path: str | os.PathLike[str]) -> str | None:
    """What `path`, or what it links to, is other than a regular file; None if it is one. Raises OSError if missing.

    Opening a named pipe waits for a writer, and reading /dev/zero has no end.
    """
    mode = os.stat(path).st_mode  # noqa: PTH116  (a Path for each of a million files would cost more than the question)
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "of an unknown kind")


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


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
        gray = np.asarray(image).astype(np.int64)
        gray[gray == image.info.get("transparency", -1)] = 65535
        if gray.min() < 0 or gray.max() > 65535:
            raise ImageError(path, "32-bit gray values have no agreed range: store it with 8 or 16 bits")
        return Image.fromarray(((gray + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ImageError(path, "floating-point gray values have no agreed range: store it with 8 or 16 bits")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        if image.mode in ("RGBa", "La"):  # premultiplied alpha
            image = image.convert({"RGBa": "RGBA", "La": "LA"}[image.mode])
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


# ------------------------------------------------------------------------------------------- plain JPEGs


class Jpeg(NamedTuple):
    """A plain JPEG, upright and still encoded: `height` x `width` pixels, RGB or gray.

    height_at: where its height stands in `data`. stripe: rows that are coded together, 8 or a small multiple.
    """

    data: bytes
    path: str
    height: int
    width: int
    height_at: int
    stripe: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """As the decoded image's."""
        return self.height, self.width, 3

    def rows(self, count: int, shrink: int = 1) -> np.ndarray:
        """The first `count` rows at 1 / `shrink` (1, 2, 4, 8) of the size: uint8 [ceil(count / shrink), W', 3].

        Rows below are not decoded: the header is made to promise fewer of them, and the rest of the data is passed
        over. Wherever there is more to complain of, Pillow reads the whole image. Raises `ImageError`.
        """
        # Smoothly enlarged color looks one row of its own, coarser grid further down.
        kept = min(-(-(count + self.stripe // 4 * shrink) // self.stripe) * self.stripe, self.height)
        data, (height, width) = self.data, (-(-kept // shrink), -(-self.width // shrink))
        if kept < self.height:
            at = self.height_at
            data = b"".join((data[:at], kept.to_bytes(2, "big"), data[at + 2 :]))
        least = (0, 0) if shrink == 1 else (height, width)
        pixels = np.empty((height, width, 3), np.uint8)
        try:
            simplejpeg.decode_jpeg(data, "RGB", min_height=least[0], min_width=least[1], buffer=pixels)
        except ValueError as error:  # of several complaints it tells an error, or else the first
            if kept == self.height or _MORE_DATA not in str(error):
                pixels = _decode_with_pillow(self.data, self.path, shrink, self.height * self.width)
        return pixels[: -(-count // shrink)]


_MORE_DATA = "extraneous bytes before marker"  # libjpeg's words for rows that the header does not promise


def plain_jpeg(data: bytes, *, path: str = "<bytes>", max_pixels: int = MAX_PIXELS) -> Jpeg | None:
    """The image, if it is a JPEG without anything odd about it; None where Pillow is to read or to refuse it.

    Odd is: CMYK, more than 8 bits, lossless or arithmetic coding, rare grids of color, to be turned (by EXIF or XMP),
    too large, without an end, or a header that is damaged.
    """
    if not data.startswith(b"\xff\xd8\xff") or b"\xff\xd9" not in data[-_TRAILER:]:
        return None
    at, frame, height, width, stripe = 2, 0, 0, 0, 0
    while data[at : at + 1] == b"\xff" and at + 4 <= len(data):
        kind, end = data[at + 1], at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if kind in _PLAIN_FRAMES and not frame:
            if len(data) < end or end < at + 10:
                return None
            bits, height, width, components = struct.unpack_from(">BHHB", data, at + 4)
            sampling = data[at + 11 : end : 3]  # a byte a component: 16 * horizontal + vertical
            if bits != 8 or components not in (1, 3) or len(sampling) != components:
                return None
            frame, stripe = at, 8 * max(factors & 15 for factors in sampling)
        elif kind == _SCAN:
            break
        elif kind not in _OTHER_SEGMENTS or (kind == _APP1 and not _says_upright(data[at + 4 : end])):
            return None
        at = end
    else:
        return None
    if not frame or not 0 < height * width <= max_pixels:
        return None
    try:
        if simplejpeg.decode_jpeg_header(data, strict=False)[:2] != (height, width):
            return None
    except (ValueError, KeyError):  # the second where it has no name for the grid of colors, as 4:4:1
        return None
    return Jpeg(data, path, height, width, frame + 5, stripe)


_PLAIN_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive
_SCAN = 0xDA  # where the pixels begin
_APP1 = 0xE1  # EXIF or XMP
_OTHER_SEGMENTS = (0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE)  # tables, restart interval, applications', comment
_TRAILER = 32  # bytes, among which a whole file has its end


def _says_upright(segment: bytes) -> bool:
    """Whether an APP1 segment leaves the image as it is stored; False where that takes a closer look."""
    if not segment.startswith(b"Exif\0\0"):
        return b"Orientation" not in segment
    exif = Image.Exif()
    try:
        exif.load(segment)
        return exif.get(0x0112, 1) == 1
    except (SyntaxError, ValueError, TypeError, KeyError, struct.error):
        return False


# ------------------------------------------------------------------------------------------- in a file


class Entry(NamedTuple):
    """The bytes of one image: a whole file, or a member of a tar at `offset` with `size` bytes.

    `border` pixels are cut off at every side of the image.
    """

    file: str
    member: str = ""
    offset: int = 0
    size: int = -1
    border: int = 0

    @property
    def path(self) -> str:
        return f"{self.file}/{self.member}" if self.member else self.file

    def data(self) -> bytes:
        """The image as it is encoded. Raises `ImageError`."""
        return read_bytes(self.file, self.offset, self.size)

    def read(self) -> np.ndarray:
        image = decode_image(self.data(), path=self.path)
        if not self.border:
            return image
        if min(image.shape[:2]) <= 2 * self.border:
            raise ImageError(self.path, f"{image.shape[1]} x {image.shape[0]} pixels are nothing but border")
        return image[self.border : -self.border, self.border : -self.border]

    def open(self) -> np.ndarray | Jpeg:
        """As `read`, but a plain JPEG stays encoded, so that no more of it need be decoded than is looked at."""
        if self.border or type(self).read is not Entry.read:
            return self.read()
        data = self.data()
        image = plain_jpeg(data, path=self.path)
        return decode_image(data, path=self.path) if image is None else image
