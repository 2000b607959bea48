"""A report's files say what the study found, and are the same bytes for the same runs."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vitlab.inspect.panels import Panel, Series
from vitlab.recipes import tiny
from vitlab.studies import STUDIES
from vitlab.studies.report import as_markdown, as_text, operations, write_report
from vitlab.studies.statistics import difference, estimate, percent
from vitlab.studies.study import Claim, Done, Point, Report, Scale, Study

FILES = {"report.md", "figure.png", "figure.svg", "study.json"}
VALUES = {"1d": (0.60, 0.62, 0.64), "2d": (0.61, 0.60, 0.65), "none": (0.50, 0.53, 0.52)}


def points(scale: Scale) -> list[Point]:
    config = dataclasses.replace(tiny.digits(), epochs=1.0)
    seeds = (0, 1, 2) if scale == "tiny" else (0,)
    return [
        Point(f"{kind}.seed-{seed}", dataclasses.replace(config, seed=seed), {"kind": kind})
        for kind in VALUES
        for seed in seeds
    ]


def report(done: Sequence[Done]) -> Report:
    found = {kind: estimate(done, "accuracy", kind=kind) for kind in VALUES}
    return Report(
        lead="Nine runs of a **small** model.",
        columns=["positions", "accuracy", "the paper | 5-shot"],
        rows=[[kind, percent(each), paper] for (kind, each), paper in zip(found.items(), "abc", strict=True)],
        claims=[
            Claim("A model without positions is worse.", "0.614 against 0.642 (Table 8)",
                  difference(done, "accuracy", {"kind": "1d"}, {"kind": "none"})),
            Claim("1-D and 2-D | do as well.", "0.642 and 0.640",
                  difference(done, "accuracy", {"kind": "2d"}, {"kind": "1d"}), expected="equal"),
            Claim("None is best.", "never", difference(done, "accuracy", {"kind": "none"}, {"kind": "1d"})),
        ],
        panels=[Panel("Table 8", "", "accuracy", [
            Series("all", [0, 1, 2], [e.mean for e in found.values()], [e.sd for e in found.values()])
        ], ticks=list(VALUES))],
    )  # fmt: skip


STUDY = Study("positions", "Table 8", "What a position embedding is worth.", points, report)


def finished(scale: Scale = "tiny", **more: float) -> list[Done]:
    return [
        Done(p, {"accuracy": VALUES[str(p.labels["kind"])][p.config.seed], **more}, [], 1437) for p in points(scale)
    ]


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    return tmp_path, write_report(STUDY, "tiny", finished(), tmp_path)


def test_a_folder_receives_four_files(written: tuple[Path, dict[str, Any]]) -> None:
    out, result = written
    assert {file.name for file in out.iterdir()} == FILES
    assert json.loads((out / "study.json").read_bytes()) == result
    assert Image.open(out / "figure.png").width > 500
    assert b"<svg" in (out / "figure.svg").read_bytes()


def test_the_same_runs_give_the_same_bytes(written: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    first = {name: (written[0] / name).read_bytes() for name in FILES}
    write_report(STUDY, "tiny", finished(), tmp_path / "again")
    assert {name: (tmp_path / "again" / name).read_bytes() for name in FILES} == first
    write_report(STUDY, "tiny", finished(), written[0])  # over the old ones
    assert {name: (written[0] / name).read_bytes() for name in FILES} == first


def test_study_json_holds_all_that_was_found(written: tuple[Path, dict[str, Any]]) -> None:
    _, result = written
    assert (result["study"], result["scale"], result["source"]) == ("positions", "tiny", "Table 8")
    assert len(result["points"]) == 9
    first = result["points"][0]
    assert first["name"] == "1d.seed-0"
    assert first["labels"] == {"kind": "1d"}
    assert first["figures"] == {"accuracy": 0.6}
    assert first["examples"] == 1437
    # 6 x MACs x 22 steps (1437 / 64, rounded) of 64 images
    assert first["exaflops"] == pytest.approx(6 * tiny.digits().model.forward_macs * 22 * 64 / 1e18)
    assert result["exaflops"] == pytest.approx(9 * first["exaflops"])
    assert result["table"]["rows"][0] == ["1d", "62.0 ± 2.0", "a"]
    assert [each["verdict"] for each in result["claims"]] == ["shows", "shows", "contradicted"]
    measured = result["claims"][0]["measured"]
    assert (measured["low"], measured["high"], measured["pairs"]) == (pytest.approx(0.09), pytest.approx(0.12), 3)
    assert result["panels"][0]["series"][0]["y"] == pytest.approx([0.62, 0.62, 0.5166667])


def test_the_page_is_markdown_with_table_claims_figure_and_cost(written: tuple[Path, dict[str, Any]]) -> None:
    text = (written[0] / "report.md").read_text()
    assert text == as_markdown(written[1])
    lines = text.splitlines()
    assert lines[0] == "# positions, tiny"
    assert "Nine runs of a **small** model." in lines
    assert "![What a position embedding is worth.](figure.png)" in lines
    table = lines.index("| positions | accuracy | the paper \\| 5-shot |")
    assert lines[table + 1 : table + 3] == ["| --- | --: | --- |", "| 1d | 62.0 ± 2.0 | a |"]
    assert "| 1-D and 2-D \\| do as well. | 0.642 and 0.640 | +0.0 (-2.0 to 1.0) | shows |" in lines
    assert "A model without positions is worse. | 0.614 against 0.642 (Table 8) | +10.3 (9.0 to 12.0) | shows |" in text
    assert "75 %" in text  # what three seeds are worth
    assert "proves none" in text  # and what equality is
    assert f"9 runs, {operations(written[1]['exaflops'])} of training" in text


def test_a_terminal_gets_an_aligned_table_and_the_verdicts(written: tuple[Path, dict[str, Any]]) -> None:
    lines = as_text(written[1]).splitlines()
    table = lines.index("positions    accuracy  the paper | 5-shot")
    assert lines[table + 1 : table + 4] == [
        "1d         62.0 ± 2.0  a",
        "2d         62.0 ± 2.6  b",
        "none       51.7 ± 1.5  c",
    ]
    assert "shows: A model without positions is worse." in lines
    assert "    +10.3 (9.0 to 12.0); the paper: 0.614 against 0.642 (Table 8)" in lines
    assert "contradicted: None is best." in lines
    assert max(map(len, lines)) <= 140


def test_a_single_seed_shows_nothing_and_leaves_no_infinity(tmp_path: Path) -> None:
    result = write_report(STUDY, "paper", finished("paper", loss=math.nan), tmp_path)
    assert [each["verdict"] for each in result["claims"]] == ["not clear"] * 3
    text = (tmp_path / "study.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert result["claims"][0]["measured"]["low"] is None
    assert result["points"][0]["figures"]["loss"] is None
    page = (tmp_path / "report.md").read_text()
    assert "+10.0 (one seed)" in page
    assert "One seed has no interval" in page
    assert "inf" not in page


def test_a_report_that_cannot_be_made_leaves_the_old_one(written: tuple[Path, dict[str, Any]]) -> None:
    before = (written[0] / "study.json").read_bytes()
    crooked = dataclasses.replace(STUDY, report=lambda done: dataclasses.replace(report(done), columns=["one"]))
    with pytest.raises(AssertionError, match="3 cells under 1 columns"):
        write_report(crooked, "tiny", finished(), written[0])
    assert (written[0] / "study.json").read_bytes() == before
    assert {file.name for file in written[0].iterdir()} == FILES


@pytest.mark.parametrize(
    ("exaflops", "text"),
    [(223.4, "223 exaFLOPs"), (4262.0, "4,260 exaFLOPs"), (0.0518, "51.8 petaFLOPs"), (5.18e-5, "51.8 teraFLOPs"),
     (2e-10, "0.2 gigaFLOPs")],
)  # fmt: skip
def test_compute_is_told_in_the_unit_that_suits_it(exaflops: float, text: str) -> None:
    assert operations(exaflops) == text


@pytest.mark.parametrize("scale", ["tiny", "gpu", "paper"])
@pytest.mark.parametrize("name", STUDIES)
def test_every_studys_report_can_be_written(name: str, scale: Scale, tmp_path: Path) -> None:
    """With made-up figures, the same for all points but for the seed; whatever it says must fit its files."""
    done = []
    for point in STUDIES[name].points(scale):
        measured = ("accuracy", "loss", "constant_loss", "fewshot_5shot", "fewshot_10shot")
        figures: dict[str, float] = dict.fromkeys(measured, 0.5 + 0.01 * point.config.seed)
        judged = {f"{split}_accuracy": 0.5 for split in ("val", "test")}
        records = [{"step": step, **figures, **judged} for step in (100, 200)]
        done.append(Done(point, figures, records, 1000))
    result = write_report(STUDIES[name], scale, done, tmp_path)
    assert json.loads((tmp_path / "study.json").read_text()) == result
    assert len(result["points"]) == len(done)
    text = (tmp_path / "report.md").read_text()
    assert all(f"| {each['claim']} |" in text for each in result["claims"])
    for row in result["table"]["rows"]:
        assert len(row) == len(result["table"]["columns"])
