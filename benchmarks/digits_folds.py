"""The digits' recipe on pictures that no choice of it has seen: its training pictures, in turn held out.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/digits_folds.py --out benchmarks/results/digits_folds.json

The recipe was chosen with the test split in sight, so its accuracy there is optimistic. Here the 1,438 other pictures
are cut into `--folds` parts with the same share of each class; for each of them the recipe as it is learns from the
rest and is tested on it once. Together that judges every picture once, by models that had a fifth less to learn from.
The test split is never read. With `--runs FOLDER` the runs are kept there, and those that have ended stay as they are.
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
from circumstances import circumstances
from PIL import Image
from sklearn.model_selection import StratifiedKFold

from vitlab.data.datasets import load_dataset
from vitlab.data.sources import Dataset
from vitlab.recipes import tiny
from vitlab.transfer.run import pretrain


@dataclasses.dataclass(frozen=True)
class Arguments:
    folds: int = 5
    runs: Path | None = None
    """Folder to keep the runs in; None throws them away."""
    out: Path | None = None
    """JSON file for the figures."""


def write(pictures: Dataset, places: Any, folder: Path) -> None:
    """Class folders of some of the pictures."""
    for i in places.tolist():
        file = folder / pictures.classes[pictures.labels[i]] / f"{i:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pictures.picture(i)).save(file)


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    pictures, results = load_dataset("digits", "trainval"), []
    cut = StratifiedKFold(arguments.folds, shuffle=True, random_state=0)
    with contextlib.ExitStack() as stack:
        folder = arguments.runs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for fold, (rest, held_out) in enumerate(cut.split(pictures.labels, pictures.labels)):
            data = folder / f"data-{fold}"
            write(pictures, rest, data / "train")
            write(pictures, held_out, data / "test")
            recipe = tiny.digits()
            given = dataclasses.replace(recipe.data, name=f"folder:{data}")
            config = dataclasses.replace(recipe, data=given, seed=fold)
            ended = pretrain(config, folder / f"run-{fold}", device="cpu", tensorboard=False)
            wrong = int((~ended.test.right).sum())
            results.append({"fold": fold, "learnt": len(rest), "pictures": len(held_out), "wrong": wrong})
            print(results[-1], flush=True)
    wrong, judged = (sum(each[name] for each in results) for name in ("wrong", "pictures"))
    accuracy = 1 - wrong / judged
    deviation = math.sqrt(accuracy * (1 - accuracy) / judged)
    print(f"{wrong} of {judged} wrong: accuracy {accuracy:.4f}, +- {deviation:.4f} by the number of pictures")
    if arguments.out is not None:
        found = {"wrong": wrong, "pictures": judged, "accuracy": accuracy, "deviation": deviation, "folds": results}
        record = {"circumstances": circumstances(arguments, torch, sklearn), "results": found}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
