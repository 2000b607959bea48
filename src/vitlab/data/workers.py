"""How many processes and threads read images: the machine's cores, shared by the ranks on it."""

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch.utils.data import get_worker_info

from vitlab.ranks import MAX_RANKS, rank_number

logger = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")
MAX_WORKERS = 16
MAX_THREADS = 8
SHARED_MEMORY = Path("/dev/shm")  # workers pass images through it; 16 with chunks of 224 pixels take 0.3 GB
MIN_SHARED_MEMORY = 2**30  # bytes that have to be free there
IMPORTED_BY = os.getpid()


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cores_per_rank() -> int:
    return max(1, available_cores() // rank_number("LOCAL_WORLD_SIZE", 1, MAX_RANKS, default=1))


def num_workers(requested: int | None, device: torch.device) -> int:
    """Worker processes of each rank. By default none on a CPU, whose cores compute; on a GPU the rank's share of the
    cores, at most MAX_WORKERS, or none, with a warning, if there is little shared memory."""
    if requested is not None or device.type == "cpu":
        return requested or 0
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free < MIN_SHARED_MEMORY:
        logger.warning(
            "%s has less than 1 GiB free: images are read in the main process, which is slow; give the container more "
            "(--shm-size=8g).",
            SHARED_MEMORY,
        )
        return 0
    return min(_cores_per_rank(), MAX_WORKERS)


def read_threads() -> int:
    """Threads that read images: the rank's share of the cores, at most MAX_THREADS; in a loader's worker one."""
    return 1 if get_worker_info() is not None else min(_cores_per_rank(), MAX_THREADS)


def in_threads(function: Callable[[K], V], values: Sequence[K]) -> list[V]:
    """`function` of each value, in order, by `read_threads`. Pillow, libjpeg-turbo and torch release the interpreter.

    The model waits meanwhile. If it computed with all cores, it would wait longer for the core that decodes.
    """
    if (threads := min(read_threads(), len(values))) < 2:
        return list(map(function, values))
    if os.getpid() != IMPORTED_BY:
        # After a fork torch renews its thread pool when a thread first asks for it; two at once would find none.
        torch.set_num_threads(torch.get_num_threads())
    with ThreadPoolExecutor(threads, "vitlab-read") as pool:
        return list(pool.map(function, values))
