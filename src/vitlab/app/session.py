"""What the page shows of an image and a checkpoint."""

import threading
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8

from vitlab.data.decode import IMAGE_FORMATS, Levels, decode_image
from vitlab.data.transforms import EvalTransform, to_pixels
from vitlab.errors import UserError
from vitlab.evaluation.load import load_for_evaluation
from vitlab.evaluation.multi_label import describe_thresholds, predicted_label_names, stored_thresholds
from vitlab.evaluation.options import ModelOptions
from vitlab.evaluation.predict import top_classes
from vitlab.inspection import figures
from vitlab.inspection.capture import capture
from vitlab.inspection.page import render
from vitlab.inspection.report import details_of, numbers_of
from vitlab.inspection.viewer import view
from vitlab.train.precision import choose_device
from vitlab.weights import Checkpoint, class_names
from vitlab.weights.detect import find_checkpoint

MAX_ASPECT = 32
"""Longer strips are refused: resized to a model's height, one of 10 million pixels fills the memory."""
MAX_BYTES = 50 * 2**20
"""Largest file."""
TOP = 5
"""Predictions shown."""


def read_image(data: bytes, name: str, levels: Levels | None = None) -> UInt8[np.ndarray, "H W 3"]:
    """The decoded image. Raises UserError for a file that is too large, and for a long strip; ImageError for others."""
    if len(data) > MAX_BYTES:
        raise UserError(f"{name} has more than {MAX_BYTES >> 20} MiB; give a smaller one.")
    image = decode_image(data, path=name, levels=levels)
    height, width = image.shape[:2]
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise UserError(f"{name} is a strip of {width} x {height} pixels, longer than {MAX_ASPECT} to 1; crop it.")
    return image


def read_examples() -> dict[str, bytes]:
    """Name -> file of the photos that come with scikit-learn."""
    from sklearn.datasets import images

    return {name: (files(images) / name).read_bytes() for name in ("flower.jpg", "china.jpg")}


def find_checkpoints(path: str | Path) -> dict[str, str]:
    """Name -> location of the checkpoint at `path`, or of all directly in that folder.

    A corrupt file is included and raises when it is loaded; an unreadable folder is not. Raises UserError for none.
    """
    folder = Path(path)
    entries = sorted(folder.iterdir()) if folder.is_dir() and not _is_checkpoint(folder) else []
    if checkpoints := {entry.name: str(entry) for entry in entries if _is_checkpoint(entry)}:
        return checkpoints
    find_checkpoint(path)  # raises with the reason: missing, a pickle, a training that has not ended
    return {folder.resolve().name: str(path)}


def _is_checkpoint(path: Path) -> bool:
    try:
        return bool(find_checkpoint(path))
    except (UserError, OSError):
        return False


class Session:
    """Handles requests, one at a time; the last used checkpoint stays in memory."""

    def __init__(self, path: str | Path, device: str = "auto") -> None:
        """Raises UserError if `path` holds no checkpoints, or if the only one cannot be loaded."""
        choose_device(device)  # a missing one is an error before the page opens
        self.options = ModelOptions(device=device)
        self.paths = find_checkpoints(path)
        self._lock = threading.Lock()
        self._loaded: dict[str, Checkpoint] = {}
        if len(self.paths) == 1:
            self._load(next(iter(self.paths)))

    def _load(self, name: str) -> Checkpoint:
        """The checkpoint of that name, its model on the device. Raises UserError where it cannot be loaded."""
        if name not in self.paths:
            raise UserError(f"unknown checkpoint {name!r}; choose one of {', '.join(self.paths)}.")
        if name not in self._loaded:
            self._loaded.clear()  # frees memory before loading
            try:
                self._loaded[name] = load_for_evaluation(self.paths[name], self.options)
            except (OSError, RuntimeError, KeyError, TypeError) as error:  # out of memory; some corrupt files
                raise UserError(f"the checkpoint {self.paths[name]} cannot be loaded: {error}") from error
        return self._loaded[name]

    def message(self, name: str = "", refusal: str = "") -> str:
        formats = f"{', '.join(IMAGE_FORMATS)}, at most {MAX_BYTES >> 20} MiB"
        return render("message.html.j2", name=name, refusal=refusal, formats=formats)

    def inspect(self, checkpoint: str, name: str, data: bytes) -> dict[str, str]:
        """Parts of the page as HTML: message, result, and model; without an image's `name`, the result is empty."""
        result = model = ""
        try:
            with self._lock:
                loaded = self._load(checkpoint)
                model = describe(loaded, checkpoint, self.paths[checkpoint])
                if name:
                    result = inspect_image(loaded, read_image(data, name, loaded.preprocessing.range), name)
            message = self.message(name)
        except (ValueError, OSError, RuntimeError, MemoryError) as error:  # the last two: out of memory
            message = self.message(refusal=str(error) or type(error).__name__)
        return {"message": message, "result": result, "model": model}


def describe(checkpoint: Checkpoint, name: str, path: str) -> str:
    """The model's sizes, cost, preprocessing, and the source of its weights, as HTML."""
    config = checkpoint.model.config
    details = details_of(config) | {"images": checkpoint.preprocessing.describe()}
    details["weights from"] = str(checkpoint.metadata.get("source", path))
    return render("model.html.j2", model_numbers={"Checkpoint": name} | numbers_of(config), details=details)


def inspect_image(checkpoint: Checkpoint, image: UInt8[np.ndarray, "H W 3"], name: str) -> str:
    """The viewer of an image as HTML. Raises UserError for a ResNet, and for predictions that are not finite."""
    model = checkpoint.model
    images = EvalTransform(model.config.image_hw, checkpoint.preprocessing).apply([image])
    pixels = to_pixels(images)[0]
    captured = capture(model, [images], keep=1)
    caption = f"{image.shape[1]} × {image.shape[0]} pixels; the model sees {pixels.shape[1]} × {pixels.shape[0]}."
    classes = class_names(checkpoint.metadata, model.config.num_classes)
    (predictions,) = top_classes(torch.from_numpy(captured.logits), checkpoint.metadata, TOP)
    labels = predicted_label_names(captured.logits, classes, checkpoint.metadata)
    thresholds = labels and describe_thresholds(stored_thresholds(checkpoint.metadata, len(classes)))
    return render(
        "result.html.j2",
        predictions=predictions,
        classes=len(classes),
        thresholds=thresholds,
        view=view(captured, 0, name, pixels, predictions, caption, None if labels is None else labels[0]),
        distances=figures.distances(captured.image_distances[0], captured.layers).image,
    )
