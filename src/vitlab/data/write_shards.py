"""Any data set, written as WebDataset tars: balanced, checksummed, the same bytes each time.

A split's tars have the same number of images of each class, give or take one; within a tar the images are shuffled. An
image is `KEY.cls` with its class and `KEY.jpg` (or png, webp), where KEY is its number in the source's split; in a data
set whose images have several labels there is `KEY.labels.json` with the list of them, and `KEY.cls` is the first. That
is what our reader and the package webdataset understand.

Everything is written into a hidden folder, tar by tar: an interrupted call resumes there. That folder becomes the data
set in one step, so that what lies at its place is whole.
"""

import dataclasses
import hashlib
import io
import json
import logging
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Int
from PIL import Image

from vitlab.data.dataset import Dataset, Labels, digest_images
from vitlab.data.decode import ImageError
from vitlab.data.downloads import Report
from vitlab.data.registry import load_dataset, splits_to_copy
from vitlab.data.shard_index import (
    CLASSES,
    INDEX,
    File,
    Places,
    ShardIndex,
    labels_of,
    read_places,
    summary,
    write_places,
)
from vitlab.errors import UserError
from vitlab.io import lock_file, replacing_file, sync
from vitlab.rng import Stream, philox

logger = logging.getLogger(__name__)

SAMPLE = 256
"""Images that are encoded to estimate how large they become."""
AHEAD = 64
"""Images that are encoded at a time, so that memory holds no more than these."""
SIGNATURES = {b"\xff\xd8\xff": "jpg", b"\x89PNG\r\n\x1a\n": "png"}
"""First bytes of formats that stay as they are (so does WebP); other formats are written as PNG."""


@dataclasses.dataclass(frozen=True)
class ShardSettings:
    """How a data set is written.

    size: the shorter side in pixels to which larger images are resized, as JPEG of `quality`; None keeps all bytes.
    records, megabytes: the size of a tar, at most and about; give one of them (default: 100 megabytes).
    """

    size: int | None = None
    quality: int = 90
    records: int | None = None
    megabytes: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise UserError(f"size is {self.size}; expected the shorter side in pixels, 1 or more, or None.")
        if not 1 <= self.quality <= 100:
            raise UserError(f"quality is {self.quality}; JPEG's goes from 1 to 100.")
        if self.records is not None and self.megabytes is not None:
            raise UserError(f"records={self.records} and megabytes={self.megabytes} both limit a tar; give one.")
        if (self.records is not None and self.records < 1) or (self.megabytes is not None and not self.megabytes > 0):
            raise UserError(f"records={self.records}, megabytes={self.megabytes}: expected more than 0.")
        if not 0 <= self.seed < 2**64:
            raise UserError(f"seed is {self.seed}; it must be 0 or more, and below 2**64.")


def write_shards(
    source: str,
    folder: Path | str,
    settings: ShardSettings,
    *,
    splits: Sequence[str] = ("train", "val", "test"),
    root: str | None = None,
    on_error: str = "raise",
    report: Report = lambda done, of: None,
) -> dict[str, Any]:
    """Writes `source`, any data set, into the new folder `folder`; returns its `summary`.

    Splits that the source lacks are cut from its train part as ever; a val that is also the test is written once, as
    val. With `on_error="skip"` unreadable images are left out, named and counted. The same call on a finished folder
    returns at once. Raises UserError for a folder that holds something else.
    """
    folder = Path(folder)
    plan = {"source": source, "root": root, "splits": list(splits), "on_error": on_error}
    plan |= dataclasses.asdict(settings)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return _finished(folder, plan)
    target = folder.resolve()  # of a link
    unfinished = target.with_name(f".{target.name}.unfinished")
    copied = splits_to_copy(source, splits, root=root)
    datasets = {split: load_dataset(source, split, root=root, on_error=on_error) for split in copied}
    identity = {**plan, "images": {split: _identity(split, dataset) for split, dataset in datasets.items()}}
    with _locked(unfinished, folder):
        _begin(unfinished, identity)
        index = ShardIndex({}, (), {}, plan)
        total = sum(map(len, datasets.values()))
        done = 0
        for split, dataset in datasets.items():
            tars = _write_split(
                unfinished, split, dataset, settings, on_error, lambda n, done=done: report(done + n, total)
            )
            done += len(dataset)
            index.shards[split] = tuple(tar.file for tar in tars)
            index.left_out[split] = sum(len(tar.unreadable) for tar in tars)
            _write_places(unfinished / f"{split}.index.npz", tars)
        with replacing_file(unfinished / CLASSES) as file:
            file.write(json.dumps(list(datasets[copied[0]].classes), ensure_ascii=False).encode())
        for extra in (*unfinished.glob("*.done"), *unfinished.glob(".*"), unfinished / "plan.json"):
            extra.unlink()
        beside = tuple(File.of(unfinished / name) for name in (*(f"{split}.index.npz" for split in datasets), CLASSES))
        dataclasses.replace(index, beside=beside).write(unfinished / INDEX)
        sync(unfinished)
        if target.exists():
            target.rmdir()  # it is empty
        unfinished.replace(target)
        sync(target.parent)
    return summary(folder)


def deal(labels: Int[np.ndarray, " n"], shards: int, seed: int) -> list[Int[np.ndarray, " m"]]:
    """Which images each of the shards holds, in order: an equal share of each class, give or take one, and shuffled."""
    draws = philox(seed, Stream.SHARD_ASSIGNMENT).random_raw(2 * len(labels)).reshape(2, -1)
    dealt = np.empty(len(labels), np.int64)
    dealt[np.lexsort((draws[0], labels))] = np.arange(len(labels)) % shards  # class by class, in turn
    order = np.lexsort((draws[1], dealt))
    return np.split(order, np.cumsum(np.bincount(dealt, minlength=shards))[:-1])


def _count_shards(dataset: Dataset, settings: ShardSettings) -> int:
    if settings.records is not None:
        return -(-len(dataset) // settings.records)
    sizes = []
    for i in np.unique(np.linspace(0, len(dataset) - 1, SAMPLE).astype(np.int64)).tolist():
        try:
            sizes.append(len(encode(dataset, i, settings)[1]))
        except ImageError:
            continue  # it is reported when it is to be written
    mean = (np.mean(sizes) if sizes else 0) + 3 * tarfile.BLOCKSIZE  # with its headers and its label
    return min(max(1, round(len(dataset) * mean / ((settings.megabytes or 100.0) * 1e6))), len(dataset))


def encode(dataset: Dataset, index: int, settings: ShardSettings) -> tuple[str, bytes]:
    """An image's suffix and bytes: as they are, or smaller. Raises `ImageError` for one that cannot be read."""
    image = dataset.image(index)
    if settings.size is not None and min(image.shape[:2]) > settings.size:
        scale = settings.size / min(image.shape[:2])
        height, width = (max(settings.size, round(side * scale)) for side in image.shape[:2])
        smaller = Image.fromarray(image).resize((width, height), Image.Resampling.LANCZOS)
        return "jpg", _save(smaller, "JPEG", quality=settings.quality)
    entry = dataset.entries[index] if dataset.entries else None
    if entry is not None and entry.size and not entry.border:
        data = entry.data()
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return "webp", data
        for signature, suffix in SIGNATURES.items():
            if data.startswith(signature):
                return suffix, data
    return "png", _save(Image.fromarray(image), "PNG")


def _save(image: Image.Image, kind: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


class _Tar(NamedTuple):
    """A finished tar: what is in it, and the images that were left out."""

    file: File
    places: Places
    labels: Labels
    unreadable: list[str]


def _write_split(
    folder: Path, split: str, dataset: Dataset, settings: ShardSettings, on_error: str, report: Callable[[int], None]
) -> list[_Tar]:
    tars: list[_Tar] = []
    done = 0
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    with ThreadPoolExecutor(len(affinity(0)) if affinity else os.cpu_count()) as pool:  # Pillow releases Python's lock

        def encode_all(indices: list[int]) -> Iterator[tuple[str, bytes] | ImageError]:
            for start in range(0, len(indices), AHEAD):
                yield from pool.map(lambda index: _try_encode(dataset, index, settings), indices[start : start + AHEAD])

        for number, part in enumerate(deal(dataset.labels, _count_shards(dataset, settings), settings.seed)):
            path = folder / f"{split}-{number:06d}.tar"
            tar = _read_done(path)
            if tar is None:
                tar = _write_tar(
                    path, dataset, part, encode_all(part.tolist()), on_error, lambda n, d=done: report(d + n)
                )
            tars.append(tar)
            done += len(part)
            report(done)
    unreadable = [reason for tar in tars for reason in tar.unreadable]
    if len(unreadable) == len(dataset):
        raise UserError(f"none of the {len(dataset)} images of {dataset.name} ({split}) can be read: {unreadable[0]}")
    return tars


def _try_encode(dataset: Dataset, index: int, settings: ShardSettings) -> tuple[str, bytes] | ImageError:
    try:
        return encode(dataset, index, settings)
    except ImageError as error:
        return error


def _write_tar(
    path: Path,
    dataset: Dataset,
    indices: np.ndarray,
    encoded: Iterator[tuple[str, bytes] | ImageError],
    on_error: str,
    report: Callable[[int], None],
) -> _Tar:
    members: list[tuple[str, int, int]] = []
    written: list[int] = []
    unreadable: list[str] = []
    with replacing_file(path) as file:
        for number, (index, image) in enumerate(zip(indices.tolist(), encoded, strict=True)):
            if isinstance(image, ImageError):
                if on_error == "raise":
                    raise image
                logger.warning("%s (left out, as on_error='skip')", image)
                unreadable.append(str(image))
                continue
            for kind, data in _label_members(dataset, index):
                _append(file, f"{index:08d}.{kind}", data)
            suffix, data = image
            name = f"{index:08d}.{suffix}"
            members.append((name, _append(file, name, data), len(data)))
            written.append(index)
            report(number)
        file.write(tarfile.NUL * 2 * tarfile.BLOCKSIZE)
    labels = (dataset.label_sets or Labels(dataset.labels, np.arange(len(dataset) + 1))).take(
        np.array(written, np.int64)
    )
    tar = _Tar(File.of(path, len(members)), Places.of_shard(path.name, members), labels, unreadable)
    _write_done(path, tar)
    return tar


def _label_members(dataset: Dataset, index: int) -> Iterator[tuple[str, bytes]]:
    yield "cls", str(int(dataset.labels[index])).encode()
    if dataset.label_sets is not None:
        yield "labels.json", json.dumps(dataset.label_sets.of(index).tolist()).encode()


def _append(file: BinaryIO, name: str, data: bytes) -> int:
    """Appends a member without time and owner; returns where its bytes start."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    file.write(info.tobuf(tarfile.USTAR_FORMAT))
    start = file.tell()
    file.write(data + tarfile.NUL * (-len(data) % tarfile.BLOCKSIZE))
    return start


def _write_places(path: Path, tars: list[_Tar]) -> None:
    """Writes `SPLIT.index.npz` of all tars of a split."""
    counts = np.concatenate([tar.labels.counts for tar in tars])
    labels = labels_of(np.concatenate([tar.labels.values for tar in tars]), counts)
    write_places(path, Places.joined([tar.places for tar in tars]), labels)


def _identity(split: str, dataset: Dataset) -> str:
    """A digest of a split's images and labels: tars of other ones are not reused."""
    digest = hashlib.sha256(digest_images(split, dataset, range(len(dataset)), {}).encode())
    for array in (dataset.labels, dataset.label_sets and dataset.label_sets.values):
        digest.update(np.ascontiguousarray(array).tobytes() if array is not None else b"")
    return digest.hexdigest()


@contextmanager
def _locked(unfinished: Path, folder: Path) -> Iterator[None]:
    """While no other process writes into `unfinished`."""
    path = unfinished.with_name(f"{unfinished.name}.lock")
    if (lock := lock_file(path)) is None:
        raise UserError(f"another process is writing {folder}; wait for it, or give the name of another folder.")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.close()


def _begin(unfinished: Path, identity: dict[str, Any]) -> None:
    """Leaves in `unfinished` what a call with the same settings and images has finished, and nothing else."""
    plan = unfinished / "plan.json"
    text = json.dumps(identity, indent=1).encode()
    if plan.is_file() and plan.read_bytes() == text:
        logger.warning("%s: resuming an interrupted call", unfinished)
        return
    shutil.rmtree(unfinished, ignore_errors=True)
    with replacing_file(plan) as file:
        file.write(text)


def _write_done(path: Path, tar: _Tar) -> None:
    further = {"known": np.array(json.dumps(dataclasses.asdict(tar.file))), "unreadable": np.array(tar.unreadable, str)}
    write_places(path.with_suffix(".done"), tar.places, tar.labels, **further)


def _read_done(path: Path) -> _Tar | None:
    """A tar that an interrupted call has finished; None if it has not, or the tar is no longer the same."""
    done = path.with_suffix(".done")
    if not path.is_file() or not done.is_file() or (found := read_places(done, "known", "unreadable")) is None:
        return None
    places, labels, (known, unreadable) = found
    file = File(**json.loads(str(known)))
    return _Tar(file, places, labels, unreadable.tolist()) if File.of(path, file.records) == file else None


def _finished(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """The summary of the data set that is there already, if it was written with the same settings."""
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} is {'not empty' if folder.is_dir() else 'a file'}; give the name of a new folder.")
    existing = summary(folder)
    if existing["settings"] != plan:
        differing = sorted(key for key in plan if existing["settings"].get(key) != plan[key])
        raise UserError(
            f"{folder} already holds a data set in shards, written with other settings ({', '.join(differing)}); give "
            f"the name of a new folder, or remove it."
        )
    return existing
