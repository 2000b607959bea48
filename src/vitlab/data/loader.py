"""Batches in an order that is a pure function of (seed, epoch, position).

Training examples are numbered g = 0, 1, 2, ... through all epochs, each in its `epoch_order`. A step takes the next
`batch_size` of them, and rank r the r-th equal part of those, so that a run can resume at any example, on any number of
ranks. Images in files are read by workers in chunks of at most `CHUNK`, which are joined in order, so that all workers
share a large batch.
"""

import contextlib
import dataclasses
import itertools
import logging
import signal
import threading
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor
from torch.utils.data import DataLoader

from vitlab.data.dataset import BatchIndices, Dataset, Entries
from vitlab.data.decode import ImageError
from vitlab.data.resize import to_device
from vitlab.data.transforms import EvalTransform, Images, TrainTransform, to_range
from vitlab.data.workers import in_threads, num_workers, read_threads
from vitlab.errors import UserError
from vitlab.preprocessing import pair
from vitlab.rng import Stream, example_uniforms, philox

logger = logging.getLogger(__name__)

CHUNK = 64  # images that a worker returns at a time: 9 MB of crops of 224 pixels


@dataclasses.dataclass
class Batch:
    """Images in [-1, 1], their labels, and their indices in the set."""

    images: Float[Tensor, "B 3 H W"]
    labels: Int64[Tensor, " B"]  # the first ones, if the set has several
    indices: Int64[Tensor, " B"]
    skipped: int = 0  # images of the batch that could not be read
    targets: Bool[Tensor, "B K"] | None = None  # all labels of each image, if the set has several
    uniforms: Float64[Tensor, "B d"] | None = None
    """Random numbers in [0, 1), a function of seed, epoch and index."""


def epoch_order(dataset: Dataset, seed: int, epoch: int) -> Int64[np.ndarray, " n"]:
    """A permutation of 0..n-1: the entries' own if they have one, as shards at an address do."""
    order = dataset.entries.order(seed, epoch) if isinstance(dataset.entries, Entries) else None
    if order is not None:
        return order
    return np.argsort(philox(seed, Stream.EPOCH_ORDER, epoch).random_raw(len(dataset)), kind="stable").astype(np.int64)


def train_batches(
    dataset: Dataset,
    transform: TrainTransform,
    *,
    batch_size: int,
    seed: int,
    first_example: int = 0,
    rank: int = 0,
    world_size: int = 1,
    workers: int | None = None,
    on_error: str = "raise",
    device: torch.device | str = "cpu",
    num_uniforms: int = 0,
) -> Iterator[Batch]:
    """Infinite iterator over this rank's shard of each global batch of `batch_size` examples.

    first_example: where to start, counted over all epochs and ranks. on_error: "raise", or "skip": unreadable images
    are counted in `Batch.skipped` and logged once; UserError if none of a rank's batch is left.
    workers: DataLoader workers (default: `num_workers`); a set in memory uses none. num_uniforms: the length of an
    image's `Batch.uniforms`.
    """
    local = batch_size // world_size
    if transform.fast_decode and dataset.pixels is not None:
        raise UserError(f"fast decoding has no effect on {dataset.name}, whose images are in memory; leave it out")

    def batches() -> Iterator[BatchIndices]:
        epoch, order = -1, np.empty(0, np.int64)
        for g in itertools.count(first_example + rank * local, batch_size):  # this rank's first example of each step
            epochs, positions = np.divmod(np.arange(g, g + local), len(dataset))
            indices = np.empty(local, np.int64)
            for e in np.unique(epochs):
                if e != epoch:
                    epoch, order = e, epoch_order(dataset, seed, int(e))
                indices[epochs == e] = order[positions[epochs == e]]
            yield epochs, indices

    loader = _BatchLoader(dataset, transform, torch.device(device), seed, num_uniforms)
    return loader.load(batches(), local, workers, on_error)


def eval_batches(
    dataset: Dataset,
    transform: EvalTransform | TrainTransform,
    *,
    batch_size: int,
    epoch: int = 0,
    indices: np.ndarray | None = None,
    workers: int | None = None,
    on_error: str = "raise",
    device: torch.device | str = "cpu",
    num_uniforms: int = 0,
) -> Iterator[Batch]:
    """The examples `indices` (default: all in the set's order), each once. The last batch may be smaller.

    Settings as for `train_batches`; augmentation and `uniforms` are drawn for seed 0 and `epoch`, so that an image
    always has the same.
    """
    indices = np.arange(len(dataset)) if indices is None else indices
    chunks = (indices[i : i + batch_size] for i in range(0, len(indices), batch_size))
    loader = _BatchLoader(dataset, transform, torch.device(device), 0, num_uniforms)
    return loader.load(((np.full_like(b, epoch), b) for b in chunks), batch_size, workers, on_error)


class _ChunkIndices(NamedTuple):
    """A part of a batch."""

    epochs: np.ndarray  # int64 [b]
    indices: np.ndarray  # int64 [b], in the data set
    more: bool  # whether more of the batch follows


class _Chunk(NamedTuple):
    """The images of a chunk that could be read, with values in [0, 255]."""

    key: _ChunkIndices  # without the unreadable images
    images: Shaped[Tensor, "b 3 H W"]
    failures: list[ImageError]  # one for each image that could not be read


_Loaded = tuple[Tensor | None, dict[int, ImageError]]
"""Transformed images, or None and the errors of those that cannot be read, by index."""


@dataclasses.dataclass
class _ChunkDataset:
    """Map-style dataset whose keys are chunks of indices; in this process or in a worker."""

    dataset: Dataset
    transform: TrainTransform | EvalTransform
    seed: int
    pixels: Tensor | None  # the dataset's, on the device

    def __getitem__(self, chunk: _ChunkIndices) -> _Chunk:
        """The images are transformed together. If one turns out unreadable, the others are loaded again without it."""
        failures = dict(self.dataset.failures)
        while True:  # each time without the images that have failed
            readable = np.array([i not in failures for i in chunk.indices.tolist()], bool)
            epochs, indices = chunk.epochs[readable], chunk.indices[readable]
            images, failed = self._load(epochs, indices)
            if images is not None:
                unreadable = [failures[i] for i in chunk.indices.tolist() if i in failures]
                return _Chunk(chunk._replace(epochs=epochs, indices=indices), images, unreadable)
            failures |= failed

    def _load(self, epochs: np.ndarray, indices: np.ndarray) -> _Loaded:
        """The transformed images `indices`, in equal parts by `_threads`."""
        parts = np.array_split(np.arange(len(indices)), max(min(self._threads, len(indices)), 1))
        loaded = in_threads(lambda part: self._load_part(epochs[part], indices[part]), parts)
        if failed := {i: error for _, errors in loaded for i, error in errors.items()}:
            return None, failed
        return torch.cat([images for images, _ in loaded if images is not None]), {}

    @property
    def _threads(self) -> int:
        """How many threads read: one for images in memory, and for augmentation, which may set torch's generator."""
        return 1 if self.pixels is not None or isinstance(self.transform, TrainTransform) else read_threads()

    def _load_part(self, epochs: np.ndarray, indices: np.ndarray) -> _Loaded:
        """`_load` in this thread."""
        images, failed = self._read(indices)
        if failed:
            return None, failed
        if not len(indices):
            return torch.empty(0, 3, *pair(self.transform.image_size)), {}
        if isinstance(self.transform, EvalTransform):
            return self.transform.resize(images), {}
        try:
            crops = self.transform.augment(images, self.seed, epochs, indices)
        except ImageError as error:  # corruption that shows only when a JPEG's pixels are decoded
            failed = {i: error for i in indices.tolist() if self.dataset.path(i) == error.path}
            if not failed:
                raise
            return None, failed
        # Whole gray levels are a quarter of the bytes from a worker to the device, which else limit a GPU's speed.
        return crops if self.pixels is not None else crops.round_().to(torch.uint8), {}

    def _read(self, indices: np.ndarray) -> tuple[Images, dict[int, ImageError]]:
        """The images `indices`, and the errors of those that cannot be read."""
        if self.pixels is not None:
            return self.pixels[to_device(indices, self.pixels.device)], {}
        dataset, images, failed = self.dataset, [], {}
        keep_encoded = isinstance(self.transform, TrainTransform)
        for i in indices.tolist():
            try:
                images.append(dataset.entries[i].open(dataset.levels) if keep_encoded else dataset.image(i))
            except ImageError as error:
                failed[i] = error
        return images, failed


@dataclasses.dataclass
class _BatchLoader:
    """Reads batches, in chunks, and moves them to the device."""

    dataset: Dataset
    transform: TrainTransform | EvalTransform
    device: torch.device
    seed: int
    num_uniforms: int

    def __post_init__(self) -> None:
        if not len(self.dataset):
            raise UserError(f"{self.dataset.name} has no images in its split {self.dataset.split!r}")
        self.copy_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def load(self, batches: Iterator[BatchIndices], size: int, requested: int | None, on_error: str) -> Iterator[Batch]:
        dataset, pixels = self.dataset, None
        workers = num_workers(requested, self.device)
        if isinstance(dataset.entries, Entries):
            batches = dataset.entries.read_ahead(batches)
        if dataset.pixels is not None:
            pixels, workers = torch.from_numpy(dataset.pixels).to(self.device), 0
        reader = _ChunkDataset(dataset, self.transform, self.seed, pixels)
        step = CHUNK if pixels is None else size  # the last chunk of a batch may be smaller
        keys = (
            _ChunkIndices(epochs[i : i + step], indices[i : i + step], more=i + step < len(indices))
            for epochs, indices in batches
            for i in range(0, len(indices), step)
        )
        chunks = _from_workers(reader, keys, size, workers) if workers else (reader[key] for key in keys)
        logged = set[str]()
        batch = list[_Chunk]()
        with contextlib.closing(chunks):  # so that workers end with the iterator, not when an error is forgotten
            for chunk in chunks:
                for error in chunk.failures:
                    if on_error == "raise":
                        raise error
                    if error.path not in logged:
                        logged.add(error.path)
                        logger.warning("%s (skipped, as on_error='skip')", error)
                batch.append(chunk)
                if not chunk.key.more:
                    yield self._join(batch)
                    batch.clear()

    def _join(self, chunks: list[_Chunk]) -> Batch:
        dataset = self.dataset
        epochs = np.concatenate([chunk.key.epochs for chunk in chunks])
        indices = np.concatenate([chunk.key.indices for chunk in chunks])
        skipped = sum(len(chunk.failures) for chunk in chunks)
        if isinstance(self.transform, TrainTransform) and not len(indices):
            raise UserError(f"none of the {skipped} images of a batch can be read; one: {chunks[0].failures[0]}")
        images = self._to_device([chunk.images for chunk in chunks if len(chunk.images)] or [chunks[0].images])
        targets = uniforms = None
        if dataset.label_sets is not None:
            targets = to_device(dataset.label_sets.multi_hot(indices, len(dataset.classes)), self.device)
        if self.num_uniforms:
            draws = example_uniforms(self.seed, epochs, indices, self.num_uniforms, Stream.EXAMPLE_DRAWS)
            uniforms = to_device(draws, self.device)
        labels, numbers = (to_device(array, self.device) for array in (dataset.labels[indices], indices))
        return Batch(to_range(images), labels, numbers, skipped, targets, uniforms)

    def _to_device(self, chunks: list[Tensor]) -> Tensor:
        """The concatenated chunks on the device; copies to a GPU overlap with its work."""
        if self.copy_stream is None or chunks[0].is_cuda:
            return (chunks[0] if len(chunks) == 1 else torch.cat(chunks)).to(self.device)
        shape = (sum(map(len, chunks)), *chunks[0].shape[1:])
        # torch caches pinned memory and reuses it once the copy from it is done.
        pinned = torch.empty(shape, dtype=chunks[0].dtype, pin_memory=True)
        torch.cat(chunks, out=pinned)
        compute_stream = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.copy_stream):
            images = pinned.to(self.device, non_blocking=True)
        compute_stream.wait_stream(self.copy_stream)
        images.record_stream(compute_stream)
        return images


def _from_workers(
    reader: _ChunkDataset, keys: Iterator[_ChunkIndices], size: int, workers: int
) -> Generator[_Chunk, None, None]:
    """The chunks of batches of `size`, in order, a batch ahead or two chunks a worker if that is more."""
    loader = DataLoader(
        reader,  # pyright: ignore[reportArgumentType]  # its keys are not numbers
        sampler=keys,  # pyright: ignore[reportArgumentType]  # an iterator without a length
        batch_size=None,
        num_workers=workers,
        prefetch_factor=max(2, -(-size // (CHUNK * workers))),
        collate_fn=_unchanged,
        worker_init_fn=_leave_signals_to_the_run,
        generator=torch.Generator(),  # else it would draw its workers' seeds from the default generator
    )
    # When a worker dies, torch's handler would raise in the middle of whatever the run does. The loop notices too.
    replaced = hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGCHLD) if replaced else None
    chunks = iter(loader)
    if handler is not None:
        signal.signal(signal.SIGCHLD, handler)
    try:
        yield from chunks
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise UserError(
            f"a DataLoader worker was killed, most likely out of memory ({error}). Reduce data.workers (now "
            f"{workers}) or increase shared memory (--shm-size=8g)."
        ) from error
    finally:
        del chunks  # ends the workers


def _leave_signals_to_the_run(_: int) -> None:
    """Ctrl-C reaches every process of a terminal: the run saves and ends its workers by SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _unchanged(chunk: Any) -> Any:
    return chunk
