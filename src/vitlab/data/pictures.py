"""How a picture is read, from whatever file it is in.

A picture is uint8 [H, W, 3], RGB, upright, whatever the file was. A file that cannot be read is a
`PictureError` with its path and the reason; nothing is dropped in silence.
"""

import io
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

MAX_PIXELS = 89_478_485  # 256 MiB of RGB: larger pictures are refused as bombs (Pillow's own bound)
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


# ------------------------------------------------------------------------------------------- in a file


class Entry(NamedTuple):
    """The bytes of one picture: a whole file, or a member of a tar at `offset` with `size` bytes.

    `border` pixels are cut off at every side of the picture.
    """

    file: str
    member: str = ""
    offset: int = 0
    size: int = -1
    border: int = 0

    @property
    def path(self) -> str:
        return f"{self.file}/{self.member}" if self.member else self.file

    def read(self) -> np.ndarray:
        picture = decode(_read_bytes(self.file, self.offset, self.size), path=self.path)
        if not self.border:
            return picture
        if min(picture.shape[:2]) <= 2 * self.border:
            raise PictureError(self.path, f"{picture.shape[1]} x {picture.shape[0]} pixels are nothing but border")
        return picture[self.border : -self.border, self.border : -self.border]
