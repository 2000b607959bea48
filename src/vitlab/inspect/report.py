"""The pages of a training run and of a checkpoint: numbers to figures, and figures to sections of one page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8

from vitlab.errors import UserError
from vitlab.inspect import drawings, figures, overlays, viewer
from vitlab.inspect.attention import patch_distances
from vitlab.inspect.capture import Capture
from vitlab.inspect.drawings import Drawing
from vitlab.inspect.page import PageImage, Section, Table, page
from vitlab.inspect.summary import details_of, name_of, numbers_of
from vitlab.models import ModelConfig, ViTConfig
from vitlab.weights import class_names


@dataclass(frozen=True, eq=False)
class Mistakes:
    """Wrong answers: images, the answers and the truth as class indices, and the answers' probabilities."""

    images: UInt8[np.ndarray, "n H W 3"]
    said: Int[np.ndarray, " n"]
    true: Int[np.ndarray, " n"]
    confidence: Float[np.ndarray, " n"]


@dataclass(frozen=True, eq=False)
class Rollout:
    """Images, what to write under each, and where the answer's attention lies (`Capture.rollout`)."""

    images: UInt8[np.ndarray, "n H W 3"]
    captions: Sequence[str]
    maps: Float[np.ndarray, "n h w"]


@dataclass(frozen=True, eq=False)
class Phase:
    """One training run as the page shows it; what is None or empty is left out."""

    name: str
    explanation: str
    numbers: Mapping[str, str]
    """Headline numbers, ready to be read: {"Test accuracy": "98.9 %"}."""
    records: Sequence[Mapping[str, Any]] = ()
    """Lines of metrics.jsonl; numbers under keys that end in loss, accuracy or lr are drawn over `step`."""
    classes: Sequence[str] = ()
    confusion: Int[np.ndarray, "K K"] | None = None
    """Counts over the test images; row = true class, column = answer."""
    per_class: Sequence[Mapping[str, Any]] = ()
    """For each class: class, images, recall (or accuracy), precision, as `Evaluation.per_class` has them."""
    mistakes: Mistakes | None = None
    rollout: Rollout | None = None
    filters: Float[np.ndarray, "n P P 3"] | None = None
    """`filter_components` of the patch embedding."""
    positions: Float[np.ndarray, "h w h2 w2"] | None = None
    """`position_similarity` of the position table."""
    distances: Float[np.ndarray, "L k"] | None = None
    """`mean_attention_distance` over test images."""


def training_page(title: str, lead: str, phases: Sequence[Phase]) -> str:
    """The page of one or more training runs: curves, confusions, wrong answers, and the models from inside.

    Give the text to `write_page`. Raises ValueError where a phase's parts do not fit each other.
    """
    return page(title, lead, [_phase(phase) for phase in phases])


def _phase(phase: Phase) -> Section:
    parts = (_curves(phase), _confusion(phase), _classes(phase), _mistakes(phase), _rollout(phase), _inside(phase))
    return Section(phase.name, phase.explanation, phase.numbers, parts=[part for part in parts if part is not None])


def _curves(phase: Phase) -> Section | None:
    names = dict.fromkeys(key for record in phase.records for key in record)
    images = []
    for title, ending in (("Loss", "loss"), ("Accuracy", "accuracy"), ("Learning rate", "lr")):
        keys = [name for name in names if name.endswith(ending)]
        last = {key: record[key] for record in phase.records for key in keys if record.get(key) is not None}
        if last:
            ends = ", ".join(f"{key.replace('_', ' ')} ends at {value:.4g}" for key, value in last.items())
            alt, percent = f"{title} over training steps: {ends}.", ending == "accuracy"
            images.append(drawings.on_page(figures.curves, phase.records, list(last), title, percent=percent, alt=alt))
    return Section("Training", images=images) if images else None


def _confusion(phase: Phase) -> Section | None:
    if phase.confusion is None:
        return None
    counts, names = phase.confusion, phase.classes
    if len(counts) != len(names):
        raise UserError(
            f"{phase.name}: a confusion matrix of {len(counts)} classes and {len(names)} class names; "
            f"give one name for each class, in the order of the rows."
        )
    right, total = int(np.trace(counts)), int(counts.sum())
    wrong = counts - np.diag(np.diag(counts))
    order = (divmod(int(i), len(counts)) for i in np.argsort(-wrong, axis=None, kind="stable")[:8])
    rows = [
        (names[true], names[said], str(n), f"{n / counts[true].sum():.1%}")
        for true, said in order
        if (n := int(wrong[true, said]))
    ]
    head = ("true class", "answer", "images", "share of class")
    alt = f"Confusion matrix of {len(counts)} classes: {right} of {total} images lie on its diagonal."
    return Section(
        "Which classes are taken for which",
        f"{right} of {total} test images were answered right. A row is a true class, a column an answer; a "
        f"perfect model fills the diagonal alone. Color grows with the square root of the share of the row, so "
        f"that rare mistakes can be seen.",
        images=[drawings.on_page(figures.confusion, counts, names, alt=alt)],
        table=Table("Most frequent confusions", head, rows, numeric=2) if rows else None,
    )


def _classes(phase: Phase, most: int = 50) -> Section | None:
    """Each class by itself, the worst first."""
    there = [row for row in phase.per_class if row["images"] or row["precision"] is not None]
    if not there:
        return None
    share = "recall" if "recall" in there[0] else "accuracy"
    there.sort(key=lambda row: math.inf if row[share] is None else row[share])
    rows = [
        (
            row["class"],
            f"{row['images']:,}",
            *("-" if row[x] is None else f"{row[x]:.1%}" for x in (share, "precision")),
        )
        for row in there[:most]
    ]
    text = (
        "Recall is the share of a class's images that were answered right; precision, how often an answer of this "
        "class was right. "
        if share == "recall"
        else "Accuracy is the share of a class's images whose answer was any of their labels; precision, how often "
        "an answer of this class was right. "
    ) + (f"The worst {most} of {len(there):,} classes." if len(there) > most else "The worst come first.")
    return Section(
        "Each class", text, table=Table("Results of each class", ("class", "images", share, "precision"), rows, 3)
    )


def _mistakes(phase: Phase, most: int = 24) -> Section | None:
    if phase.mistakes is None:
        return None
    wrong, images = phase.mistakes, []
    for i in map(int, np.argsort(-wrong.confidence, kind="stable")[:most]):
        said, true = phase.classes[int(wrong.said[i])], phase.classes[int(wrong.true[i])]
        caption = f"said {said}\n{wrong.confidence[i]:.0%} sure\ntruly {true}"
        alt = f"A image of {true} that was taken for {said}."
        images.append(PageImage(overlays.encoded(overlays.fit(wrong.images[i], 192)), alt, 96, caption))
    text = "What the model said, how sure it was of it, and the truth; the surest mistakes first."
    return Section("Wrong answers", text if images else "There are none.", images=images)


def _rollout(phase: Phase) -> Section | None:
    if phase.rollout is None:
        return None
    images, shown = [], phase.rollout
    for image, caption, weights in zip(shown.images, shown.captions, shown.maps, strict=True):
        row, column = np.unravel_index(int(weights.argmax()), weights.shape)
        alt = (
            f"{caption}: the image, and beside it the same under its attention, which is highest at patch row "
            f"{row + 1} of {weights.shape[0]}, column {column + 1} of {weights.shape[1]}."
        )
        images.append(PageImage(overlays.encoded(overlays.rollout(image, weights)), alt, 288, caption))
    return Section(
        "Where the answer looks",
        "Attention rollout (Fig. 6, App. D.8): the attention of all heads, followed through all layers from the "
        "answer back to the patches. Yellow marks the patches that the answer draws on most, dark blue those "
        "that it hardly uses.",
        images=images,
    )


def _inside(phase: Phase) -> Section | None:
    found = []
    if phase.filters is not None:
        found.append(drawings.filters(phase.filters))
    if phase.positions is not None:
        found.append(drawings.positions(phase.positions[None]))
    if phase.distances is not None:
        found.append(drawings.distances(phase.distances))
    return Section("What the model has learned", parts=drawings.columns(found), columns=True) if found else None


# ---- the page of a checkpoint ----


@dataclass(frozen=True, eq=False)
class Inspection:
    """What the page of a checkpoint shows; what is None or empty is left out (of a ResNet, whatever is seen inside)."""

    checkpoint: str
    """As it was given."""
    config: ModelConfig
    card: Mapping[str, Any] = field(default_factory=dict)
    """What the checkpoint says of itself: `weights.load_card`."""
    filters: Float[np.ndarray, "n P P 3"] | None = None
    """`filters_of` the model."""
    positions: Float[np.ndarray, "J h w h2 w2"] | None = None
    """`positions_of` the model."""
    capture: Capture | None = None
    names: Sequence[str] = ()
    """Of the images that the look has kept, in its order; and they themselves, as the model saw them."""
    images: Sequence[UInt8[np.ndarray, "H W 3"]] = ()
    unreadable: Sequence[tuple[str, str]] = ()
    """Path and reason of each image that is left out."""

    def answers(self, image: int, top: int) -> list[tuple[str, float]]:
        """The `top` most probable classes of a kept image, and their probabilities."""
        if self.capture is None or self.capture.probabilities is None:
            return []
        row = self.capture.probabilities[image]
        names = class_names(self.card, len(row))
        return [(names[i], float(row[i])) for i in np.argsort(-row, kind="stable")[:top]]


def draw(shown: Inspection) -> list[Drawing]:
    """Every figure of the paper that there are numbers for."""
    found, config = [], shown.config
    if not isinstance(config, ViTConfig):
        return found
    if shown.filters is not None:
        found.append(drawings.filters(shown.filters, hybrid=config.stem is not None))
    if shown.positions is not None:
        found.append(drawings.positions(shown.positions))
    if (seen := shown.capture) is not None:
        found.append(drawings.distances(seen.distances, seen.layers, _uniform(config), name_of(config)))
        found += [drawings.heads(seen, shown.names[0]), *drawings.pairs(seen, shown.images)]
    return found


def checkpoint_page(shown: Inspection, drawn: Sequence[Drawing], *, top: int = 5, phases: Sequence[Phase] = ()) -> str:
    """The page of a checkpoint: its card, what it has learned, and where it looks in each image.

    drawn: what `draw` returned; phases: what is known of its training; top: answers to each image. Give the text to
    `write_page`.
    """
    by_name = {drawing.name: drawing for drawing in drawn}
    learned = [by_name[name] for name in ("filters", "positions", "distances") if name in by_name]
    sections = [_card(shown)]
    if learned:
        sections.append(Section("What the model has learned", parts=drawings.columns(learned), columns=True))
    if shown.capture is not None:
        text = (
            f"A row is a layer, the lowest at the top, and a column one of its heads; heads of different layers have "
            f"nothing to do with each other. Yellow is where a head looks most in {shown.names[0]}, the first image."
        )
        sections.append(_viewers(shown, shown.capture, top))
        heads = by_name["heads"].image
        sections.append(Section("Every layer and every head", text, images=[heads] if heads else []))
    if shown.unreadable:
        table = Table("Left out, because they cannot be read", ("image", "reason"), shown.unreadable)
        sections.append(Section("Unreadable images", table=table))
    sections += [_phase(phase) for phase in phases]
    lead = (
        f"Where {name_of(shown.config)} looks and what it has learned, in the figures of 'An Image is Worth 16x16 "
        f"Words' (ICLR 2021, Sec. 4.5, App. D.7 and D.8)."
        if isinstance(shown.config, ViTConfig)
        else f"How the training of {name_of(shown.config)} went, which has no attention to look at."
    )
    return page(f"Inside {shown.checkpoint}", lead, sections, style=viewer.STYLE, script=viewer.SCRIPT)


def _card(shown: Inspection) -> Section:
    numbers = numbers_of(shown.config)
    if shown.capture:
        numbers["Images looked at"] = f"{shown.capture.count:,}"
    rows = details_of(shown.config) | {"weights from": str(shown.card.get("source") or shown.checkpoint)}
    if "dataset" in shown.card:
        rows["trained on"] = str(shown.card["dataset"])
    table = Table("Further details", ("what", "value"), list(rows.items()))
    return Section("The model", numbers=numbers, table=table)


def _viewers(shown: Inspection, capture: Capture, top: int) -> Section:
    n, layers, heads, *grid = capture.heads.shape
    pool = viewer.pooling(n, layers, heads, (grid[0], grid[1]))
    text = (
        "Yellow marks the patches that the answer draws on most, dark blue those that it hardly uses. Rollout (Fig. 6, "
        "Fig. 14, App. D.8) follows the attention of all heads from the answer down through all layers to the patches; "
        "the sliders show the heads of one layer alone. Each map fills the colors by itself, and its highest "
        "twentieth is all yellow: some models keep notes in single patches of the background, which would outshine "
        "everything else.\n\n"
        "The tokens' colors are their three main components, as red, green and blue: patches of one color are alike "
        "to the last layer, within a image and from one to the other."
    )
    if n < capture.count:
        text += f"\n\nThese are the first {n} of {capture.count:,} images."
    if pool > 1:
        text += f" To keep this page small, each place of a map below is the mean of {pool} × {pool} patches."
    parts = []
    for i, (name, image) in enumerate(zip(shown.names, shown.images, strict=True)):
        one = viewer.Shown(
            name, image, shown.answers(i, top), capture.layers, capture.heads[i], capture.image_distances[i],
            capture.rollout[i], capture.rollout_plain[i], capture.components[i],
        )  # fmt: skip
        parts.append(Section(name, markup=viewer.viewer(one, i, pool)))
    return Section("Where the answer looks", text, parts=parts)


def _uniform(config: ViTConfig) -> list[float]:
    """Distances of heads that look everywhere alike: along rows and along columns for an axial encoder."""
    h, w = config.grid
    lines = [(1, w), (h, 1)] if config.encoder == "axial" else [(h, w)]
    return sorted({round(float(patch_distances(line, config.stride).mean()), 6) for line in lines})
