"""Decodes image files: any format -> uint8 [H, W, 3], RGB, upright. Raises `ImageError`.

Pillow reads every format. Plain JPEGs, as nearly all photographs are, are decoded by libjpeg-turbo directly
(simplejpeg): the same pixels in less time, and only as many rows as a crop needs.
"""

import functools
import importlib.util
import io
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import simplejpeg
from PIL import Image, ImageOps

from vitlab.data import limits
from vitlab.errors import UserError, quoted
from vitlab.io import open_regular, read_regular

# No others: Pillow also has formats that run other programs.
_FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm"),
    "AVIF": (".avif",),
    "HEIF": (".heic", ".heif", ".hif"),
}
_DECODERS = {"AVIF": "PIL._avif", "HEIF": "pillow_heif"}
IMAGE_FORMATS = {f: s for f, s in _FORMATS.items() if f not in _DECODERS or importlib.util.find_spec(_DECODERS[f])}
"""Name -> suffixes of the formats that can be read here: AVIF and HEIF (HEIC) where their decoders are installed."""
UNREADABLE_SUFFIXES = frozenset(s for name in _FORMATS.keys() - IMAGE_FORMATS for s in _FORMATS[name])
"""Suffixes of formats whose decoder is not installed; `INSTALL` says how to."""
INSTALL = "to read HEIC, install vitlab's extra heif; for AVIF a pillow with its decoder; or convert to JPEG"
IMAGE_SUFFIXES = frozenset(suffix for suffixes in IMAGE_FORMATS.values() for suffix in suffixes)

Levels = tuple[int, int]  # the values of an image file that are black and white
_BITS, _PHOTOMETRIC, _ORIENTATION, _TILE_WIDTH, _TILE_LENGTH = 258, 262, 274, 322, 323  # TIFF tags
_EXIF_ERRORS = (SyntaxError, ValueError, TypeError, KeyError, struct.error)
# What Pillow's readers raise on corrupt data:
CORRUPT = (ArithmeticError, AssertionError, EOFError, LookupError, MemoryError, RuntimeError, OSError, zlib.error)
CORRUPT += _EXIF_ERRORS


class ImageError(UserError):
    """An image that cannot be read: `path` names it, `reason` says why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"cannot read the image {quoted(self.path)}: {self.reason}"


def decode_image(data: bytes | Path, *, path: str = "<bytes>", levels: Levels | None = None) -> np.ndarray:
    """Encoded image -> uint8 [H, W, 3] RGB. Raises `ImageError`, which names the image by `path`.

    EXIF orientation is applied, transparency is laid over white, 16-bit gray is scaled to 8 bits, gray and CMYK become
    RGB, and of an animation the first frame is taken. levels: the file's values that become black and white, which
    floating-point and 32-bit gray require; others are clipped.
    """
    if isinstance(data, Path):
        path, data = str(data), read_bytes(str(data))
    if jpeg := plain_jpeg(data, path=path):
        return _stretch(jpeg.rows(jpeg.height), levels, path)
    return _decode_with_pillow(data, path, levels=levels)


def read_bytes(path: str, offset: int = 0, size: int = -1) -> bytes:
    """`size` bytes of a regular file from `offset` on, by default all. Raises `ImageError`."""
    try:
        if size < 0:
            return read_regular(path, limits.MAX_IMAGE_BYTES)[offset:]
        with open_regular(path) as file:
            file.seek(offset)
            return file.read(size)
    except (OSError, UserError) as error:  # UserError: not a regular file
        raise ImageError(path, getattr(error, "strerror", None) or str(error)) from error


def _decode_with_pillow(data: bytes, path: str, shrink: int = 1, levels: Levels | None = None) -> np.ndarray:
    """As `decode_image`; a JPEG at 1 / `shrink` of its size."""
    if not data:
        raise ImageError(path, "the file is empty (zero bytes)")
    if refusal := limits.content_refusal(data):
        raise ImageError(path, refusal)
    _register_plugins()
    try:
        if data[:1] == b"P":  # Pillow reads the header of a PPM byte by byte, and a comment may be of any length
            Image.open(io.BytesIO(data[: limits.MAX_PPM_HEADER]), formats=("PPM",)).close()
        with Image.open(io.BytesIO(data), formats=tuple(IMAGE_FORMATS)) as image:
            tags = getattr(image, "tag_v2", {})
            tile = tags.get(_TILE_WIDTH, 1), tags.get(_TILE_LENGTH, 1)  # of a TIFF: decoded as a whole
            if refusal := limits.size_refusal(*image.size, len(data)) or limits.size_refusal(*tile, len(data)):
                raise ImageError(path, refusal)
            if shrink > 1:
                image.draft(None, (image.width // shrink, image.height // shrink))
            image.load()
            return to_array(image, path, levels)
    except ImageError:
        raise
    except Image.UnidentifiedImageError:
        hint = f"; {INSTALL}" if data[4:8] == b"ftyp" and UNREADABLE_SUFFIXES else ""
        raise ImageError(path, f"not an image of a known format ({', '.join(IMAGE_FORMATS)}){hint}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(path, f"more than the {limits.MAX_PIXELS:,} pixels allowed: {error}") from None
    except CORRUPT as error:
        raise ImageError(path, f"corrupt or truncated ({error or type(error).__name__})") from error


@functools.cache
def _register_plugins() -> None:
    """Lets Pillow read HEIC where the plugin is installed."""
    if "HEIF" in IMAGE_FORMATS:
        importlib.import_module("pillow_heif").register_heif_opener()


def to_array(image: Image.Image, path: str, levels: Levels | None = None) -> np.ndarray:
    """An opened image -> uint8 [H, W, 3], converted as by `decode_image`. Raises `ImageError`, which names `path`."""
    if not is_deep(image):
        return _stretch(np.array(_to_rgb(_upright(image))), levels, path)
    tags = getattr(image, "tag_v2", {})  # of a TIFF
    top = 4095 if tags.get(_BITS) == (12,) else 65535
    zero_is_white = tags.get(_PHOTOMETRIC) == 0
    return np.array(_gray_to_rgb(_upright(image), path, top, zero_is_white, levels))


def is_deep(image: Image.Image) -> bool:
    """Whether it is gray of more than 8 bits: F, I, I;16, I;16B."""
    return image.mode[0] in "FI"


def _stretch(pixels: np.ndarray, levels: Levels | None, path: str) -> np.ndarray:
    """uint8 pixels, with `levels` as black and white. Raises `ImageError` if these exceed 8 bits."""
    if levels is None:
        return pixels
    low, high = levels
    if high > 255:
        raise ImageError(
            path,
            f"its values end at 255 (color of 16 bits is read as 8), and data.range {low} {high} is for 16-bit gray",
        )
    return _scale(np.arange(256), low, high)[pixels]


def _scale(values: np.ndarray, low: int, high: int, inverted: bool = False) -> np.ndarray:
    """Values as uint8: `low` becomes 0 and `high` 255, or with `inverted` 255 and 0; others are clipped."""
    values = values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
    values = (high - values if inverted else values - low).clip(0, high - low)
    return ((255 * values + (high - low) // 2) // (high - low)).astype(np.uint8)


def _upright(image: Image.Image) -> Image.Image:
    """Applies the EXIF orientation; an invalid EXIF block is ignored."""
    if not image.info:  # saves a third of the time of a small PNG
        return image
    try:
        profile = image.info.get("Raw profile type exif", "")  # in hexadecimal, of a PNG by ImageMagick
        if limits.overlapping_tags(image.info.get("exif") or bytes.fromhex("".join(profile.split("\n")[3:]))):
            return image
        return image if image.getexif().get(_ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)
    except _EXIF_ERRORS:
        return image


def _gray_to_rgb(image: Image.Image, path: str, top: int, zero_is_white: bool, levels: Levels | None) -> Image.Image:
    """Gray of more than 8 bits, which Pillow would clip instead of scaling. Without `levels` values are 0 to `top`."""
    gray = np.asarray(image)
    if levels is None and (gray.dtype.kind == "f" or gray.min() < 0 or gray.max() > top):
        raise ImageError(
            path, "floating-point or 32-bit gray values have no agreed range: give data.range, or store 8 or 16 bits"
        )
    if gray.dtype.kind == "f" and not np.isfinite(gray).all():
        raise ImageError(path, "it has values that are not finite")
    low, high = levels or (0, top)
    gray = np.where(gray == image.info.get("transparency", -1), top, gray)
    return Image.fromarray(_scale(gray, low, high, zero_is_white)).convert("RGB")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


class Jpeg(NamedTuple):
    """A plain JPEG, upright and still encoded: `height` x `width` pixels, RGB or gray."""

    data: bytes
    path: str
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the decoded image."""
        return self.height, self.width, 3

    def rows(self, count: int, shrink: int = 1) -> np.ndarray:
        """The first `count` rows at 1 / `shrink` (1, 2, 4, 8) of the size: uint8 [ceil(count / shrink), W', 3].

        simplejpeg decodes whole images only. So it gets a header with fewer rows, and then reports the data of the
        other rows as extraneous. Any other error leaves the image to Pillow. Raises `ImageError`.
        """
        # Blocks are 8 or 16 rows; color of half the height is interpolated with up to two rows of the next block.
        height = min(-(-(count + 4 * shrink) // 16) * 16, self.height)
        is_cut = height < self.height
        pixels = np.empty((-(-height // shrink), -(-self.width // shrink), 3), np.uint8)
        min_height, min_width = (0, 0) if shrink == 1 else pixels.shape[:2]  # choose the size that is decoded
        data = self.data
        if is_cut:  # 8 bits, height, width. If what is replaced is not the header, the rows do not fit their buffer
            old, new = (struct.pack(">BHH", 8, h, self.width) for h in (self.height, height))
            data = data.replace(old, new, 1)
        try:
            simplejpeg.decode_jpeg(data, "RGB", min_height=min_height, min_width=min_width, buffer=pixels)
        except ValueError as error:
            if not (is_cut and "extraneous bytes before marker" in str(error)):
                del pixels  # Pillow needs the memory
                pixels = _decode_with_pillow(self.data, self.path, shrink)
        return pixels[: -(-count // shrink)]


def plain_jpeg(data: bytes, *, path: str = "<bytes>") -> Jpeg | None:
    """The image if it is a plain JPEG; None for what Pillow has to read (CMYK, EXIF orientation) or to refuse."""
    if not data.startswith(b"\xff\xd8\xff") or b"\xff\xd9" not in data[-32:] or limits.content_refusal(data):
        return None
    try:
        *size, color, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):  # KeyError for rare color sampling such as 4:4:1
        return None
    height, width = map(int, size)
    plain = color in ("YCbCr", "RGB", "Gray") and height * width and not limits.size_refusal(width, height, len(data))
    return Jpeg(data, path, height, width) if plain and _is_upright(data) else None


def _is_upright(jpeg: bytes) -> bool:
    """Whether Pillow would not turn it: neither EXIF nor XMP has an orientation."""
    if b"Orientation" in jpeg:  # XMP
        return False
    if (start := jpeg.find(b"Exif\0\0")) < 0:
        return True
    try:
        exif = Image.Exif()
        exif.load(jpeg[start : start + 2**16])
        return exif.get(_ORIENTATION, 1) == 1
    except _EXIF_ERRORS:
        return False


class Entry(NamedTuple):
    """The bytes of one image: a whole file, or a member of a tar; or only the name of an image in memory."""

    file: str
    member: str = ""
    offset: int = 0
    size: int = -1
    """Bytes from `offset` on; -1 for a whole file, 0 for an image in memory."""
    edge: int = 0
    """Pixels that are cut off at every side of the decoded image."""

    @property
    def path(self) -> str:
        """The name of the image in messages."""
        return f"{self.file}/{self.member}" if self.member else self.file

    @property
    def is_whole_file(self) -> bool:
        return self.size < 0 and not self.member

    @property
    def is_in_memory(self) -> bool:
        return self.size == 0

    def data(self) -> bytes:
        """The encoded image. Raises `ImageError`."""
        return read_bytes(self.file, self.offset, self.size)

    def read(self, levels: Levels | None = None) -> np.ndarray:
        """The decoded image, uint8 [H, W, 3]. Raises `ImageError`."""
        image = decode_image(self.data(), path=self.path, levels=levels)
        if not self.edge:
            return image
        if min(image.shape[:2]) <= 2 * self.edge:
            raise ImageError(self.path, f"{image.shape[1]} x {image.shape[0]} pixels are nothing but edge")
        return image[self.edge : -self.edge, self.edge : -self.edge]

    def open(self, levels: Levels | None = None) -> np.ndarray | Jpeg:
        """As `read`, but a plain JPEG stays encoded, for a crop to decode its rows."""
        prepares_images = type(self).read is not Entry.read
        if self.edge or levels is not None or prepares_images:
            return self.read(levels)
        data = self.data()
        return plain_jpeg(data, path=self.path) or decode_image(data, path=self.path)
