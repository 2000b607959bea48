"""The pages of training runs and of a checkpoint."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8

from vitlab.errors import UserError
from vitlab.inspect import drawings, figures, overlays, viewer
from vitlab.inspect.attention import patch_distances
from vitlab.inspect.capture import Capture
from vitlab.inspect.drawings import Drawing
from vitlab.inspect.page import PageImage, page
from vitlab.inspect.summary import details_of, name_of, numbers_of
from vitlab.models import ModelConfig, ViTConfig
from vitlab.weights import class_names

LEARNED = ("filters", "positions", "distances")
"""The panels of Fig. 7."""


@dataclass(frozen=True, eq=False)
class Mistakes:
    """Images that were predicted wrongly, with class indices and the probabilities of the predictions."""

    images: UInt8[np.ndarray, "n H W 3"]
    predictions: Int[np.ndarray, " n"]
    labels: Int[np.ndarray, " n"]
    confidence: Float[np.ndarray, " n"]


@dataclass(frozen=True, eq=False)
class Rollout:
    """Images, their captions, and the attention of the prediction (`Capture.rollout`)."""

    images: UInt8[np.ndarray, "n H W 3"]
    captions: Sequence[str]
    maps: Float[np.ndarray, "n h w"]


@dataclass(frozen=True, eq=False)
class Phase:
    """One training run; what is None or empty is left out of the page."""

    name: str
    explanation: str
    numbers: Mapping[str, str]
    """Headline numbers as text: {"Test accuracy": "98.9 %"}."""
    records: Sequence[Mapping[str, Any]] = ()
    """Lines of metrics.jsonl; numbers under keys that end in loss, accuracy or lr are drawn over `step`."""
    classes: Sequence[str] = ()
    confusion: Int[np.ndarray, "K K"] | None = None
    """Counts over the test images; rows are labels, columns predictions."""
    per_class: Sequence[Mapping[str, Any]] = ()
    """For each class: class, images, recall (or accuracy), precision, as in `Evaluation.per_class`."""
    mistakes: Mistakes | None = None
    rollout: Rollout | None = None
    filters: Float[np.ndarray, "n P P 3"] | None = None
    """`filters_of` the model."""
    positions: Float[np.ndarray, "h w h2 w2"] | None = None
    """`position_similarity` of the model."""
    distances: Float[np.ndarray, "L k"] | None = None
    """`mean_attention_distance` over test images."""


def training_page(title: str, lead: str, phases: Sequence[Phase]) -> str:
    """The page of one or more training runs, for `write_page`.

    Raises UserError where the parts of a phase do not fit each other.
    """
    return page("phases.html.j2", title, lead, phases=[_phase(phase) for phase in phases])


def _phase(phase: Phase) -> dict[str, Any]:
    """The values of the template for one run."""
    learned = [
        None if phase.filters is None else drawings.filters(phase.filters),
        None if phase.positions is None else drawings.positions(phase.positions[None]),
        None if phase.distances is None else drawings.distances(phase.distances),
    ]
    return {
        "name": phase.name,
        "explanation": phase.explanation,
        "numbers": phase.numbers,
        "curves": _curves(phase),
        "confusion": None if phase.confusion is None else _confusion(phase, phase.confusion),
        "classes": _classes(phase),
        "mistakes": None if phase.mistakes is None else _mistakes(phase.mistakes, phase.classes),
        "rollout": None if phase.rollout is None else _rollout(phase.rollout),
        "learned": [drawing for drawing in learned if drawing is not None],
    }


def _curves(phase: Phase) -> list[PageImage]:
    names = dict.fromkeys(key for record in phase.records for key in record)
    images = []
    for title, ending in (("Loss", "loss"), ("Accuracy", "accuracy"), ("Learning rate", "lr")):
        keys = [name for name in names if name.endswith(ending)]
        last = {key: record[key] for record in phase.records for key in keys if record.get(key) is not None}
        if last:
            ends = ", ".join(f"{key.replace('_', ' ')} ends at {value:.4g}" for key, value in last.items())
            draw = partial(figures.curves, phase.records, list(last), title, percent=ending == "accuracy")
            images.append(Drawing(draw, alt=f"{title} over training steps: {ends}.").image)
    return images


def _confusion(phase: Phase, counts: Int[np.ndarray, "K K"], most: int = 8) -> dict[str, Any]:
    names = phase.classes
    if len(counts) != len(names):
        raise UserError(
            f"{phase.name}: a confusion matrix of {len(counts)} classes and {len(names)} class names; "
            f"give one name for each class, in the order of the rows."
        )
    right, total = int(np.trace(counts)), int(counts.sum())
    wrong = counts - np.diag(np.diag(counts))
    cells = (divmod(int(i), len(counts)) for i in np.argsort(-wrong, axis=None, kind="stable")[:most])
    rows = [
        (names[label], names[prediction], str(n), f"{n / counts[label].sum():.1%}")
        for label, prediction in cells
        if (n := int(wrong[label, prediction]))
    ]
    alt = f"Confusion matrix of {len(counts)} classes: {right} of {total} images are on its diagonal."
    image = Drawing(partial(figures.confusion, counts, names), alt=alt).image
    return {"right": right, "total": total, "rows": rows, "image": image}


def _classes(phase: Phase, most: int = 50) -> dict[str, Any] | None:
    """Results of each class, the worst first."""
    present = [row for row in phase.per_class if row["images"] or row["precision"] is not None]
    if not present:
        return None
    share = "recall" if "recall" in present[0] else "accuracy"
    present.sort(key=lambda row: math.inf if row[share] is None else row[share])
    rows = [
        (
            row["class"],
            f"{row['images']:,}",
            *("-" if row[name] is None else f"{row[name]:.1%}" for name in (share, "precision")),
        )
        for row in present[:most]
    ]
    return {"share": share, "rows": rows, "count": len(present)}


def _mistakes(mistakes: Mistakes, classes: Sequence[str], most: int = 24) -> list[PageImage]:
    images = []
    for i in map(int, np.argsort(-mistakes.confidence, kind="stable")[:most]):
        prediction, label = classes[int(mistakes.predictions[i])], classes[int(mistakes.labels[i])]
        caption = f"predicted {prediction}\n{mistakes.confidence[i]:.0%} sure\nlabel {label}"
        data = overlays.encoded(overlays.fit(mistakes.images[i], 192))
        images.append(PageImage(data, f"An image of {label} that was predicted as {prediction}.", 96, caption))
    return images


def _rollout(rollout: Rollout, side: int = 192) -> list[PageImage]:
    images = []
    for image, caption, attention in zip(rollout.images, rollout.captions, rollout.maps, strict=True):
        row, column = np.unravel_index(int(attention.argmax()), attention.shape)
        alt = (
            f"{caption}: the image, and beside it the same under its attention, which is highest at patch row "
            f"{row + 1} of {attention.shape[0]}, column {column + 1} of {attention.shape[1]}."
        )
        large = overlays.fit(image, side, enlarge=True)
        both = overlays.beside(large, overlays.overlay(large, attention), gap=side // 24)
        images.append(PageImage(overlays.encoded(both), alt, 288, caption))
    return images


@dataclass(frozen=True, eq=False)
class Inspection:
    """What the page of a checkpoint shows; what is None or empty is left out (most of it for a ResNet)."""

    checkpoint: str
    config: ModelConfig
    card: Mapping[str, Any] = field(default_factory=dict)
    """From `weights.load_card`."""
    filters: Float[np.ndarray, "n P P 3"] | None = None
    """`filters_of` the model."""
    positions: Float[np.ndarray, "J h w h2 w2"] | None = None
    """`positions_of` the model."""
    capture: Capture | None = None
    names: Sequence[str] = ()
    """Of the images that the capture keeps, in order."""
    images: Sequence[UInt8[np.ndarray, "H W 3"]] = ()
    """The same images as the model sees them."""
    unreadable: Sequence[tuple[str, str]] = ()
    """Path and reason of each image that is left out."""

    def predictions(self, image: int, top: int) -> list[tuple[str, float]]:
        """The `top` most probable classes of an image and their probabilities; none without a head."""
        if self.capture is None or self.capture.probabilities is None:
            return []
        row = self.capture.probabilities[image]
        names = class_names(self.card, len(row))
        return [(names[i], float(row[i])) for i in np.argsort(-row, kind="stable")[:top]]


def draw(inspection: Inspection) -> list[Drawing]:
    """The figures of the paper for which there are numbers."""
    drawn, config, capture = [], inspection.config, inspection.capture
    if not isinstance(config, ViTConfig):
        return drawn
    if inspection.filters is not None:
        drawn.append(drawings.filters(inspection.filters, hybrid=config.stem is not None))
    if inspection.positions is not None:
        drawn.append(drawings.positions(inspection.positions))
    if capture is not None:
        drawn.append(drawings.distances(capture.distances, capture.layers, _uniform(config), name_of(config)))
        drawn += [drawings.heads(capture, inspection.names[0]), *drawings.pairs(capture, inspection.images)]
    return drawn


def checkpoint_page(
    inspection: Inspection, drawn: Sequence[Drawing], *, top: int = 5, phases: Sequence[Phase] = ()
) -> str:
    """The page of a checkpoint, for `write_page`.

    drawn: from `draw`; phases: the runs that trained it; top: number of predictions for each image.
    """
    config, capture = inspection.config, inspection.capture
    name, by_name = name_of(config), {drawing.name: drawing for drawing in drawn}
    lead = (
        f"The attention and embeddings of {name}, in the figures of 'An Image is Worth 16x16 Words' (ICLR 2021, "
        f"Sec. 4.5, App. D.7 and D.8)."
        if isinstance(config, ViTConfig)
        else f"The training of {name}, which has no attention to show."
    )
    numbers = numbers_of(config) | ({"Images": f"{capture.count:,}"} if capture else {})
    details = details_of(config) | {"weights from": str(inspection.card.get("source") or inspection.checkpoint)}
    if "dataset" in inspection.card:
        details["trained on"] = str(inspection.card["dataset"])
    views, pool = [], 1
    if capture:
        n, layers, heads, *grid = capture.heads.shape
        pool = viewer.pooling(n, layers, heads, (grid[0], grid[1]))
        for i, (image_name, image) in enumerate(zip(inspection.names, inspection.images, strict=True)):
            views.append(viewer.view(capture, i, image_name, image, inspection.predictions(i, top), pool=pool))
    return page(
        "checkpoint.html.j2",
        f"Inside {inspection.checkpoint}",
        lead,
        viewers=True,
        model_numbers=numbers,
        details=details,
        learned_drawings=[by_name[name] for name in LEARNED if name in by_name],
        views=views,
        pool=pool,
        count=capture.count if capture else 0,
        heads=by_name["heads"].image if capture else None,
        unreadable_rows=inspection.unreadable,
        phases=[_phase(phase) for phase in phases],
    )


def _uniform(config: ViTConfig) -> list[float]:
    """Distances of uniform attention: along rows and along columns for an axial encoder."""
    h, w = config.grid
    lines = [(1, w), (h, 1)] if config.encoder == "axial" else [(h, w)]
    return sorted({round(float(patch_distances(line, config.stride).mean()), 6) for line in lines})
