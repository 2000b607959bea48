"""What was recorded is what stands in benchmarks/results, and is shown."""

import json
import runpy
from pathlib import Path
from typing import get_args

import pytest

from vitlab.paper.figures import Request
from vitlab.paper.recorded import STUDIES, read_panels, read_record
from vitlab.paper.show import show
from vitlab.studies.statistics import Verdict

RECORDS = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "paper_records.py"))["RECORDS"]


@pytest.mark.parametrize("name", RECORDS)
def test_speeds_are_those_of_the_benchmark(name: str) -> None:
    assert read_record(name) == json.loads(json.dumps(RECORDS[name](), default=list)), (
        "run `python benchmarks/paper_records.py`"
    )
    assert all(panel.series for panel in read_panels(name))


@pytest.mark.parametrize("key", ["table7", "table8"])
def test_a_recorded_study_is_shown(key: str) -> None:
    text = show(key, Request()).text
    assert all(f"{claim['verdict']}: {claim['claim']}" in text for claim in read_record(STUDIES[key])["claims"])


@pytest.mark.parametrize("name", sorted({*STUDIES.values()}))
def test_a_record_has_a_figure_and_verdicts(name: str) -> None:
    assert read_panels(name)
    assert all(claim["verdict"] in get_args(Verdict) for claim in read_record(name)["claims"])
