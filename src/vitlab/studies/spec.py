"""What a study consists of, as data: runs, their results over seeds, a table, claims and charts. Imports no torch.

A seed sets the initial weights, the order of the images, the crops, and which images a part of the data holds; the test
images are the same for all seeds. So an interval over seeds covers other seeds, and not other test images.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
from jaxtyping import Float

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.models.config import ModelConfig
from vitlab.panels import Panel
from vitlab.settings import to_dict
from vitlab.studies.statistics import Difference, format_percent, paired_difference

Scale = Literal["tiny", "small", "paper"]
"""`small` is for two CPU cores, and faster on a GPU; `paper` is the original; `tiny` is `small` with short runs of one
seed on digits, which are installed: they show that everything works and decide nothing."""
DIGITS = "digits"
SHORTER = 20
"""Steps of a run at `small` for one at `tiny`."""
Labels = Mapping[str, Any]
"""Strings and numbers by name."""
Config = TypeVar("Config")


def changed(config: Config, **changes: Any) -> Config:
    """The config with these settings; a dict changes settings of a section."""
    values = {name: changed(getattr(config, name), **v) if isinstance(v, dict) else v for name, v in changes.items()}
    return dataclasses.replace(config, **values)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class StudyRun:
    """One training run of a study: pre-training, or fine-tuning of another run's model."""

    name: str
    """Unique in the study, and a valid folder name: letters, digits, `-`, `_` and `.`."""
    config: TrainConfig
    """A FinetuneConfig where `init_from` is given."""
    labels: Labels
    """What the report groups by, such as {"kind": "1d", "at": "stem"}; runs of a group differ by their seed."""
    init_from: str | None = None
    """Name of the run whose model is fine-tuned."""

    def with_seed(self, seed: int) -> "StudyRun":
        """The run of this seed, which also draws the images of a part; it starts from the run of the same seed."""
        part = {} if self.config.data.subset_fraction is None else {"subset_seed": seed}
        init_from = self.init_from and f"{self.init_from}.seed-{seed}"
        return StudyRun(f"{self.name}.seed-{seed}", changed(self.config, data=part, seed=seed), self.labels, init_from)


def digest(run: StudyRun, runs: Mapping[str, StudyRun]) -> str:
    """Eight hexadecimal digits of everything that the run's result depends on."""
    init_id = digest(runs[run.init_from], runs) if run.init_from else None
    text = json.dumps([type(run.config).__name__, to_dict(run.config), init_id], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def exaflops(config: TrainConfig, examples: int) -> float:
    """6 x multiply-accumulates of a forward pass x images seen, in 1e18, as Table 6 counts.

    Products with the zero padding of convolutions are not counted (`macs_without_padding`), as in XLA's count.
    """
    return 6 * config.model.macs_without_padding * updates(config, examples) * config.batch_size / 1e18


def updates(config: TrainConfig, examples: int) -> int:
    """Optimizer steps in total; a fine-tuning makes the steps of its learning rate sweep and of each of its runs."""
    steps = config.total_steps(examples)
    if not isinstance(config, FinetuneConfig):
        return steps
    sweep = len(config.tried_rates) * (config.sweep_steps or steps) if config.runs else 0
    return config.refit * config.runs * steps + sweep


@dataclass(frozen=True)
class Result:
    """A finished run."""

    run: StudyRun
    metrics: Mapping[str, float]
    """The final model's: `accuracy` and `loss` on the test images; `fewshot_5shot`, ... and HELD_OUT, if measured."""
    records: Sequence[Mapping[str, Any]]
    """The lines of metrics.jsonl."""
    examples: int
    """Images of the training split."""
    model: ModelConfig
    """The model that was run; a fine-tuning has the model of the run in `init_from`."""

    @functools.cached_property
    def exaflops(self) -> float:
        """Compute of this run alone."""
        return exaflops(dataclasses.replace(self.run.config, model=self.model), self.examples)


Metric = str | Callable[[Result], float]
"""A name in `Result.metrics`, or a function of a result."""
HELD_OUT = "val_accuracy"
"""Metric: accuracy on the held-out images after the last step, of runs whose evaluation split is val."""


@dataclass(frozen=True)
class Results:
    """Results of a study, or of a part of its runs: a table's row, or a group that differs only by the seed."""

    runs: tuple[Result, ...]
    whole: "Results | None" = None
    """All results of the study; None for these themselves."""

    def __iter__(self) -> Iterator[Result]:
        return iter(self.runs)

    @property
    def study(self) -> "Results":
        return self.whole or self

    @property
    def labels(self) -> Labels:
        """Labels of the first run."""
        return self.runs[0].run.labels

    @property
    def model(self) -> ModelConfig:
        """Model of the first run."""
        return self.runs[0].model

    @property
    def seeds(self) -> list[int]:
        return sorted({result.run.config.seed for result in self})

    def select(self, condition: Callable[[Result], bool]) -> "Results":
        """The runs that meet the condition, possibly none."""
        return Results(tuple(filter(condition, self)), self.study)

    def where(self, **labels: Any) -> "Results":
        """The runs with these labels (and any others); raises ValueError where there is none."""
        chosen = self.select(lambda result: labels.items() <= result.run.labels.items())
        if not chosen.runs:
            raise ValueError(f"no run has the labels {labels}.")
        return chosen

    def values(self, label: str) -> list[Any]:
        """The distinct values of a label, in the order of the runs."""
        return list(dict.fromkeys(result.run.labels[label] for result in self if label in result.run.labels))

    def groups(self, *names: str) -> "list[Results]":
        """The runs that have these labels, grouped by them (default: by all labels), in the order of the runs."""
        groups: dict[tuple, list[Result]] = {}
        for result in self:
            labels = result.run.labels
            if labels.keys() >= set(names):
                groups.setdefault(tuple((name, labels[name]) for name in names or labels), []).append(result)
        return [Results(tuple(runs), self.study) for runs in groups.values()]

    def measure(self, metric: Metric, **labels: Any) -> Float[np.ndarray, " n"]:
        """The metric of every run with these labels, ordered by seed."""
        runs = sorted(self.where(**labels), key=lambda result: result.run.config.seed)
        return np.array([float(metric(r) if callable(metric) else r.metrics[metric]) for r in runs])

    def best(self, label: str, metric: Metric, **labels: Any) -> Any:
        """The value of `label` with the highest mean of the metric, among the runs with these other labels."""
        runs = self.where(**labels)
        return max(runs.values(label), key=lambda value: runs.measure(metric, **{label: value}).mean())

    def over_seeds(self, measure: "Callable[[Results], float]") -> Difference:
        """Mean and interval of a difference that is measured on the runs of each seed."""
        by_seed = (self.select(lambda result, seed=seed: result.run.config.seed == seed) for seed in self.seeds)
        return paired_difference(np.array([measure(runs) for runs in by_seed]))


def difference(
    metric: Metric, more: Labels | Sequence[Labels], less: Labels | Sequence[Labels]
) -> Callable[[Results], float]:
    """The mean of the metric over the group `more` minus the mean over the group `less`, as a function.

    For two groups on each side it is a difference of differences: more[0] + more[1] - less[0] - less[1].
    """
    sides = [[side] if isinstance(side, Mapping) else side for side in (more, less)]

    def measure(runs: Results) -> float:
        high, low = (sum(runs.measure(metric, **labels).mean() for labels in side) for side in sides)
        return high - low

    return measure


Cell = str | Callable[[Results], str]
"""A cell of a table: the name of a label, or a function of the row's results."""


def percent(metric: Metric, **labels: Any) -> Callable[[Results], str]:
    """Cell: the metric in percent, of the runs of the row with these labels; empty where there are none."""

    def cell(row: Results) -> str:
        runs = row.select(lambda result: labels.items() <= result.run.labels.items())
        return format_percent(runs.measure(metric)) if runs.runs else ""

    return cell


def named(label: str, names: Mapping[Any, str]) -> Callable[[Results], str]:
    """Cell: the name of the label's value."""
    return lambda row: names[row.labels[label]]


@dataclass(frozen=True)
class Claim:
    """A statement of the paper about a difference between two groups of runs."""

    text: str
    """A full sentence about the expected outcome."""
    paper: str
    """The paper's numbers and where they are: "0.614 against 0.642 (Table 8)"."""
    difference: Callable[[Results], float]
    """The expected group's lead over the other, in the runs of one seed; 0.01 is a percentage point."""
    expected: Literal["more", "equal"] = "more"
    """`equal`: the paper sees no difference beyond noise."""
    relevant: float = 0.005
    """The smallest difference that counts as one: not more than the paper's own."""
    out_of_reach: str = ""
    """Why only the paper's scale can show it; other scales do not contradict it."""


@dataclass(frozen=True)
class Chart:
    """A metric of every group of runs over a label, or over a number computed from the group."""

    title: str
    y_label: str
    metric: Metric
    x: str | Callable[[Results], float]
    """A label, whose values may be names, or a function of a group."""
    lines: str | Callable[[Results], str | Sequence[str]]
    """The line that a group belongs to: the value of a label, or a function that returns one or several names."""
    x_label: str = ""
    names: Mapping[Any, str] = field(default_factory=dict)
    """How the values of labels are written; also their order on an axis of names."""
    where: Callable[[Results], bool] = lambda group: True
    """Which groups are drawn."""
    log_x: bool = False
    front: bool = False
    """Draw the Pareto front instead of lines."""


@dataclass(frozen=True)
class Study:
    """A study of the paper: which runs, and what the report makes of them."""

    name: str
    source: str
    """Where it is in the paper: "Table 8, App. D.4"."""
    question: str
    variants: Callable[[Scale], Sequence[StudyRun]]
    """The runs of one seed; a run comes after the one in its `init_from`."""
    summary: str | Callable[[Results], str]
    """Markdown: what is compared, in one or two sentences. The report adds data, steps and seeds."""
    rows: tuple[str, ...]
    """The labels that identify a row of the table."""
    columns: Mapping[str, Cell] | Callable[[Results], Mapping[str, Cell]]
    claims: Sequence[Claim] | Callable[[Results], Sequence[Claim]]
    charts: Sequence[Chart | Panel] | Callable[[Results], Sequence[Chart | Panel]]
    compared: Callable[[Results], Results] = lambda results: results
    """The runs that table, claims and charts compare, such as those with the best weight decay."""
    seeds: int = 5
    """At the scale `small`: up to ten where five leave a close claim open, if they fit into four core-hours."""

    def runs(self, scale: Scale, seeds: int | None = None, divisor: int = 1) -> list[StudyRun]:
        """Every variant at every seed: one at `tiny` and at the paper's scale. divisor: of the steps of all runs."""
        variants = [shortened(run, divisor) for run in self.variants("small" if scale == "tiny" else scale)]
        if scale == "tiny":  # runs that differed by their data set are one
            variants = {run.name: run for run in map(on_digits, variants)}.values()
        seeds = seeds or {"tiny": 1, "small": self.seeds, "paper": 1}[scale]
        return [run.with_seed(seed) for seed in range(seeds) for run in variants]


def shortened(run: StudyRun, divisor: int) -> StudyRun:
    """The run with its steps or epochs divided by `divisor`."""
    if divisor == 1:
        return run
    config = run.config
    lengths = {
        "optim": {"warmup_steps": config.optim.warmup_steps // divisor},
        "steps": config.steps and max(2, config.steps // divisor),
        "epochs": config.epochs and config.epochs / divisor,
        "eval_every": config.eval_every and max(1, config.eval_every // divisor),
    }
    return dataclasses.replace(run, config=changed(config, **lengths))


def on_digits(run: StudyRun) -> StudyRun:
    """The run on digits, with a twentieth of its steps or epochs."""
    dataset = run.config.data.name
    config = changed(shortened(run, SHORTER).config, data={"name": DIGITS})
    labels = {key: DIGITS if value == dataset else value for key, value in run.labels.items()}
    return dataclasses.replace(run, name=run.name.replace(dataset, DIGITS), config=config, labels=labels)
