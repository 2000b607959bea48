"""Predictions for images without a label, in files and folders."""

import math
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from vitlab.data.contents import contents_of, images_below, no_images
from vitlab.data.decode import ImageError, Levels, decode_image, stretch, to_array
from vitlab.data.transforms import EvalTransform
from vitlab.errors import UserError, quoted
from vitlab.evaluation.load import device_of, load_for_evaluation
from vitlab.evaluation.options import ModelOptions
from vitlab.io import write_csv
from vitlab.models.vit import Model
from vitlab.weights import class_names, class_probabilities

BATCH_SIZE = 32
ImageSource = str | Path | Image.Image | np.ndarray
"""An image or a folder of them: a path, or one image as a PIL image or its uint8 pixels [H, W, 3]."""


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image, or why it could not be read."""

    path: str
    top: tuple[tuple[str, float], ...] = ()
    """(class name, probability), most probable first."""
    error: str | None = None
    rejected: bool = False
    """Whether the highest probability is below `reject_below`."""

    def describe(self) -> str:
        """The classes, or the error, as text."""
        if self.error is not None:
            return f"cannot be read: {self.error}"
        text = ", ".join(f"{quoted(name)} {probability:.1%}" for name, probability in self.top)
        return f"not sure ({text})" if self.rejected else text

    def as_line(self) -> str:
        return f"{quoted(self.path)}: {self.describe()}"


def predict(
    checkpoint: str | Path,
    sources: Iterable[ImageSource],
    options: ModelOptions = ModelOptions(),
    *,
    top: int = 5,
    reject_below: float | Literal["auto"] | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> Iterator[Prediction]:
    """The `top` most probable classes of every image in `sources`: files, folders with subfolders, PIL images, arrays.

    `reject_below`: predictions of a lower probability are `rejected`; auto is the threshold in the checkpoint's
    metadata (`choose_rejection`). `log` receives a description of the preprocessing. An unreadable file gives a
    prediction with its error. They have the order of `sources`. Raises UserError for missing paths, without any image,
    for an invalid array, and for auto without a threshold.
    """
    if top < 1:
        raise UserError(f"top is {top}; give at least 1.")
    if isinstance(reject_below, float | int) and not 0 <= reject_below <= 1:
        raise UserError(f"reject_below is {reject_below}; give a probability from 0 to 1, or auto.")
    loaded = load_for_evaluation(checkpoint, options, require_head=True)
    threshold = _stored_threshold(loaded.metadata, str(checkpoint)) if reject_below == "auto" else reject_below or 0.0
    levels = loaded.preprocessing.range
    files = list(find_images(sources, levels))
    model, config = loaded.model, loaded.model.config
    _check_trained_head(model, str(checkpoint))
    names = class_names(loaded.metadata, config.num_classes)
    transform = EvalTransform(config.image_hw, loaded.preprocessing)
    log(f"images: {loaded.preprocessing.describe()}")
    if "classes" not in loaded.metadata and names[0] != "0":
        log(f"classes: ImageNet's {len(names):,}, because the checkpoint names none and has as many outputs")
    batch: list[tuple[str, torch.Tensor]] = []

    def flush() -> Iterator[Prediction]:
        if batch:
            images = torch.cat([image for _, image in batch]).to(device_of(model))
            with torch.inference_mode():
                logits = model(images).float()
            classes = logits.topk(min(top, len(names)), dim=1).indices  # probabilities may round to several of 1
            values = class_probabilities(logits, loaded.metadata).gather(1, classes)
            for (path, _), row, numbers in zip(batch, values.tolist(), classes.tolist(), strict=True):
                if not all(map(math.isfinite, row)):
                    yield Prediction(path, error=f"the model's outputs are not finite in {options.precision}")
                    continue
                best = tuple(zip([names[number] for number in numbers], row, strict=True))
                yield Prediction(path, best, rejected=row[0] < threshold)
        batch.clear()

    for path, file in files:
        try:
            pixels = file if isinstance(file, np.ndarray) else decode_image(file, levels=levels)
            batch.append((path, transform.apply([pixels])))
        except ImageError as error:
            yield from flush()  # the images before it
            yield Prediction(path, error=error.reason)
        if len(batch) == BATCH_SIZE:
            yield from flush()
    yield from flush()


def _check_trained_head(model: Model, checkpoint: str) -> None:
    """Raises UserError for a new head: of zeros, with one bias for all classes."""
    heads = [head for head in (model.head, getattr(model, "head_distilled", None)) if head is not None]
    if not any(bool(head.weight.any()) or bool((head.bias != head.bias[0]).any()) for head in heads):
        raise UserError(
            f"the head of {checkpoint} is zero, as before its first training step: it predicts the same for every "
            f"image. Fine-tune it first (`vitlab finetune {shlex.quote(checkpoint)} --dataset folder:IMAGES`)."
        )


def _stored_threshold(metadata: dict[str, Any], checkpoint: str) -> float:
    """`reject_below` of a checkpoint's metadata. Raises UserError without it."""
    threshold = metadata.get("reject_below")
    if not isinstance(threshold, float | int) or not 0 <= threshold <= 1:
        raise UserError(
            f"the metadata of {checkpoint} has no threshold `reject_below` from 0 to 1: the sweep of "
            f"`vitlab finetune` (without --optim.lr, in a --budget that suffices) chooses it, if any threshold makes "
            f"95 % of the predictions right. Or give a probability, for example --reject-below 0.5."
        )
    return threshold


def write_table(path: Path, predictions: list[Prediction]) -> None:
    """Writes a CSV file with a row for each image: its path, its classes and probabilities, `rejected` and `error`."""
    width = max((len(prediction.top) for prediction in predictions), default=0)
    ranked = [name for k in range(1, width + 1) for name in (f"class_{k}", f"probability_{k}")]
    rows = []
    for prediction in predictions:
        cells = [cell for pair in prediction.top for cell in pair] or [""] * 2 * width
        rows.append([prediction.path, *cells, int(prediction.rejected), prediction.error or ""])
    write_csv(path, ("image", *ranked, "rejected", "error"), rows)


def find_images(
    sources: Iterable[ImageSource], levels: Levels | None = None
) -> Iterator[tuple[str, Path | np.ndarray]]:
    """Name and path (or pixels, black and white at `levels`) of every image in `sources`, as `predict` takes them; no
    file is decoded."""
    sources = list(sources)
    if not sources:
        raise UserError("no image was named; give images or folders of them.")
    for number, source in enumerate(sources):
        if isinstance(source, (Image.Image, np.ndarray)):
            yield (name := f"image {number}"), _pixels(source, name, levels)
            continue
        path = Path(source)
        if path.is_dir():
            files = sorted(map(Path, images_below(path)))
            if not files:
                raise no_images(path, contents_of(path).others)
            yield from ((str(file), file) for file in files)
        elif path.exists():  # anything but a regular file is an error of its reader
            yield str(path), path
        else:
            raise UserError(f"there is no file or folder {quoted(str(source))}.")


def _pixels(image: Image.Image | np.ndarray, name: str, levels: Levels | None) -> np.ndarray:
    """uint8 [H, W, 3]. Raises UserError for an array of another type or shape, and for one without pixels."""
    pixels = to_array(image, name, levels) if isinstance(image, Image.Image) else image
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise UserError(
            f"{name} is {pixels.dtype} {list(pixels.shape)}; give uint8 [height, width, 3], none of them 0."
        )
    pixels = pixels if isinstance(image, Image.Image) else stretch(pixels, levels, name)
    return np.ascontiguousarray(pixels)  # torch takes no negative strides
