"""The free memory of a machine, a container, and a GPU."""

from pathlib import Path

import pytest
import torch

from vitlab.train import free_memory as module
from vitlab.train.free_memory import free_memory


@pytest.mark.parametrize(
    ("limit", "usage", "cache", "unlimited"),
    [
        ("memory.max", "memory.current", "inactive_file", "max"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file", "9223372036854771712"),
    ],
)
def test_limit_of_a_container(tmp_path: Path, limit: str, usage: str, cache: str, unlimited: str) -> None:
    assert module._container_bytes(tmp_path) is None
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / limit).write_text("1000000\n")
    (tmp_path / usage).write_text("700000\n")
    assert module._container_bytes(tmp_path) == 300_000
    (tmp_path / usage).with_name("memory.stat").write_text(f"anon 5\n{cache} 200000\n")
    assert module._container_bytes(tmp_path) == 500_000
    (tmp_path / limit).write_text(f"{unlimited}\n")
    assert module._container_bytes(tmp_path) is None


def test_free_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The smaller of system and container; on a GPU also what torch has cached."""
    (tmp_path / "meminfo").write_text(
        "MemTotal:       24578932 kB\nMemAvailable:   1024 kB\nHugePages_Total:       0\n"
    )
    assert module._available_bytes(tmp_path / "meminfo") == 2**20
    monkeypatch.setattr(module, "_available_bytes", lambda: 7)
    for limit, expected in ((5, 5), (None, 7)):
        monkeypatch.setattr(module, "_container_bytes", lambda limit=limit: limit)
        assert free_memory(torch.device("cpu")) == expected
    for name, value in (("mem_get_info", (50, 100)), ("memory_reserved", 30), ("memory_allocated", 10)):
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert free_memory(torch.device("cuda")) == 70
