"""Content of the HTML pages of training runs and of a checkpoint, for the templates; `page` renders it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int, UInt8

from vitlab.errors import UserError
from vitlab.evaluation.calibration import MIN_CALIBRATED
from vitlab.inspection import figures, plots
from vitlab.inspection.attention import patch_distances
from vitlab.inspection.capture import Capture
from vitlab.inspection.embeddings import filters_of, positions_of
from vitlab.inspection.figures import Drawing, PageImage
from vitlab.inspection.page import page
from vitlab.inspection.summary import Summary
from vitlab.inspection.viewer import view
from vitlab.models import ModelConfig, ViTConfig
from vitlab.models.registry import name_of
from vitlab.models.vit import ViT

MAX_CONFUSIONS, MAX_CLASSES = 8, 50
"""Maximum number of rows in the tables of confusions and of classes."""
MAX_DRAWN_CLASSES = 1000
"""Maximum number of classes in a drawn confusion matrix, whose memory grows with their square."""


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
    """Further settings of a model as text, with all that differ from the paper's models."""
    names = ("num_classes", "pool", "position", "position_at", "width", "mlp_dim")
    settings = {name: getattr(config, name) for name in names if hasattr(config, name)}
    settings |= config.variant.differences if isinstance(config, ViTConfig) else {}
    return {name.replace("_", " "): str(value) for name, value in settings.items()}


def make_embedding_figures(model: ViT) -> list[Drawing]:
    """Fig. 7, left and center."""
    similarity = positions_of(model)
    return [figures.filters(filters_of(model)), *([] if similarity is None else [figures.positions(similarity)])]


@dataclass(frozen=True, eq=False)
class RunSection:
    """One training run as a section of a page; what is None or empty is left out."""

    MIN_CALIBRATED: ClassVar[int] = MIN_CALIBRATED
    name: str
    explanation: str
    numbers: Mapping[str, str]
    """Headline numbers as text: {"Test accuracy": "98.9%"}."""
    records: Sequence[Mapping[str, Any]] = ()
    """Lines of metrics.jsonl; numbers under keys that end in loss, accuracy or lr are drawn over `step`."""
    classes: Sequence[str] = ()
    confusion: Int[np.ndarray, "K K"] | None = None
    """Counts over the test images; rows are labels, columns predictions."""
    per_class: Sequence[Mapping[str, Any]] = ()
    """For each class: class, images, recall or accuracy, precision (`Evaluation.per_class`); or as in `label_rows`."""
    thresholds: str | None = None
    """With several labels: where the thresholds of `per_class` come from."""
    calibration: Sequence[np.ndarray] | None = None
    """Counts, accuracies and mean confidences of `plots.reliability`."""
    mistakes: Sequence[PageImage] | None = None
    """Test images that were predicted wrongly, the worst first; None where they are missing."""
    attended: bool = False
    """Whether each of `mistakes` is next to itself under its rollout."""
    attention: Drawing | None = None
    """Images under their rollout (`figures.pairs`)."""
    embedding_figures: Sequence[Drawing] = ()
    """The panels of Fig. 7."""

    @cached_property
    def curves(self) -> PageImage | None:
        """Loss, accuracy and learning rate over the steps."""
        panels = plots.curves(self.records)
        ends = [f"{series.name} ends at {series.y[-1]:.4g}" for panel in panels for series in panel.series]
        return Drawing(plots.panels(panels), f"Over training steps: {', '.join(ends)}.").image if panels else None

    @cached_property
    def reliability(self) -> PageImage | None:
        """The reliability diagram of at least MIN_CALIBRATED images."""
        if self.calibration is None or self.calibration[0].sum() < self.MIN_CALIBRATED:
            return None
        counts, accuracies, confidences = self.calibration
        used = np.flatnonzero(counts)
        bins = [f"{accuracies[b]:.1%} at a mean confidence of {confidences[b]:.1%} ({counts[b]} images)" for b in used]
        alt = f"Accuracy by confidence: {', '.join(bins)}."
        return Drawing(plots.reliability(counts, accuracies, confidences), alt).image

    @cached_property
    def confusion_matrix(self) -> dict[str, Any] | None:
        """The drawing of `confusion` (None beyond MAX_DRAWN_CLASSES), its sums, and the most frequent confusions."""
        counts, names = self.confusion, self.classes
        if counts is None:
            return None
        if len(counts) != len(names):
            raise UserError(f"{self.name}: a confusion matrix of {len(counts)} classes has {len(names)} class names.")
        correct, total = int(np.trace(counts)), int(counts.sum())
        mistakes = counts.copy()
        np.fill_diagonal(mistakes, 0)
        cells = np.argwhere(mistakes)
        order = np.argsort(-mistakes[tuple(cells.T)], kind="stable")[:MAX_CONFUSIONS]
        rows = []
        for label, prediction in cells[order].tolist():
            count = counts[label, prediction]
            rows.append((names[label], names[prediction], str(count), f"{count / counts[label].sum():.1%}"))
        alt = f"Confusion matrix of {len(counts)} classes: {correct} of {total} images are on its diagonal."
        image = Drawing(plots.confusion(counts, names), alt).image if len(counts) <= MAX_DRAWN_CLASSES else None
        return {"correct": correct, "total": total, "rows": rows, "image": image}

    @cached_property
    def class_table(self) -> dict[str, Any] | None:
        """Results of each class, the MAX_CLASSES worst ones first."""
        present = [row for row in self.per_class if row["images"] or row["precision"] is not None]
        if not present:
            return None
        if "f1" in present[0]:
            metrics = ("average_precision", "precision", "recall", "f1", "threshold")
        else:
            metrics = ("recall" if "recall" in present[0] else "accuracy", "precision")
        present.sort(key=lambda row: math.inf if row[metrics[0]] is None else row[metrics[0]])
        rows = []
        for row in present[:MAX_CLASSES]:
            percents = ("-" if row[key] is None else f"{row[key]:.1%}" for key in metrics)
            rows.append((row["class"], f"{row['images']:,}", *percents))
        head = ("class", "images", *(metric.replace("_", " ") for metric in metrics))
        return {"metric": metrics[0], "head": head, "rows": rows, "count": len(present)}


@dataclass(frozen=True, eq=False)
class DataSection:
    """The images of a run as a section of a page."""

    explanation: str
    """What was compared with what, or why not."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Headline numbers of the near-duplicates as text; empty where none were searched."""
    pairs: Sequence[PageImage] = ()
    """Test images next to their near-duplicates in the training set."""
    unreadable: Sequence[tuple[str, str]] | None = None
    """Path and reason of each unreadable file; None where files were not checked."""
    suspects: Sequence[PageImage] = ()
    """Training images whose label is probably wrong, the most suspect first."""
    suspect_count: int = 0
    """All of these, shown or not."""


@dataclass(frozen=True, eq=False)
class Inspection:
    """What the page of a checkpoint shows; what is None or empty is left out (most of it for a ResNet)."""

    checkpoint: str
    config: ModelConfig
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """From `weights.load_metadata`."""
    embeddings: Sequence[Drawing] = ()
    """`make_embedding_figures` of the model."""
    capture: Capture | None = None
    """Attention and tokens over images; None without images."""
    names: Sequence[str] = ()
    """Names of the images that the capture keeps, in order."""
    images: Sequence[UInt8[np.ndarray, "H W 3"]] = ()
    """The same images as the model sees them."""
    predictions: Sequence[Sequence[tuple[str, float]]] = ()
    """The most probable classes of these images and their probabilities, largest first; empty without a head."""
    labels: Sequence[tuple[str, ...]] | None = None
    """The labels that are set for these images, by a model of several labels per image."""
    unreadable: Sequence[tuple[str, str]] = ()
    """Path and reason of each image that is left out."""


def make_figures(inspection: Inspection) -> list[Drawing]:
    """The figures of the paper for which there are numbers."""
    config, capture = inspection.config, inspection.capture
    if capture is None or not isinstance(config, ViTConfig):
        return [*inspection.embeddings]
    h, w = config.grid
    grids = [(1, w), (h, 1)] if config.encoder == "axial" else [(h, w)]  # over which attention can be uniform
    uniform = sorted({round(float(patch_distances(grid, config.stride).mean()), 6) for grid in grids})
    distances = figures.distances(capture.distances, capture.layers, uniform, name_of(config))
    heads = figures.heads(capture, inspection.names[0])
    return [*inspection.embeddings, distances, heads, *figures.pairs(capture, inspection.images)]


def checkpoint_page(
    inspection: Inspection,
    drawings: Sequence[Drawing],
    runs: Sequence[RunSection] = (),
    data: DataSection | None = None,
    summary: Summary | None = None,
) -> str:
    """The page of a checkpoint.

    drawings: from `make_figures`; runs: those that trained it, which come first; data: the images of these runs;
    summary: of the first of them.
    """
    config, capture = inspection.config, inspection.capture
    details = details_of(config) | {"weights from": str(inspection.metadata.get("source") or inspection.checkpoint)}
    if "dataset" in inspection.metadata:
        details["trained on"] = str(inspection.metadata["dataset"])
    views = [
        view(
            capture,
            i,
            "/".join(Path(name).parts[-2:]),
            inspection.images[i],
            inspection.predictions[i],
            labels=None if inspection.labels is None else inspection.labels[i],
        )
        for i, name in enumerate(inspection.names)
        if capture
    ]
    lead = f"Embeddings and attention (Sec. 4.5, App. D.7, App. D.8) of {name_of(config)}."
    return page(
        "checkpoint.html.j2",
        *(summary or (f"Inside {inspection.checkpoint}", lead, {})),
        scripts=("viewer.js",),
        model_numbers=numbers_of(config) | ({"Images": f"{capture.count:,}"} if capture else {}),
        details=details,
        embedding_figures=[drawing for drawing in drawings if drawing.name in ("filters", "positions", "distances")],
        heads=next((drawing.image for drawing in drawings if drawing.name == "heads"), None),
        views=views,
        count=capture.count if capture else 0,
        unreadable_rows=inspection.unreadable,
        runs=runs,
        data=data,
    )
