"""The page around every template: contents, policy, escaping, and the script's hash."""

import io
import os

import pytest
from markup import Page, check
from markupsafe import Markup
from PIL import Image

from vitlab.inspection import page as module
from vitlab.inspection.figures import PageImage
from vitlab.inspection.page import ENVIRONMENT, data_uri, page, render, static

EVIL = "<a href=\"'&'\">"
MACROS = '{% from "macros.html.j2" import images, numbers, paragraphs, table %}'
EMPTY = {"results": {}, "pairs": (), "beyond": (), "conflicts": ()}


def image(width: int = 30, caption: str = "") -> PageImage:
    out = io.BytesIO()
    Image.new("RGB", (30, 20)).save(out, "PNG")
    return PageImage(out.getvalue(), "a black rectangle", width, caption)


def test_control_characters_are_escaped() -> None:
    text = ENVIRONMENT.from_string("<p title='{{ value }}'>{{ value }}{{ line }}</p>").render(
        value="\x1b[31m\u202egnp", line=Markup("\n")
    )
    assert text.count(r"\x1b[31m\u202egnp") == 2
    assert text.endswith("\n</p>")


def test_text_is_escaped_in_elements_and_attributes() -> None:
    text = ENVIRONMENT.from_string('<p class="{{ value }}">{{ value }}</p>').render(value=EVIL)
    assert text.count("&lt;a href=&#34;&#39;&amp;&#39;&#34;&gt;") == 2
    context = {**EMPTY, "results": {EVIL: EVIL}, "unreadable_rows": [(EVIL, EVIL)]}
    assert check(page("duplicates.html.j2", EVIL, EVIL, **context)).words.count(EVIL) == 2 + 1 + 2 + 2


def test_what_is_in_backticks_is_code() -> None:
    text = page("duplicates.html.j2", "T", f"`a {EVIL}` & b", {"F": "`c` `d"}, **EMPTY, unreadable_rows=())
    markup = check(text)
    assert len(markup.all("code")) == 2
    assert f"a {EVIL} & b" in markup.words


def test_macros() -> None:
    body = MACROS + (
        '{{ paragraphs("One.\n\nTwo.") }}{{ numbers({"n": "5"}) }}{{ images([small]) }}{{ images([wide]) }}'
        '{{ table("Counts", ("what", "how many"), [("a", "1")], 1) }}'
    )
    markup = Page(ENVIRONMENT.from_string(body).render(small=image(caption="C"), wide=image(500)))
    order = [markup.words.index(word) for word in ("One.", "Two.", "n5", "C", "Counts", "how many")]
    assert order == sorted(order)
    assert [cell.get("class") for cell in markup.all("td")] == [None, "number"]
    assert [item["class"] for item in markup.all("ul")] == ["small images", "large images"]
    assert [item.get("class") for item in markup.all("li")] == [None, "wide"]
    sizes = [(img["width"], img["height"], img.get("class")) for img in markup.all("img")]
    assert sizes == [("30", "20", None), ("500", "333", "crisp")]
    assert data_uri(b"RIFF") == "data:image/webp;base64,UklGRg=="


def test_contents_and_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    body = Markup('<section><h2 id="a">A &amp; B</h2></section><section><h2 id="b">C</h2></section>')
    monkeypatch.setattr(module, "render", lambda name, **context: body if name == "body" else render(name, **context))
    with_script, without = page("body", "T", "L", scripts=("viewer.js",)), page("body", "T", "L")
    assert [link["href"] for link in check(with_script).all("a")] == ["#main", "#a", "#b"]
    assert check(with_script).words.count("A & B") == 2
    assert static("viewer.js") in with_script
    assert "script" not in without
    check(without)
    with pytest.raises(AssertionError):
        check(with_script.replace('"use strict"', '"use  strict"'))  # another script has another hash


def test_names_that_are_not_text_can_be_written() -> None:
    text = page("duplicates.html.j2", os.fsdecode(b"b\xff<.png"), "L", **EMPTY, unreadable_rows=())
    assert b"<h1>b?&lt;.png</h1>" in text.encode()
