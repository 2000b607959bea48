"""Any data set, written as WebDataset tars: balanced, checksummed, the same bytes each time.

A split's tars have the same number of images of each class, to one; within a tar the images are shuffled. A image
is `KEY.cls` with its class and `KEY.jpg` (or png, webp), where KEY is its number in the source's split; in a set whose
images have several labels there is `KEY.labels.json` with the list of them, and `KEY.cls` is the first. That is what
our reader and the package webdataset understand.

All is written into a folder aside, tar by tar: an interrupted call goes on there. That folder becomes the set in one
step, so that what lies at its place is whole.
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

from vitlab.data.cache import digest_images
from vitlab.data.dataset import Dataset, Labels
from vitlab.data.decode import ImageError
from vitlab.data.registry import load_dataset, splits_to_copy
from vitlab.data.shard_index import CLASSES, INDEX, File, Listing, Places, Report, read_places, summary, write_places
from vitlab.data.vtab.gray import GrayEntry
from vitlab.errors import UserError
from vitlab.io import lock_file, replacing_file, sync
from vitlab.rng import Stream, philox

logger = logging.getLogger(__name__)

SAMPLE = 256
"""Images that are encoded to learn how large they become."""
SUFFIXES = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
"""Formats that are kept as they are; what is in another is written as PNG."""


@dataclasses.dataclass(frozen=True)
class ShardSettings:
    """How a set is written.

    size: the shorter side in pixels to which larger images are brought, as JPEG of `quality`; None keeps all bytes.
    records, megabytes: how much there is in a tar, at most and about; give one of them, or it is 100 megabytes.
    """

    size: int | None = None
    quality: int = 90
    records: int | None = None
    megabytes: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise UserError(f"size is {self.size}; it is the shorter side in pixels, 1 or more, or None.")
        if not 1 <= self.quality <= 100:
            raise UserError(f"quality is {self.quality}; JPEG's goes from 1 to 100.")
        if self.records is not None and self.megabytes is not None:
            raise UserError(f"records={self.records} and megabytes={self.megabytes} both limit a tar; give one.")
        if (self.records is not None and self.records < 1) or (self.megabytes is not None and not self.megabytes > 0):
            raise UserError(f"records={self.records}, megabytes={self.megabytes}: a tar holds something, give more.")
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
    """Writes `source`, any data set, into the new folder `folder`; returns what it then holds.

    Splits that the source lacks are cut from its train part as ever; a val that is also the test is written once, as
    val. With `on_error="skip"` unreadable images are
    left out, named and counted. The same call on a folder that is finished returns at once. Raises `ValueError` for a
    folder that holds something else.
    """
    folder = Path(folder)
    plan = {"source": source, "root": root, "splits": list(splits), "on_error": on_error}
    plan |= dataclasses.asdict(settings)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return _finished(folder, plan)
    place = folder.resolve()  # where it leads, if it is a link
    aside = place.with_name(f".{place.name}.unfinished")
    copied = splits_to_copy(source, splits, root=root)
    sets = {split: load_dataset(source, split, root=root, on_error=on_error) for split in copied}
    identity = {**plan, "images": {split: _identity(split, each) for split, each in sets.items()}}
    with _alone(aside, folder):
        _begin(aside, identity)
        beside: list[File] = []
        left_out: dict[str, int] = {}
        shards: dict[str, tuple[File, ...]] = {}
        done, total = 0, sum(map(len, sets.values()))
        for split, dataset in sets.items():
            tell = lambda count, before=done: report(before + count, total)  # noqa: E731
            written = _write_split(aside, split, dataset, settings, on_error, tell)
            done += len(dataset)
            shards[split] = tuple(shard.file for shard in written)
            left_out[split] = sum(len(shard.unreadable) for shard in written)
            beside.append(_write_index(aside / f"{split}.index.npz", written))
        with replacing_file(aside / CLASSES) as file:
            file.write(json.dumps(list(sets[copied[0]].classes), ensure_ascii=False).encode())
        beside.append(File.of(aside / CLASSES))
        for extra in (*aside.glob("*.done"), *aside.glob(".*"), aside / "plan.json"):
            extra.unlink()
        Listing(shards, tuple(beside), left_out, plan).write(aside / INDEX)
        sync(aside)
        if place.exists():
            place.rmdir()  # it is empty
        aside.replace(place)
        sync(place.parent)
    return summary(folder)


# ------------------------------------------------------------------------------------------- which goes where


def deal(labels: Int[np.ndarray, " n"], shards: int, seed: int) -> list[Int[np.ndarray, " m"]]:
    """Which images each of the shards holds, in order: an equal share of each class, to one, and shuffled."""
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
            continue  # it will be met again, and told
    each = (np.mean(sizes) if sizes else 0) + 3 * tarfile.BLOCKSIZE  # with its headers and its label
    wanted = len(dataset) * each / ((settings.megabytes or 100.0) * 1e6)
    return min(max(1, round(wanted)), len(dataset))


# ---------------------------------------------------------------------------------------------- the images


def encode(dataset: Dataset, index: int, settings: ShardSettings) -> tuple[str, bytes]:
    """A image's suffix and bytes: as they are, or smaller. Raises `ImageError` for one that cannot be read."""
    image = dataset.image(index)
    if settings.size is not None and min(image.shape[:2]) > settings.size:
        scale = settings.size / min(image.shape[:2])
        height, width = (max(settings.size, round(side * scale)) for side in image.shape[:2])
        smaller = Image.fromarray(image).resize((width, height), Image.Resampling.LANCZOS)
        return "jpg", _saved(smaller, "JPEG", quality=settings.quality)
    entry = dataset.entries[index] if dataset.entries else None
    if entry is not None and entry.size and not entry.border and not isinstance(entry, GrayEntry):
        data = entry.data()
        if kind := _format(data):
            return SUFFIXES[kind], data
    return "png", _saved(Image.fromarray(image), "PNG")


def _saved(image: Image.Image, kind: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _format(data: bytes) -> str | None:
    """Which of the formats that are kept this is, by its first bytes."""
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    return "WEBP" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


# -------------------------------------------------------------------------------------------------- the tars


class _Written(NamedTuple):
    """A tar that is whole: what is known of it, and what was left out."""

    file: File
    places: Places
    labels: Labels
    unreadable: list[str]


def _write_split(
    aside: Path, split: str, dataset: Dataset, settings: ShardSettings, on_error: str, tell: Callable[[int], None]
) -> list[_Written]:
    parts = deal(dataset.labels, _count_shards(dataset, settings), settings.seed)
    written: list[_Written] = []
    done = 0
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    with ThreadPoolExecutor(len(affinity(0)) if affinity else os.cpu_count()) as pool:  # Pillow releases Python's lock
        for number, part in enumerate(parts):
            path = aside / f"{split}-{number:06d}.tar"
            if not (found := _read_done(path)):
                found = _write_tar(
                    path, dataset, part, settings, on_error, pool, lambda count, before=done: tell(before + count)
                )
            written.append(found)
            done += len(part)
            tell(done)
    unreadable = [reason for each in written for reason in each.unreadable]
    if len(unreadable) == len(dataset):
        raise UserError(f"none of the {len(dataset)} images of {dataset.name} ({split}) can be read: {unreadable[0]}")
    return written


def _write_tar(
    path: Path,
    dataset: Dataset,
    part: np.ndarray,
    settings: ShardSettings,
    on_error: str,
    pool: ThreadPoolExecutor,
    tell: Callable[[int], None],
) -> _Written:
    rows: list[tuple[str, int, int]] = []
    kept: list[int] = []
    unreadable: list[str] = []

    def attempt(index: int) -> tuple[str, bytes] | ImageError:
        try:
            return encode(dataset, index, settings)
        except ImageError as error:
            return error

    with replacing_file(path) as file:
        for number, (index, found) in enumerate(_in_turn(pool, attempt, part.tolist())):
            if isinstance(found, ImageError):
                if on_error == "raise":
                    raise found
                logger.warning("%s (left out, as on_error='skip')", found)
                unreadable.append(str(found))
                continue
            for kind, data in _label_members(dataset, index):
                _add(file, f"{index:08d}.{kind}", data)
            suffix, data = found
            rows.append((f"{index:08d}.{suffix}", _add(file, f"{index:08d}.{suffix}", data), len(data)))
            kept.append(index)
            tell(number)
        file.write(tarfile.NUL * 2 * tarfile.BLOCKSIZE)
    letters = np.frombuffer("".join(name for name, _, _ in rows).encode(), np.uint8)
    numbers = np.array([(offset, size, len(name)) for name, offset, size in rows], np.int64).reshape(-1, 3)
    places = Places.of_lists([path.name], [len(rows)], numbers[:, 0], numbers[:, 1], letters, numbers[:, 2])
    labels = (dataset.label_sets or Labels(dataset.labels, np.arange(len(dataset) + 1))).take(np.array(kept, np.int64))
    written = _Written(File.of(path, len(rows)), places, labels, unreadable)
    _write_done(path, written)
    return written


def _in_turn(pool: ThreadPoolExecutor, work: Callable[[int], Any], indices: list[int]) -> Iterator[tuple[int, Any]]:
    """(index, result) of each, in order; a few are worked on ahead, so that memory holds no more than these."""
    for start in range(0, len(indices), 64):
        block = indices[start : start + 64]
        yield from zip(block, pool.map(work, block), strict=True)


def _label_members(dataset: Dataset, index: int) -> Iterator[tuple[str, bytes]]:
    yield "cls", str(int(dataset.labels[index])).encode()
    if dataset.label_sets is not None:
        yield "labels.json", json.dumps(dataset.label_sets.of(index).tolist()).encode()


def _add(file: BinaryIO, name: str, data: bytes) -> int:
    """Appends a member, with time 0 and nobody's; returns where its bytes start."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    file.write(info.tobuf(tarfile.USTAR_FORMAT))
    start = file.tell()
    file.write(data + tarfile.NUL * (-len(data) % tarfile.BLOCKSIZE))
    return start


def _write_index(path: Path, written: list[_Written]) -> File:
    """`SPLIT.index.npz` of all tars of a split."""
    counts = np.concatenate([each.labels.counts for each in written])
    values = np.concatenate([each.labels.values for each in written])
    labels = Labels(values, np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]))
    write_places(path, Places.joined([each.places for each in written]), labels)
    return File.of(path)


# ------------------------------------------------------------------------------------- stopping and going on


def _identity(split: str, dataset: Dataset) -> str:
    """A digest of a split's images and labels: what was written of others is of no use."""
    digest = hashlib.sha256(digest_images(split, dataset, range(len(dataset)), {}).encode())
    for array in (dataset.labels, dataset.label_sets and dataset.label_sets.values):
        digest.update(np.ascontiguousarray(array).tobytes() if array is not None else b"")
    return digest.hexdigest()


@contextmanager
def _alone(aside: Path, folder: Path) -> Iterator[None]:
    """While no other process writes into `aside`."""
    path = aside.with_name(f"{aside.name}.lock")
    if (held := lock_file(path)) is None:
        raise UserError(f"another process is writing {folder}; let it finish, or give the name of another folder.")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        held.close()


def _begin(aside: Path, identity: dict[str, Any]) -> None:
    """Leaves in `aside` what a call with the same settings and images has finished, and nothing else."""
    plan = aside / "plan.json"
    text = json.dumps(identity, indent=1).encode()
    if plan.is_file() and plan.read_bytes() == text:
        logger.warning("%s: going on with what an interrupted call has left there", aside)
        return
    shutil.rmtree(aside, ignore_errors=True)
    with replacing_file(plan) as file:
        file.write(text)


def _write_done(path: Path, written: _Written) -> None:
    further = {
        "known": np.array(json.dumps(dataclasses.asdict(written.file))),
        "unreadable": np.array(written.unreadable, str),
    }
    write_places(path.with_suffix(".done"), written.places, written.labels, **further)


def _read_done(path: Path) -> _Written | None:
    """What an interrupted call knew of a tar that it had finished; None where it had not."""
    done = path.with_suffix(".done")
    if not path.is_file() or not done.is_file() or (found := read_places(done, "known", "unreadable")) is None:
        return None
    places, labels, (file, unreadable) = found
    known = File(**json.loads(str(file)))
    return _Written(known, places, labels, unreadable.tolist()) if File.of(path, known.records) == known else None


def _finished(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """The summary of a set that is there already, if it is the one that is asked for."""
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} is {'not empty' if folder.is_dir() else 'a file'}; give the name of a new folder.")
    known = summary(folder)
    if known["settings"] != plan:
        differing = sorted(k for k in plan if known["settings"].get(k) != plan[k])
        raise UserError(
            f"{folder} already holds a set of shards, written with other settings ({', '.join(differing)}); give the "
            f"name of a new folder, or remove it."
        )
    return known
