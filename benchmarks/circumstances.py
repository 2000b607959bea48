"""Under what a benchmark's figures came about, as it stands beside them in `results/`."""

import dataclasses
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any


def circumstances(arguments: Any, *libraries: ModuleType, **further: Any) -> dict[str, Any]:
    """Date, command, commit, processor, the versions of `libraries`, what is `further` to be said, and the arguments.

    `arguments` are a script's own dataclass; where it writes to is no part of them.
    """
    here, git = Path(__file__).parent, ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, cwd=here, capture_output=True, text=True, check=False).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.processor())
    given = {name: value for name, value in dataclasses.asdict(arguments).items() if name not in ("out", "listed")}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": commit,
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        **{library.__name__: library.__version__ for library in libraries},
        **further,
        "arguments": given,
    }
