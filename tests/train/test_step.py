"""One step, and what a stop leaves; `test_loop.py` has what numbers that are not finite leave."""

import copy

import torch
from small_step import CONFIG, make_step, new_state


def test_a_step_is_done_or_not() -> None:
    state = new_state(CONFIG)
    before = copy.deepcopy(state.tensors())
    fractions: list[float] = []

    def stop_at_the_second(fraction: float) -> bool:
        fractions.append(fraction)
        return len(fractions) < 2

    assert not make_step(CONFIG, state, microbatch=1, should_continue=stop_at_the_second)
    assert (fractions, state.step) == ([0.25, 0.5], 0)
    after = state.tensors()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert make_step(CONFIG, state, microbatch=1)
    assert state.step == 1
    after = state.tensors()
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert {"weights/head.weight", "average/head.weight", "sums"} <= changed
