"""The commands about many runs and about speed, as their users meet them."""

import json
import re
import typing
from pathlib import Path

import pytest
from program import answer, call
from small_study import SMALL as SMALL_STUDY

from vitlab.studies import STUDIES
from vitlab.studies.spec import Scale


def test_studies_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "study", "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["study", *STUDIES]
    assert {row["study"]: row["paper"] for row in answer(capsys, "study", "--list")}["positions"].startswith("Table 8")


@pytest.mark.parametrize("scale", typing.get_args(Scale))
@pytest.mark.parametrize("name", STUDIES)
def test_points_have_valid_names_and_starts(name: str, scale: Scale) -> None:
    """Each study has points at each scale, of different names, which start from points that come before."""
    seen: set[str] = set()
    for point in STUDIES[name].points(scale):
        assert re.fullmatch(r"[A-Za-z0-9_.+-]+", point.name), "no name for a folder"
        assert point.name not in seen
        assert point.start is None or point.start in seen
        seen.add(point.name)
    assert len(seen) > 2


@pytest.mark.parametrize(
    ("name", "scale"),
    [*((name, "tiny") for name in STUDIES), ("positions", "gpu"), ("scaling", "paper"), ("data-size", "paper")],
)
def test_cost_before_a_study_runs(name: str, scale: Scale, capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, "study", name, "--scale", scale, "--dry-run")
    assert len(result["points"]) == result["sum"]["points"] == len(STUDIES[name].points(scale))
    assert result["sum"]["open_hours"] == result["sum"]["hours"] > 0
    assert not any(row["finished"] for row in result["points"])
    assert not list(Path().iterdir())


def test_a_studys_cost_at_another_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """At twice the speed it takes half the time."""
    slow, fast = (
        answer(capsys, "study", "head", "--dry-run", "--tflops", rate)["sum"]["hours"] for rate in ("0.5", "1")
    )
    assert slow == pytest.approx(2 * fast)
    _, out, _ = call(capsys, "study", "head", "--dry-run", "--tflops", "0.5")
    assert f"{slow:.3g} hours of one core at 0.5 TFLOP/s" in out.splitlines()[-1]


def test_a_study_from_end_to_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by processes of its own, told for people, and only read the second time."""
    monkeypatch.setitem(STUDIES, "small", SMALL_STUDY)
    code, out, err = call(capsys, "study", "small", "--processes", "2", "--device", "cpu")
    assert code == 0, err
    assert "6/6" in err
    assert "The larger rate is ahead." in out
    assert out.splitlines()[-1].startswith("report: runs/study-small-tiny/report.md")
    again = answer(capsys, "study", "small", "--device", "cpu")
    assert again == json.loads(Path("runs/study-small-tiny/study.json").read_text())
    cost = answer(capsys, "study", "small", "--dry-run")
    assert all(row["finished"] for row in cost["points"])
    assert cost["sum"]["open_hours"] == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "give the NAME of a study"),
        (["positions", "--list"], "--list alone"),
        (["--list", "--scale", "gpu"], "--list alone"),
        (["positions", "--dry-run", "--processes", "2"], "no effect with --dry-run"),
        (["postions"], "the nearest: positions"),
        (["positions", "--tflops", "3"], "no effect without --dry-run"),
        (["positions", "--dry-run", "--tflops", "0"], "tflops is 0"),
        (["positions", "--scale", "huge"], "huge"),
        (["positions", "--processes", "0"], "at least 1"),
        (["positions", "--device", "tpu"], "tpu"),
        (["positions", "--dataset", "folder:nowhere", "--dry-run"], "folder:nowhere"),
        (["data-size", "--scale", "paper", "--dataset", "digits", "--dry-run"], "several data sets"),
    ],
)
def test_what_is_no_study(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "study", *argv)
    assert code == 2
    assert said in err
    assert not list(Path().iterdir())
