"""A compile cache that survives kills."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitlab.train.compiled import JOB, SHARED, CompileCache

COMPILER = """#!/bin/sh
# g++, but for the first library of the model: it is left empty, and the process that compiles gets a signal
for each in "$@"; do
    case "$each" in *.main.so)
        if [ ! -e "$VITLAB_TEST/hit" ]; then
            : > "$each"
            touch "$VITLAB_TEST/hit"
            kill -$(cat "$VITLAB_TEST/signal") $(cat "$VITLAB_TEST/pid")
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
from vitlab.train.distributed import SINGLE
from vitlab.train.parallel import Parallel
model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
parallel = Parallel(model, SINGLE, torch.device("cpu"), precision="float32", compiled=True)
with parallel.micro_step(last=True):
    parallel.forward(torch.ones(2, 4)).sum().backward()
"""
RUN = """
import os, shlex, sys
from pathlib import Path
(Path(os.environ["VITLAB_TEST"]) / "pid").write_text(str(os.getpid()))
from vitlab.cli import main
main(shlex.split(sys.argv[1]))
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
    first = CompileCache("1")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(first.folder) == str(root / f"{JOB}1")
    assert names(first.folder) == set()
    (first.folder / "ab").mkdir()
    for name in ("whole.so", ".1.2.tmp", "locked.lock"):
        (first.folder / "ab" / name).write_text("content")
    second = CompileCache("2")  # below no other's folder, although that is what torch's variable names now
    assert names(second.folder) == set()
    first.publish()
    (first.folder / "ab" / "later.so").touch()
    third = CompileCache("3")
    assert names(third.folder) == {"ab/whole.so"}
    for cache in (first, second, third):
        cache.close()
    assert names(root) == {"ab/broken.so", f"{SHARED}/ab/whole.so"}
    assert not list(root.glob(f"{JOB}*"))


def test_folders_of_killed_jobs_are_removed(root: Path) -> None:
    (root / f"{JOB}killed" / "ab").mkdir(parents=True)
    (root / f"{JOB}killed" / "ab" / "broken.so").touch()
    (root / f"{JOB}alive").mkdir()
    descriptor = os.open(root / f"{JOB}alive", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    cache = CompileCache("new")
    assert {path.name for path in root.iterdir()} == {f"{JOB}alive", f"{JOB}new"}
    cache.close()
    assert {path.name for path in root.iterdir()} == {f"{JOB}alive"}
    os.close(descriptor)


def test_processes_of_one_job_use_one_folder(root: Path) -> None:
    first, second = CompileCache("job"), CompileCache("job")
    assert first.folder == second.folder
    (first.folder / "file").touch()
    first.close()
    assert names(second.folder) == {"file"}
    second.close()
    assert list(root.iterdir()) == []


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With a compiler that sends a signal."""
    compiler = tmp_path / "g++-that-kills"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    return os.environ | {
        "CXX": str(compiler), "VITLAB_TEST": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TMPDIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }  # fmt: skip


@pytest.mark.slow  # compiles
def test_killed_while_it_links(tmp_path: Path, environment: dict[str, str]) -> None:
    """The library that is left empty is in nobody's way."""
    (tmp_path / "signal").write_text("9")
    step = [sys.executable, "-c", STEP]
    assert subprocess.run(step, env=environment, check=False).returncode == -9
    empty = [path for path in (tmp_path / "cache").rglob("*.so") if not path.stat().st_size]
    assert len(empty) == 1
    assert subprocess.run(step, env=environment, check=False).returncode == 0
    assert not [path for path in (tmp_path / "cache").rglob("*.so") if not path.stat().st_size]
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {SHARED}


@pytest.mark.slow  # compiles
def test_asked_to_stop_while_it_compiles(tmp_path: Path, environment: dict[str, str]) -> None:
    """The run ends at once with 143; nothing half done is left, and the folder is free."""
    from program import SMALL

    (tmp_path / "signal").write_text("TERM")
    folder = tmp_path / "run"
    command = f"pretrain tiny-digits --workdir {folder} --steps 3 --compile {' '.join(SMALL)}"
    ended = subprocess.run(
        [sys.executable, "-c", RUN, command], env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert ended.returncode == 143, ended.stderr
    assert "stopped while the model was compiled, before the first step" in ended.stderr
    assert {path.name for path in folder.iterdir()} - {"tensorboard"} == {
        ".lock", "config.json", "runtime.json", "metrics.jsonl", "speed.jsonl",
    }  # fmt: skip
    assert not list((tmp_path / "cache").glob(f"{JOB}*"))
