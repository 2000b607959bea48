"""The search for the learning rate (App. B.1.1): the held-out part, and the choice of the best."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vitlab.config import FinetuneConfig
from vitlab.data.dataset import Dataset
from vitlab.data.subsets import stratified_split
from vitlab.errors import UserError
from vitlab.rng import Stream
from vitlab.train.loop import NonFiniteError


def check_search(config: FinetuneConfig) -> None:
    """Raises UserError where `optim.lr` is not one of the rates of a search: it would never be used."""
    if len(config.learning_rates) > 1 and config.optim.lr not in config.learning_rates:
        rates = ", ".join(f"{rate:g}" for rate in config.learning_rates)
        raise UserError(
            f"optim.lr is {config.optim.lr:g} and learning_rates are {rates}, which are tried instead of it. To train "
            f"at optim.lr, set learning_rates=() and sweep_steps=None; to try it as well, add it to learning_rates."
        )


def best_rate(scores: Sequence[Mapping[str, Any]]) -> float:
    """The learning rate with the highest accuracy; of equals that with the lowest loss, then the smallest."""
    finite = [score for score in scores if score["accuracy"] is not None]
    if not finite:
        rates = ", ".join(f"{score['learning_rate']:g}" for score in scores)
        raise NonFiniteError(f"the training diverged at every learning rate ({rates}); try smaller ones.")
    best = max(finite, key=lambda score: (score["accuracy"], -score["loss"], -score["learning_rate"]))
    return best["learning_rate"]


def hold_out(dataset: Dataset, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """The training split without `share` of each class, and that part, chosen by `seed` (App. B.1.1).

    Raises UserError where one of the two is empty.
    """
    parts = stratified_split(dataset.labels, {"held_out": share}, seed, Stream.HELD_OUT)
    rest, held_out = (dataset.take(parts[name]) for name in ("train", "held_out"))
    if not len(rest) or not len(held_out):
        raise UserError(
            f"held_out={share:g} leaves {len(rest)} images of {dataset.name} to train on and {len(held_out)} to "
            f"evaluate on (a class needs at least two); give another share, or one rate and no search "
            f"(`--learning-rates 0.01`)."
        )
    return rest, dataclasses.replace(held_out, split="held_out")


def headline(record: Mapping[str, Any]) -> dict[str, Any]:
    """The main figures of an evaluation's record."""
    return {name: record[name] for name in ("accuracy", "loss", "top5", "images") if name in record}


def format_score(score: Mapping[str, Any]) -> str:
    """The figures of a learning rate as text."""
    if score["accuracy"] is None:
        return "diverged"
    return f"{score['accuracy']:.2%} of {score['images']} held-out images right, loss {score['loss']:.4f}"
