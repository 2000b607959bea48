"""How much memory a step takes when it is tried, and the largest batch that fits (App. D.5, Fig. 12 on the right).

On a GPU torch counts for itself. On a CPU a step runs in a process of its own that may take so much and no more: it is
refused further memory, or dies of that, and this process and the machine live on.
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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from vitlab.cost.peers import Work, build
from vitlab.models import ViTConfig
from vitlab.train.precision import keep_freed_memory

GIB = 2**30
LARGEST = 2**15
"""Where the search for the largest batch ends, though a larger one may fit."""
FINE = 16
"""It ends at a batch that fits beside one that is larger by no more than this part of it and does not."""
SMALL = ViTConfig(image_size=32, patch_size=16, width=32, depth=1, heads=2, mlp_dim=32, num_classes=2)
"""A model that every contender can be, and that takes no memory."""
STATUS = Path("/proc/self/status")
REFUSED = re.compile(
    r"can't allocate memory|not enough memory|out of memory|bad_alloc|Cannot allocate memory"
    r"|Resource temporarily unavailable|could not create a (primitive|memory)|could not execute a primitive"
)
"""What torch and its libraries say where the system refuses memory."""


@dataclass(frozen=True)
class Largest:
    """The largest batch found to fit (0: not even one image), its peak in bytes, and the smallest found not to (None:
    the search ended at `LARGEST`, and nothing is known of what lies beyond)."""

    batch: int
    peak: int | None
    fails_at: int | None


def largest(peak: Callable[[int], int | None], most: int = LARGEST) -> Largest:
    """By doubling, then bisection; `peak(batch)` is the memory taken, or None where the batch does not fit."""
    fits, fails, taken = 0, None, None
    while fails is None and fits < most:
        tried = min(2 * fits or 1, most)
        found = peak(tried)
        if found is None:
            fails = tried
        else:
            fits, taken = tried, found
    while fails is not None and fails - fits > max(1, fits // FINE):
        tried = (fits + fails) // 2
        found = peak(tried)
        if found is None:
            fails = tried
        else:
            fits, taken = tried, found
    return Largest(fits, taken, fails)


class Trial:
    """Tries steps of one contender: `trial(batch)` is the peak of its memory in bytes beyond what a process with torch
    takes anyhow, or None where that is more than `budget` (bytes; None: all that a GPU has).

    A context manager. On a CPU the other process stays for growing batches, and a new one comes where one was refused.
    """

    def __init__(self, name: str, work: Work, budget: int | None) -> None:
        self.name, self.budget = name, budget
        self.work = dataclasses.replace(work, compile=False)
        self.on_cpu = torch.device(work.device).type == "cpu"
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Trial":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def __call__(self, batch: int) -> int | None:
        work = dataclasses.replace(self.work, batch=batch)
        if not self.on_cpu:
            return _peak_on_gpu(self.name, work, self.budget)
        assert self.budget is not None, "a CPU's memory is the whole machine's"
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=spawn)
            # Ends in an error where the process cannot even begin; from then on it is memory that one dies of.
            self._pool.submit(_begin, self.name, self.work, torch.get_num_threads()).result()
        try:
            peak = self._pool.submit(_peak_on_cpu, self.name, work, self.budget).result()
        except BrokenProcessPool:  # killed, by the system or by a library that was refused memory
            peak = None
        if peak is None or peak > self.budget:
            self._end()
            return None
        return peak

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def how_measured(device: torch.device) -> str:
    """In words, for the record."""
    if device.type == "cuda":
        return "torch.cuda.max_memory_allocated of two steps, beyond what was allocated before; not compiled"
    return "high water of the resident memory of a process of its own, beyond torch's own; not compiled"


def free_memory() -> int:
    """Bytes of this machine's memory that can be taken without swapping."""
    return 1024 * _kib("MemAvailable", Path("/proc/meminfo"))


# -------------------------------------------------------------------------------------------- in the other process

_before = 0
"""Resident bytes before the first step was built."""


def _begin(name: str, work: Work, threads: int) -> None:
    """Notes what this process takes before any step, but for one of a small model, which brings the libraries."""
    global _before
    threading.Thread(target=_end_with_parent, daemon=True).start()
    keep_freed_memory()
    torch.set_num_threads(threads)
    build(name, dataclasses.replace(work, config=SMALL, batch=1)).step()
    _return_freed_memory()
    _before = 1024 * _kib("VmRSS")


def _end_with_parent() -> None:
    """Ends this process once the one that started it is gone, however it ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _peak_on_cpu(name: str, work: Work, budget: int) -> int | None:
    """Of two steps alone: building takes more than they do where weights are brought over from another model."""
    _return_freed_memory()  # of the batch before
    try:
        _limit(budget + 16 * work.config.num_parameters)  # ours and theirs in float32, the file between, and room
        step = build(name, work).step
        _return_freed_memory()
        with contextlib.suppress(OSError):  # where it cannot be set back, building counts as well
            Path("/proc/self/clear_refs").write_text("5")
        _limit(budget)
        for _ in range(2):
            step()
    except MemoryError:
        return None
    except RuntimeError as error:
        if not REFUSED.search(str(error)):
            raise
        return None
    return max(1024 * _kib("VmHWM") - _before, 0)


def _limit(budget: int) -> None:
    """From here on this process is refused what would bring it `budget` bytes beyond what it took before any step."""
    import resource

    left = max(budget - (1024 * _kib("VmRSS") - _before), 0)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * _kib("VmData") + left, most))


def _return_freed_memory() -> None:
    """Gives the system back what was freed and kept (`keep_freed_memory`), which would count as taken."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
    if trim is not None:
        trim(0)


def _kib(name: str, path: Path = STATUS) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    assert found, f"{path} does not tell {name}"
    return int(found[1])


# ------------------------------------------------------------------------------------------------------ on a GPU


def _peak_on_gpu(name: str, work: Work, budget: int | None) -> int | None:
    device = torch.device(work.device)
    _tidy()
    before = torch.cuda.memory_allocated(device)
    if budget is not None:
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min((budget + before) / whole, 1.0), device)
    try:
        step = build(name, work).step
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(2):
            step()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        return None
    else:
        return torch.cuda.max_memory_allocated(device) - before
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        step = None
        _tidy()


def _tidy() -> None:
    gc.collect()
    torch.cuda.empty_cache()
