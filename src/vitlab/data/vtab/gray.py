"""Large arrays of gray images: read piece by piece from their published files, and made RGB one by one."""

import gzip
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast, overload

import numpy as np

from vitlab.data.decode import Entry
from vitlab.errors import UserError


class GrayEntry(Entry):
    """A gray image that is in memory already, from a file of many; it becomes RGB only when it is read.

    rows: uint8 [H, W]; or, where `bits`, a bit for each pixel [H, W / 8], 1 for white. `file` and `member` say where
    it came from.
    """

    rows: np.ndarray
    bits: bool

    @classmethod
    def of(cls, file: str, member: str, rows: np.ndarray, bits: bool) -> "GrayEntry":
        entry = cls(file, member)
        entry.rows, entry.bits = rows, bits
        return entry

    def read(self) -> np.ndarray:
        gray = np.unpackbits(self.rows, axis=1) * np.uint8(255) if self.bits else self.rows
        return np.repeat(gray[..., None], 3, axis=2)


class GrayEntries(Sequence[Entry]):
    """The N images of an array, uint8 [N, H, W] or [N, H, W / 8] as in `GrayEntry`; each one taken is a copy.

    So a small part of a large set does not keep all of it in memory.
    """

    def __init__(self, file: str, rows: np.ndarray, bits: bool = False) -> None:
        self.file, self.rows, self.bits = file, rows, bits

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return GrayEntry.of(self.file, f"[{index}]", self.rows[index].copy(), self.bits)


def packed_images(path: Path, chunk: int = 4096) -> np.ndarray:
    """dSprites' images, a bit for each pixel, uint8 [N, 64, 8]: `chunk` of them are read from the .npz at a time.

    As they are stored they would take 3 GB, so they take 0.4.
    """
    form = np.lib.format
    with zipfile.ZipFile(path) as archive, archive.open("imgs.npy") as file:
        version = form.read_magic(file)
        read_header = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
        shape, fortran, dtype = read_header(file)
        if shape[1:] != (64, 64) or fortran or dtype != np.uint8:
            raise UserError(f"its images are {dtype} {shape}")
        bits = np.empty((shape[0], 64, 8), np.uint8)
        for start in range(0, len(bits), chunk):
            part = bits[start : start + chunk]
            pixels = np.frombuffer(file.read(len(part) * 4096), np.uint8).reshape(len(part), 64, 64)
            if pixels.max() > 1:
                raise UserError(f"a pixel is {pixels.max()}, not 0 or 1")
            part[:] = np.packbits(pixels, axis=2)
    return bits


def norb_matrix(path: Path, first: bool = False, chunk: int = 1024) -> np.ndarray:
    """A .mat or .mat.gz file in NORB's own format; of each row all, or its `first` part only.

    Little-endian int32: a number that stands for the type, the number of axes, their sizes (three at least); the data.
    """
    types = {0x1E3D4C55: np.dtype("u1"), 0x1E3D4C54: np.dtype("<i4")}
    try:
        with cast(IO[bytes], gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
            magic, axes = np.frombuffer(file.read(8), "<i4").tolist()
            if magic not in types or not 1 <= axes <= 4:
                raise UserError(f"it starts with {magic:#x} and {axes}")
            sizes = np.frombuffer(file.read(4 * max(3, axes)), "<i4")[:axes].tolist()
            if min(sizes) < 1 or len(sizes) != axes:
                raise UserError(f"its axes are {sizes}")
            dtype, shape = types[magic], tuple(sizes[1:])
            row = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            parts = []
            for start in range(0, sizes[0], chunk):
                count = min(chunk, sizes[0] - start)
                rows = np.frombuffer(file.read(count * row), dtype).reshape(count, *shape)
                parts.append(rows[:, 0].copy() if first else rows)
            if file.read(1):
                raise UserError("there is more in it than it says")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{path} is damaged or no matrix of NORB ({error}): fetch it again") from error
    return np.concatenate(parts)
