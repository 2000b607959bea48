"""Arrays of gray images in the formats in which dSprites and SmallNORB are published."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from vitlab.data.vtab import gray as gray
from vitlab.data.vtab.gray import GrayEntries

rng = np.random.default_rng(0)


def norb(array: np.ndarray) -> bytes:
    """The format of NORB's page: little-endian; three sizes are written at least."""
    magic = {"uint8": 0x1E3D4C55, "int32": 0x1E3D4C54}[str(array.dtype)]
    sizes = [*array.shape, 1, 1][: max(3, array.ndim)]
    return struct.pack(f"<{2 + len(sizes)}i", magic, array.ndim, *sizes) + array.tobytes()


@pytest.mark.parametrize("suffix", [".mat", ".mat.gz"])
@pytest.mark.parametrize("shape", [(7,), (7, 4), (7, 3, 2), (7, 2, 3, 3)])
@pytest.mark.parametrize("dtype", ["u1", "i4"])
def test_matrices_of_norb(tmp_path: Path, suffix: str, shape: tuple[int, ...], dtype: str) -> None:
    array = rng.integers(0, 200, shape).astype(dtype)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(norb(array)) if suffix == ".mat.gz" else norb(array))
    found = gray.norb_matrix(path, chunk=3)
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)
    if len(shape) > 1:
        np.testing.assert_array_equal(gray.norb_matrix(path, first=True, chunk=3), array[:, 0])


GOOD = norb(np.arange(12, dtype=np.int32).reshape(3, 4))


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.mat", GOOD[:-1], "damaged or no matrix"),
        ("a.mat", GOOD + b"\0", "more in it than it says"),
        ("a.mat", GOOD[:5], "damaged or no matrix"),
        ("a.mat", b"\x1e\x3d\x4c\x54" + GOOD[4:], "it starts with"),  # the other byte order
        ("a.mat", GOOD[:8] + struct.pack("<i", -3) + GOOD[12:], r"its axes are \[-3, 4\]"),
        ("a.mat", b"", "damaged or no matrix"),
        ("a.mat.gz", gzip.compress(GOOD)[:-9], "damaged or no matrix"),
        ("a.mat.gz", GOOD, "damaged or no matrix"),
    ],
    # gzip writes the time into its bytes, and two workers of one run must name a test alike
    ids=[
        "cut short",
        "too long",
        "no header",
        "byte order",
        "negative axis",
        "empty",
        "packed, cut short",
        "not packed",
    ],
)
def test_damaged_matrices_are_refused(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{reason}.*fetch it again"):
        gray.norb_matrix(tmp_path / name)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_images_are_packed_as_they_are(tmp_path: Path, chunk: int) -> None:
    images = rng.integers(0, 2, (9, 64, 64)).astype(np.uint8)
    np.savez_compressed(tmp_path / "a.npz", imgs=images)
    bits = gray.packed_images(tmp_path / "a.npz", chunk=chunk)
    assert bits.shape == (9, 64, 8)
    np.testing.assert_array_equal(np.unpackbits(bits, axis=2), images)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.full((2, 64, 64), 255, np.uint8), "a pixel is 255, not 0 or 1"),
        (np.zeros((2, 64, 64), np.int64), "its images are int64"),
        (np.zeros((2, 32, 32), np.uint8), r"its images are uint8 \(2, 32, 32\)"),
    ],
)
def test_other_images_are_refused(tmp_path: Path, array: np.ndarray, reason: str) -> None:
    np.savez(tmp_path / "a.npz", imgs=array)
    with pytest.raises(ValueError, match=reason):
        gray.packed_images(tmp_path / "a.npz")


@pytest.mark.parametrize("bits", [False, True])
def test_gray_images_become_rgb_when_they_are_read(bits: bool) -> None:
    pixels = rng.integers(0, 2, (5, 4, 16)).astype(np.uint8) * 255
    rows = np.packbits(pixels, axis=2) if bits else pixels.copy()
    entries = GrayEntries("a.npz", rows, bits)
    taken = entries[1:4]
    assert (len(entries), [entry.path for entry in taken]) == (5, ["a.npz/[1]", "a.npz/[2]", "a.npz/[3]"])
    rows[:] = 0  # each one taken is a copy
    for entry, wanted in zip(taken, pixels[1:4], strict=True):
        np.testing.assert_array_equal(entry.read(), np.repeat(wanted[..., None], 3, axis=2))
