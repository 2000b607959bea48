"""How many processes and threads read images."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vitlab.data import workers
from vitlab.data.workers import in_threads, num_workers, read_threads


def test_workers_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rank's share of the cores beside a GPU, none on a CPU, nor with Docker's 64 MB of shared memory."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(workers, "available_cores", lambda: 24)
    assert [num_workers(None, cpu), num_workers(3, cpu), num_workers(0, gpu), num_workers(None, gpu)] == [0, 3, 0, 16]
    for ranks, share in ((4, 6), (32, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert num_workers(None, gpu) == share
    monkeypatch.setattr(workers, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(workers.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**26))
    assert [num_workers(None, gpu), num_workers(2, gpu)] == [0, 2]
    assert "--shm-size" in caplog.text


def test_values_are_computed_by_a_thread_for_each_core_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order; errors are raised. In a forked process torch's threads are renewed first."""
    monkeypatch.setattr(workers, "available_cores", lambda: 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert read_threads() == 3
    barrier, names = threading.Barrier(3), set[str]()

    def square(number: int) -> int:
        names.add(threading.current_thread().name)
        barrier.wait(20)  # three at once
        return number**2

    renewed: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", renewed.append)
    assert in_threads(square, range(9)) == [number**2 for number in range(9)]
    assert len(names) == 3
    assert not renewed
    monkeypatch.setattr(workers, "IMPORTED_BY", -1)
    assert in_threads(square, range(3)) == [0, 1, 4]
    assert renewed == [torch.get_num_threads()]
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda number: 1 // number, range(2))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    assert in_threads(lambda _: threading.current_thread().name, range(2)) == ["MainThread"] * 2
