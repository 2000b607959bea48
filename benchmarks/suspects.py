"""Are wrong labels found? Beside cleanlab on the same probabilities, and the accuracy without the suspects.

    python benchmarks/suspects.py DATA S14 --out benchmarks/results/suspects.json

DATA is a folder of `finetune_peers.py --prepare`. 5% and 10% of the training labels are replaced: by any other class,
or by a similar one (the class whose images the head confuses most with this one). The least-squares head on frozen
features gives each image's probabilities without it. Recall is the share of replaced labels among as many images as
were replaced: by our order, and by cleanlab's three (label quality scores). The head is then tested with all images,
and without the images that we list and that cleanlab's `find_label_issues` lists.
"""

import importlib
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from finetune_peers_data import draw
from run_record import describe_run
from tyro.conf import Positional

from vitlab.data.registry import load_dataset
from vitlab.evaluation.features import Features, features, frozen_preprocessing
from vitlab.evaluation.linear_head import least_squares_head, leave_one_out
from vitlab.evaluation.load import load_for_evaluation
from vitlab.evaluation.options import ModelOptions
from vitlab.evaluation.suspects import rank_suspects

SETS = ("flowers102:10", "cifar10:100", "fashion_mnist:100", "digits:100")
METHODS = ("self_confidence", "normalized_margin", "confidence_weighted_entropy")
"""Orders of cleanlab."""


@dataclass(frozen=True)
class Arguments:
    data: Positional[Path]
    checkpoint: Positional[str]
    image_size: int = 112
    sets: tuple[str, ...] = SETS
    """NAME:IMAGES A CLASS."""
    seeds: tuple[int, ...] = (0, 1, 2)
    fractions: tuple[float, ...] = (0.05, 0.1)
    test_images: int = 1000
    out: Path | None = None


def replace_labels(labels: np.ndarray, fraction: float, similar: np.ndarray | None, seed: int) -> np.ndarray:
    """`labels` with a fraction replaced: by `similar[label]`, or by any other class."""
    rng = np.random.default_rng(seed)
    rows = rng.choice(len(labels), round(fraction * len(labels)), replace=False)
    replaced, classes = labels.copy(), labels.max() + 1
    replaced[rows] = (labels[rows] + rng.integers(1, classes, len(rows))) % classes
    if similar is not None:
        replaced[rows] = similar[labels[rows]]
    return replaced


def most_similar(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """For each class the other one of highest mean probability over its images."""
    means = np.stack([probabilities[labels == label].mean(axis=0) for label in range(probabilities.shape[1])])
    np.fill_diagonal(means, -1)
    return means.argmax(axis=1)


def out_of_sample(x: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    return leave_one_out(x, labels, classes, every=True).logits.softmax(dim=1).numpy()


def accuracy(train: Features, labels: np.ndarray, keep: np.ndarray, test: Features, classes: int) -> float:
    """Of the head for the images `keep` with these labels."""
    head = least_squares_head(train.x[None, keep], labels[keep], classes)
    return float((head.logits(test.x).argmax(axis=1) == test.labels).mean())


def measure(train: Features, test: Features, classes: int, fraction: float, kind: str, seed: int) -> dict[str, Any]:
    cleanlab = {name: importlib.import_module(f"cleanlab.{name}") for name in ("rank", "filter")}
    similar = most_similar(out_of_sample(train.x, train.labels, classes), train.labels) if kind == "similar" else None
    labels = replace_labels(train.labels, fraction, similar, seed)
    wrong = np.flatnonzero(labels != train.labels)
    probabilities = out_of_sample(train.x, labels, classes)
    order, count = rank_suspects(probabilities, labels)
    orders = {"vitlab": order}
    for method in METHODS:
        scores = cleanlab["rank"].get_label_quality_scores(labels, probabilities, method=method)
        orders[f"cleanlab {method}"] = np.argsort(scores, kind="stable")
    issues = np.flatnonzero(cleanlab["filter"].find_label_issues(labels, probabilities))
    lists = {"vitlab": order[:count], "cleanlab": issues}
    every = np.arange(len(labels))
    return {
        "replaced": len(wrong),
        "recall": {name: float(np.isin(wrong, rows[: len(wrong)]).mean()) for name, rows in orders.items()},
        "listed": {name: len(rows) for name, rows in lists.items()},
        "wrong_among_listed": {name: float(np.isin(rows, wrong).mean()) for name, rows in lists.items()},
        "accuracy": {
            "true labels": accuracy(train, train.labels, every, test, classes),
            "all images": accuracy(train, labels, every, test, classes),
            **{
                f"without {name}'s": accuracy(train, labels, np.setdiff1d(every, rows), test, classes)
                for name, rows in lists.items()
            },
        },
    }


def as_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: means over the seeds."""
    recalls, accuracies = (list(rows[0][name]) for name in ("recall", "accuracy"))
    head = ["data", "replaced", *(f"recall, {name}" for name in recalls), *(f"accuracy, {name}" for name in accuracies)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    keys = ("dataset", "fraction", "kind")
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in rows):
        of_key = [row for row in rows if tuple(row[name] for name in keys) == key]
        cells = [f"{100 * statistics.fmean(row['recall'][name] for row in of_key):.1f}" for name in recalls]
        cells += [f"{100 * statistics.fmean(row['accuracy'][name] for row in of_key):.1f}" for name in accuracies]
        lines.append(f"| {' | '.join([key[0], f'{key[1]:.0%} {key[2]}', *cells])} |")
    return "\n".join(lines)


def main() -> None:
    given = tyro.cli(Arguments, description=__doc__)
    record: dict[str, Any] = {"environment": describe_run(given, torch), "results": []}
    options = ModelOptions(image_size=given.image_size, device="cpu")
    loaded = load_for_evaluation(given.checkpoint, options, adaptation={"num_classes": 0, "pre_logits": "drop"})
    preprocessing = frozen_preprocessing(loaded.preprocessing, loaded.model.config.image_hw)
    for name in given.sets:
        dataset, _, shots = name.partition(":")
        for seed in given.seeds:
            folder = f"folder:{draw(given.data, dataset, int(shots), seed, given.test_images)}"
            parts = [load_dataset(folder, split) for split in ("trainval", "test")]
            train, test = (features(loaded.model, part, preprocessing=preprocessing) for part in parts)
            for fraction in given.fractions:
                for kind in ("uniform", "similar"):
                    row = {"dataset": name, "seed": seed, "fraction": fraction, "kind": kind}
                    row |= measure(train, test, len(parts[0].classes), fraction, kind, seed)
                    record["results"].append(row)
    print(as_table(record["results"]))
    if given.out is not None:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
