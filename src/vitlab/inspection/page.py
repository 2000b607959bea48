"""Self-contained HTML pages: one file that fetches nothing, with alternative text for every image."""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from vitlab.errors import printable

FOLDER = Path(__file__).parent


def data_uri(data: bytes) -> str:
    """A PNG, JPEG or WebP file as a data URI."""
    kind = "webp" if data.startswith(b"RIFF") else "jpeg" if data.startswith(b"\xff\xd8") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def static(name: str) -> Markup:
    """A file of static/ as text."""
    return Markup((FOLDER / "static" / name).read_text())


def script_hash(script: str) -> str:
    """The source of an inline script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def mark_code(text: str) -> Markup:
    """The text, escaped, with what is in backticks as code."""
    return Markup(re.sub(r"`(.+?)`", r"<code>\1</code>", str(escape(printable(text)))))


ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(FOLDER / "templates"),
    autoescape=True,
    finalize=lambda value: printable(value) if type(value) is str else value,  # what would turn text around, too
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters |= {"data_uri": data_uri, "script_hash": script_hash, "code": mark_code}
ENVIRONMENT.filters |= {"percent": "{:.1%}".format, "thousands": "{:,}".format}


def render(template: str, **context: Any) -> Markup:
    """A template as HTML; every value but Markup is escaped."""
    return Markup(ENVIRONMENT.get_template(template).render(context))


def page(
    body: str,
    title: str,
    lead: str,
    facts: Mapping[str, str] | None = None,
    *,
    scripts: Sequence[str] = (),
    app: bool = False,
    **context: Any,
) -> str:
    """The page around the template `body`, which is rendered with `context`. The contents list every h2 with an id.

    In `lead`, and in `facts`, a list under it, backticks enclose code.
    The page's policy allows only these `scripts` of static/, by hash; with `app` they may send requests to its server.
    """
    text = render(body, **context)
    styles = ["page.css", *(["viewer.css"] if scripts else []), *(["app.css"] if app else [])]
    page = render(
        "page.html.j2",
        title=title,
        lead=lead,
        facts=facts,
        body=text,
        contents=[(anchor, Markup(heading)) for anchor, heading in re.findall(r'<h2 id="(.*?)">(.*?)</h2>', text)],
        style=Markup().join(map(static, styles)),
        script=Markup().join(map(static, scripts)),
        app=app,
    )
    return page.encode(errors="replace").decode()  # file names may hold bytes that are not text
