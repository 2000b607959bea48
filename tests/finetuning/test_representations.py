"""Representations for the least-squares head: of which images, and in which precision."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from staged_job import make_job

from vitlab.config import FinetuneConfig
from vitlab.evaluation.accuracy import evaluate_checkpoint
from vitlab.evaluation.features import Features
from vitlab.evaluation.options import EvalOptions
from vitlab.finetuning import representations, stages
from vitlab.finetuning.head import fit_head
from vitlab.finetuning.held_out import hold_out_indices
from vitlab.finetuning.job import FinetuneJob
from vitlab.finetuning.representations import FrozenCheckpoint
from vitlab.finetuning.stages import head_images
from vitlab.finetuning.sweep import RunStart
from vitlab.runs.run import RunResult
from vitlab.weights import load_model


def test_representations_in_bfloat16(
    workdir: Path, pretrained: RunResult, staged: FinetuneConfig, start: RunStart, tmp_path: Path
) -> None:
    """In the precision of training, as is the test; the head is as good, and its model is in float32."""
    low, full = fit_head(make_job(workdir, pretrained, dataclasses.replace(staged, precision="bfloat16"))), start.head
    assert full is not None
    x = full.fitter.plain.x
    rounding = np.abs(low.fitter.plain.x - x).max() / np.abs(x).max()
    assert 0 < rounding < 0.03
    assert low.plain_head.accuracy == pytest.approx(full.plain_head.accuracy, abs=0.02)
    test = low.test(tmp_path / "linear")["test"]
    assert test["computed_in"] == "bfloat16"
    evaluated = evaluate_checkpoint(tmp_path / "linear", options=EvalOptions(precision="bfloat16"))
    assert test["accuracy"] == evaluated.accuracy
    assert {weight.dtype for weight in load_model(tmp_path / "linear").parameters()} == {torch.float32}


@pytest.mark.parametrize(("limit", "shots"), [(40, 10), (8, 5)])
def test_where_fine_tuning_follows_the_head_takes_few_of_many_images(
    workdir: Path,
    pretrained: RunResult,
    staged: FinetuneConfig,
    start: RunStart,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    shots: int,
) -> None:
    """As many of each class, and those held out, which it is scored on; alone it takes all."""
    job = make_job(workdir, pretrained, staged)
    assert start.head is not None
    train, everything = job.splits.train, start.head.fitter.plain
    for module in (representations, stages):
        monkeypatch.setattr(module, "HEAD_IMAGES", limit)
        monkeypatch.setattr(module, "HEAD_SHOTS", 5)
    fitted = fit_head(job)
    plain = fitted.fitter.plain
    _, held_out = hold_out_indices(train, staged.held_out, staged.seed)
    chosen = plain.indices
    assert set(held_out) <= set(chosen)
    assert np.bincount(train.labels[np.setdiff1d(chosen, held_out)]).tolist() == [shots] * 4
    np.testing.assert_allclose(plain.x, everything.x[chosen], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(plain.labels, train.labels[chosen])
    assert len(chosen) == pytest.approx(head_images(staged, len(train), 4), abs=2)
    assert fitted.score_held_out()["images"] == len(held_out)
    one_rate = dataclasses.replace(staged, learning_rates=(), sweep_steps=None)
    assert len(compute_plain(make_job(workdir, pretrained, one_rate)).x) == 4 * shots
    alone = dataclasses.replace(one_rate, runs=0)
    assert len(compute_plain(make_job(workdir, pretrained, alone)).x) == len(train)


def compute_plain(job: FinetuneJob) -> Features:
    return FrozenCheckpoint.load(job).compute_plain()
