"""Classifiers on frozen features: nearest neighbors, and a linear (logistic) probe."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from vitlab.data.registry import check_source
from vitlab.data.subsets import stratified_split
from vitlab.display import format_table
from vitlab.errors import UserError, quoted
from vitlab.evaluate.accuracy import dtype_record
from vitlab.evaluate.features import Features, FrozenCheckpoint, load_train_and_test
from vitlab.evaluate.load import device_of
from vitlab.evaluate.options import EvalOptions, SplitOptions
from vitlab.train.distributed import SINGLE, World

Kind = Literal["knn", "linear"]

KS = (1, 5, 10, 20, 50, 100, 200)
TEMPERATURE = 0.07  # of the neighbors' votes, as in DINO
L2_GRID = tuple(10.0**power for power in range(-6, 2))
HELD_OUT = 0.2  # share of each class that l2 is chosen on
MAX_STEPS = 1000  # of L-BFGS
MAX_SIMILARITIES = 2**24  # in memory at a time


@dataclass(frozen=True)
class Neighbors:
    """Test accuracies of k-nearest-neighbor votes."""

    weighted: dict[int, float]
    """By k: every neighbor votes with exp(cosine / temperature)."""
    majority: dict[int, float]
    """By k: every neighbor has one vote; of equal counts the class with the nearer neighbors wins."""

    def as_table(self) -> str:
        rows = [{"k": k, "weighted": self.weighted[k], "majority": self.majority[k]} for k in self.weighted]
        return format_table([row | {name: f"{row[name]:.2%}" for name in ("weighted", "majority")} for row in rows])


def knn(
    train: Features,
    test: Features,
    num_classes: int,
    *,
    ks: Sequence[int] | None = None,
    temperature: float = TEMPERATURE,
    device: str | torch.device = "cpu",
) -> Neighbors:
    """Accuracies by the k training images of highest cosine similarity, for each of `ks` (default: all possible `KS`).

    Raises UserError for a k larger than the training set.
    """
    ks = check_ks(ks, len(train.x))

    def directions(x: np.ndarray) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.from_numpy(x).to(device), dim=1)

    train_directions, train_labels = directions(train.x), torch.from_numpy(train.labels).to(device)
    hits = {"weighted": dict.fromkeys(ks, 0), "majority": dict.fromkeys(ks, 0)}
    rows = max(1, MAX_SIMILARITIES // max(len(train.x), num_classes))
    for start in range(0, len(test.x), rows):
        labels = test.labels[start : start + rows]
        cosines, nearest = (directions(test.x[start : start + rows]) @ train_directions.T).topk(max(ks), dim=1)
        cosines, classes = cosines.double(), train_labels[nearest]
        votes = {
            # Less the highest cosine: divides all votes by one number and keeps small temperatures finite.
            "weighted": ((cosines - cosines[:, :1]) / temperature).exp(),
            # The fractions, which break ties, add up to less than one vote.
            "majority": 1.0 + (1.0 + cosines) / (4.0 * max(ks)),
        }
        for kind, weights in votes.items():
            for k in ks:
                sums = weights.new_zeros(len(labels), num_classes).scatter_add_(1, classes[:, :k], weights[:, :k])
                hits[kind][k] += int((sums.argmax(dim=1).cpu().numpy() == labels).sum())
    return Neighbors(**{kind: {k: count / len(test.x) for k, count in counts.items()} for kind, counts in hits.items()})


def check_ks(ks: Sequence[int] | None, images: int) -> list[int]:
    """`ks`, or those of `KS` up to the number of training images. Raises UserError for any other k."""
    ks = [k for k in KS if k <= images] if ks is None else list(ks)
    if not ks or min(ks) < 1 or max(ks) > images:
        raise UserError(f"k is {ks}; give numbers from 1 to the {images} training images.")
    return ks


@dataclass(frozen=True)
class Linear:
    """A logistic regression fitted to all of train."""

    accuracy: float
    """On the test images."""
    l2: float
    held_out: dict[float, float]
    """Accuracy on the held-out part of train by l2; empty where one l2 was given."""
    converged: bool
    """Whether the last fit ended before its `MAX_STEPS` steps."""

    def as_table(self) -> str:
        rows = [{"l2": f"{l2:g}", "held-out": f"{accuracy:.2%}"} for l2, accuracy in self.held_out.items()]
        note = "" if self.converged else f" (stopped after {MAX_STEPS} steps)"
        return f"{format_table(rows)}\naccuracy {self.accuracy:.2%} with l2 {self.l2:g}{note}".lstrip()


def linear_probe(
    train: Features, test: Features, num_classes: int, *, l2: Sequence[float] = L2_GRID, seed: int = 0
) -> Linear:
    """Softmax regression on standardized features by L-BFGS: mean cross-entropy + l2 / 2 |W|^2, without the bias.

    With two classes scikit-learn fits the difference of their rows alone, on which the same l2 weighs twice as much.
    Of several `l2` the best on a held-out share of each class is taken (of equals the largest), chosen by `seed`.
    Raises UserError where there is only one class, or nothing to hold out.
    """
    check_l2(l2)
    labels = train.labels
    if len(np.unique(labels)) < 2:
        raise UserError("all training images are of one class; a probe needs at least two.")
    mean, std = train.x.mean(axis=0, dtype=np.float64), train.x.std(axis=0, dtype=np.float64) + 1e-5
    train_x, test_x = (((x - mean) / std).astype(np.float32) for x in (train.x, test.x))
    held_out: dict[float, float] = {}
    best = l2[0]
    if len(l2) > 1:
        parts = stratified_split(labels, {"val": HELD_OUT}, seed)
        fit, val = parts["train"], parts["val"]
        if not len(val):
            raise UserError("every class has one training image, so none can be held out to choose l2; give one l2.")
        model = None
        for value in sorted(l2, reverse=True):  # each fit starts from that of the next stronger penalty
            model, _ = _fit(train_x[fit], labels[fit], value, model)
            held_out[value] = float((model.predict(train_x[val]) == labels[val]).mean())
        best = max(held_out, key=lambda value: held_out[value])
    model, converged = _fit(train_x, labels, best, None)
    return Linear(float((model.predict(test_x) == test.labels).mean()), best, held_out, converged)


def check_l2(l2: Sequence[float]) -> None:
    if not l2 or not all(0 < value < np.inf for value in l2):
        raise UserError(f"l2 is {tuple(l2)}; give one or more positive numbers.")


def _fit(x: np.ndarray, labels: np.ndarray, l2: float, start: Any) -> tuple[Any, bool]:
    """The fitted classifier, and whether it converged; `start` is one fitted to the same images."""
    from sklearn.exceptions import ConvergenceWarning  # slow to import
    from sklearn.linear_model import LogisticRegression

    model = start or LogisticRegression(max_iter=MAX_STEPS, warm_start=True)
    model.C = 1.0 / (l2 * len(x))  # its loss is a sum over images
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        model.fit(x, labels)
    return model, not any(issubclass(warning.category, ConvergenceWarning) for warning in caught)


@dataclass(frozen=True)
class Probe:
    """The result of `probe_checkpoint`."""

    checkpoint: str
    dataset: str
    kind: Kind
    train_images: int
    test_images: int
    skipped: int
    """Unreadable images."""
    result: Neighbors | Linear
    computed_in: str = "float32"
    """Type of the model's weights."""

    def record(self) -> dict[str, Any]:
        names = ("checkpoint", "dataset", "kind", "train_images", "test_images", "skipped")
        return {name: getattr(self, name) for name in names} | dtype_record(self.computed_in) | asdict(self.result)

    def as_table(self) -> str:
        notes = [f"{self.skipped} could not be read"] if self.skipped else []
        notes += [f"{name.replace('_', ' ')} {value}" for name, value in dtype_record(self.computed_in).items()]
        counts = f"{quoted(self.dataset)}: {self.train_images} training and {self.test_images} test images"
        return f"{self.result.as_table()}\n{' · '.join([counts, *notes])}"


def probe_checkpoint(
    checkpoint: str | Path,
    dataset: str,
    kind: Kind,
    splits: SplitOptions = SplitOptions(),
    options: EvalOptions = EvalOptions(),
    *,
    ks: Sequence[int] | None = None,
    l2: Sequence[float] | None = None,
    cache: Path | None = None,
    log: Callable[[str], None] = lambda _: None,
    world: World = SINGLE,
) -> Probe:
    """Probes a checkpoint on a data set; preprocessing and feature cache are those of few-shot evaluation.

    `ks` is for "knn", `l2` for "linear". Raises UserError for bad settings, data or weights.
    """
    if (ks is not None and kind != "knn") or (l2 is not None and kind != "linear"):
        raise UserError(f"kind is {kind}: ks is for knn and l2 for linear; leave out the other.")
    check_l2(L2_GRID if l2 is None else l2)
    check_source(dataset, splits.root)
    frozen = FrozenCheckpoint(checkpoint, options, cache, log, world)
    parts = load_train_and_test(dataset, splits, options.on_error, world)
    classes = len(parts[0].classes)
    check_ks(ks, len(parts[0]))  # before the long work
    train, test = (frozen.features(part, dataset) for part in parts)
    if kind == "knn":
        result = knn(train, test, classes, ks=ks, device=device_of(frozen.model))
    else:
        result = linear_probe(train, test, classes, l2=L2_GRID if l2 is None else l2)
    images, skipped = (len(train.labels), len(test.labels)), train.skipped + test.skipped
    return Probe(str(checkpoint), dataset, kind, *images, skipped, result, options.precision)
