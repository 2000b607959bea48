"""The runs of the sweep from the least-squares head, and their average with it."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitlab.finetuning import sweep as sweep_module
from vitlab.finetuning.head import FittedHead
from vitlab.finetuning.sweep import RunStart, Sweep
from vitlab.runs import run as run_module


@pytest.mark.parametrize(("losses", "alpha"), [((1.0, 0.5, 2.0, 3.0), 0.5), ((3.0, 2.0, 1.0, 0.5), 1.0)])
def test_the_average_of_least_held_out_loss(
    start: RunStart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: tuple[float, ...], alpha: float
) -> None:
    """`losses` of ALPHAS and of the fine-tuned model itself."""

    def evaluate_split(*args: Any) -> Any:
        evaluation = evaluate(*args)
        loss = averages.pop(0) if averages else losses[-1]
        return dataclasses.replace(evaluation, losses=np.full_like(evaluation.losses, loss))

    averages, evaluate = [losses[-1], *losses[:-1]], run_module.evaluate_split
    monkeypatch.setattr(sweep_module, "evaluate_split", evaluate_split)
    monkeypatch.setattr(run_module, "evaluate_split", evaluate_split)
    score = Sweep(start).score(3e-3, tmp_path / "trial").metrics
    assert (score["alpha"], score["loss"]) == (alpha, min(losses))


def test_the_search_starts_from_a_head_without_the_held_out_images(
    start: RunStart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[int | None] = []
    fit = FittedHead.start_head

    def recorded(self: FittedHead, indices: Any = None) -> Any:
        fitted.append(None if indices is None else len(indices))
        return fit(self, indices)

    monkeypatch.setattr(FittedHead, "start_head", recorded)
    sweep = Sweep(start)
    sweep.score(1e-3, tmp_path / "scored")
    assert fitted == [len(sweep.splits.train)]
    assert len(sweep.splits.train) < len(start.job.splits.train)
