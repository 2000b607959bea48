"""Batches in an order that is a pure function of (seed, epoch, position).

Training examples are numbered by a counter g = 0, 1, 2, ... that runs on through all epochs; `example_at`
says which image g is. A step takes the next `batch_size` of them, and rank r the r-th equal part of those,
so that a run can start at any example, on any number of ranks, and see what an uninterrupted run sees.

Images in files are read by workers, in pieces of at most `PIECE` that are put together in order, so that all workers
have a part in a large batch and none holds much. What a GPU can do on a whole batch, it does: pieces come as crops
then, and RandAugment and the value range follow on the device.
"""

import contextlib
import dataclasses
import itertools
import logging
import signal
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor
from torch.utils.data import DataLoader

from vitlab.data.crops import Images, pair, to_device
from vitlab.data.dataset import Dataset, Entries, Request
from vitlab.data.decode import ImageError
from vitlab.data.transforms import EvalTransform, TrainTransform
from vitlab.errors import UserError
from vitlab.rng import Stream, example_uniforms, philox

logger = logging.getLogger(__name__)

PIECE = 64
"""Most images that a worker hands over at once: 9 MB of crops of 224 pixels."""


@dataclasses.dataclass
class Batch:
    """Images in [-1, 1], their labels and their places in the set; `skipped` images could not be read.

    targets: all labels of each image, where the set has several; `labels` is the first of them.
    draws: uniform numbers in [0, 1) of each example's own, as many as were asked for.
    Where none can be read of the share that one of several processes has of a training batch, a gray image stands in
    and is to count nothing: it has a label, but no place in the set, so that `indices` is empty.
    """

    images: Float[Tensor, "B 3 H W"]
    labels: Int64[Tensor, " B"]
    indices: Int64[Tensor, " n"]
    skipped: int = 0
    targets: Bool[Tensor, "B K"] | None = None
    draws: Float64[Tensor, "B d"] | None = None


# ----------------------------------------------------------------------------------------------------- order


def epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0..n-1, int64 [n]: the order that sorts n random numbers."""
    draws = philox(seed, Stream.EPOCH_ORDER, epoch).random_raw(n)
    return np.argsort(draws, kind="stable").astype(np.int64)


def example_at(dataset: Dataset, seed: int, g: int) -> tuple[int, int]:
    """(epoch, dataset index) of the g-th training example."""
    epoch, position = divmod(g, len(dataset))
    return epoch, int(_own_order(dataset, seed, epoch)[position])


def _own_order(dataset: Dataset, seed: int, epoch: int) -> np.ndarray:
    """The set's own order of an epoch where it has one, as where shards have to be fetched; else `epoch_order`."""
    order = dataset.entries.order(seed, epoch) if isinstance(dataset.entries, Entries) else None
    return epoch_order(len(dataset), seed, epoch) if order is None else order


def _train_requests(
    dataset: Dataset, batch_size: int, seed: int, start: int, rank: int, world_size: int
) -> Iterator[Request]:
    n, share = len(dataset), batch_size // world_size
    epoch, order = -1, np.empty(0, np.int64)
    for g in itertools.count(start + rank * share, batch_size):
        epochs, positions = np.divmod(np.arange(g, g + share), n)
        indices = np.empty(share, np.int64)
        for e in np.unique(epochs):
            if e != epoch:
                epoch, order = e, _own_order(dataset, seed, int(e))
            indices[epochs == e] = order[positions[epochs == e]]
        yield epochs, indices


# --------------------------------------------------------------------------------------------------- batches


def train_batches(
    dataset: Dataset,
    transform: TrainTransform,
    *,
    batch_size: int,
    seed: int,
    start: int = 0,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    on_error: str = "raise",
    device: torch.device | str = "cpu",
    draws: int = 0,
) -> Iterator[Batch]:
    """This rank's share of every global batch of `batch_size` examples, without end.

    start: the first example, counted over all epochs and ranks. on_error: "raise", or "skip": unreadable
    images leave their batch, are counted in `Batch.skipped` and logged once; a ValueError where none of a batch is
    left, or, of several ranks, a gray image for a share (see `Batch`). workers: processes that read
    images ahead; a set in memory needs none and uses none. draws: uniform numbers to bring with each example, which
    depend on (seed, epoch, index) alone.
    """
    _check(dataset, batch_size, rank, world_size, workers, on_error)
    if seed < 0 or start < 0:
        raise UserError(f"seed and start must be 0 or more, not seed={seed}, start={start}")
    if transform.fast and dataset.pixels is not None:
        raise UserError(f"fast decoding has no effect on {dataset.name}, whose images are in memory; leave it out")
    requests = _train_requests(dataset, batch_size, seed, start, rank, world_size)
    fetch = _Fetch(dataset, transform, seed, draws)
    share = batch_size // world_size
    return _batches(fetch, requests, share, workers, on_error, torch.device(device), whole=world_size == 1)


def eval_batches(
    dataset: Dataset,
    transform: EvalTransform,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    on_error: str = "raise",
    device: torch.device | str = "cpu",
    draws: int = 0,
) -> Iterator[Batch]:
    """Every example exactly once over all ranks, in the set's order; rank r takes r, r + world_size, ...

    The last batch is smaller, and a rank may have one batch fewer than another. Settings as for `train_batches`;
    `draws` are those of seed 0 and epoch 0, the same for a image each time.
    """
    _check(dataset, batch_size, rank, world_size, workers, on_error)
    mine = np.arange(rank, len(dataset), world_size)
    share = batch_size // world_size
    requests = ((np.zeros_like(b), b) for b in (mine[i : i + share] for i in range(0, len(mine), share)))
    return _batches(_Fetch(dataset, transform, draws=draws), requests, share, workers, on_error, torch.device(device))


def _check(dataset: Dataset, batch_size: int, rank: int, world_size: int, workers: int, on_error: str) -> None:
    if batch_size < 1 or batch_size % world_size:
        raise UserError(
            f"batch_size={batch_size} counts all ranks: give a positive multiple of their number {world_size}"
        )
    if not 0 <= rank < world_size or workers < 0:
        raise UserError(f"rank must be 0 to {world_size - 1} and workers 0 or more, not rank={rank}, workers={workers}")
    if on_error not in ("raise", "skip"):
        raise UserError(f"on_error must be 'raise' or 'skip', not {on_error!r}")
    if not len(dataset):
        raise UserError(f"{dataset.name} has no images in its split {dataset.split!r}")


class _Part(NamedTuple):
    """What is asked for at once: epochs and dataset indices, int64 [b], and whether more of the batch follows."""

    epochs: np.ndarray
    indices: np.ndarray
    more: bool


class _Piece(NamedTuple):
    """The images that could be read, finished or as crops; how many could not, and why."""

    part: _Part  # what is left of it
    images: Shaped[Tensor, "b 3 H W"]
    skipped: int
    failures: list[ImageError]


def _parts(requests: Iterable[Request], size: int) -> Iterator[_Part]:
    """Every request in parts of `size` images, the last of them smaller."""
    for epochs, indices in requests:
        for i in range(0, len(indices), size):
            yield _Part(epochs[i : i + size], indices[i : i + size], more=i + size < len(indices))


@dataclasses.dataclass
class _Fetch:
    """Part -> piece, in this process or in a worker."""

    dataset: Dataset
    transform: TrainTransform | EvalTransform
    seed: int = 0
    draws: int = 0
    pixels: Tensor | None = None  # the dataset's, on the device
    finishes: bool = True  # training images, as against leaving that to the device

    def __getitem__(self, part: _Part) -> _Piece:
        asked, failures = len(part.indices), dict[int, ImageError]()
        while True:
            if failures:
                good = np.array([i not in failures for i in part.indices.tolist()], bool)
                part = part._replace(epochs=part.epochs[good], indices=part.indices[good])
            decoded, unread = self._read(part.indices)
            failures |= unread
            if unread:
                continue
            try:
                images = self._images(decoded, part)
            except ImageError as error:  # damage that shows only when pixels are asked for
                damaged = {i: error for i in part.indices.tolist() if self.dataset.path(i) == error.path}
                if not damaged:
                    raise
                failures |= damaged
            else:
                return _Piece(part, images, asked - len(part.indices), list(failures.values()))

    def _read(self, indices: np.ndarray) -> tuple[Images, dict[int, ImageError]]:
        """The images `indices`, and the errors of those that cannot be read."""
        if self.pixels is not None:
            known = self.dataset.failures
            failures = {i: known[i] for i in indices.tolist() if i in known} if known else {}
            return self.pixels[to_device(indices, self.pixels.device)], failures
        decoded, failures = [], {}
        whole = isinstance(self.transform, EvalTransform)
        for i in indices.tolist():
            try:
                decoded.append(self.dataset.image(i) if whole else self.dataset.entries[i].open())
            except ImageError as error:
                failures[i] = error
        return decoded, failures

    def _images(self, decoded: Images, part: _Part) -> Tensor:
        if not len(part.indices):
            return torch.empty(0, 3, *pair(self.transform.image_size))
        if isinstance(self.transform, EvalTransform):
            return self.transform.apply(decoded)
        crops = self.transform.cut(decoded, self.seed, part.epochs, part.indices)
        return self.transform.finish(crops, self.seed, part.epochs, part.indices) if self.finishes else crops


def _batches(
    fetch: _Fetch,
    requests: Iterator[Request],
    share: int,
    workers: int,
    on_error: str,
    device: torch.device,
    whole: bool = True,
) -> Iterator[Batch]:
    dataset = fetch.dataset
    if isinstance(dataset.entries, Entries):
        requests = dataset.entries.read_ahead(requests)
    if dataset.pixels is not None:
        fetch.pixels = torch.from_numpy(dataset.pixels).to(device)
        pieces = (fetch[part] for part in _parts(requests, share))
    else:
        fetch.finishes = device.type == "cpu" or isinstance(fetch.transform, EvalTransform)
        parts = _parts(requests, PIECE)
        pieces = _from_workers(fetch, parts, share, workers) if workers else (fetch[part] for part in parts)
    join, told, batch = _Join(fetch, device, whole), set[str](), list[_Piece]()
    with contextlib.closing(pieces):  # so that workers end with the stream, and not when an error is forgotten
        for piece in pieces:
            for error in piece.failures:
                if on_error == "raise":
                    raise error
                if error.path not in told:
                    told.add(error.path)
                    logger.warning("%s (left out, as on_error='skip')", error)
            batch.append(piece)
            if not piece.part.more:
                yield join(batch)
                batch.clear()


def _from_workers(fetch: _Fetch, parts: Iterator[_Part], share: int, workers: int) -> Generator[_Piece, None, None]:
    """The pieces of `share` images a batch, in order, a batch ahead or two pieces a worker if that is more."""
    loader = DataLoader(
        fetch,  # pyright: ignore[reportArgumentType]  # its keys are parts, not numbers
        sampler=parts,  # pyright: ignore[reportArgumentType]  # an iterator without a length
        batch_size=None,
        num_workers=workers,
        prefetch_factor=max(2, -(-share // (PIECE * workers))),
        collate_fn=_as_is,
        worker_init_fn=_leave_signals_to_the_run,
        generator=torch.Generator(),  # else it would draw its workers' seeds from the default generator
    )
    # On the death of a worker torch would raise an error in the midst of whatever the run does. It is seen here too.
    told = hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGCHLD) if told else None
    pieces = iter(loader)
    if handler is not None:
        signal.signal(signal.SIGCHLD, handler)
    try:
        yield from pieces
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise UserError(
            f"a process that reads images was killed ({error}), most likely for want of memory. Take fewer of them "
            f"(data.workers is {workers}), or give the container more shared memory (--shm-size=8g)."
        ) from error
    finally:
        del pieces  # ends the workers


def _leave_signals_to_the_run(_: int) -> None:
    """Ctrl-C reaches every process of a terminal: the run saves and ends its workers by SIGTERM, as ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _as_is(batch: Any) -> Any:
    return batch


@dataclasses.dataclass
class _Join:
    """Pieces -> batch on the device. On a GPU, copies pass beside the work that is under way there."""

    fetch: _Fetch
    device: torch.device
    whole: bool = True  # and not the share of one of several processes

    def __post_init__(self) -> None:
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def __call__(self, pieces: list[_Piece]) -> Batch:
        dataset, fetch = self.fetch.dataset, self.fetch
        epochs, indices = (np.concatenate([getattr(p.part, name) for p in pieces]) for name in ("epochs", "indices"))
        skipped = sum(piece.skipped for piece in pieces)
        if not len(indices) and isinstance(fetch.transform, TrainTransform):
            if not self.whole:
                return self._stand_in(skipped)
            first = pieces[0].failures[0]
            raise UserError(f"none of the {skipped} images of a batch can be read; one: {first}")
        images = self._images([piece.images for piece in pieces if len(piece.images)] or [pieces[0].images])
        if not fetch.finishes:
            assert isinstance(fetch.transform, TrainTransform)
            images = fetch.transform.finish(images, fetch.seed, epochs, indices)
        targets = draws = None
        if dataset.label_sets is not None:
            targets = to_device(dataset.label_sets.multi_hot(indices, len(dataset.classes)), self.device)
        if fetch.draws:
            draws = to_device(
                example_uniforms(fetch.seed, epochs, indices, fetch.draws, Stream.EXAMPLE_DRAWS), self.device
            )
        labels = to_device(dataset.labels[indices], self.device)
        return Batch(images, labels, to_device(indices, self.device), skipped, targets, draws)

    def _stand_in(self, skipped: int) -> Batch:
        """A gray image: a process without any could not take its part in what all compute together."""
        dataset, count, device = self.fetch.dataset, self.fetch.draws, self.device
        images = torch.zeros(1, 3, *pair(self.fetch.transform.image_size), device=device)
        labels = torch.zeros(1, dtype=torch.int64, device=device)
        targets = None if dataset.label_sets is None else torch.ones(1, len(dataset.classes), device=device).bool()
        draws = torch.zeros(1, count, dtype=torch.float64, device=device) if count else None
        return Batch(images, labels, labels[:0], skipped, targets, draws)

    def _images(self, parts: list[Tensor]) -> Tensor:
        """All parts in one, on the device."""
        if self.stream is None or parts[0].is_cuda:
            return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self.device)
        shape = (sum(map(len, parts)), *parts[0].shape[1:])
        # torch keeps pinned memory, and gives it out again when the copy from it is over: two batches take turns.
        pinned = torch.empty(shape, dtype=parts[0].dtype, pin_memory=True)
        torch.cat(parts, out=pinned)
        work = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            images = pinned.to(self.device, non_blocking=True)
        work.wait_stream(self.stream)
        images.record_stream(work)
        return images
