"""Table 9 and Fig. 2: the means by hand, what is missing, and the paper's values beside."""

from pathlib import Path
from typing import Any

import pytest

from vitlab.data.vtab.tasks import GROUPS, TASKS
from vitlab.runs.vtab import summarize
from vitlab.studies.vtab_table import PAPER, TABLE9, as_table, draw, figure2, printed_mean

H14 = [95.3, 85.5, 75.2, 99.7, 97.2, 65.0, 88.9, 83.3, 96.7, 91.4, 76.6]
H14 += [91.7, 63.8, 53.1, 79.4, 63.3, 84.5, 33.2, 51.2]
"""ViT-H/14 (JFT) in Table 9, in percent, in the order of its columns."""


def records(accuracies: Any) -> dict[str, dict[str, Any]]:
    return {
        name: {"accuracy": value / 100, "images": TASKS[name].test_size, "skipped": 0}
        for name, value in zip(TASKS, accuracies, strict=True)
    }


def lines_of(result: dict[str, Any]) -> list[str]:
    return [" ".join(line.split()) for line in as_table(result | {"scored_on": "test"}).splitlines()]


def test_means_by_hand_and_those_printed() -> None:
    """Table 9 prints those of all tasks: 77.6, 76.3 and 72.7."""
    result = summarize(records(H14), {})
    groups = [sum(H14[:7]) / 700, (83.3 + 96.7 + 91.4 + 76.6) / 400, sum(H14[11:]) / 800]
    assert [result["groups"][name] for name in ("natural", "specialized", "structured")] == pytest.approx(groups)
    assert (result["mean"], result["missing"]) == (pytest.approx(sum(H14) / 1900), {})
    assert TABLE9.keys() == TASKS.keys()
    assert [row[0] for row in TABLE9.values()] == H14
    assert [printed_mean(i, "all 19") for i in range(3)] == pytest.approx([77.6, 76.3, 72.7], abs=0.05)


def test_no_mean_with_a_task_missing() -> None:
    done = records(H14)
    del done["dmlab"]
    done["dtd"]["skipped"] = 3
    result = summarize(done, {"dmlab": "no such file"})
    assert (result["groups"]["structured"], result["mean"]) == (None, None)
    assert result["missing"] == {"dmlab": "no such file"}
    lines = lines_of(result)
    assert "Caltech101 natural 6,084 95.30% 95.3 95.4 90.8" in lines
    assert "mean of specialized 87.00% 87.0 86.7 84.7" in lines
    assert any(line.startswith("mean of structured 65.0 63.0 57.5 7 of its 8 tasks") for line in lines)
    assert any(line.startswith("DTD natural 1,880 75.20% 75.2 74.3 74.1 3 ") for line in lines)
    assert any("dmlab: no such file" in line for line in lines)


def test_figure_2_has_the_complete_groups() -> None:
    panel = figure2(summarize(records(H14), {}), "mine.npz")
    assert panel is not None
    assert list(panel.ticks) == ["all 19", *GROUPS]
    ours, printed, *_ = panel.series
    assert [ours.name, *(line.name for line in panel.series[1:])] == ["mine.npz", *(f"{m} (Table 9)" for m in PAPER)]
    assert list(ours.y) == pytest.approx(list(printed.y))
    assert ours.y[1] == pytest.approx(sum(H14[:7]) / 700)
    few = {name: record for name, record in records(H14).items() if TASKS[name].group == "specialized"}
    panel = figure2(summarize(few, {}), "mine.npz")
    assert panel is not None
    assert (list(panel.ticks), [len(line.y) for line in panel.series]) == (["specialized"], [1] * 4)
    assert figure2(summarize({}, {}), "mine.npz") is None


@pytest.mark.parametrize(("scored_on", "drawn"), [("test", True), ("val200", False)])
def test_a_complete_group_of_the_test_parts_is_drawn(tmp_path: Path, scored_on: str, drawn: bool) -> None:
    result = {"groups": {"natural": 0.7, "specialized": None, "structured": None}, "mean": None, "scored_on": scored_on}
    draw(result, "mine.npz", tmp_path / "figure.png")
    assert (tmp_path / "figure.png").is_file() == drawn
