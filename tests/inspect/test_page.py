"""What every page is made of: sections, tables, one script with its hash; written whole."""

import io
import os
from pathlib import Path

import pytest
from markup import Page, check
from PIL import Image

from vitlab.inspect.page import Markup, PageImage, Section, Table, data_uri, escape, page, write_page


def image(width: int = 30, caption: str = "") -> PageImage:
    out = io.BytesIO()
    Image.new("RGB", (30, 20)).save(out, "PNG")
    return PageImage(out.getvalue(), "a black rectangle", width, caption)


def test_sections_nest() -> None:
    made = Page(page("T", "L", [Section("A", parts=[Section("B", parts=[Section("C")])]), Section("D")]))
    headings = [(tag, attributes["id"]) for tag, attributes in made.elements if "id" in attributes and tag != "main"]
    assert headings == [("h2", "s1"), ("h3", "s1-1"), ("h4", "s1-1-1"), ("h2", "s2")]


def test_a_section_shows_all_that_it_was_given_in_order() -> None:
    table = Table("Counts <i>", ("what", "how many"), [("a", "1"), ("b", "2")], numeric=1)
    section = Section(
        "H", "One.\n\nTwo.", {"n": "5"}, [image(caption="C")], table, Markup("<b>own</b>"), [Section("P")]
    )
    made = check(page("T", "L", [section]))
    words = [made.words.index(word) for word in ("One.", "Two.", "n5", "C", "Counts <i>", "how many", "own", "P")]
    assert words == sorted(words)
    assert [cell.get("class") for cell in made.all("td")] == [None, "number"] * 2
    assert made.all("b"), "markup stands as it is"


def test_names_that_are_no_text_can_be_written(tmp_path: Path) -> None:
    name = os.fsdecode(b"b\xff<.png")
    write_page(tmp_path / "index.html", page(name, "L", [Section("H", table=Table(name, ("a",), [(name,)]))]))
    assert "<td>b?&lt;.png</td>" in (tmp_path / "index.html").read_text()


def test_parts_in_columns_and_wide_ones_among_them() -> None:
    parts = [Section("A", images=[image()]), Section("B", images=[image(500)])]
    made = check(page("T", "L", [Section("H", parts=parts, columns=True)]))
    assert [each.get("class") for each in made.all("section")] == [None, None, "wide"]
    assert any(div.get("class") == "columns" for div in made.all("div"))
    assert "columns" not in [div.get("class") for div in check(page("T", "", [Section("H", parts=parts)])).all("div")]


def test_the_policy_knows_the_script_by_its_hash() -> None:
    with_script = page("T", "L", [], script="let a = '<b>' && 1;\n", style=".own { top: 0; }\n")
    check(with_script)
    assert "let a = '<b>' && 1;" in with_script
    assert ".own { top: 0; }" in with_script
    assert "script" not in page("T", "L", [])
    with pytest.raises(AssertionError):
        check(with_script.replace("&& 1", "&& 2"))  # another script has another hash


def test_text_is_escaped() -> None:
    assert escape("<a href=\"'&'\">") == "&lt;a href=&quot;&#x27;&amp;&#x27;&quot;&gt;"
    made = check(page("<T>", "<L>", [Section("<H>", "<P>", {"<n>": "<5>"})]))
    assert all(f"<{letter}>" in made.words for letter in "TLHPn5")
    assert data_uri(b"RIFF") == "data:image/webp;base64,UklGRg=="


def test_the_page_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "index.html"
    write_page(path, "first é")
    write_page(path, "second")
    assert path.read_text(encoding="utf-8") == "second"

    def broken(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", broken)
    with pytest.raises(OSError, match="No space"):
        write_page(path, "third")
    assert path.read_text(encoding="utf-8") == "second"
    assert [each.name for each in path.parent.iterdir()] == ["index.html"]
