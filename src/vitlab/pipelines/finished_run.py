"""What the folders of finished runs tell: curves, answers to the test images, and which images those were."""

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
from vitlab.data.transforms import EvalTransform, pair, to_pixels
from vitlab.evaluate.accuracy import Evaluation
from vitlab.evaluate.predictions import read_predictions
from vitlab.inspect.report import Mistakes, Phase
from vitlab.io import find_damage
from vitlab.pipelines.pretrain import PREDICTIONS
from vitlab.preprocessing import Preprocessing
from vitlab.train.logs import read_log
from vitlab.weights import load_card

logger = logging.getLogger(__name__)
READ = ("config.json", "metrics.jsonl", "predictions.csv", "model/config.json")
"""Files of a run that are read here."""
MISTAKES = 24
"""Most wrong answers shown."""


def run_folders(path: str | Path) -> list[Path]:
    """The folders of the finished runs in `path`: itself, or its run-0, run-1, ...; none for anything else."""
    path = Path(path)
    places = [path, *sorted(path.glob("run-*"))] if path.is_dir() else []
    return [place for place in places if (place / PREDICTIONS).is_file() and (place / "result.json").is_file()]


@dataclass(frozen=True)
class Run:
    """A finished run: its settings, its records, and its answers to the test images."""

    folder: Path
    settings: dict[str, Any]
    """config.json."""
    card: dict[str, Any]
    """That of its model."""
    test: Evaluation
    names: Sequence[str]
    """Of the test images, as `image_id` has them."""

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Raises ValueError where the folder holds no finished run, or a damaged one; warns of other damage."""
        for name, what in find_damage(folder, READ).items():
            logger.warning("%s %s: run its command again to make again what can be", folder / name, what)
        settings = json.loads((folder / "config.json").read_bytes())
        card = load_card(folder)
        test, names = read_predictions(folder / PREDICTIONS, tuple(card["classes"]))
        return cls(folder, settings, card, test, names)

    @property
    def seen(self) -> tuple[int, int]:
        """Height and width in pixels at which the model was tested."""
        size = self.settings["model"]["image_size"]
        return pair(size if isinstance(size, int) else tuple(size))

    def images(self, rows: Int[np.ndarray, " n"]) -> dict[int, UInt8[np.ndarray, "H W 3"]]:
        """The test images in these rows of `test`, as the model saw them; one that cannot be read is left out.

        Raises ValueError where the data set is not to be had.
        """
        card = self.card
        data = load_dataset(card["dataset"], "test", root=card["root"], classes=card["class_indices"], on_error="skip")
        transform = EvalTransform(self.seen, Preprocessing.read(card, str(self.folder)))
        places = {image_id(data, i): i for i in range(len(data))}
        found = {}
        for row in map(int, rows):
            with contextlib.suppress(KeyError, ImageError):
                image = data.image(places[self.names[row]])
                found[row] = to_pixels(transform.apply([image]))[0]
        return found

    @property
    def title(self) -> str:
        """What the run did."""
        verb = "Trained from scratch on" if self.settings["command"] == "pretrain" else "Fine-tuned on"
        return f"{verb} {self.card['dataset']}"

    def one_of_each(self, most: int) -> Int[np.ndarray, " n"]:
        """Rows of the first test image of each class, of the first `most` classes."""
        return np.unique(self.test.labels, return_index=True)[1][:most]

    def phase(self, name: str | None = None, explanation: str | None = None) -> Phase:
        """The run as a page shows it: figures, curves, confusions, each class, the surest wrong answers."""
        test = self.test
        wrong = np.flatnonzero(~test.right)
        wrong = wrong[np.argsort(-test.confidences[wrong], kind="stable")][:MISTAKES]
        try:
            shown = self.images(wrong)
            missing = ""
        except ValueError as error:
            shown, missing = {}, f"\n\nThe images answered wrong cannot be shown: {error}"
        rows = [row for row in wrong.tolist() if row in shown]
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
            mistakes=None if missing or (len(wrong) and not rows) else Mistakes(
                np.stack([shown[row] for row in rows]) if rows else np.zeros((0, *self.seen, 3), np.uint8),
                test.predictions[rows], test.labels[rows], test.confidences[rows],
            ),
        )  # fmt: skip
