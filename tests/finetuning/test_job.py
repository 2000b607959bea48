"""A fine-tuning job by the clock: what is left out where the machine is slower than planned, and that it is kept."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from staged_job import make_job, tune

from vitlab.config import FinetuneConfig
from vitlab.finetuning import head, protocol, representations, run_job, sweep
from vitlab.finetuning.head import FittedHead
from vitlab.finetuning.plan import Plan, Task
from vitlab.finetuning.representations import FrozenCheckpoint
from vitlab.finetuning.sweep import Sweep
from vitlab.inspection.run_section import describe_choices
from vitlab.runs import run as run_module
from vitlab.runs.run import RunResult
from vitlab.train.clock import Clock
from vitlab.train.workdir import METRICS, Workdir, read_log
from vitlab.weights import load_model

OPEN = ("runs", "refit", "head_views")


class Manual(Clock):
    """A clock that the test sets."""

    seconds_left = 1e6

    def left(self) -> float:
        return type(self).seconds_left

    def restore(self, left: float) -> None:
        pass


@pytest.fixture
def one_rate(staged: FinetuneConfig) -> FinetuneConfig:
    return dataclasses.replace(staged, learning_rates=(3e-3,), sweep_steps=None, steps=8)


@pytest.fixture(autouse=True)
def _manual_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that everything fits into, until a test takes the time away; the plan is the config as it is."""
    monkeypatch.setattr(protocol, "Clock", Manual)
    monkeypatch.setattr(Manual, "seconds_left", 1e6)
    monkeypatch.setattr(protocol, "fit_budget", lambda task, measure, *_: as_planned(task, measure))


def as_planned(task: Task, measure: Any) -> Plan:
    return task.plan(task.config, measure(task.config, False))


def time_is_over_after(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """From the end of this method on no time is left."""
    original: Callable[..., Any] = getattr(owner, name)

    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        result = original(self, *arguments, **options)
        monkeypatch.setattr(Manual, "seconds_left", 0.0)
        return result

    monkeypatch.setattr(owner, name, wrapped)


def budgeted(checkpoint: Path, config: FinetuneConfig, folder: Path, **options: Any) -> dict[str, Any]:
    return tune(checkpoint, config, folder, budget=600.0, open_settings=OPEN, **options).result


@pytest.mark.usefixtures("pretrained")
def test_where_all_fits_nothing_changes(
    workdir: Path, one_rate: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all choices are made before the first test image is looked at."""
    without = tune(workdir, one_rate, tmp_path / "none").result
    splits = []
    for module in (sweep, run_job, run_module, head):

        def recorded(
            config: Any, model: Any, data: Any, *rest: Any, evaluate: Any = module.evaluate_split, **options: Any
        ) -> Any:
            splits.append(data.split)
            return evaluate(config, model, data, *rest, **options)

        monkeypatch.setattr(module, "evaluate_split", recorded)
    assert budgeted(workdir, one_rate, tmp_path / "clock") == without
    first = splits.index("test")
    assert ({*splits[:first]}, {*splits[first:]}) == ({"held_out"}, {"test"})
    plan = json.loads((tmp_path / "clock" / "plan.json").read_text())
    assert all(plan["decisions"].values())
    assert plan["stages"][0]["stage"] == "read"
    assert "plan.json" in (tmp_path / "clock" / "SHA256SUMS").read_text()
    assert not (tmp_path / "none" / "plan.json").exists()


@pytest.mark.usefixtures("pretrained")
def test_the_head_alone(
    workdir: Path, one_rate: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_is_over_after(monkeypatch, FittedHead, "log_metrics")
    done = tune(workdir, one_rate, tmp_path / "out", budget=600.0, open_settings=OPEN)
    assert (done.result["left_out"], done.result["chosen"], done.result["sweep"]) == (["fine-tuning"], "linear", [])
    assert "fine-tuning" in done.summary()
    assert any("Left out" in sentence and "fine-tuning" in sentence for sentence in describe_choices(tmp_path / "out"))


@pytest.mark.usefixtures("pretrained")
def test_the_run_of_the_sweep_is_the_final_one(
    workdir: Path, one_rate: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the weights of the sweep; a killed job decides the same again, whatever the clock says."""
    with monkeypatch.context() as patch:
        time_is_over_after(patch, Sweep, "run")
        patch.setattr(Workdir, "write_result", _killed_at_the_end(Workdir.write_result, tmp_path / "out"))
        with pytest.raises(KeyboardInterrupt):
            budgeted(workdir, one_rate, tmp_path / "out")
    result = budgeted(workdir, one_rate, tmp_path / "out")
    assert (result["left_out"], result["chosen"]) == (["final run 0", "test of the head alone"], "run-0")
    assert "linear" not in result
    trained = load_model(tmp_path / "out" / "sweep" / "lr-0.003" / "model").state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in load_model(tmp_path / "out").state_dict().items())


@pytest.mark.usefixtures("pretrained")
def test_a_job_that_is_one_run_is_shortened(
    workdir: Path, one_rate: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without sweep and head, such as BiT's protocol. With no time left, one step is taken."""
    config = dataclasses.replace(one_rate, head=None, learning_rates=(), runs=1, alpha=None)
    steps = []
    for seconds in (1e6, 0.0):
        monkeypatch.setattr(Manual, "seconds_left", seconds)
        budgeted(workdir, config, tmp_path / f"{seconds}")
        steps.append(read_log(tmp_path / f"{seconds}" / METRICS)[-1]["step"])
    assert steps == [8, 1]


def _killed_at_the_end(write: Callable[..., None], job: Path) -> Callable[..., None]:
    def write_result(self: Workdir, result: Any) -> None:
        if self.path == job:
            raise KeyboardInterrupt
        write(self, result)

    return write_result


@pytest.mark.usefixtures("pretrained")
def test_the_head_takes_the_images_that_there_is_time_for(
    workdir: Path, one_rate: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of the same size with all classes: of eight, two here."""
    monkeypatch.setattr(representations, "MIN_PART", 8)
    monkeypatch.setattr(representations, "PART_SECONDS", 1e-9)
    compute, seen = FrozenCheckpoint._compute, []

    def counted(self: FrozenCheckpoint, indices: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(self.job.splits.train.labels[indices])
        if len(seen) == 2:
            monkeypatch.setattr(Manual, "seconds_left", 0.0)
        return compute(self, indices, *arguments, **options)

    monkeypatch.setattr(FrozenCheckpoint, "_compute", counted)
    data = dataclasses.replace(one_rate.data, flip=True)
    config = dataclasses.replace(one_rate, head_views=4, data=data)
    result = budgeted(workdir, config, tmp_path / "out")
    assert len(seen) == 2
    assert all({*labels.tolist()} == {0, 1, 2, 3} for labels in seen)
    assert result["linear"]["fitted_images"] == sum(map(len, seen))
    assert result["left_out"] == ["training images of the head, part 3 of 8", "augmented view 1", "fine-tuning"]
    assert result["test"]["accuracy"] > 0.5
    assert budgeted(workdir, config, tmp_path / "out") == result


def test_a_later_decision_replaces_the_reason(workdir: Path, pretrained: RunResult, staged: FinetuneConfig) -> None:
    job = make_job(workdir, pretrained, staged)
    first = job.decide("the first", dataclasses.replace(job.config, runs=2, seed=3))
    second = first.decide("the second", dataclasses.replace(first.config, runs=4))
    assert first.reasons == (("seed", 3, "the first"), ("runs", 2, "the first"))
    assert second.reasons == (("seed", 3, "the first"), ("runs", 4, "the second"))
    assert (second.config.runs, second.config.seed) == (4, 3)
    assert second.decide("nothing", second.config) == second
