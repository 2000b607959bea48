"""Figures of one model (Fig. 6, 7, 10, 11, 14), and images under attention maps, as arrays and files.

Sizes are in CSS pixels, drawn at twice the density. pyplot, which has global state, is not used: threads are safe.
"""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import matplotlib
import numpy as np
from jaxtyping import Float, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from PIL import Image

from vitlab.inspection.capture import Capture
from vitlab.io import write_arrays, write_bytes

FIGURES = ("filters", "positions", "distances", "heads", "attention", "components")
"""Names of the figures of a checkpoint."""
INK, MUTED, LINE = "#1d2127", "#5a616b", "#dedcd5"
SERIES = ("#0b5c9e", "#c8500a", "#00805d", "#a4508b", "#8a6d00", "#1b93c9", "#a11d33", "#5f6368")
"""Colors of lines; the first four suit the color-blind (after Okabe and Ito)."""
PAIR = 112
"""Side of one image of a pair, in CSS pixels."""
TINY = 64
"""Images up to this longer side are enlarged without smoothing and encoded losslessly."""


@dataclass(frozen=True)
class PageImage:
    """A PNG or WebP file, shown at most `width` CSS pixels wide."""

    data: bytes
    alt: str
    width: int
    caption: str = ""

    @property
    def pixels(self) -> tuple[int, int]:
        """(width, height) of the file."""
        return Image.open(io.BytesIO(self.data)).size

    @property
    def height(self) -> int:
        return round(self.pixels[1] * self.width / self.pixels[0])


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure with its text alternative; `arrays` are the numbers behind it."""

    figure: Figure
    alt: str
    name: str = ""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    @cached_property
    def png(self) -> bytes:
        return png(self.figure)

    @property
    def image(self) -> PageImage:
        return PageImage(self.png, self.alt, Image.open(io.BytesIO(self.png)).width // 2)


class LiteralFigure(Figure):
    """A figure whose text is shown as it is: a `$` in a name begins no formula."""

    def draw(self, renderer: Any) -> None:
        for text in self.findobj(Text):
            cast(Text, text).set_parse_math(False)
        super().draw(renderer)


def png(figure: Figure) -> bytes:
    """The figure as PNG, cropped to its content; without date or version, so the same figure gives the same bytes."""
    return _save(figure, format="png", dpi=200, metadata={"Software": None})


def svg(figure: Figure) -> bytes:
    """The figure as SVG with text as outlines; the same figure gives the same bytes."""
    with matplotlib.rc_context({"svg.hashsalt": "vitlab", "svg.fonttype": "path"}):
        return _save(figure, format="svg", metadata={"Date": None, "Creator": None})


def _save(figure: Figure, **options: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, bbox_inches="tight", pad_inches=0.06, **options)
    return out.getvalue()


def write_drawings(drawings: Sequence[Drawing], folder: Path) -> None:
    """Writes NAME.png, NAME.svg and NAME.npz (the arrays); removes the other FIGURES, left from an earlier call."""
    for drawing in drawings:
        for suffix, data in (("png", drawing.png), ("svg", svg(drawing.figure))):
            write_bytes(folder / f"{drawing.name}.{suffix}", data)
        write_arrays(folder / f"{drawing.name}.npz", drawing.arrays)
    for name in set(FIGURES) - {drawing.name for drawing in drawings}:
        for suffix in ("png", "svg", "npz"):
            (folder / f"{name}.{suffix}").unlink(missing_ok=True)


def new_figure(
    size: tuple[int, int],
    rows: int = 1,
    columns: int = 1,
    title: str = "",
    layout: Literal["constrained", "compressed"] = "constrained",
) -> tuple[Figure, list[Axes]]:
    """A figure of `size` (width, height) in CSS pixels and its axes, row by row.

    layout: "compressed" for images, which do not stretch."""
    figure = LiteralFigure(figsize=(size[0] / 100, size[1] / 100), layout=layout)
    if title:
        figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=10, fontweight="bold")
    all_axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for axes in all_axes:
        axes.tick_params(colors=MUTED, labelsize=8.5, length=3)
        axes.xaxis.label.set(color=MUTED, fontsize=9)
        axes.yaxis.label.set(color=MUTED, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[:].set_color(LINE)
    return figure, all_axes


# ---- figures ----


def filters(components: Float[np.ndarray, "n P P 3"]) -> Drawing:
    """The components of `filters_of` a model, seven to a row (Fig. 7 left)."""
    columns = min(7, len(components))
    rows = math.ceil(len(components) / columns)
    tiles = np.ones((rows * columns, *components.shape[1:]))
    tiles[: len(components)] = components
    sheet, _ = _sheet(tiles.reshape(rows, columns, *components.shape[1:]))
    size = (288, round(288 * sheet.shape[0] / sheet.shape[1]) + 34)
    figure, (axes,) = new_figure(size, title="RGB embedding filters")
    axes.imshow(np.nan_to_num(sheet, nan=1.0), interpolation="nearest")
    axes.set_axis_off()
    alt = f"The first {len(components)} principal components of the filters, as small color images."
    return Drawing(figure, alt, "filters", {"components": components})


def positions(similarity: Float[np.ndarray, "J h w h2 w2"], title: str = "") -> Drawing:
    """`positions_of` a model: a tile for each patch, over all patches (Fig. 7 center); of J tables, the first.

    Of more than 16 patches to a side only every second (third, ...) has a tile.
    """
    step = math.ceil(max(similarity.shape[1:3]) / 16)
    tiles = np.round(50 * similarity[0, ::step, ::step]) / 50  # few colors make a small file
    rows, columns = tiles.shape[:2]
    numbers = [[str(1 + step * i) for i in range(patches)] for patches in (rows, columns)]  # from 1, as in the paper
    width = 230 if max(rows, columns) <= 8 else 420
    figure, axes = _draw_tiles(tiles, title or "Position embedding similarity", width, numbers[0], numbers[1], low=-1.0)
    axes.set(xlabel="input patch column", ylabel="input patch row")
    bar = figure.colorbar(axes.images[0], ax=axes, ticks=[-1, 0, 1], aspect=25, pad=0.02)
    bar.set_label("cosine similarity", color=MUTED, fontsize=9, labelpad=-4)
    bar.ax.tick_params(colors=MUTED, labelsize=8.5, length=0)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    alt = f"Cosine similarity of position embeddings: {rows} by {columns} tiles, each over all patches."
    return Drawing(figure, alt, "positions", {"similarity": similarity})


def distances(
    values: Float[np.ndarray, "L k"], layers: Sequence[str] = (), uniform: Sequence[float] = (), title: str = ""
) -> Drawing:
    """`Capture.distances`: a dot for each head of each layer, a line through the layers' means (Fig. 7 right, Fig. 11).

    layers: their names (`attention_layers`). uniform: distances of uniform attention, each a dashed line.
    """
    count, heads = values.shape
    depth = np.arange(1, count + 1)
    figure, (axes,) = new_figure((340, 320), title=title or "Attention distance")
    dots = {"s": 20, "color": SERIES[0], "alpha": 0.7, "linewidths": 0, "zorder": 2}
    axes.scatter(np.repeat(depth, heads), values.ravel(), label="one head", **dots)
    axes.plot(depth, values.mean(axis=1), color=SERIES[1], lw=1.5, label="mean of the layer", zorder=1)
    for level in uniform:
        axes.axhline(level, color=MUTED, lw=1, ls=(0, (5, 3)), label=f"uniform: {level:.4g}", zorder=0)
    axes.grid(axis="y", color=LINE, lw=0.7)
    axes.set(xlim=(0.5, count + 0.5), ylim=(0, 1.12 * max(float(values.max()), *uniform, 1e-6)))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axial = bool(layers) and layers[0].endswith("rows")
    label = "network depth (rows, columns, rows, ...)" if axial else "network depth (layer)"
    axes.set(xlabel=label, ylabel="mean attention distance (pixels)")
    style = {"frameon": False, "fontsize": 8.5, "labelcolor": MUTED, "ncols": 2, "handlelength": 1.4}
    figure.legend(loc="outside lower center", **style)
    alt = (
        f"Mean attention distance of {heads} heads in each of {count} layers; on average {values[0].mean():.1f} pixels "
        f"in the first layer and {values[-1].mean():.1f} in the last."
    )
    arrays = {"distances": values, "layers": np.array(layers, np.str_), "uniform": np.array(uniform, np.float64)}
    return Drawing(figure, alt, "distances", arrays)


def heads(capture: Capture, name: str) -> Drawing:
    """Every head (column) of every layer (row, the lowest at the top) in the first image, called `name`.

    The arrays cover all images.
    """
    maps = np.round(31 * scale_maps(capture.heads[0])) / 31  # few colors make a small file
    count, columns = maps.shape[:2]
    width = max(min(620 // columns, 48), 24) * columns
    numbers = [str(i + 1) for i in range(columns)]
    figure, axes = _draw_tiles(maps, "Attention of every head", width, capture.layers, numbers, low=0.0)
    axes.set(xlabel="head", ylabel="layer")
    alt = f"Attention maps of {columns} heads in each of {count} layers in {name}."
    arrays = {"heads": capture.heads, "layers": np.array(capture.layers), "distances": capture.image_distances}
    return Drawing(figure, alt, "heads", arrays)


def pairs(capture: Capture, images: Sequence[UInt8[np.ndarray, "H W 3"]]) -> list[Drawing]:
    """Images next to themselves under their rollout, and next to their tokens as colors (Fig. 6, Fig. 14)."""
    inputs = [fit(image, 2 * PAIR, enlarge=True) for image in images]
    masks = [masked(image, rollout) for image, rollout in zip(inputs, capture.rollout, strict=True)]
    tokens = [fit(to_uint8(colors), 2 * PAIR, enlarge=True) for colors in capture.components]
    rollouts = {"rollout": capture.rollout, "rollout_plain": capture.rollout_plain}
    alt = f"{len(images)} images, each next to "
    colors = {"components": capture.components}
    return [
        Drawing(_draw_pairs(inputs, masks, "Attention"), f"{alt}itself under its attention.", "attention", rollouts),
        Drawing(_draw_pairs(inputs, tokens, "Tokens"), f"{alt}its tokens as colors.", "components", colors),
    ]


def _draw_pairs(left: Sequence[np.ndarray], right: Sequence[np.ndarray], title: str) -> Figure:
    """Pairs of images side by side, up to four pairs to a row."""
    across = min(len(left), 4)
    rows = math.ceil(len(left) / across)
    figure, grid = new_figure((across * round(2.2 * PAIR), rows * PAIR + 24), rows, across * 2, layout="compressed")
    for axes in grid:
        axes.set_axis_off()
    for i, images in enumerate(zip(left, right, strict=True)):
        for axes, image, name in zip(grid[2 * i :], images, ("Input", title), strict=False):
            axes.imshow(image)
            if i < across:
                axes.set_title(name, color=INK, fontsize=10)
    return figure


def _draw_tiles(
    maps: Float[np.ndarray, "R C h w"], title: str, width: int, rows: Sequence[str], columns: Sequence[str], low: float
) -> tuple[Figure, Axes]:
    """Maps with values from `low` to 1 as tiles, `width` CSS pixels wide, with names of rows and columns."""
    sheet, pitches = _sheet(maps[..., None])
    height = round(width * min(sheet.shape[0] / sheet.shape[1], 4))
    figure, (axes,) = new_figure((max(width + 90, 220), height + 80), title=title, layout="compressed")
    axes.imshow(sheet[..., 0], cmap="viridis", vmin=low, vmax=1, interpolation="nearest")
    for names, pitch, axis in zip((rows, columns), pitches, (axes.yaxis, axes.xaxis), strict=True):
        axis.set_ticks([pitch * (i + 0.45) for i in range(len(names))], labels=list(names))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure, axes


def _sheet(grid: Float[np.ndarray, "R C h w c"]) -> tuple[Float[np.ndarray, "H W c"], tuple[int, int]]:
    """Tiles as one sheet with NaN between them; and the pitch of rows and columns."""
    zoom = math.ceil(24 / max(grid.shape[2:4]))
    grid = grid.repeat(zoom, axis=2).repeat(zoom, axis=3)
    rows, columns, height, width, channels = grid.shape
    gap = max(round(0.09 * max(height, width)), 1)
    spaced = np.pad(grid, ((0, 0), (0, 0), (0, gap), (0, gap), (0, 0)), constant_values=np.nan)
    sheet = spaced.transpose(0, 2, 1, 3, 4).reshape(rows * (height + gap), columns * (width + gap), channels)
    return sheet[:-gap, :-gap], (height + gap, width + gap)


# ---- images under attention maps ----


def colormap(count: int) -> UInt8[np.ndarray, "count 3"]:
    """The colors of attention maps, from least (dark blue) to most (yellow)."""
    return (255 * matplotlib.colormaps["viridis"](np.linspace(0, 1, count))[:, :3]).round().astype(np.uint8)


def scale_maps(maps: Float[np.ndarray, "*n h w"]) -> Float[np.ndarray, "*n h w"]:
    """Attention maps scaled to [0, 1], each by itself: its minimum is 0, its 95th percentile and above 1.

    Scaled by the maximum, a map with a few outstanding background patches would show nothing else. But 1 is at least a
    sixteenth of the maximum, so that a map with all its weight on one patch does not show rounding errors.
    """
    low, high = (edge(maps, axis=(-2, -1), keepdims=True) for edge in (np.min, np.max))
    top = np.maximum(np.quantile(maps, 0.95, axis=(-2, -1), keepdims=True) - low, (high - low) / 16)
    return ((maps - low) / np.maximum(top, 1e-12)).clip(0, 1)


def to_uint8(colors: Float[np.ndarray, "h w 3"]) -> UInt8[np.ndarray, "h w 3"]:
    return (255 * colors.clip(0, 1)).round().astype(np.uint8)


def masked(image: UInt8[np.ndarray, "H W 3"], attention: Float[np.ndarray, "h w"]) -> UInt8[np.ndarray, "H W 3"]:
    """The image multiplied by its attention: black at the minimum, unchanged at the maximum (Fig. 6)."""
    mask = Image.fromarray(scale_maps(attention).astype(np.float32))
    mask = np.asarray(mask.resize((image.shape[1], image.shape[0]), Image.Resampling.BICUBIC)).clip(0, 1)
    return (image * mask[..., None]).round().astype(np.uint8)


def fit(image: UInt8[np.ndarray, "H W 3"], side: int, enlarge: bool = False) -> UInt8[np.ndarray, "H2 W2 3"]:
    """The image resized to a longer side of `side`; a smaller image stays as it is without `enlarge`."""
    height, width = image.shape[:2]
    scale = side / max(height, width)
    if scale >= 1 and not enlarge:
        return image
    size = (max(round(width * scale), 1), max(round(height * scale), 1))
    resample = Image.Resampling.NEAREST if scale > 1 and max(height, width) <= TINY else Image.Resampling.LANCZOS
    return np.asarray(Image.fromarray(image).resize(size, resample))


def side_by_side(
    left: UInt8[np.ndarray, "H W 3"], right: UInt8[np.ndarray, "h w 3"], gap: int
) -> UInt8[np.ndarray, "H2 W2 4"]:
    """Both images on one canvas, each centered in its half, on a transparent ground."""
    height, width = (max(image.shape[axis] for image in (left, right)) for axis in (0, 1))
    canvas = Image.new("RGBA", (2 * width + gap, height))
    for image, start in ((left, 0), (right, width + gap)):
        corner = (start + (width - image.shape[1]) // 2, (height - image.shape[0]) // 2)
        canvas.paste(Image.fromarray(image), corner)
    return np.asarray(canvas)


def encode(image: UInt8[np.ndarray, "H W C"]) -> bytes:
    """An RGB or RGBA image as a file: PNG up to TINY pixels, else WebP, a tenth of the size."""
    out = io.BytesIO()
    if max(image.shape[:2]) <= TINY:
        Image.fromarray(image).save(out, format="PNG", optimize=True)
    else:
        Image.fromarray(image).save(out, format="WEBP", quality=88)
    return out.getvalue()
