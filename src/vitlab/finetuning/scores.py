"""The scores of learning rates on held-out images, what they choose, and the summary of the final runs."""

import copy
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vitlab.config import FinetuneConfig
from vitlab.evaluation.result import headline
from vitlab.train.stopping import NonFiniteError

ALPHA_WITHOUT_SWEEP = 0.25
"""Weight of the fine-tuned model where no sweep has chosen it: it gains nearly as much as half where fine-tuning helps,
and harms less elsewhere."""


@dataclass(frozen=True)
class Score:
    """A learning rate of the sweep."""

    learning_rate: float
    metrics: Mapping[str, Any]
    """`summary_metrics` on the held-out images; empty if the training diverged."""

    @property
    def record(self) -> dict[str, Any]:
        """The score as a line of metrics.jsonl and result.json."""
        return {"learning_rate": self.learning_rate, "accuracy": None, **self.metrics}


@dataclass(frozen=True)
class Choice:
    """Whether and how to fine-tune, by the time left and the held-out images."""

    fine_tunes: bool
    """Whether there are final runs; otherwise the least-squares head is the result."""
    best: Score | None = None
    """The best score of a sweep; None without one, and if the head is better."""
    scores: Sequence[Score] = ()
    """All scores of the sweep."""
    head_metrics: Mapping[str, Any] | None = None
    """`summary_metrics` of the head on the held-out images."""

    def learning_rate(self, config: FinetuneConfig) -> float:
        """The learning rate of the final runs."""
        return config.optim.lr if self.best is None else self.best.learning_rate

    def alpha(self, config: FinetuneConfig) -> float:
        """Weight of the fine-tuned model in its average with the head."""
        metrics = {} if self.best is None else self.best.metrics
        return metrics.get("alpha", config.alpha or ALPHA_WITHOUT_SWEEP)


@torch.no_grad()
def average_weights(head: nn.Module, tuned: nn.Module, alpha: float) -> nn.Module:
    """A model with the weights (1 - alpha) `head` + alpha `tuned` (WiSE-FT, Wortsman et al. 2022), on the device of
    `tuned`."""
    model = copy.deepcopy(tuned)
    for parameter, start in zip(model.parameters(), head.parameters(), strict=True):
        parameter.lerp_(start.to(parameter), 1 - alpha)
    return model


def summarize(records: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> dict[str, Any]:
    """The tests of the final runs, or the least-squares head's, for result.json."""
    summary: dict[str, Any] = {
        "runs": [{"seed": seed, **summary_metrics(record)} for seed, record in zip(seeds, records, strict=False)]
    }
    for name in ("accuracy", "mean_average_precision"):
        if name in records[0]:
            values = [record[name] for record in records]
            summary[f"{name}_mean"] = statistics.fmean(values)
            summary[f"{name}_sd"] = statistics.stdev(values) if len(values) > 1 else None
    return summary | {"test": records[0]}


def best_score(scores: Sequence[Score]) -> Score:
    """Best score by mean average precision, else accuracy; ties: lowest loss, then smallest learning rate. Scores with
    an `alpha`, which the loss has chosen: the lowest loss. Raises NonFiniteError if every training diverged."""

    def rank(score: Score) -> tuple[float, ...]:
        metrics = score.metrics
        accuracy = 0.0 if "alpha" in metrics else metrics.get("mean_average_precision", metrics["accuracy"])
        return accuracy, -metrics["loss"], -score.learning_rate

    finite = [score for score in scores if score.metrics]
    if not finite:
        rates = ", ".join(f"{score.learning_rate:g}" for score in scores)
        raise NonFiniteError(f"the training diverged at every learning rate ({rates}); try smaller ones.")
    return max(finite, key=rank)


def summary_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    """The main metrics of an evaluation's record."""
    names = ("accuracy", "loss", "mean_average_precision", "top5", "images", "alpha", "reject_below", "temperature")
    return {name: record[name] for name in names if name in record}


def format_score(score: Mapping[str, Any]) -> str:
    """The metrics of a learning rate as text."""
    if score["accuracy"] is None:
        return "diverged"
    text = f"held-out {headline(score)} ({score['images']:,} images), loss {score['loss']:.4f}"
    if (alpha := score.get("alpha", 1.0)) < 1:
        text += f", averaged: {alpha:.0%} fine-tuned, {1 - alpha:.0%} the head's weights"
    return text
