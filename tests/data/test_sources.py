"""Every odd picture is read right or reported; folders and shards are read whole, or the message says what is wrong."""

import contextlib
import io
import json
import logging
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitlab.data import sources
from vitlab.data.datasets import load_dataset
from vitlab.data.sources import PictureError, decode

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


# ------------------------------------------------------------------------------------------- odd pictures


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_rgb_is_exact(kind: str) -> None:
    np.testing.assert_array_equal(decode(encode(GRADIENT, kind)), GRADIENT)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_lossy_rgb_is_close(kind: str) -> None:
    assert np.abs(decode(encode(GRADIENT, kind, quality=95)).astype(int) - GRADIENT).mean() < 3


def test_cmyk_jpeg() -> None:
    picture = decode(encode(Image.fromarray(GRADIENT).convert("CMYK"), "JPEG", quality=95))
    assert np.abs(picture.astype(int) - GRADIENT).mean() < 4  # inverted or missing K would be off by dozens


def test_palette_with_transparency_lies_on_white() -> None:
    indices = np.zeros((4, 6), np.uint8)
    indices[:, 3:] = 1
    image = Image.fromarray(indices).convert("P")
    image.putpalette([200, 10, 20, 30, 40, 250])
    picture = decode(encode(image, "PNG", transparency=1))
    assert (picture[:, :3] == (200, 10, 20)).all()
    assert (picture[:, 3:] == 255).all()


def test_half_transparent_rgba_blends_with_white() -> None:
    rgba = np.full((5, 5, 4), (100, 0, 200, 128), np.uint8)
    picture = decode(encode(rgba, "PNG"))
    np.testing.assert_allclose(picture[0, 0], 255 + (np.array([100, 0, 200]) - 255) * 128 / 255, atol=1)


def test_grey_and_alpha() -> None:
    la = np.stack([np.full((4, 4), 60), np.array([[0, 255] * 2] * 4)], axis=2).astype(np.uint8)
    picture = decode(encode(Image.fromarray(la, "LA"), "PNG"))
    assert (picture[:, ::2] == 255).all()
    assert (picture[:, 1::2] == 60).all()


def test_rgb_with_a_transparent_colour() -> None:
    picture = decode(encode(GRADIENT, "PNG", transparency=tuple(int(v) for v in GRADIENT[0, 0])))
    assert (picture[0, 0] == 255).all()
    np.testing.assert_array_equal(picture[1:], GRADIENT[1:])


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bit_grey_is_scaled(kind: str) -> None:
    grey = np.linspace(0, 65535, 24 * 32).reshape(24, 32).astype(np.uint16)
    picture = decode(encode(Image.fromarray(grey), kind))
    np.testing.assert_array_equal(picture, np.repeat(np.rint(grey / 257).astype(np.uint8)[..., None], 3, axis=2))


def test_one_bit_and_eight_bit_grey() -> None:
    bits = rng.integers(0, 2, (9, 7)).astype(bool)
    np.testing.assert_array_equal(decode(encode(Image.fromarray(bits), "PNG")), np.repeat(bits[..., None] * 255, 3, 2))
    grey = rng.integers(0, 256, (9, 7)).astype(np.uint8)
    np.testing.assert_array_equal(decode(encode(grey, "PNG")), np.repeat(grey[..., None], 3, 2))


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
    picture = decode(data)
    assert picture.shape == GRADIENT.shape
    assert np.abs(picture.astype(int) - GRADIENT).mean() < 3


def test_broken_exif_is_as_good_as_none() -> None:
    data = encode(GRADIENT, "PNG", exif=b"Exif\0\0nonsense")
    np.testing.assert_array_equal(decode(data), GRADIENT)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animation_gives_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    picture = decode(data)
    assert picture.shape == (6, 8, 3)
    assert (picture == (255, 0, 0)).all()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "zero bytes"),
        (b"This is a text file, whatever its name says.\n", "not a picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),  # Pillow would run Ghostscript
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
    with pytest.raises(PictureError) as caught:
        decode(path)
    assert caught.value.path == str(path)
    assert reason in caught.value.reason
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


def test_missing_file_is_a_picture_error(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="No such file"):
        decode(tmp_path / "gone.png")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_000, 50_000])
def test_decompression_bomb_is_refused_unread(side: int) -> None:
    """Headers that promise 10^8 and 2.5 * 10^9 pixels: the one past our bound, the other past Pillow's too."""
    header = side.to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
    chunk = len(header).to_bytes(4, "big") + b"IHDR" + header + zlib.crc32(b"IHDR" + header).to_bytes(4, "big")
    data = b"\x89PNG\r\n\x1a\n" + chunk + encode(GRADIENT, "PNG")[33:]
    with pytest.raises(PictureError, match="decompression bomb"):
        decode(data)


def test_the_bound_on_pixels_is_a_setting() -> None:
    data = encode(GRADIENT, "PNG")
    assert decode(data, max_pixels=GRADIENT.shape[0] * GRADIENT.shape[1]).shape == GRADIENT.shape
    with pytest.raises(PictureError, match="32 x 24 pixels, more than the 767 allowed"):
        decode(data, max_pixels=767)


_VALID = [encode(GRADIENT, kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")]


@pytest.mark.filterwarnings("ignore")  # Pillow's own about the damage
@settings(max_examples=300)
@given(st.sampled_from(_VALID), st.data())
def test_damaged_bytes_give_a_picture_or_a_picture_error(valid: bytes, data: st.DataObject) -> None:
    damaged = bytearray(valid[: data.draw(st.integers(0, len(valid)))])
    for _ in range(data.draw(st.integers(0, 4)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(PictureError):
        picture = decode(bytes(damaged))
        assert picture.ndim == 3
        assert picture.shape[2] == 3
        assert picture.dtype == np.uint8


def test_real_photograph_decodes_as_googles(shared: Path) -> None:
    with np.load(shared / "golden" / "preprocess.npz") as golden:
        for name in ("china_jpg", "synth_png", "cifar_like_png"):
            np.testing.assert_array_equal(decode(golden[f"{name}/bytes"].tobytes()), golden[f"{name}/decode(precise)"])


# ------------------------------------------------------------------------------------------ image folders


def put(path: Path, value: int = 0, side: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), (value, value, value)).save(path)


def test_plain_class_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(20):
        put(tmp_path / "zebra" / f"{i}.png", 10)
        put(tmp_path / "Żółw błotny" / "deep down" / f"ü {i}.PNG", 20)
    (tmp_path / "zebra" / "notes.txt").write_text("no picture")
    (tmp_path / "zebra" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "zebra" / "README").write_bytes(b"x")
    (tmp_path / "stray.png").write_bytes(b"x")
    name = f"folder:{tmp_path}"
    parts = {split: load_dataset(name, split) for split in ("train", "val", "test", "trainval")}
    assert parts["train"].classes == ("zebra", "Żółw błotny")
    assert {split: len(part) for split, part in parts.items()} == {"train": 32, "val": 4, "test": 4, "trainval": 36}
    paths = [part.path(i) for s in ("train", "val", "test") for part in [parts[s]] for i in range(len(part))]
    assert len(set(paths)) == 40
    for part in parts.values():
        assert part.name == name
        assert part.pixels is not None
        np.testing.assert_array_equal(part.pixels[:, 0, 0, 0], np.where(part.labels == 0, 10, 20))
        np.testing.assert_array_equal(part.picture(1), part.pixels[1])
    assert "4 files are no pictures" in caplog.text
    assert "(.txt 1, README 1, hidden 1, outside the class folders 1)" in caplog.text
    assert "has no test and no val split: cut from train, stratified, seed 0" in caplog.text


def test_another_seed_cuts_another_split(tmp_path: Path) -> None:
    for i in range(30):
        put(tmp_path / "a" / f"{i}.png")
    cut = [load_dataset(f"folder:{tmp_path}", "test", seed=seed) for seed in (0, 0, 1)]
    paths = [[part.path(i) for i in range(len(part))] for part in cut]
    assert paths[0] == paths[1]
    assert paths[0] != paths[2]


def test_ready_made_splits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for split, value in (("train", 1), ("validation", 2), ("test", 3)):
        for name in ("b", "a"):
            put(tmp_path / split / name / "x.png", value)
    put(tmp_path / "extras" / "x.png")
    for split, value in (("train", 1), ("val", 2), ("test", 3)):
        part = load_dataset(f"folder:{tmp_path}", split)
        assert part.classes == ("a", "b")
        assert [part.picture(i).max() for i in range(len(part))] == [value, value]
    assert len(load_dataset(f"folder:{tmp_path}", "trainval")) == 4
    assert "['extras'] are no splits" in caplog.text


def test_a_missing_split_is_cut_from_train(tmp_path: Path) -> None:
    for i in range(20):
        put(tmp_path / "train" / "a" / f"{i}.png", 1)
        put(tmp_path / "val" / "a" / f"{i}.png", 2)
    sizes = {s: len(load_dataset(f"folder:{tmp_path}", s)) for s in ("train", "val", "test", "trainval")}
    assert sizes == {"train": 18, "val": 20, "test": 2, "trainval": 38}


def test_classes_too_small_to_cut(tmp_path: Path) -> None:
    put(tmp_path / "a" / "1.png")
    put(tmp_path / "a" / "2.png")
    assert len(load_dataset(f"folder:{tmp_path}", "train")) == 2
    with pytest.raises(ValueError, match="no class of train has enough pictures to cut a test split"):
        load_dataset(f"folder:{tmp_path}", "test")


def test_relative_path_starts_at_root(tmp_path: Path) -> None:
    put(tmp_path / "pets" / "cat" / "1.png")
    assert load_dataset("folder:pets", "train", root=tmp_path).classes == ("cat",)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: None, "has no class folders"),
        (lambda p: p.rmdir(), "does not exist"),
        (lambda p: (p.rmdir(), p.write_text("x")), "is a file"),
        (lambda p: (put(p / "a" / "1.png"), (p / "b").mkdir()), "class folder .*b holds no pictures"),
        (lambda p: put(p / "val" / "a" / "1.png"), r"\['val'\] but no train"),
        (
            lambda p: (put(p / "train" / "a" / "1.png"), put(p / "val" / "c" / "1.png")),
            r"that train lacks: \['c'\]; train's are \['a'\]",
        ),
    ],
    ids=["empty", "missing", "file", "empty-class", "no-train", "strange-class"],
)
def test_bad_folders_say_what_is_wrong(tmp_path: Path, build: Callable[[Path], object], message: str) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    build(folder)
    with pytest.raises(ValueError, match=message):
        load_dataset(f"folder:{folder}", "val")


def test_a_class_without_a_folder_in_val_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for place in ("train/a", "train/b", "val/b"):
        put(tmp_path / place / "1.png")
    assert load_dataset(f"folder:{tmp_path}", "val").labels.tolist() == [1]
    assert "no folder for the class 'a'" in caplog.text


def test_large_or_uneven_pictures_stay_on_disk(tmp_path: Path) -> None:
    for i, side in enumerate((8, 9)):
        put(tmp_path / "uneven" / "a" / f"{i}.png", side=side)
        put(tmp_path / "large" / "a" / f"{i}.png", side=sources.MEMORY_SIDE + 1)
    for name in ("uneven", "large"):
        part = load_dataset(f"folder:{tmp_path / name}", "train")
        assert part.pixels is None
        assert part.picture(0).shape[2] == 3


def test_unreadable_pictures_of_a_small_set(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        put(tmp_path / split / "a" / "0.png")
    (tmp_path / "train" / "a" / "1.png").write_bytes(b"")
    with pytest.raises(PictureError, match=r"1\.png: the file is empty"):
        load_dataset(f"folder:{tmp_path}", "train")
    part = load_dataset(f"folder:{tmp_path}", "train", on_error="skip")
    assert part.pixels is not None
    assert list(part.failures) == [1]
    assert part.picture(0).max() == 0
    with pytest.raises(PictureError, match="zero bytes"):
        part.picture(1)


# ------------------------------------------------------------------------------------------------- shards


def write_shard(path: Path, members: list[tuple[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def pair(key: str, label: object, value: int = 0, side: int = 8) -> list[tuple[str, bytes]]:
    data = encode(np.full((side, side, 3), value, np.uint8), "PNG")
    return [(f"{key}.png", data), (f"{key}.cls", str(label).encode())]


@pytest.mark.parametrize("side", [8, sources.MEMORY_SIDE + 1])
def test_shards(tmp_path: Path, side: int, caplog: pytest.LogCaptureFixture) -> None:
    long = "a/folder/" + "with a very long name/" * 10 + "0001"
    write_shard(tmp_path / "train-01.tar", pair("b", 1, 11, side) + pair("dir/b", "2\n", 12, side))
    write_shard(tmp_path / "train-00.tar", [("a.json", b"{}"), *pair("a", 0, 10, side), *pair(long, 2, 13, side)])
    write_shard(tmp_path / "validation-0.tar", pair("a", 1, 20, side))
    write_shard(tmp_path / "test-0.tar", pair("a", 0, 30, side))
    (tmp_path / "classes.json").write_text(json.dumps(["cat", "dog", "gnu"]))
    train = load_dataset(f"shards:{tmp_path}", "trainval")
    assert (train.pixels is None) == (side > sources.MEMORY_SIDE)
    val = load_dataset(f"shards:{tmp_path}", "val")
    assert train.classes == val.classes == ("cat", "dog", "gnu")
    assert train.labels.tolist()[-1] == val.labels.tolist()[0] == 1
    seen = {(int(train.labels[i]), int(train.picture(i).max())) for i in range(len(train))}
    assert seen == {(0, 10), (2, 13), (1, 11), (2, 12), (1, 20)}
    assert train.path(0).startswith(str(tmp_path / "train-0"))
    assert "(.json 1)" in caplog.text


def test_shards_without_names_count_their_classes_on_train(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-0.tar", pair("a", 0) + pair("b", 3))
    write_shard(tmp_path / "val-0.tar", pair("a", 1))
    write_shard(tmp_path / "test-0.tar", pair("a", 4))
    assert load_dataset(f"shards:{tmp_path}", "val").classes == ("0", "1", "2", "3")
    with pytest.raises(ValueError, match=r"test-0.tar/a.png has the label 4, but train's classes are 0 to 3"):
        load_dataset(f"shards:{tmp_path}", "test")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.png", b"x")], "1 keys lack a picture or a .cls, first 'a'"),
        ([("a.cls", b"0")], "1 keys lack a picture or a .cls, first 'a'"),
        (pair("a", "cat"), "must hold a class number .* not b'cat'"),
        (pair("a", -1), "must hold a class number"),
        ([("a.txt", b"x")], "no pictures in"),
        (pair("a", 0) + pair("a", 1), "more than one picture or .cls of the key 'a'"),
    ],
)
def test_bad_shards_say_what_is_wrong(tmp_path: Path, members: list[tuple[str, bytes]], message: str) -> None:
    write_shard(tmp_path / "train-0.tar", members)
    with pytest.raises(ValueError, match=message):
        load_dataset(f"shards:{tmp_path}", "trainval")


@pytest.mark.parametrize("keep", [700, 1024, 2000, 2048, 2560, 3000])
def test_a_cut_shard_is_never_read_in_part(tmp_path: Path, keep: int) -> None:
    whole = tmp_path / "train-0.tar"
    write_shard(whole, pair("a", 0) + pair("b", 1))  # four members of 1,024 bytes each, then the end
    whole.write_bytes(whole.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"train-0\.tar is damaged or cut off"):
        load_dataset(f"shards:{tmp_path}", "trainval")


@pytest.mark.parametrize("text", ["{", "{}", "[1, 2]", "[]"])
def test_bad_class_names(tmp_path: Path, text: str) -> None:
    write_shard(tmp_path / "train-0.tar", pair("a", 0))
    (tmp_path / "classes.json").write_text(text)
    with pytest.raises(ValueError, match=r"classes\.json"):
        load_dataset(f"shards:{tmp_path}", "train")


def test_shards_missing(tmp_path: Path) -> None:
    write_shard(tmp_path / "pictures.tar", pair("a", 0))
    with pytest.raises(ValueError, match=r"has no train-\*.tar \(its tars: \['pictures.tar'\]\)"):
        load_dataset(f"shards:{tmp_path}", "train")
    with pytest.raises(ValueError, match="does not exist"):
        load_dataset(f"shards:{tmp_path / 'gone'}", "train")


def test_the_real_flowers(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    sizes = {}
    for split in ("train", "val", "test"):
        part = load_dataset("shards:flowers102", split, root=shared / "data")
        sizes[split] = len(part)
        assert len(part.classes) == 102
        assert min(part.picture(len(part) - 1).shape[:2]) == 224
    assert sizes == {"train": 1020, "val": 1020, "test": 1000}
    assert not caplog.text
