"""The environment of a benchmark run, recorded with its results in `results/`."""

import dataclasses
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from vitlab.cost.measure import environment


def describe_run(arguments: Any, *libraries: ModuleType, **further: Any) -> dict[str, Any]:
    """Date, command, commit, processor, the versions of `libraries`, `further` fields, and the arguments.

    `arguments` is the dataclass of the script; its paths are left out.
    """
    given = {name: value for name, value in dataclasses.asdict(arguments).items() if not isinstance(value, Path)}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        **environment(),
        **{library.__name__: library.__version__ for library in libraries},
        **further,
        "arguments": given,
    }
