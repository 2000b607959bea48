"""Steps of several contenders timed in turn, so that what disturbs the machine disturbs them alike."""

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vitlab.cost.ceiling import wait_for

Step = Callable[[], object]
GAIN = 1.05
"""A batch twice as large has to be so many times as fast to be worth it."""


def warm_up(step: Step, device: torch.device) -> float:
    """Seconds of a step, after two that compile, allocate and fill caches."""
    for _ in range(2):
        step()
    return seconds_of(step, 1, device)


def seconds_of(step: Step, count: int, device: torch.device) -> float:
    """So many steps as one span, to the end of what the device was given."""
    wait_for(device)
    since = time.perf_counter()
    for _ in range(count):
        step()
    wait_for(device)
    return time.perf_counter() - since


def in_turn(
    steps: Mapping[str, Step], device: torch.device, seconds: float, rounds: int, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Steps a second of each, in each round. A round of one takes at least about `seconds`, and one step."""
    counts = {}
    for name, step in steps.items():
        say(f"warming up {name}")
        counts[name] = max(1, math.ceil(seconds / warm_up(step, device)))
    rates: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.freeze()  # a collection within a round looks at what the steps made, not at every library's objects
    try:
        for turn in range(rounds):
            gc.collect()
            for name, step in steps.items():
                say(f"round {turn + 1} of {rounds}, {name}")
                step()  # brings its memory back into the caches
                rates[name].append(counts[name] / seconds_of(step, counts[name], device))
    finally:
        gc.unfreeze()
    return rates


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of one figure over the rounds, and all of it."""
    low, middle, high = np.percentile(values, [25, 50, 75]).tolist()
    return {"median": middle, "quartiles": [low, high], "all": list(values)}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """How many times as fast ours is: round by round, for neighbors in time were disturbed alike."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def fastest_batch(rate: Callable[[int], float], most: int) -> int:
    """The power of two, up to `most`, at which `rate(batch)` in images a second is best.

    Ends where two doublings on end have not been worth it.
    """
    best, best_rate, batch, idle = 1, rate(1), 2, 0
    while batch <= most and idle < 2:
        found = rate(batch)
        if found > GAIN * best_rate:
            best, best_rate, idle = batch, found, 0
        else:
            idle += 1
        batch *= 2
    return best
