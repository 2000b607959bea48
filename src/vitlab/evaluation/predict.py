"""Predictions for images without a label."""

import contextlib
import csv
import dataclasses
import functools
import itertools
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlab.data.decode import ImageError
from vitlab.data.transforms import EvalTransform
from vitlab.data.workers import in_threads
from vitlab.errors import UserError, quoted
from vitlab.evaluation.calibration import Calibrator
from vitlab.evaluation.load import computed_in, device_of, load_for_evaluation
from vitlab.evaluation.multi_label import describe_thresholds, label_names, stored_thresholds
from vitlab.evaluation.options import ModelOptions
from vitlab.evaluation.sources import ImageSource, find_images, read_image
from vitlab.io import as_cells, writing
from vitlab.models.vit import Model
from vitlab.weights import Checkpoint, class_names, class_probabilities

BATCH_SIZE = 32


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image, or why it could not be read."""

    path: str
    top: tuple[tuple[str, float], ...] = ()
    """(class name, probability), most probable first."""
    error: str | None = None
    rejected: bool = False
    """Whether the highest probability is below `reject_below`."""
    labels: tuple[str, ...] | None = None
    """Labels whose probability reaches their threshold, or the prediction set, most probable first; else None."""

    def describe(self) -> str:
        """The classes, or the error, as text."""
        if self.error is not None:
            return f"cannot be read: {self.error}"
        text = ", ".join(f"{quoted(name)} {probability:.1%}" for name, probability in self.top)
        if self.labels is not None:
            return f"{', '.join(map(quoted, self.labels)) or 'no label'} ({text})"
        return f"not sure ({text})" if self.rejected else text

    def record(self) -> dict[str, Any]:
        """The prediction as plain data; `labels` where the model has several."""
        record = dataclasses.asdict(self)
        return record if self.labels is not None else {name: record[name] for name in record if name != "labels"}

    def as_line(self) -> str:
        return f"{quoted(self.path)}: {self.describe()}"


def predict(
    checkpoint: str | Path,
    sources: Iterable[ImageSource],
    options: ModelOptions = ModelOptions(),
    *,
    top: int = 5,
    reject_below: float | Literal["auto"] | None = None,
    coverage: float | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> Iterator[Prediction]:
    """The `top` most probable classes of every image in `sources`, in any form of `ImageSource`.

    `reject_below`: predictions of a lower probability are `rejected`; auto is the threshold in the checkpoint's
    metadata (`choose_rejection`). A model of several labels per image (`multi_label`) sets each from its threshold in
    the metadata, or 0.5. `coverage`: the `labels` of an image are a set of classes that has the right one in this
    fraction of images, by the held-out images in the metadata (`Calibrator`). `log` receives a description of the
    preprocessing. An unreadable image gives a prediction with its error. Predictions have the order of `sources`.

    A generator: with the first prediction it raises UserError without any image, for auto without a threshold, for
    `reject_below` and `coverage` with several labels, for a `coverage` without held-out images, and for missing paths
    and invalid arrays, unless they come from an iterator.
    """
    _check_numbers(top, reject_below, coverage)
    loaded = load_for_evaluation(checkpoint, options, require_head=True)
    multi_label = bool(loaded.metadata.get("multi_label"))
    if multi_label and reject_below is not None:
        raise UserError(
            f"{checkpoint} has several labels for an image, each set from a threshold of its own, so that reject_below "
            f"does not apply; leave it out."
        )
    if reject_below == "auto":
        reject_below = _stored_rejection(loaded.metadata, str(checkpoint))
    prediction_sets = None if coverage is None else _prediction_sets(loaded.metadata, str(checkpoint), coverage)
    images = find_images(sources)
    if isinstance(sources, Sequence):
        images = list(images)  # raises before any work
    _check_trained_head(loaded.model, str(checkpoint))
    num_classes = loaded.model.config.num_classes
    names = class_names(loaded.metadata, num_classes)
    log(f"images: {loaded.preprocessing.describe()}")
    thresholds = None
    if multi_label:
        thresholds = stored_thresholds(loaded.metadata, num_classes)
        log(f"thresholds of the labels: {describe_thresholds(thresholds)}")
    if "classes" not in loaded.metadata and names[0] != "0":
        log(f"classes: ImageNet's {len(names):,}, because the checkpoint names none and has as many outputs")
    predict_batch = functools.partial(_predict_batch, loaded, top, reject_below or 0.0, thresholds, prediction_sets)
    batch: list[tuple[str, Tensor]] = []
    for path, image in _prepare(loaded, images):
        if isinstance(image, Tensor):
            batch.append((path, image))
        else:
            yield from predict_batch(batch)  # the images before it
            batch = []
            yield Prediction(path, error=image.reason)
        if len(batch) == BATCH_SIZE:
            yield from predict_batch(batch)
            batch = []
    yield from predict_batch(batch)


def _check_numbers(top: int, reject_below: float | Literal["auto"] | None, coverage: float | None) -> None:
    """Raises UserError for a number that is not possible."""
    if top < 1:
        raise UserError(f"top is {top}; give at least 1.")
    if isinstance(reject_below, float | int) and not 0 <= reject_below <= 1:
        raise UserError(f"reject_below is {reject_below}; give a probability from 0 to 1, or auto.")
    if coverage is not None and not 0 < coverage < 1:
        raise UserError(f"coverage is {coverage}; give a fraction between 0 and 1, such as 0.9.")


def _prepare(
    loaded: Checkpoint, images: Iterable[tuple[str, ImageSource | UserError]]
) -> Iterator[tuple[str, Tensor | ImageError]]:
    """Each image as the model takes it, or why it cannot be read. From an iterator images come one by one."""
    transform = EvalTransform(loaded.model.config.image_hw, loaded.preprocessing)

    def prepare(named: tuple[str, ImageSource | UserError]) -> tuple[str, Tensor | ImageError]:
        path, image = named
        try:
            return path, transform.apply([read_image(image, path, loaded.preprocessing.range)])
        except ImageError as error:
            return path, error

    at_once, remaining = BATCH_SIZE if isinstance(images, list) else 1, iter(images)
    while some := list(itertools.islice(remaining, at_once)):
        yield from in_threads(prepare, some)


def _predict_batch(
    loaded: Checkpoint,
    top: int,
    reject_below: float,
    thresholds: Sequence[float] | None,
    prediction_sets: Callable[[np.ndarray], np.ndarray] | None,
    batch: Sequence[tuple[str, Tensor]],
) -> Iterator[Prediction]:
    """The predictions for preprocessed images; `thresholds` are for several labels, `prediction_sets` for one."""
    if not batch:
        return
    metadata = loaded.metadata
    pixels = torch.cat([image for _, image in batch]).to(device_of(loaded.model))
    with torch.inference_mode():
        logits = loaded.model(pixels).float()
    sets: Sequence[tuple[str, ...] | None] = [None] * len(batch)
    if metadata.get("multi_label"):
        sets = label_names(logits, thresholds, class_names(metadata, logits.shape[1]))
    elif prediction_sets is not None:
        chosen = prediction_sets(class_probabilities(logits, metadata).cpu().numpy())
        names, order = class_names(metadata, logits.shape[1]), logits.argsort(dim=1, descending=True, stable=True)
        sets = [tuple(names[c] for c in row if has[c]) for row, has in zip(order.tolist(), chosen, strict=True)]
    for (path, _), best, labels in zip(batch, top_classes(logits, metadata, top), sets, strict=True):
        if all(math.isfinite(probability) for _, probability in best):
            yield Prediction(path, best, rejected=best[0][1] < reject_below, labels=labels)
        else:
            yield Prediction(path, error=f"the model's outputs are not finite in {computed_in(loaded.model)}")


def top_classes(
    logits: Float[Tensor, "n K"], metadata: Mapping[str, Any], top: int
) -> list[tuple[tuple[str, float], ...]]:
    """The `top` most probable classes of each image and their probabilities, most probable first."""
    names = class_names(metadata, logits.shape[1])
    best = logits.topk(min(top, len(names)), dim=1).indices  # by the logits: probabilities may round to several of 1
    values = class_probabilities(logits, metadata).gather(1, best)
    rows = zip(best.tolist(), values.tolist(), strict=True)
    return [tuple((names[int(c)], float(p)) for c, p in zip(*row, strict=True)) for row in rows]


def _check_trained_head(model: Model, checkpoint: str) -> None:
    """Raises UserError for a new head: of zeros, with one bias for all classes."""
    heads = [head for head in (model.head, getattr(model, "head_distilled", None)) if head is not None]
    if not any(bool(head.weight.any()) or bool((head.bias != head.bias[0]).any()) for head in heads):
        raise UserError(
            f"the head of {checkpoint} is zero, as before its first training step: it predicts the same for every "
            f"image. Fine-tune it first (`vitlab finetune {shlex.quote(checkpoint)} --dataset folder:IMAGES`)."
        )


def _stored_rejection(metadata: dict[str, Any], checkpoint: str) -> float:
    """`reject_below` of a checkpoint's metadata. Raises UserError without it."""
    threshold = metadata.get("reject_below")
    if not isinstance(threshold, float | int) or not 0 <= threshold <= 1:
        raise UserError(
            f"the metadata of {checkpoint} has no threshold `reject_below` from 0 to 1: the sweep of "
            f"`vitlab finetune` (without --optim.lr, in a --budget that suffices) chooses it, if any threshold makes "
            f"95% of the predictions right. Or give a probability, for example --reject-below 0.5."
        )
    return threshold


def _prediction_sets(
    metadata: dict[str, Any], checkpoint: str, coverage: float
) -> Callable[[Float[np.ndarray, "n K"]], Bool[np.ndarray, "n K"]]:
    """Probabilities -> the prediction sets of a checkpoint. Raises UserError without held-out images, or with too few
    for this coverage."""
    masses = metadata.get("coverage_masses")
    if metadata.get("multi_label") or not masses:
        raise UserError(
            f"the metadata of {checkpoint} has no held-out images to choose prediction sets by: `vitlab finetune` "
            f"stores them for one label per image. Leave coverage out."
        )
    calibrator = Calibrator(None, sorted(masses))
    if math.isinf(calibrator.limit(coverage)):
        most = len(masses) / (len(masses) + 1)
        raise UserError(f"{len(masses)} held-out images allow a coverage of at most {most:.3f}, not {coverage}.")
    return functools.partial(calibrator.sets, coverage=coverage)


@contextlib.contextmanager
def writing_table(path: Path) -> Iterator[Callable[[Prediction], None]]:
    """Yields a function that writes an image's row to the CSV file `path`: classes, probabilities, `rejected`, `error`.
    A model of several labels adds the labels that are set, joined by |.

    The file is opened at once; with its first row it replaces an earlier one. Each row is written as it comes, so that
    what is done is kept when the command ends early; but unreadable images wait for the first one with classes, which
    shows the number of columns.
    """
    columns_of: Prediction | None = None  # its classes and labels are the columns; None: no header yet
    waiting: list[Prediction] = []  # not written yet: before the header, unreadable images
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path.parent), path.open("a", encoding="utf-8", errors="surrogateescape", newline="") as file:
        table = csv.writer(file, lineterminator="\n")

        def write_waiting() -> None:
            nonlocal columns_of
            if not waiting:
                return
            if columns_of is None:  # the last one has classes, unless no image could be read
                columns_of = waiting[-1]
                if file.seekable():
                    file.truncate(0)
                ranked = [f"{name}_{k}" for k in range(1, len(columns_of.top) + 1) for name in ("class", "probability")]
                table.writerow(("image", *ranked, "rejected", "error", *["labels"] * (columns_of.labels is not None)))
            for prediction in waiting:
                cells = [cell for pair in prediction.top for cell in pair] or [""] * (2 * len(columns_of.top))
                row = [prediction.path, *cells, int(prediction.rejected), prediction.error or ""]
                row += ["|".join(prediction.labels or ())] * (columns_of.labels is not None)
                table.writerow(as_cells(row))
            waiting.clear()
            file.flush()

        def write(prediction: Prediction) -> None:
            waiting.append(prediction)
            if columns_of is not None or prediction.top:
                write_waiting()

        try:
            yield write
        finally:
            write_waiting()
            if columns_of is None and is_new:
                path.unlink()
