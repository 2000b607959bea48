"""Reading finished runs: settings, training curves, predictions for the test images, and these images."""

import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from vitlab.data.decode import ImageError
from vitlab.data.exclude import image_id
from vitlab.data.registry import load_dataset
from vitlab.data.transforms import EvalTransform, to_pixels
from vitlab.evaluate.accuracy import Evaluation, read_predictions
from vitlab.inspect.report import Mistakes, Phase
from vitlab.io import find_corrupt_files
from vitlab.pipelines.pretrain import PREDICTIONS
from vitlab.preprocessing import Preprocessing
from vitlab.train.workdir import read_log
from vitlab.weights import load_card

logger = logging.getLogger(__name__)
READ = ("config.json", "metrics.jsonl", "predictions.csv", "model/config.json")
"""Files of a run that are read."""
MISTAKES = 24
"""Maximum number of wrong predictions on a page."""


def run_folders(path: str | Path) -> list[Path]:
    """The finished runs in `path`: the folder itself, or its run-0, run-1, ...; empty for anything else."""
    path = Path(path)
    folders = [path, *sorted(path.glob("run-*"))] if path.is_dir() else []
    return [folder for folder in folders if all((folder / name).is_file() for name in (PREDICTIONS, "result.json"))]


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    settings: dict[str, Any]
    """config.json."""
    card: dict[str, Any]
    """The card of its model."""
    test: Evaluation
    names: Sequence[str]
    """`image_id` of each test image."""

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Raises UserError for corrupt predictions; warns of files that do not match their checksums."""
        for name, damage in find_corrupt_files(folder, READ).items():
            logger.warning("%s %s: run its command again to restore what can be computed again", folder / name, damage)
        settings = json.loads((folder / "config.json").read_bytes())
        card = load_card(folder)
        test, names = read_predictions(folder / PREDICTIONS, tuple(card["classes"]))
        return cls(folder, settings, card, test, names)

    @property
    def image_hw(self) -> tuple[int, int]:
        """Height and width at which the model was tested."""
        size = self.settings["model"]["image_size"]
        return (size, size) if isinstance(size, int) else tuple(size)

    def images(self, rows: Int[np.ndarray, " n"]) -> dict[int, UInt8[np.ndarray, "H W 3"]]:
        """Row of `test` -> preprocessed test image, without images that are missing or cannot be read.

        Raises UserError where the data set is missing.
        """
        card = self.card
        data = load_dataset(card["dataset"], "test", root=card["root"], classes=card["class_indices"], on_error="skip")
        transform = EvalTransform(self.image_hw, Preprocessing.read(card, str(self.folder)))
        indices = {image_id(data, i): i for i in range(len(data))}
        images = {}
        for row in map(int, rows):
            with contextlib.suppress(KeyError, ImageError):
                image = data.image(indices[self.names[row]])
                images[row] = to_pixels(transform.apply([image]))[0]
        return images

    @property
    def title(self) -> str:
        """The run in a few words."""
        verb = "Trained from scratch on" if self.settings["command"] == "pretrain" else "Fine-tuned on"
        return f"{verb} {self.card['dataset']}"

    def one_of_each(self, most: int) -> Int[np.ndarray, " n"]:
        """Rows of the first test image of each of the first `most` classes."""
        return np.unique(self.test.labels, return_index=True)[1][:most]

    def phase(self, name: str | None = None, explanation: str | None = None) -> Phase:
        """The run for a page: curves, confusion matrix, each class, the most confident wrong predictions."""
        test = self.test
        wrong = np.flatnonzero(~test.right)
        wrong = wrong[np.argsort(-test.confidences[wrong], kind="stable")][:MISTAKES]
        mistakes, missing = None, ""
        try:
            shown = self.images(wrong)
            if (rows := list(shown)) or not len(wrong):
                images = np.stack(list(shown.values())) if rows else np.zeros((0, *self.image_hw, 3), np.uint8)
                mistakes = Mistakes(images, test.predictions[rows], test.labels[rows], test.confidences[rows])
        except ValueError as error:
            missing = f"\n\nThe wrong predictions cannot be shown: {error}"
        records = read_log(self.folder / "metrics.jsonl")
        return Phase(
            name=name or self.title,
            explanation=(explanation or f"The run in {self.folder}.") + missing,
            numbers={
                "Test accuracy": f"{test.accuracy:.1%}",
                "Test images": f"{len(test.labels):,}",
                "Training steps": f"{max(record['step'] for record in records):,}",
            },
            records=records,
            classes=test.classes,
            confusion=test.confusion if test.label_sets is None else None,
            per_class=test.per_class(),
            mistakes=mistakes,
        )
