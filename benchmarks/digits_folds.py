"""The digits' recipe on images that no choice of it has seen: its training images, in turn held out.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/digits_folds.py --out benchmarks/results/digits_folds.json

The recipe was chosen with the test split in sight, so its accuracy there is optimistic. Here the 1,438 other images
are cut into `--folds` parts with the same share of each class; for each of them the recipe as it is learns from the
rest and is tested on it once. Together that evaluates every image once, by models that had a fifth less to learn from.
The test split is never read. With `--runs FOLDER` the runs are saved there, and those that have ended stay as they are.
"""

import contextlib
import dataclasses
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import sklearn
import torch
import tyro
from PIL import Image
from run_record import describe_run
from sklearn.model_selection import StratifiedKFold

from vitlab.data.dataset import Dataset
from vitlab.data.registry import load_dataset
from vitlab.recipes import tiny
from vitlab.runs.pretrain import pretrain


@dataclasses.dataclass(frozen=True)
class Arguments:
    folds: int = 5
    runs: Path | None = None
    """Folder to keep the runs in; None throws them away."""
    out: Path | None = None
    """JSON file for the figures."""


def write(images: Dataset, places: Any, folder: Path) -> None:
    """Class folders of some of the images."""
    for i in places.tolist():
        file = folder / images.classes[images.labels[i]] / f"{i:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images.image(i)).save(file)


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    images, results = load_dataset("digits", "trainval"), []
    cut = StratifiedKFold(arguments.folds, shuffle=True, random_state=0)
    with contextlib.ExitStack() as stack:
        folder = arguments.runs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for fold, (rest, held_out) in enumerate(cut.split(images.labels, images.labels)):
            data = folder / f"data-{fold}"
            write(images, rest, data / "train")
            write(images, held_out, data / "test")
            recipe = tiny.digits()
            given = dataclasses.replace(recipe.data, name=f"folder:{data}")
            config = dataclasses.replace(recipe, data=given, seed=fold)
            ended = pretrain(config, folder / f"run-{fold}", device="cpu", tensorboard=False)
            wrong = round((1 - ended.result["test"]["accuracy"]) * len(held_out))
            results.append({"fold": fold, "learned": len(rest), "images": len(held_out), "wrong": wrong})
            print(results[-1], flush=True)
    wrong, evaluated = (sum(each[name] for each in results) for name in ("wrong", "images"))
    accuracy = 1 - wrong / evaluated
    deviation = math.sqrt(accuracy * (1 - accuracy) / evaluated)
    print(f"{wrong} of {evaluated} wrong: accuracy {accuracy:.4f}, +- {deviation:.4f} by the number of images")
    if arguments.out is not None:
        result = {"wrong": wrong, "images": evaluated, "accuracy": accuracy, "deviation": deviation, "folds": results}
        record = {"environment": describe_run(arguments, torch, sklearn), "results": result}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
