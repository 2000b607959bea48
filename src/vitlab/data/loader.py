"""Batches in an order that is a pure function of (seed, epoch, position).

Training examples are numbered by a counter g = 0, 1, 2, ... that runs on through all epochs; `example_at`
says which picture g is. A step takes the next `batch_size` of them, and rank r the r-th equal part of those,
so that a run can start at any example, on any number of ranks, and see what an uninterrupted run sees.
"""

import dataclasses
import itertools
import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor
from torch.utils.data import DataLoader

from vitlab.data.pictures import PictureError
from vitlab.data.sources import Dataset
from vitlab.data.transforms import EvalTransform, Pictures, TrainTransform, example_uniforms, pair, to_device

logger = logging.getLogger(__name__)

DRAWS = 4
"""The stream of `Batch.draws`: their counters (0, 0, 4, index) meet no other generator's."""

Request = tuple[np.ndarray, np.ndarray]  # epochs and dataset indices of one batch, int64 [B] each


@dataclasses.dataclass
class Batch:
    """Pictures in [-1, 1], their labels and their places in the set; `skipped` pictures could not be read.

    targets: all labels of each picture, where the set has several; `labels` is the first of them.
    draws: uniform numbers in [0, 1) of each example's own, as many as were asked for.
    """

    images: Float[Tensor, "B 3 H W"]
    labels: Int64[Tensor, " B"]
    indices: Int64[Tensor, " B"]
    skipped: int = 0
    targets: Bool[Tensor, "B K"] | None = None
    draws: Float64[Tensor, "B d"] | None = None

    def to(self, device: torch.device | str) -> "Batch":
        return self._each(lambda x: x.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        targets, draws = (None if each is None else change(each) for each in (self.targets, self.draws))
        return Batch(change(self.images), change(self.labels), change(self.indices), self.skipped, targets, draws)


# ----------------------------------------------------------------------------------------------------- order


def epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0..n-1, int64 [n].

    It sorts Philox's raw output, which is the same in every version of NumPy; the counter (0, 0, 1, 0) keeps
    it apart from the examples' own generators.
    """
    key, counter = np.array([seed, epoch], np.uint64), np.array([0, 0, 1, 0], np.uint64)
    draws = np.random.Philox(key=key, counter=counter).random_raw(n)
    return np.argsort(draws, kind="stable").astype(np.int64)


def example_at(n: int, seed: int, g: int) -> tuple[int, int]:
    """(epoch, dataset index) of the g-th training example."""
    epoch, position = divmod(g, n)
    return epoch, int(epoch_order(n, seed, epoch)[position])


def _train_requests(n: int, batch_size: int, seed: int, start: int, rank: int, world_size: int) -> Iterator[Request]:
    share = batch_size // world_size
    epoch, order = -1, np.empty(0, np.int64)
    for g in itertools.count(start + rank * share, batch_size):
        epochs, positions = np.divmod(np.arange(g, g + share), n)
        indices = np.empty(share, np.int64)
        for e in np.unique(epochs):
            if e != epoch:
                epoch, order = e, epoch_order(n, seed, int(e))
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
    pictures leave their batch, are counted in `Batch.skipped` and logged once. workers: processes that read
    pictures ahead; a set in memory needs none and uses none. draws: uniform numbers to bring with each example, which
    depend on (seed, epoch, index) alone.
    """
    _check(dataset, batch_size, rank, world_size, workers, on_error)
    if seed < 0 or start < 0:
        raise ValueError(f"seed and start must be 0 or more, not seed={seed}, start={start}")
    requests = _train_requests(len(dataset), batch_size, seed, start, rank, world_size)
    fetch = _Fetch(dataset, transform, seed, draws)
    return _batches(fetch, requests, workers, on_error, torch.device(device))


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
    `draws` are those of seed 0 and epoch 0, the same for a picture each time.
    """
    _check(dataset, batch_size, rank, world_size, workers, on_error)
    mine = np.arange(rank, len(dataset), world_size)
    share = batch_size // world_size
    requests = ((np.zeros_like(b), b) for b in (mine[i : i + share] for i in range(0, len(mine), share)))
    return _batches(_Fetch(dataset, transform, draws=draws), requests, workers, on_error, torch.device(device))


def _check(dataset: Dataset, batch_size: int, rank: int, world_size: int, workers: int, on_error: str) -> None:
    if batch_size < 1 or batch_size % world_size:
        raise ValueError(
            f"batch_size={batch_size} counts all ranks: give a positive multiple of their number {world_size}"
        )
    if not 0 <= rank < world_size or workers < 0:
        raise ValueError(
            f"rank must be 0 to {world_size - 1} and workers 0 or more, not rank={rank}, workers={workers}"
        )
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', not {on_error!r}")
    if not len(dataset):
        raise ValueError(f"{dataset.name} has no pictures in its split {dataset.split!r}")


@dataclasses.dataclass
class _Fetch:
    """Request -> batch, and the pictures that could not be read; runs in this process or in a worker."""

    dataset: Dataset
    transform: TrainTransform | EvalTransform
    seed: int = 0
    draws: int = 0
    pixels: Tensor | None = None  # the dataset's, on the device

    def __getitem__(self, request: Request) -> tuple[Batch, list[PictureError]]:
        epochs, indices = request
        pictures, failures = self._read(indices)
        if failures:
            good = np.array([int(i) not in failures for i in indices])
            epochs, indices = epochs[good], indices[good]
        if not len(indices):
            images = torch.empty(0, 3, *pair(self.transform.image_size))
        elif isinstance(self.transform, TrainTransform):
            images = self.transform.apply(pictures, self.seed, epochs, indices)
        else:
            images = self.transform.apply(pictures)
        labels, sets, targets = torch.from_numpy(self.dataset.labels[indices]), self.dataset.label_sets, None
        if sets is not None:
            targets = torch.from_numpy(sets.multi_hot(indices, len(self.dataset.classes)))
        draws = None
        if self.draws:
            draws = torch.from_numpy(example_uniforms(self.seed, epochs, indices, self.draws, DRAWS))
        batch = Batch(images, labels, torch.from_numpy(indices), len(failures), targets, draws)
        return batch, list(failures.values())

    def _read(self, indices: np.ndarray) -> tuple[Pictures, dict[int, PictureError]]:
        """The readable ones of the pictures `indices`, and the errors of the others."""
        if self.pixels is not None:
            known = self.dataset.failures
            failures = {int(i): known[int(i)] for i in indices if int(i) in known} if known else {}
            good = indices[[int(i) not in failures for i in indices]] if failures else indices
            return self.pixels[to_device(good, self.pixels.device)], failures
        pictures, failures = [], {}
        for i in indices.tolist():
            try:
                pictures.append(self.dataset.picture(i))
            except PictureError as error:
                failures[i] = error
        return pictures, failures


def _batches(
    fetch: _Fetch, requests: Iterator[Request], workers: int, on_error: str, device: torch.device
) -> Iterator[Batch]:
    fetched = map(fetch.__getitem__, requests)
    if fetch.dataset.pixels is not None:
        fetch.pixels = torch.from_numpy(fetch.dataset.pixels).to(device)
    elif workers:
        fetched = DataLoader(
            fetch,  # pyright: ignore[reportArgumentType]  # its keys are requests, not numbers
            sampler=requests,  # pyright: ignore[reportArgumentType]  # an iterator without a length
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_is,
            worker_init_fn=_leave_signals_to_the_run,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # else it would draw its workers' seeds from the default generator
        )
    told: set[str] = set()
    for batch, failures in fetched:
        for error in failures:
            if on_error == "raise":
                raise error
            if error.path not in told:
                told.add(error.path)
                logger.warning("%s (left out, as on_error='skip')", error)
        if not len(batch.labels) and isinstance(fetch.transform, TrainTransform):
            raise ValueError(f"none of the {batch.skipped} pictures of a batch can be read; one: {failures[0]}")
        yield batch.to(device)


def _leave_signals_to_the_run(_: int) -> None:
    """Ctrl-C reaches every process of a terminal: the run saves and ends its workers by SIGTERM, as ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _as_is(batch: Any) -> Any:
    return batch
