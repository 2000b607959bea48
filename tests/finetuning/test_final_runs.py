"""The final runs: averaged with the head, or taken from the sweep."""

import dataclasses
from pathlib import Path

import pytest
import torch
from staged_job import tune

from vitlab.config import FinetuneConfig
from vitlab.evaluation.accuracy import evaluate_checkpoint
from vitlab.finetuning.run_job import train_and_test
from vitlab.finetuning.scores import format_score
from vitlab.finetuning.stages import ALPHAS
from vitlab.finetuning.sweep import RunStart, Sweep
from vitlab.runs import run as run_module
from vitlab.weights import load_model


def test_the_weights_are_averaged_with_those_of_the_head(start: RunStart, tmp_path: Path) -> None:
    """Both runs train the same model, and what is tested is what is saved."""
    assert start.head is not None
    score = Sweep(start).score(3e-3, tmp_path / "trial").metrics
    assert score["alpha"] in (*ALPHAS, 1.0)
    assert f"{score['alpha']:.0%}" in format_score(score) or score["alpha"] == 1
    config = start.run_config(3e-3)
    results = [train_and_test(start, config, tmp_path / str(alpha), alpha) for alpha in (1.0, 0.25)]
    tuned, averaged = (load_model(tmp_path / name).state_dict() for name in ("1.0", "0.25"))
    head = start.head.create_classifier().state_dict()
    for name, weights in averaged.items():
        torch.testing.assert_close(weights, 0.75 * head[name] + 0.25 * tuned[name])
    assert not torch.equal(averaged["head.weight"], tuned["head.weight"])
    assert results[1]["test"]["loss"] == evaluate_checkpoint(tmp_path / "0.25").record()["loss"]
    assert results[0]["test"]["loss"] != results[1]["test"]["loss"]
    (tmp_path / "0.25" / "result.json").unlink()  # killed before its last line: tested again
    assert train_and_test(start, config, tmp_path / "0.25", 0.25) == results[1]


@pytest.mark.usefixtures("pretrained")
def test_without_a_refit_the_best_run_of_the_sweep_is_the_final_one(
    workdir: Path, staged: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its average of weights; killed at any place, the same."""
    config, out = dataclasses.replace(staged, refit=False, learning_rates=(1e-3, 3e-3)), tmp_path / "out"
    done = tune(workdir, config, out)
    lr, alpha = done.result["learning_rate"], done.result["alpha"]
    best = next(score for score in done.result["sweep"] if score["learning_rate"] == lr)
    assert (done.result["chosen"], alpha) == ("run-0", best["alpha"])
    trained = load_model(out / f"sweep/lr-{lr}" / "model").state_dict()
    for folder in (out, out / "run-0"):
        assert all(torch.equal(weights, trained[name]) for name, weights in load_model(folder).state_dict().items())
    assert done.result["test"]["accuracy"] == evaluate_checkpoint(out).accuracy
    logs = [(out / f / "metrics.jsonl").read_text() for f in ("run-0", f"sweep/lr-{lr}")]
    assert logs[0] == logs[1] != ""
    monkeypatch.setattr(run_module, "train", lambda *_, **__: pytest.fail("trains again"))
    for killed in ("result.json", "run-0/result.json"):
        (out / killed).unlink()
        assert tune(workdir, config, out).result == done.result
    assert (out / "run-0/metrics.jsonl").read_text() == logs[1]


@pytest.mark.usefixtures("pretrained")
def test_without_a_refit_and_without_a_head(workdir: Path, staged: FinetuneConfig, tmp_path: Path) -> None:
    config = dataclasses.replace(staged, refit=False, head=None, sweep_steps=None, learning_rates=(3e-3, 1e-2), steps=2)
    result = tune(workdir, config, tmp_path / "out").result
    trained = load_model(tmp_path / f"out/sweep/lr-{result['learning_rate']}" / "model").state_dict()
    assert all(torch.equal(weights, trained[n]) for n, weights in load_model(tmp_path / "out").state_dict().items())
    assert len(result["runs"]) == 1
