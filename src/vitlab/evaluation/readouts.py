"""The block and the pooling that give the best representation of images, by the least-squares head on top of it.

The last block is not always the best: what it computes belongs to the task that the checkpoint was trained for. One
forward pass gives the tokens after several blocks; the class token, the mean over patches, or both represent the image.
For each the head (`linear_head.py`) is fitted in closed form, and its leave-one-out loss compares them.

The loss of the best of several is too low, for the same images chose it. The nested estimate leaves an image out of
the choice too.

    choose_readout(model, dataset).chosen  # Readout(depth=8, pool="token+gap")
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from vitlab.data.dataset import Dataset
from vitlab.errors import UserError
from vitlab.evaluation.features import Features, Representation, features
from vitlab.evaluation.linear_head import MAX_CLASSES, leave_one_out
from vitlab.evaluation.options import LoaderOptions
from vitlab.models.config import ModelConfig, Pool, ViTConfig
from vitlab.models.readout import change_readout
from vitlab.models.vit import Model
from vitlab.preprocessing import Preprocessing
from vitlab.train.distributed import SINGLE, World
from vitlab.train.objectives import balanced_weights

FRACTIONS = (1 / 2, 2 / 3, 5 / 6, 1)
"""Depths of the blocks that are compared, as fractions of the model's."""
LAST_BLOCKS = 4
"""Last blocks that are joined, as in the linear evaluation of DINOv2."""
MAX_IMAGES, MIN_IMAGES = 1_000, 30
"""Most and fewest training images for the choice; at least two per class on average, if that is more."""


class Readout(NamedTuple):
    """A representation: the first `depth` blocks, then the last LayerNorm, then `pool`.

    With `joined` above 1 it has the class tokens of so many blocks, the last at `depth`, and the mean over the patches
    of the last (`token+gap`); or, with `gap`, the means of all. No single cut model computes that: it has no `config`.
    """

    depth: int
    pool: Pool
    joined: int = 1

    def config(self, whole: ViTConfig) -> ViTConfig:
        """The configuration of the model whose representation it is."""
        assert self.joined == 1
        return change_readout(whole, self.depth, self.pool)

    def columns(self) -> list[tuple[int, str]]:
        """The (depth, `token` or `gap`) whose values are joined."""
        depths = range(self.depth - self.joined + 1, self.depth + 1)
        if self.pool == "token+gap":
            return [*((depth, "token") for depth in depths), (self.depth, "gap")]
        return [(depth, self.pool) for depth in depths]

    def describe(self, depth: int) -> str:
        """`block 8 of 12, token`, or `blocks 9 to 12 of 12, token`, in a model of that depth."""
        blocks = f"block {self.depth}" if self.joined == 1 else f"blocks {self.depth - self.joined + 1} to {self.depth}"
        return f"{blocks} of {depth}, {self.pool}"

    def to_record(self) -> dict[str, Any]:
        """Plain data; `joined` where it is not 1."""
        record = self._asdict()
        return record if self.joined > 1 else {"depth": self.depth, "pool": self.pool}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Readout":
        return cls(record["depth"], record["pool"], record.get("joined", 1))


@dataclass(frozen=True)
class ReadoutScore:
    """Leave-one-out metrics of the least-squares head on a representation."""

    readout: Readout
    loss: float
    accuracy: float


@dataclass(frozen=True)
class ReadoutChoice:
    """The scores of all candidates, and the one of least loss."""

    scores: tuple[ReadoutScore, ...]
    """The checkpoint's own representation is the last."""
    chosen: Readout
    nested_loss: float
    """Each image by the candidate that the other images choose."""
    nested_accuracy: float
    images: int
    """Training images that chose."""

    def to_record(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rows = [{**score.readout.to_record(), "loss": score.loss, "accuracy": score.accuracy} for score in self.scores]
        nested = {"loss": self.nested_loss, "accuracy": self.nested_accuracy}
        return {"chosen": self.chosen.to_record(), "images": self.images, "nested": nested, "candidates": rows}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "ReadoutChoice":
        rows, nested = record["candidates"], record["nested"]
        scores = tuple(ReadoutScore(Readout.from_record(row), row["loss"], row["accuracy"]) for row in rows)
        return cls(scores, Readout.from_record(record["chosen"]), nested["loss"], nested["accuracy"], record["images"])

    def describe(self) -> str:
        """`block 8 of 12, token+gap: accuracy of images left out 77.0%, ...`"""
        own = self.scores[-1]
        text = self.chosen.describe(own.readout.depth)
        if self.chosen == own.readout:
            return f"{text}: no other block or pooling has a lower loss on {self.images:,} images"
        best = next(score for score in self.scores if score.readout == self.chosen)
        nested = f"{self.nested_accuracy:.1%} with the choice left out too"
        whole = f"block {own.readout.depth}, {own.readout.pool}: {own.accuracy:.1%}"
        return f"{text}: accuracy of images left out {best.accuracy:.1%}, {nested} ({whole}), on {self.images:,} images"


def candidates(config: ModelConfig, pool: Pool | None = None, joined: bool = False) -> tuple[Readout, ...]:
    """The representations to compare, the model's own last. pool: only those with this pooling. joined: also those of
    the last four blocks together.

    Empty for models that have no other: ResNets, distilled ones, and those with a layer before the head, attention
    pooling or a LayerNorm after the mean.
    """
    if not isinstance(config, ViTConfig) or config.pool == "map" or config.representation_size:
        return ()
    if config.variant.final_norm != "tokens" or config.variant.distilled:
        return ()
    pools: Sequence[Pool] = ("gap",)
    if config.has_class_token:
        pools = ("token", "gap", "token+gap") if config.position_at == "stem" else ("token", "token+gap")
    depths = sorted({max(round(fraction * config.depth), 1) for fraction in FRACTIONS})
    own = Readout(config.depth, config.pool)
    wanted: list[Pool] = [each for each in pools if pool in (None, each)]
    readouts = [Readout(depth, each) for depth in depths for each in wanted]
    if joined and config.depth > 1:
        readouts = [*(Readout(config.depth, each, min(LAST_BLOCKS, config.depth)) for each in wanted), *readouts]
    return (*(readout for readout in readouts if readout != own), *([own] if own in readouts else []))


def last_blocks(config: ModelConfig) -> Readout:
    """The last four blocks together, in the pooling of the model. Raises UserError for a model without `candidates`."""
    own = candidates(config)[-1:]
    if not own:
        raise UserError("layer='last4' joins tokens after the last LayerNorm, which this model cannot; leave it out.")
    return own[0]._replace(joined=min(LAST_BLOCKS, own[0].depth))


def images_to_choose(num_classes: int) -> int:
    """The most training images that the choice is made on."""
    return max(MAX_IMAGES, 2 * num_classes)


def is_enough(images: int, num_classes: int, groups: Int[np.ndarray, " n"] | None = None) -> bool:
    """Whether the choice can be made: at most MAX_CLASSES classes, two images per class on average, MIN_IMAGES
    images, and two groups or more.

    groups: as in `Ridge.leave_one_out`, whose images with a negative group are never left out.
    """
    if groups is not None and ((groups == groups[0]).all() or np.count_nonzero(groups >= 0) < MIN_IMAGES):
        return False
    return num_classes <= MAX_CLASSES and images >= max(MIN_IMAGES, 2 * num_classes)


def choose_readout(
    model: Model,
    dataset: Dataset,
    options: LoaderOptions = LoaderOptions(),
    *,
    preprocessing: Preprocessing | None = None,
    pool: Pool | None = None,
    joined: bool = False,
    groups: Int[np.ndarray, " n"] | None = None,
    balance: bool = False,
    cache: Path | None = None,
    world: World = SINGLE,
) -> ReadoutChoice | None:
    """The candidate of least leave-one-out loss on a data set; None where nothing can be compared (`candidates`).

    pool, joined: as in `candidates`. groups: the group of each image, left out as a whole. balance: all classes count
    the same. cache: as in `features`. Unreadable images are skipped.
    """
    if not (readouts := candidates(model.config, pool, joined)):
        return None
    settings: dict[str, Any] = {"preprocessing": preprocessing, "cache": cache, "world": world}
    computed = readout_features(model, dataset, readouts, options, **settings)
    indices, labels = computed[readouts[0]].indices, computed[readouts[0]].labels
    known: Any = labels if dataset.label_sets is None else dataset.label_sets.multi_hot(indices, len(dataset.classes))
    xs = {readout: each.x for readout, each in computed.items()}
    weights = balanced_weights(labels, len(dataset.classes)) if balance else None
    comparison = (xs, known, len(dataset.classes), None if groups is None else groups[indices], weights)
    # Rank 0 decides for all: rounding may differ.
    return ReadoutChoice.from_record(world.broadcast_object(lambda: compare_readouts(*comparison).to_record()))


def readout_features(
    model: Model,
    dataset: Dataset,
    readouts: Sequence[Readout],
    options: LoaderOptions = LoaderOptions(),
    *,
    preprocessing: Preprocessing | None = None,
    cache: Path | None = None,
    world: World = SINGLE,
) -> dict[Readout, Features]:
    """The features of a data set in each of these representations, by one forward pass (see `features`)."""
    assert isinstance(model.config, ViTConfig)
    columns = sorted({column for readout in readouts for column in readout.columns()})
    depths = sorted({depth for depth, _ in columns})

    def compute(model: Any, images: Tensor) -> Tensor:
        outputs = model.get_intermediate_layers(images, [depth - 1 for depth in depths], return_prefix_tokens=True)
        by_depth = dict(zip(depths, outputs, strict=True))

        def value(depth: int, part: str) -> Tensor:
            patches, prefix_tokens = by_depth[depth]
            return prefix_tokens[:, 0] if part == "token" else patches.mean(dim=1)

        return torch.cat([value(*column) for column in columns], dim=1)

    representation = Representation(len(columns) * model.config.width, compute, key=str(columns))
    description = f"representations of {len(depths)} blocks"
    settings: dict[str, Any] = {"preprocessing": preprocessing, "cache": cache, "world": world}
    computed = features(model, dataset, options, representation=representation, description=description, **settings)
    parts = dict(zip(columns, np.split(computed.x, len(columns), axis=1), strict=True))

    def joined(readout: Readout) -> np.ndarray:
        each = [parts[column] for column in readout.columns()]
        return each[0] if len(each) == 1 else np.concatenate(each, axis=1)

    return {readout: replace(computed, x=joined(readout)) for readout in readouts}


def compare_readouts(
    xs: Mapping[Readout, Float[np.ndarray, "n _"]],
    labels: Int[np.ndarray, " n"] | Bool[np.ndarray, "n K"],
    num_classes: int,
    groups: Int[np.ndarray, " n"] | None = None,
    class_weights: Float[np.ndarray, " K"] | None = None,
) -> ReadoutChoice:
    """The choice between these representations of the same images, by a head fitted to each; the model's own is last.

    groups, class_weights: as in `least_squares_head`.
    """
    columns, rows = [], np.empty(0, np.int64)
    for x in xs.values():
        fit = leave_one_out(x, labels, num_classes, groups, class_weights)
        columns.append((fit.losses(), fit.correct()))  # not the logits, which are large
        rows = fit.rows
    losses, hits = (np.stack(each) for each in zip(*columns, strict=True))
    means = zip(xs, losses.mean(axis=1).tolist(), hits.mean(axis=1).tolist(), strict=True)
    scores = tuple(ReadoutScore(*row) for row in means)
    # The user's val is one group: no head has seen it, so each of its images is a unit of its own.
    units = np.arange(len(rows)) if groups is None or (groups[rows] == groups[rows[0]]).all() else groups[rows]
    return ReadoutChoice(scores, list(xs)[_best(losses.sum(axis=1))], *_nested(losses, hits, units), len(rows))


def _best(losses: Float64[np.ndarray, "C *m"]) -> Any:
    """The candidate of least loss; of equal ones the last, which may be the model's own."""
    return len(losses) - 1 - losses[::-1].argmin(axis=0)


def _nested(
    losses: Float64[np.ndarray, "C r"], hits: Bool[np.ndarray, "C r"], units: Int[np.ndarray, " r"]
) -> tuple[float, float]:
    """Loss and accuracy of each image by the candidate that all images but those of its unit choose."""
    _, unit = np.unique(units, return_inverse=True)
    sums = np.stack([np.bincount(unit, weights=loss) for loss in losses])  # of each unit
    chosen = _best(losses.sum(axis=1, keepdims=True) - sums)[unit]
    rows = np.arange(losses.shape[1])
    return float(losses[chosen, rows].mean()), float(hits[chosen, rows].mean())
