"""The memory that is free on a device, for `microbatch.measure_step`, `vitlab plan` and `vitlab bench`."""

from pathlib import Path

import torch

GIB = 2**30
CGROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
"""A container's files in cgroup v2 and in v1: its limit, its usage; and the key of its page cache in memory.stat."""


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a GPU, or for this process on a CPU; None if the system does not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, which reuses it
        return torch.cuda.mem_get_info(device)[0] + cached
    limits = (_available_bytes(), _container_bytes())
    return min((limit for limit in limits if limit is not None), default=None)


def _available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that are free on this machine."""
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _container_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that the container's limit leaves; None without one. Its page cache can be dropped and counts as free."""
    for limit_name, usage_name, cache_key in CGROUPS:
        limit_file, usage_file = cgroup / limit_name, cgroup / usage_name
        if limit_file.is_file() and usage_file.is_file():
            limit = limit_file.read_text().strip()
            if not limit.isdigit() or int(limit) >= 2**60:  # no limit: "max" in v2, the largest number in v1
                return None
            stat_file = usage_file.with_name("memory.stat")
            lines = stat_file.read_text().splitlines() if stat_file.is_file() else []
            cache = dict(line.split() for line in lines).get(cache_key, 0)
            return max(int(limit) - int(usage_file.read_text()) + int(cache), 0)
    return None
