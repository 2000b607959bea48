"""The list of the paper's parts: none is left out, what it names is there, its numbers stand where it says."""

import ast
import functools
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from vitlab.inspection.figures import FIGURES
from vitlab.paper.parts import Part, find_parts, read_groups

ROOT = Path(__file__).parents[2]
SOURCE, PAGES = ROOT / "src" / "vitlab", ROOT / "docs" / "paper"
TEXTS = runpy.run_path(str(ROOT / "benchmarks" / "paper_pages.py"))["TEXTS"]
PARTS = [part for group in read_groups() for part in group.parts]

# What arXiv 2010.11929v2 consists of.
SECTIONS = ("1", "2", "3", "3.1", "3.2", "4", "4.1", "4.2", "4.3", "4.4", "4.5", "4.6", "5")
APPENDICES = ("a", "b", "b.1", "b.1.1", "b.1.2", "c", "d", *(f"d.{number}" for number in range(1, 11)))
KEYS = {
    "sec": [f"sec{number}" for number in SECTIONS],
    "app": [f"app{number}" for number in APPENDICES],
    "eq": [f"eq{number}" for number in range(1, 9)],
    "table": [f"table{number}" for number in range(1, 10)],
    "fig": [f"fig{number}" for number in range(1, 15)],
}
NOTHING_OF_ITS_OWN = {"the rows below", "nothing to run"}
"""What stands for code where a part of the paper has none: its subsections have, or it is prose."""


def names(part: Part) -> str:
    return part.part


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, classes and constants of a file, and `Class.member` for methods and fields."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        found |= set(_defined(node))
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for member in node.body for name in _defined(member)}
    return frozenset(found)


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def unknown_names(code: str) -> list[str]:
    """Files that do not exist, and names after a file (`a/file.py` `x`, `y`) that it does not define."""
    wrong, file = [], ""
    for span in re.findall(r"`([^`\n]+)`", code):
        if span.endswith(".py"):
            file = span
            wrong += [] if (SOURCE / file).is_file() else [file]
        elif not file or span not in names_in(SOURCE / file):
            wrong.append(f"{file} {span}")
    return wrong


def unseen_numbers(part: Part) -> list[str]:
    """Numbers of what is known that do not stand in a file which it links to."""
    number = re.compile(r"\d+(?:[.,]\d+)*(?:e-?\d+)?")
    sources = [ROOT / "docs" / target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", part.known)]
    seen = {value for source in sources if source.is_file() for value in number.findall(source.read_text())}
    text = re.sub(r"\]\([^)]*\)|(Sec|App|Eq|Table|Fig)\.? [A-D]?[\d.]+", "", part.known)
    return [value for value in number.findall(text) if value not in seen]


@pytest.mark.parametrize("kind", KEYS)
def test_every_part_of_the_paper_is_there_in_its_order(kind: str) -> None:
    keys = list(dict.fromkeys(part.key for part in PARTS if part.key.startswith(kind)))
    assert sorted(keys) == sorted(KEYS[kind])
    if kind != "fig":  # which stand where the text needs them
        assert keys == KEYS[kind]


@pytest.mark.parametrize("part", PARTS, ids=names)
def test_a_part_says_where_and_by_what_command(part: Part) -> None:
    if part.code in NOTHING_OF_ITS_OWN:
        return
    assert re.search(r"`[\w/]+\.py` `\w", part.code)
    assert unknown_names(part.code) == []
    assert re.search(r"`vitlab [a-z]", part.run)
    assert set(re.findall(r"`figures/(\w+)\.png`", part.run)) <= set(FIGURES)
    assert unseen_numbers(part) == []


def test_wrong_names_and_numbers_are_found() -> None:
    assert unknown_names("`models/vit.py` `ViT`, `ViT.forwrad`; `models/vti.py`") == [
        "models/vit.py ViT.forwrad",
        "models/vti.py",
    ]
    assert unseen_numbers(Part("Fig. 1", "", known="123.456 images ([models](models.md))")) == ["123.456"]


@pytest.mark.parametrize("name", TEXTS)
def test_pages_are_as_their_script_writes_them(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text()
    assert TEXTS[name]() == text, "run `python benchmarks/paper_pages.py`"


def test_every_figure_has_a_picture() -> None:
    text = (PAGES / "figures.md").read_text()
    pictures = set(re.findall(r"\]\(([\w-]+\.webp)\)", text))
    assert pictures == {path.name for path in PAGES.glob("*.webp")}
    assert {find_parts(name.partition("-")[0].partition(".")[0])[0].key for name in pictures} == set(KEYS["fig"])
