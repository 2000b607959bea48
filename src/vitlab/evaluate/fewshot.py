"""Few-shot accuracy (Sec. 4.1): regularized least squares on the frozen features of a few images per class.

The algebra: X are the n representations, standardized by their own mean and standard deviation (+ 1e-5), and a last
column of 100, the bias; Y is +1 for the label of an image and -1 for the other classes. The weights are

    W = (X'X + l2 I)^-1 X'Y = X' (XX' + l2 I)^-1 Y,

of which the smaller system is solved, by an eigendecomposition that serves every l2.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float64, Int
from torch import nn

from vitlab.config import TrainConfig
from vitlab.data.dataset import Dataset
from vitlab.data.registry import check_source, load_dataset
from vitlab.display import format_table
from vitlab.errors import UserError, quoted
from vitlab.evaluate.accuracy import dtype_record
from vitlab.evaluate.features import (
    Features,
    FrozenCheckpoint,
    check_train_and_test,
    features,
    frozen_preprocessing,
    load_train_and_test,
)
from vitlab.evaluate.options import EvalOptions, FewShotProtocol, LoaderOptions, SplitOptions
from vitlab.models.vit import Model
from vitlab.train.distributed import SINGLE, World
from vitlab.train.workdir import write_json

BIAS = 100.0  # so large that the penalty on its weight is negligible
ROWS = 4096  # test images at a time


# ---------------------------------------------------------------------------------------------------------- the algebra


class Ridge:
    """The solution for every l2, in float64.

    Deviation: Google's code solves in float32, whose predictions are wrong for l2 below about 2^6.
    """

    def __init__(self, x: Float[np.ndarray, "n D"], labels: Int[np.ndarray, " n"], num_classes: int) -> None:
        wide = x.astype(np.float64)
        self.mean, self.std = wide.mean(axis=0), wide.std(axis=0) + 1e-5
        full = np.column_stack([(wide - self.mean) / self.std, np.full(len(x), BIAS)])
        targets = np.full((len(x), num_classes), -1.0)
        targets[np.arange(len(x)), labels] = 1.0
        n, width = full.shape
        eigenvalues, vectors = np.linalg.eigh(full.T @ full if n >= width else full @ full.T)
        self.eigenvalues: np.ndarray = np.maximum(eigenvalues, 0.0)
        # In both forms W = outer @ diag(1 / (eigenvalues + l2)) @ inner.
        self._outer = vectors if n >= width else full.T @ vectors
        self._inner = vectors.T @ (full.T @ targets if n >= width else targets)

    def weights(self, l2: float) -> Float64[np.ndarray, "D1 K"]:
        """W; its last row belongs to the bias."""
        return self._outer @ (self._inner / (self.eigenvalues + l2)[:, None])

    def scores(self, x: Float[np.ndarray, "n D"], l2: float) -> Float64[np.ndarray, "n K"]:
        weights = self.weights(l2)
        return (x - self.mean) / self.std @ weights[:-1] + BIAS * weights[-1]

    def correct(
        self, x: Float[np.ndarray, "n D"], labels: Int[np.ndarray, " n"], l2s: Sequence[float]
    ) -> Bool[np.ndarray, "L n"]:
        """Whether the label has the highest score, for each l2."""
        starts = range(0, len(x), ROWS)
        predictions = [[self.scores(x[i : i + ROWS], l2).argmax(axis=1) for i in starts] for l2 in l2s]
        return np.stack([np.concatenate(rows) == labels for rows in predictions])


def mean_ranks(accuracies: Float[np.ndarray, "S L"]) -> Float[np.ndarray, " L"]:
    """The mean rank of each l2 over data sets; the best of a data set has the highest rank.

    Deviation: of equally good l2 the later ranks higher, where Google's code leaves it to the sorting.
    """
    return np.argsort(np.argsort(accuracies, axis=1, kind="stable"), axis=1, kind="stable").mean(axis=0)


def choose_l2(accuracies: Float[np.ndarray, "S L"], leave_self_out: bool = False) -> Int[np.ndarray, " S"]:
    """The index of each data set's l2: that of the highest mean rank over all data sets, as at the paper's time.

    leave_self_out: over the other data sets, so that a data set's test images have no part in its choice (as in
    uncertainty-baselines).
    """
    rows = range(len(accuracies))
    others = [np.delete(accuracies, i, axis=0) if leave_self_out else accuracies for i in rows]
    return np.array([mean_ranks(rows).argmax() for rows in others])


# ------------------------------------------------------------------------------------------------------ the few images


def draw(labels: Int[np.ndarray, " n"], num_classes: int, shots: int, seed: int | None) -> Int[np.ndarray, " m"]:
    """Indices of the first `shots` images of each class, class by class, after a shuffle by `seed` (None: no shuffle).

    A class with fewer images gives all of them. The draws are big_vision's; more shots add images to the same ones.
    """
    order = np.argsort(labels, kind="stable")
    classes = np.split(order, np.searchsorted(labels[order], np.arange(1, num_classes)))
    if seed is not None:
        rng = np.random.default_rng(seed)
        classes = [rng.permutation(members) for members in classes]
    return np.concatenate([members[:shots] for members in classes])


@dataclass(frozen=True)
class FewShotData:
    """The training images that any draw takes, and the test images, of one data set."""

    train: Dataset
    test: Dataset
    draws: dict[tuple[int, int], np.ndarray]
    """(shots, number of the draw) -> indices into `train`."""
    short_classes: dict[int, int]
    """Shots -> classes with fewer images."""


def few_examples(
    train: Dataset, test: Dataset, shots: Sequence[int], seeds: Sequence[int | None], test_images: int | None = None
) -> FewShotData:
    """Draws for all shots and seeds, so that no other image of `train` is read; of test at most `test_images`."""
    check_train_and_test(train, test)
    classes = len(train.classes)
    draws = {(k, i): draw(train.labels, classes, k, seed) for k in shots for i, seed in enumerate(seeds)}
    needed = np.unique(np.concatenate(list(draws.values())))
    draws = {key: np.searchsorted(needed, indices) for key, indices in draws.items()}
    counts = np.bincount(train.labels, minlength=classes)
    short = {k: int((counts < k).sum()) for k in shots}
    if test_images is not None and test_images < len(test):
        test = test.take(np.arange(test_images) * len(test) // test_images)
    return FewShotData(train.take(needed), test, draws, short)


def accuracies(
    data: FewShotData, train: Features, test: Features, l2s: Sequence[float]
) -> dict[int, Float[np.ndarray, "S L"]]:
    """Shots -> test accuracy of every draw and l2."""
    row_of = np.full(len(data.train), -1)
    row_of[train.indices] = np.arange(len(train.indices))
    result: dict[int, list[np.ndarray]] = {}
    for (shots, _), indices in data.draws.items():
        rows = row_of[indices]
        rows = rows[rows >= 0]  # without unreadable images
        if not len(rows):
            raise UserError(f"none of the {len(indices)} images drawn from {data.train.name} could be read.")
        ridge = Ridge(train.x[rows], train.labels[rows], len(data.train.classes))
        result.setdefault(shots, []).append(ridge.correct(test.x, test.labels, l2s).mean(axis=1))
    return {shots: np.stack(rows) for shots, rows in result.items()}


# ------------------------------------------------------------------------------------------------------ while training


def during_training(config: TrainConfig, world: World = SINGLE) -> Callable[[nn.Module], dict[str, float]]:
    """A function of the model that returns `fewshot_10shot` and the like; nothing without `config.fewshot`.

    The images are drawn here, from the whole training split even where the run learns from a part of it.
    """
    if config.fewshot is None:
        return lambda model: {}
    settings, data = config.fewshot, config.data
    if settings.dataset is None:
        joined = {"trainval": {"train", "val"}, "all": {"train", "val", "test"}}
        learned, tested = (joined.get(split, {split}) for split in (data.train_split, settings.test_split))
        if learned & tested:
            raise UserError(
                f"the few-shot test would be on {settings.test_split}, which is part of what the run learns from "
                f"({data.train_split}); give --fewshot.test-split test, --data.train-split train or --fewshot.dataset."
            )
        name, root, classes, exclude = data.name, data.root, data.classes, data.exclude
    else:
        name, root, classes, exclude = settings.dataset, settings.root, None, None
    classes = classes if settings.classes is None else settings.classes
    with world.rank_0_first():
        train, test = (
            load_dataset(name, split, root=root, classes=classes, on_error=data.on_error, exclude=excluded)
            for split, excluded in ((settings.train_split, exclude), (settings.test_split, None))
        )
    few = few_examples(train, test, settings.shots, range(settings.seeds), settings.test_images)
    options = LoaderOptions(workers=data.workers, on_error=data.on_error)

    def measure(model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Model)
        prepared = frozen_preprocessing(data.preprocessing(model.config.image_size), model.config.image_hw)
        train_x, test_x = (
            features(model, part, options, preprocessing=prepared, world=world) for part in (few.train, few.test)
        )
        result = accuracies(few, train_x, test_x, [settings.l2])
        return {f"fewshot_{shots}shot": float(values.mean()) for shots, values in result.items()}

    return measure


# ------------------------------------------------------------------------------------------------------ of a checkpoint


@dataclass(frozen=True)
class FewShot:
    """Accuracies of one data set with one number of shots."""

    dataset: str
    shots: int
    l2: float
    accuracies: tuple[float, ...]
    """One for each seed."""
    train_images: int
    """With the first seed."""
    test_images: int
    skipped: int
    """Unreadable images."""
    short_classes: int
    """Classes with fewer images than shots, which give all of them."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracies))

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds (n - 1), where there are several."""
        return float(np.std(self.accuracies, ddof=1)) if len(self.accuracies) > 1 else None

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"mean": self.mean, "deviation": self.deviation}


@dataclass(frozen=True)
class Report:
    """The result of `fewshot_checkpoint`: a row for every number of shots and data set."""

    checkpoint: str
    settings: dict[str, Any]
    rows: tuple[FewShot, ...]

    def record(self) -> dict[str, Any]:
        return {"checkpoint": self.checkpoint, "settings": self.settings, "rows": [row.record() for row in self.rows]}

    def as_table(self) -> str:
        """Mean and standard deviation over seeds."""
        cells = []
        for row in self.rows:
            notes = [f"{row.short_classes} classes have fewer images than shots"] if row.short_classes else []
            notes += [f"{row.skipped} images could not be read"] if row.skipped else []
            accuracy = f"{row.mean:.2%}" + ("" if row.deviation is None else f" ± {row.deviation:.2%}")
            names = {"data set": quoted(row.dataset), "shots": row.shots, "l2": f"{row.l2:g}"}
            cells.append({**names, "accuracy": accuracy, "": "; ".join(notes)})
        dtype = self.settings.get("computed_in")
        return format_table(cells) + (f"\ncomputed in {dtype}" if dtype else "")


def fewshot_checkpoint(
    checkpoint: str | Path,
    datasets: Sequence[str],
    protocol: FewShotProtocol = FewShotProtocol(),
    splits: SplitOptions = SplitOptions(),
    options: EvalOptions = EvalOptions(),
    *,
    cache: Path | None = None,
    out: Path | None = None,
    log: Callable[[str], None] = lambda _: None,
    world: World = SINGLE,
) -> Report:
    """Few-shot accuracy of a checkpoint on one or several data sets.

    Of several l2 one is chosen for each number of shots, by its rank over the data sets. Images are prepared by
    `frozen_preprocessing`, which is described to `log`; features are cached in `cache` (default: the user's cache
    folder). `out` receives the record as JSON. Raises UserError for bad settings, data or weights.
    """
    if out is not None and out.is_dir():
        raise UserError(f"{out} is a folder; give the name of a file.")
    if protocol.leave_self_out and (len(datasets) < 2 or len(protocol.l2_grid) < 2):
        counts = f"{len(protocol.l2_grid)} l2 and {len(datasets)} data sets"
        raise UserError(f"leave_self_out chooses between several l2 by the other data sets; given are {counts}.")
    for name in datasets:
        check_source(name, splits.root)  # before anything is loaded
    frozen = FrozenCheckpoint(checkpoint, options, cache, log, world)
    data: list[FewShotData] = []
    for name in datasets:
        train, test = load_train_and_test(name, splits, options.on_error, world)
        data.append(few_examples(train, test, protocol.shots, protocol.draw_seeds, protocol.test_images))
    results, skipped = [], []
    for name, few in zip(datasets, data, strict=True):
        train_x, test_x = frozen.features(few.train, name), frozen.features(few.test, name)
        results.append(accuracies(few, train_x, test_x, protocol.l2_grid))
        skipped.append(train_x.skipped + test_x.skipped)
    rows = []
    for k in protocol.shots:
        best = choose_l2(np.stack([result[k].mean(axis=0) for result in results]), protocol.leave_self_out).tolist()
        for name, few, result, i, unreadable in zip(datasets, data, results, best, skipped, strict=True):
            images, short = (len(few.draws[k, 0]), len(few.test)), few.short_classes[k]
            rows.append(
                FewShot(name, k, protocol.l2_grid[i], tuple(result[k][:, i].tolist()), *images, unreadable, short)
            )
    settings = {
        "shots": list(protocol.shots),
        "l2": list(protocol.l2_grid),
        "seeds": None if protocol.original else len(protocol.draw_seeds),
        "leave_self_out": protocol.leave_self_out,
        "train_split": splits.train_split or "train",
        "test_split": splits.test_split,
        "image_size": list(frozen.model.config.image_hw),
        "preprocessing": frozen.preprocessing.to_card(),
        **dtype_record(options.precision),
    }
    report = Report(str(checkpoint), settings, tuple(rows))
    if out is not None and world.is_rank_0:
        write_json(out, report.record())
    return report
