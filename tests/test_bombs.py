"""Files made to fill the memory, to take for ever, or to end in a traceback: each is a UserError, soon, in little."""

import dataclasses
import json
import multiprocessing
import os
import resource
import socket
import struct
import tarfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from vitlab import weights
from vitlab.data.exclude import read_exclusion
from vitlab.data.registry import load_dataset
from vitlab.data.remote import expand
from vitlab.data.write_shards import ShardSettings, write_shards
from vitlab.errors import UserError
from vitlab.models import ViTConfig, build_model
from vitlab.settings import from_dict

SECONDS, MEGABYTES = 5.0, 1000
SMALL = ViTConfig(image_size=16, patch_size=8, width=8, depth=2, heads=2, mlp_dim=8, num_classes=3)


@dataclasses.dataclass
class Ended:
    """How a job ended: the type of its error, what that says, its seconds, and the megabytes that it took."""

    kind: str
    said: str
    seconds: float
    megabytes: float


def run_alone(job: Callable[[], Any]) -> Ended:
    """Runs `job` in a process of its own, which may take 4 GiB and 30 seconds."""
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
    pages, resident = map(int, Path("/proc/self/statm").read_text().split()[:2])
    page = resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages * page + 2**32, pages * page + 2**32))
    began, kind, said = time.monotonic(), "none", "it was taken"
    try:
        job()
    except (ValueError, RuntimeError, TypeError, ArithmeticError, LookupError, MemoryError, OSError) as error:
        kind, said = type(error).__name__, str(error)
    seconds = time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pipe.send(Ended(kind, said, seconds, (peak - resident * page) / 1e6))


def check(job: Callable[[], Any], said: str) -> None:
    ended = run_alone(job)
    assert (ended.kind, said in ended.said) == ("UserError", True), ended
    assert ended.seconds < SECONDS, ended
    assert ended.megabytes < MEGABYTES, ended


def test_a_job_is_measured() -> None:
    def wasteful() -> None:
        held = np.ones(2**26)
        time.sleep(0.2)
        raise UserError(f"{len(held)} numbers")

    ended = run_alone(wasteful)
    assert (ended.kind, ended.said) == ("UserError", "67108864 numbers")
    assert ended.seconds > 0.2
    assert ended.megabytes > 500
    assert run_alone(lambda: bytes(2**33)).kind == "MemoryError"
    assert run_alone(lambda: 1).kind == "none"


# -------------------------------------------------------------------------------------------------- checkpoints


def array_header(shape: str) -> bytes:
    said = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(said).to_bytes(2, "little") + said


def write_zeros(path: Path, names: list[str], shape: str, count: int) -> None:
    """An .npz of arrays of `count` float32 zeros, each compressed to a thousandth; they are said to be of `shape`."""
    data = array_header(shape) + bytes(4 * count)
    squeezed = (squeezer := zlib.compressobj(wbits=-15)).compress(data) + squeezer.flush()
    sizes, listed, at = (zlib.crc32(data), len(squeezed), len(data)), b"", 0
    with path.open("wb") as file:
        for name in (f"{each}.npy".encode() for each in names):
            listed += struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 8, 0, 33, *sizes, len(name), *[0] * 5, at) + name
            at += file.write(struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 8, 0, 33, *sizes, len(name), 0) + name)
            at += file.write(squeezed)
        file.write(listed + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, len(names), len(names), len(listed), at, 0))


def sparse(path: Path, size: int, start: bytes = b"") -> None:
    """A file of `size` bytes that takes no room."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)


def edited(path: Path, **changes: Any) -> None:
    """Changes what a model's config.json says: of the model, or by `extra`."""
    card = json.loads((path / "config.json").read_text())
    card["extra"] = changes.pop("extra", card["extra"])
    card["model"] |= changes
    (path / "config.json").write_text(json.dumps(card))


DEEP = "[" * 100_000 + "]" * 100_000
HUGE = 10**12
STEM = {"layers": [10**9], "width": 64}

OWN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "depth": (lambda folder: edited(folder, depth=10**9), "depth is 1000000000; allowed"),
    "depth that the file has bytes for": (lambda folder: edited(folder, depth=1_000), "of another model"),
    "width": (lambda folder: edited(folder, width=HUGE), "more than 2**40 parameters"),
    "width 2**40": (lambda folder: edited(folder, width=2**40), "more than 2**40 parameters"),
    "wider than the arrays": (lambda folder: edited(folder, width=2**16), "of another model"),
    "heads": (lambda folder: edited(folder, heads=HUGE), "the nearest that do"),
    "mlp_dim": (lambda folder: edited(folder, mlp_dim=HUGE), "more than 2**40 parameters"),
    "classes": (lambda folder: edited(folder, num_classes=HUGE), "more than 2**40 parameters"),
    "outputs": (lambda folder: edited(folder, num_classes=10**9), "of another model"),
    "registers": (lambda folder: edited(folder, registers=10**9), "of another model"),
    "image": (lambda folder: edited(folder, image_size=2**40), "pixels"),
    "image without positions": (lambda folder: edited(folder, image_size=2**14, position="none"), "pixels"),
    "sines": (lambda folder: edited(folder, image_size=8192, position="sincos2d", patch_size=1), "table of sines"),
    "units": (lambda folder: edited(folder, stem=STEM), "1,000 units in all"),
    "stages": (lambda folder: edited(folder, stem={"layers": [1] * 5000}), "16 stages"),
    "kind": (lambda folder: edited(folder, kind=[]), "kind is []"),
    "names": (lambda folder: edited(folder, extra={"classes": 5}), "give a list"),
    "deep names": (lambda folder: (folder / "config.json").write_text(DEEP), "levels deep"),
    "a long card": (lambda folder: sparse(folder / "config.json", 3 * 2**30), "at most 16,777,216"),
    "long weights": (lambda folder: sparse(folder / "model.safetensors", 2**40), "1,099,511,627,776 bytes"),
}


@pytest.mark.parametrize("name", OWN)
def test_of_our_own_format(tmp_path: Path, name: str) -> None:
    weights.save_model(build_model(SMALL), tmp_path / "model")
    damage, said = OWN[name]
    damage(tmp_path / "model")
    check(lambda: weights.load_model(tmp_path / "model"), said)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"width": 2**40}, "2**40 parameters"),
        ({"width": 10**30, "heads": 7}, "2**40 parameters"),
        ({"width": 2**20, "heads": 3}, "2**40 parameters"),
        ({"depth": 10**9}, "depth is"),
        ({"image_size": 2**30, "patch_size": 2**30}, "pixels"),
        ({"kind": "resnet", "body": {"layers": [10**9]}}, "units in all"),
        ({"kind": "resnet", "body": {"width": 2**40}}, "2**40 parameters"),
        ({"kind": "resnet", "image_size": [10**6, 10**6]}, "pixels"),
    ],
)
def test_of_a_model_in_settings(settings: dict[str, Any], said: str) -> None:
    check(lambda: build_model(from_dict(weights_kinds(), settings)), said)


def weights_kinds() -> Any:
    from vitlab.models import ModelConfig

    return ModelConfig


ARCHIVES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "6 GiB": (
        lambda path: write_zeros(path, [f"params/x{i}" for i in range(96)], "(4096, 4096)", 2**24),
        "requires 6,",
    ),
    "a header": (lambda path: write_zeros(path, ["params/x"], "(1099511627776,)", 4), "has 16 bytes, which"),
    "blocks of nothing": (
        lambda path: write_zeros(path, ["Transformer/encoderblock/x", "embedding/kernel"], "(1000000000, 0)", 0),
        "does not hold a supported model",
    ),
    "units": (
        lambda path: write_zeros(path, [f"block{'9' * 5000}/unit1/x", "conv_root/kernel"], "(1,)", 1),
        "conv_root/kernel",
    ),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_of_an_archive(tmp_path: Path, name: str) -> None:
    damage, said = ARCHIVES[name]
    damage(tmp_path / "model.npz")
    assert (tmp_path / "model.npz").stat().st_size < 7_000_000
    check(lambda: weights.load_model(tmp_path / "model.npz"), said)


def huggingface(folder: Path, card: Any = None, index: Any = None, **arrays: np.ndarray) -> None:
    """A folder with that card, and an index or arrays."""
    given = {"model_type": "vit", "architectures": ["ViTModel"]} if card is None else card
    (folder / "config.json").write_text(given if isinstance(given, str) else json.dumps(given))
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(index if isinstance(index, str) else json.dumps(index))
    else:
        save_file(arrays or {"x": np.zeros(1)}, folder / "model.safetensors")


def wide(width: int) -> dict[str, np.ndarray]:
    """The first arrays of a ViT of timm's, with outputs that take no bytes."""
    small = {"patch_embed.proj.weight": (192, 3, 4, 4), "blocks.0.mlp.fc1.weight": (8, 192), "cls_token": (1, 1, 192)}
    return {name: np.zeros(shape, np.float32) for name, shape in small.items()} | {
        "pos_embed": np.zeros((1, 5, 192), np.float32),
        "head.weight": np.zeros((width, 0), np.float32),
    }


FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "numbers for files": (lambda f: huggingface(f, index={"weight_map": {"a": 5, "b": "c"}}), "lists 5, which is not"),
    "lists for files": (
        lambda f: huggingface(f, index={"weight_map": {"a": ["x"]}}),
        "lists ['x'], which is not a file",
    ),
    "a file elsewhere": (lambda f: huggingface(f, index={"weight_map": {"a": "../../x"}}), "lists '../../x', which"),
    "the folder above": (
        lambda f: huggingface(f, index={"weight_map": {"a": ".."}}),
        "lists '..', which is not a file",
    ),
    "a deep index": (lambda f: huggingface(f, index='{"weight_map":' * 100_000), "levels deep"),
    "a long index": (
        lambda f: (huggingface(f, index={}), sparse(f / "model.safetensors.index.json", 3 * 10**9)),
        "3,000,000,000 bytes",
    ),
    "a deep card": (lambda f: huggingface(f, '{"model_type":' * 100_000), "levels deep"),
    "a kind that is a list": (lambda f: huggingface(f, {"model_type": ["vit"]}), "of type ['vit']"),
    "heads": (
        lambda f: huggingface(f, {"architecture": "x", "model_args": {"num_heads": 2**40 + 1}}, **wide(1)),
        "the nearest that do",
    ),
    "an image": (
        lambda f: huggingface(f, {"architecture": "x", "model_args": {"img_size": 2**40}}, **wide(1)),
        "the arrays do not fit",
    ),
    "outputs without bytes": (lambda f: huggingface(f, {"architecture": "vit"}, **wide(2**40)), "2**40 parameters"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_of_other_folders(tmp_path: Path, name: str) -> None:
    damage, said = FOLDERS[name]
    damage(tmp_path)
    check(lambda: weights.load_model(tmp_path), said)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
@pytest.mark.parametrize("name", ["x.npz", "x.safetensors", "folder/config.json", "folder/model.safetensors"])
def test_no_checkpoint_is_read_from_what_is_no_file(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    weights.save_model(build_model(SMALL), tmp_path / "folder")
    path.unlink(missing_ok=True)
    make_special(path, kind)
    given = tmp_path / name.split("/")[0]
    check(lambda: weights.load_model(given), "only regular files")
    if name.startswith("x"):
        check(lambda: weights.convert(tmp_path / "folder", given, to="google"), "only regular files")


# ------------------------------------------------------------------------------------------------------ data sets


def tar_of(path: Path, **members: bytes | tuple[int, bytes]) -> None:
    """A tar of such members; a pair says how many bytes one is said to have, and those that it has."""
    with path.open("wb") as file:
        for name, content in members.items():
            size, data = content if isinstance(content, tuple) else (len(content), content)
            info = tarfile.TarInfo(name.replace("_", "."))
            info.size = size
            file.write(info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512))
        file.write(bytes(10240))


def header(kind: bytes, size: int) -> bytes:
    """The header of a tar's member that says something of the next."""
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


IMAGE = b"\xff\xd8\xff"
LABELS = ["50000000", str(HUGE), "9" * 30, "9" * 5000, "3 50000000", "-1", "[1]", ""]
TARS: dict[str, tuple[Callable[[Path], Any], str]] = {
    **{
        f"label {label[:10]}, {len(label)}": (
            lambda path, label=label: tar_of(path, a_jpg=IMAGE, a_cls=label.encode()),
            "must hold a class number",
        )
        for label in LABELS
    },
    "a list of labels": (
        lambda path: tar_of(path, a_jpg=IMAGE, a_labels_json=b"[50000000]"),
        "each below 1,048,576",
    ),
    "a deep list": (lambda path: tar_of(path, a_jpg=IMAGE, a_labels_json=DEEP.encode()), "list of class numbers"),
    "a label of 1 TiB": (
        lambda path: tar_of(path, a_jpg=IMAGE, a_cls=(2**40, b"3")),
        "has 1,099,511,627,776 bytes",
    ),
    "an image of 1 TiB": (lambda path: tar_of(path, a_jpg=(2**40, IMAGE)), "has 1,099,511,627,776 bytes"),
    "a name of 1 TiB": (
        lambda path: path.write_bytes(header(tarfile.GNUTYPE_LONGNAME, 2**40) + bytes(10240)),
        "a header of 1,099,511,",
    ),
    "a comment of 1 TiB": (
        lambda path: path.write_bytes(header(tarfile.XHDTYPE, 2**40) + bytes(10240)),
        "a header of 1,099,511,",
    ),
    "a place beyond all": (
        lambda path: path.write_bytes(header(tarfile.REGTYPE, 2**80) + bytes(10240)),
        "is corrupt or cut off",
    ),
    "a comment of digits": (
        lambda path: path.write_bytes(
            header(tarfile.XHDTYPE, 8192) + b"9" * 8192 + header(tarfile.REGTYPE, 0) + bytes(10240)
        ),
        "no images in",
    ),
}


@pytest.mark.parametrize("name", TARS)
def test_of_a_tar(tmp_path: Path, name: str) -> None:
    damage, said = TARS[name]
    damage(tmp_path / "train-0.tar")
    check(lambda: load_dataset(f"shards:{tmp_path}", "train"), said)


def shard_set(folder: Path) -> Path:
    """A set of shards with index.json, as `vitlab shard` writes it."""
    for split in ("train", "val", "test"):  # all three, so that none is cut from train
        for number in range(6):
            path = folder / "images" / split / f"class{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (number, 0, 0)).save(path)
    write_shards(f"folder:{folder / 'images'}", folder / "shards", ShardSettings(), splits=["train"])
    return folder / "shards"


def placed(folder: Path, **changes: np.ndarray) -> None:
    """Changes the places of a split's images."""
    path = folder / "train.index.npz"
    with np.load(path) as arrays:
        content = dict(arrays) | changes
    np.savez(path, **content)  # pyright: ignore[reportArgumentType]


def text_for(part: str, new: str) -> Callable[[Path], Any]:
    """Writes `new` where `part` stands in an index.json."""
    return lambda folder: (folder / "index.json").write_text((folder / "index.json").read_text().replace(part, new))


WRONG = "is missing or corrupt"
SETS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a long index": (lambda f: sparse(f / "index.json", 3 * 10**9, b"{"), "3,000,000,000 bytes"),
    "a deep index": (lambda f: (f / "index.json").write_text(DEEP), "levels deep"),
    "a number without end": (text_for('"bytes": ', '"bytes": 1e999, "b": '), "is not an index of shards"),
    "a file elsewhere": (text_for('"file": "train', '"file": "../train'), "is not a plain file name"),
    "places": (lambda f: write_zeros(f / "train.index.npz", ["shards", "records"], "(1099511627776,)", 4), WRONG),
    "places of zeros": (
        lambda f: write_zeros(f / "train.index.npz", [f"x{i}" for i in range(96)], "(4096, 4096)", 2**24),
        WRONG,
    ),
    "records that wrap": (
        lambda f: placed(f, records=np.array([2**62] * 4 + [6]), shards=np.array(["train-00000.tar"] * 5)),
        WRONG,
    ),
    "negative records": (lambda f: placed(f, records=np.array([-6, 12]), shards=np.array(["a", "b"])), WRONG),
    "a negative place": (lambda f: placed(f, offset=np.full(6, -1)), WRONG),
    "large images": (lambda f: placed(f, size=np.full(6, 2**32 - 1, np.uint32)), WRONG),
    "a negative label": (lambda f: placed(f, labels=np.full(6, -1, np.int32)), WRONG),
    "labels that are text": (lambda f: placed(f, labels=np.array(["x"] * 6)), WRONG),
    "a large label": (lambda f: placed(f, labels=np.full(6, 50_000_000, np.int32)), "has the label 50000000"),
    "a label without a name": (
        lambda f: ((f / "classes.json").unlink(), placed(f, labels=np.full(6, 50_000_000, np.int32))),
        "go up to 1,048,575",
    ),
    "deep names": (lambda f: (f / "classes.json").write_text(DEEP), "levels deep"),
    "long names": (lambda f: sparse(f / "classes.json", 3 * 10**9), "3,000,000,000 bytes"),
}


@pytest.mark.parametrize("name", SETS)
def test_of_shards_with_an_index(tmp_path: Path, name: str) -> None:
    damage, said = SETS[name]
    folder = shard_set(tmp_path)
    damage(folder)
    check(lambda: load_dataset(f"shards:{folder}", "train"), said)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
@pytest.mark.parametrize("name", ["index.json", "classes.json", "alone/train-0.tar", "list.txt"])
def test_no_set_is_read_from_what_is_no_file(tmp_path: Path, name: str, kind: str) -> None:
    folder = shard_set(tmp_path)
    (folder / "alone").mkdir()
    (folder / name).unlink(missing_ok=True)
    make_special(folder / name, kind)
    if name == "list.txt":
        check(lambda: read_exclusion(folder / name), "only regular files")
    else:
        check(lambda: load_dataset(f"shards:{(folder / name).parent}", "train"), "only regular files")


def test_a_list_has_an_end(tmp_path: Path) -> None:
    sparse(tmp_path / "list.txt", 3 * 10**9)
    check(lambda: read_exclusion(tmp_path / "list.txt"), "3,000,000,000 bytes")


def test_a_pattern_of_names_has_an_end() -> None:
    for pattern in (f"a-{{0..{HUGE}}}.tar", "{0..99999}{0..99999}.tar"):
        check(lambda pattern=pattern: expand(pattern), "names more than 1,000,000 tars")
    check(lambda: expand(f"a-{{0..{'9' * 5000}}}.tar"), "expected a range")


def make_special(path: Path, kind: str) -> None:
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            here = os.open(".", os.O_RDONLY)
            os.chdir(path.parent)  # a socket's path may have 107 bytes
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path.name)
            os.fchdir(here)
            os.close(here)
        case "device":
            path.symlink_to("/dev/zero")
