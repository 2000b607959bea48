"""A report's files: their content, and the same bytes for the same runs."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vitlab.panels import Panel, Series
from vitlab.recipes import tiny
from vitlab.studies.report import as_markdown, as_text, build_report, chart_panel, write_report
from vitlab.studies.spec import (
    Chart,
    Claim,
    Result,
    Results,
    Scale,
    Study,
    StudyRun,
    changed,
    difference,
    named,
    percent,
)

FILES = {"report.md", "figure.png", "figure.svg", "study.json"}
VALUES = {"1d": (0.60, 0.62, 0.64), "2d": (0.602, 0.619, 0.641), "none": (0.50, 0.53, 0.52)}


def lead(ahead: str, behind: str) -> Callable[[Results], float]:
    return difference("accuracy", {"kind": ahead}, {"kind": behind})


STUDY = Study(
    name="positions",
    source="Table 8",
    question="What is a position embedding worth?",
    variants=lambda scale: [StudyRun(kind, changed(tiny.digits(), epochs=1.0), {"kind": kind}) for kind in VALUES],
    summary=lambda results: f"{len(results.runs)} runs of a **small** model.",
    rows=("kind",),
    columns={
        "positions": "kind",
        "accuracy": percent("accuracy"),
        "paper": named("kind", {"1d": "a", "2d": "b", "none": "c"}),
    },
    claims=(
        Claim("A model without positions is worse.", "0.614 against 0.642", lead("1d", "none")),
        Claim("1-D and 2-D are equal.", "0.642 and 0.640", lead("2d", "1d"), expected="equal"),
        Claim("2-D is better on more data.", "yes", lead("2d", "1d"), out_of_reach="few images"),
        Claim("None is best.", "never", lead("none", "1d")),
    ),
    seeds=3,
    charts=(
        Chart("Table 8", "accuracy", "accuracy", x="kind", lines=lambda group: "all"),
        Panel("Made elsewhere", "x", "y", [Series("all", [1, 2], [0.1, 0.2])]),
    ),
)


def finished(scale: Scale = "small", **figures: float) -> Results:
    runs = STUDY.runs(scale)
    values = [VALUES[run.labels["kind"]][run.config.seed] for run in runs]
    runs = [Result(p, {"accuracy": v, **figures}, [], 1437, p.config.model) for p, v in zip(runs, values, strict=True)]
    return Results(tuple(runs))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("report")
    return out, write_report(STUDY, "small", finished(), out)


def test_four_files_and_the_same_bytes_again(written: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out, report = written
    assert {file.name for file in out.iterdir()} == FILES
    assert json.loads((out / "study.json").read_bytes()) == report
    assert Image.open(out / "figure.png").width > 500
    assert b"<svg" in (out / "figure.svg").read_bytes()
    write_report(STUDY, "small", finished(), tmp_path / "again")
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()


def test_numbers_of_a_report(written: tuple[Path, dict[str, Any]]) -> None:
    out, report = written
    first = report["points"][0]
    assert (first["name"], first["labels"], first["seed"]) == ("1d.seed-0", {"kind": "1d"}, 0)
    assert (first["figures"], first["examples"]) == ({"accuracy": 0.6}, 1437)
    # 6 x MACs x 22 steps (1437 / 64, rounded) of 64 images
    assert first["exaflops"] == pytest.approx(6 * tiny.digits().model.forward_macs * 22 * 64 / 1e18)
    assert report["exaflops"] == pytest.approx(9 * first["exaflops"])
    assert report["table"]["rows"][0] == ["1d", "62.0 ± 2.0", "a"]
    assert [claim["verdict"] for claim in report["claims"]] == ["supported", "supported", "not tested", "contradicted"]
    measured = report["claims"][0]["measured"]
    assert [measured[name] for name in ("low", "high", "pairs")] == pytest.approx([0.0654, 0.1413, 3], abs=1e-4)
    assert report["panels"][0]["ticks"] == list(VALUES)
    assert report["panels"][0]["series"][0]["y"] == pytest.approx([0.62, 0.6206667, 0.5166667])
    assert report["panels"][1]["title"] == "Made elsewhere"
    text = (out / "report.md").read_text()
    assert text == as_markdown(report)
    for part in (
        "| 1d | 62.0 ± 2.0 | a |",
        "| A model without positions is worse. | 0.614 against 0.642 | +10.3 (6.5 to 14.1) | 4.7 | 0.5 | supported |",
        "| 0.5 | not tested: few images |",
    ):
        assert part in text
    assert all(part in as_text(report) for part in ("62.0 ± 2.0", "+10.3 (6.5 to 14.1)", "contradicted: None is best."))


@pytest.mark.usefixtures("unrendered")
def test_a_single_seed_and_a_smoke_test_show_nothing(tmp_path: Path) -> None:
    """Infinite intervals of one seed are in no file."""
    report = write_report(STUDY, "paper", finished("paper", loss=math.nan), tmp_path)
    assert [claim["verdict"] for claim in report["claims"]] == ["inconclusive"] * 4
    json.loads((tmp_path / "study.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert (report["claims"][0]["measured"]["low"], report["points"][0]["figures"]["loss"]) == (None, None)
    assert "inf" not in (tmp_path / "report.md").read_text()
    smoke = build_report(STUDY, "tiny", finished("tiny"))
    assert [claim["verdict"] for claim in smoke["claims"]] == ["not tested"] * 4


def test_charts_sort_their_lines_by_x() -> None:
    chart = Chart(
        *("T", "y", "accuracy"),
        x=lambda group: {"1d": 3.0, "2d": 1.0, "none": 2.0}[group.labels["kind"]],
        log_x=True,
        lines=lambda group: ["a", "b"] if group.labels["kind"] == "none" else "a",
        where=lambda group: group.labels["kind"] != "1d",
    )
    panel = chart_panel(chart, finished())
    assert [(line.name, list(line.x)) for line in panel.series] == [("a", [1.0, 2.0]), ("b", [2.0])]
