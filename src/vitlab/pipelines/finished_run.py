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
from vitlab.inspect.figures import PageImage, encode, fit
from vitlab.inspect.report import RunSection
from vitlab.io import find_corrupt_files
from vitlab.pipelines.pretrain import PREDICTIONS
from vitlab.preprocessing import Preprocessing
from vitlab.train.workdir import read_log
from vitlab.weights import load_metadata

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
    metadata: dict[str, Any]
    """Metadata of its model."""
    test: Evaluation
    names: Sequence[str]
    """`image_id` of each test image."""

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Raises UserError for corrupt predictions; warns of files that do not match their checksums."""
        for name, reason in find_corrupt_files(folder, READ).items():
            logger.warning("%s %s: run its command again to restore what can be computed again", folder / name, reason)
        settings = json.loads((folder / "config.json").read_bytes())
        metadata = load_metadata(folder)
        test, names = read_predictions(folder / PREDICTIONS, tuple(metadata["classes"]))
        return cls(folder, settings, metadata, test, names)

    def images(self, rows: Int[np.ndarray, " n"]) -> dict[int, UInt8[np.ndarray, "H W 3"]]:
        """Row of `test` -> test image, without images that are missing or cannot be read.

        Raises UserError where the data set is missing.
        """
        metadata = self.metadata
        data = load_dataset(
            metadata["dataset"], "test", root=metadata["root"], classes=metadata["class_indices"], on_error="skip"
        )
        indices = {image_id(data, i): i for i in range(len(data))}
        images = {}
        for row in map(int, rows):
            with contextlib.suppress(KeyError, ImageError):
                images[row] = data.image(indices[self.names[row]])
        return images

    def preprocessed(self, rows: Int[np.ndarray, " n"]) -> dict[int, UInt8[np.ndarray, "h w 3"]]:
        """`images` as the model saw them."""
        size = self.settings["model"]["image_size"]
        preprocessing = Preprocessing.read(self.metadata, str(self.folder))
        transform = EvalTransform(size if isinstance(size, int) else tuple(size), preprocessing)
        return {row: to_pixels(transform.apply([image]))[0] for row, image in self.images(rows).items()}

    @property
    def title(self) -> str:
        """The run in a few words."""
        verb = "Trained from scratch on" if self.settings["command"] == "pretrain" else "Fine-tuned on"
        return f"{verb} {self.metadata['dataset']}"

    def one_of_each(self, most: int) -> Int[np.ndarray, " n"]:
        """Rows of the first test image of each of the first `most` classes."""
        return np.unique(self.test.labels, return_index=True)[1][:most]

    def section(self, name: str | None = None, explanation: str | None = None) -> RunSection:
        """The run for a page: curves, confusion matrix, each class, the most confident wrong predictions."""
        test = self.test
        wrong = np.flatnonzero(~test.correct)
        wrong = wrong[np.argsort(-test.confidences[wrong], kind="stable")][:MISTAKES]
        mistakes, missing = None, ""
        try:
            images = self.preprocessed(wrong)
            if images or not len(wrong):
                mistakes = [self._mistake(row, image) for row, image in images.items()]
        except ValueError as error:
            missing = f"\n\nThe wrong predictions cannot be shown: {error}"
        records = read_log(self.folder / "metrics.jsonl")
        return RunSection(
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

    def _mistake(self, row: int, image: UInt8[np.ndarray, "h w 3"]) -> PageImage:
        test = self.test
        prediction, label = (test.classes[numbers[row]] for numbers in (test.predictions, test.labels))
        caption = f"predicted {prediction}\n{test.confidences[row]:.0%} sure\nlabel {label}"
        return PageImage(encode(fit(image, 192)), f"An image of {label} predicted as {prediction}.", 96, caption)
