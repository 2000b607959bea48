"""A time budget: what is left of it, and how many steps of a training fit.

A plan is made before the work. The clock is read again before each step: where the machine is slower than planned, the
training is shortened. The learning rate follows the fraction of the training that is done, so the schedule still
reaches its end. Every change is an event in the state of the run (`Schedule.changes`), which a resumed run reads from
its checkpoint.

    clock = Clock(600.0)
    limit = TimeLimit(clock, step_seconds=0.5, after=60.0)
    limit.update(step=100, total=900, planned_rest=800.0)  # 900, or as many as end 60 seconds before the budget does
"""

import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PLANNED_FRACTION = 0.92
"""Fraction of the time that is planned; the rest is for saving, and for what is slower than measured."""
MARGIN = 0.95
"""Fraction of the fitting steps that a shortened training takes, so that the next step does not shorten it again."""
WINDOW = 5
"""Last steps whose median duration counts."""
MIN_TIMED = 3
"""Fewest steps whose median replaces the planned duration."""


class Clock:
    """The time left of a budget of `seconds`, from `started` (by `time.monotonic()`; default: now)."""

    def __init__(self, seconds: float, started: float | None = None) -> None:
        self.seconds = seconds
        self._end = (time.monotonic() if started is None else started) + seconds
        self.slowdown = 1.0
        """Measured seconds for each planned second of the last work; at least 1."""

    def left(self) -> float:
        """Seconds until the budget ends; below 0 after that."""
        return self._end - time.monotonic()

    def restore(self, left: float) -> None:
        """Moves the end to `left` seconds from now: a resumed job does not count the time since it was interrupted."""
        self._end = time.monotonic() + left

    def compare(self, planned: float, measured: float) -> None:
        """Sets `slowdown` by the planned and the measured seconds of the same work."""
        self.slowdown = max(measured / planned, 1.0) if planned > 0 else 1.0


@dataclass
class TimeLimit:
    """When a training must end."""

    clock: Clock
    step_seconds: float
    """Planned duration of a step."""
    after: float
    """Planned seconds of the work that follows the last step; a slow machine is expected to be slow there, too."""
    later: float = 0.0
    """Planned seconds of trainings that follow, which lose as large a fraction of their steps as this one."""
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _last: float | None = None

    def update(self, step: int, total: int, planned_rest: float) -> int:
        """Times the last step, and returns how many steps fit in all: at most `total`, and at least one more than
        `step`. Called before each step. planned_rest: steps of the plan that are not done yet."""
        now = time.monotonic()
        if self._last is not None:
            self._times.append(now - self._last)
        self._last = now
        seconds = statistics.median(self._times) if len(self._times) >= MIN_TIMED else self.step_seconds
        self.clock.compare(self.step_seconds, seconds)
        rest = planned_rest * self.step_seconds
        share = rest / (rest + self.later) if self.later else 1.0
        fitting = share * (self.clock.left() - self.clock.slowdown * self.after) / seconds
        return total if fitting >= total - step else step + max(int(MARGIN * fitting), 1)


@dataclass
class Schedule:
    """The number of steps of a run, and its position in the schedule of the learning rate."""

    planned: int
    """Steps before any change; the learning rate is a function of these."""
    limit: TimeLimit | None = None
    changes: list[tuple[int, int]] = field(default_factory=list)
    """(step, steps in all from then on), in order."""

    @property
    def total(self) -> int:
        """Steps in all."""
        return self.changes[-1][1] if self.changes else self.planned

    def fitting(self, step: int) -> int:
        """Total steps that fit the time limit, after `step` steps."""
        return (
            self.total
            if self.limit is None
            else self.limit.update(step, self.total, self.planned - self.position(step))
        )

    def position(self, step: int) -> float:
        """The planned step with the learning rate of `step`: after a change the same fraction of the rest is done.

        Planned 900 and cut to 500 at step 100: step 300 is at position 500, halfway through what was left.
        """
        start, done, total = 0, 0.0, self.planned
        for change, new_total in self.changes:
            if change >= step:
                break
            done += (change - start) * (self.planned - done) / (total - start)
            start, total = change, new_total
        return done + (step - start) * (self.planned - done) / (total - start)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; nothing without a limit."""
        return {} if self.limit is None else {"changes": [*self.changes], "seconds_left": self.limit.clock.left()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state()`."""
        self.changes = [(step, total) for step, total in state.get("changes", ())]
        if self.limit is not None and "seconds_left" in state:
            self.limit.clock.restore(state["seconds_left"])
