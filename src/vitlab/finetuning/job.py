"""A fine-tuning job as data: `protocol.py` decides it step by step, `run_job.py` executes it, all stages read it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from vitlab.config import FinetuneConfig
from vitlab.finetuning.job_clock import JobClock
from vitlab.recipes.resolve import Reason, changes
from vitlab.runs.run import RunContext
from vitlab.runs.splits import Splits


@dataclass(frozen=True)
class FinetuneJob:
    """Checkpoint, images, settings and plan of a job."""

    checkpoint: str | Path
    init_id: str
    """Identifies the initial weights."""
    splits: Splits
    config: FinetuneConfig
    context: RunContext
    log: Callable[[str], None]
    open_settings: frozenset[str] = frozenset()
    """Settings that neither the user nor the recipe has fixed."""
    reasons: tuple[Reason, ...] = ()
    """Why the open settings have their values."""
    clock: JobClock = field(default_factory=JobClock)

    def decide(self, why: str, config: FinetuneConfig) -> "FinetuneJob":
        """The job with `config`, whose changes have this reason."""
        new = tuple(Reason(name, value, why) for name, value in changes(self.config, config))
        old = tuple(reason for reason in self.reasons if reason.setting not in {name for name, *_ in new})
        return dataclasses.replace(self, config=config, reasons=old + new)
