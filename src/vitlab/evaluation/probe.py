"""Classifiers on frozen features: nearest neighbors, and a linear (logistic) probe."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from vitlab.data.registry import check_source, load_dataset
from vitlab.data.splits import stratified_split
from vitlab.display import format_table
from vitlab.errors import UserError, quoted
from vitlab.evaluation.features import Features
from vitlab.evaluation.frozen import FrozenModel
from vitlab.evaluation.load import computed_in, device_of, load_train_and_test
from vitlab.evaluation.options import FeatureOptions, SplitOptions
from vitlab.train.distributed import SINGLE, World

KS = (1, 5, 10, 20, 50, 100, 200)
TEMPERATURE = 0.07  # of the neighbors' votes, as in DINO
L2_GRID = tuple(10.0**power for power in range(-6, 2))
HELD_OUT = 0.2  # fraction of each class that l2 is chosen on
MAX_STEPS = 1000  # of L-BFGS
MAX_SIMILARITIES = 2**24  # in memory at a time


def knn(
    train: Features,
    test: Features,
    num_classes: int,
    *,
    ks: Sequence[int] | None = None,
    device: str | torch.device = "cpu",
) -> dict[int, float]:
    """Accuracy for each of `ks` (default: all possible `KS`) of the vote of the k most similar training images.

    Each votes with exp(cosine / TEMPERATURE). Raises UserError for a k larger than the training set.
    """
    ks = _choose_ks(ks, len(train.x))
    directions, queries = (F.normalize(torch.from_numpy(part.x).to(device), dim=1) for part in (train, test))
    train_labels, test_labels = (torch.from_numpy(part.labels).to(device) for part in (train, test))
    hits = dict.fromkeys(ks, 0)
    rows = max(1, MAX_SIMILARITIES // max(len(train.x), num_classes))
    for part, labels in zip(queries.split(rows), test_labels.split(rows), strict=True):
        cosines, nearest = (part @ directions.T).topk(max(ks), dim=1)
        cosines, classes = cosines.double(), train_labels[nearest]
        # Less the highest cosine: divides all votes by one number and keeps small temperatures finite.
        votes = ((cosines - cosines[:, :1]) / TEMPERATURE).exp()
        for k in ks:
            sums = votes.new_zeros(len(labels), num_classes).scatter_add_(1, classes[:, :k], votes[:, :k])
            hits[k] += int((sums.argmax(dim=1) == labels).sum())
    return {k: count / len(test.x) for k, count in hits.items()}


def linear_probe(
    train: Features,
    test: Features,
    *,
    l2: Sequence[float] = L2_GRID,
    seed: int = 0,
    groups: np.ndarray | None = None,
    val: Features | None = None,
) -> dict[str, Any]:
    """Softmax regression on standardized features by L-BFGS: mean cross-entropy + l2 / 2 |W|^2, without the bias.

    With two classes scikit-learn fits the difference of their rows alone, on which the same l2 weighs twice as much.
    Of several `l2` the best on `val` is taken, or on a held-out part of train in whole `groups`, chosen by `seed`; ties
    go to the largest.
    Returns the test `accuracy`, the `l2`, the `held_out` accuracy by l2, and whether the last fit `converged`.
    Raises UserError where there is only one class, or nothing to hold out.
    """
    _check_l2(l2)
    labels = train.labels
    if len(np.unique(labels)) < 2:
        raise UserError("all training images have one class; a probe needs at least two.")
    mean = train.x.mean(axis=0, dtype=np.float64)
    std = train.x.std(axis=0, dtype=np.float64) + 1e-5

    def standardized(part: Features) -> np.ndarray:
        return ((part.x - mean) / std).astype(np.float32)

    x = standardized(train)
    held_out: dict[float, float] = {}
    best = l2[0]
    if len(l2) > 1:
        if val is None:
            parts = stratified_split(labels, {"val": HELD_OUT}, seed, groups=groups)
            fit_x, fit_labels = x[parts["train"]], labels[parts["train"]]
            val_x, val_labels = x[parts["val"]], labels[parts["val"]]
        else:
            fit_x, fit_labels = x, labels
            val_x, val_labels = standardized(val), val.labels
        if not len(val_labels):
            raise UserError("every class has one training image, so none can be held out to choose l2; give one l2.")
        model = None
        for value in sorted(l2, reverse=True):  # each fit starts from the next stronger penalty's
            model = _fit(fit_x, fit_labels, value, model)
            held_out[value] = float((model.predict(val_x) == val_labels).mean())
        best = max(held_out, key=lambda value: held_out[value])
    model = _fit(x, labels, best)
    accuracy = (model.predict(standardized(test)) == test.labels).mean()
    converged = model.n_iter_.max() < MAX_STEPS
    return {"accuracy": float(accuracy), "l2": best, "held_out": held_out, "converged": bool(converged)}


def _fit(x: np.ndarray, labels: np.ndarray, l2: float, start: Any = None) -> Any:
    """The fitted classifier; `start` is one fitted to the same images."""
    from sklearn.exceptions import ConvergenceWarning  # slow to import
    from sklearn.linear_model import LogisticRegression

    model = start or LogisticRegression(max_iter=MAX_STEPS, warm_start=True)
    model.C = 1.0 / (l2 * len(x))  # its loss is a sum over images
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        return model.fit(x, labels)


def probe_checkpoint(
    checkpoint: str | Path,
    dataset: str,
    kind: Literal["knn", "linear"],
    splits: SplitOptions = SplitOptions(),
    options: FeatureOptions = FeatureOptions(),
    *,
    ks: Sequence[int] | None = None,
    l2: Sequence[float] | None = None,
    cache: Path | None = None,
    log: Callable[[str], None] = lambda _: None,
    world: World = SINGLE,
) -> dict[str, Any]:
    """Probes a checkpoint on a data set; preprocessing and feature cache are the few-shot evaluation's.

    Returns plain data: the `accuracies` by k, or the result of `linear_probe`. `ks` is for "knn", `l2` for "linear".
    Raises UserError for bad settings, data or weights.
    """
    if (ks is not None and kind != "knn") or (l2 is not None and kind != "linear"):
        raise UserError(f"kind is {kind}: ks is for knn and l2 for linear; leave out the other.")
    _check_l2(L2_GRID if l2 is None else l2)
    check_source(dataset, splits.root)  # before anything is loaded
    frozen = FrozenModel.load(checkpoint, options, cache, log, world)
    parts = load_train_and_test(dataset, splits, options.on_error, world, frozen.preprocessing.range, options)
    if kind == "knn":
        _choose_ks(ks, len(parts[0]))  # before the features
    frozen = frozen.at_best_readout(parts[0])
    train, test = map(frozen.features, parts)
    classes = len(parts[0].classes)
    if kind == "knn":
        result: dict[str, Any] = {"accuracies": knn(train, test, classes, ks=ks, device=device_of(frozen.model))}
    else:
        groups = parts[0].groups
        val = None
        if (splits.train_split, splits.test_split) == (None, "test") and ":" in dataset:  # your own, maybe with a val
            both = load_dataset(dataset, "trainval", root=splits.root, on_error=options.on_error, read=options)
            val = None if both.from_val is None else frozen.features(both.take(np.flatnonzero(both.from_val)))
        result = linear_probe(
            train,
            test,
            l2=L2_GRID if l2 is None else l2,
            groups=groups if groups is None else groups[train.indices],
            val=val,
        )
    return {
        "checkpoint": str(checkpoint),
        "dataset": dataset,
        "kind": kind,
        "train_images": len(train.labels),
        "test_images": len(test.labels),
        "skipped": train.skipped + test.skipped,
        "computed_in": computed_in(frozen.model),
        **frozen.to_record(),
        **result,
    }


def _choose_ks(ks: Sequence[int] | None, images: int) -> list[int]:
    ks = [k for k in KS if k <= images] if ks is None else list(ks)
    if not ks or min(ks) < 1 or max(ks) > images:
        raise UserError(f"k is {ks}; give numbers from 1 to the {images} training images.")
    return ks


def _check_l2(l2: Sequence[float]) -> None:
    if not l2 or not all(0 < value < np.inf for value in l2):
        raise UserError(f"l2 is {tuple(l2)}; give one or more positive numbers.")


def format_probe(record: Mapping[str, Any]) -> str:
    """The result of `probe_checkpoint` as text."""
    images = f"{record['train_images']} training and {record['test_images']} test images"
    text = f"{quoted(record['dataset'])}: {images} · {record['skipped']} could not be read · {record['computed_in']}"
    if record["kind"] == "knn":
        rows = [{"k": k, "accuracy": f"{accuracy:.2%}"} for k, accuracy in record["accuracies"].items()]
        return f"{format_table(rows)}\n{text}"
    rows = [{"l2": f"{l2:g}", "held-out": f"{accuracy:.2%}"} for l2, accuracy in record["held_out"].items()]
    note = "" if record["converged"] else f" (stopped after {MAX_STEPS} steps)"
    return f"{format_table(rows)}\naccuracy {record['accuracy']:.2%} with l2 {record['l2']:g}{note}\n{text}".lstrip()
