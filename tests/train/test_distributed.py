"""Processes on the loopback device: their collectives, and how all end when one fails."""

import datetime
import functools
import os
import signal
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vitlab.train import distributed
from vitlab.train.distributed import (
    SINGLE,
    RankError,
    World,
    init_distributed,
    world_from_environment,
)

InRanks = Callable[[int, Callable[[], Any]], list[Any]]
COUNTS = (3, 0, 5)  # rows of each rank


def rows(rank: int) -> dict[str, np.ndarray]:
    """Arrays of every kind, with as many rows as the rank has."""
    count = COUNTS[rank]
    return {
        "numbers": np.arange(count) + 100 * rank,
        "right": np.arange(count) % 2 == rank % 2,
        "features": np.full((count, 2, 3), rank + 0.5, np.float32),
    }


@pytest.mark.parametrize("count", [2, 3])
def test_gathers_unequal_counts_in_order_of_rank_everywhere(count: int, in_ranks: InRanks) -> None:
    def job() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], str]:
        with init_distributed() as world:
            first = world.all_gather(rows(world.rank))
            return first, world.all_gather({"x": np.empty((0, 4), np.float32)}), world.device("cpu")

    answers = in_ranks(count, job)
    assert len(answers) == count
    for first, second, device in answers:
        for name in ("numbers", "right", "features"):
            expected = np.concatenate([rows(rank)[name] for rank in range(count)])
            np.testing.assert_array_equal(first[name], expected)
            assert first[name].dtype == expected.dtype
        assert second["x"].shape == (0, 4)
        assert device == "cpu"


def test_what_was_sent_before_a_failure_still_arrives(in_ranks: InRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """One ends at once after an exchange (as a run that stops does), whose end has yet to reach the other."""
    all_reduce: Any = distributed.dist.all_reduce

    def late(*given: Any, **options: Any) -> Any:
        exchange, since = all_reduce(*given, **options), time.monotonic()
        return types.SimpleNamespace(
            is_completed=lambda: time.monotonic() - since > 0.5 and exchange.is_completed(), wait=exchange.wait
        )

    def job() -> None:
        with init_distributed() as world:
            if world.rank == 1:
                monkeypatch.setattr(distributed.dist, "all_reduce", late)
            raise ValueError(f"{world.all_reduce(1)} heard")

    assert [str(answer) for answer in in_ranks(2, job)] == ["(2,) heard"] * 2


@pytest.mark.parametrize("failing", [0, 2])
def test_one_that_fails_ends_those_that_wait_for_it(failing: int, in_ranks: InRanks) -> None:
    """The first process, which keeps the store, and another one."""

    def job() -> None:
        with init_distributed() as world:
            world.all_gather(rows(world.rank))
            if world.rank == failing:
                raise ValueError("the image 7.png is broken")
            world.all_gather(rows(world.rank))

    answers = in_ranks(3, job)
    for rank, answer in enumerate(answers):
        assert type(answer) is (ValueError if rank == failing else RankError)
        if rank != failing:
            assert "another rank failed: the image 7.png is broken" in str(answer)


def test_one_that_fails_ends_those_at_work(in_ranks: InRanks) -> None:
    """Long before they are done: `check` is called between two pieces of work."""

    def job() -> int:
        with init_distributed() as world:
            if world.rank == 1:
                raise RuntimeError("no memory")
            for _ in range(3000):
                time.sleep(0.01)
                world.check_peers()
        return 0

    first, second = in_ranks(2, job)
    assert (type(first), type(second)) == (RankError, RuntimeError)
    assert "rank 0 of 2 stops because another rank failed: no memory" in str(first)


def test_a_wait_may_take_longer_than_an_exchange(in_ranks: InRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first may download for hours, where torch gives up on an exchange after half of one; here after 3 s."""
    start, soon = distributed.dist.init_process_group, datetime.timedelta(seconds=3)
    monkeypatch.setattr(distributed.dist, "init_process_group", functools.partial(start, timeout=soon))

    def job() -> int:
        with init_distributed() as world:
            with world.rank_0_first():
                if world.is_rank_0:
                    time.sleep(6)
            return world.broadcast_object(lambda: 5)

    assert in_ranks(2, job) == [5, 5]


def test_a_batch_for_all() -> None:
    World(1, 3).check_batch_size(33)
    SINGLE.check_batch_size(7)
    with pytest.raises(ValueError, match="batch_size=32 is the global batch of 3 processes; give a multiple of 3"):
        World(0, 3).check_batch_size(32)


def test_half_of_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    message = "WORLD_SIZE=2 requires LOCAL_RANK, MASTER_ADDR, MASTER_PORT, which is not set: .*torchrun"
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=message):
        world_from_environment()


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.torch.cuda, "is_available", lambda: True)
    assert World(5, 8, 1).device("auto") == "cuda:1"
    assert World(5, 8, 1).device("cuda") == "cuda:1"
    assert World(5, 8, 1).device("cpu") == "cpu"
    assert SINGLE.device("auto") == "auto"
    monkeypatch.setattr(distributed.torch.cuda, "is_available", lambda: False)
    assert World(5, 8, 1).device("auto") == "auto"


def test_shares_and_adds_up(in_ranks: InRanks) -> None:
    def job() -> tuple[Any, ...]:
        with init_distributed() as world:
            shared = world.broadcast_object(lambda: {"made by": world.rank})
            sums = world.all_reduce(world.rank == 1, 10 * world.rank)
            tensors = [torch.full((2, 2), float(world.rank)), torch.tensor(4.0)]
            world.all_reduce_mean(tensors)
            assert world.all_reduce(True) == (3,)  # a number also where nothing else makes it one
            return shared, sums, [tensor.tolist() for tensor in tensors]

    expected = ({"made by": 0}, (1, 30), [[[1.0, 1.0], [1.0, 1.0]], 4.0])
    assert in_ranks(3, job) == [expected] * 3


@pytest.mark.parametrize(("call", "gone"), [("all_reduce", 0), ("broadcast", 1), ("gather", 0)])
def test_one_that_is_killed_ends_the_others(call: str, gone: int, tmp_path: Path, in_ranks: InRanks) -> None:
    """Within seconds, whether or not it kept the store, and wherever the others wait for what will not come."""

    def job() -> None:
        with init_distributed() as world:
            meet = {
                "all_reduce": lambda: world.all_reduce(1),
                "broadcast": lambda: world.broadcast_object(lambda: 1),
                "gather": lambda: world.all_gather({"x": np.arange(2)}),
            }[call]
            try:
                meet()
                if world.rank == gone:
                    os.kill(os.getpid(), signal.SIGKILL)
                meet()
            except RuntimeError:
                (tmp_path / "noticed").touch()
                raise

    since = time.monotonic()
    with pytest.raises(EOFError):  # the killed one has nothing to say
        in_ranks(2, job)
    while not (tmp_path / "noticed").exists():
        assert time.monotonic() - since < 100
        time.sleep(0.01)
