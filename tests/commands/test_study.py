"""The command `study`."""

from pathlib import Path
from typing import Any

import pytest
from program import answer, call

from vitlab.studies import STUDIES, runner
from vitlab.studies.spec import Scale
from vitlab.studies.tables import TABLES


def test_studies_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "study", "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["study", *STUDIES, *TABLES]
    assert {row["study"]: row["paper"] for row in answer(capsys, "study", "--list")}["positions"].startswith("Table 8")


@pytest.mark.parametrize(("name", "scale"), [("masking", "tiny"), ("scaling", "paper")])
def test_cost_before_a_study_runs(name: str, scale: Scale, capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, "study", name, "--scale", scale, "--dry-run")
    assert len(result["points"]) == result["sum"]["points"] == len(STUDIES[name].runs(scale))
    assert result["sum"]["open_hours"] == result["sum"]["hours"] > 0
    assert not any(row["finished"] for row in result["points"])
    assert not list(Path().iterdir())


def test_study(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(runner, "run_study", lambda study, plan, **how: calls.append((study.name, how)) or {"a": 1})
    monkeypatch.setattr("vitlab.studies.report.as_text", lambda result: f"the claims of {result}")
    code, out, err = call(capsys, "study", "head", "--processes", "2", "--device", "cpu")
    assert (code, calls) == (0, [("head", {"processes": 2, "device": "cpu", "clock": None})])
    assert "the claims of {'a': 1}" in out
    assert "runs/study-head-small/report.md" in out
    assert "64 of 64 runs to train, about " in err
    assert answer(capsys, "study", "head") == {"a": 1}
    _, _, err = call(capsys, "study", "head", "--dataset", "folder:mine")  # of an unknown number of images
    assert "64 of 64 runs to train" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
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
def test_invalid_arguments(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "study", *argv)
    assert code == 2
    assert message in err
    assert not list(Path().iterdir())
