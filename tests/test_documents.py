"""The documents: commands parse, Python runs, links lead somewhere, the navigation is complete, sentences are short."""

import functools
import itertools
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import vitlab
from vitlab.errors import UserError

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LOGS = ("docs/records", "docs/studies", "docs/paper", "docs/checkpoints.md")
"""What is not prose: the raw record, what programs write, tables of the paper."""
MOST_WORDS = 35
SHELLS = {"bash", "sh", "shell", "console"}
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def named(paths: list[Path]) -> list:
    return [pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in paths]


def prose(text: str) -> str:
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


@pytest.mark.parametrize("path", named(PAGES))
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


def test_the_navigation_has_every_page() -> None:
    """In mkdocs.yml, notebooks as the pages they become; the reports of studies are linked from their record."""
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = [path.relative_to(ROOT / "docs") for path in PAGES if ROOT / "docs" in path.parents]
    pages = {path.as_posix() for path in pages if path.parts[0] != "studies"}
    notebooks = {path.relative_to(ROOT / "docs").with_suffix(".md").as_posix() for path in ROOT.glob("docs/**/*.ipynb")}
    assert {*re.findall(r"[\w/-]+\.md", str(navigation))} == pages | notebooks


def test_a_notebook_becomes_a_page() -> None:
    outputs = [
        {"output_type": "stream", "text": ["one\n", "two\n"]},
        {"output_type": "execute_result", "data": {"text/html": ["<b>x</b>"], "text/plain": ["hidden"]}},
        {"output_type": "display_data", "data": {"image/png": "iVBO", "text/plain": ["hidden"]}},
        {"output_type": "execute_result", "data": {"text/plain": ["4"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Text"]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": outputs},
    ]
    hooks = runpy.run_path(str(ROOT / "benchmarks" / "mkdocs_hooks.py"))
    page = hooks["to_markdown"]({"cells": cells})
    assert page.split("\n\n") == [
        *(
            "# Title\nText",
            "```python\nprint(1)\n```",
            "```text\none\ntwo\n```",
            '<div style="overflow-x: auto"><b>x</b></div>',
        ),
        *("![](data:image/png;base64,iVBO)", "```text\n4\n```\n"),
    ]


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of every `vitlab ...` in a document: in its shell blocks and in its inline code."""
    blocks = [body for language, body in FENCE.findall(text) if language in SHELLS]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`(vitlab [^`\n]+)`", FENCE.sub("", text))
    for piece in itertools.chain.from_iterable(re.split(r" (?:[|;<>]|&&|2>|&$)(?: |$)", line) for line in lines):
        words = shlex.split(piece.strip().removeprefix("$ "), comments=True)
        words = list(itertools.dropwhile(re.compile(r"[A-Z_]+=").match, words))
        if words[:1] == ["vitlab"]:
            yield words[1:]
        elif "vitlab" in words[1:] and words[words.index("vitlab") - 1] == "-m":
            yield words[words.index("vitlab") + 1 :]


def is_a_command(arguments: list[str]) -> bool:
    from vitlab.cli import parse as parse_command

    try:
        parse_command(arguments)
    except SystemExit as end:
        return not end.code  # --help ends with 0
    except UserError:
        return False
    return True


def test_every_public_name_has_an_example() -> None:
    blocks = "".join(
        block for path in PAGES for block in re.findall(r"^```python$.*?^```$", path.read_text(), re.M | re.S)
    )
    names = set(vitlab.__all__) - set(vitlab.SUBPACKAGES) - {"MODELS"}
    assert {name for name in names if not re.search(rf"\bvitlab\.{name}\b", blocks)} == set()


def test_documented_commands_parse() -> None:
    every = {shlex.join(arguments): arguments for path in PAGES for arguments in commands(path.read_text())}
    assert len(every) > 100
    assert [words for words, arguments in every.items() if not is_a_command(arguments)] == []


@pytest.mark.usefixtures("unchecked", "unrendered")
@pytest.mark.parametrize("path", named([path for path in PAGES if "```python" in path.read_text()]))
def test_documented_python_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With models of two blocks, of four where a page names four, or of one where they are exported."""
    monkeypatch.chdir(tmp_path)
    depth = {"docs/howto/deploy.md": 1, "docs/howto/python.md": 4}.get(path.relative_to(ROOT).as_posix(), 2)
    monkeypatch.setattr(vitlab, "create_model", functools.partial(vitlab.create_model, depth=depth))
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)):
        exec(compile(block, f"{path.name}, block {number}", "exec"), {})
