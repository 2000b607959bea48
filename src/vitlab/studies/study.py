"""What a study is: named runs, and the report that is made of them. Nothing here needs torch."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.inspect.panels import Panel
from vitlab.models.config import ModelConfig
from vitlab.settings import to_dict

Scale = Literal["tiny", "gpu", "paper"]
"""`tiny` is for two cores, `gpu` for one device; `paper` is the original, whose cost a dry run tells."""

SEEDS = (0, 1, 2)
"""Of every point."""


@dataclass(frozen=True)
class Point:
    """One run of a study: a training from scratch, or a fine-tuning of another point's model."""

    name: str
    """Unlike any other of the study, and fit to be a folder's name: letters, digits, `-`, `_` and `.`."""
    config: TrainConfig
    """The run; a FinetuneConfig where it starts from another point. Its `seed` is the point's."""
    labels: Mapping[str, str | float]
    """What the report groups by, e.g. {"kind": "1d", "at": "stem"}; the points of one group differ by their seed."""
    start: str | None = None
    """Name of the point whose model it fine-tunes."""


@dataclass(frozen=True)
class Done:
    """A point whose run has ended."""

    point: Point
    figures: Mapping[str, float]
    """Of the finished model: `accuracy` and `loss` on the test images; `fewshot_5shot` and the like if asked for."""
    records: Sequence[Mapping[str, Any]]
    """metrics.jsonl: the curves."""
    examples: int
    """Images of its training split."""
    model: ModelConfig | None = None
    """What was run, where the point's config does not say it: a fine-tuning takes the model that it starts from."""

    @property
    def seed(self) -> int:
        return self.point.config.seed

    @property
    def exaflops(self) -> float:
        """Compute of this run alone, as Table 6 counts it."""
        return exaflops(
            dataclasses.replace(self.point.config, model=self.model or self.point.config.model), self.examples
        )


@dataclass(frozen=True)
class Difference:
    """A mean difference with its bootstrap interval."""

    mean: float
    low: float
    high: float
    """Bounds of the 95 % interval; of a single pair they are infinite, for one seed says nothing of the next."""
    pairs: int
    """Seeds that both sides have."""


@dataclass(frozen=True)
class Claim:
    """Something that the paper says of a difference, and what these runs say."""

    text: str
    """As a full sentence about the expected outcome."""
    paper: str
    """The paper's own figures, with their place: "0.614 against 0.642 (Table 8)"."""
    measured: Difference
    """In the unit of the figures (accuracy: 0.01 is one point), its sign such that the claim means more than 0."""
    expected: Literal["more", "equal"] = "more"
    """`equal`: the paper finds no difference beyond noise."""

    @property
    def verdict(self) -> str:
        """`shows`, `not clear` or `contradicted`, or of two that should be equal `differ`, by the interval.

        A single seed shows nothing.
        """
        low, high = self.measured.low, self.measured.high
        if not (math.isfinite(low) and math.isfinite(high)):
            return "not clear"
        if self.expected == "equal":
            return "shows" if low <= 0 <= high else "differ"
        return "shows" if low > 0 else "contradicted" if high < 0 else "not clear"


@dataclass(frozen=True)
class Report:
    """What a study found."""

    lead: str
    """Markdown: what was run, on what, in two or three sentences."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    claims: Sequence[Claim]
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Study:
    """A study of the paper."""

    name: str
    source: str
    """Where in the paper: "Table 8, App. D.4"."""
    about: str
    """One line: the question."""
    points: Callable[[Scale], Sequence[Point]]
    """The runs, those that others start from first."""
    report: Callable[[Sequence[Done]], Report]
    """Of all points, in their order."""


def exaflops(config: TrainConfig, examples: int) -> float:
    """6 x multiply-accumulates of one forward pass x images seen, in 1e18: how Table 6 counts.

    Of convolutions it leaves out the products with the zeros around a map (`inner_macs`): so does XLA's own count.
    """
    return 6 * config.model.inner_macs * updates(config, examples) * config.batch_size / 1e18


def updates(config: TrainConfig, examples: int) -> int:
    """Steps in all: a fine-tuning makes those of its search and of each of its runs."""
    steps = config.total_steps(examples)
    if isinstance(config, FinetuneConfig):
        rates = len(config.learning_rates) if len(config.learning_rates) > 1 else 0
        steps = config.runs * steps + rates * (config.sweep_steps or steps)
    return steps


def digest(point: Point, points: Mapping[str, Point]) -> str:
    """Eight digits that change when anything changes that the point's result depends on.

    Settings that are switched off (None, False) do not count, so that a later version with more settings changes
    nothing.
    """
    start = digest(points[point.start], points) if point.start else None
    kept = json.dumps([type(point.config).__name__, _on(to_dict(point.config)), start], sort_keys=True)
    return hashlib.sha256(kept.encode()).hexdigest()[:8]


def _on(settings: Any) -> Any:
    if isinstance(settings, dict):
        return {name: _on(value) for name, value in settings.items() if value is not None and value is not False}
    return settings
