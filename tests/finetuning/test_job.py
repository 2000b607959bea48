"""The decisions of a fine-tuning job before it starts."""

import dataclasses
from pathlib import Path

from staged_job import make_job

from vitlab.config import FinetuneConfig
from vitlab.runs.run import RunResult


def test_a_later_decision_replaces_the_reason(workdir: Path, pretrained: RunResult, staged: FinetuneConfig) -> None:
    job = make_job(workdir, pretrained, staged)
    first = job.decide("the first", dataclasses.replace(job.config, runs=2, seed=3))
    second = first.decide("the second", dataclasses.replace(first.config, runs=4))
    assert first.reasons == (("seed", 3, "the first"), ("runs", 2, "the first"))
    assert (second.config.runs, second.config.seed) == (4, 3)
    assert second.reasons == (("seed", 3, "the first"), ("runs", 4, "the second"))
    assert second.decide("nothing", second.config) == second
