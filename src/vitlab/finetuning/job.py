"""A fine-tuning job as data, and its clock: `protocol.py` decides it, `run_job.py` executes it, all stages read it.

With a budget the clock decides before each part of the work whether the part still fits. The decisions are part of the
job's state: `plan.json` keeps them with the plan and the time that is left, so that an interrupted job decides the same
again.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitlab.config import FinetuneConfig
from vitlab.errors import UserError
from vitlab.finetuning.stages import Plan
from vitlab.inspection.run_section import Report
from vitlab.recipes.resolve import Reason, changes
from vitlab.runs.run import RunContext
from vitlab.runs.splits import Splits
from vitlab.train.clock import Clock, TimeLimit
from vitlab.train.distributed import SINGLE, World
from vitlab.train.run_files import PLAN
from vitlab.train.workdir import Workdir, write_json


@dataclass
class JobClock:
    """Compares a plan with the time that is left; without a `budget` everything fits."""

    plan: Plan | None = None
    budget: Clock | None = None
    world: World = SINGLE
    decisions: dict[str, bool] = field(default_factory=dict)
    """Part -> whether it fitted."""
    notes: Sequence[str] = ()
    """What the plan leaves out, and the budget that includes it."""
    _folder: Workdir | None = None

    @property
    def image_seconds(self) -> float:
        """Planned seconds for the representation of an image; 0 without a plan."""
        return self.plan.cost.forward(self.plan.config.model) if self.plan else 0.0

    def seconds(self, stage: str) -> float:
        """Planned seconds of a stage; 0 without a plan."""
        return self.plan.seconds_of(stage) if self.plan else 0.0

    def after(self, stage: str) -> float:
        """Planned seconds of the stages after this one; 0 without a plan."""
        return self.plan.seconds_after(stage) if self.plan else 0.0

    def open(self, folder: Workdir) -> None:
        """Keeps the decisions in the folder of the job; reads those of an interrupted one."""
        if self.budget is None:
            return
        self._folder = folder
        saved = self.world.broadcast_object(lambda: _read(folder.path / PLAN))
        self.decisions = dict(saved.get("decisions", {}))
        self.notes = saved.get("left_out", self.notes)
        if "seconds_left" in saved:
            self.budget.restore(saved["seconds_left"])
        self._save()

    def fits(self, part: str, seconds: float, after: float) -> bool:
        """Whether the planned `seconds` of a part, and of what must come `after` it, are left; decided once."""
        if self.budget is None:
            return True
        if part not in self.decisions:
            self.decisions[part] = self._fits_now(self.budget, seconds + after)
            self._save()
        return self.decisions[part]

    def _fits_now(self, clock: Clock, seconds: float) -> bool:
        """Whether the planned seconds are left on rank 0's clock, at the speed last measured."""
        return self.world.broadcast_object(lambda: clock.left() >= clock.slowdown * seconds)

    def report(self) -> Report:
        """The largest report that the time left allows, which may be more than was planned; without a budget the whole
        one. Not one of the saved `decisions`: the same command makes a better one later."""
        if (plan := self.plan) is None or (budget := self.budget) is None:
            return "whole"
        kinds: tuple[Report, Report] = ("whole", "short")
        for kind in kinds:
            if self._fits_now(budget, plan.report_seconds(kind)):
                return kind
        return "none"

    def limit(self, stage: str, later: float) -> TimeLimit | None:
        """The time limit of a training run; the fraction `later` of its stage follows it, and then all later stages."""
        if (plan := self.plan) is None or self.budget is None:
            return None
        step_seconds = plan.config.batch_size * plan.cost.train(plan.config.model)
        trainings = later * plan.seconds_of(stage) + (plan.seconds_of("final") if stage == "sweep" else 0.0)
        after = later * plan.seconds_of(stage) + plan.seconds_after(stage) - trainings
        after -= max(plan.seconds_of("report") - plan.report_seconds("short"), 0.0)  # `report` decides at the end
        return TimeLimit(self.budget, step_seconds, after, trainings)

    def _save(self) -> None:
        if self._folder is None or not self._folder.writes or self.plan is None or self.budget is None:
            return
        stages = [{"stage": name, "seconds": seconds, "what": what} for name, seconds, what in self.plan.stages]
        record = {"budget": self.budget.seconds, "stages": stages, "decisions": self.decisions, "left_out": self.notes}
        write_json(self._folder.path / PLAN, record | {"seconds_left": self.budget.left()})


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
    layers: dict[str, Any] | None = None
    """How block and pooling were chosen (`evaluation.readouts.ReadoutChoice`), if they were."""

    def decide(self, why: str, config: FinetuneConfig) -> "FinetuneJob":
        """The job with `config`, whose changes have this reason."""
        new = tuple(Reason(name, value, why) for name, value in changes(self.config, config))
        old = tuple(reason for reason in self.reasons if reason.setting not in {name for name, *_ in new})
        return dataclasses.replace(self, config=config, reasons=old + new)


def _read(path: Path) -> dict[str, Any]:
    """The saved plan; empty without one. Raises UserError if it is not readable."""
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not readable JSON ({error}); give another --workdir.") from error
