"""What the page shows of an image and a checkpoint, and what its controls do."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8

from vitlab.app.checkpoints import Loaded, ModelCache
from vitlab.app.uploads import read_upload
from vitlab.data.decode import IMAGE_FORMATS, decode_image
from vitlab.data.transforms import to_pixels
from vitlab.errors import UserError
from vitlab.inspect import figures, overlays
from vitlab.inspect.capture import capture
from vitlab.inspect.figures import PageImage
from vitlab.inspect.page import render
from vitlab.inspect.report import details_of, numbers_of
from vitlab.models.vit import ViT

MAX_ASPECT = 32
"""Longer strips are refused: resized to a model's height, one of 10 million pixels fills the memory."""
TOP = 5
"""Predictions shown."""


@dataclass(frozen=True, eq=False)
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
            raise UserError(f"{name} has {len(data) / 2**20:.1f} MB. Allowed are {self}.")
        try:
            image = decode_image(data, path=name, max_pixels=int(self.megapixels * 1e6))
        except ValueError as error:
            raise UserError(f"{error}. Allowed are {self}.") from error
        height, width = image.shape[:2]
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise UserError(
                f"{name} is a strip of {width} x {height} pixels; crop it. Allowed are images up to {MAX_ASPECT} times "
                f"as long as they are wide."
            )
        return image


def inspect_image(loaded: Loaded, image: UInt8[np.ndarray, "H W 3"], name: str) -> str:
    """The viewer of an image as HTML; only the predictions for a ResNet.

    Raises UserError where predictions are not finite.
    """
    images = loaded.transform.apply([image])
    device = next(loaded.model.parameters()).device
    seen, given = to_pixels(images)[0], f"{image.shape[1]} × {image.shape[0]}"
    caption = f"{given} pixels were given; the model sees {seen.shape[1]} × {seen.shape[0]}."
    captured, probabilities = None, None
    if isinstance(loaded.model, ViT):
        captured = capture(loaded.model, [images.to(device)], keep=1)
        probabilities = None if captured.probabilities is None else captured.probabilities[0]
    elif loaded.classes:
        with torch.inference_mode():
            probabilities = loaded.model(images.to(device)).float().softmax(dim=1)[0].cpu().numpy()
    if probabilities is not None and not np.isfinite(probabilities).all():
        raise UserError(f"the predictions of {loaded.name} are not finite; its weights are corrupt.")
    order = [] if probabilities is None else np.argsort(-probabilities, kind="stable")[:TOP].tolist()
    predictions = [(loaded.classes[i], float(probabilities[i])) for i in order] if probabilities is not None else []
    if captured is None:
        alt, data = f"{name}, as the model sees it.", overlays.encoded(overlays.fit(seen, overlays.SIDE))
        content = {"image": PageImage(data, alt, overlays.SIDE, caption), "view": None, "distances": None}
    else:
        view = overlays.view(captured, 0, name, seen, predictions, caption=caption)
        distances = figures.distances(captured.image_distances[0], captured.layers).image
        content = {"image": None, "view": view, "distances": distances}
    return str(render("result.html.j2", predictions=predictions, classes=len(loaded.classes), **content))


def describe(loaded: Loaded) -> str:
    """The model's kind, sizes, cost, and the source of its weights, as HTML."""
    config = loaded.model.config
    rows = {"Checkpoint": loaded.name} | numbers_of(config) | details_of(config)
    rows |= {"images": loaded.transform.preprocessing.describe(), "weights from": loaded.source}
    return str(render("card.html.j2", rows=rows))


@dataclass(frozen=True)
class Dropped:
    """An uploaded file, to be shown to the next checkpoint too."""

    name: str
    data: bytes


class Session:
    """What the controls do. Returns new contents of the page: message, result and card, as HTML."""

    def __init__(self, models: ModelCache, limits: Limits) -> None:
        self.models, self.limits = models, limits

    def message(self, name: str = "", refusal: str = "") -> str:
        formats = ", ".join(IMAGE_FORMATS)
        return str(render("message.html.j2", name=name, refusal=refusal, limits=self.limits, formats=formats))

    def first_card(self) -> str:
        """The card of a single checkpoint; of several none is loaded yet."""
        return describe(self.models.get(self.models.names[0])) if len(self.models.names) == 1 else ""

    def drop(self, upload: str, folder: Path, checkpoint: str) -> tuple[Dropped | None, str, str, str | None]:
        """A file was uploaded to `folder`. Returns it too; the card is None where it stays as it is."""
        try:
            dropped = Dropped(Path(upload).name, read_upload(upload, folder, self.limits.max_bytes))
        except UserError as error:
            return None, self.message(refusal=str(error)), "", None
        return dropped, *self.choose(dropped, checkpoint)

    def choose(self, dropped: Dropped | None, checkpoint: str) -> tuple[str, str, str]:
        """Another checkpoint was chosen, or another image."""
        card = ""
        try:
            loaded = self.models.get(checkpoint)
            card = describe(loaded)
            if dropped is None:
                return self.message(), "", card
            image = self.limits.read(dropped.data, dropped.name)
            return self.message(dropped.name), inspect_image(loaded, image, dropped.name), card
        except ValueError as error:
            return self.message(refusal=str(error)), "", card
