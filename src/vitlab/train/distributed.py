"""Several processes in one job, as `torchrun` starts them: their collectives, and the end of all when one fails."""

import contextlib
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from vitlab.errors import RunError, UserError

JSON = TypeVar("JSON")
FAILED = "vitlab/failed"  # the store's key for the message of a rank that has failed
POLL = 0.02  # seconds between two checks whether another rank has failed
GRACE = 1.0  # seconds for messages that a rank has sent before it failed
EXIT_TIMEOUT = 5.0  # seconds that rank 0 waits for the others when all end
TIMEOUT = datetime.timedelta(days=30)  # of waiting for a rank that is alive: it may be downloading


class RankError(RunError):
    """Another rank of this job has failed, or is gone."""

    on_every_rank = True


@dataclass(eq=False)
class World:
    """This process among `world_size`. Without a store it is the only one, and every collective is the identity."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine."""
    store: Store | None = None
    host_group: dist.ProcessGroup | None = None
    """All ranks over gloo, with the timeout TIMEOUT. Device collectives (NCCL) have torch's default timeout."""
    broadcasts: int = 0
    """How many objects have been broadcast."""

    def device(self, requested: str) -> str:
        """The device of this rank: with several ranks `auto` and `cuda` mean a GPU per local rank, if there are any."""
        if self.world_size > 1 and requested in ("auto", "cuda") and torch.cuda.is_available():
            return f"cuda:{self.local_rank}"
        return requested

    @property
    def is_rank_0(self) -> bool:
        """Whether this is the rank that writes files and messages for all."""
        return self.rank == 0

    def check_peers(self) -> None:
        """Raises RankError if another rank has failed. Waits for nobody."""
        if self.store is None:
            return
        with _store_errors():
            failed = self.store.get(FAILED).decode() if self.store.check([FAILED]) else None
        if failed is not None:
            raise RankError(f"rank {self.rank} of {self.world_size} stops because another rank failed: {failed}")

    def check_batch_size(self, batch_size: int) -> None:
        """Raises UserError if the batch does not divide by the world size."""
        if batch_size % self.world_size:
            raise UserError(
                f"batch_size={batch_size} is the global batch of {self.world_size} processes; give a multiple of "
                f"{self.world_size}, or start another number of processes."
            )

    def broadcast_object(self, make: Callable[[], JSON]) -> JSON:
        """What `make()` returns on rank 0, as JSON data, on every rank. A barrier."""
        if self.store is None:
            return make()
        self.broadcasts += 1
        key = f"vitlab/broadcast/{self.broadcasts}"
        value = json.dumps(make()) if self.is_rank_0 else ""
        with _store_errors():
            if self.is_rank_0:
                self.store.set(key, value)
            self.barrier()
            return json.loads(self.store.get(key))

    def barrier(self) -> None:
        """Waits for all ranks. Raises RankError where one has failed or died."""
        self.all_reduce(0)

    @contextlib.contextmanager
    def rank_0_first(self) -> Iterator[None]:
        """The other ranks enter when rank 0 has left: it downloads, and they find the files."""
        if not self.is_rank_0:
            self.barrier()
        yield
        if self.is_rank_0:
            self.barrier()

    def all_reduce(self, *numbers: int) -> tuple[int, ...]:
        """The sums of the ranks' numbers, on every rank. Does not wait for the device's queue.

        Raises RankError where another rank has failed or died before it. Every exchange between devices, which could
        not be left again, is therefore preceded by one of these.
        """
        if self.store is None:
            return numbers
        sums = torch.tensor(numbers, dtype=torch.int64)
        work = dist.all_reduce(sums, group=self.host_group, async_op=True)
        assert work is not None
        waited, pause = 0.0, 1e-4
        while not work.is_completed():  # it also completes when the connection to a killed rank breaks
            time.sleep(pause)
            waited += pause
            if waited > POLL:
                pause = POLL
                try:
                    self.check_peers()
                except RankError:
                    time.sleep(GRACE)  # it may have failed after this exchange, whose result is on its way
                    if not work.is_completed():
                        raise
        work.wait()
        return tuple(sums.tolist())

    def all_reduce_mean(self, tensors: Iterable[Tensor]) -> None:
        """Replaces every tensor by the mean over ranks, in place, in one exchange on their device."""
        if self.store is None:
            return
        tensors = list(tensors)
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        flat /= self.world_size
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    def all_gather(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The rows of all ranks, rank after rank, on every rank.

        arrays: [n, ...] each, with one n, which may differ between ranks and be 0; the rest of shapes and types agree.
        """
        if self.store is None:
            return dict(arrays)
        self.barrier()
        counts = self._all_gather(np.array([len(next(iter(arrays.values())))]))
        longest = int(counts.max())
        gathered = {}
        for name, array in arrays.items():
            padded = np.zeros((longest, *array.shape[1:]), array.dtype)
            padded[: len(array)] = array
            shards = zip(self._all_gather(padded), counts, strict=True)
            gathered[name] = np.concatenate([rows[:count] for rows, (count,) in shards])
        return gathered

    def _all_gather(self, array: np.ndarray) -> np.ndarray:
        """Arrays of one shape from all ranks, stacked on a new first axis."""
        local = torch.from_numpy(array)
        shards = [torch.empty_like(local) for _ in range(self.world_size)]
        dist.all_gather(shards, local)
        return torch.stack(shards).numpy()

    @contextlib.contextmanager
    def _connection_errors(self) -> Iterator[None]:
        """Raises RankError where an exchange breaks off because another rank is gone."""
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            self.check_peers()
            raise RankError(
                f"rank {self.rank} of {self.world_size} stops because another rank is gone without a message (killed, "
                f"or out of memory?). Start the same command again: it continues from the last checkpoint."
            ) from error

    def _leave(self, message: str | None) -> None:
        """Publishes the `message` of a failure to the other ranks. Rank 0 may host the store: it waits for them."""
        assert self.store is not None
        with contextlib.suppress(dist.DistError):  # the holder of the store may be gone already
            if message is not None:
                self.store.set(FAILED, message)
            left = self.store.add("vitlab/left", 1)
            deadline = time.monotonic() + EXIT_TIMEOUT
            while self.is_rank_0 and left < self.world_size and time.monotonic() < deadline:
                time.sleep(POLL)
                left = self.store.add("vitlab/left", 0)


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise RankError(f"the process that holds the job's store is gone ({error}).") from error


SINGLE = World()


def world_from_environment() -> World:
    """The world that torchrun's variables describe; starts nothing. Raises UserError where some are missing."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        return SINGLE
    if missing := [name for name in names if name not in os.environ]:
        raise UserError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} requires {', '.join(missing)}, which is not set: start with "
            f"`torchrun --nproc-per-node {os.environ['WORLD_SIZE']} -m vitlab ...`, or unset WORLD_SIZE."
        )
    rank, world_size, local_rank = (int(os.environ[name]) for name in names[:3])
    return World(rank, world_size, local_rank)


@contextlib.contextmanager
def init_distributed() -> Iterator[World]:
    """The process group that torchrun has started, if any. An exception inside ends all other ranks as well."""
    world = world_from_environment()
    if world.world_size == 1:
        yield world
        return
    store, *_ = next(rendezvous("env://"))
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backends, store=store, rank=world.rank, world_size=world.world_size)
    world.store = store
    done = False
    try:
        with world._connection_errors():
            world.host_group = dist.new_group(backend="gloo", timeout=TIMEOUT)  # pyright: ignore[reportAttributeAccessIssue]
            yield world
            world.barrier()  # all leave together: rank 0 may hold the store, which the others still read
        done = True
    finally:
        error = sys.exception()
        if not done:
            world._leave(None if isinstance(error, RankError) else str(error) or type(error).__name__)
        dist.destroy_process_group()
