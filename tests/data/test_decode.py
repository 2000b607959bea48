"""Unusual images are decoded correctly, or the error names image and reason."""

import contextlib
import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import encode
from PIL import Image

from vitlab.data import decode
from vitlab.data.decode import Entry, ImageError, Jpeg, decode_image, plain_jpeg

rng = np.random.default_rng(0)
# Smooth, so that JPEG keeps it: red grows to the right, green downwards, blue is constant.
RED, GREEN = np.meshgrid(np.linspace(0, 255, 32), np.linspace(0, 255, 24))
GRADIENT = np.stack([RED, GREEN, np.full_like(RED, 128)], axis=2).astype(np.uint8)


def exif(orientation: int) -> Image.Exif:
    block = Image.Exif()
    block[0x0112] = orientation
    return block


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "JPEG", "WEBP", "CMYK"])
def test_formats(kind: str) -> None:
    """An invalid EXIF block is ignored."""
    np.testing.assert_array_equal(decode_image(encode(GRADIENT, "PNG", exif=b"Exif\0\0nonsense")), GRADIENT)
    image = Image.fromarray(GRADIENT)
    data = encode(image.convert("CMYK"), "JPEG", quality=95) if kind == "CMYK" else encode(image, kind, quality=95)
    difference = np.abs(decode_image(data).astype(int) - GRADIENT)
    assert difference.mean() < 4 if kind in ("JPEG", "WEBP", "CMYK") else difference.max() == 0


def test_heic_is_read_where_its_plugin_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the error says how."""
    pytest.importorskip("pillow_heif").register_heif_opener()
    difference = np.abs(decode_image(encode(GRADIENT, "HEIF", quality=95)).astype(int) - GRADIENT)
    assert difference.mean() < 4
    assert {".heic", ".avif"} <= decode.IMAGE_SUFFIXES
    monkeypatch.setattr(decode, "IMAGE_FORMATS", {"JPEG": (".jpg",)})
    monkeypatch.setattr(decode, "UNREADABLE_SUFFIXES", frozenset({".heic"}))
    with pytest.raises(ImageError, match=r"install 'vitlab\[heif\]"):
        decode_image(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")


def test_transparency_is_laid_over_white() -> None:
    image = decode_image(encode(np.full((5, 5, 4), (100, 0, 200, 128), np.uint8), "PNG"))
    np.testing.assert_allclose(image[0, 0], 255 + (np.array([100, 0, 200]) - 255) * 128 / 255, atol=1)
    gray = np.stack([np.full((4, 4), 60), np.array([[0, 255] * 2] * 4)], axis=2).astype(np.uint8)
    image = decode_image(encode(Image.fromarray(gray, "LA"), "PNG"))
    assert image[:, :, 0].tolist() == [[255, 60, 255, 60]] * 4
    palette = Image.fromarray(np.array([[0, 0, 0, 1, 1, 1]] * 4, np.uint8)).convert("P")
    palette.putpalette([200, 10, 20, 30, 40, 250])
    image = decode_image(encode(palette, "PNG", transparency=1))
    assert image[0].tolist() == [[200, 10, 20]] * 3 + [[255] * 3] * 3
    image = decode_image(encode(GRADIENT, "PNG", transparency=tuple(int(v) for v in GRADIENT[0, 0])))
    assert (image[0, 0] == 255).all()
    np.testing.assert_array_equal(image[1:], GRADIENT[1:])


@pytest.mark.parametrize("bits", [1, 8, 16])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_gray_is_scaled_to_eight_bits(kind: str, bits: int) -> None:
    gray = np.rint(np.linspace(0, 1, 24 * 32) * (2**bits - 1)).reshape(24, 32)
    image = decode_image(encode(gray.astype({1: bool, 8: np.uint8, 16: np.uint16}[bits]), kind))
    expected = np.rint(gray * (255 / (2**bits - 1))).astype(np.uint8)
    np.testing.assert_array_equal(image, np.repeat(expected[..., None], 3, axis=2))


def gray_tiff(values: np.ndarray, bits: int, photometric: int) -> bytes:
    """A TIFF of a strip of 12 or 16 bits. photometric: 0 if white is zero, 1 if black is."""
    first, second = values.reshape(-1, 2).T
    packed = np.stack([first >> 4, first % 16 << 4 | second >> 8, second], axis=1).astype(np.uint8)
    data = packed.tobytes() if bits == 12 else values.astype("<u2").tobytes()
    height, width = values.shape
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: height, 279: len(data)}
    entries = [struct.pack("<HHII", tag, 4 if tag in (273, 279) else 3, 1, value) for tag, value in tags.items()]
    header = struct.pack("<2sHI", b"II", 42, 8 + len(data))
    return header + data + struct.pack("<H", len(tags)) + b"".join(entries) + bytes(4)


@pytest.mark.parametrize(("bits", "photometric"), [(12, 1), (16, 1), (16, 0)])
def test_gray_of_other_ranges(bits: int, photometric: int) -> None:
    top = 2**bits - 1
    gray = np.rint(np.linspace(0, 1, 24 * 32) * top).astype(np.int64).reshape(24, 32)
    image = decode_image(gray_tiff(gray if photometric else top - gray, bits, photometric))
    np.testing.assert_array_equal(image[..., 0], np.rint(gray * (255 / top)))


STORED: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda p: p,
    2: lambda p: p[:, ::-1],
    3: lambda p: p[::-1, ::-1],
    4: lambda p: p[::-1],
    5: lambda p: p.swapaxes(0, 1),
    6: lambda p: np.rot90(p),
    7: lambda p: np.rot90(p, 2).swapaxes(0, 1),
    8: lambda p: np.rot90(p, -1),
}


@pytest.mark.parametrize("orientation", STORED)
def test_exif_orientation(orientation: int) -> None:
    stored = np.ascontiguousarray(STORED[orientation](GRADIENT))
    for kind in ("JPEG", "PNG"):
        image = decode_image(encode(stored, kind, exif=exif(orientation), quality=95))
        assert image.shape == GRADIENT.shape
        assert np.abs(image.astype(int) - GRADIENT).mean() < 3


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_taken(kind: str) -> None:
    frames = [Image.new("RGB", (8, 6), color) for color in ("red", "lime")]
    image = decode_image(encode(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True))
    assert (image.shape, image.reshape(-1, 3).tolist()) == ((6, 8, 3), [[255, 0, 0]] * 48)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "zero bytes"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),  # Pillow would run Ghostscript
        (encode(GRADIENT, "JPEG")[:-200], "truncated"),
        (encode(rng.integers(0, 256, (64, 64, 3)).astype(np.uint8), "PNG")[:6000], "truncated"),
        (encode(np.full((4, 4), 0.5, np.float32), "TIFF"), "no agreed range"),
        (encode(np.full((4, 4), 100_000, np.int32), "TIFF"), "no agreed range"),
        (None, "No such file"),
    ],
    ids=["empty", "eps", "truncated-jpeg", "truncated-png", "float", "int32", "missing"],
)
def test_unreadable_is_reported_with_path_and_reason(tmp_path: Path, data: bytes | None, reason: str) -> None:
    path = tmp_path / "kätzchen 1.jpg"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ImageError, match=str(path)) as caught:
        decode_image(path)
    assert caught.value.path == str(path)
    assert reason in caught.value.reason


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_000, 50_000])
def test_decompression_bomb_is_refused_unread(side: int) -> None:
    """Headers that promise 10^8 and 2.5 * 10^9 pixels: the one exceeds our bound, the other Pillow's too."""
    data = encode(GRADIENT, "PNG")
    header = side.to_bytes(4, "big") * 2 + data[24:29]
    with pytest.raises(ImageError, match="89,478,485"):
        decode_image(data[:16] + header + zlib.crc32(b"IHDR" + header).to_bytes(4, "big") + data[33:])


SOFT = np.asarray(Image.fromarray(rng.integers(0, 256, (9, 12, 3)).astype(np.uint8)).resize((150, 101)))
PLAIN = {
    "4:4:4": encode(SOFT, "JPEG", quality=90, subsampling=0),
    "4:2:0": encode(SOFT, "JPEG", quality=90, subsampling=2),
    "4:2:2": encode(SOFT, "JPEG", quality=90, subsampling=1),
    "4:4:0": simplejpeg.encode_jpeg(SOFT, 90, colorsubsampling="440"),
    "4:1:1": simplejpeg.encode_jpeg(SOFT, 90, colorsubsampling="411"),
    "progressive": encode(SOFT, "JPEG", progressive=True),
    "restarts": encode(SOFT, "JPEG", restart_marker_rows=1),
    "gray": encode(Image.fromarray(SOFT).convert("L"), "JPEG"),
    "stored as RGB": encode(SOFT, "JPEG", keep_rgb=True),
    "upright": encode(SOFT, "JPEG", exif=exif(1)),
}
SIZE = b"\x00\x65\x00\x96"  # 101 x 150 in the header
ODD = {
    "turned by EXIF": encode(SOFT, "JPEG", exif=exif(6)),
    "turned by XMP": encode(SOFT, "JPEG", xmp=b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'),
    "CMYK": encode(Image.fromarray(SOFT).convert("CMYK"), "JPEG"),
    "truncated": PLAIN["4:2:0"][:-40],
    "no height": PLAIN["4:2:0"].replace(SIZE, b"\x00\x00\x00\x96"),
    "too large": PLAIN["4:2:0"].replace(SIZE, b"\xff\xff\xff\xff"),
    "a broken header": PLAIN["4:2:0"].replace(b"\xff\xdb", b"\xff\xdb\x7f", 1),
    "4:4:1": PLAIN["4:2:0"].replace(b"\x03\x01\x22\x00", b"\x03\x01\x14\x00"),
    "PNG": encode(SOFT, "PNG"),
    "nothing": b"",
}


@pytest.mark.parametrize("kind", PLAIN)
def test_rows_of_a_plain_jpeg_are_pillows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, any number of them, at any scale; and it is not Pillow that makes them."""
    data = PLAIN[kind]
    image = plain_jpeg(data)
    assert image is not None
    assert image.shape == SOFT.shape
    for shrink in (1, 2, 4, 8):
        with Image.open(io.BytesIO(data)) as opened:
            opened.draft(None, (150 // shrink, 101 // shrink))
            whole = np.asarray(opened.convert("RGB"))
        assert whole.shape[:2] == (-(-101 // shrink), -(-150 // shrink))
        with monkeypatch.context() as patch:
            patch.setattr(decode, "_decode_with_pillow", None)
            for count in range(shrink, 102, 3 * shrink):
                np.testing.assert_array_equal(image.rows(count, shrink), whole[: count // shrink])
            np.testing.assert_array_equal(image.rows(101, shrink), whole)
            assert shrink > 1 or np.array_equal(decode_image(data), whole)


@pytest.mark.parametrize("kind", ODD)
def test_odd_jpegs_are_left_to_pillow(kind: str) -> None:
    assert plain_jpeg(ODD[kind]) is None
    if kind.startswith("turned"):
        assert decode_image(ODD[kind]).shape == (150, 101, 3)


FILES = [*PLAIN.values(), *(encode(GRADIENT, kind) for kind in ("PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM"))]


@pytest.mark.filterwarnings("ignore")  # Pillow's, about the corruption
@settings(max_examples=60)
@given(st.sampled_from(FILES), st.data())
def test_corrupt_bytes_give_pillows_image_or_an_image_error(valid: bytes, data: st.DataObject) -> None:
    corrupt = bytearray(valid)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(corrupt))] * 2)))
    if data.draw(st.booleans()):
        del corrupt[start:stop]
    for _ in range(data.draw(st.integers(0, 3)) if corrupt else 0):
        corrupt[data.draw(st.integers(0, len(corrupt) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ImageError):
        image = decode_image(bytes(corrupt))
        assert image.ndim == 3
        assert image.dtype == np.uint8
    with contextlib.suppress(ImageError):
        expected = decode._decode_with_pillow(bytes(corrupt), "<bytes>")
        np.testing.assert_array_equal(decode_image(bytes(corrupt)), expected)


def test_an_entry_opens_plain_jpegs_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(PLAIN["4:2:0"])
    assert isinstance(Entry(str(path)).open(), Jpeg)
    np.testing.assert_array_equal(Entry(str(path), edge=3).open(), decode_image(path)[3:-3, 3:-3])
    path.write_bytes(ODD["turned by EXIF"])
    np.testing.assert_array_equal(Entry(str(path)).open(), decode_image(path))
    path.write_bytes(ODD["truncated"])
    with pytest.raises(ImageError, match="truncated"):
        Entry(str(path)).open()


def test_photographs_decode_as_googles(shared: Path) -> None:
    with np.load(shared / "golden" / "preprocess.npz") as golden:
        for name in ("china_jpg", "synth_png", "cifar_like_png"):
            image = decode_image(golden[f"{name}/bytes"].tobytes())
            np.testing.assert_array_equal(image, golden[f"{name}/decode(precise)"])
