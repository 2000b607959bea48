"""Contenders are timed in turn, and a figure is what its rounds say."""

import gc
import types
from collections.abc import Callable

import pytest
import torch

from vitlab.cost import timing
from vitlab.cost.timing import fastest_batch, in_turn, ratio, seconds_of, spread

CPU = torch.device("cpu")


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Passes time on the clock that steps are timed with, which no neighbor holds up."""
    now = [0.0]
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return sleep


def test_in_turn(sleep: Callable[[float], None]) -> None:
    """Warm-up first, then round by round, each as many steps as its share of the time asks for."""
    calls: list[str] = []
    said: list[str] = []

    def steps(name: str, seconds: float) -> None:
        calls.append(name)
        sleep(seconds)

    found = in_turn(
        {"slow": lambda: steps("slow", 0.02), "fast": lambda: steps("fast", 0.002)}, CPU, 0.03, 2, said.append
    )
    assert found == {"slow": pytest.approx([50, 50]), "fast": pytest.approx([500, 500])}
    assert (calls.count("slow"), calls.count("fast")) == (3 + 2 * (1 + 2), 3 + 2 * (1 + 15))
    order = [name for name, before in zip(calls, ["", *calls], strict=False) if name != before]
    assert order == ["slow", "fast"] * 3  # warm-up and two rounds
    assert said[:3] == ["warming up slow", "warming up fast", "round 1 of 2, slow"]


def test_at_least_one_step() -> None:
    calls: list[int] = []
    in_turn({"a": lambda: calls.append(gc.get_freeze_count())}, CPU, 1e-12, 3, lambda _: None)
    assert len(calls) == 3 + 3 * 2
    assert not any(calls[:3])
    assert min(calls[3:]) > 10_000  # objects that no collection within a round looks at
    assert gc.get_freeze_count() == 0


def test_seconds(sleep: Callable[[float], None]) -> None:
    assert seconds_of(lambda: sleep(0.01), 3, CPU) == pytest.approx(0.03)


def test_spread_and_ratio() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {
        "median": 3.0,
        "quartiles": [2.0, 4.0],
        "all": [4.0, 1.0, 2.0, 3.0, 5.0],
    }
    # the machine was half as fast in the second round, and neither contender gained by it
    assert ratio([4.0, 2.0], [2.0, 1.0])["all"] == [2.0, 2.0]
    with pytest.raises(ValueError):
        ratio([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("rates", "most", "best", "asked"),
    [
        ({1: 10, 2: 20, 4: 30, 8: 30.5, 16: 30.8, 32: 99}, 64, 4, [1, 2, 4, 8, 16]),
        ({1: 10, 2: 9, 4: 30, 8: 10, 16: 10}, 64, 4, [1, 2, 4, 8, 16]),  # one bad doubling is passed over
        ({1: 10, 2: 20, 4: 40}, 5, 4, [1, 2, 4]),
        ({1: 10}, 1, 1, [1]),
    ],
)
def test_fastest_batch(rates: dict[int, float], most: int, best: int, asked: list[int]) -> None:
    seen: list[int] = []

    def rate(batch: int) -> float:
        seen.append(batch)
        return rates[batch]

    assert fastest_batch(rate, most) == best
    assert seen == asked
