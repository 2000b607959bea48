"""A page of HTML as tests see it: what holds for every page."""

import base64
import hashlib
import io
import itertools
import re
from html.parser import HTMLParser

from PIL import Image

VOID = {"meta", "img", "source", "link", "br", "hr", "input"}


class Page(HTMLParser):
    """Elements in order, each with its attributes; checks that tags close in the order they opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice in {tag}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words += data

    def all(self, *tags: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.elements if tag in tags]


def check(text: str) -> Page:
    """Fails for a page that is not well-formed, fetches or runs what is not its own, or needs eyes or a mouse."""
    page = Page(text)
    assert not page.all("link", "iframe", "object", "embed", "form", "base")
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), f"a handler in {tag}"
            assert "://" not in value
            if name in ("src", "srcset"):
                assert re.match("data:image/(png|webp);base64,", value)
            if name == "href":
                assert value.startswith("#")
    for block in re.findall("<style>(.*?)</style>|<script>(.*?)</script>", text, re.DOTALL):
        for word in ("://", "url(", "@import", "fetch", "import(", "XMLHttp", "eval", "innerHTML"):
            assert word not in "".join(block)
    (policy,) = [meta["content"] for meta in page.all("meta") if "http-equiv" in meta]
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'")
    scripts = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == len(page.all("script")) <= 1
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert re.findall("script-src '(.*?)'", policy) == [f"sha256-{digest}" for digest in hashes]
    for image in page.all("img"):
        assert len(image["alt"]) > 10
        data = base64.b64decode(image["src"].split(",", 1)[1], validate=True)
        assert min(Image.open(io.BytesIO(data)).size) > 0
    assert page.all("html")[0]["lang"] == "en"
    assert any(meta.get("name") == "viewport" for meta in page.all("meta"))
    assert len(page.all("h1")) == len(page.all("main")) == len(page.all("title")) == 1
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    names = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(names)) == len(names)
    assert {link["href"][1:] for link in page.all("a")} <= set(names)
    assert all(head["scope"] == "col" for head in page.all("th"))
    scrolled = [div for div in page.all("div") if div.get("class") == "scroll"]
    assert all(div["tabindex"] == "0" and div["role"] == "region" and div["aria-label"] for div in scrolled)
    return page
