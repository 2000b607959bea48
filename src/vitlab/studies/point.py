"""A study's points, one training run each, and their results. Imports no torch."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.models.config import ModelConfig
from vitlab.settings import to_dict

Scale = Literal["tiny", "gpu", "paper"]
"""`tiny` is for two CPU cores, `gpu` for one GPU; `paper` is the original."""
Labels = Mapping[str, str | float]


@dataclass(frozen=True)
class Point:
    """One run of a study: a pre-training, or the fine-tuning of another point's model."""

    name: str
    """Unique in the study, and a valid folder name: letters, digits, `-`, `_` and `.`."""
    config: TrainConfig
    """A FinetuneConfig for a point with a `start`."""
    labels: Labels
    """What the report groups by, such as {"kind": "1d", "at": "stem"}; points of a group differ by their seed."""
    start: str | None = None
    """Name of the point whose model is fine-tuned."""

    def with_seed(self, seed: int) -> "Point":
        """The point of this seed; it starts from the point of the same seed."""
        start = self.start and f"{self.start}.seed-{seed}"
        return Point(f"{self.name}.seed-{seed}", dataclasses.replace(self.config, seed=seed), self.labels, start)


@dataclass(frozen=True)
class Result:
    """A finished point."""

    point: Point
    figures: Mapping[str, float]
    """Of the final model: `accuracy` and `loss` on the test images; `fewshot_5shot` and others if requested."""
    records: Sequence[Mapping[str, Any]]
    """The lines of metrics.jsonl."""
    examples: int
    """Images of the training split."""
    model: ModelConfig | None = None
    """The model of a fine-tuning, which is that of its start; None means the point's own."""

    @property
    def seed(self) -> int:
        return self.point.config.seed

    @property
    def config(self) -> TrainConfig:
        """The point's config with the model that was run."""
        return dataclasses.replace(self.point.config, model=self.model or self.point.config.model)

    @property
    def exaflops(self) -> float:
        """Compute of this run alone."""
        return exaflops(self.config, self.examples)

    def metric(self, metric: "Metric") -> float:
        """The value of a metric; raises ValueError where the result lacks it."""
        if callable(metric):
            return float(metric(self))
        if metric not in self.figures:
            raise ValueError(f"{self.point.name} has no metric {metric!r}; it has {', '.join(sorted(self.figures))}.")
        return float(self.figures[metric])


Metric = str | Callable[[Result], float]
"""A name in `Result.figures`, or a function of a result."""


def held_out(result: Result) -> float:
    """Metric: accuracy on the held-out images after the last step."""
    return [record["val_accuracy"] for record in result.records if "val_accuracy" in record][-1]


def exaflops(config: TrainConfig, examples: int) -> float:
    """6 x multiply-accumulates of a forward pass x images seen, in 1e18, as Table 6 counts.

    Products with the zero padding of convolutions are not counted (`inner_macs`), as in XLA's count.
    """
    return 6 * config.model.inner_macs * updates(config, examples) * config.batch_size / 1e18


def updates(config: TrainConfig, examples: int) -> int:
    """Optimizer steps in total; a fine-tuning makes those of its learning-rate search and of each of its runs."""
    steps = config.total_steps(examples)
    if isinstance(config, FinetuneConfig):
        rates = len(config.learning_rates) if len(config.learning_rates) > 1 else 0
        steps = config.runs * steps + rates * (config.sweep_steps or steps)
    return steps


def digest(point: Point, points: Mapping[str, Point]) -> str:
    """Eight hexadecimal digits of everything that the point's result depends on.

    Settings that are off (None, False) do not count: a new setting leaves the digests of old points unchanged.
    """
    start = digest(points[point.start], points) if point.start else None
    text = json.dumps([type(point.config).__name__, _enabled(to_dict(point.config)), start], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _enabled(settings: Any) -> Any:
    if isinstance(settings, dict):
        return {name: _enabled(value) for name, value in settings.items() if value is not None and value is not False}
    return settings
