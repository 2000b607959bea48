"""The largest batch is found, and a step that takes too much takes nothing else with it."""

from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from vitlab.cost import trial as module
from vitlab.cost.peers import OURS, Work
from vitlab.cost.trial import FINE, GIB, Largest, Trial, free_memory, largest
from vitlab.models import ViTConfig

SMALL = ViTConfig(image_size=32, patch_size=8, width=64, depth=2, heads=2, mlp_dim=128, num_classes=5)


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, 17, 64, 100, 1000, 5000, 30_000, 2**15, 10**6])
def test_doubling_and_bisection(limit: int) -> None:
    asked: list[int] = []

    def peak(batch: int) -> int | None:
        asked.append(batch)
        return 10 * batch if batch <= limit else None

    found = largest(peak)
    assert found.batch <= min(limit, module.LARGEST)
    assert found.batch >= min(limit, module.LARGEST) * (1 - 1 / FINE)
    assert found.peak == (10 * found.batch or None)
    assert len(asked) == len(set(asked)) < 24
    if limit < module.LARGEST:
        assert found.fails_at is not None
        assert limit < found.fails_at <= found.batch + max(1, found.batch // FINE)
    else:
        assert found == Largest(module.LARGEST, 10 * module.LARGEST, None)


def test_a_process_of_its_own() -> None:
    """Its peak grows with the batch; a batch that is refused memory is told by None, and the next one is tried."""
    large = ViTConfig(image_size=32, patch_size=16, width=512, depth=6, heads=8, mlp_dim=2048, num_classes=5)
    with Trial(OURS, Work(SMALL, "train", 1, "float32"), GIB // 2) as trial:
        one, many = trial(1), trial(128)
        trial.work, trial.budget = Work(large, "infer", 1, "bfloat16"), 5 * large.num_parameters
        copied = trial(1)
        trial.work, trial.budget = Work(SMALL, "train", 1, "float32"), GIB // 2
        too_many = trial(2**18)
    assert one is not None
    assert many is not None
    assert too_many is None
    # Weights in bfloat16 alone: that they were made in float32, in more than this budget, is not the step's.
    assert copied is not None
    assert 2 * large.num_parameters < copied < 3 * large.num_parameters
    weights = 16 * SMALL.num_parameters  # themselves, their gradients and Adam's two
    images = 128 * 3 * 32 * 32 * 4
    assert weights - 2**21 < one < weights + 2**24  # and no library; the system counts pages with a delay
    assert one < many < GIB // 2
    assert images < many - one


class _Pool:
    """Stands for the other process: the work ends as `ends` says."""

    ends: object = None
    started = 0

    def __init__(self, *_: object, **__: object) -> None:
        _Pool.started += 1

    def submit(self, function: object, *_: object) -> "_Pool":
        self.begins = function is module._begin
        return self

    def result(self) -> object:
        if isinstance(_Pool.ends, BaseException) and not self.begins:
            raise _Pool.ends
        return _Pool.ends

    def shutdown(self, **_: object) -> None:
        pass


def test_death_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies of a step did not have the memory for it; a new one takes its place."""
    monkeypatch.setattr(module, "ProcessPoolExecutor", _Pool)
    monkeypatch.setattr(_Pool, "started", 0)
    trial = Trial(OURS, Work(SMALL, "train", 1, "float32"), 1000)
    for ends, peak, started in ((10, 10, 1), (BrokenProcessPool(), None, 1), (20, 20, 2), (2000, None, 2), (5, 5, 3)):
        monkeypatch.setattr(_Pool, "ends", ends)
        assert trial(1) == peak
        assert _Pool.started == started


def test_a_process_that_cannot_begin_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoStart(_Pool):
        def result(self) -> object:
            raise BrokenProcessPool

    monkeypatch.setattr(module, "ProcessPoolExecutor", NoStart)
    with pytest.raises(BrokenProcessPool):
        Trial(OURS, Work(SMALL, "train", 1, "float32"), 1000)(1)


@pytest.mark.parametrize(
    "said",
    [
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 3221225472 bytes. Error code 12 (Cannot allocate memory)",
        "std::bad_alloc",
        "could not create a primitive",
    ],
)
def test_refusals_of_torch(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(module, "_limit", lambda _: None)  # it is this process here
    monkeypatch.setattr(module, "build", refused)
    assert module._peak_on_cpu(OURS, Work(SMALL, "train", 1, "float32"), 1000) is None


def test_other_errors_are_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(module, "_limit", lambda _: None)
    monkeypatch.setattr(module, "build", wrong)
    with pytest.raises(RuntimeError, match="shapes"):
        module._peak_on_cpu(OURS, Work(SMALL, "train", 1, "float32"), 1000)


def test_free_memory() -> None:
    assert 2**26 < free_memory() < 2**50
    assert "resident" in module.how_measured(torch.device("cpu"))
    assert "max_memory_allocated" in module.how_measured(torch.device("cuda"))
