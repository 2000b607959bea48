"""Under what a benchmark's figures came about, as it stands beside them in `results/`."""

import dataclasses
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from vitlab.cost.measure import environment


def circumstances(arguments: Any, *libraries: ModuleType, **further: Any) -> dict[str, Any]:
    """Date, command, commit, processor, the versions of `libraries`, what is `further` to be said, and the arguments.

    `arguments` are a script's own dataclass; where it writes to, and works, is no part of them.
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
