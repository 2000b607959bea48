"""A time budget: steps are shortened while they run, and the learning rate ends its decay all the same."""

import itertools

import pytest

from vitlab.config import OptimConfig
from vitlab.train import clock
from vitlab.train.clock import Clock, Schedule, TimeLimit
from vitlab.train.optim import learning_rate


class Time:
    """A clock that work moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(clock, "time", time)
    return time


def steps_taken(
    time: Time, budget: float, slower_from: int, factor: float, after: float = 10.0, later: float = 0.0
) -> tuple[int, float]:
    """Steps of a run that 100 steps of a second were planned for, and the seconds left at the end of all."""
    budget_clock = Clock(budget)
    schedule = Schedule(100, TimeLimit(budget_clock, 1.0, after, later))
    step = 0
    while step < schedule.total:
        if (fitting := schedule.fitting(step)) < schedule.total:
            schedule.changes.append((step, fitting))
        time.now += factor if step >= slower_from else 1.0
        step += 1
    time.now += after * factor if step > slower_from else after
    return step, budget_clock.left()


def test_a_machine_as_planned_takes_all_steps(time: Time) -> None:
    assert steps_taken(time, 115.0, slower_from=1000, factor=1.0) == (100, 5.0)


@pytest.mark.parametrize(("slower_from", "factor"), [(0, 4.0), (10, 2.0), (90, 1.3)])
def test_a_slow_machine_takes_fewer_steps(time: Time, slower_from: int, factor: float) -> None:
    """The budget is kept, and most of the time is used; the work that follows is expected to be as slow."""
    steps, left = steps_taken(time, 115.0, slower_from, factor)
    assert abs(left) <= 0.1 * 115
    assert slower_from < steps < 100


def test_trainings_that_follow_lose_the_same_fraction(time: Time) -> None:
    """Of two trainings of a hundred steps on a machine of half the speed, each loses about half."""
    steps, left = steps_taken(time, 225.0, slower_from=0, factor=2.0, later=100.0)
    assert 45 <= steps <= 55
    assert left / 2.0 == pytest.approx(50, abs=8)  # steps of the second one
    assert steps_taken(time, 225.0, slower_from=0, factor=1.0, later=100.0)[0] == 100


def test_at_least_one_more_step() -> None:
    over = Clock(10.0, started=-1e9)
    assert TimeLimit(over, 1.0, 0.0).update(step=7, total=100, planned_rest=93.0) == 8
    assert over.left() < 0


def test_the_rate_follows_the_fraction_that_is_done() -> None:
    """No jump at a change; the last step of a shortened run stands where the last planned one would."""
    schedule = Schedule(100)
    assert [schedule.position(step) for step in range(101)] == list(range(101))
    schedule.changes = [(40, 70), (60, 62)]
    assert schedule.total == 62
    assert schedule.position(40) == 40
    assert schedule.position(60) == pytest.approx(40 + 60 * 20 / 30)
    assert schedule.position(61) == pytest.approx((80 + 100) / 2)
    assert schedule.position(62) == 100
    rates = [learning_rate(OptimConfig(warmup_steps=2), schedule.position(step), 100) for step in range(63)]
    assert all(early >= late for early, late in itertools.pairwise(rates[2:]))
    assert rates[-1] == pytest.approx(0)


def test_what_was_left_is_left_after_a_pause() -> None:
    early = Clock(100.0)
    state = Schedule(10, TimeLimit(early, 1.0, 0.0)).state()
    late = Clock(100.0, started=-1e9)
    Schedule(10, TimeLimit(late, 1.0, 0.0)).restore(state)
    assert late.left() == pytest.approx(100.0, abs=5)
    assert Schedule(10).state() == {}
