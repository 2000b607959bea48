"""The Markdown pages: their links lead somewhere, and their sentences are short."""

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LOGS = ("docs/records", "docs/studies", "docs/paper.md", "docs/checkpoints.md")
"""What is not prose: the raw record, what programs write, tables of the paper."""
MOST_WORDS = 35


def prose(text: str) -> str:
    """Without code blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


@functools.cache
def anchors(path: Path) -> frozenset[str]:
    """The fragments that lead into a page: its headings as GitHub and mkdocs name them, and anchors of its own."""
    text = prose(path.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    names = [re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading).lower()) for heading in headings]
    return frozenset([name.replace(" ", "-") for name in names] + re.findall(r'<a id="([^"]+)"></a>', text))


def dead_links(text: str, path: Path) -> Iterator[str]:
    """Links of the page at `path` that lead to no file of the repository, or to no place in it."""
    text = re.sub(r"`[^`\n]*`", "", prose(text))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, fragment = target.partition("#")
        if target.startswith(("http:", "https:")):
            continue
        there = (path.parent / name).resolve() if name else path
        if not there.exists() or not there.is_relative_to(ROOT) or (fragment and fragment not in anchors(there)):
            yield target


def sentences(text: str) -> Iterator[str]:
    """The sentences outside of tables, headings and code."""
    lines = [line for line in prose(text).splitlines() if not re.match(r" *\||#|    |<", line)]
    for paragraph in re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", "\n".join(lines)):
        yield from re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[(\d])", " ".join(paragraph.split()))


def long_sentences(text: str) -> list[str]:
    plain = re.sub(r"\]\([^)]*\)", "]", text)
    return [sentence for sentence in sentences(plain) if len(re.findall(r"\w[^\s]*", sentence)) > MOST_WORDS]


@pytest.mark.parametrize("path", PAGES, ids=[path.relative_to(ROOT).as_posix() for path in PAGES])
def test_page(path: Path) -> None:
    text = path.read_text()
    assert list(dead_links(text, path)) == []
    if not path.relative_to(ROOT).as_posix().startswith(LOGS):
        assert long_sentences(text) == []


def test_a_dead_link_and_a_long_sentence_are_seen() -> None:
    page = ROOT / "docs" / "models.md"
    dead = "[a](nowhere.md) [b](decisions.md#nowhere) [c](#nowhere) [d](../../outside.md)"
    assert len(list(dead_links(dead + "[e](decisions.md#libraries) [f](#models)", page))) == 4
    words = " ".join(itertools.repeat("word", MOST_WORDS))
    assert long_sentences(f"{words.capitalize()}. Short.") == []
    assert len(long_sentences(f"A {words}. Short.")) == 1
