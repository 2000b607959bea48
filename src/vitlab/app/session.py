"""What the page shows of an image and a checkpoint."""

import math
import threading
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import UInt8

from vitlab.app.checkpoints import Loaded, ModelCache
from vitlab.data.decode import IMAGE_FORMATS, decode_image
from vitlab.data.transforms import to_pixels
from vitlab.errors import UserError
from vitlab.inspect import figures, overlays
from vitlab.inspect.capture import capture
from vitlab.inspect.page import render
from vitlab.inspect.report import details_of, numbers_of
from vitlab.models.vit import ViT

MAX_ASPECT = 32
"""Longer strips are refused: resized to a model's height, one of 10 million pixels fills the memory."""
TOP = 5
"""Predictions shown."""


@dataclass(frozen=True)
class Limits:
    """The largest image that is accepted."""

    megapixels: float = 50.0
    megabytes: float = 20.0

    def __post_init__(self) -> None:
        for name in ("megapixels", "megabytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"the limit of {name} is {getattr(self, name)}; give a number above 0.")

    def __str__(self) -> str:
        return f"images of at most {self.megapixels:g} megapixels and {self.megabytes:g} MB"

    @property
    def max_bytes(self) -> int:
        return int(self.megabytes * 2**20)

    def read(self, data: bytes, name: str) -> UInt8[np.ndarray, "H W 3"]:
        """The decoded image. Raises UserError where `data` is not an image or exceeds the limits, before decoding."""
        if len(data) > self.max_bytes:
            raise UserError(f"{name} has more than {self.megabytes:g} MB. Allowed are {self}.")
        try:
            image = decode_image(data, path=name, max_pixels=int(self.megapixels * 1e6))
        except ValueError as error:
            raise UserError(f"{error}. Allowed are {self}.") from error
        height, width = image.shape[:2]
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise UserError(f"{name} is a strip of {width} x {height} pixels, longer than {MAX_ASPECT} to 1; crop it.")
        return image


class Session:
    """Answers requests, one at a time."""

    def __init__(self, models: ModelCache, limits: Limits) -> None:
        self.models, self.limits, self._lock = models, limits, threading.Lock()

    def message(self, name: str = "", refusal: str = "") -> str:
        formats = ", ".join(IMAGE_FORMATS)
        return render("message.html.j2", name=name, refusal=refusal, limits=self.limits, formats=formats)

    def inspect(self, checkpoint: str, name: str, data: bytes) -> dict[str, str]:
        """Parts of the page as HTML: message, result, and model; without an image's `name`, the result is empty."""
        result = model = ""
        try:
            with self._lock:
                loaded = self.models.get(checkpoint)
                model = describe(loaded)
                if name:
                    result = inspect_image(loaded, self.limits.read(data, name), name)
            message = self.message(name)
        except ValueError as error:
            message = self.message(refusal=str(error))
        return {"message": message, "result": result, "model": model}


def inspect_image(loaded: Loaded, image: UInt8[np.ndarray, "H W 3"], name: str) -> str:
    """The viewer of an image as HTML; only the predictions for a ResNet.

    Raises UserError where predictions are not finite.
    """
    images = loaded.transform.apply([image]).to(next(loaded.model.parameters()).device)
    pixels = to_pixels(images.cpu())[0]
    caption = (
        f"{image.shape[1]} × {image.shape[0]} pixels were given; the model sees {pixels.shape[1]} × {pixels.shape[0]}."
    )
    captured = capture(loaded.model, [images], keep=1) if isinstance(loaded.model, ViT) else None
    predictions: list[tuple[str, float]] = []
    if loaded.classes:
        if captured is not None and captured.probabilities is not None:
            probabilities = captured.probabilities[0]
        else:
            with torch.inference_mode():
                probabilities = loaded.model(images).float().softmax(dim=1)[0].cpu().numpy()
        if not np.isfinite(probabilities).all():
            raise UserError(f"the predictions of {loaded.name} are not finite; its weights are corrupt.")
        order = np.argsort(-probabilities, kind="stable")[:TOP].tolist()
        predictions = [(loaded.classes[i], float(probabilities[i])) for i in order]
    if captured is None:
        data = overlays.encoded(overlays.fit(pixels, overlays.SIDE))
        still = figures.PageImage(data, f"{name}, as the model sees it.", overlays.SIDE, caption)
        content = {"image": still, "view": None, "distances": None}
    else:
        view = overlays.view(captured, 0, name, pixels, predictions, caption)
        distances = figures.distances(captured.image_distances[0], captured.layers)
        content = {"image": None, "view": view, "distances": distances.image}
    return render("result.html.j2", predictions=predictions, classes=len(loaded.classes), **content)


def describe(loaded: Loaded) -> str:
    """The model's kind, sizes, cost, and the source of its weights, as HTML."""
    config = loaded.model.config
    details = details_of(config)
    details |= {"images": loaded.transform.preprocessing.describe(), "weights from": loaded.source}
    return render("model.html.j2", model_numbers={"Checkpoint": loaded.name} | numbers_of(config), details=details)
