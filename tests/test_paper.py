"""docs/paper.md against the paper and the repository: no part left out, and everything it names is there.

Its commands and its Python are tested with those of the other documents (test_documents.py).
"""

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from vitlab.inspection.figures import FIGURES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "paper.md"
FOLDERS = (ROOT / "src" / "vitlab", ROOT)  # where a named file may be

# What arXiv 2010.11929v2 consists of.
SECTIONS = ("1", "2", "3", "3.1", "3.2", "4", "4.1", "4.2", "4.3", "4.4", "4.5", "4.6", "5")
APPENDICES = ("A", "B", "B.1", "B.1.1", "B.1.2", "C", "D", *(f"D.{number}" for number in range(1, 11)))
PARTS = (
    *(f"Sec. {number}" for number in SECTIONS),
    *(f"App. {number}" for number in APPENDICES),
    *(f"Eq. {number}" for number in range(1, 9)),
    *(f"Table {number}" for number in range(1, 10)),
    *(f"Fig. {number}" for number in range(1, 15)),
)
NOTHING_OF_ITS_OWN = {"the rows below", "nothing to run"}
"""What stands for code where a part of the paper has none: its subsections have, or it is prose."""


class Row(NamedTuple):
    """One part of the paper, as the page's tables have it."""

    label: str
    anchor: str
    """Empty in a further row of a part that has one already."""
    code: str
    run: str
    test: str
    measured: str

    @property
    def is_missing(self) -> bool:
        """Whether it says that the code does not have this yet."""
        return "not yet" in self.code.lower()


def rows(text: str) -> list[Row]:
    """The rows of the tables of the paper's parts."""
    begin = re.compile(r'\| (?:<a id="([\w-]+)"></a>)?\*\*((?:Sec|App|Eq|Fig)\. [^*]+|Table [^*]+)\*\* ')
    matches = []
    for line in text.splitlines():
        if match := begin.match(line):
            cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
            cells += [""] * (5 - len(cells))
            matches.append(Row(match[2], match[1] or "", *cells[1:5]))
    return matches


def prose(text: str) -> str:
    """Without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchor_of(label: str) -> str:
    """`App. B.1.1` -> `app-b-1-1`."""
    return re.sub(r"[ .]+", "-", label).lower()


def wrong_parts(text: str) -> list[str]:
    """Parts of the paper without a row, or with two; and rows that do not say where, by what command and what test."""
    all_rows = rows(text)
    anchors = Counter(row.anchor for row in all_rows)
    wrong = [f"{part}: {anchors[anchor_of(part)]} rows" for part in PARTS if anchors[anchor_of(part)] != 1]
    for row in all_rows:
        if row.anchor and anchor_of(row.label.split(",")[0]) != row.anchor:
            wrong.append(f"{row.label}: its anchor is {row.anchor}")
        if row.is_missing or row.code in NOTHING_OF_ITS_OWN:
            continue
        if not re.search(r"`[\w/]+\.py` `\w", row.code):
            wrong.append(f"{row.label}: no name in a file, nor 'not yet'")
        if not re.search(r"`vitlab [a-z]", row.run):
            wrong.append(f"{row.label}: no command")
        if not re.search(r"`tests/[\w/]+\.py`", row.test):
            wrong.append(f"{row.label}: no test")
    return wrong


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, classes and constants of a file, and `Class.member` for methods and fields."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        names |= set(_defined(node))
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for member in node.body for name in _defined(member)}
    return frozenset(names)


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def path_of(name: str) -> Path | None:
    """The file of that name, below the source or the repository."""
    return next((folder / name for folder in FOLDERS if (folder / name).is_file()), None)


def unknown_names(text: str) -> list[str]:
    """Files that do not exist, and names after a file (`a/file.py` `x`, `y`) that it does not define."""
    wrong = []
    file, end = "", 0
    for span in re.finditer(r"`([^`\n]+)`", prose(text)):
        between, end = span.string[end : span.start()], span.end()
        if re.fullmatch(r"[\w/.-]+\.py", span[1]):
            file = span[1]
            if path_of(file) is None:
                wrong.append(file)
        elif not re.fullmatch(r"[A-Za-z_][\w.]*", span[1]) or between not in (" ", ", "):
            file = ""
        elif (path := path_of(file)) is not None and span[1] not in names_in(path):
            wrong.append(f"{file} {span[1]}")
    return wrong


def names_without_file(text: str) -> list[str]:
    """Names in the column of the code that follow no file."""
    inside = re.compile(r"`[\w/]+\.py`((?: `[\w.]+`)?(?:, `[A-Za-z_][\w.]*`)*)")
    left = ((row.label, inside.sub("", row.code)) for row in rows(text))
    return [f"{label}: {name}" for label, code in left for name in re.findall(r"`[A-Z][\w.]*`|`[\w.]*_[\w.]*`", code)]


@functools.cache
def anchors_of(text: str) -> frozenset[str]:
    """The fragments that lead into a document on GitHub: its headings, and anchors of its own."""
    anchors = re.findall(r'<a id="([^"]+)"></a>', text)
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE):
        anchors.append(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
    assert len(anchors) == len(set(anchors)), [name for name, count in Counter(anchors).items() if count > 1]
    return frozenset(anchors)


def links(text: str) -> list[str]:
    """Where its links lead, those out of the repository left out."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    return [target for target in targets if not target.startswith(("http:", "https:"))]


def dead_links(text: str, path: Path) -> list[str]:
    """Links of the document at `path` that lead to no file, or to no place in it."""
    wrong = []
    for target in links(text):
        name, _, fragment = target.partition("#")
        there = path.parent / name if name else path
        places = anchors_of(text if there == path else there.read_text()) if fragment and there.exists() else {fragment}
        if not there.exists() or fragment not in places:
            wrong.append(target)
    return wrong


def unseen_numbers(text: str, path: Path) -> list[str]:
    """Numbers of the column of measurements that do not stand in a file that the same cell links to."""
    wrong = []
    number = re.compile(r"\d+(?:[.,]\d+)*(?:e-?\d+)?")
    for row in rows(text):
        sources = [path.parent / target.partition("#")[0] for target in links(row.measured)]
        seen = {value for source in sources if source.is_file() for value in number.findall(source.read_text())}
        text_of_row = re.sub(r"\]\([^)]*\)|(Sec|App|Eq|Table|Fig)\.? [A-D]?[\d.]+", "", row.measured)
        wrong += [f"{row.label}: {value}" for value in number.findall(text_of_row) if value not in seen]
    return wrong


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


def test_every_part_of_the_paper_has_its_row(page: str) -> None:
    assert len(rows(page)) >= len(PARTS)
    assert wrong_parts(page) == []


def test_rows_stand_in_the_papers_order(page: str) -> None:
    kinds = {"sec": [], "app": [], "eq": [], "table": []}
    for row in rows(page):
        kind = row.anchor.partition("-")[0]
        if kind in kinds:
            kinds[kind].append(row.anchor)
    assert kinds == {kind: [anchor_of(part) for part in PARTS if anchor_of(part).startswith(kind)] for kind in kinds}


def test_every_file_and_name_is_there(page: str) -> None:
    assert unknown_names(page) == []
    assert names_without_file(page) == []


def test_every_figure_that_is_named_is_written(page: str) -> None:
    named = set(re.findall(r"`figures/(\w+)\.png`", page))
    assert named
    assert named <= set(FIGURES)


def test_every_link_leads_somewhere(page: str) -> None:
    assert dead_links(page, PAGE) == []


def test_every_measurement_stands_where_it_says(page: str) -> None:
    assert unseen_numbers(page, PAGE) == []
