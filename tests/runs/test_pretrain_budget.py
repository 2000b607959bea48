"""Pre-training in a given time."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from vitlab.config import TrainConfig
from vitlab.errors import UserError
from vitlab.runs import pretrain as pretrain_module
from vitlab.runs.cost import ImageCost
from vitlab.runs.pretrain import pretrain
from vitlab.train.clock import PLANNED_FRACTION
from vitlab.train.microbatch import StepCost
from vitlab.train.stopping import StoppedError


@pytest.fixture(autouse=True)
def _made_up_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its measurement a step of 16 images takes 100 seconds, and a test image one."""

    def cost(config: TrainConfig, *_: Any) -> ImageCost:
        return ImageCost(StepCost(16, 100 / 16, 1.0, 1.0, 0, None), config.model.forward_macs)

    monkeypatch.setattr(pretrain_module, "measure_cost", cost)


def run(config: TrainConfig, folder: Path, budget: float, log: list[str] | None = None) -> dict[str, Any]:
    options: dict[str, Any] = {"device": "cpu", "tensorboard": False, "log": [].append if log is None else log.append}
    return pretrain(config, folder, budget=budget, **options).result


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_as_many_steps_as_fit(config: TrainConfig, tmp_path: Path) -> None:
    """At most the recipe's; the test's time is kept free. The same command reads the finished run."""
    config = dataclasses.replace(config, steps=100, eval_every=None)
    log: list[str] = []
    result = run(config, tmp_path / "run", 3200.0, log)
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    test_seconds = result["test"]["images"]
    assert settings["steps"] == steps(tmp_path / "run")[-1]
    assert settings["steps"] == pytest.approx((PLANNED_FRACTION * 3200 - 2 * test_seconds) / 100, abs=1.5)
    assert ["steps", settings["steps"], "the time budget"] in settings["reasons"]
    assert "of the recipe's 100 steps" in log[0]
    assert run(config, tmp_path / "run", 3200.0) == result
    run(dataclasses.replace(config, steps=15), tmp_path / "whole", 100_000.0)
    assert steps(tmp_path / "whole")[-1] == 15


def test_where_nothing_fits_the_error_says_what_would(config: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--budget 2\dm"):
        run(config, tmp_path / "run", 500.0)
    assert not (tmp_path / "run").exists()


def test_an_interrupted_run_keeps_its_steps(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the machine does when it resumes."""
    config = dataclasses.replace(config, steps=100, checkpoint_every=5)
    whole = run(config, tmp_path / "whole", 3200.0)
    planned = steps(tmp_path / "whole")[-1]
    from vitlab.train import loop

    log, calls = loop._Run.log, []

    def stopped(self: Any, lr: float) -> None:
        log(self, lr)
        calls.append(self.state.step)
        if len(calls) == 2:
            self.stop.set()

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "log", stopped)
        with pytest.raises(StoppedError):
            run(config, tmp_path / "stopped", 3200.0)
    assert run(config, tmp_path / "stopped", 6400.0) == whole
    assert steps(tmp_path / "stopped") == steps(tmp_path / "whole")
    assert steps(tmp_path / "stopped")[-1] == planned
