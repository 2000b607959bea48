"""One image under one checkpoint: how it is read, what the model makes of it, and how the page shows that."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8

from vitlab.app.checkpoints import Loaded
from vitlab.data.decode import decode_image
from vitlab.data.transforms import to_pixels
from vitlab.errors import UserError
from vitlab.inspect import drawings, overlays
from vitlab.inspect.capture import Capture, capture
from vitlab.inspect.page import Markup, data_uri, escape
from vitlab.inspect.summary import details_of, numbers_of
from vitlab.models.vit import ViT

MAX_ASPECT = 32  # longer strips are refused: brought to a model's height, one of 10 million pixels fills the memory
ROLLOUT, PLAIN, LAYER, FEATURES = "Rollout", "Rollout without the residual", "One layer", "Features"
VIEWS: Mapping[str, str] = {
    ROLLOUT: "Attention rollout (Fig. 6, App. D.8): the attention of all heads, averaged and followed through all "
    "layers from the answer back to the patches; half of each layer stands for the residual connection, which hands a "
    "token on as it is. Yellow marks the patches that the answer draws on most, dark blue those that it hardly uses. "
    "It follows attention alone: what the MLPs do with it is not in it.",
    PLAIN: "The paper's sentence taken by its word: the layers' mean attentions multiplied, without the residual "
    "connection. Each layer mixes all patches anew, so the deeper the model, the more alike the patches become; read "
    "the rollout first, and this one for comparison.",
    LAYER: "Where the answer looks in one layer, by one head or by the mean over its heads: yellow most, dark blue "
    "least. Each map fills the colors by itself, and its highest twentieth is all yellow. Low layers often look near "
    "and far at once; high ones gather from what matters for the answer, and at times from patches of plain "
    "background, where a model keeps notes.",
    FEATURES: "What the last layer makes of each patch: its token's three main directions within this image as red, "
    "green and blue. Patches of one color are alike to the model; the colors themselves have no name, and "
    "those of two images cannot be compared.",
}
"""What can be shown of a image -> what it is and how to read it."""


@dataclass(frozen=True, eq=False)
class Limits:
    """What is accepted as a image."""

    megapixels: float = 50.0
    megabytes: float = 20.0

    def __post_init__(self) -> None:
        for name in ("megapixels", "megabytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"the limit of {name} is {getattr(self, name)}; give a number above 0.")

    def __str__(self) -> str:
        return f"images of at most {self.megapixels:g} megapixels and {self.megabytes:g} MB"

    @property
    def most_bytes(self) -> int:
        return int(self.megabytes * 2**20)

    def read(self, data: bytes, name: str) -> UInt8[np.ndarray, "H W 3"]:
        """The image in `data`, if it is one and within the limits, which are checked before it is decoded.

        Raises ValueError saying what was given and what is allowed.
        """
        if len(data) > self.most_bytes:
            raise UserError(f"{name} has {len(data) / 2**20:.1f} MB. Allowed are {self}.")
        try:
            image = decode_image(data, path=name, max_pixels=int(self.megapixels * 1e6))
        except ValueError as error:
            raise UserError(f"{error}. Allowed are {self}.") from error
        height, width = image.shape[:2]
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise UserError(
                f"{name} is a strip of {width} x {height} pixels; cut out the part of it that matters. Allowed are "
                f"images up to {MAX_ASPECT} times as long as they are wide."
            )
        return image


@dataclass(frozen=True, eq=False)
class Seen:
    """What one checkpoint made of one image: all that the controls of the page can ask for."""

    image: UInt8[np.ndarray, "H W 3"]
    """As the model saw it."""
    given: tuple[int, int]
    """Width and height of the file's image."""
    probabilities: Float[np.ndarray, " K"] | None
    """None for a model without a head."""
    capture: Capture | None
    """None for a model without attention."""


def see(loaded: Loaded, image: UInt8[np.ndarray, "H W 3"]) -> Seen:
    """One forward pass over one image, and everything from it. Raises ValueError where the answers are no numbers."""
    images = loaded.transform.apply([image])
    device = next(loaded.model.parameters()).device
    if isinstance(loaded.model, ViT):
        inside = capture(loaded.model, [images.to(device)], keep=1)
        probabilities = None if inside.probabilities is None else inside.probabilities[0]
    else:
        inside, probabilities = None, None
        if loaded.classes:
            with torch.inference_mode():
                probabilities = loaded.model(images.to(device)).float().softmax(dim=1)[0].cpu().numpy()
    if probabilities is not None and not np.isfinite(probabilities).all():
        raise UserError(f"the answers of {loaded.name} are not numbers; its weights are damaged.")
    return Seen(to_pixels(images)[0], (image.shape[1], image.shape[0]), probabilities, inside)


def layers_and_heads(seen: Seen | None) -> tuple[tuple[str, ...], int]:
    """The names of the layers and the number of heads that can be looked at; none without attention."""
    if seen is None or seen.capture is None:
        return (), 0
    return seen.capture.layers, seen.capture.heads.shape[2]


# ------------------------------------------------------------------------------- pieces of the page, as HTML


def answers(loaded: Loaded, seen: Seen, top: int = 5) -> Markup:
    """The most probable classes with bars, or why there are none."""
    if seen.probabilities is None:
        return Markup(
            "<p>This model has no head, so it gives no answers: it was trained to describe images, not to name them. "
            "Fine-tune it on your classes for that (<code>vitlab finetune</code>).</p>"
        )
    order = np.argsort(-seen.probabilities, kind="stable")[:top]
    items = "".join(
        f'<li><span>{escape(loaded.classes[i])}</span> <span class="share">{seen.probabilities[i]:.1%}</span>'
        f'<span class="bar" style="width: {seen.probabilities[i]:.1%}"></span></li>'
        for i in map(int, order)
    )
    return Markup(
        f'<ol class="answers" aria-label="The most probable answers">{items}</ol>'
        f'<p class="note">How the model divides its belief among the {len(loaded.classes):,} classes that it knows '
        f"(softmax). A image of none of them gets an answer too.</p>"
    )


def nothing_yet(view: str) -> Markup:
    """What `view` will show once there is a image."""
    return Markup(f'<p class="note">{escape(VIEWS[view])}</p>')


def inside(seen: Seen, view: str, layer: int, head: int) -> Markup:
    """The image, and beside it what `view` (of VIEWS) shows of it.

    `layer` counts from 1, and so does `head`, of which 0 is the mean; what is beyond the model's is its last.
    """
    if seen.capture is None:
        return Markup("<p>This model is a ResNet: it has no attention to look at.</p>")
    left = overlays.fit(seen.image, 384, enlarge=True)
    height, width = seen.image.shape[:2]
    first = f"{seen.given[0]} × {seen.given[1]} pixels were given; the model sees {width} × {height}."
    if view == FEATURES:
        right = overlays.fit((255 * seen.capture.components[0]).round().astype(np.uint8), 384, enlarge=True)
        name, alt = "features", "Each patch of the image in the color of its features."
    else:
        name, weights = _weights(seen.capture, view, layer, head)
        right = overlays.overlay(left, weights)
        row, column = np.unravel_index(int(weights.argmax()), weights.shape)
        peak, spread = weights.max() / max(weights.sum(), 1e-12), 1 / weights.size
        name += f"; the brightest patch has {peak:.1%} of what falls on patches (if all were alike: {spread:.1%})"
        alt = (
            f"The image under its attention, which is highest at patch row {row + 1} of {weights.shape[0]}, "
            f"column {column + 1} of {weights.shape[1]}."
        )
    pair = (
        _figure(overlays.encoded(left), "The image as the model sees it.", first),
        _figure(overlays.encoded(right), alt, f"{name[0].upper()}{name[1:]}."),
    )
    return Markup(f'<div class="pair">{"".join(pair)}</div><p class="note">{escape(VIEWS[view])}</p>')


def _weights(capture: Capture, view: str, layer: int, head: int) -> tuple[str, Float[np.ndarray, "h w"]]:
    if view == ROLLOUT:
        return "rollout", capture.rollout[0]
    if view == PLAIN:
        return "rollout without the residual", capture.rollout_plain[0]
    if view != LAYER:
        raise UserError(f"{view!r} cannot be shown; choose one of {', '.join(VIEWS)}.")
    number = min(max(layer, 1), len(capture.layers)) - 1
    heads = capture.heads[0, number]
    name = f"layer {capture.layers[number]} of {len(capture.layers)}"
    if head < 1:
        return f"{name}, mean of {len(heads)} heads", heads.mean(axis=0)
    head = min(head, len(heads))
    return f"{name}, head {head} of {len(heads)}", heads[head - 1]


def distances(seen: Seen) -> Markup:
    """The figure of mean attention distances in this image, for the light and the dark page."""
    if seen.capture is None:
        return Markup("")
    drawn = drawings.distances(seen.capture.image_distances[0], seen.capture.layers).image
    assert drawn is not None, "it is made for a page"
    about = (
        f"{drawn.caption} Here averaged over this image's patches alone, in pixels of what the model sees. High dots "
        f"look across the whole image."
    )
    return Markup(f'{_figure(drawn.data, drawn.alt, dark=drawn.dark)}<p class="note">{escape(about)}</p>')


def card(loaded: Loaded) -> Markup:
    """What the model is: its kind, sizes, cost, and where its weights came from."""
    config = loaded.model.config
    rows = (
        {"Checkpoint": loaded.name}
        | numbers_of(config)
        | details_of(config)
        | {
            "images": loaded.transform.preprocessing.describe(),
            "weights from": loaded.source,
        }
    )
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in rows.items())
    return Markup(f'<dl class="card">{items}</dl>')


def refusal(reason: str) -> Markup:
    """Why something was not done, for eyes and screen readers."""
    return Markup(f'<p class="refusal" role="alert">{escape(reason)}</p>')


def _figure(data: bytes, alt: str, caption: str = "", dark: bytes | None = None) -> str:
    img = f'<img src="{data_uri(data)}" alt="{escape(alt)}">'
    if dark is not None:
        source = f'<source media="(prefers-color-scheme: dark)" srcset="{data_uri(dark)}">'
        img = f"<picture>{source}{img}</picture>"
    return f"<figure>{img}{f'<figcaption>{escape(caption)}</figcaption>' if caption else ''}</figure>"
