"""Processes on the loopback device: their collectives, and how all end when one fails."""

import datetime
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vitlab.errors import RunError
from vitlab.train import distributed
from vitlab.train.distributed import SINGLE, RankError, World, init_distributed

InRanks = Callable[[int, Callable[[], Any]], list[Any]]
COUNTS = (3, 0, 5)  # rows of each rank


def rows(rank: int) -> dict[str, np.ndarray]:
    """Arrays of every kind, with as many rows as the rank has."""
    count = COUNTS[rank]
    return {
        "numbers": np.arange(count) + 100 * rank,
        "correct": np.arange(count) % 2 == rank % 2,
        "features": np.full((count, 2, 3), rank + 0.5, np.float32),
    }


def test_collectives(in_ranks: InRanks) -> None:
    """Rows are gathered in the order of ranks; all ranks have the same results."""

    def job() -> tuple[Any, ...]:
        with init_distributed() as world:
            gathered = world.all_gather(rows(world.rank))
            empty = world.all_gather({"x": np.empty((0, 4), np.float32)})["x"]
            shared = world.broadcast_object(lambda: {"rank": world.rank})
            arrays = world.all_gather({n: a if world.is_rank_0 else a[:0] for n, a in rows(2).items()})
            sums = world.all_reduce(world.rank == 1, 10 * world.rank)
            tensors = [torch.full((2, 2), float(world.rank)), torch.tensor(4.0)]
            world.all_reduce_mean(tensors)
            return gathered, empty, arrays, shared, sums, [tensor.tolist() for tensor in tensors]

    expected = {name: np.concatenate([rows(rank)[name] for rank in range(3)]) for name in rows(0)}
    for gathered, empty, arrays, *rest in in_ranks(3, job):
        assert arrays.keys() == expected.keys()
        for name, array in rows(2).items():
            np.testing.assert_array_equal(arrays[name], array)
            assert arrays[name].dtype == array.dtype
        for name, array in expected.items():
            np.testing.assert_array_equal(gathered[name], array)
            assert gathered[name].dtype == array.dtype
        assert empty.shape == (0, 4)
        assert rest == [{"rank": 0}, (1, 30), [[[1.0, 1.0], [1.0, 1.0]], 4.0]]


def test_an_error_that_names_the_transport_is_itself(in_ranks: InRanks) -> None:
    """Not one of the exchange."""

    def job() -> None:
        with init_distributed():
            raise RunError("the loss is not finite; runs/gloo holds the batch")

    assert all("runs/gloo holds" in str(error) for error in in_ranks(2, job))


@pytest.mark.parametrize("failing", [0, 2])
def test_one_that_fails_ends_the_others(failing: int, in_ranks: InRanks) -> None:
    def job() -> None:
        with init_distributed() as world:
            sums = world.all_reduce(1)
            if world.rank == failing:
                raise ValueError("the image 7.png is corrupt")
            world.all_gather(rows(world.rank))
            raise AssertionError(sums)

    for rank, error in enumerate(in_ranks(3, job)):
        assert type(error) is (ValueError if rank == failing else RankError)
        assert rank == failing or f"rank {rank} of 3" in str(error)


def test_a_wait_may_take_longer_than_an_exchange(in_ranks: InRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may download for hours, where torch gives up on an exchange after half of one; here after 1 s."""
    start, soon = distributed.dist.init_process_group, datetime.timedelta(seconds=1)
    monkeypatch.setattr(distributed.dist, "init_process_group", functools.partial(start, timeout=soon))

    def job() -> int:
        with init_distributed() as world:
            with world.rank_0_first():
                if world.is_rank_0:
                    time.sleep(2)
            return world.broadcast_object(lambda: 5)

    assert in_ranks(2, job) == [5, 5]


def test_a_batch_and_a_device_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    World(1, 3).check_batch_size(33)
    SINGLE.check_batch_size(7)
    with pytest.raises(ValueError, match="batch_size=32"):
        World(0, 3).check_batch_size(32)
    for available in (True, False):
        monkeypatch.setattr(distributed.torch.cuda, "is_available", lambda available=available: available)
        assert World(5, 8, 1).device("auto") == ("cuda:1" if available else "auto")
        assert World(5, 8, 1).device("cpu") == "cpu"
        assert SINGLE.device("auto") == "auto"
