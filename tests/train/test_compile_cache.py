"""A compile cache that survives kills."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitlab.train.compile_cache import JOB, SHARED, CompileCache

COMPILER = """#!/bin/sh
# g++, but for the first library of the model: it is left empty, and the process that compiles is killed
for argument in "$@"; do
    case "$argument" in *.main.so)
        if [ ! -e "$VITLAB_TEST/hit" ]; then
            : > "$argument"
            touch "$VITLAB_TEST/hit"
            kill -9 $(cat "$VITLAB_TEST/pid")
            exec sleep 600
        fi
    esac
done
exec g++ "$@"
"""
STEP = """
import os, sys
from pathlib import Path
folder = Path(os.environ["VITLAB_TEST"])
(folder / "pid").write_text(str(os.getpid()))
import torch
from torch import nn
from vitlab.config import TrainConfig
from vitlab.train.distributed import SINGLE
from vitlab.train.parallel import Parallel
model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
parallel = Parallel(model, SINGLE, torch.device("cpu"), TrainConfig(steps=1, compile=True), "float32")
with parallel.micro_step(last=True):
    parallel.forward(torch.ones(2, 4)).sum().backward()
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch's cache folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_files_are_shared_once_they_are_complete(root: Path) -> None:
    (root / "ab").mkdir(parents=True)
    (root / "ab" / "broken.so").touch()  # of another program, which was killed
    first = CompileCache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(first.folder)
    assert first.folder.parent == root
    assert names(first.folder) == set()
    (first.folder / "ab").mkdir()
    for name in ("whole.so", ".1.2.tmp", "locked.lock"):
        (first.folder / "ab" / name).write_text("content")
    second = CompileCache()  # not below the first, although that is what torch's variable names now
    assert second.folder.parent == root
    assert names(second.folder) == set()
    first.publish()
    (first.folder / "ab" / "later.so").touch()
    third = CompileCache()
    assert names(third.folder) == {"ab/whole.so"}
    for cache in (first, second, third):
        cache.close()
    assert names(root) == {"ab/broken.so", f"{SHARED}/ab/whole.so"}
    assert not list(root.glob(f"{JOB}*"))


def test_folders_of_killed_processes_are_removed(root: Path) -> None:
    """Whatever their ids are: a process that lives holds a lock."""
    for name in ("killed", "alive"):
        (root / f"{JOB}{name}" / "ab").mkdir(parents=True)
        (root / f"{JOB}{name}" / "ab" / "broken.so").touch()
    descriptor = os.open(root / f"{JOB}alive", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    cache, other = CompileCache(), CompileCache()
    assert {path.name for path in root.iterdir()} == {f"{JOB}alive", cache.folder.name, other.folder.name}
    cache.close()
    other.close()
    assert [path.name for path in root.iterdir()] == [f"{JOB}alive"]
    os.close(descriptor)


@pytest.mark.slow  # compiles
def test_killed_while_it_links(tmp_path: Path) -> None:
    """The library that is left empty is in nobody's way."""
    compiler = tmp_path / "g++-that-kills"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    environment = os.environ | {
        "CXX": str(compiler),
        "VITLAB_TEST": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TMPDIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    step = [sys.executable, "-c", STEP]
    assert subprocess.run(step, env=environment, check=False).returncode == -9
    empty = [path for path in (tmp_path / "cache").rglob("*.so") if not path.stat().st_size]
    assert len(empty) == 1
    assert subprocess.run(step, env=environment, check=False).returncode == 0
    assert not [path for path in (tmp_path / "cache").rglob("*.so") if not path.stat().st_size]
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {SHARED}
