"""A study in a given time."""

import dataclasses
from pathlib import Path

import pytest
from small_study import SMALL, variants

from vitlab.errors import UserError
from vitlab.studies import budget, cost
from vitlab.studies.report import write_report
from vitlab.studies.runner import StudyError, StudyPlan, plan, run_study, run_unfinished
from vitlab.train.clock import Clock


@pytest.mark.parametrize(
    ("hours", "expected"), [(10, (5, 1)), (2, (2, 1)), (1.4, (2, 2)), (0.2, (3, 16))], ids=lambda value: str(value)
)
def test_a_budget_takes_seeds_then_steps(
    hours: float, expected: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a study whose seed takes an hour, by one process; the longest that fits."""
    monkeypatch.setattr(
        budget, "_measured_tflops", lambda plan, device: cost.cost(plan)["sum"]["exaflops"] * 1e6 / 3600
    )
    study = dataclasses.replace(SMALL, variants=lambda scale: variants(scale, steps=64), seeds=5)

    def make_plan(seeds: int, divisor: int) -> StudyPlan:
        return plan(study, "small", tmp_path, seeds=seeds, divisor=divisor)

    clock = Clock(hours * 3600 * 1.1)
    made = budget.fit_study(study, make_plan, clock, 1, "cpu")
    assert (len({run.config.seed for run in made.runs}), made.divisor) == expected
    with pytest.raises(UserError, match="--budget"):
        budget.fit_study(study, make_plan, Clock(60.0), 1, "cpu")


def test_when_the_time_is_over_the_complete_seeds_are_reported(tmp_path: Path) -> None:
    """The run that is not finished is interrupted, and a later call goes on."""
    study = dataclasses.replace(SMALL, variants=lambda scale: variants(scale, steps=4), seeds=2)
    whole = plan(study, "small", tmp_path)
    first_seed = dataclasses.replace(whole, runs=tuple(run for run in whole.runs if run.config.seed == 0))
    over = Clock(0.0)
    with pytest.raises(StudyError, match="no seed complete"):
        run_study(study, whole, processes=1, device="cpu", clock=over)
    run_unfinished(first_seed, "cpu")
    report = run_study(study, whole, processes=1, device="cpu", clock=over)
    assert {point["seed"] for point in report["points"]} == {0}
    assert len(run_study(study, whole, processes=1, device="cpu", clock=Clock(1e6))["points"]) == len(whole.runs)


def test_shorter_runs_decide_nothing(tmp_path: Path) -> None:
    short = plan(SMALL, "small", tmp_path, divisor=2)
    full = plan(SMALL, "small", tmp_path)
    assert [run.config.total_steps(1) for run in short.runs] == [run.config.total_steps(1) // 2 for run in full.runs]
    assert not {*short.folders.values()} & {*full.folders.values()}
    run_unfinished(short, "cpu")
    report = write_report(SMALL, "small", short.results, tmp_path, short.divisor)
    assert {claim["verdict"] for claim in report["claims"]} == {"not tested"}
    assert "1/2 of the steps" in report["lead"]
