"""Numbers and figures to one self-contained HTML page: no network, light and dark, for eyes and screen readers."""

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8
from PIL import Image

from vitlab.files import replacing_file
from vitlab.inspect import figures
from vitlab.inspect.figures import DARK, LIGHT, Theme

# ---- what a page is made of ----


@dataclass(frozen=True)
class Picture:
    """A PNG or WebP file, `width` pixels wide on the page where there is room; `dark` is for a dark page."""

    data: bytes
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
    """A heading and what stands under it, in this order; `parts` are one level lower. Blank lines part `text`."""

    heading: str
    text: str = ""
    numbers: Mapping[str, str] | None = None
    pictures: Sequence[Picture] = ()
    table: Table | None = None
    parts: Sequence["Section"] = ()


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole page as text. Everything given is escaped: names of classes may hold any sign."""
    links = (f'<li><a href="#s{i}">{_text(s.heading)}</a></li>' for i, s in enumerate(sections, 1))
    body = "".join(_section(section, f"s{i}", level=2) for i, section in enumerate(sections, 1))
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # nothing is ever fetched
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{_text(title)}</title>
<style>
:root {{ {_colours(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_colours(DARK)} }} }}
{STYLE}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the results</a>
<header>
<h1>{_text(title)}</h1>
{_paragraphs(lead, "lead")}
<nav aria-label="Contents"><ol>{"".join(links)}</ol></nav>
</header>
<main id="main">
{body}</main>
</body>
</html>
"""


def write_page(path: str | Path, text: str) -> None:
    """Writes the page: a reader finds the old one or the new, whole."""
    with replacing_file(Path(path)) as file:
        file.write(text.encode())


def _section(section: Section, anchor: str, level: int) -> str:
    numbers = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in (section.numbers or {}).items()
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
    """Small ones in as many columns as there is room for; large ones in up to three, of which a wide one takes two."""
    kind = "small" if max(picture.width for picture in pictures) < 200 else "large"
    wide = ["" if picture.width <= 320 else ' class="wide"' for picture in pictures]
    items = "".join(f"<li{w}>{_figure(p)}</li>" for w, p in zip(wide, pictures, strict=True))
    return f'<ul class="{kind} pictures">{items}</ul>'


def _figure(picture: Picture) -> str:
    width, height = Image.open(io.BytesIO(picture.data)).size
    crisp = ' class="crisp"' if width < picture.width else ""
    img = (
        f'<img{crisp} src="{_uri(picture.data)}" alt="{_text(picture.alt)}" '
        f'width="{picture.width}" height="{round(height * picture.width / width)}">'
    )
    if picture.dark is not None:
        dark = f'<source media="(prefers-color-scheme: dark)" srcset="{_uri(picture.dark)}">'
        img = f"<picture>{dark}{img}</picture>"
    caption = f"<figcaption>{_text(picture.caption)}</figcaption>" if picture.caption else ""
    return f"<figure>{img}{caption}</figure>"


def _table(table: Table) -> str:
    first = len(table.head) - table.numeric

    def row(cells: Sequence[str], tag: str, scope: str = "") -> str:
        kinds = ["" if i < first else ' class="number"' for i in range(len(cells))]
        inner = (f"<{tag}{scope}{k}>{_text(cell)}</{tag}>" for k, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(inner)}</tr>"

    name = _text(table.caption)
    head = row(table.head, "th", ' scope="col"')
    rows = "".join(row(cells, "td") for cells in table.rows)
    return (
        f'<div class="scroll" role="region" aria-label="{name}" tabindex="0"><table><caption>{name}</caption>'
        f"<thead>{head}</thead><tbody>{rows}</tbody></table></div>"
    )


def _text(value: str) -> str:
    return html.escape(value, quote=True)


def _paragraphs(text: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return "".join(f"<p{attribute}>{_text(part.strip())}</p>" for part in text.split("\n\n") if part.strip())


def _uri(data: bytes) -> str:
    kind = "webp" if data.startswith(b"RIFF") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def _colours(theme: Theme) -> str:
    names = ("page", "card", "ink", "muted", "line", "accent")
    return " ".join(f"--{name}: {getattr(theme, name)};" for name in names)


STYLE = """:root { color-scheme: light dark; }
* { box-sizing: border-box; }
html { background: var(--page); color: var(--ink); -webkit-text-size-adjust: 100%; line-height: 1.6;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
body { margin: 0 auto; padding: clamp(1.5rem, 5vw, 4rem) clamp(1rem, 4vw, 2.5rem); max-width: 66rem; }
h1, h2, h3 { line-height: 1.2; letter-spacing: -0.015em; margin: 0; text-wrap: balance; }
h1 { font-size: clamp(1.9rem, 5vw, 2.75rem); }
h2 { font-size: clamp(1.4rem, 3.5vw, 1.8rem); }
h3 { font-size: 1.15rem; }
p { max-width: 42rem; margin: 0.6rem 0 0; }
.lead { font-size: 1.15rem; color: var(--muted); }
a { color: var(--accent); text-underline-offset: 0.2em; }
a:focus-visible, .scroll:focus-visible { outline: 3px solid var(--accent); outline-offset: 3px; }
.skip { position: absolute; left: -100vw; }
.skip:focus { left: 1rem; top: 1rem; padding: 0.5rem 1rem; background: var(--card); }
nav ol { list-style: none; display: flex; flex-wrap: wrap; gap: 0.4rem 1.5rem; margin: 1.2rem 0 0; padding: 0; }
main > section { margin-top: 3.5rem; padding-top: 2rem; border-top: 1px solid var(--line); }
section section { margin-top: 2.25rem; }
section section p { color: var(--muted); font-size: 0.95rem; }
.numbers { display: flex; flex-wrap: wrap; gap: 0.9rem; margin: 1.5rem 0 0; }
.numbers div, figure { background: var(--card); border: 1px solid var(--line); border-radius: 0.75rem; }
.numbers div { display: flex; flex-direction: column; flex: 1 1 9.5rem; max-width: 20rem; padding: 0.9rem 1.1rem; }
dt { color: var(--muted); font-size: 0.85rem; }
dd { margin: auto 0 0; font-size: 1.6rem; font-weight: 650; line-height: 1.3; font-variant-numeric: tabular-nums; }
.pictures { list-style: none; margin: 1rem 0 0; padding: 0; gap: 0.9rem; }
.small { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.8rem, 1fr)); }
.large { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19.6rem), 1fr)); }
@media (min-width: 45rem) { .large { grid-auto-flow: dense; } .large .wide { grid-area: span 2 / span 2; } }
.beside { display: flex; flex-wrap: wrap; align-items: start; gap: 0 2rem; }
.beside .large { display: block; max-width: 100%; }
figure { margin: 0; height: 100%; padding: 0.8rem; display: flex; flex-direction: column;
  justify-content: space-between; }
.small figure { padding: 0.5rem; justify-content: start; }
img { display: block; max-width: 100%; height: auto; margin: 0 auto; border-radius: 0.25rem; }
section > .large img { width: 100%; }
.crisp { image-rendering: pixelated; }
figcaption { color: var(--muted); font-size: 0.85rem; line-height: 1.4; margin-top: 0.5rem; text-align: center;
  white-space: pre-line; overflow-wrap: anywhere; text-wrap: balance; }
.scroll { overflow-x: auto; margin-top: 1rem; max-width: 100%; }
table { border-collapse: collapse; font-size: 0.95rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--muted); padding-bottom: 0.4rem; }
th, td { text-align: left; padding: 0.35rem 0 0.35rem 1.5rem; border-bottom: 1px solid var(--line); }
tr > :first-child { padding-left: 0; }
th { font-weight: 600; vertical-align: bottom; }
.number { text-align: right; }
@media print { nav, .skip { display: none; } figure { break-inside: avoid; } }
"""


# ---- the page of a training run ----


@dataclass(frozen=True, eq=False)
class Mistakes:
    """Wrong answers: pictures, the answers and the truth as class indices, and the answers' probabilities."""

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
    """One training run as the page shows it; what is None or empty is left out."""

    name: str
    explanation: str
    numbers: Mapping[str, str]
    """Headline numbers, ready to be read: {"Test accuracy": "98.9 %"}."""
    records: Sequence[Mapping[str, Any]] = ()
    """Lines of metrics.jsonl; numbers under keys that end in loss, accuracy or lr are drawn over `step`."""
    classes: Sequence[str] = ()
    confusion: Int[np.ndarray, "K K"] | None = None
    """Counts over the test pictures; row = true class, column = answer."""
    mistakes: Mistakes | None = None
    rollout: Rollout | None = None
    filters: Float[np.ndarray, "n P P 3"] | None = None
    """`filter_components` of the patch embedding."""
    positions: Float[np.ndarray, "h w h2 w2"] | None = None
    """`position_similarity` of the position table."""
    distances: Float[np.ndarray, "L k"] | None = None
    """`mean_attention_distance` over test pictures."""


def training_page(title: str, lead: str, phases: Sequence[Phase]) -> str:
    """The page of one or more training runs: curves, confusions, wrong answers, and the models from inside.

    Give the text to `write_page`. Raises ValueError where a phase's parts do not fit each other.
    """
    sections = []
    for phase in phases:
        parts = (_curves(phase), _confusion(phase), _mistakes(phase), _rollout(phase), _inside(phase))
        shown = [part for part in parts if part is not None]
        sections.append(Section(phase.name, phase.explanation, phase.numbers, parts=shown))
    return page(title, lead, sections)


def _drawn(draw: Callable[..., figures.Figure], *args: Any, alt: str, caption: str = "", **options: Any) -> Picture:
    """A figure for the light and for the dark page."""
    light, dark = (draw(*args, **options, theme=theme) for theme in (LIGHT, DARK))
    width = round(100 * light.get_figwidth())
    return Picture(figures.png(light), alt, width, caption, figures.png(dark))


def _curves(phase: Phase) -> Section | None:
    names = dict.fromkeys(key for record in phase.records for key in record)
    pictures = []
    for title, ending in (("Loss", "loss"), ("Accuracy", "accuracy"), ("Learning rate", "lr")):
        keys = [name for name in names if name.endswith(ending)]
        last = {key: record[key] for record in phase.records for key in keys if record.get(key) is not None}
        if last:
            ends = ", ".join(f"{key.replace('_', ' ')} ends at {value:.4g}" for key, value in last.items())
            alt, percent = f"{title} over training steps: {ends}.", ending == "accuracy"
            pictures.append(_drawn(figures.curves, phase.records, list(last), title, percent=percent, alt=alt))
    return Section("Training", pictures=pictures) if pictures else None


def _confusion(phase: Phase) -> Section | None:
    if phase.confusion is None:
        return None
    counts, names = phase.confusion, phase.classes
    if len(counts) != len(names):
        raise ValueError(
            f"{phase.name}: a confusion matrix of {len(counts)} classes and {len(names)} class names; "
            f"give one name for each class, in the order of the rows."
        )
    right, total = int(np.trace(counts)), int(counts.sum())
    wrong = counts - np.diag(np.diag(counts))
    order = (divmod(int(i), len(counts)) for i in np.argsort(-wrong, axis=None, kind="stable")[:8])
    rows = [
        (names[true], names[said], str(n), f"{n / counts[true].sum():.1%}")
        for true, said in order
        if (n := int(wrong[true, said]))
    ]
    head = ("true class", "answer", "pictures", "share of class")
    alt = f"Confusion matrix of {len(counts)} classes: {right} of {total} pictures lie on its diagonal."
    return Section(
        "Which classes are taken for which",
        f"{right} of {total} test pictures were answered right. A row is a true class, a column an answer; a "
        f"perfect model fills the diagonal alone. Colour grows with the square root of the share of the row, so "
        f"that rare mistakes can be seen.",
        pictures=[_drawn(figures.confusion, counts, names, alt=alt)],
        table=Table("Most frequent confusions", head, rows, numeric=2) if rows else None,
    )


def _mistakes(phase: Phase, most: int = 24) -> Section | None:
    if phase.mistakes is None:
        return None
    wrong, pictures = phase.mistakes, []
    for i in map(int, np.argsort(-wrong.confidence, kind="stable")[:most]):
        said, true = phase.classes[int(wrong.said[i])], phase.classes[int(wrong.true[i])]
        caption = f"said {said}\n{wrong.confidence[i]:.0%} sure\ntruly {true}"
        alt = f"A picture of {true} that was taken for {said}."
        pictures.append(Picture(figures.encoded(figures.fit(wrong.pictures[i], 192)), alt, 96, caption))
    text = "What the model said, how sure it was of it, and the truth; the surest mistakes first."
    return Section("Wrong answers", text if pictures else "There are none.", pictures=pictures)


def _rollout(phase: Phase) -> Section | None:
    if phase.rollout is None:
        return None
    pictures, shown = [], phase.rollout
    for picture, caption, weights in zip(shown.pictures, shown.captions, shown.maps, strict=True):
        row, column = np.unravel_index(int(weights.argmax()), weights.shape)
        alt = (
            f"{caption}: the picture, and beside it the same under its attention, which is highest at patch row "
            f"{row + 1} of {weights.shape[0]}, column {column + 1} of {weights.shape[1]}."
        )
        pictures.append(Picture(figures.encoded(figures.rollout(picture, weights)), alt, 288, caption))
    return Section(
        "Where the answer looks",
        "Attention rollout (Fig. 6, App. D.8): the attention of all heads, followed through all layers from the "
        "answer back to the patches. Yellow marks the patches that the answer draws on most, dark blue those "
        "that it hardly uses.",
        pictures=pictures,
    )


def _inside(phase: Phase) -> Section | None:
    pictures = []
    if phase.filters is not None:
        n = len(phase.filters)
        alt = f"The first {n} principal components of the patch filters, as small colour pictures."
        caption = "Patch filters (Fig. 7, left): the main patterns by which a patch is described."
        pictures.append(_drawn(figures.filters, phase.filters, alt=alt, caption=caption))
    if phase.positions is not None:
        h, w = phase.positions.shape[:2]
        alt = f"Cosine similarity of position embeddings: {h} by {w} tiles, each over {h} by {w} patches."
        caption = "Position embeddings (Fig. 7, centre): each tile compares one patch's place with all places."
        pictures.append(_drawn(figures.positions, phase.positions, alt=alt, caption=caption))
    if phase.distances is not None:
        layers, heads = phase.distances.shape
        first, last = phase.distances[0].mean(), phase.distances[-1].mean()
        alt = (
            f"Mean attention distance of {heads} heads in each of {layers} layers; on average {first:.1f} pixels "
            f"in the first layer and {last:.1f} in the last."
        )
        caption = "Attention distance (Fig. 7, right): from how far each head gathers."
        pictures.append(_drawn(figures.attention_distance, phase.distances, alt=alt, caption=caption))
    return Section("What the model has learned", pictures=pictures) if pictures else None
