"""Several processes in one job, as `torchrun` starts them: their collectives, and the end of all when one fails."""

import contextlib
import datetime
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vitlab.errors import RunError, UserError
from vitlab.ranks import MAX_PORT, rank_number, world_size

JSON = TypeVar("JSON")
TIMEOUT = datetime.timedelta(days=30)  # of waiting for a rank that is alive: it may be downloading


class RankError(RunError):
    """Another rank of this job has failed, or is gone."""

    on_every_rank = True


@dataclass(eq=False)
class World:
    """This process among `world_size`. Without a group it is the only one, and every collective is the identity.

    Every collective raises RankError where another rank has failed or died.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine."""
    host_group: dist.ProcessGroup | None = None
    """All ranks over gloo, with the timeout TIMEOUT. Device collectives (NCCL) have torch's default timeout."""

    def device(self, requested: str) -> str:
        """The device of this rank: with several ranks `auto` and `cuda` mean a GPU per local rank, if there are any."""
        if self.world_size > 1 and requested in ("auto", "cuda") and torch.cuda.is_available():
            return f"cuda:{self.local_rank}"
        return requested

    @property
    def is_rank_0(self) -> bool:
        """Whether this is the rank that writes files and messages for all."""
        return self.rank == 0

    def check_batch_size(self, batch_size: int) -> None:
        """Raises UserError if the batch does not divide by the world size."""
        if batch_size % self.world_size:
            raise UserError(
                f"batch_size={batch_size} is the global batch of {self.world_size} processes; give a multiple of "
                f"{self.world_size}, or start another number of processes."
            )

    def broadcast_object(self, make: Callable[[], JSON]) -> JSON:
        """What `make()` returns on rank 0, as JSON data, on every rank. A barrier."""
        if self.host_group is None:
            return make()
        data = json.dumps(make()).encode() if self.is_rank_0 else b""
        (size,) = self.all_reduce(len(data))
        content = torch.tensor(list(data or bytes(size)), dtype=torch.uint8)
        dist.broadcast(content, src=0, group=self.host_group)
        return json.loads(bytes(content.tolist()))

    def barrier(self) -> None:
        """Waits for all ranks."""
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

        One of these precedes every exchange between devices, which would wait forever for a rank that has failed.
        """
        sums = torch.tensor(numbers, dtype=torch.int64)
        if self.host_group is not None:
            dist.all_reduce(sums, group=self.host_group)
        return tuple(sums.tolist())

    def all_reduce_mean(self, tensors: Iterable[Tensor]) -> None:
        """Replaces every tensor by the mean over ranks, in place, in one exchange on their device."""
        if self.host_group is None:
            return
        tensors = list(tensors)
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        flat /= self.world_size
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    @torch.no_grad()
    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Replaces every tensor by rank 0's, in place, on their device."""
        if self.host_group is not None:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def all_gather(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The rows of all ranks, rank after rank, on every rank.

        arrays: [n, ...] each, with one n, which may differ between ranks and be 0; the rest of shapes and types agree.
        """
        if self.host_group is None:
            return dict(arrays)
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
        dist.all_gather(shards, local, group=self.host_group)
        return torch.stack(shards).numpy()


SINGLE = World()


def world_from_environment() -> World:
    """The world that torchrun's variables describe; starts nothing. Raises UserError where some are missing."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if (size := world_size()) == 1:
        return SINGLE
    if missing := [name for name in names if name not in os.environ]:
        raise UserError(
            f"WORLD_SIZE={size} requires {', '.join(missing)}, which is not set: start with "
            f"`torchrun --nproc-per-node {size} -m vitlab ...`, or unset WORLD_SIZE."
        )
    rank_number("MASTER_PORT", 1, MAX_PORT)
    return World(rank_number("RANK", 0, size - 1), size, rank_number("LOCAL_RANK", 0, size - 1))


@contextlib.contextmanager
def init_distributed() -> Iterator[World]:
    """The process group that torchrun has started, if any.

    A rank that fails inside closes its connections, which ends all others with RankError at their next exchange.
    """
    world = world_from_environment()
    if world.world_size == 1:
        yield world
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    try:
        dist.init_process_group(backend)
    except dist.DistError as error:
        raise UserError(
            f"rank {world.rank} cannot join the others at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} "
            f"(MASTER_ADDR and MASTER_PORT): {str(error).splitlines()[0]}. Give an address and a free port of the "
            f"machine of rank 0."
        ) from error
    try:
        world.host_group = dist.new_group(backend="gloo", timeout=TIMEOUT)  # pyright: ignore[reportAttributeAccessIssue]
        yield world
        world.barrier()  # all leave together: the other ranks may still read from the store of rank 0
    except RuntimeError as error:
        if isinstance(error, RunError) or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise RankError(
            f"rank {world.rank} of {world.world_size} stops because another rank has failed, with its own message, or "
            f"was killed. Run the same command to resume from the last checkpoint."
        ) from error
    finally:
        dist.destroy_process_group()
