"""Reading finished runs for their pages: settings, metadata, predictions for the test images, and these images.

`write_pages.report` writes the page.
"""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from vitlab.checksums import find_corrupt_files
from vitlab.config.data import ReadConfig
from vitlab.data.decode import ImageError
from vitlab.data.exclude import image_id
from vitlab.data.registry import load_dataset
from vitlab.data.transforms import EvalTransform, to_pixels
from vitlab.evaluation.predictions import read_predictions
from vitlab.evaluation.result import Evaluation
from vitlab.io import read_json
from vitlab.preprocessing import Preprocessing
from vitlab.runs.run import PREDICTIONS
from vitlab.weights import load_metadata

logger = logging.getLogger(__name__)
FILES = ("config.json", "metrics.jsonl", PREDICTIONS, "model/config.json")
"""Files of a run that are read, and compared with their checksums."""


def run_folders(path: str | Path) -> list[Path]:
    """The finished runs in `path`: itself, run-0, run-1, ...; without these its least-squares head `linear`, if any."""
    path = Path(path)
    runs = sorted(path.glob("run-*"), key=lambda run: (len(run.name), run.name)) if path.is_dir() else []
    return list(filter(_is_finished, (path, *runs))) or list(filter(_is_finished, [path / "linear"]))


def _is_finished(run: Path) -> bool:
    return (run / PREDICTIONS).is_file() and (run / "result.json").is_file()


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
    """The `image_id` of each test image."""

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Raises UserError for corrupt predictions; warns of files that do not match their checksums."""
        for name, reason in find_corrupt_files(folder, FILES).items():
            logger.warning("%s %s: run its command again to restore what can be computed again", folder / name, reason)
        metadata = load_metadata(folder)
        test, names = read_predictions(folder / PREDICTIONS, tuple(metadata["classes"]))
        return cls(folder, read_json(folder / "config.json"), metadata, test, names)

    def images(self, rows: Int[np.ndarray, " n"]) -> dict[int, UInt8[np.ndarray, "H W 3"]]:
        """Row of `test` -> test image, without images that are missing or cannot be read.

        Raises UserError where the data set is missing.
        """
        metadata = self.metadata
        test_set = load_dataset(
            metadata["dataset"],
            "test",
            root=metadata["root"],
            classes=metadata["classes"] if metadata["class_indices"] else None,  # by name: indices may have changed
            on_error="skip",
            partial=self.settings["data"]["partial"],
            levels=Preprocessing.read(metadata, str(self.folder)).range,
            read=ReadConfig.from_metadata(metadata),
            multi_label=bool(metadata.get("multi_label")),
        )
        indices = {image_id(test_set, i): i for i in range(len(test_set))}
        images = {}
        for row in map(int, rows):
            with contextlib.suppress(KeyError, ImageError):
                images[row] = test_set.image(indices[self.names[row]])
        return images

    def preprocessed(self, rows: Int[np.ndarray, " n"]) -> dict[int, UInt8[np.ndarray, "h w 3"]]:
        """`images` as the model saw them."""
        size = self.settings["model"]["image_size"]
        preprocessing = Preprocessing.read(self.metadata, str(self.folder))
        transform = EvalTransform(size if isinstance(size, int) else tuple(size), preprocessing)
        return {row: to_pixels(transform.apply([image]))[0] for row, image in self.images(rows).items()}

    @property
    def job(self) -> Path:
        """The folder of the fine-tuning job that the run is of; else its own."""
        is_part = self.folder.name == "linear" or self.folder.name.startswith("run-")
        return self.folder.parent if is_part and (self.folder.parent / "config.json").is_file() else self.folder

    @property
    def dataset(self) -> str:
        """The name of the data set; of a path the last part."""
        name = self.metadata["dataset"]
        return Path(name.partition(":")[2] or name).absolute().name

    @property
    def title(self) -> str:
        """The run in a few words."""
        dataset = self.dataset
        if self.settings.get("trained") == "head":
            return f"Least-squares head for {dataset}"
        return f"{'Trained from scratch' if self.settings['command'] == 'pretrain' else 'Fine-tuned'} on {dataset}"

    def one_per_class(self, limit: int) -> Int[np.ndarray, " n"]:
        """Rows of the first test image of each of the first `limit` classes."""
        labeled = np.flatnonzero(self.test.all_labels.counts)
        _, first = np.unique(self.test.labels[labeled], return_index=True)
        return labeled[first[:limit]]

    def label(self, row: int) -> str:
        """The label, or the labels, of a test image as text."""
        names = [self.test.classes[label] for label in self.test.all_labels.of_image(row)]
        return ", ".join(names) or "none of the classes"
