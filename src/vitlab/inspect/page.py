"""What a page is made of: one self-contained HTML file, no network, light and dark, for eyes and screen readers."""

import base64
import hashlib
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NewType

from PIL import Image

from vitlab.inspect.figures import DARK, LIGHT, Theme
from vitlab.io import replacing_file

Markup = NewType("Markup", str)
"""HTML that stands on the page as it is: everything in it that was given by others has been through `escape`."""


@dataclass(frozen=True)
class PageImage:
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
    """A heading and what stands under it, in this order; `parts` are one level lower, in `columns` side by side where
    there is room. Blank lines part `text`."""

    heading: str
    text: str = ""
    numbers: Mapping[str, str] | None = None
    images: Sequence[PageImage] = ()
    table: Table | None = None
    markup: Markup = Markup("")
    parts: Sequence["Section"] = ()
    columns: bool = False


def page(title: str, lead: str, sections: Sequence[Section], *, style: str = "", script: str = "") -> str:
    """The whole page as text. Everything given but markup, style and script is escaped: names may hold any sign.

    `script` is the only one that the page lets run: a browser that honors its policy runs nothing else and fetches
    nothing at all.
    """
    links = (f'<li><a href="#s{i}">{escape(s.heading)}</a></li>' for i, s in enumerate(sections, 1))
    body = "".join(_section(section, f"s{i}", level=2) for i, section in enumerate(sections, 1))
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # nothing is ever fetched
    if script:
        script = f"\n{script}"
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>
:root {{ {_colors(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_colors(DARK)} }} }}
{STYLE}{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the results</a>
<header>
<h1>{escape(title)}</h1>
{_paragraphs(lead, "lead")}
<nav aria-label="Contents"><ol>{"".join(links)}</ol></nav>
</header>
<main id="main">
{body}</main>
{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""


def write_page(path: str | Path, text: str) -> None:
    """Writes the page: a reader finds the old one or the new, whole."""
    with replacing_file(Path(path)) as file:
        file.write(text.encode())


def _section(section: Section, anchor: str, level: int) -> str:
    numbers = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in (section.numbers or {}).items()
    )
    parts = "".join(_section(part, f"{anchor}-{i}", level + 1) for i, part in enumerate(section.parts, 1))
    if section.columns:
        parts = f'<div class="columns">{parts}</div>'
    wide = ' class="wide"' if any(image.width > 400 for image in section.images) else ""
    return "".join(
        [
            f'<section{wide}><h{level} id="{anchor}">{escape(section.heading)}</h{level}>',
            _paragraphs(section.text),
            f'<dl class="numbers">{numbers}</dl>' if numbers else "",
            '<div class="beside">' if section.table else "",
            _images(section.images) if section.images else "",
            f"{_table(section.table)}</div>" if section.table else "",
            section.markup,
            f"{parts}</section>\n",
        ]
    )


def _images(images: Sequence[PageImage]) -> str:
    """Small ones in as many columns as there is room for; large ones in up to three, of which a wide one takes two."""
    kind = "small" if max(image.width for image in images) < 200 else "large"
    wide = ["" if image.width <= 320 else ' class="wide"' for image in images]
    items = "".join(f"<li{w}>{_figure(p)}</li>" for w, p in zip(wide, images, strict=True))
    return f'<ul class="{kind} images">{items}</ul>'


def _figure(image: PageImage) -> str:
    width, height = Image.open(io.BytesIO(image.data)).size
    crisp = ' class="crisp"' if width < image.width else ""
    img = (
        f'<img{crisp} src="{data_uri(image.data)}" alt="{escape(image.alt)}" '
        f'width="{image.width}" height="{round(height * image.width / width)}">'
    )
    if image.dark is not None:
        dark = f'<source media="(prefers-color-scheme: dark)" srcset="{data_uri(image.dark)}">'
        img = f"<picture>{dark}{img}</picture>"
    caption = f"<figcaption>{escape(image.caption)}</figcaption>" if image.caption else ""
    return f"<figure>{img}{caption}</figure>"


def _table(table: Table) -> str:
    first = len(table.head) - table.numeric

    def row(cells: Sequence[str], tag: str, scope: str = "") -> str:
        kinds = ["" if i < first else ' class="number"' for i in range(len(cells))]
        inner = (f"<{tag}{scope}{k}>{escape(cell)}</{tag}>" for k, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(inner)}</tr>"

    name = escape(table.caption)
    head = row(table.head, "th", ' scope="col"')
    rows = "".join(row(cells, "td") for cells in table.rows)
    return (
        f'<div class="scroll" role="region" aria-label="{name}" tabindex="0"><table><caption>{name}</caption>'
        f"<thead>{head}</thead><tbody>{rows}</tbody></table></div>"
    )


def escape(value: str) -> str:
    """Any text as it stands between tags, or in an attribute's double quotes; a byte of a file's name that is no text
    becomes a question mark."""
    return html.escape(value.encode(errors="replace").decode(), quote=True)


def _paragraphs(text: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return "".join(f"<p{attribute}>{escape(part.strip())}</p>" for part in text.split("\n\n") if part.strip())


def data_uri(data: bytes) -> str:
    """A PNG or WebP file as an address that holds all of it."""
    kind = "webp" if data.startswith(b"RIFF") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def _colors(theme: Theme) -> str:
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
.numbers div { display: flex; flex-direction: column; flex: 1 1 auto; min-width: 9.5rem; max-width: 20rem;
  padding: 0.9rem 1.1rem; }
dt { color: var(--muted); font-size: 0.85rem; }
dd { margin: auto 0 0; font-size: 1.6rem; font-weight: 650; line-height: 1.3; font-variant-numeric: tabular-nums; }
.images { list-style: none; margin: 1rem 0 0; padding: 0; gap: 0.9rem; }
.small { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.8rem, 1fr)); }
.large { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19.6rem), 1fr)); }
@media (min-width: 45rem) { .large { grid-auto-flow: dense; } .large .wide { grid-area: span 2 / span 2; } }
.columns { display: flex; flex-wrap: wrap; gap: 2rem 1.5rem; margin-top: 1.5rem; }
.columns > section { flex: 1 1 18rem; margin: 0; display: flex; flex-direction: column; }
.columns > .wide { flex: 2 1 26rem; }
.columns .images { flex: 1; display: block; }
.columns li { height: 100%; }
.columns figure { justify-content: start; }
.columns figcaption { text-align: left; text-wrap: pretty; font-size: 0.95rem; margin-top: 1rem; }
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
