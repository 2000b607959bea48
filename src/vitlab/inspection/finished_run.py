"""Reading finished runs: settings, training curves, predictions for the test images, and these images."""

import contextlib
import itertools
import json
import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int, UInt8

from vitlab.checksums import find_corrupt_files
from vitlab.config import DataConfig
from vitlab.config.data import RENAMED, ReadConfig
from vitlab.data.decode import ImageError
from vitlab.data.dedup import SIDE, THRESHOLD
from vitlab.data.exclude import image_id
from vitlab.data.registry import load_dataset
from vitlab.data.transforms import EvalTransform, to_pixels, to_range
from vitlab.errors import UserError
from vitlab.evaluation.accuracy import Evaluation
from vitlab.evaluation.predictions import read_predictions
from vitlab.inspection.capture import capture
from vitlab.inspection.duplicates import find_pairs, numbers_of, one_of_each, page_images
from vitlab.inspection.figures import PAIR, PageImage, encode, fit, masked, side_by_side
from vitlab.inspection.report import DataSection, RunSection
from vitlab.io import read_json
from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing
from vitlab.recipes.resolve import RECIPE
from vitlab.runs.run import PREDICTIONS
from vitlab.runs.splits import load_splits
from vitlab.settings import from_dict
from vitlab.train.run_files import PLAN
from vitlab.train.workdir import read_log
from vitlab.weights import load_metadata, load_model

Report = Literal["whole", "short", "none"]
"""A report; one without near-duplicates and files of the figures; none."""
logger = logging.getLogger(__name__)
READ = ("config.json", "metrics.jsonl", "predictions.csv", "model/config.json")
"""Files of a run that are read."""
MISTAKES = 24
"""Maximum number of wrong predictions, and of near-duplicates, on a page."""
MAX_COMPARED = 20_000
"""Most training and test images that a page searches for near-duplicates."""
MAX_CANDIDATES = 300_000
"""Most pairs of similar hashes for a page with near-duplicates."""


def run_folders(path: str | Path) -> list[Path]:
    """The finished runs in `path`: the folder itself, its run-0, run-1, ..., or where fine-tuning did not help its
    least-squares head; empty for anything else."""
    path = Path(path)
    runs = sorted(path.glob("run-*"), key=lambda run: (len(run.name), run.name)) if path.is_dir() else []
    candidates, required = (path, *runs, path / "linear"), (PREDICTIONS, "result.json")
    finished = [folder for folder in candidates if all((folder / name).is_file() for name in required)]
    return [folder for folder in finished if folder.name != "linear"] or finished


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
            metadata["dataset"],
            "test",
            root=metadata["root"],
            classes=metadata["classes"] if metadata["class_indices"] else None,  # their numbers may have changed
            on_error="skip",
            partial=self.settings["data"].get("partial", False),
            levels=Preprocessing.read(metadata, str(self.folder)).range,
            read=ReadConfig.from_metadata(metadata),
            multi_label=bool(metadata.get("multi_label")),
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
    def choices(self) -> str:
        """The settings that neither recipe nor user has decided, with the reasons, and what a time budget has left out
        in the end, in sentences. A part of a fine-tuning job has them in the folder above. Empty if there are none."""
        part_of_job = self.folder.name == "linear" or self.folder.name.startswith("run-")
        job = self.folder.parent if part_of_job and (self.folder.parent / "config.json").is_file() else self.folder
        settings = read_json(job / "config.json")
        reasons = [reason for reason in settings.get("reasons", ()) if reason[2] != RECIPE]
        by = itertools.groupby(reasons, lambda reason: reason[2])
        chosen = [f"by {why}: {', '.join(f'{name} {value}' for name, value, _ in rows)}" for why, rows in by]
        text = f" Settings chosen {'; '.join(chosen)}." if chosen else ""
        decisions = read_json(job / PLAN)["decisions"] if (job / PLAN).is_file() else {}
        left_out = [part for part, fits in decisions.items() if not fits]
        return text + (
            f" Left out, since the machine was slower than planned: {', '.join(left_out)}." if left_out else ""
        )

    @property
    def title(self) -> str:
        """The run in a few words."""
        verb = "Trained from scratch on" if self.settings["command"] == "pretrain" else "Fine-tuned on"
        verb = "Least-squares head for" if self.settings.get("trained") == "head" else verb
        return f"{verb} {self.metadata['dataset']}"

    def one_of_each(self, most: int) -> Int[np.ndarray, " n"]:
        """Rows of the first test image of each of the first `most` classes."""
        labeled = np.flatnonzero(self.test.all_labels.counts)
        return labeled[np.unique(self.test.labels[labeled], return_index=True)[1][:most]]

    def label(self, row: int) -> str:
        """The label, or the labels, of a test image as text."""
        names = [self.test.classes[label] for label in self.test.all_labels.of_image(row)]
        return ", ".join(names) or "none of the classes"

    def section(
        self, name: str | None = None, explanation: str | None = None, device: torch.device | None = None
    ) -> RunSection:
        """The run for a page: curves, test, calibration, confusion matrix, classes, most confident wrong predictions.

        With a device, a Vision Transformer's attention in these images is computed there.
        """
        test, record = self.test, self.test.record()
        if multi_label := test.predicted_sets is not None:  # average precision needs the scores, which were not written
            record = read_json(self.folder / "result.json")["test"]
        wrong = self._wrong()[:MISTAKES]
        mistakes, missing, attended = None, "", None
        try:
            images = self.preprocessed(wrong)
            attended = self._attended(list(images.values()), device) if device and images else None
            if images or not len(wrong):
                shown = attended or images.values()
                mistakes = [self._mistake(row, image) for row, image in zip(images, shown, strict=True)]
        except ValueError as error:
            missing = f"\n\nThe wrong predictions cannot be shown: {error}"
        records = read_log(self.folder / "metrics.jsonl")
        if (precision := self.metadata.get("test_mean_average_precision")) is None:
            main = {"Test accuracy": f"{test.accuracy:.1%}"}
            main["95% confidence interval"] = "{:.1%} to {:.1%}".format(*record["accuracy_interval"])
        else:
            main = {"Mean average precision": f"{precision:.1%}"}
        more = {
            "Mean F1 of the labels": record.get("f1"),
            "Images with exactly their labels": record.get("exact_match"),
            "Balanced accuracy": record.get("balanced_accuracy"),
            "Expected calibration error": record.get("expected_calibration_error"),
        }
        return RunSection(
            name=name or self.title,
            explanation=(explanation or f"The run in {self.folder}.{self.choices}") + missing,
            numbers={
                **main,
                **{title: f"{value:.1%}" for title, value in more.items() if value is not None},
                "Test images": f"{len(test.labels):,}",
                "Training images": f"{self.settings['examples']:,}",
                "Training steps": f"{max((record['step'] for record in records), default=0):,}",
            },
            records=records,
            classes=test.classes,
            confusion=test.confusion if test.label_sets is None else None,
            per_class=record["per_class"],
            thresholds=record.get("thresholds"),
            calibration=None if multi_label else test.calibration,
            mistakes=mistakes,
            attended=attended is not None,
        )

    def _wrong(self) -> Int[np.ndarray, " n"]:
        """Rows of the wrong predictions, the most confident first. With several labels: images whose set labels are
        wrong, most wrong labels first, then highest loss."""
        test = self.test
        wrong = np.flatnonzero(~test.correct if test.predicted_sets is None else test.wrong_labels)
        badness = (test.confidences,) if test.predicted_sets is None else (test.losses, test.wrong_labels)
        return wrong[np.lexsort([-values[wrong] for values in badness])]

    def data_section(self, search: bool = True) -> DataSection:
        """Near-duplicates between the training and the test images, if they are searched, and the unreadable files of
        result.json."""
        unreadable = json.loads((self.folder / "result.json").read_bytes()).get("unreadable")
        files = None if unreadable is None else [(file["path"], file["reason"]) for file in unreadable]
        if not search:
            return DataSection("They were not searched, for lack of time: `vitlab inspect RUN` does.", unreadable=files)
        try:
            section = self._near_duplicates()
        except (ValueError, OSError, KeyError) as error:
            section = DataSection(f"They were not searched: {error}")
        return replace(section, unreadable=files)

    def _near_duplicates(self) -> DataSection:
        """Raises UserError where the data is missing, and where the search would not be quick or useful."""
        data = from_dict(DataConfig, {RENAMED.get(k) or k: v for k, v in self.settings["data"].items()})
        name, split = shlex.quote(data.name), data.train_split
        splits = load_splits(
            replace(data, eval_split="test", on_error="skip"), multi_label=bool(self.metadata.get("multi_label"))
        )
        train_set, test_set = splits.train, splits.test
        roots = "" if data.root is None else " --train-root {0} --test-root {0}".format(shlex.quote(data.root))
        command = f"`vitlab duplicates {name} {name} --train-split {split}{roots}` searches them."
        if (count := len(train_set) + len(test_set)) > MAX_COMPARED or "://" in name or "shards:hub:" in name:
            raise UserError(f"there are {count:,} training and test images to read. {command}")
        if test_set.pixels is not None and max(test_set.pixels.shape[1:3]) < SIDE:
            raise UserError(f"images of fewer than {SIDE} pixels look too much alike.")
        try:
            result, rows = find_pairs(train_set, test_set, THRESHOLD, MAX_CANDIDATES)
        except UserError as error:
            raise UserError(f"{error} {command}") from error
        explanation = (
            "Test images that are also training images, except for size, compression, brightness, a narrow crop or "
            "mirroring. The model has seen them, so the accuracy on them says nothing about new images. Left: the test "
            "image, right: the training image."
        )
        pairs = page_images(one_of_each(rows)[:MISTAKES], train_set, test_set)
        return DataSection(explanation, numbers_of(result), pairs)

    def _attended(
        self, images: Sequence[UInt8[np.ndarray, "h w 3"]], device: torch.device
    ) -> list[UInt8[np.ndarray, "H W 4"]] | None:
        """Each image next to itself under its attention rollout; None without attention or if it is not finite."""
        model = load_model(self.folder)
        if not isinstance(model, ViT):
            return None
        pixels = to_range(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float())
        try:
            captured = capture(model.to(device), pixels.split(8), keep=len(images))
        except UserError:
            return None
        large = [fit(image, 2 * PAIR, enlarge=True) for image in images]
        return [
            side_by_side(image, masked(image, attention), gap=8)
            for image, attention in zip(large, captured.rollout, strict=True)
        ]

    def _mistake(self, row: int, image: UInt8[np.ndarray, "h w c"]) -> PageImage:
        """c: 3 for a test image, 4 for one next to its attention."""
        test = self.test
        prediction = test.classes[test.predictions[row]]
        label = self.label(row)
        caption = f"predicted {prediction}\n{test.confidences[row]:.0%} sure\nlabel {label}"
        if test.predicted_sets is not None:
            labels, predicted = (set(sets.of_image(row).tolist()) for sets in (test.all_labels, test.predicted_sets))
            differences = {"missing": labels - predicted, "too many": predicted - labels}
            names = {title: ", ".join(test.classes[c] for c in sorted(labels)) for title, labels in differences.items()}
            caption = "\n".join(f"{title}: {text}" for title, text in names.items() if text) + f"\nlabels: {label}"
            prediction = ", ".join(test.classes[c] for c in sorted(predicted)) or "none of the classes"
        alt = f"An image of {label} predicted as {prediction}."
        if image.shape[2] == 3:
            return PageImage(encode(fit(image, 192)), alt, 96, caption)
        return PageImage(encode(image), f"{alt} Next to it the same image under its attention.", 280, caption)
