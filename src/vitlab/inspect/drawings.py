"""The paper's figures of one model, with title, caption, alternative text, arrays and files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from jaxtyping import Float

from vitlab.inspect import figures, overlays
from vitlab.inspect.capture import Capture
from vitlab.inspect.figures import DARK, LIGHT, Figure
from vitlab.inspect.page import PageImage
from vitlab.io import replacing_file, write_arrays

FIGURES = ("filters", "positions", "distances", "heads", "attention", "components")
"""Names of the figures of a checkpoint."""


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure; `draw(theme=...)` draws it."""

    draw: Callable[..., Figure]
    alt: str = ""
    caption: str = ""
    name: str = ""
    title: str = ""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    @cached_property
    def figure(self) -> Figure:
        return self.draw(theme=LIGHT)

    @cached_property
    def png(self) -> bytes:
        return figures.png(self.figure)

    @cached_property
    def image(self) -> PageImage:
        """The figure for a light and a dark page."""
        dark = figures.webp(figures.png(self.draw(theme=DARK)))
        return PageImage(figures.webp(self.png), self.alt, figures.width_of(self.png), self.caption, dark)


def filters(components: Float[np.ndarray, "n P P 3"], hybrid: bool = False) -> Drawing:
    """Fig. 7, left: `filters_of` a model."""
    source = "the first convolution of the ResNet below the encoder" if hybrid else "the patch embedding's filters"
    shown = f"The first {len(components)} principal components of {source}"
    return Drawing(
        partial(figures.filters, components),
        alt=f"{shown}, as small color images.",
        caption=f"{shown} (Fig. 7, left), largest variance first: the patterns by which a patch is described. Long "
        f"training leaves smooth patterns: edges, spots, colors.",
        name="filters",
        title="Patch filters",
        arrays={"components": components},
    )


def positions(similarity: Float[np.ndarray, "J h w h2 w2"]) -> Drawing:
    """Fig. 7, center, and Fig. 10: `positions_of` a model."""
    count, h, w = similarity.shape[:3]
    blocks = f" One such grid for each of {count} blocks." if count > 1 else ""
    return Drawing(
        partial(figures.positions, similarity),
        alt=f"Cosine similarity of position embeddings: {h} by {w} tiles, each over {h} by {w} patches.{blocks}",
        caption="Each tile is one patch and shows the similarity of its position embedding to that of every patch "
        "(Fig. 7, center; Fig. 10). Yellow around a tile's own patch: the model knows which patches are near; "
        "a cross of yellow: it knows patches by row and column.",
        name="positions",
        title="Position embeddings",
        arrays={"similarity": similarity},
    )


def distances(
    values: Float[np.ndarray, "L k"], layers: Sequence[str] = (), uniform: Sequence[float] = (), model: str = ""
) -> Drawing:
    """Fig. 7, right, and Fig. 11: `Capture.distances`; other arguments are those of `figures.attention_distance`."""
    title = model or "Attention distance"
    return Drawing(
        partial(figures.attention_distance, values, layers, uniform, title=title),
        alt=f"Mean attention distance of {values.shape[1]} heads in each of {len(values)} layers; on average "
        f"{values[0].mean():.1f} pixels in the first layer and {values[-1].mean():.1f} in the last.",
        caption="The distance from which each head gathers, averaged over patches and images (Fig. 7, right; Fig. 11). "
        "A dot near the bottom is a head that attends to its neighbors, as a convolution does."
        + (" The dashed line is uniform attention." if uniform else ""),
        name="distances",
        title="Attention distance",
        arrays={
            "distances": values,
            "layers": np.array(layers, np.str_),
            "uniform": np.array(uniform, np.float64),
        },
    )


def heads(capture: Capture, name: str) -> Drawing:
    """Every head of every layer in the first image, called `name`; the arrays are of all images."""
    layers, count = capture.heads.shape[1:3]
    return Drawing(
        partial(figures.heads, overlays.levels(capture.heads[0]), capture.layers),
        alt=f"Attention maps of {count} heads in each of {layers} layers in {name}.",
        name="heads",
        arrays={
            "heads": capture.heads,
            "layers": np.array(capture.layers),
            "distances": capture.image_distances,
        },
    )


def pairs(capture: Capture, images: Sequence[np.ndarray]) -> list[Drawing]:
    """Fig. 6 and Fig. 14: images beside themselves under their rollout, and beside their tokens as colors."""
    side = 2 * figures.PAIR
    inputs = [overlays.fit(image, side, enlarge=True) for image in images]
    masked = [overlays.masked(image, rollout) for image, rollout in zip(inputs, capture.rollout, strict=True)]
    tokens = [overlays.fit(overlays.to_uint8(colors), side, enlarge=True) for colors in capture.components]
    rollouts = {"rollout": capture.rollout, "rollout_plain": capture.rollout_plain}
    components = {"components": capture.components}
    return [
        Drawing(partial(figures.pairs, inputs, masked), name="attention", arrays=rollouts),
        Drawing(partial(figures.pairs, inputs, tokens, ("Input", "Tokens")), name="components", arrays=components),
    ]


def write_drawings(drawings: Sequence[Drawing], folder: Path) -> None:
    """Writes NAME.png, NAME.svg and NAME.npz (the arrays) atomically; removes those of FIGURES that are not given, so
    that none is left from an earlier call."""
    for drawing in drawings:
        for suffix, data in (("png", drawing.png), ("svg", figures.svg(drawing.figure))):
            with replacing_file(folder / f"{drawing.name}.{suffix}") as file:
                file.write(data)
        write_arrays(folder / f"{drawing.name}.npz", drawing.arrays)
    for name in set(FIGURES) - {drawing.name for drawing in drawings}:
        for suffix in ("png", "svg", "npz"):
            (folder / f"{name}.{suffix}").unlink(missing_ok=True)
