"""The commands `list` and `doctor`."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from program import answer, call

import vitlab.cost.doctor
from vitlab.commands.info import LISTS, datasets, models
from vitlab.data.registry import DATASETS
from vitlab.models import MODELS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.parametrize("what", LISTS)
def test_list(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "list", what) == json.loads(json.dumps(LISTS[what]()))
    code, out, _ = call(capsys, "list", what, "no-such-name")
    assert (code, "no-such-name" in out) == (0, True)


def test_commands_print_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "list", "models", "ViT-[BL]/16")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["model", "ViT-B/16", "ViT-L/16"]
    assert "86,567,656" in out
    monkeypatch.setenv("COLUMNS", "80")
    for what in ("models", "studies", "recipes"):
        assert max(map(len, call(capsys, "list", what)[1].splitlines())) <= 80
    monkeypatch.setattr(vitlab.cost.doctor, "diagnose", lambda path: {"path": str(path)})
    monkeypatch.setattr(vitlab.cost.doctor, "format_diagnosis", str)
    assert answer(capsys, "doctor", "--path", "there") == {"path": "there"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ViT-B/16", ["ViT", 12, 768, 3072, 12, 16, 16, 197]),
        ("R50+ViT-B/16", ["hybrid", 12, 768, 3072, 12, 1, 16, 197]),
        ("R152x4", ["ResNet", 152, 256, "-", "-", "-", 32, 49]),
        ("R26x1", ["ResNet", 26, 64, "-", "-", "-", 32, 49]),
        ("Axial-ViT-B/32", ["axial", 12, 768, 3072, 12, 32, 32, 50]),
        ("AxialResNet50", ["axial", 50, 64, "-", 8, "-", 32, 49]),
    ],
)
def test_row_of_a_model(name: str, expected: list[Any]) -> None:
    (row,) = models(name)
    assert list(row.values())[1:-2] == expected


def test_page_about_models_is_generated(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(PAGE.parents[1] / "benchmarks" / "models_page.py"), run_name="__main__")
    page = capsys.readouterr().out
    assert page == PAGE.read_text(), "run `python benchmarks/models_page.py > docs/models.md`"
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    counts = {name: int(rest[-2].replace(",", "")) for name, *rest in rows if name in MODELS}
    assert counts == {name: config.num_parameters for name, config in MODELS.items()}


def test_rows_of_data_sets() -> None:
    rows = {row["dataset"]: row for row in datasets()}
    assert list(rows) == list(DATASETS)
    digits = ["digits", 10, "8x8", "train 1,259, val 179, test 359", "val 12.5%", "CC BY 4.0"]
    assert list(rows["digits"].values())[:-1] == digits
    assert rows["folder:PATH"]["classes"] == rows["folder:PATH"]["splits"] == "yours"
    assert rows["vtab:TASK"]["classes"] == rows["vtab:TASK"]["size"] == "varied"
    assert all(row["license"] and row["source"] for row in rows.values())


def test_what_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert {row["list"] for row in answer(capsys, "list")} == LISTS.keys()


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, flag) == (0, f"vitlab {vitlab.__version__}\n", "")
