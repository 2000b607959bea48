"""Numbers and figures to one self-contained HTML page: no network, light and dark, for eyes, keyboards and
readers."""

import base64
import html
import os
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8
from matplotlib.figure import Figure

from vitlab.inspect import figures
from vitlab.inspect.figures import DARK, LIGHT, Theme

# ---- what a page is made of ----


@dataclass(frozen=True)
class Picture:
    """One PNG on the page, `width` pixels wide where there is room; `dark` takes its place on a dark page."""

    png: bytes
    alt: str
    width: int
    caption: str = ""
    dark: bytes | None = None


@dataclass(frozen=True)
class Table:
    """Rows of cells under a head; the last `numeric` columns are numbers and stand to the right."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: int = 0


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it, in this order; `parts` are one level lower."""

    heading: str
    text: str = ""
    numbers: Mapping[str, str] | None = None
    pictures: Sequence[Picture] = ()
    table: Table | None = None
    parts: Sequence["Section"] = ()


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole page as text. Everything given is escaped: names of classes may hold any sign."""
    contents = "".join(f'<li><a href="#s{i}">{_text(s.heading)}</a></li>' for i, s in enumerate(sections, 1))
    body = "".join(_section(section, f"s{i}", level=2) for i, section in enumerate(sections, 1))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{_text(title)}</title>
<style>{_style()}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the results</a>
<header>
<h1>{_text(title)}</h1>
{_paragraphs(lead, "lead")}
<nav aria-label="Contents"><ol>{contents}</ol></nav>
</header>
<main id="main">{body}</main>
</body>
</html>
"""


def write_page(path: str | Path, text: str) -> None:
    """Writes the page beside its place and then renames it: a reader finds the old page or the new, whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(aside).chmod(0o644)
        Path(aside).replace(path)
    finally:
        Path(aside).unlink(missing_ok=True)


def _section(section: Section, anchor: str, level: int) -> str:
    numbers = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>"
        for name, value in (section.numbers or {}).items()
    )
    parts = "".join(_section(part, f"{anchor}-{i}", level + 1) for i, part in enumerate(section.parts, 1))
    return "".join(
        [
            f'<section><h{level} id="{anchor}">{_text(section.heading)}</h{level}>',
            _paragraphs(section.text),
            f'<dl class="numbers">{numbers}</dl>' if numbers else "",
            '<div class="beside">' if section.table else "",
            _pictures(section.pictures) if section.pictures else "",
            f"{_table(section.table)}</div>" if section.table else "",
            f"{parts}</section>\n",
        ]
    )


def _pictures(pictures: Sequence[Picture]) -> str:
    """Small ones flow like words; large ones stand in up to three columns, of which a wide one takes two."""
    kind = "small" if max(picture.width for picture in pictures) < 250 else "large"
    wide = ["" if picture.width <= 320 else ' class="wide"' for picture in pictures]
    items = "".join(f"<li{w}>{_figure(p)}</li>" for w, p in zip(wide, pictures, strict=True))
    return f'<ul class="{kind} pictures">{items}</ul>'


def _figure(picture: Picture) -> str:
    width, height = struct.unpack(">II", picture.png[16:24])  # from the PNG's header
    height = round(height * picture.width / width)
    crisp = ' class="crisp"' if width < picture.width else ""
    img = (
        f'<img{crisp} src="{_uri(picture.png)}" alt="{_text(picture.alt)}" '
        f'width="{picture.width}" height="{height}">'
    )
    if picture.dark is not None:
        dark = f'<source media="(prefers-color-scheme: dark)" srcset="{_uri(picture.dark)}">'
        img = f"<picture>{dark}{img}</picture>"
    caption = f"<figcaption>{_text(picture.caption)}</figcaption>" if picture.caption else ""
    return f"<figure>{img}{caption}</figure>"


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        first = len(cells) - table.numeric
        kinds = ["" if i < first else ' class="number"' for i in range(len(cells))]
        inner = (f"<{tag}{kind}>{_text(cell)}</{tag[:2]}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(inner)}</tr>"

    name = _text(table.caption)
    rows = "".join(row(cells, "td") for cells in table.rows)
    return (
        f'<div class="scroll" role="region" aria-label="{name}" tabindex="0"><table><caption>{name}</caption>'
        f"<thead>{row(table.head, 'th scope=col')}</thead><tbody>{rows}</tbody></table></div>"
    )


def _text(value: str) -> str:
    return html.escape(value, quote=True)


def _paragraphs(text: str, kind: str = "") -> str:
    """Blank lines part paragraphs."""
    attribute = f' class="{kind}"' if kind else ""
    return "".join(f"<p{attribute}>{_text(part.strip())}</p>" for part in text.split("\n\n") if part.strip())


def _uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"


def _style() -> str:
    def colours(theme: Theme) -> str:
        names = ("page", "card", "ink", "muted", "line", "accent")
        return " ".join(f"--{name}: {getattr(theme, name)};" for name in names)

    return f"""
:root {{ {colours(LIGHT)} color-scheme: light dark; }}
@media (prefers-color-scheme: dark) {{ :root {{ {colours(DARK)} }} }}
{STYLE}"""


STYLE = """* { box-sizing: border-box; } html { font: 100%/1.6 system-ui, -apple-system, "Segoe UI", Roboto,
"Helvetica Neue", "Liberation Sans", sans-serif; background: var(--page); color: var(--ink);
-webkit-text-size-adjust: 100%; } body { margin: 0 auto; padding: clamp(1.5rem, 5vw, 4rem) clamp(1rem, 4vw,
2.5rem); max-width: 66rem; } h1, h2, h3 { line-height: 1.2; text-wrap: balance; margin: 0; letter-spacing:
-0.015em; } h1 { font-size: clamp(1.9rem, 5vw, 2.75rem); } h2 { font-size: clamp(1.4rem, 3.5vw, 1.8rem); } h3
{ font-size: 1.1rem; } p { max-width: 42rem; margin: 0.6rem 0 0; } .lead { font-size: 1.15rem; color:
var(--muted); } a { color: var(--accent); text-underline-offset: 0.2em; } a:focus-visible,
.scroll:focus-visible { outline: 3px solid var(--accent); outline-offset: 3px; border-radius: 2px; } .skip {
position: absolute; left: -100vw; } .skip:focus { left: 1rem; top: 1rem; padding: 0.5rem 1rem; background:
var(--card); } nav ol { list-style: none; display: flex; flex-wrap: wrap; gap: 0.4rem 1.5rem; margin: 1.2rem 0
0; padding: 0; } main > section { margin-top: 3.5rem; padding-top: 2rem; border-top: 1px solid var(--line); }
section section { margin-top: 2.25rem; } section section p { color: var(--muted); font-size: 0.95rem; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 0.75rem; margin:
1.5rem 0 0; } .numbers div { display: flex; flex-direction: column; background: var(--card); border: 1px solid
var(--line); border-radius: 0.75rem; padding: 0.9rem 1.1rem; } dt { color: var(--muted); font-size: 0.85rem; }
dd { margin: auto 0 0; font-size: 1.6rem; font-weight: 650; line-height: 1.3; font-variant-numeric:
tabular-nums; } .pictures { list-style: none; margin: 1rem 0 0; padding: 0; gap: 0.9rem; } .beside { display:
flex; flex-wrap: wrap; align-items: start; gap: 0 2.5rem; } .small { display: grid; grid-template-columns:
repeat(auto-fill, minmax(6.8rem, 1fr)); } .large { display: grid; grid-template-columns: repeat(auto-fill,
minmax(min(100%, 19.6rem), 1fr)); } .beside .large { display: block; max-width: 100%; } @media (min-width:
45rem) { .large .wide { grid-column: span 2; } } figure { margin: 0; height: 100%; display: flex;
flex-direction: column; justify-content: space-between; background: var(--card); border: 1px solid
var(--line); border-radius: 0.75rem; padding: 0.8rem; } .small figure { padding: 0.6rem; } img { display:
block; max-width: 100%; height: auto; margin: auto; border-radius: 0.25rem; } .large img { width: 100%; }
.beside img { width: auto; } .crisp { image-rendering: pixelated; } figcaption { color: var(--muted);
font-size: 0.85rem; line-height: 1.4; margin-top: 0.5rem; text-align: center; font-variant-numeric:
tabular-nums; white-space: pre-line; } .scroll { overflow-x: auto; margin-top: 1rem; } table {
border-collapse: collapse; font-size: 0.95rem; font-variant-numeric: tabular-nums; } caption { text-align:
left; color: var(--muted); padding-bottom: 0.4rem; } th, td { text-align: left; padding: 0.35rem 0 0.35rem
1.5rem; border-bottom: 1px solid var(--line); } th { font-weight: 600; } tr > :first-child { padding-left: 0;
} .number { text-align: right; } @media print { nav, .skip { display: none; } figure { break-inside: avoid; }
}
"""


# ---- the page of a training run ----


@dataclass(frozen=True, eq=False)
class Mistakes:
    """Wrong answers: the pictures, the answers and the truth as class indices, the answers' probabilities."""

    pictures: UInt8[np.ndarray, "n H W 3"]
    said: Int[np.ndarray, " n"]
    true: Int[np.ndarray, " n"]
    confidence: Float[np.ndarray, " n"]


@dataclass(frozen=True, eq=False)
class Rollout:
    """Pictures, what to write under each, and where the answer's attention lies (`class_attention_grid`)."""

    pictures: UInt8[np.ndarray, "n H W 3"]
    captions: Sequence[str]
    maps: Float[np.ndarray, "n h w"]


@dataclass(frozen=True, eq=False)
class Phase:
    """One training run as the page shows it; what is None is left out."""

    name: str
    explanation: str
    numbers: Mapping[str, str]
    """Headline numbers, ready to be read: {"Test accuracy": "98.9 %"}."""
    records: Sequence[Mapping[str, Any]] = ()
    """The lines of metrics.jsonl; keys that end in loss, accuracy or lr are drawn over `step`."""
    classes: Sequence[str] = ()
    confusion: Int[np.ndarray, "K K"] | None = None
    """Counts over the test pictures; row = true class, column = answer."""
    mistakes: Mistakes | None = None
    filters: Float[np.ndarray, "n P P 3"] | None = None
    positions: Float[np.ndarray, "h w h2 w2"] | None = None
    distances: Float[np.ndarray, "L k"] | None = None
    rollout: Rollout | None = None


def training_page(title: str, lead: str, phases: Sequence[Phase]) -> str:
    """The page of one or more training runs: curves, confusion matrix, wrong answers, and the model from
    inside."""
    sections = []
    for phase in phases:
        _check(phase)
        parts = (_curves(phase), _confusion(phase), _mistakes(phase), _rollout(phase), _inside(phase))
        sections.append(
            Section(
                phase.name,
                phase.explanation,
                phase.numbers,
                parts=[part for part in parts if part is not None],
            )
        )
    return page(title, lead, sections)


def _check(phase: Phase) -> None:
    if phase.confusion is not None and len(phase.confusion) != len(phase.classes):
        raise ValueError(
            f"{phase.name}: a confusion matrix of {len(phase.confusion)} classes with {len(phase.classes)} names; "
            f"give one name for each class, in the order of the rows."
        )


def _drawn(draw: Callable[..., Figure], alt: str, *args: Any, caption: str = "", **options: Any) -> Picture:
    """A figure for the light and for the dark page."""
    light, dark = (draw(*args, **options, theme=theme) for theme in (LIGHT, DARK))
    width = round(100 * light.get_figwidth())
    return Picture(figures.png(light), alt, width, caption, figures.png(dark))


def _curves(phase: Phase) -> Section | None:
    names = list(dict.fromkeys(key for record in phase.records for key in record))
    pictures = []
    for title, ending in (("Loss", "loss"), ("Accuracy", "accuracy"), ("Learning rate", "lr")):
        keys = [name for name in names if name.endswith(ending)]
        if keys:
            last = [(key, [r[key] for r in phase.records if r.get(key) is not None][-1:]) for key in keys]
            said = ", ".join(
                f"{key.replace('_', ' ')} ends at {values[0]:.4g}" for key, values in last if values
            )
            pictures.append(
                _drawn(
                    figures.curves,
                    f"{title} over training steps: {said}.",
                    phase.records,
                    keys,
                    title,
                    percent=ending == "accuracy",
                )  # fmt: skip
            )
    return Section("Training", pictures=pictures) if pictures else None


def _confusion(phase: Phase) -> Section | None:
    if phase.confusion is None:
        return None
    counts, right, total = phase.confusion, int(np.trace(phase.confusion)), int(phase.confusion.sum())
    wrong = counts - np.diag(np.diag(counts))
    order = [divmod(int(i), len(counts)) for i in np.argsort(-wrong, axis=None, kind="stable")[:6]]
    rows = [
        (phase.classes[true], phase.classes[said], str(n), f"{n / counts[true].sum():.1%}")
        for true, said in order
        if (n := int(wrong[true, said]))
    ]
    head = ("true class", "answer", "pictures", "share of class")
    table = Table("Most frequent confusions", head, rows, numeric=2)
    alt = f"Confusion matrix of {len(counts)} classes: {right} of {total} pictures on its diagonal."
    return Section(
        "Which classes are taken for which",
        f"{right} of {total} test pictures were answered right. Each row is a true class, each column an answer; a "
        f"darker or brighter field is a larger share of its row, and a perfect model fills the diagonal alone. "
        f"Colour grows with the square root of the share, so that rare mistakes can be seen.",
        pictures=[_drawn(figures.confusion, alt, counts, phase.classes)],
        table=table if rows else None,
    )


def _mistakes(phase: Phase, most: int = 24) -> Section | None:
    if phase.mistakes is None:
        return None
    wrong, pictures = phase.mistakes, []
    for i in np.argsort(-wrong.confidence, kind="stable")[:most]:
        said, true = phase.classes[wrong.said[i]], phase.classes[wrong.true[i]]
        alt = f"A picture of {true} that was taken for {said}."
        caption = f"said {said} ({wrong.confidence[i]:.0%})\ntruly {true}"
        pictures.append(Picture(figures.picture_png(wrong.pictures[i]), alt, 96, caption))
    text = "No picture was answered wrong."
    if pictures:
        text = "What the model said, how sure it was of it, and the truth; the surest mistakes first."
    return Section("Wrong answers", text, pictures=pictures)


def _rollout(phase: Phase) -> Section | None:
    if phase.rollout is None:
        return None
    pictures = []
    for picture, caption, weights in zip(
        phase.rollout.pictures, phase.rollout.captions, phase.rollout.maps, strict=True
    ):
        seen = figures.overlay(picture, weights)
        both = figures.beside(picture, seen)
        row, column = np.unravel_index(int(weights.argmax()), weights.shape)
        alt = (
            f"{caption}: left the picture, right the same under its attention, which is highest at row {row + 1} of "
            f"{weights.shape[0]}, column {column + 1} of {weights.shape[1]} of the patches."
        )
        pictures.append(Picture(figures.picture_png(both), alt, 288, caption))
    return Section(
        "Where the answer looks",
        "Attention rollout (Fig. 6, App. D.8): the attention of all heads, followed through all layers from the "
        "answer back to the patches. Yellow marks the patches that the answer draws on most, dark blue those it "
        "hardly uses.",
        pictures=pictures,
    )


def _inside(phase: Phase) -> Section | None:
    pictures = []
    if phase.filters is not None:
        n = len(phase.filters)
        alt = f"The first {n} principal components of the patch filters, as small colour pictures."
        caption = "Patch filters (Fig. 7 left): the main patterns that a patch is measured by."
        pictures.append(_drawn(figures.filters, alt, phase.filters, caption=caption))
    if phase.positions is not None:
        h, w = phase.positions.shape[:2] alt = ( f"Cosine similarity of position embeddings: {h} by {w} tiles,
        each a map over {h} by {w} patches." ) caption = "Position embeddings (Fig. 7 centre): each tile is
        one patch and shows which places it finds near." pictures.append(_drawn(figures.positions, alt,
        phase.positions, caption=caption)) if phase.distances is not None: layers, heads =
        phase.distances.shape first, last = phase.distances[0].mean(), phase.distances[-1].mean() alt = (
        f"Mean attention distance of {heads} heads in each of {layers} layers: on average {first:.1f} pixels
        in " f"the first layer and {last:.1f} in the last." ) caption = "Attention distance (Fig. 7 right):
        how far each head gathers." pictures.append(_drawn(figures.attention_distance, alt, phase.distances,
        caption=caption)) return Section("What the model has learned", pictures=pictures) if pictures else
        None
