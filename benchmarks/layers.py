"""Which block and which pooling represent images best, and how often the leave-one-out loss finds it.

    python benchmarks/layers.py DATA S14 CHECKPOINT ... --out benchmarks/results/layers.jsonl

DATA is a folder of `finetune_peers.py --prepare`. For each checkpoint, data set and seed the least-squares head is
fitted to all candidates of `evaluation/readouts.py`, without augmentation, and tested. A line has, for each,
leave-one-out loss and accuracy, the test accuracy, and that of k nearest neighbors (k = 5). Rows that the file has are
not computed again.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from finetune_peers import SETS, read_rows
from finetune_peers_data import TEST_IMAGES, draw
from run_record import describe_run
from tyro.conf import Positional

from vitlab.data.registry import load_dataset
from vitlab.evaluation.features import Features, frozen_preprocessing
from vitlab.evaluation.linear_head import least_squares_head
from vitlab.evaluation.load import load_for_evaluation
from vitlab.evaluation.options import ModelOptions
from vitlab.evaluation.probe import knn
from vitlab.evaluation.readouts import Readout, candidates, compare_readouts, readout_features

NEIGHBORS = 5
ADAPTATION = {"num_classes": 0, "pre_logits": "drop"}


@dataclass(frozen=True)
class Arguments:
    data: Positional[Path]
    checkpoints: Positional[tuple[str, ...]]
    image_size: int = 112
    sets: tuple[str, ...] = SETS
    """NAME:IMAGES A CLASS."""
    seeds: tuple[int, ...] = (0, 1, 2)
    test_images: int = TEST_IMAGES
    out: Path | None = None


def test_accuracy(train: Features, test: Features, num_classes: int) -> dict[str, float]:
    """Of the head and of the nearest neighbors."""
    head = least_squares_head(train.x[None], train.labels, num_classes)
    correct = head.logits(test.x).argmax(axis=1) == test.labels
    neighbors = knn(train, test, num_classes, ks=[min(NEIGHBORS, len(train.x))])
    return {"test": float(correct.mean()), "knn": next(iter(neighbors.values()))}


def measure(given: Arguments, checkpoint: str, name: str, seed: int) -> dict[str, Any]:
    dataset, _, shots = name.partition(":")
    folder = draw(given.data, dataset, int(shots), seed, given.test_images)
    loaded = load_for_evaluation(
        checkpoint, ModelOptions(image_size=given.image_size, device="cpu"), adaptation=ADAPTATION
    )
    train, test = (load_dataset(f"folder:{folder}", split) for split in ("trainval", "test"))
    layers = candidates(loaded.model.config, joined=True)
    preprocessing = frozen_preprocessing(loaded.preprocessing, loaded.model.config.image_hw)
    parts = [readout_features(loaded.model, part, layers, preprocessing=preprocessing) for part in (train, test)]
    labels = parts[0][layers[-1]].labels
    choice = compare_readouts({layer: each.x for layer, each in parts[0].items()}, labels, len(train.classes))
    rows = []
    for score in choice.scores:
        tested = test_accuracy(parts[0][score.readout], parts[1][score.readout], len(train.classes))
        rows.append({**score.readout.to_record(), "loss": score.loss, "leave_one_out": score.accuracy, **tested})
    nested = {"loss": choice.nested_loss, "accuracy": choice.nested_accuracy}
    return {"chosen": choice.chosen.to_record(), "nested": nested, "candidates": rows}


def as_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: for each checkpoint and data set the test accuracy of the own, the chosen and the best candidate."""
    lines = [
        "| checkpoint | data | own | chosen | best | k-NN: own | chosen | blocks chosen |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for checkpoint, name in dict.fromkeys((row["checkpoint"], row["dataset"]) for row in rows):
        of_set = [row for row in rows if (row["checkpoint"], row["dataset"]) == (checkpoint, name)]
        cells, chosen_layers = [], []
        for row in of_set:
            by_layer = {Readout.from_record(each): each for each in row["candidates"]}
            own, chosen = row["candidates"][-1], by_layer[Readout.from_record(row["chosen"])]
            best = max(each["test"] for each in row["candidates"])
            cells.append((own["test"], chosen["test"], best, own["knn"], chosen["knn"]))
            last = f" last {chosen['joined']}" if "joined" in chosen else ""
            chosen_layers.append(f"{chosen['depth']} {chosen['pool']}{last}")
        means = " | ".join(f"{100 * statistics.fmean(column):.1f}" for column in zip(*cells, strict=True))
        lines.append(f"| {checkpoint} | {name} | {means} | {', '.join(chosen_layers)} |")
    return "\n".join(lines)


def main() -> None:
    given = tyro.cli(Arguments, description=__doc__)
    rows = read_rows(given.out) if given.out else []
    lines = [json.dumps({"environment": describe_run(given, torch)})]
    np.seterr(all="raise", under="ignore")
    for checkpoint in given.checkpoints:
        for name in given.sets:
            for seed in given.seeds:
                keys = {
                    "checkpoint": Path(checkpoint).name,
                    "dataset": name,
                    "seed": seed,
                    "image_size": given.image_size,
                }
                if any(row | keys == row for row in rows):
                    continue
                rows.append(keys | measure(given, checkpoint, name, seed))
                lines.append(json.dumps(rows[-1]))
                print(as_table(rows[-1:]).splitlines()[-1], flush=True)
                if given.out is not None:
                    with given.out.open("a") as file:
                        file.write("\n".join(lines) + "\n")
                    lines = []
    print(as_table(rows))


if __name__ == "__main__":
    main()
