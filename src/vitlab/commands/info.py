"""The commands that list names and describe the machine: list, doctor."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from vitlab.commands.output import Json, print_result, print_start
from vitlab.display import format_table
from vitlab.errors import UserError


@dataclass(frozen=True)
class List:
    """List models, data sets, recipes, studies, or the tasks of VTAB-1k and the sources of their data."""

    what: Positional[Literal["models", "datasets", "recipes", "studies", "vtab"]]
    """What to list."""
    pattern: Annotated[Positional[str], tyro.conf.arg(metavar="PATTERN")] = "*"
    """Shell pattern for the names, e.g. `ViT-B*`."""
    root: Path | None = None
    """With `vtab`: a folder to search for the tasks' data."""
    json: Json = False

    def run(self) -> int:
        from vitlab.commands import listing

        if self.root and self.what != "vtab":
            raise UserError(
                f"--root has no effect on a list of {self.what}: only `vitlab list vtab` looks into a folder."
            )
        rows = getattr(listing, self.what)(self.pattern, **({"root": self.root} if self.root else {}))
        print_result(rows, self.json, format_table(rows) or f"no {self.what} match {self.pattern!r}")
        return 0


@dataclass(frozen=True)
class Doctor:
    """Report versions, devices, the attention in use, speeds and disk of this machine, and problems."""

    path: Path = Path()
    """Folder on the disk to measure."""
    json: Json = False

    def run(self) -> int:
        print_start("measuring this machine")
        from vitlab.cost.doctor import diagnose, format_diagnosis

        result = diagnose(self.path)
        print_result(result, self.json, format_diagnosis(result))
        return 0
