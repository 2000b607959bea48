"""A finished run as two sections of a page: its training and test (`run_section`), and its images (`data_section`)."""

import contextlib
import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int, UInt8

from vitlab.config import DataConfig
from vitlab.data.decode import ImageError
from vitlab.data.dedup import SIDE, THRESHOLD
from vitlab.data.exclude import image_id
from vitlab.data.transforms import to_range
from vitlab.errors import UserError
from vitlab.evaluation.result import Evaluation
from vitlab.evaluation.suspects import read_suspects
from vitlab.inspection.capture import capture
from vitlab.inspection.duplicates import find_pairs, format_counts, one_per_test_image, page_images
from vitlab.inspection.figures import PAIR, PageImage, encode, fit, masked, side_by_side
from vitlab.inspection.finished_run import Run
from vitlab.inspection.report import DataSection, RunSection
from vitlab.io import read_json
from vitlab.models.vit import ViT
from vitlab.recipes.resolve import RECIPE
from vitlab.runs.splits import Splits, load_splits
from vitlab.settings import from_dict
from vitlab.train.precision import prepare_for_inference
from vitlab.train.run_files import PLAN, SUSPECTS
from vitlab.train.workdir import read_log
from vitlab.weights import load_model

Report = Literal["whole", "short", "none"]
"""What is written after a run: `short` has no near-duplicates and no files of the figures."""
MAX_SHOWN = 24
"""Maximum number of wrong predictions, and of near-duplicates, on a page."""
MAX_COMPARED = 20_000
"""Maximum number of training and test images that are searched for near-duplicates."""
MAX_CANDIDATES = 300_000
"""Maximum number of pairs of similar hashes in this search."""
METRICS = {
    "f1": "Mean F1 of the labels",
    "exact_match": "Images with exactly their labels",
    "balanced_accuracy": "Balanced accuracy",
    "expected_calibration_error": "Expected calibration error",
    "uncalibrated_error": "The same without the temperature",
}
"""A metric of the test's record -> its title; these follow the main one."""


def run_section(
    run: Run, name: str | None = None, explanation: str | None = None, device: torch.device | None = None
) -> RunSection:
    """Curves, test, calibration, confusion matrix, classes, and the most confident wrong predictions.

    With a device, a Vision Transformer's attention in these images is computed there.
    """
    test, result = run.test, read_json(run.folder / "result.json")
    multi_label = test.predicted_sets is not None
    # Some numbers need all logits, which are not in the predictions.
    tested = result["test"]
    of_logits = {name: tested[name] for name in ("uncalibrated_error", "coverage") if name in tested}
    record = tested if multi_label else test.record() | of_logits
    trained, examples = result.get("least_squares", {}).get("fitted_images"), run.settings["examples"]
    records = read_log(run.folder / "metrics.jsonl")
    paragraphs = [explanation or " ".join([f"The run in {run.folder}.", *describe_choices(run.job)])]
    mistakes, attended = None, False
    try:
        mistakes, attended = _wrong_predictions(run, device)
    except ValueError as error:
        paragraphs.append(f"The wrong predictions cannot be shown: {error}")
    return RunSection(
        name=name or run.title,
        explanation="\n\n".join(paragraphs),
        numbers={
            **_metrics(run, record),
            "Test images": f"{len(test.labels):,}",
            "Training images": f"{examples:,}" if trained in (None, examples) else f"{trained:,} of {examples:,}",
            **({"Training steps": f"{max(record['step'] for record in records):,}"} if records else {}),
        },
        records=records,
        classes=test.classes,
        confusion=test.confusion if test.label_sets is None else None,
        per_class=record["per_class"],
        thresholds=record.get("thresholds"),
        calibration=None if multi_label else test.calibration,
        mistakes=mistakes,
        attended=attended,
    )


def describe_choices(job: Path) -> list[str]:
    """Sentences: which settings neither the recipe nor the user chose, and what a time budget left out."""
    reasons = read_json(job / "config.json").get("reasons", ())
    chosen = [(why, f"{name} {value}") for name, value, why in reasons if why != RECIPE]
    by_reason = itertools.groupby(chosen, key=lambda row: row[0])
    parts = [f"by {why}: {', '.join(setting for _, setting in rows)}" for why, rows in by_reason]
    sentences = [f"Settings chosen {'; '.join(parts)}."] if parts else []
    decisions = read_json(job / PLAN)["decisions"] if (job / PLAN).is_file() else {}
    if left_out := ", ".join(part for part, fits in decisions.items() if not fits):
        sentences.append(f"Left out, since the machine was slower than planned: {left_out}.")
    return sentences


def _metrics(run: Run, record: Mapping[str, Any]) -> dict[str, str]:
    """The metrics of the test as text, the main one first."""
    precision = run.metadata.get("test_mean_average_precision")
    if precision is None:
        low, high = record["accuracy_interval"]
        main = {"Test accuracy": f"{run.test.accuracy:.1%}", "95% confidence interval": f"{low:.1%} to {high:.1%}"}
    else:
        main = {"Mean average precision": f"{precision:.1%}"}
    present = {title: record[name] for name, title in METRICS.items() if record.get(name) is not None}
    numbers = main | {title: f"{value:.1%}" for title, value in present.items()}
    if coverage := record.get("coverage"):
        kind = f"{coverage['expected']:.0%} prediction sets"
        numbers[f"Labels in their {kind}"] = f"{coverage['measured']:.1%}"
        numbers[f"Classes in the {kind}"] = f"{coverage['mean_size']:.1f}"
    return numbers


def _wrong_predictions(run: Run, device: torch.device | None) -> tuple[list[PageImage] | None, bool]:
    """The test images that were predicted wrongly, the worst first, and whether each is next to its attention.

    None in place of the images where all of them are missing. Raises UserError where the data set is missing.
    """
    rows = _wrong_rows(run.test)[:MAX_SHOWN]
    images = run.preprocessed(rows)
    if not images:
        return (None if len(rows) else []), False
    pairs = None if device is None else _pair_with_attention(run.folder, list(images.values()), device)
    shown = pairs or [fit(image, 192) for image in images.values()]
    width = 280 if pairs else 96
    beside = " Next to it the same image under its attention." if pairs else ""
    mistakes = []
    for row, pixels in zip(images, shown, strict=True):
        alt, caption = _describe_prediction(run, row)
        mistakes.append(PageImage(encode(pixels), alt + beside, width, caption))
    return mistakes, bool(pairs)


def _wrong_rows(test: Evaluation) -> Int[np.ndarray, " n"]:
    """Rows of the wrong predictions, the most confident first.

    With several labels: of the images with a wrong label, first by their number, then by loss, the highest first.
    """
    if test.predicted_sets is None:
        wrong = np.flatnonzero(~test.correct)
        return wrong[np.argsort(-test.confidences[wrong], kind="stable")]
    wrong = np.flatnonzero(test.wrong_labels)
    return wrong[np.lexsort((-test.losses[wrong], -test.wrong_labels[wrong]))]  # lexsort's last key is the first order


def _describe_prediction(run: Run, row: int) -> tuple[str, str]:
    """The alternative text and the caption of a test image."""
    test = run.test
    label = run.label(row)
    if test.predicted_sets is None:
        prediction = test.classes[test.predictions[row]]
        caption = f"predicted {prediction}\n{test.confidences[row]:.1%} sure\nlabel {label}"
    else:
        labels = set(test.all_labels.of_image(row).tolist())
        predicted = set(test.predicted_sets.of_image(row).tolist())
        lines = [
            f"{title}: {', '.join(test.classes[c] for c in sorted(classes))}"
            for title, classes in {"missing": labels - predicted, "too many": predicted - labels}.items()
            if classes
        ]
        caption = "\n".join([*lines, f"labels: {label}"])
        prediction = ", ".join(test.classes[c] for c in sorted(predicted)) or "none of the classes"
    return f"An image of {label} predicted as {prediction}.", caption


def _pair_with_attention(
    folder: Path, images: Sequence[UInt8[np.ndarray, "h w 3"]], device: torch.device
) -> list[UInt8[np.ndarray, "H W 4"]] | None:
    """Each image next to itself under its attention rollout; None for a ResNet, or if attention is not finite."""
    model = load_model(folder)
    if not isinstance(model, ViT):
        return None
    pixels = to_range(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float())
    try:
        prepare_for_inference(model, device, torch.float32)
        rollout = capture(model, pixels.split(8), keep=len(images)).rollout
    except UserError:
        return None
    large = [fit(image, 2 * PAIR, enlarge=True) for image in images]
    return [side_by_side(image, masked(image, weights), gap=8) for image, weights in zip(large, rollout, strict=True)]


def data_section(run: Run, search: bool = True) -> DataSection:
    """The near-duplicates between training and test images, with `search`; the labels that are probably wrong; and the
    unreadable files of result.json."""
    section = DataSection("They were not searched, for lack of time: `vitlab inspect RUN` does.")
    if search:
        try:
            section = _near_duplicates(run)
        except (ValueError, OSError, KeyError) as error:
            section = DataSection(f"They were not searched: {error}")
    try:
        suspects = read_suspects(run.job / SUSPECTS) if (run.job / SUSPECTS).is_file() else []
        section = replace(section, suspects=_suspect_images(run, suspects[:MAX_SHOWN]), suspect_count=len(suspects))
    except (ValueError, OSError, KeyError) as error:  # the data set is missing, or somebody has edited the table
        section = replace(section, explanation=f"{section.explanation} Labels to check are not shown: {error}")
    if (unreadable := read_json(run.folder / "result.json").get("unreadable")) is not None:
        section = replace(section, unreadable=[(file["path"], file["reason"]) for file in unreadable])
    return section


def _suspect_images(run: Run, suspects: Sequence[Mapping[str, str]]) -> list[PageImage]:
    """Each with its label, and the class that it looks like. Raises UserError where the data is missing."""
    if not suspects:
        return []
    train = _load_splits(run)[1].train
    indices = {image_id(train, index): index for index in range(len(train))}
    shown = []
    for row in suspects:
        label, other, chance = row["label"], row["looks_like"], float(row["looks_like_probability"])
        same = f"\nsame as {row['same_as']}" if row["same_as"] else ""
        with contextlib.suppress(KeyError, ImageError):
            pixels = encode(fit(train.image(indices[row["image"]]), 192))
            caption = f"label {label}\nlooks like {other} ({chance:.0%}){same}\n{row['image']}"
            shown.append(PageImage(pixels, f"A training image with the label {label}.", 150, caption))
    return shown


def _load_splits(run: Run) -> tuple[DataConfig, Splits]:
    """The images of the run, and how they were read. Raises UserError where they are missing."""
    data = replace(from_dict(DataConfig, run.settings["data"]), eval_split="test", on_error="skip")
    return data, load_splits(data, multi_label=bool(run.metadata.get("multi_label")))


def _near_duplicates(run: Run) -> DataSection:
    """Raises UserError where the data is missing, and where the search would not be quick or useful."""
    data, splits = _load_splits(run)
    train_set, test_set = splits.train, splits.test
    command = ["vitlab", "duplicates", data.name, data.name, "--train-split", data.train_split]
    if data.root is not None:
        command += ["--train-root", data.root, "--test-root", data.root]
    advice = f"`{shlex.join(command)}` searches them."
    count = len(train_set) + len(test_set)
    if count > MAX_COMPARED or test_set.is_remote:
        raise UserError(f"there are {count:,} training and test images to read. {advice}")
    if test_set.pixels is not None and max(test_set.pixels.shape[1:3]) < SIDE:
        raise UserError(f"images of fewer than {SIDE} pixels look too much alike.")
    try:
        result, found = find_pairs(train_set, test_set, THRESHOLD, MAX_CANDIDATES)
    except UserError as error:
        raise UserError(f"{error} {advice}") from error
    explanation = (
        "Test images that are also training images, except for size, compression, brightness, a narrow crop or "
        "mirroring. The model has seen them, so the accuracy on them says nothing about new images. Left: the test "
        "image, right: the training image."
    )
    pairs = page_images(one_per_test_image(found)[:MAX_SHOWN], train_set, test_set)
    return DataSection(explanation, format_counts(result), pairs)
