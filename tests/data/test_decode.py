"""Every odd image is read right or reported."""

import contextlib
import io
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitlab.data import decode as images
from vitlab.data.decode import Entry, ImageError, Jpeg, decode_image, plain_jpeg

rng = np.random.default_rng(0)
# Smooth, so that JPEG keeps it: red grows to the right, green downwards, blue is constant.
GRADIENT = np.stack(
    [
        np.tile(np.linspace(0, 255, 32), (24, 1)),
        np.tile(np.linspace(0, 255, 24), (32, 1)).T,
        np.full((24, 32), 128),
    ],
    axis=2,
).astype(np.uint8)


def encode(image: Image.Image | np.ndarray, kind: str, **options: object) -> bytes:
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)  # pyright: ignore[reportArgumentType]
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_rgb_is_exact(kind: str) -> None:
    np.testing.assert_array_equal(decode_image(encode(GRADIENT, kind)), GRADIENT)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_lossy_rgb_is_close(kind: str) -> None:
    assert np.abs(decode_image(encode(GRADIENT, kind, quality=95)).astype(int) - GRADIENT).mean() < 3


def test_cmyk_jpeg() -> None:
    image = decode_image(encode(Image.fromarray(GRADIENT).convert("CMYK"), "JPEG", quality=95))
    assert np.abs(image.astype(int) - GRADIENT).mean() < 4  # inverted or missing K would be off by dozens


def test_palette_with_transparency_lies_on_white() -> None:
    indices = np.zeros((4, 6), np.uint8)
    indices[:, 3:] = 1
    palette = Image.fromarray(indices).convert("P")
    palette.putpalette([200, 10, 20, 30, 40, 250])
    image = decode_image(encode(palette, "PNG", transparency=1))
    assert (image[:, :3] == (200, 10, 20)).all()
    assert (image[:, 3:] == 255).all()


def test_half_transparent_rgba_blends_with_white() -> None:
    rgba = np.full((5, 5, 4), (100, 0, 200, 128), np.uint8)
    image = decode_image(encode(rgba, "PNG"))
    np.testing.assert_allclose(image[0, 0], 255 + (np.array([100, 0, 200]) - 255) * 128 / 255, atol=1)


def test_gray_and_alpha() -> None:
    la = np.stack([np.full((4, 4), 60), np.array([[0, 255] * 2] * 4)], axis=2).astype(np.uint8)
    image = decode_image(encode(Image.fromarray(la, "LA"), "PNG"))
    assert (image[:, ::2] == 255).all()
    assert (image[:, 1::2] == 60).all()


def test_rgb_with_a_transparent_color() -> None:
    image = decode_image(encode(GRADIENT, "PNG", transparency=tuple(int(v) for v in GRADIENT[0, 0])))
    assert (image[0, 0] == 255).all()
    np.testing.assert_array_equal(image[1:], GRADIENT[1:])


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bit_gray_is_scaled(kind: str) -> None:
    gray = np.linspace(0, 65535, 24 * 32).reshape(24, 32).astype(np.uint16)
    image = decode_image(encode(Image.fromarray(gray), kind))
    np.testing.assert_array_equal(image, np.repeat(np.rint(gray / 257).astype(np.uint8)[..., None], 3, axis=2))


def test_one_bit_and_eight_bit_gray() -> None:
    bits = rng.integers(0, 2, (9, 7)).astype(bool)
    np.testing.assert_array_equal(
        decode_image(encode(Image.fromarray(bits), "PNG")), np.repeat(bits[..., None] * 255, 3, 2)
    )
    gray = rng.integers(0, 256, (9, 7)).astype(np.uint8)
    np.testing.assert_array_equal(decode_image(encode(gray, "PNG")), np.repeat(gray[..., None], 3, 2))


@pytest.mark.parametrize(
    ("orientation", "stored"),
    [
        (1, lambda p: p),
        (2, lambda p: p[:, ::-1]),
        (3, lambda p: p[::-1, ::-1]),
        (4, lambda p: p[::-1]),
        (5, lambda p: p.swapaxes(0, 1)),
        (6, lambda p: np.rot90(p)),
        (7, lambda p: np.rot90(p, 2).swapaxes(0, 1)),
        (8, lambda p: np.rot90(p, -1)),
    ],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation(kind: str, orientation: int, stored: Callable[[np.ndarray], np.ndarray]) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95} if kind in ("JPEG", "WEBP") else {}
    data = encode(np.ascontiguousarray(stored(GRADIENT)), kind, exif=exif, **options)
    image = decode_image(data)
    assert image.shape == GRADIENT.shape
    assert np.abs(image.astype(int) - GRADIENT).mean() < 3


def test_broken_exif_is_as_good_as_none() -> None:
    data = encode(GRADIENT, "PNG", exif=b"Exif\0\0nonsense")
    np.testing.assert_array_equal(decode_image(data), GRADIENT)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animation_gives_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (8, 6), color) for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    image = decode_image(data)
    assert image.shape == (6, 8, 3)
    assert (image == (255, 0, 0)).all()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "zero bytes"),
        (b"This is a text file, whatever its name says.\n", "not a image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a image"),  # Pillow would run Ghostscript
        (encode(GRADIENT, "JPEG")[:-200], "cut off"),
        (encode(rng.integers(0, 256, (64, 64, 3)).astype(np.uint8), "PNG")[:6000], "cut off"),
        (encode(Image.fromarray(np.full((4, 4), 0.5, np.float32)), "TIFF"), "no agreed range"),
        (encode(Image.fromarray(np.full((4, 4), 100_000, np.int32)), "TIFF"), "no agreed range"),
    ],
    ids=["empty", "text", "eps", "truncated-jpeg", "truncated-png", "float", "int32"],
)
def test_unreadable_is_reported_with_path_and_reason(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "kätzchen 1.jpg"
    path.write_bytes(data)
    with pytest.raises(ImageError) as caught:
        decode_image(path)
    assert caught.value.path == str(path)
    assert reason in caught.value.reason
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


def test_missing_file_is_a_image_error(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="No such file"):
        decode_image(tmp_path / "gone.png")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_000, 50_000])
def test_decompression_bomb_is_refused_unread(side: int) -> None:
    """Headers that promise 10^8 and 2.5 * 10^9 pixels: the one past our bound, the other past Pillow's too."""
    header = side.to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
    chunk = len(header).to_bytes(4, "big") + b"IHDR" + header + zlib.crc32(b"IHDR" + header).to_bytes(4, "big")
    data = b"\x89PNG\r\n\x1a\n" + chunk + encode(GRADIENT, "PNG")[33:]
    with pytest.raises(ImageError, match="decompression bomb"):
        decode_image(data)


def test_the_bound_on_pixels_is_a_setting() -> None:
    data = encode(GRADIENT, "PNG")
    assert decode_image(data, max_pixels=GRADIENT.shape[0] * GRADIENT.shape[1]).shape == GRADIENT.shape
    with pytest.raises(ImageError, match="32 x 24 pixels, more than the 767 allowed"):
        decode_image(data, max_pixels=767)


_VALID = [encode(GRADIENT, kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")]


@pytest.mark.filterwarnings("ignore")  # Pillow's own about the damage
@settings(max_examples=300)
@given(st.sampled_from(_VALID), st.data())
def test_damaged_bytes_give_a_image_or_a_image_error(valid: bytes, data: st.DataObject) -> None:
    damaged = bytearray(valid[: data.draw(st.integers(0, len(valid)))])
    for _ in range(data.draw(st.integers(0, 4)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ImageError):
        image = decode_image(bytes(damaged))
        assert image.ndim == 3
        assert image.shape[2] == 3
        assert image.dtype == np.uint8


# ------------------------------------------------------------------------------------------- plain JPEGs


SOFT = np.asarray(Image.fromarray(rng.integers(0, 256, (9, 12, 3)).astype(np.uint8)).resize((150, 101)))
UPRIGHT = Image.Exif()
UPRIGHT[0x0112] = 1
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
    "upright": encode(SOFT, "JPEG", exif=UPRIGHT),
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
            patch.setattr(images, "_decode_with_pillow", None)
            for count in range(shrink, 102, shrink):
                np.testing.assert_array_equal(image.rows(count, shrink), whole[: count // shrink])
            np.testing.assert_array_equal(image.rows(101, shrink), whole)
            assert shrink > 1 or np.array_equal(decode_image(data), whole)


def turned(name: str, text: str = "") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(SOFT, "JPEG", **{name: text.encode() if text else exif})


ODD = {
    "turned by EXIF": turned("exif"),
    "turned by XMP": turned("xmp", '<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'),
    "CMYK": encode(Image.fromarray(SOFT).convert("CMYK"), "JPEG"),
    "cut off": PLAIN["4:2:0"][:-40],
    "no height": PLAIN["4:2:0"].replace(b"\x00\x65\x00\x96", b"\x00\x00\x00\x96"),
    "too large": PLAIN["4:2:0"].replace(b"\x00\x65\x00\x96", b"\xff\xff\xff\xff"),
    "a broken header": PLAIN["4:2:0"].replace(b"\xff\xdb", b"\xff\xdb\x7f", 1),
    "a header that is cut off": b"\xff\xd8\xff\xc0\x00\x11\x08\xff\xd9",
    "4:4:1": PLAIN["4:2:0"].replace(b"\x03\x01\x22\x00", b"\x03\x01\x14\x00"),
    "PNG": encode(SOFT, "PNG"),
    "nothing": b"",
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_jpegs_are_left_to_pillow(kind: str) -> None:
    assert plain_jpeg(ODD[kind]) is None


def test_turned_jpegs_are_turned() -> None:
    assert decode_image(ODD["turned by EXIF"]).shape == decode_image(ODD["turned by XMP"]).shape == (150, 101, 3)


@settings(max_examples=200)
@given(st.sampled_from(list(PLAIN.values())), st.data())
def test_damaged_jpegs_get_pillows_answer(valid: bytes, data: st.DataObject) -> None:
    """The same image or refusal, and of its rows no image where Pillow refuses."""
    damaged = bytearray(valid)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(damaged))] * 2)))
    if data.draw(st.booleans()):
        del damaged[start:stop]
    for _ in range(data.draw(st.integers(0, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    sent, expected = bytes(damaged), None
    with contextlib.suppress(ImageError):
        expected = images._decode_with_pillow(sent, "<bytes>")
    image = plain_jpeg(sent)
    if expected is not None:
        np.testing.assert_array_equal(decode_image(sent), expected)
    else:
        with pytest.raises(ImageError):
            decode_image(sent)
        if image is not None:
            with pytest.raises(ImageError):
                image.rows(image.height // 2 + 1)


def test_an_entry_opens_plain_jpegs_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(PLAIN["4:2:0"])
    opened = Entry(str(path)).open()
    assert isinstance(opened, Jpeg)
    assert opened.path == str(path)
    bordered = Entry(str(path), border=3).open()
    np.testing.assert_array_equal(bordered, decode_image(path)[3:-3, 3:-3])
    path.write_bytes(ODD["turned by EXIF"])
    np.testing.assert_array_equal(Entry(str(path)).open(), decode_image(path))
    path.write_bytes(ODD["cut off"])
    with pytest.raises(ImageError, match="cut off"):
        Entry(str(path)).open()


def test_real_photograph_decodes_as_googles(shared: Path) -> None:
    with np.load(shared / "golden" / "preprocess.npz") as golden:
        for name in ("china_jpg", "synth_png", "cifar_like_png"):
            np.testing.assert_array_equal(
                decode_image(golden[f"{name}/bytes"].tobytes()), golden[f"{name}/decode(precise)"]
            )
