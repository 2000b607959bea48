"""Files made to fill the memory, to take for ever, or to end in a traceback: each is a UserError, soon, in little."""

import dataclasses
import gc
import json
import multiprocessing
import os
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
from PIL import Image
from safetensors.numpy import save_file

from vitlab import weights
from vitlab.data.exclude import read_exclusion
from vitlab.data.registry import load_dataset
from vitlab.data.shard_index import File, read_index
from vitlab.data.write_shards import ShardSettings, write_shards
from vitlab.errors import UserError
from vitlab.models import ModelConfig, ViTConfig
from vitlab.models.vit import build_model
from vitlab.settings import from_dict

SECONDS, MEGABYTES = 5.0, 1000
SMALL = ViTConfig(image_size=16, patch_size=8, width=8, depth=2, heads=2, mlp_dim=8, num_classes=3)
HUGE = 10**12
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
    gc.collect()  # memory of the tests before, or the job would seem to take less
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
    assert (ended.kind, message in ended.message) == ("UserError", True), ended
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


def with_settings(**settings: Any) -> Damage:
    """Changes the model settings in a config.json."""

    def damage(folder: Path) -> None:
        card = json.loads((folder / "config.json").read_text())
        card["model"] |= settings
        (folder / "config.json").write_text(json.dumps(card))

    return damage


CHECKPOINTS: dict[str, tuple[Damage, str]] = {
    "depth": (with_settings(depth=10**9), "depth is 1000000000; allowed"),
    "width of another model": (with_settings(width=2**16), "of another model"),
    "classes": (with_settings(num_classes=HUGE), "more than 2**40 parameters"),
    "kind": (with_settings(kind=[]), "kind is []"),
    "deep card": (lambda folder: (folder / "config.json").write_text(DEEP), "not valid JSON"),
    "long card": (lambda folder: sparse(folder / "config.json", 3 * 2**30), "at most 16,777,216"),
    "long weights": (lambda folder: sparse(folder / "model.safetensors", 2**40), "1,099,511,627,776 bytes"),
}


@pytest.mark.parametrize(("damage", "message"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_saved_model(tmp_path: Path, damage: Damage, message: str) -> None:
    weights.save_model(build_model(SMALL), tmp_path / "model")
    damage(tmp_path / "model")
    check(lambda: weights.load_model(tmp_path / "model"), message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 10**30, "heads": 7}, "2**40 parameters"),
        ({"image_size": 2**30, "patch_size": 2**30}, "pixels"),
        ({"kind": "resnet", "body": {"layers": [10**9]}}, "units"),
    ],
)
def test_model_settings(settings: dict[str, Any], message: str) -> None:
    check(lambda: build_model(from_dict(ModelConfig, settings)), message)


ARCHIVES: dict[str, tuple[Damage, str]] = {
    "6 GiB": (lambda path: write_zeros(path, [f"params/x{i}" for i in range(96)], "(4096, 4096)", 2**24), "requires 6"),
    "header": (lambda path: write_zeros(path, ["params/x"], "(1099511627776,)", 4), "has 16 bytes, which"),
    "empty blocks": (
        lambda path: write_zeros(path, ["Transformer/encoderblock/x", "embedding/kernel"], "(1000000000, 0)", 0),
        "does not hold a supported model",
    ),
}


@pytest.mark.parametrize(("damage", "message"), ARCHIVES.values(), ids=ARCHIVES)
def test_archive(tmp_path: Path, damage: Damage, message: str) -> None:
    damage(tmp_path / "model.npz")
    assert (tmp_path / "model.npz").stat().st_size < 7_000_000
    check(lambda: weights.load_model(tmp_path / "model.npz"), message)


def huggingface(folder: Path, card: Any = None, index: Any = None, **arrays: np.ndarray) -> None:
    """A folder with that card, and an index or arrays."""
    card = {"model_type": "vit", "architectures": ["ViTModel"]} if card is None else card
    (folder / "config.json").write_text(card if isinstance(card, str) else json.dumps(card))
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(index if isinstance(index, str) else json.dumps(index))
    else:
        save_file(arrays or {"x": np.zeros(1)}, folder / "model.safetensors")


def timm_arrays(classes: int) -> dict[str, np.ndarray]:
    """The first arrays of a ViT of timm, with outputs that take no bytes."""
    small = {"patch_embed.proj.weight": (192, 3, 4, 4), "blocks.0.mlp.fc1.weight": (8, 192), "cls_token": (1, 1, 192)}
    return {name: np.zeros(shape, np.float32) for name, shape in small.items()} | {
        "blocks.0.mlp.fc2.weight": np.zeros((192, 8), np.float32),
        "pos_embed": np.zeros((1, 5, 192), np.float32),
        "head.weight": np.zeros((classes, 0), np.float32),
    }


FOLDERS: dict[str, tuple[Damage, str]] = {
    "numbers as files": (lambda f: huggingface(f, index={"weight_map": {"a": 5}}), "lists 5, which is not"),
    "file elsewhere": (lambda f: huggingface(f, index={"weight_map": {"a": "../../x"}}), "lists '../../x', which"),
    "deep card": (lambda f: huggingface(f, '{"model_type":' * 100_000), "not valid JSON"),
    "outputs without bytes": (lambda f: huggingface(f, {"architecture": "vit"}, **timm_arrays(2**40)), "2**40 param"),
}


@pytest.mark.parametrize(("damage", "message"), FOLDERS.values(), ids=FOLDERS)
def test_other_folders(tmp_path: Path, damage: Damage, message: str) -> None:
    damage(tmp_path)
    check(lambda: weights.load_model(tmp_path), message)


@pytest.mark.parametrize("name", ["x.npz", "folder/config.json"])
def test_no_checkpoint_is_read_from_a_pipe(tmp_path: Path, name: str) -> None:
    weights.save_model(build_model(SMALL), tmp_path / "folder")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    check(lambda: weights.load_model(tmp_path / name.split("/")[0]), "only regular files")


# Data sets


def write_tar(path: Path, **members: bytes | tuple[int, bytes]) -> None:
    """A tar of these members; a pair is the size in the header, and the bytes."""
    with path.open("wb") as file:
        for name, content in members.items():
            size, data = content if isinstance(content, tuple) else (len(content), content)
            info = tarfile.TarInfo(name.replace("_", "."))
            info.size = size
            file.write(info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512))
        file.write(bytes(10240))


def write_header(path: Path, kind: bytes, size: int) -> None:
    """A tar whose only header describes the next member."""
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(10240))


JPEG = b"\xff\xd8\xff"
TARS: dict[str, tuple[Damage, str]] = {
    **{
        f"label {label[:10]}, {len(label)}": (
            lambda path, label=label: write_tar(path, a_jpg=JPEG, a_cls=label.encode()),
            "must hold a class number",
        )
        for label in ("50000000", "9" * 5000, "")
    },
    "deep labels": (lambda path: write_tar(path, a_jpg=JPEG, a_labels_json=DEEP.encode()), "must hold a class number"),
    "image of 1 TiB": (lambda path: write_tar(path, a_jpg=(2**40, JPEG)), "has 1,099,511,627,776 bytes"),
    "offset beyond the file": (lambda path: write_header(path, tarfile.REGTYPE, 2**80), "is corrupt or truncated"),
}


@pytest.mark.parametrize(("damage", "message"), TARS.values(), ids=TARS)
def test_tar(tmp_path: Path, damage: Damage, message: str) -> None:
    damage(tmp_path / "train-0.tar")
    check(lambda: load_dataset(f"shards:{tmp_path}", "train"), message)


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
        dataclasses.replace(index, metadata=tuple(metadata)).write(folder / "index.json")

    return damage


def with_text(part: str, new: str) -> Damage:
    """Replaces a part of index.json."""
    return lambda folder: (folder / "index.json").write_text((folder / "index.json").read_text().replace(part, new))


INVALID = "does not match"
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
}


@pytest.mark.parametrize(("damage", "message"), SETS.values(), ids=SETS)
def test_shards_with_an_index(shards: Path, damage: Damage, message: str) -> None:
    damage(shards)
    check(lambda: load_dataset(f"shards:{shards}", "train"), message)


@pytest.mark.parametrize("name", ["index.json", "alone/train-0.tar", "list.txt"])
def test_no_data_set_is_read_from_a_pipe(shards: Path, name: str) -> None:
    (shards / "alone").mkdir()
    (shards / name).unlink(missing_ok=True)
    os.mkfifo(shards / name)
    if name == "list.txt":
        check(lambda: read_exclusion(shards / name), "only regular files")
    else:
        check(lambda: load_dataset(f"shards:{(shards / name).parent}", "train"), "only regular files")


def test_lists_have_an_end(tmp_path: Path) -> None:
    sparse(tmp_path / "list.txt", 3 * 10**9)
    check(lambda: read_exclusion(tmp_path / "list.txt"), "3,000,000,000 bytes")
