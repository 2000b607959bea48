"""Several processes at one job: which one this is, gathering what each has found, and ending all when one fails.

The only file that imports torch.distributed. The processes are started by `torchrun`; each finds its number in the
environment and meets the others through torchrun's key-value store.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

FAILED = "vitlab/failed"  # the key under which a failing process leaves its last words
PATIENCE = 0.02  # seconds between two looks whether the others have come
FAREWELL = 5.0  # seconds that the first process waits for the others when all ends


class RankError(RuntimeError):
    """Another process of this job has failed, or is gone."""


@dataclass
class Ranks:
    """This process among `world_size`; without a store it is alone."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Number among the processes of this machine."""
    store: Store | None = None
    meetings: int = 0

    def device(self, asked: str) -> str:
        """The device of this process: `auto` and `cuda` stand for one GPU each, in order, where there are GPUs."""
        if self.world_size > 1 and asked in ("auto", "cuda") and torch.cuda.is_available():
            return f"cuda:{self.local_rank}"
        return asked

    def check(self) -> None:
        """Raises RankError if another process has failed. Waits for nobody."""
        if self.store is None:
            return
        with _the_store_there():
            failed = self.store.get(FAILED).decode() if self.store.check([FAILED]) else None
        if failed:
            raise RankError(f"this process ({self.rank} of {self.world_size}) ends, for another failed: {failed}")

    def gather(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The rows of all processes, rank after rank, on every process; counts of rows may differ, and be 0.

        `arrays` have the same number of rows [n, ...]; names, types and further axes are the same everywhere. Raises
        RankError where another process has failed instead of coming here, however long the others wait.
        """
        if self.store is None:
            return dict(arrays)
        self._meet()
        counts = self._all_gather(np.array([len(next(iter(arrays.values())))]))
        most = int(counts.max())
        gathered = {}
        for name, array in arrays.items():
            padded = np.zeros((most, *array.shape[1:]), array.dtype)
            padded[: len(array)] = array
            every = self._all_gather(padded)
            gathered[name] = np.concatenate([rows[:count] for rows, (count,) in zip(every, counts, strict=True)])
        return gathered

    def _all_gather(self, array: np.ndarray) -> np.ndarray:
        """Arrays of one shape from all ranks, on a new first axis."""
        own = torch.from_numpy(array)
        every = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(every, own)
        return torch.stack(every).numpy()

    def _meet(self) -> None:
        """Waits until every process has come; a collective that one of them never enters could not be left again."""
        assert self.store is not None
        self.meetings += 1
        place = f"vitlab/meeting/{self.meetings}"
        with _the_store_there():
            came = self.store.add(place, 1)
            while came < self.world_size:
                self.check()
                time.sleep(PATIENCE)
                came = self.store.add(place, 0)


@contextlib.contextmanager
def _the_store_there() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise RankError(f"the process that keeps the others together is gone ({error}).") from error


def _leave(ranks: Ranks) -> None:
    """The first process may keep the store: it stays for a moment, until the others have heard why all ends."""
    assert ranks.store is not None
    left = ranks.store.add("vitlab/left", 1)
    until = time.monotonic() + FAREWELL
    while ranks.rank == 0 and left < ranks.world_size and time.monotonic() < until:
        time.sleep(PATIENCE)
        left = ranks.store.add("vitlab/left", 0)


ALONE = Ranks()


def environment() -> Ranks:
    """What torchrun says of this process; nothing is started. Raises ValueError where it says half of it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        return Ranks()
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} asks for several processes and {', '.join(missing)} is not set: "
            f"start them with `torchrun --nproc-per-node {os.environ['WORLD_SIZE']} -m vitlab ...`, or unset it."
        )
    rank, world_size, local_rank = (int(os.environ[name]) for name in names[:3])
    return Ranks(rank, world_size, local_rank)


@contextlib.contextmanager
def together() -> Iterator[Ranks]:
    """This process among its fellows, if torchrun started any. What is raised inside ends the others as well."""
    here = environment()
    if here.world_size == 1:
        yield here
        return
    store, *_ = next(rendezvous("env://"))
    dist.init_process_group("gloo", store=store, rank=here.rank, world_size=here.world_size)
    here.store = store
    done = False
    try:
        yield here
        done = True
    finally:
        error = sys.exception()
        if not done:
            with contextlib.suppress(dist.DistError):  # the keeper of the store may be gone already
                if not isinstance(error, RankError):
                    store.set(FAILED, f"{error or type(error).__name__}")
                _leave(here)
        dist.destroy_process_group()
