"""The pages of training runs and of a checkpoint."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8

from vitlab.errors import UserError
from vitlab.inspect import figures, overlays, plots
from vitlab.inspect.attention import patch_distances
from vitlab.inspect.capture import Capture
from vitlab.inspect.embeddings import filters_of, positions_of
from vitlab.inspect.figures import Drawing, PageImage
from vitlab.inspect.page import page, percent
from vitlab.models import MODELS, ModelConfig, ResNetConfig, ViTConfig
from vitlab.models.vit import ViT
from vitlab.weights import class_names

SIZES = ("width", "depth", "heads", "mlp_dim", "patch_size", "encoder", "stem")
POOLING = {
    "token": "the class token (Eq. 4)",
    "gap": "the mean over patches (App. D.3)",
    "map": "a learned query's attention over all tokens",
    "token+gap": "class token and mean over patches",
}
POSITION_AT = {"stem": "", "every": ", one table for each block", "shared": ", shared by all blocks"}


def name_of(config: ModelConfig) -> str:
    """The paper's name for a model of these sizes, or else its kind and stride."""
    fields = ("body",) if isinstance(config, ResNetConfig) else SIZES
    for name, known in MODELS.items():
        if all(getattr(config, field) == getattr(known, field, None) for field in fields):
            return name
    if isinstance(config, ResNetConfig):
        return "ResNet"
    kind = "Axial ViT" if config.encoder == "axial" else "Hybrid" if config.stem else "ViT"
    return f"{kind}/{config.stride}"


def numbers_of(config: ModelConfig) -> dict[str, str]:
    """The headline numbers of a model as text (Table 1, Sec. 3.1)."""
    numbers = {
        "Model": name_of(config),
        "Parameters": f"{config.num_parameters:,}",
        "GMACs per image": f"{config.forward_macs / 1e9:.3g}",
        "Pixels, h × w": "{} × {}".format(*config.image_hw),
    }
    if isinstance(config, ViTConfig):
        numbers["Patches, h × w"] = "{} × {}".format(*config.grid)
        numbers["Layers × heads"] = f"{config.depth} × {config.heads}"
    return numbers


def details_of(config: ModelConfig) -> dict[str, str]:
    """Further details of a model as text."""
    classes = f"{config.num_classes:,} classes"
    if isinstance(config, ResNetConfig):
        return {"kind": "ResNet (BiT)", "prediction from": classes if config.num_classes else "none: no head"}
    kind = "hybrid: a Vision Transformer on a ResNet's feature map" if config.stem else "Vision Transformer"
    source = "class token and distillation token, with two heads" if config.distilled else POOLING[config.pool]
    return {
        "kind": kind + (", axial attention" if config.encoder == "axial" else ""),
        "pixels from patch to patch": str(config.stride),
        "width of a token, of the MLP": f"{config.width}, {config.mlp_dim}",
        "tokens before the patches": str(config.num_prefix_tokens),
        "position embedding": config.position + POSITION_AT[config.position_at],
        "prediction from": f"{source}; {classes}" if config.num_classes else "none: no head",
    }


def embedding_drawings(model: ViT) -> list[Drawing]:
    """Fig. 7, left and center."""
    similarity = positions_of(model)
    return [figures.filters(filters_of(model)), *([] if similarity is None else [figures.positions(similarity)])]


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
    learned: Sequence[Drawing] = ()
    """The panels of Fig. 7."""


def training_page(title: str, lead: str, phases: Sequence[Phase]) -> str:
    """The page of one or more training runs, for `write_page`."""
    return page("phases.html.j2", title, lead, phases=[_phase(phase) for phase in phases])


def _phase(phase: Phase) -> dict[str, Any]:
    """The values of the template for one run."""
    return {
        "phase": phase,
        "curves": list(_curves(phase)),
        "confusion": None if phase.confusion is None else _confusion(phase, phase.confusion),
        "per_class": _per_class(phase.per_class),
        "mistakes": None if phase.mistakes is None else list(_mistakes(phase.mistakes, phase.classes)),
        "rollout": [] if phase.rollout is None else list(_rollout(phase.rollout)),
    }


def _curves(phase: Phase) -> Iterator[PageImage]:
    names = dict.fromkeys(key for record in phase.records for key in record)
    for title, ending in (("Loss", "loss"), ("Accuracy", "accuracy"), ("Learning rate", "lr")):
        keys = [name for name in names if name.endswith(ending)]
        last = {key: record[key] for record in phase.records for key in keys if record.get(key) is not None}
        if last:
            ends = ", ".join(f"{key.replace('_', ' ')} ends at {value:.4g}" for key, value in last.items())
            panel = plots.curves(phase.records, list(last), title, percent=ending == "accuracy")
            drawing = Drawing(
                lambda theme, panel=panel: plots.panels([panel], theme=theme, size=(288, 220)),
                f"{title} over training steps: {ends}.",
            )
            yield drawing.image


def _confusion(phase: Phase, counts: Int[np.ndarray, "K K"], most: int = 8) -> dict[str, Any]:
    names = phase.classes
    if len(counts) != len(names):
        raise UserError(f"{phase.name}: a confusion matrix of {len(counts)} classes has {len(names)} class names.")
    right, total = int(np.trace(counts)), int(counts.sum())
    wrong = counts - np.diag(np.diag(counts))
    cells = (divmod(int(i), len(counts)) for i in np.argsort(-wrong, axis=None, kind="stable")[:most])
    rows = [
        (names[label], names[prediction], str(n), f"{n / counts[label].sum():.1%}")
        for label, prediction in cells
        if (n := int(wrong[label, prediction]))
    ]
    alt = f"Confusion matrix of {len(counts)} classes: {right} of {total} images are on its diagonal."
    image = Drawing(lambda theme: plots.confusion(counts, names, theme=theme), alt).image
    return {"right": right, "total": total, "rows": rows, "image": image}


def _per_class(rows: Sequence[Mapping[str, Any]], most: int = 50) -> dict[str, Any] | None:
    """Results of each class, the worst first."""
    present = [row for row in rows if row["images"] or row["precision"] is not None]
    if not present:
        return None
    share = "recall" if "recall" in present[0] else "accuracy"
    present.sort(key=lambda row: math.inf if row[share] is None else row[share])
    shown = [(r["class"], f"{r['images']:,}", percent(r[share]), percent(r["precision"])) for r in present[:most]]
    return {"share": share, "rows": shown, "count": len(present)}


def _mistakes(mistakes: Mistakes, classes: Sequence[str], most: int = 24) -> Iterator[PageImage]:
    for i in map(int, np.argsort(-mistakes.confidence, kind="stable")[:most]):
        prediction, label = classes[int(mistakes.predictions[i])], classes[int(mistakes.labels[i])]
        caption = f"predicted {prediction}\n{mistakes.confidence[i]:.0%} sure\nlabel {label}"
        data = overlays.encoded(overlays.fit(mistakes.images[i], 192))
        yield PageImage(data, f"An image of {label} that was predicted as {prediction}.", 96, caption)


def _rollout(rollout: Rollout, side: int = 192) -> Iterator[PageImage]:
    for image, caption, attention in zip(rollout.images, rollout.captions, rollout.maps, strict=True):
        row, column = np.unravel_index(int(attention.argmax()), attention.shape)
        alt = (
            f"{caption}: the image, and beside it the same under its attention, which is highest at patch row "
            f"{row + 1} of {attention.shape[0]}, column {column + 1} of {attention.shape[1]}."
        )
        large = overlays.fit(image, side, enlarge=True)
        both = overlays.beside(large, overlays.overlay(large, attention), gap=side // 24)
        yield PageImage(overlays.encoded(both), alt, 288, caption)


@dataclass(frozen=True, eq=False)
class Inspection:
    """What the page of a checkpoint shows; what is None or empty is left out (most of it for a ResNet)."""

    checkpoint: str
    config: ModelConfig
    card: Mapping[str, Any] = field(default_factory=dict)
    """From `weights.load_card`."""
    embeddings: Sequence[Drawing] = ()
    """`embedding_drawings` of the model."""
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
    config, capture = inspection.config, inspection.capture
    if capture is None or not isinstance(config, ViTConfig):
        return [*inspection.embeddings]
    distances = figures.distances(capture.distances, capture.layers, _uniform(config), name_of(config))
    heads = figures.heads(capture, inspection.names[0])
    return [*inspection.embeddings, distances, heads, *figures.pairs(capture, inspection.images)]


def _uniform(config: ViTConfig) -> list[float]:
    """Distances of uniform attention: along rows and along columns for an axial encoder."""
    h, w = config.grid
    lines = [(1, w), (h, 1)] if config.encoder == "axial" else [(h, w)]
    return sorted({round(float(patch_distances(line, config.stride).mean()), 6) for line in lines})


def checkpoint_page(
    inspection: Inspection, drawn: Sequence[Drawing], *, top: int = 5, phases: Sequence[Phase] = ()
) -> str:
    """The page of a checkpoint, for `write_page`.

    drawn: from `draw`; phases: the runs that trained it; top: number of predictions for each image.
    """
    config, capture = inspection.config, inspection.capture
    details = details_of(config) | {"weights from": str(inspection.card.get("source") or inspection.checkpoint)}
    if "dataset" in inspection.card:
        details["trained on"] = str(inspection.card["dataset"])
    views = [
        overlays.view(capture, i, "/".join(Path(name).parts[-2:]), image, inspection.predictions(i, top))
        for i, (name, image) in enumerate(zip(inspection.names, inspection.images, strict=True))
        if capture
    ]
    lead = f"The training of {name_of(config)}, which has no attention to show."
    if isinstance(config, ViTConfig):
        lead = (
            f"The attention and embeddings of {name_of(config)}, in the paper's figures (Sec. 4.5, App. D.7, App. D.8)."
        )
    return page(
        "checkpoint.html.j2",
        f"Inside {inspection.checkpoint}",
        lead,
        scripts=("viewer.js",),
        model_numbers=numbers_of(config) | ({"Images": f"{capture.count:,}"} if capture else {}),
        details=details,
        learned_drawings=[drawing for drawing in drawn if drawing.name in ("filters", "positions", "distances")],
        heads=next((drawing.image for drawing in drawn if drawing.name == "heads"), None),
        views=views,
        count=capture.count if capture else 0,
        unreadable_rows=inspection.unreadable,
        phases=[_phase(phase) for phase in phases],
    )
