"""One part of the paper, shown: an equation on tensors, a table as text, a figure as files."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vitlab.display import format_table
from vitlab.errors import UserError
from vitlab.inspection.figures import png, svg
from vitlab.io import write_bytes
from vitlab.paper.equations import EQUATIONS, MODEL, TOLERANCE, check_model
from vitlab.paper.figures import PAPER_FIGURES, UNTRAINED, Figures, Request
from vitlab.paper.parts import Part, find_parts, plain
from vitlab.paper.recorded import STUDIES, read_record
from vitlab.paper.sections import SECTIONS
from vitlab.paper.tables import PAPER_TABLES
from vitlab.studies.report import as_text as study_text

OF_A_MODEL = ("fig6", "fig7", "fig10", "fig11", "fig14")
"""Figures that look into a model."""


@dataclass(frozen=True)
class Shown:
    """What a part of the paper looks like here."""

    parts: Sequence[Part]
    """Its rows in the list."""
    text: str
    """The equation, the table, or the recorded study; empty for a section."""
    files: Sequence[Path] = ()
    """The figures, as PNG and SVG."""

    def as_text(self) -> str:
        """For a terminal."""
        lines = []
        for part in self.parts:
            lines.append(f"{part.part}: {plain(part.text)}")
            for name, value in (("code", part.code), ("run", part.run), ("known here", part.known)):
                if value and value != f"`vitlab paper {part.key}`":
                    lines.append(f"  {name}: {plain(value)}")
        files = [f"figure: {path}" for path in self.files if path.suffix == ".png"]
        return "\n".join([*lines, *([""] if self.text else []), *self.text.splitlines(), *files])

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "parts": [vars(part) for part in self.parts],
            "text": self.text,
            "files": [str(path) for path in self.files],
        }


def show(name: str, request: Request) -> Shown:
    """Shows the part called `name`; figures go to files in `request.out`.

    Raises UserError for an unknown name, and for a checkpoint or images that the part has no use for.
    """
    parts = find_parts(name)
    key = parts[0].key
    takes_model = key in EQUATIONS or key in OF_A_MODEL or key in SECTIONS
    if request.checkpoint and not takes_model:
        others = ", ".join([*SECTIONS, *EQUATIONS, *OF_A_MODEL])
        raise UserError(f"{key} shows no model; leave {request.checkpoint} out. A CHECKPOINT is for {others}.")
    if request.images and not takes_model and key != "fig1":
        raise UserError(f"{key} shows no image; leave {request.images[0]} out.")
    if key in EQUATIONS:
        return Shown(parts, equation_text(key, request))
    if key in PAPER_TABLES:
        return Shown(parts, "\n\n".join([format_table(PAPER_TABLES[key]()), *_study(key)]))
    text, figures = "\n".join(_study(key)), {}
    if key in SECTIONS:
        text, figures = SECTIONS[key](request)
    elif key in PAPER_FIGURES:
        figures = PAPER_FIGURES[key](request)
    return Shown(parts, text, write_figures(figures, request.out))


def write_figures(figures: Figures, out: Path) -> list[Path]:
    """Writes each figure as PNG and SVG."""
    files = []
    for name, figure in figures.items():
        for suffix, data in ((".png", png(figure)), (".svg", svg(figure))):
            write_bytes(path := out / f"{name}{suffix}", data)
            files.append(path)
    return files


def _study(key: str) -> list[str]:
    """The recorded study of a part, as text."""
    return [f"recorded here: {study_text(read_record(STUDIES[key]))}"] if key in STUDIES else []


@torch.no_grad()
def equation_text(key: str, request: Request) -> str:
    """The lines of code of an equation, the shape of each tensor, and how far the model's own tensor is from it."""
    equation = EQUATIONS[key]
    request = replace(request, untrained=True, shown=1)
    vit = request.vit.eval()
    check_model(vit)
    images = request.batch.to(next(vit.parameters()).device)
    steps = list(equation(vit, images))
    (name, result), (_, reference) = steps[-2:]
    difference = float((result - reference).abs().max() / reference.square().mean().sqrt())
    verdict = "equal" if difference <= TOLERANCE else "DIFFERENT"
    code = inspect.getsource(equation).replace(f'    """{equation.__doc__}"""\n', "").strip()
    shapes = [{"tensor": step, "shape": list(tensor.shape)} for step, tensor in steps if step != MODEL]
    return "\n".join(
        [
            str(equation.__doc__),
            "",
            *(f"    {line}" for line in code.splitlines()),
            "",
            format_table(shapes),
            f"{name} and what {request.checkpoint or UNTRAINED} computes: {verdict}, the largest difference is "
            f"{difference:.1e} of the root mean square",
        ]
    )
