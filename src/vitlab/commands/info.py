"""The commands that tell what there is: names, and the machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from vitlab.commands.output import answer, begin
from vitlab.errors import UserError


@dataclass(frozen=True)
class List:
    """What there is by name: models, data sets, recipes, studies, or the tasks of VTAB-1k and how their data is had."""

    what: Positional[Literal["models", "datasets", "recipes", "studies", "vtab"]]
    """What to list."""
    pattern: Annotated[Positional[str], tyro.conf.arg(metavar="PATTERN")] = "*"
    """Shell pattern for the names, e.g. `ViT-B*`."""
    root: Path | None = None
    """With `vtab`: a folder to look into for the tasks' data."""
    json: bool = False

    def run(self) -> int:
        from vitlab import catalog

        if self.root and self.what != "vtab":
            raise UserError(
                f"--root has no effect on a list of {self.what}: only `vitlab list vtab` looks into a folder."
            )
        rows = getattr(catalog, self.what)(self.pattern, **({"root": self.root} if self.root else {}))
        answer(rows, self.json, catalog.as_table(rows))
        return 0


@dataclass(frozen=True)
class Doctor:
    """What this machine offers to vitlab: versions, devices, the attention in use, speeds, disk; and what is amiss."""

    path: Path = Path()
    """Folder whose disk is measured."""
    json: bool = False

    def run(self) -> int:
        begin("measuring this machine")
        from vitlab.cost.doctor import diagnose, format_diagnosis

        found = diagnose(self.path)
        answer(found, self.json, format_diagnosis(found))
        return 0
