"""The largest batch is found, and a step that needs too much memory fails alone."""

from concurrent.futures.process import BrokenProcessPool

import pytest

from vitlab.cost import peak_memory as module
from vitlab.cost.peak_memory import GIB, MAX_BATCH, RESOLUTION, PeakMemory, largest_batch
from vitlab.cost.peers import OURS, Work
from vitlab.models import ViTConfig

SMALL = ViTConfig(image_size=32, patch_size=8, width=64, depth=2, heads=2, mlp_dim=128, num_classes=5)
WORK = Work(SMALL, "train", 1, "float32")


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, 17, 64, 100, 1000, 5000, 30_000, 2**15, 10**6])
def test_doubling_and_bisection(limit: int) -> None:
    tried: list[int] = []

    def peak(batch: int) -> int | None:
        tried.append(batch)
        return 10 * batch if batch <= limit else None

    found, reachable = largest_batch(peak), min(limit, MAX_BATCH)
    batch, fails_at = found["batch"], found["fails_at"]
    assert batch is not None
    assert reachable * (1 - 1 / RESOLUTION) <= batch <= reachable
    assert found["peak"] == (10 * batch or None)
    assert len(tried) == len(set(tried)) < 24
    if limit < MAX_BATCH:
        assert fails_at is not None
        assert limit < fails_at <= batch + max(1, batch // RESOLUTION)
    else:
        assert (batch, fails_at) == (MAX_BATCH, None)


def test_a_process_of_its_own() -> None:
    """The peak grows with the batch; a batch that does not fit is None, and the next one is measured."""
    large = ViTConfig(image_size=32, patch_size=16, width=512, depth=6, heads=8, mlp_dim=2048, num_classes=5)
    with PeakMemory(OURS, WORK, GIB // 2) as peak:
        one, many = peak(1), peak(128)
        peak.work, peak.budget = Work(large, "infer", 1, "bfloat16"), 5 * large.num_parameters
        copied = peak(1)
        peak.work, peak.budget = WORK, GIB // 2
        too_many = peak(2**18)
    assert one is not None
    assert many is not None
    assert too_many is None
    # Only bfloat16 weights count: building them in float32, which takes more than this budget, is not the step's.
    assert copied is not None
    assert 2 * large.num_parameters < copied < 3 * large.num_parameters
    weights = 16 * SMALL.num_parameters  # with gradients and Adam's two moments
    images = 128 * 3 * 32 * 32 * 4
    assert weights - 2**21 < one < weights + 2**24  # without libraries; the system counts pages with a delay
    assert one + images < many < GIB // 2


class _Pool:
    """Stands for the process pool: `outcome` is the result of a measurement, or what it raises."""

    outcome: object = None
    started = 0

    def __init__(self, *_: object, **__: object) -> None:
        _Pool.started += 1

    def submit(self, function: object, *_: object) -> "_Pool":
        self.starting = function is module._start
        return self

    def result(self) -> object:
        if isinstance(_Pool.outcome, BaseException) and not self.starting:
            raise _Pool.outcome
        return _Pool.outcome

    def shutdown(self, **_: object) -> None:
        pass


def test_a_dead_process_means_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced by a new one."""
    monkeypatch.setattr(module, "ProcessPoolExecutor", _Pool)
    monkeypatch.setattr(_Pool, "started", 0)
    peak_memory = PeakMemory(OURS, WORK, 1000)
    for outcome, peak, started in (
        (10, 10, 1),
        (BrokenProcessPool(), None, 1),
        (20, 20, 2),
        (2000, None, 2),
        (5, 5, 3),
    ):
        monkeypatch.setattr(_Pool, "outcome", outcome)
        assert peak_memory(1) == peak
        assert _Pool.started == started


def test_a_process_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoStart(_Pool):
        def result(self) -> object:
            raise BrokenProcessPool

    monkeypatch.setattr(module, "ProcessPoolExecutor", NoStart)
    with pytest.raises(BrokenProcessPool):
        PeakMemory(OURS, WORK, 1000)(1)


@pytest.mark.parametrize(
    ("message", "out_of_memory"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 3221225472 bytes. Error code 12", True),
        ("std::bad_alloc", True),
        ("could not create a primitive", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_errors_of_torch(message: str, out_of_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(module, "_limit_memory", lambda _: None)  # of this process
    monkeypatch.setattr(module, "build", fail)
    if out_of_memory:
        assert module._peak_on_cpu(OURS, WORK, 1000) is None
    else:
        with pytest.raises(RuntimeError, match="shapes"):
            module._peak_on_cpu(OURS, WORK, 1000)


def test_free_memory() -> None:
    assert 2**26 < module.free_memory() < 2**50
