"""The peak memory of a step, and the largest batch that fits (App. D.5, Fig. 12 on the right).

On a GPU torch counts. On a CPU the step runs in a process of its own whose memory is limited: where it needs more, it
fails or dies, and this process and the machine go on.
"""

import contextlib
import ctypes
import dataclasses
import gc
import multiprocessing
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from vitlab.cost.peers import Work, build
from vitlab.models import ViTConfig
from vitlab.train.precision import keep_freed_memory

GIB = 2**30
MAX_BATCH = 2**15
"""The search for the largest batch ends here."""
RESOLUTION = 16
"""It ends at a batch that fits where one larger by 1/16 does not."""
SMALL = ViTConfig(image_size=32, patch_size=16, width=32, depth=1, heads=2, mlp_dim=32, num_classes=2)
"""A model that every peer supports and that takes next to no memory."""
OUT_OF_MEMORY = re.compile(
    r"allocate memory|not enough memory|out of memory|bad_alloc|temporarily unavailable|could not (create|execute) a"
)
"""What torch and its libraries (oneDNN: "could not create a primitive") say where the system refuses memory."""


def largest_batch(peak: Callable[[int], int | None], most: int = MAX_BATCH) -> dict[str, int | None]:
    """The largest `batch` that fits (0: none), its `peak`, and the smallest known not to fit, `fails_at`.

    Doubling, then bisection. `peak(batch)` is the memory in bytes, None for a batch that does not fit. `fails_at` is
    None where the search ended at `most`.
    """
    fits, fails, peak_of_largest = 0, None, None
    while fits < most if fails is None else fails - fits > max(1, fits // RESOLUTION):
        batch = min(2 * fits or 1, most) if fails is None else (fits + fails) // 2
        if (found := peak(batch)) is None:
            fails = batch
        else:
            fits, peak_of_largest = batch, found
    return {"batch": fits, "peak": peak_of_largest, "fails_at": fails}


class PeakMemory:
    """`PeakMemory(name, work, budget)(batch)` is the peak memory in bytes of the step of a contender, not compiled.

    It does not include what a process with torch takes anyway. None where it is more than `budget` bytes (of a GPU
    None means all of it). A context manager: on a CPU a process is reused until a batch does not fit.
    """

    def __init__(self, name: str, work: Work, budget: int | None) -> None:
        self.name, self.budget = name, budget
        self.work = dataclasses.replace(work, compile=False)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "PeakMemory":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def __call__(self, batch: int) -> int | None:
        work = dataclasses.replace(self.work, batch=batch)
        peak = _peak_on_gpu(self.name, work) if work.device.startswith("cuda") else self._peak_of_process(work)
        if peak is not None and (self.budget is None or peak <= self.budget):
            return peak
        self.__exit__()
        return None

    def _peak_of_process(self, work: Work) -> int | None:
        assert self.budget is not None, "the memory of a CPU is the whole machine's"
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
            # Raises where the process cannot even start. From then on, what kills it is a lack of memory.
            self._pool.submit(_start, self.name, self.work, torch.get_num_threads()).result()
        try:
            return self._pool.submit(_peak_on_cpu, self.name, work, self.budget).result()
        except BrokenProcessPool:
            return None


def describe_method(device: torch.device) -> str:
    """How the peak is measured, for the record."""
    if device.type == "cuda":
        return "torch.cuda.max_memory_allocated of two steps, beyond what was allocated before; not compiled"
    return "high water of the resident memory of a process of its own, beyond torch's own; not compiled"


def free_memory() -> int:
    """Bytes of this machine's memory that can be allocated without swapping."""
    return _read_bytes("MemAvailable", "/proc/meminfo")


def _read_bytes(name: str, path: str = "/proc/self/status") -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", Path(path).read_text(), re.MULTILINE)
    assert match, f"{path} has no {name}"
    return 1024 * int(match[1])


def _peak_on_gpu(name: str, work: Work) -> int | None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    try:
        step = build(name, work).step
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            step()
        return torch.cuda.max_memory_allocated() - before
    except torch.OutOfMemoryError:
        return None


# ----------------------------------------------------------------------------------------------- in the other process

_baseline = 0
"""Resident bytes before the first step is built."""


def _start(name: str, work: Work, threads: int) -> None:
    """Sets the baseline, after a step of a small model, which loads all libraries."""
    global _baseline
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    keep_freed_memory()
    torch.set_num_threads(threads)
    build(name, dataclasses.replace(work, config=SMALL, batch=1)).step()
    _return_freed_memory()
    _baseline = _read_bytes("VmRSS")


def _exit_with_parent() -> None:
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os._exit(1)


def _peak_on_cpu(name: str, work: Work, budget: int) -> int | None:
    """The peak of two steps. It does not include building, which takes more where weights are converted."""
    _return_freed_memory()  # of the batch before
    try:
        _limit_memory(budget + 16 * work.config.num_parameters)  # float32 weights of ours and theirs, and a file
        step = build(name, work).step
        _return_freed_memory()
        with contextlib.suppress(OSError):  # where the high-water mark cannot be reset, it includes building
            Path("/proc/self/clear_refs").write_text("5")
        _limit_memory(budget)
        for _ in range(2):
            step()
    except MemoryError:
        return None
    except RuntimeError as error:
        if not OUT_OF_MEMORY.search(str(error)):
            raise
        return None
    return max(_read_bytes("VmHWM") - _baseline, 0)


def _limit_memory(budget: int) -> None:
    """Makes the system refuse this process more than `budget` bytes beyond the baseline."""
    import resource

    left = max(budget - (_read_bytes("VmRSS") - _baseline), 0)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (_read_bytes("VmData") + left, hard))


def _return_freed_memory() -> None:
    """Returns freed memory to the system (see `keep_freed_memory`): it would count as taken."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # missing in musl
        trim(0)
