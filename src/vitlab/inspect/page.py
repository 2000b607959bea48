"""Self-contained HTML pages: one file that fetches nothing, light and dark, with alternative text for every image."""

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from vitlab.inspect.figures import DARK, LIGHT
from vitlab.io import replacing_file

FOLDER = Path(__file__).parent


def data_uri(data: bytes) -> str:
    """A PNG or WebP file as a data URI."""
    kind = "webp" if data.startswith(b"RIFF") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def static(name: str) -> Markup:
    """A file of static/ as text."""
    return Markup((FOLDER / "static" / name).read_text())


def script_hash(script: str) -> str:
    """The source of an inline script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(FOLDER / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters |= {
    "data_uri": data_uri,
    "percent": "{:.1%}".format,
    "thousands": "{:,}".format,
    "script_hash": script_hash,
}


def render(template: str, **context: Any) -> Markup:
    """A template as HTML, in which every value but Markup is escaped."""
    return Markup(ENVIRONMENT.get_template(template).render(context))


def page(body: str, title: str, lead: str, *, viewers: bool = False, **context: Any) -> str:
    """The page around the template `body`, which is rendered with `context`; `viewers` adds their style and script.

    Its policy allows this script alone, known by its hash, and no requests. The contents list every h2 with an id.
    """
    text = render(body, **context)
    page = render(
        "page.html.j2",
        title=title,
        lead=lead,
        body=text,
        contents=[(anchor, Markup(heading)) for anchor, heading in re.findall(r'<h2 id="(.*?)">(.*?)</h2>', text)],
        themes=(LIGHT, DARK),
        style=static("page.css") + (static("viewer.css") if viewers else ""),
        script=static("viewer.js") if viewers else "",
    )
    return page.encode(errors="replace").decode()  # file names may hold bytes that are not text


def write_page(path: str | Path, text: str) -> None:
    """Writes the page atomically."""
    with replacing_file(Path(path)) as file:
        file.write(text.encode())
