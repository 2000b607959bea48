"""What a CPU is faster in is measured once for each processor."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.train import cpu_speed as module
from vitlab.train.cpu_speed import _seconds, cpu_is_faster_in_bfloat16, cpu_is_faster_packed

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture
def seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Receives what the next measurements return, of a made-up processor."""
    upcoming: list[float] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_seconds", lambda compute: upcoming.pop(0))
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    forget()
    yield upcoming
    forget()


def forget() -> None:
    """As in another process."""
    cpu_is_faster_in_bfloat16.cache_clear()
    cpu_is_faster_packed.cache_clear()


QUESTIONS: Any = [cpu_is_faster_in_bfloat16, lambda: cpu_is_faster_packed(torch.float32)]


@pytest.mark.parametrize("is_faster", QUESTIONS, ids=["bfloat16", "packed"])
def test_measured_once(
    is_faster: Callable[[], bool], seconds: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first of all processes; again where its file is corrupt, or for another processor."""

    def in_another_process(*measured: float) -> bool:
        forget()
        seconds[:] = measured
        answer = is_faster()
        assert not seconds  # all were measured
        return answer

    assert in_another_process(1.0, 0.5)
    assert in_another_process()
    (file,) = (tmp_path / "vitlab" / "cpu_speed").iterdir()
    file.write_text(json.dumps({"speedup": 1.01}))
    assert not in_another_process()
    file.write_text("[]")
    assert in_another_process(1.0, 0.5)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": "another"})
    assert not in_another_process(1.0, 1.0)
    assert len(list(file.parent.iterdir())) == 2


def test_packed_is_measured_for_each_dtype(seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 only where oneDNN has it: it raises elsewhere."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert not cpu_is_faster_packed(torch.bfloat16)
    forget()
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    seconds[:] = [1.0, 0.5, 1.0, 2.0]
    assert cpu_is_faster_packed(torch.float32)
    assert not cpu_is_faster_packed(torch.bfloat16)


def test_other_processors_do_not_pack(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> None:
    monkeypatch.setattr(module.platform, "machine", lambda: "arm64")
    assert not cpu_is_faster_packed(torch.float32)
    assert not seconds


def test_real_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert 1e-7 < _seconds(lambda: torch.mm(torch.ones(64, 64), torch.ones(64, 64))) < 1
    forget()
    for answer in (cpu_is_faster_in_bfloat16(), cpu_is_faster_packed(torch.float32)):
        assert answer in (False, True)
    speedups = [json.loads(file.read_bytes())["speedup"] for file in (tmp_path / "vitlab" / "cpu_speed").iterdir()]
    assert all(0.001 < speedup < 100 for speedup in speedups)
    forget()
