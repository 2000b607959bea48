"""Processes on the loopback device: who they are, what they gather, and how all end when one fails."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vitlab.train import distributed
from vitlab.train.distributed import ALONE, RankError, Ranks, environment, together

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
        with together() as ranks:
            first = ranks.gather(rows(ranks.rank))
            return first, ranks.gather({"rank": np.array([ranks.rank])}), ranks.device("cpu")

    answers = in_ranks(count, job)
    assert len(answers) == count
    for first, second, device in answers:
        for name in ("numbers", "right", "features"):
            expected = np.concatenate([rows(rank)[name] for rank in range(count)])
            np.testing.assert_array_equal(first[name], expected)
            assert first[name].dtype == expected.dtype
        assert second["rank"].tolist() == list(range(count))
        assert device == "cpu"


def test_nobody_has_a_row(in_ranks: InRanks) -> None:
    def job() -> tuple[int, ...]:
        with together() as ranks:
            return ranks.gather({"x": np.empty((0, 4), np.float32)})["x"].shape

    assert in_ranks(2, job) == [(0, 4), (0, 4)]


@pytest.mark.parametrize("failing", [0, 2])
def test_one_that_fails_ends_those_that_wait_for_it(failing: int, in_ranks: InRanks) -> None:
    """The first process, which keeps the store, and another one."""

    def job() -> None:
        with together() as ranks:
            ranks.gather(rows(ranks.rank))
            if ranks.rank == failing:
                raise ValueError("the picture 7.png is broken")
            ranks.gather(rows(ranks.rank))

    since = time.monotonic()
    answers = in_ranks(3, job)
    assert time.monotonic() - since < 20
    for rank, answer in enumerate(answers):
        assert type(answer) is (ValueError if rank == failing else RankError)
        if rank != failing:
            assert "another failed: the picture 7.png is broken" in str(answer)


def test_one_that_fails_ends_those_at_work(in_ranks: InRanks) -> None:
    """Long before they are done: `check` is called between two pieces of work."""

    def job() -> int:
        with together() as ranks:
            if ranks.rank == 1:
                raise RuntimeError("no memory")
            for _ in range(3000):
                time.sleep(0.01)
                ranks.check()
        return 0

    first, second = in_ranks(2, job)
    assert (type(first), type(second)) == (RankError, RuntimeError)
    assert "this process (0 of 2) ends, for another failed: no memory" in str(first)


def test_a_late_one_is_waited_for(in_ranks: InRanks) -> None:
    def job() -> list[int]:
        with together() as ranks:
            time.sleep(0.3 * ranks.rank)
            return ranks.gather({"x": np.array([ranks.rank])})["x"].tolist()

    assert in_ranks(2, job) == [[0, 1], [0, 1]]


def test_alone_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.dist, "init_process_group", None)
    for world_size in (None, "1"):
        if world_size:
            monkeypatch.setenv("WORLD_SIZE", world_size)
        with together() as ranks:
            assert ranks == ALONE
            ranks.check()
            given = {"x": np.arange(3)}
            assert ranks.gather(given) == given


def test_half_of_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    message = "WORLD_SIZE=2 asks for several processes and LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set: .*torchrun"
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=message):
        environment()


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.torch.cuda, "is_available", lambda: True)
    assert Ranks(5, 8, 1).device("auto") == "cuda:1"
    assert Ranks(5, 8, 1).device("cuda") == "cuda:1"
    assert Ranks(5, 8, 1).device("cpu") == "cpu"
    assert ALONE.device("auto") == "auto"
    monkeypatch.setattr(distributed.torch.cuda, "is_available", lambda: False)
    assert Ranks(5, 8, 1).device("auto") == "auto"
