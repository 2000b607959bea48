"""Under what a measurement came about: the commit, the machine, the versions."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import vitlab

PACKAGE = Path(vitlab.__file__).parent


def circumstances(*libraries: str) -> dict[str, Any]:
    """The commit, the processor, the cores that this process may use, and the versions of installed `libraries`."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.processor())
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return {
        "commit": commit(),
        "cpu": cpu,
        "cores": len(affinity(0)) if affinity else os.cpu_count() or 1,
        **{library: metadata.version(library) for library in libraries},
    }


def commit() -> str | None:
    """Of the checkout that this code runs from, with `-dirty` where it was changed since; None outside of one."""
    git = ["git", "-C", str(PACKAGE)]
    try:
        top = subprocess.run([*git, "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=True).stdout
        if Path(top.strip()) / "src" / "vitlab" != PACKAGE:  # installed somewhere inside of another repository
            return None
        said = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(said, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
