"""How far frozen representations go: nearest neighbors, and a linear (logistic) probe, on cached features."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int

from vitlab.data.registry import check_source, load_dataset, require_disjoint, stratified_split
from vitlab.errors import UserError, quoted
from vitlab.evaluate.accuracy import choose_device
from vitlab.evaluate.features import cache_folder, check_features, check_options, features, frozen_preprocessing
from vitlab.evaluate.precision import load_for_judging, noted, recorded
from vitlab.models.config import Interpolation
from vitlab.train.distributed import SINGLE, World

Kind = Literal["knn", "linear"]

KS = (1, 5, 10, 20, 50, 100, 200)
TEMPERATURE = 0.07  # of the neighbors' votes, as in DINO
L2_GRID = tuple(10.0**power for power in range(-6, 2))
HELD_OUT = 0.2  # share of each class that l2 is chosen on
MAX_STEPS = 1000  # of L-BFGS

_SIMILARITIES = 2**24  # numbers that are in memory at a time


# --------------------------------------------------------------------------------------------------- nearest neighbors


@dataclass(frozen=True)
class Neighbors:
    """Test accuracies of k-nearest-neighbor votes."""

    weighted: dict[int, float]
    """By k: every neighbor votes with exp(cosine / temperature)."""
    majority: dict[int, float]
    """By k: every neighbor has one vote; of equal counts the class with the nearer neighbors wins."""

    def record(self) -> dict[str, Any]:
        return {"weighted": self.weighted, "majority": self.majority}

    def as_table(self) -> str:
        lines = ["  k  weighted  majority"]
        return "\n".join([*lines, *(f"{k:3}  {self.weighted[k]:8.2%}  {self.majority[k]:8.2%}" for k in self.weighted)])


def knn(
    train_x: Float[np.ndarray, "n D"],
    train_labels: Int[np.ndarray, " n"],
    test_x: Float[np.ndarray, "m D"],
    test_labels: Int[np.ndarray, " m"],
    num_classes: int,
    *,
    ks: Sequence[int] | None = None,
    temperature: float = TEMPERATURE,
    device: str | torch.device = "cpu",
) -> Neighbors:
    """Accuracies by the `k` training images of highest cosine similarity; all k of `KS` that there are, unless given.

    Memory stays bounded: a part of the test images at a time. Raises ValueError for a k beyond the training set.
    """
    check_features(train_x, train_labels, num_classes)
    check_features(test_x, test_labels, num_classes)
    ks = _possible(ks, len(train_x))
    if not temperature > 0:
        raise UserError(f"temperature is {temperature}; it must be positive.")
    known, answers = _directions(train_x, device), torch.from_numpy(train_labels).to(device)
    right = {True: dict.fromkeys(ks, 0), False: dict.fromkeys(ks, 0)}
    rows = max(1, _SIMILARITIES // max(len(train_x), num_classes))
    for start in range(0, len(test_x), rows):
        asked, labels = _directions(test_x[start : start + rows], device), test_labels[start : start + rows]
        cosines, nearest = (asked @ known.T).topk(max(ks), dim=1)
        cosines, classes = cosines.double(), answers[nearest]
        # Less the highest, which divides all votes by one number and keeps small temperatures finite.
        weights = ((cosines - cosines[:, :1]) / temperature).exp()
        # The shares of a vote that break ties add up to less than one vote.
        single = 1.0 + (1.0 + cosines) / (4.0 * max(ks))
        for weighted, votes in ((True, weights), (False, single)):
            for k in ks:
                sums = votes.new_zeros(len(labels), num_classes).scatter_add_(1, classes[:, :k], votes[:, :k])
                right[weighted][k] += int((sums.argmax(dim=1).cpu().numpy() == labels).sum())
    shares = {how: {k: count / len(test_x) for k, count in counts.items()} for how, counts in right.items()}
    return Neighbors(weighted=shares[True], majority=shares[False])


def _possible(ks: Sequence[int] | None, images: int) -> list[int]:
    ks = [k for k in KS if k <= images] if ks is None else list(ks)
    if not ks or min(ks) < 1 or max(ks) > images:
        raise UserError(f"k is {ks}; give numbers from 1 to the {images} training images.")
    return ks


def _check_l2(l2: Sequence[float]) -> None:
    if not l2 or not all(0 < each < np.inf for each in l2):
        raise UserError(f"l2 is {tuple(l2)}; give one or more positive numbers.")


def _directions(x: np.ndarray, device: str | torch.device) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.from_numpy(x).to(device), dim=1)


# --------------------------------------------------------------------------------------------------------- linear probe


@dataclass(frozen=True)
class Linear:
    """A logistic regression, its penalty chosen on a held-out part of train, then fitted to all of train."""

    accuracy: float
    """On the test images."""
    l2: float
    held_out: dict[float, float]
    """Accuracy on the held-out part by l2; empty where one l2 was given."""
    converged: bool
    """Whether the last fit ended before its `MAX_STEPS` steps."""

    def record(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy, "l2": self.l2, "held_out": self.held_out, "converged": self.converged}

    def as_table(self) -> str:
        lines = ["    l2  held-out", *(f"{l2:6g}  {share:8.2%}" for l2, share in self.held_out.items())]
        note = "" if self.converged else f" (stopped after {MAX_STEPS} steps)"
        return "\n".join([*(lines if self.held_out else []), f"accuracy {self.accuracy:.2%} with l2 {self.l2:g}{note}"])


def linear_probe(
    train_x: Float[np.ndarray, "n D"],
    train_labels: Int[np.ndarray, " n"],
    test_x: Float[np.ndarray, "m D"],
    test_labels: Int[np.ndarray, " m"],
    num_classes: int,
    *,
    l2: Sequence[float] = L2_GRID,
    seed: int = 0,
) -> Linear:
    """Softmax regression on standardized features by L-BFGS: mean cross-entropy + l2 / 2 |W|^2, the bias free.

    With two classes scikit-learn fits the difference of their rows alone, on which the same l2 weighs twice as much.
    Of several `l2` the best on `HELD_OUT` of each class is taken (of equals the largest), by `seed`; then all of train
    is fitted with it. Raises ValueError where there is nothing to tell apart, or nothing to hold out.
    """
    check_features(train_x, train_labels, num_classes)
    check_features(test_x, test_labels, num_classes)
    _check_l2(l2)
    if len(np.unique(train_labels)) < 2:
        raise UserError("all training images are of one class; a probe needs at least two.")
    mean, std = train_x.mean(axis=0, dtype=np.float64), train_x.std(axis=0, dtype=np.float64) + 1e-5
    train_x, test_x = (((x - mean) / std).astype(np.float32) for x in (train_x, test_x))
    shares: dict[float, float] = {}
    best = l2[0]
    if len(l2) > 1:
        parts = stratified_split(train_labels, {"val": HELD_OUT}, seed)
        fit, val = parts["train"], parts["val"]
        if not len(val):
            raise UserError("every class has one training image, so none can be held out to choose l2; give one l2.")
        model = None
        for each in sorted(l2, reverse=True):  # from the simplest fit on, each begins where the one before ended
            model, _ = _fit(train_x[fit], train_labels[fit], each, model)
            shares[each] = float((model.predict(train_x[val]) == train_labels[val]).mean())
        best = max(shares, key=lambda each: shares[each])
    model, converged = _fit(train_x, train_labels, best, None)
    accuracy = float((model.predict(test_x) == test_labels).mean())
    return Linear(accuracy, best, shares, converged)


def _fit(x: np.ndarray, labels: np.ndarray, l2: float, start: Any) -> tuple[Any, bool]:
    """The fitted classifier, and whether it converged; `start` is one fitted to the same images."""
    from sklearn.exceptions import ConvergenceWarning  # slow to import
    from sklearn.linear_model import LogisticRegression

    model = start or LogisticRegression(max_iter=MAX_STEPS, warm_start=True)
    model.C = 1.0 / (l2 * len(x))  # its loss is a sum over images
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        model.fit(x, labels)
    return model, not any(issubclass(each.category, ConvergenceWarning) for each in caught)


# ----------------------------------------------------------------------------------------------- a model on a data set


@dataclass(frozen=True)
class Probe:
    """What `probe_checkpoint` found on one data set."""

    checkpoint: str
    dataset: str
    kind: Kind
    train_images: int
    test_images: int
    skipped: int
    """Images that could not be read."""
    found: Neighbors | Linear
    computed_in: str = "float32"
    """Type of the weights that the features are of."""

    def record(self) -> dict[str, Any]:
        numbers = {"train_images": self.train_images, "test_images": self.test_images, "skipped": self.skipped}
        names = {"checkpoint": self.checkpoint, "dataset": self.dataset, "kind": self.kind}
        return names | numbers | recorded(self.computed_in) | self.found.record()

    def as_table(self) -> str:
        counts = f"{self.train_images} training and {self.test_images} test images"
        skipped = f" · {self.skipped} could not be read" if self.skipped else ""
        return f"{self.found.as_table()}\n{quoted(self.dataset)}: {counts}{skipped}{noted(self.computed_in)}"


def probe_checkpoint(
    checkpoint: str | Path,
    dataset: str,
    kind: Kind,
    *,
    root: str | None = None,
    train_split: str | None = None,
    test_split: str = "test",
    partial: bool = False,
    ks: Sequence[int] | None = None,
    l2: Sequence[float] | None = None,
    image_size: int | None = None,
    interpolation: Interpolation | None = None,
    batch_size: int = 64,
    workers: int = 0,
    on_error: str = "raise",
    precision: str = "float32",
    device: str = "auto",
    say: Callable[[str], None] | None = None,
    cache: Path | None = None,
    world: World = SINGLE,
) -> Probe:
    """Probes a checkpoint on a data set; images and the cache of features are those of few-shot evaluation.

    train_split: unless given, train, with nothing cut off for a val split that the user's own set lacks. partial: as in
    `load_dataset`. `ks` belongs to "knn", `l2` to "linear"; `say` hears how images are prepared. Raises ValueError for
    bad settings, data or weights.
    """
    if (ks is not None and kind != "knn") or (l2 is not None and kind != "linear"):
        raise UserError(f"kind is {kind}: ks belongs to knn and l2 to linear; leave out the other.")
    _check_l2(L2_GRID if l2 is None else l2)
    check_options(batch_size)
    check_source(dataset, root)
    place = choose_device(world.device(device))
    loaded = load_for_judging(
        checkpoint, place, precision, image_size=image_size, interpolation=interpolation, world=world
    )
    model, prepared = loaded.model, frozen_preprocessing(loaded.preprocessing, loaded.model.config.image_hw)
    if say:
        say(f"images: {prepared.describe()}")
    with world.rank_0_first():
        train = load_dataset(
            dataset, train_split or "train", root=root, on_error=on_error, whole_train=train_split is None
        )
        test = load_dataset(dataset, test_split, root=root, on_error=on_error, partial=partial)
    if train_split is not None:
        require_disjoint(train, test)
    for part in (train, test):
        if part.label_sets is not None:
            raise UserError(f"{dataset} has several labels a image in {part.split}; a probe needs one.")
    if train.classes != test.classes:
        raise UserError(f"{dataset} has other classes in {train.split} than in {test_split}.")
    _possible(ks, len(train))  # before the long work
    known, asked = (
        features(
            model, part, preprocessing=prepared, batch_size=batch_size,
            workers=workers, on_error=on_error, device=place, cache=cache or cache_folder(),
            label=f"{dataset} {part.split}", world=world,
        )
        for part in (train, test)
    )  # fmt: skip
    arrays = (known.x, known.labels, asked.x, asked.labels, len(train.classes))
    if kind == "knn":
        found = knn(*arrays, ks=ks, device=place)
    else:
        found = linear_probe(*arrays, l2=L2_GRID if l2 is None else l2)
    skipped = known.skipped + asked.skipped
    return Probe(str(checkpoint), dataset, kind, len(known.labels), len(asked.labels), skipped, found, precision)
