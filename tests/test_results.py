"""docs/results.md is what its script writes from the records; the pages that the source names are there."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_page_of_results_is_generated(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "benchmarks" / "results_page.py"), run_name="__main__")
    page = capsys.readouterr().out
    assert page == (ROOT / "docs" / "results.md").read_text(), (
        "run `python benchmarks/results_page.py > docs/results.md`"
    )
    claims = page.split("\n## ")[1:]
    assert claims
    assert all("[Record](records/" in claim and "\n| --" in claim for claim in claims)


def test_pages_that_the_source_names_are_there() -> None:
    named = [
        (path, page)
        for path in (ROOT / "src").rglob("*.py")
        for page in re.findall(r"\bdocs/[\w/]+\.md", path.read_text())
    ]
    assert named
    assert [(path.name, page) for path, page in named if not (ROOT / page).is_file()] == []
