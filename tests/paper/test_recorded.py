"""What was recorded is what stands in benchmarks/results, and is shown."""

import json
import runpy
from pathlib import Path

import pytest

from vitlab.paper.figures import PAPER_FIGURES, Request
from vitlab.paper.recorded import STUDIES, read_panels, read_record
from vitlab.paper.show import show

RECORDS = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "paper_records.py"))["RECORDS"]


@pytest.mark.parametrize("name", RECORDS)
def test_speeds_are_those_of_the_benchmark(name: str) -> None:
    assert read_record(name) == json.loads(json.dumps(RECORDS[name](), default=list)), (
        "run `python benchmarks/paper_records.py`"
    )
    assert all(panel.series for panel in read_panels(name))


def test_the_recorded_studies_are_shown() -> None:
    for key, study in STUDIES.items():
        claims = read_record(study)["claims"]
        assert all(claim["verdict"] in show(key, Request()).text for claim in claims) or key in PAPER_FIGURES
