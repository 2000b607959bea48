"""Any data set, written as WebDataset tars: balanced, checksummed, the same bytes each time.

A split's tars have the same number of images of each class, or one more or less; within a tar the images are shuffled.
An image is `KEY.cls` with its class and `KEY.jpg` (or png, webp), where KEY is its number in the source's split; where
images have several labels, `KEY.labels.json` has the list of them, and `KEY.cls` the first.

Everything is written into a hidden folder, in which an interrupted call resumes, and which becomes the data set in one
step: a folder of that name is complete.
"""

import dataclasses
import hashlib
import io
import json
import logging
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le, Lt
from jaxtyping import Int
from PIL import Image

from vitlab.checksums import SUMS
from vitlab.config.data import ReadConfig
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.identity import exact_fingerprint
from vitlab.data.levels import warn_of_lost_bits
from vitlab.data.registry import load_dataset, splits_to_copy
from vitlab.data.shard_index import CLASSES, INDEX, File, ShardIndex, read_index, write_locations
from vitlab.data.shards import scan
from vitlab.errors import UserError
from vitlab.io import lock_file, replacing_file, resolved, sync, write_bytes
from vitlab.rng import Stream, philox
from vitlab.settings import Checked

logger = logging.getLogger(__name__)

Report = Callable[[int, int], None]  # receives the numbers of finished images and of all
BUFFER = 64  # images that are encoded at a time and in memory together
# Formats that stay as they are, by Pillow's names; others are written as PNG.
SUFFIXES = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}


@dataclasses.dataclass(frozen=True)
class ShardSettings(Checked):
    """How a data set is written."""

    size: Annotated[int, Ge(1)] | None = None
    """The shorter side in pixels of larger images after resizing, as JPEG of `quality`; None keeps all bytes."""
    quality: Annotated[int, Ge(1), Le(100)] = 90
    records: Annotated[int, Ge(1)] = 1000  # images of each tar at most
    seed: Annotated[int, Ge(0), Lt(2**64)] = 0


def write_shards(
    source: str,
    folder: Path | str,
    settings: ShardSettings,
    *,
    splits: Sequence[str] = ("train", "val", "test"),
    root: str | None = None,
    on_error: str = "raise",
    read: ReadConfig = ReadConfig(),
    report: Report = lambda done, of: None,
) -> dict[str, Any]:
    """Writes `source`, any data set, into the new folder `folder`; returns its `summary`.

    Missing splits are held out from train, as in `load_dataset`; a val that is also the test is written once, as val.
    With `on_error="skip"` unreadable images are logged and counted. The same call on a finished folder
    returns at once. Raises UserError for a folder that holds something else.
    """
    folder = Path(folder)
    plan = {"source": source, "root": root, "splits": list(splits), "on_error": on_error}
    plan |= dataclasses.asdict(settings) | read.read_settings
    if _is_occupied(folder):
        return _finished(folder, plan)
    target = resolved(folder)  # of a link
    unfinished = target.with_name(f".{target.name}.unfinished")
    copied = splits_to_copy(source, splits, root=root, read=read)
    datasets = {split: load_dataset(source, split, root=root, on_error=on_error, read=read) for split in copied}
    if settings.size is not None and copied:
        warn_of_lost_bits(datasets[copied[0]])
    unfinished.mkdir(parents=True, exist_ok=True)
    if (lock := lock_file(unfinished / ".lock")) is None:
        raise UserError(f"another process is writing {folder}; wait for it, or give the name of another folder.")
    with lock:
        if _is_occupied(target):  # by another process, since the first check
            result = _finished(folder, plan)
            shutil.rmtree(unfinished, ignore_errors=True)
            return result
        _prepare(unfinished, {**plan, "images": {split: _fingerprint(split, data) for split, data in datasets.items()}})
        tars = _write_tars(unfinished, datasets, settings, on_error, report)
        counts = {split: len(dataset) for split, dataset in datasets.items()}
        write_index(unfinished, tars, datasets[copied[0]].classes, counts, plan)
        _publish(unfinished, target)
    return summary(folder)


def _write_tars(
    folder: Path, datasets: Mapping[str, Dataset], settings: ShardSettings, on_error: str, report: Report
) -> dict[str, list[Path]]:
    """Writes the tars that are missing in `folder`. Returns all tars of each split."""
    tars: dict[str, list[Path]] = {split: [] for split in datasets}
    done, total = 0, sum(map(len, datasets.values()))
    for split, dataset in datasets.items():
        shards = assign_to_shards(dataset.labels, -(-len(dataset) // settings.records), settings.seed)
        for number, indices in enumerate(shards):
            path = folder / f"{split}-{number:06d}.tar"
            if not path.exists():
                _write_tar(path, dataset, indices.tolist(), settings, on_error)
            tars[split].append(path)
            done += len(indices)
            report(done, total)
    return tars


def _publish(unfinished: Path, target: Path) -> None:
    """Makes the finished folder `unfinished` the data set `target`."""
    for temporary in unfinished.glob(".*.new"):  # of a call that was killed
        temporary.unlink()
    sync(unfinished)
    if target.exists():
        target.rmdir()  # it is empty
    unfinished.replace(target)
    for extra in ("plan.json", ".lock"):  # only now: without them another call would begin anew
        (target / extra).unlink()
    sync(target.parent)


def assign_to_shards(labels: Int[np.ndarray, " n"], shards: int, seed: int) -> list[Int[np.ndarray, " m"]]:
    """The indices of each shard's images, shuffled; the shards' counts of each class differ by at most one."""
    draws = philox(seed, Stream.SHARD_ASSIGNMENT).random_raw(2 * len(labels)).reshape(2, -1)
    shard = np.empty(len(labels), np.int64)
    shard[np.lexsort((draws[0], labels))] = np.arange(len(labels)) % shards  # class by class, in turn
    order = np.lexsort((draws[1], shard))
    return np.split(order, np.cumsum(np.bincount(shard, minlength=shards))[:-1])


def encode(dataset: Dataset, index: int, settings: ShardSettings) -> tuple[str, bytes]:
    """An image's suffix and bytes: as they are, or smaller. Raises `ImageError` for one that cannot be read."""
    image, buffer = dataset.image(index), io.BytesIO()
    if settings.size is not None and min(image.shape[:2]) > settings.size:
        scale = settings.size / min(image.shape[:2])
        height, width = (max(settings.size, round(side * scale)) for side in image.shape[:2])
        smaller = Image.fromarray(image).resize((width, height), Image.Resampling.LANCZOS)
        smaller.save(buffer, "JPEG", quality=settings.quality)
        return "jpg", buffer.getvalue()
    entry = dataset.entries[index] if dataset.entries else None
    # Encoded bytes are copied, but not for images in memory (size 0) or with a border to crop (ObjectNet).
    if entry is not None and not entry.is_in_memory and not entry.edge:
        data = entry.data()
        if suffix := SUFFIXES.get(Image.open(io.BytesIO(data)).format or ""):
            return suffix, data
    Image.fromarray(image).save(buffer, "PNG")
    return "png", buffer.getvalue()


def _write_tar(path: Path, dataset: Dataset, indices: list[int], settings: ShardSettings, on_error: str) -> None:
    with replacing_file(path) as file, ThreadPoolExecutor() as pool:  # Pillow releases Python's lock
        for start in range(0, len(indices), BUFFER):
            chunk = indices[start : start + BUFFER]
            futures = [pool.submit(encode, dataset, index, settings) for index in chunk]
            for index, future in zip(chunk, futures, strict=True):
                try:
                    image = future.result()
                except ImageError as error:
                    if on_error == "raise":
                        raise
                    logger.warning("%s (skipped, as on_error='skip')", error)
                    continue
                members = {"cls": str(int(dataset.labels[index])).encode()}
                if dataset.label_sets is not None:
                    members["labels.json"] = json.dumps(dataset.label_sets.of_image(index).tolist()).encode()
                for suffix, data in (*members.items(), image):
                    info = tarfile.TarInfo(f"{index:08d}.{suffix}")  # without time and owner
                    info.size = len(data)
                    file.write(info.tobuf(tarfile.USTAR_FORMAT) + data + tarfile.NUL * (-len(data) % tarfile.BLOCKSIZE))
        file.write(tarfile.NUL * 2 * tarfile.BLOCKSIZE)


def write_index(
    folder: Path,
    tars: Mapping[str, Sequence[Path]],
    classes: Sequence[str],
    images: Mapping[str, int],
    settings: dict[str, Any],
) -> None:
    """Scans the tars of each split, and writes `SPLIT.index.npz`, `classes.json`, SHA256SUMS (for `sha256sum --check`)
    and, last, `index.json` to `folder`. images: how many each split has, with those that could not be read."""
    shards, left_out = {}, {}
    for split, paths in tars.items():
        locations, labels = scan(paths)
        write_locations(folder / f"{split}.index.npz", locations, labels)
        shards[split] = tuple(map(File.of, paths, locations.records.tolist()))
        left_out[split] = images[split] - len(locations)
    write_bytes(folder / CLASSES, json.dumps(list(classes), ensure_ascii=False).encode())
    metadata = tuple(File.of(folder / name) for name in (*(f"{split}.index.npz" for split in tars), CLASSES))
    index = ShardIndex(shards, metadata, left_out, settings)
    sums = "".join(f"{file.sha256}  {name}\n" for name, file in index.files.items())
    write_bytes(folder / SUMS, sums.encode())
    write_bytes(folder / INDEX, index.to_json())


def _is_occupied(folder: Path) -> bool:
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def _fingerprint(split: str, dataset: Dataset) -> str:
    """A digest of a split's images and labels: tars of other ones are not reused."""
    labels = dataset.all_labels
    content = exact_fingerprint(split, dataset).encode() + labels.offsets.tobytes() + labels.values.tobytes()
    return hashlib.sha256(content).hexdigest()


def _prepare(unfinished: Path, full_plan: dict[str, Any]) -> None:
    """Leaves in `unfinished` what a call with the same settings and images has finished, and nothing else."""
    plan = unfinished / "plan.json"
    text = json.dumps(full_plan, indent=1).encode()
    if plan.is_file() and plan.read_bytes() == text:
        logger.warning("%s: resuming an interrupted call", unfinished)
        return
    for path in unfinished.iterdir():
        if path.name != ".lock":
            path.unlink()
    write_bytes(plan, text)


def _finished(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """The summary of the data set that is there already, if it was written with the same settings."""
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} is {'not empty' if folder.is_dir() else 'a file'}; give the name of a new folder.")
    existing = summary(folder)
    if differing := sorted(key for key in plan if existing["settings"].get(key) != plan[key]):
        raise UserError(
            f"{folder} already holds a data set in shards, written with other settings ({', '.join(differing)}); give "
            f"the name of a new folder, or remove it."
        )
    return existing


def summary(folder: Path) -> dict[str, Any]:
    """The images, tars, bytes and unreadable images of each split of a finished data set, and its settings."""
    index = read_index(folder / INDEX)
    splits = {
        split: {
            "images": sum(file.records for file in files),
            "shards": len(files),
            "bytes": sum(file.bytes for file in files),
            "unreadable": index.left_out.get(split, 0),
        }
        for split, files in index.shards.items()
    }
    return {"folder": str(folder), "splits": splits, "settings": index.settings}


def summary_as_text(result: dict[str, Any]) -> str:
    """A `summary` in a few lines, for people."""
    lines = [
        f"{split}: {part['images']:,} images in {part['shards']} shards, {part['bytes'] / 2**20:,.1f} MiB"
        + (f"; {part['unreadable']} could not be read" if part["unreadable"] else "")
        for split, part in result["splits"].items()
    ]
    return "\n".join([*lines, f"use it as shards:{result['folder']}"])
