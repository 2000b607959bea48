"""Files made to fill the memory, to take for ever, or to end in a traceback: each is a UserError, soon, in little."""

import dataclasses
import gc
import json
import multiprocessing
import os
import re
import resource
import shutil
import struct
import tarfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from image_files import encode
from PIL import Image
from safetensors.numpy import save_file

from vitlab import weights
from vitlab.data.decode import Entry, ImageError, decode_image
from vitlab.data.exclude import read_exclusion
from vitlab.data.registry import load_dataset
from vitlab.data.shard_index import File, read_index
from vitlab.data.write_shards import ShardSettings, write_shards
from vitlab.errors import UserError
from vitlab.models import ModelConfig, ViTConfig
from vitlab.models.vit import build_model
from vitlab.settings import from_dict

pytestmark = pytest.mark.usefixtures("unchecked")  # each process would compile the checks anew
SECONDS, MEGABYTES = 5.0, 1000
SMALL = ViTConfig(image_size=16, patch_size=8, width=8, depth=2, heads=2, mlp_dim=8, num_classes=3)
CARD, HUGE = "config.json", 10**12
DEEP = "[" * 100_000 + "]" * 100_000
Damage = Callable[[Path], Any]


class Ended(NamedTuple):
    """How a job ended: the type of its error and its message, seconds, and megabytes of memory."""

    kind: str
    message: str
    seconds: float
    megabytes: float


def run_limited(job: Callable[[], Any]) -> Ended:
    """Runs `job` in another process, which may take 4 GiB and 30 seconds."""
    context = multiprocessing.get_context("fork")  # all that takes long to import is there already
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(job, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(30) else Ended("none", "nothing after 30 s", 30, 0)
    except EOFError:
        return Ended("none", "killed", 30, 0)
    finally:
        process.kill()
        process.join()


def _measure(job: Callable[[], Any], pipe: Any) -> None:
    gc.freeze()  # memory of the tests before stays, or the job would seem to take less
    pages, resident = map(int, Path("/proc/self/statm").read_text().split()[:2])
    page = resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages * page + 2**32, pages * page + 2**32))
    start, kind, message = time.monotonic(), "none", "it was read"
    try:
        job()
    except (ValueError, RuntimeError, TypeError, ArithmeticError, LookupError, MemoryError, OSError) as error:
        kind, message = type(error).__name__, str(error)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pipe.send(Ended(kind, message, time.monotonic() - start, (peak - resident * page) / 1e6))


def check(job: Callable[[], Any], message: str) -> None:
    ended = run_limited(job)
    assert ended.kind in ("UserError", "ImageError"), ended
    assert message in ended.message, ended
    assert ended.seconds < SECONDS, ended
    assert ended.megabytes < MEGABYTES, ended


def test_a_job_is_measured() -> None:
    def wasteful() -> None:
        array = np.ones(2**25)
        time.sleep(0.2)
        raise UserError(f"{len(array)} numbers")

    ended = run_limited(wasteful)
    assert (ended.kind, ended.message) == ("UserError", "33554432 numbers")
    assert ended.seconds > 0.2
    assert ended.megabytes > 50  # of 268: under memory pressure the system takes back pages of the parent meanwhile
    assert run_limited(lambda: bytes(2**33)).kind == "MemoryError"


# Checkpoints


def write_zeros(path: Path, names: list[str], shape: str, count: int) -> None:
    """An .npz of arrays of `count` float32 zeros, each compressed to a thousandth, with `shape` in their headers."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(4 * count)
    squeezed = (squeezer := zlib.compressobj(wbits=-15)).compress(data) + squeezer.flush()
    sizes, listed, at = (zlib.crc32(data), len(squeezed), len(data)), b"", 0
    with path.open("wb") as file:
        for name in (f"{name}.npy".encode() for name in names):
            listed += struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 8, 0, 33, *sizes, len(name), *[0] * 5, at) + name
            at += file.write(struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 8, 0, 33, *sizes, len(name), 0) + name)
            at += file.write(squeezed)
        file.write(listed + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, len(names), len(names), len(listed), at, 0))


def sparse(path: Path, size: int, start: bytes = b"") -> None:
    """A file of `size` bytes that takes no room on the disk."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)


def with_card(part: str, **settings: Any) -> Damage:
    """Changes settings of the model, or the metadata, in its card."""

    def damage(folder: Path) -> None:
        card = json.loads((folder / CARD).read_text())
        card[part] |= settings
        (folder / CARD).write_text(json.dumps(card))

    return damage


def huggingface(folder: Path, card: Any = None, index: Any = None, **arrays: np.ndarray) -> None:
    """A folder with that card, and an index or arrays."""
    card = {"model_type": "vit", "architectures": ["ViTModel"]} if card is None else card
    (folder / CARD).write_text(card if isinstance(card, str) else json.dumps(card))
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(index if isinstance(index, str) else json.dumps(index))
    else:
        save_file(arrays or {"x": np.zeros(1)}, folder / "model.safetensors")


def timm_arrays(classes: int) -> dict[str, np.ndarray]:
    """The first arrays of a ViT of timm, with outputs that take no bytes."""
    small = {"patch_embed.proj.weight": (192, 3, 4, 4), "blocks.0.mlp.fc1.weight": (8, 192), "cls_token": (1, 1, 192)}
    small |= {"blocks.0.mlp.fc2.weight": (192, 8), "pos_embed": (1, 5, 192), "head.weight": (classes, 0)}
    return {name: np.zeros(shape, np.float32) for name, shape in small.items()}


HIDDEN: dict[str, Any] = {"image_size": 16, "resize": 2**16, "keep_aspect": False, "antialias": False}
MANY = [f"params/x{i}" for i in range(96)]
EMPTY = ["Transformer/encoderblock/x", "embedding/kernel"]
CHECKPOINTS: dict[str, tuple[str, Damage, str]] = {
    # what is damaged: a model of vitlab, an empty folder, or no file at all
    "depth": ("model", with_card("model", depth=10**9), "depth is 1000000000; allowed"),
    "width of another model": ("model", with_card("model", width=2**16), "of another model"),
    "classes": ("model", with_card("model", num_classes=HUGE), "more than 2**40 parameters"),
    "kind": ("model", with_card("model", kind=[]), "kind is []"),
    "deep card": ("model", lambda f: (f / CARD).write_text(DEEP), "not valid JSON"),
    "long card": ("model", lambda f: sparse(f / CARD, 3 * 2**30), "at most 16,777,216"),
    "long weights": ("model", lambda f: sparse(f / "model.safetensors", 2**40), "1,099,511,627,776 bytes"),
    "patches": ("model", with_card("extra", preprocessing={"image_size": 8192}), "makes 1,048,576 patches"),
    "resize": ("model", with_card("extra", preprocessing=HIDDEN), "more than 768 for"),
    "larger": ("model", with_card("extra", preprocessing=HIDDEN | {"image_size": 1408}), "more than 4096 for"),
    "numbers as files": ("folder", lambda f: huggingface(f, index={"weight_map": {"a": 5}}), "lists 5, which is not"),
    "file elsewhere": ("folder", lambda f: huggingface(f, index={"weight_map": {"a": "../../x"}}), "lists '../../x'"),
    "deep hub card": ("folder", lambda f: huggingface(f, '{"model_type":' * 100_000), "not valid JSON"),
    "no bytes": ("folder", lambda f: huggingface(f, {"architecture": "vit"}, **timm_arrays(2**40)), "2**40 param"),
    "6 GiB": ("x.npz", lambda f: write_zeros(f, MANY, "(4096, 4096)", 2**24), "requires"),
    "header": ("x.npz", lambda f: write_zeros(f, ["params/x"], "(1099511627776,)", 4), "has 16 bytes, which"),
    "negative shape": ("x.npz", lambda f: write_zeros(f, ["params/x"], "(-4,)", 0), "of shape (-4,)"),
    "empty blocks": ("x.npz", lambda f: write_zeros(f, EMPTY, "(1000000000, 0)", 0), "not hold a supported model"),
    "pipe": ("x.npz", os.mkfifo, "only regular files"),
    "pipe as a card": ("model", lambda f: [(f / CARD).unlink(), os.mkfifo(f / CARD)], "only regular files"),
}


@pytest.mark.parametrize(("name", "damage", "message"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_checkpoint(tmp_path: Path, name: str, damage: Damage, message: str) -> None:
    path = tmp_path / name
    if name == "model":
        weights.save_model(build_model(dataclasses.replace(SMALL, width=192)), path)
    elif name == "folder":
        path.mkdir()
    damage(path)
    assert name != "x.npz" or path.stat().st_size < 7_000_000
    check(lambda: weights.load_checkpoint(path), message)


def test_model_settings() -> None:
    for settings, message in (
        ({"width": 10**30, "heads": 7}, "2**40 parameters"),
        ({"image_size": 2**30, "patch_size": 2**30}, "pixels"),
        ({"kind": "resnet", "body": {"layers": [10**9]}}, "units"),
    ):
        check(lambda settings=settings: build_model(from_dict(ModelConfig, settings)), message)


# Images


def chunks(*parts: tuple[bytes, bytes]) -> bytes:
    """Chunks of a PNG: kind and content."""
    return b"".join(struct.pack(">I", len(d)) + kind + d + zlib.crc32(kind + d).to_bytes(4, "big") for kind, d in parts)


def png(width: int, height: int, *parts: tuple[bytes, bytes]) -> bytes:
    """A PNG of gray that claims so many pixels and has nine bytes of them."""
    header, pixels = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0), zlib.compress(bytes(9))
    return b"\x89PNG\r\n\x1a\n" + chunks((b"IHDR", header), *parts, (b"IDAT", pixels), (b"IEND", b""))


def tags(entries: list[tuple[int, int, int, int]], content: bytes = b"") -> bytes:
    """A TIFF, or an EXIF block, with its content from byte 8 on: tag, type, number of values, value or offset."""
    rows = b"".join(struct.pack("<HHII", *entry) for entry in sorted(entries))
    return (
        struct.pack("<2sHI", b"II", 42, 8 + len(content)) + content + struct.pack("<H", len(entries)) + rows + bytes(4)
    )


def tiff(width: int, height: int, *more: tuple[int, int, int, int], compression: int = 1) -> bytes:
    single = {256: width, 257: height, 258: 8, 259: compression, 262: 1, 273: 8, 277: 1, 278: height, 279: 300_000}
    return tags([*((tag, 4, 1, value) for tag, value in single.items()), *more], bytes(300_000))


def jpeg(width: int, height: int, **options: Any) -> bytes:
    """A JPEG of 16 x 16 pixels that claims others."""
    data = encode(np.zeros((16, 16, 3), np.uint8), "JPEG", **options)
    start = data.find(b"\xff\xc2" if options.get("progressive") else b"\xff\xc0") + 5
    return data[:start] + struct.pack(">HH", height, width) + data[start + 4 :]


def scans(count: int, side: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    data = encode(Image.new("L", (side, side), 77), "JPEG", progressive=True)
    return data[:-2] + data[data.rfind(b"\xff\xda") : -2] * count + data[-2:]


def exif(data: bytes, block: bytes) -> bytes:
    """The JPEG with an EXIF block, in as many segments as it takes."""
    parts = [b"Exif\0\0" + block[i : i + 60_000] for i in range(0, len(block), 60_000)]
    return data[:2] + b"".join(b"\xff\xe1" + struct.pack(">H", 2 + len(p)) + p for p in parts) + data[2:]


def gif(width: int, height: int) -> bytes:
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\2\2\x44\1\0\x3b"
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6) + frame


OVERLAPPING = [(400 + i, 7, 200_000, 8) for i in range(10_000)]
SIDE = 9459  # squared, nearly as many pixels as are allowed
IMAGES: dict[str, tuple[Callable[[], bytes], str]] = {
    "strip": (lambda: png(1, 89_478_485), "a side has at most 65,536"),
    "jpeg": (lambda: jpeg(SIDE, SIDE), "pixels in 631 bytes"),
    "progressive": (lambda: jpeg(SIDE, SIDE, progressive=True), "pixels in"),
    "webp": (lambda: encode(Image.new("RGB", (4500, 4500)), "WEBP", lossless=True, method=0), "pixels in"),
    "frame of a gif": (lambda: gif(SIDE, SIDE), "pixels in 35 bytes"),
    "tiles": (lambda: tiff(9, 9, (322, 4, 1, 30_000), (323, 4, 1, 30_000), compression=5), "30000 x 30000 pixels"),
    "scans": (lambda: scans(3000, 1000), "3,006 scans"),
    "comment": (lambda: b"P6\n#" + b"x" * 50_000_000 + b"\n1 1\n255\n\0\0\0", "Reached EOF while reading header"),
    "comments": (lambda: b"P3\n1 1\n255\n" + b"#\n" * 2_000_000 + b"1 1 1", "more than 100 comments"),
    "chunks": (lambda: png(1, 1, (b"teXt", b"")) + chunks((b"teXt", b"")) * 1_000_000, "more than 131,072 chunks"),
    "profiles": (lambda: png(1, 1, *[(b"iCCP", b"a\0\0" + zlib.compress(bytes(10**6)))] * 3000), "3,000 color prof"),
    "tags": (lambda: tiff(1, 1, *OVERLAPPING), "its tags claim many times"),
    "exif": (lambda: exif(jpeg(16, 16), tags(OVERLAPPING, bytes(200_000))), "its tags claim many times"),
}


@pytest.mark.parametrize(("create", "message"), IMAGES.values(), ids=IMAGES)
def test_image(tmp_path: Path, create: Callable[[], bytes], message: str) -> None:
    """Whatever reads it: a file, or a member of a tar."""
    data, entry = create(), tmp_path / "x.tar"
    entry.write_bytes(bytes(512) + data)

    def read() -> None:
        with pytest.raises(ImageError, match=re.escape(message)):
            decode_image(data)
        Entry(str(entry), "x.jpg", 512, len(data)).open()

    check(read, message)


def test_invalid_tags_of_a_png_are_ignored() -> None:
    data = png(1, 1, (b"eXIf", tags(OVERLAPPING, bytes(200_000))))

    def read() -> None:
        raise UserError(str(decode_image(data).shape))

    check(read, "(1, 1, 3)")


def test_a_large_image_without_content_is_read() -> None:
    """As scans of empty pages are: one bit for a pixel, all of them white."""
    assert decode_image(encode(Image.new("1", (5000, 4000), 1), "PNG")).shape == (4000, 5000, 3)


# Data sets


def only_tar(folder: Path) -> Path:
    """The place of a tar in the folder, which holds nothing else."""
    shutil.rmtree(folder)
    folder.mkdir()
    return folder / "train-0.tar"


def write_tar(folder: Path, **members: bytes | tuple[int, bytes]) -> None:
    """A tar of these members; a pair is the size in the header, and the bytes."""
    with only_tar(folder).open("wb") as file:
        for name, content in members.items():
            size, data = content if isinstance(content, tuple) else (len(content), content)
            info = tarfile.TarInfo(name.replace("_", "."))
            info.size = size
            file.write(info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512))
        file.write(bytes(10240))


def write_header(folder: Path, kind: bytes, size: int) -> None:
    """A tar whose only header describes the next member."""
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    only_tar(folder).write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(10240))


JPEG = b"\xff\xd8\xff"


@pytest.fixture(scope="module")
def written_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of shards with index.json, as `vitlab shard` writes it."""
    folder = tmp_path_factory.mktemp("written")
    for split in ("train", "val", "test"):  # all three, so that none is cut from train
        for number in range(6):
            path = folder / "images" / split / f"class{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (number, 0, 0)).save(path)
    write_shards(f"folder:{folder / 'images'}", folder / "shards", ShardSettings(), splits=["train"])
    return folder / "shards"


@pytest.fixture
def shards(written_shards: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written_shards, tmp_path / "shards")


def with_arrays(**changes: np.ndarray) -> Damage:
    """Changes the offsets and labels of a split's images, and the checksum in index.json."""

    def damage(folder: Path) -> None:
        path = folder / "train.index.npz"
        with np.load(path) as arrays:
            content = dict(arrays) | changes
        np.savez(path, **content)  # pyright: ignore[reportArgumentType]
        index = read_index(folder / "index.json")
        metadata = [File.of(folder / file.file) for file in index.metadata]
        (folder / "index.json").write_bytes(dataclasses.replace(index, metadata=tuple(metadata)).to_json())

    return damage


def with_text(part: str, new: str) -> Damage:
    return lambda folder: (folder / "index.json").write_text((folder / "index.json").read_text().replace(part, new))


INVALID, LABEL = "does not match", "must hold a class number"
SETS: dict[str, tuple[Damage, str]] = {
    "long index": (lambda f: sparse(f / "index.json", 3 * 10**9, b"{"), "3,000,000,000 bytes"),
    "file elsewhere": (with_text('"file": "train', '"file": "../train'), "is not a plain file name"),
    "arrays": (lambda f: write_zeros(f / "train.index.npz", ["shards", "records"], "(1099511627776,)", 4), INVALID),
    "negative records": (with_arrays(records=np.array([-6, 12]), shards=np.array(["a", "b"])), "out of range"),
    "many records": (with_arrays(records=np.array([2**62])), "out of range"),
    "negative offset": (with_arrays(offset=np.full(6, -1)), "out of range"),
    "negative label": (with_arrays(labels=np.full(6, -1, np.int32)), "out of range"),
    "large images": (with_arrays(size=np.full(6, 2**32 - 1, np.uint32)), INVALID),
    "labels that are text": (with_arrays(labels=np.array(["x"] * 6)), "another type"),
    "more labels than there are": (with_arrays(counts=np.array([2, 2, 1, 1, 1, 1], np.uint32)), "different lengths"),
    "large label": (with_arrays(labels=np.full(6, 50_000_000, np.int32)), "has the label 50000000"),
    "long class names": (lambda f: sparse(f / "classes.json", 3 * 10**9), "3,000,000,000 bytes"),
    # one tar, without an index
    "a label of 8 digits": (lambda f: write_tar(f, a_jpg=JPEG, a_cls=b"50000000"), LABEL),
    "a label of 5,000 digits": (lambda f: write_tar(f, a_jpg=JPEG, a_cls=b"9" * 5000), LABEL),
    "deep labels": (lambda f: write_tar(f, a_jpg=JPEG, a_labels_json=DEEP.encode()), LABEL),
    "image of 1 TiB": (lambda f: write_tar(f, a_jpg=(2**40, JPEG)), "has 1,099,511,627,776 bytes"),
    "offset beyond the file": (lambda f: write_header(f, tarfile.REGTYPE, 2**80), "is corrupt or truncated"),
}


@pytest.mark.parametrize(("damage", "message"), SETS.values(), ids=SETS)
def test_shards(shards: Path, damage: Damage, message: str) -> None:
    damage(shards)
    check(lambda: load_dataset(f"shards:{shards}", "train"), message)


@pytest.mark.parametrize("name", ["index.json", "alone/train-0.tar", "list.txt"])
def test_no_data_set_is_read_from_a_pipe(shards: Path, name: str, tmp_path: Path) -> None:
    """And lists and images have an end."""
    (shards / "alone").mkdir()
    (shards / name).unlink(missing_ok=True)
    os.mkfifo(shards / name)
    if name == "list.txt":
        check(lambda: read_exclusion(shards / name), "only regular files")
        sparse(tmp_path / "long.txt", 3 * 10**9)
        check(lambda: read_exclusion(tmp_path / "long.txt"), "3,000,000,000 bytes")
        sparse(tmp_path / "x.png", 2**40)
        check(lambda: decode_image(tmp_path / "x.png"), "1,099,511,627,776 bytes")
    else:
        check(lambda: load_dataset(f"shards:{(shards / name).parent}", "train"), "only regular files")
