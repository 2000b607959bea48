"""The figures of the paper with what they mean: each drawn for both pages, said in words, its numbers beside it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from vitlab.inspect import figures, overlays
from vitlab.inspect.capture import Capture
from vitlab.inspect.figures import DARK, Figure
from vitlab.inspect.page import PageImage, Section
from vitlab.io import replacing_file, write_arrays

FIGURES = ("filters", "positions", "distances", "heads", "attention", "components")
"""What there is to draw of a checkpoint."""


@dataclass(frozen=True, eq=False)
class Drawing:
    """One figure: its name as a file, itself on white, and the numbers that it shows."""

    name: str
    figure: Figure
    png: bytes
    arrays: Mapping[str, np.ndarray]
    image: PageImage | None = None
    """As it stands on the page; None where the page shows the same in another way."""


def drawing(
    name: str,
    draw: Callable[..., Figure],
    *args: Any,
    arrays: Mapping[str, np.ndarray] | None = None,
    alt: str = "",
    caption: str = "",
    **options: Any,
) -> Drawing:
    """`draw(*args, **options)` for a file, and with `alt` also for the light and the dark page."""
    figure = draw(*args, **options)
    png = figures.png(figure)
    image = None
    if alt:
        dark = figures.png(draw(*args, **options, theme=DARK))
        image = PageImage(figures.webp(png), alt, round(100 * figure.get_figwidth()), caption, figures.webp(dark))
    return Drawing(name, figure, png, arrays or {}, image)


def on_page(draw: Callable[..., Figure], *args: Any, alt: str, **options: Any) -> PageImage:
    """A figure for the light and for the dark page, and no file."""
    image = drawing("", draw, *args, alt=alt, **options).image
    assert image is not None
    return image


def columns(drawn: Sequence[Drawing]) -> list[Section]:
    """The panels of Fig. 7, to stand side by side."""
    titles = {"filters": "Patch filters", "positions": "Position embeddings", "distances": "Attention distance"}
    return [Section(titles[each.name], images=[each.image]) for each in drawn if each.image]


def filters(components: Float[np.ndarray, "n P P 3"], hybrid: bool = False) -> Drawing:
    """Fig. 7, left: `filters_of` a model."""
    n = len(components)
    whose = "the first convolution of the ResNet below the encoder" if hybrid else "the filters that embed the patches"
    caption = (
        f"The first {n} principal components of {whose} (Fig. 7, left), the strongest first: the patterns by which a "
        f"patch is described. Much training leaves smooth patterns here: edges, spots, colors. Noise means little."
    )
    alt = f"The first {n} principal components of {whose}, as small color images."
    arrays = {"components": components}
    return drawing("filters", figures.filters, components, arrays=arrays, alt=alt, caption=caption)


def positions(similarity: Float[np.ndarray, "J h w h2 w2"]) -> Drawing:
    """Fig. 7, center, and Fig. 10: `positions_of` a model."""
    count, h, w = similarity.shape[:3]
    caption = (
        "Each tile stands for one place and shows how alike its position embedding is to that of every place (Fig. 7, "
        "center; Fig. 10). Yellow around a tile's own place says that the model knows which places are near; a cross "
        "of yellow, that it knows places by their row and column."
    )
    alt = f"Cosine similarity of position embeddings: {h} by {w} tiles, each over {h} by {w} patches."
    if count > 1:
        alt += f" One such grid for each of {count} blocks."
    arrays = {"similarity": similarity}
    return drawing("positions", figures.positions, similarity, arrays=arrays, alt=alt, caption=caption)


def distances(
    far: Float[np.ndarray, "L k"], layers: Sequence[str] = (), uniform: Sequence[float] = (), model: str = ""
) -> Drawing:
    """Fig. 7, right, and Fig. 11: `Capture.distances`; other arguments are those of `figures.attention_distance`."""
    caption = (
        "From how far each head gathers what it passes on, averaged over patches and images (Fig. 7, right; Fig. "
        "11). A dot near the bottom is a head that looks at its neighbors, as a convolution does."
    )
    if uniform:
        caption += " At the dashed line a head looks everywhere alike."
    alt = (
        f"Mean attention distance of {far.shape[1]} heads in each of {len(far)} layers; on average "
        f"{far[0].mean():.1f} pixels in the first layer and {far[-1].mean():.1f} in the last."
    )
    arrays = {"distances": far, "layers": np.array(layers, np.str_), "uniform": np.array(uniform, np.float64)}
    return drawing(
        "distances", figures.attention_distance, far, layers, uniform, title=model or "Attention distance",
        arrays=arrays, alt=alt, caption=caption,
    )  # fmt: skip


def heads(capture: Capture, name: str) -> Drawing:
    """Every head of every layer of the look's first image, called `name`; the numbers are of all that it kept."""
    count, each = capture.heads.shape[1:3]
    alt = f"Where each of {each} heads in each of {count} layers looks in {name}."
    arrays = {"heads": capture.heads, "layers": np.array(capture.layers), "distances": capture.image_distances}
    return drawing("heads", figures.heads, overlays.levels(capture.heads[0]), capture.layers, arrays=arrays, alt=alt)


def pairs(capture: Capture, images: Sequence[np.ndarray]) -> list[Drawing]:
    """Fig. 6 and Fig. 14: kept images beside themselves in the light of their rollout, and beside their tokens."""
    side = 2 * figures.PAIR
    small = [overlays.fit(image, side, enlarge=True) for image in images]
    lit = [overlays.lit(image, rollout) for image, rollout in zip(small, capture.rollout, strict=True)]
    tokens = [overlays.fit((255 * each).round().astype(np.uint8), side, enlarge=True) for each in capture.components]
    rollouts = {"rollout": capture.rollout, "rollout_plain": capture.rollout_plain}
    return [
        drawing("attention", figures.pairs, small, lit, arrays=rollouts),
        drawing(
            "components", figures.pairs, small, tokens, ("Input", "Tokens"), arrays={"components": capture.components}
        ),
    ]


def write_drawings(drawn: Sequence[Drawing], folder: Path) -> None:
    """Writes NAME.png, NAME.svg and NAME.npz (the numbers), each whole or not at all; those of FIGURES that were not
    drawn this time are removed, so that nothing of an earlier look is taken for this one's."""
    for each in drawn:
        for suffix, data in (("png", each.png), ("svg", figures.svg(each.figure))):
            with replacing_file(folder / f"{each.name}.{suffix}") as file:
                file.write(data)
        write_arrays(folder / f"{each.name}.npz", each.arrays)
    for name in set(FIGURES) - {each.name for each in drawn}:
        for suffix in ("png", "svg", "npz"):
            (folder / f"{name}.{suffix}").unlink(missing_ok=True)
