"""The paper's figures of one model (Fig. 6, 7, 10, 11, 14), each for a light and a dark page, with its files.

100 units of a figure's size are 100 CSS pixels, at twice the density. Only `matplotlib.figure.Figure` is used, without
pyplot and its global state, so threads are safe.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from jaxtyping import Float, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from vitlab.inspect import overlays
from vitlab.inspect.capture import Capture
from vitlab.io import replacing_file, write_arrays

FIGURES = ("filters", "positions", "distances", "heads", "attention", "components")
"""Names of the figures of a checkpoint."""
PAIR = 112
"""Side of one image of a pair, in CSS pixels."""


@dataclass(frozen=True)
class Theme:
    """Colors of pages and figures; the first four of `series` suit the color-blind (after Okabe and Ito)."""

    page: str
    card: str
    ink: str
    muted: str
    line: str
    accent: str
    series: tuple[str, ...]
    ramp: tuple[str, ...]
    """Sequential colors from 0 to 1."""


LIGHT = Theme(
    page="#f6f5f1",
    card="#ffffff",
    ink="#1d2127",
    muted="#5a616b",
    line="#dedcd5",
    accent="#0b5c9e",
    series=("#0b5c9e", "#c8500a", "#00805d", "#a4508b", "#8a6d00", "#1b93c9", "#a11d33", "#5f6368"),
    ramp=("#ffffff", "#cfe1f1", "#7fb2da", "#2b78b8", "#0a3a6b"),
)
DARK = Theme(
    page="#101317",
    card="#181d23",
    ink="#e8eaed",
    muted="#a3abb5",
    line="#303841",
    accent="#6db7f2",
    series=("#6db7f2", "#f2a65a", "#4fd1a5", "#e39ac9", "#e0cf5c", "#8fe3f5", "#ff8a8a", "#b4bbc4"),
    ramp=("#181d23", "#1c3d5c", "#2a6ca3", "#68a9dc", "#dcefff"),
)


@dataclass(frozen=True)
class PageImage:
    """A PNG or WebP file, shown `width` CSS pixels wide where there is room; `dark` is shown on a dark page."""

    data: bytes
    alt: str
    width: int
    caption: str = ""
    dark: bytes | None = None

    @property
    def pixels(self) -> tuple[int, int]:
        """(width, height) of the file."""
        return Image.open(io.BytesIO(self.data)).size

    @property
    def height(self) -> int:
        return round(self.pixels[1] * self.width / self.pixels[0])


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure that is drawn on first use; `arrays` are the numbers behind it."""

    draw: Callable[[Theme], Figure]
    alt: str = ""
    name: str = ""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    @cached_property
    def figure(self) -> Figure:
        return self.draw(LIGHT)

    @cached_property
    def png(self) -> bytes:
        return png(self.figure)

    @cached_property
    def image(self) -> PageImage:
        data = webp(self.png)
        return PageImage(data, self.alt, Image.open(io.BytesIO(data)).width // 2, dark=webp(png(self.draw(DARK))))


def png(figure: Figure) -> bytes:
    """The figure as PNG, cropped to its content; without date or version, so the same figure gives the same bytes."""
    return _save(figure, format="png", dpi=200, metadata={"Software": None})


def svg(figure: Figure) -> bytes:
    """The figure as SVG with letters as outlines; the same figure gives the same bytes."""
    with matplotlib.rc_context({"svg.hashsalt": "vitlab", "svg.fonttype": "path"}):
        return _save(figure, format="svg", metadata={"Date": None, "Creator": None})


def _save(figure: Figure, **options: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, bbox_inches="tight", pad_inches=0.06, **options)
    return out.getvalue()


def webp(image: bytes) -> bytes:
    """A PNG as lossless WebP, a third of the size."""
    out = io.BytesIO()
    Image.open(io.BytesIO(image)).convert("RGB").save(out, format="WEBP", lossless=True, method=2)
    return out.getvalue()


def write_drawings(drawings: Sequence[Drawing], folder: Path) -> None:
    """Writes NAME.png, NAME.svg and NAME.npz (the arrays) atomically; removes those of FIGURES that are not given, so
    that none is left from an earlier call."""
    for drawing in drawings:
        for suffix, data in (("png", drawing.png), ("svg", svg(drawing.figure))):
            with replacing_file(folder / f"{drawing.name}.{suffix}") as file:
                file.write(data)
        write_arrays(folder / f"{drawing.name}.npz", drawing.arrays)
    for name in set(FIGURES) - {drawing.name for drawing in drawings}:
        for suffix in ("png", "svg", "npz"):
            (folder / f"{name}.{suffix}").unlink(missing_ok=True)


def new_figure(
    theme: Theme,
    size: tuple[int, int],
    rows: int = 1,
    columns: int = 1,
    title: str = "",
    layout: Literal["constrained", "compressed"] = "constrained",
    **grid: Any,
) -> tuple[Figure, list[Axes]]:
    """A figure of `size` (width, height) in CSS pixels and its axes, row by row; `grid` goes to `Figure.subplots`.

    layout: "compressed" for images, which do not stretch."""
    figure = Figure(figsize=(size[0] / 100, size[1] / 100), facecolor=theme.card, layout=layout)
    if title:
        figure.suptitle(title, x=0.01, ha="left", color=theme.ink, fontsize=10, fontweight="bold")
    all_axes = figure.subplots(rows, columns, squeeze=False, **grid).ravel().tolist()
    for axes in all_axes:
        axes.set_facecolor(theme.card)
        axes.tick_params(colors=theme.muted, labelsize=8.5, length=3)
        axes.xaxis.label.set(color=theme.muted, fontsize=9)
        axes.yaxis.label.set(color=theme.muted, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[:].set_color(theme.line)
    return figure, all_axes


def filters(components: Float[np.ndarray, "n P P 3"]) -> Drawing:
    """The components of `filters_of` a model, seven to a row (Fig. 7 left)."""
    columns = min(7, len(components))
    rows = math.ceil(len(components) / columns)
    sheet = np.full((rows * columns, *components.shape[1:]), np.nan)
    sheet[: len(components)] = components
    tiles, _ = _tiles(sheet.reshape(rows, columns, *components.shape[1:]))
    pixels = np.concatenate([np.nan_to_num(tiles), np.isfinite(tiles[..., :1])], axis=-1)

    def draw(theme: Theme) -> Figure:
        size = (288, round(288 * tiles.shape[0] / tiles.shape[1]) + 34)
        figure, (axes,) = new_figure(theme, size, title="RGB embedding filters")
        axes.imshow(pixels, interpolation="nearest")
        axes.set_axis_off()
        return figure

    alt = f"The first {len(components)} principal components of the filters, as small color images."
    return Drawing(draw, alt, "filters", {"components": components})


def positions(similarity: Float[np.ndarray, "J h w h2 w2"]) -> Drawing:
    """`positions_of` a model: a tile for each patch, over all patches (Fig. 7 center).

    Tables of several blocks are drawn three to a row, the first block first (Fig. 10). Of more than 16 patches to a
    side only every second (third, ...) has a tile.
    """
    step = math.ceil(max(similarity.shape[1:3]) / 16)
    count, rows, columns = similarity[:, ::step, ::step].shape[:3]
    across, down = min(count, 3), math.ceil(count / 3)

    def draw(theme: Theme) -> Figure:
        side = 230 if max(rows, columns) <= 8 else 420 if count == 1 else 290
        size = (across * side + 70, round(down * (side * min(rows / columns, 2) + 50)) + 30)
        figure, grid = new_figure(theme, size, down, across, "Position embedding similarity", "compressed")
        for spare in grid[count:]:
            spare.remove()
        for block, axes in enumerate(grid[:count]):
            tiles = np.round(50 * similarity[block, ::step, ::step, ..., None]) / 50  # few colors make a small file
            sheet, pitches = _tiles(tiles)
            axes.imshow(sheet[..., 0], cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
            for patches, pitch, axis in zip((rows, columns), pitches, (axes.yaxis, axes.xaxis), strict=True):
                numbers = [str(1 + step * i) for i in range(patches)]  # from 1, as in the paper
                axis.set_ticks([pitch * (i + 0.45) for i in range(patches)], labels=numbers)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            axes.set_xlabel("input patch column" if count == 1 else f"block {block + 1}")
            axes.set_ylabel("input patch row" if block % across == 0 else "")
        bar = figure.colorbar(grid[0].images[0], ax=grid[:count], ticks=[-1, 0, 1], aspect=25, pad=0.02)
        bar.set_label("cosine similarity", color=theme.muted, fontsize=9, labelpad=-4)
        bar.ax.tick_params(colors=theme.muted, labelsize=8.5, length=0)
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
        return figure

    alt = f"Cosine similarity of position embeddings: {rows} by {columns} tiles, each over all patches."
    blocks = f" One such grid for each of {count} blocks." if count > 1 else ""
    return Drawing(draw, alt + blocks, "positions", {"similarity": similarity})


def distances(
    values: Float[np.ndarray, "L k"], layers: Sequence[str] = (), uniform: Sequence[float] = (), title: str = ""
) -> Drawing:
    """`Capture.distances`: a dot for each head of each layer, a line through the layers' means (Fig. 7 right, Fig. 11).

    layers: names, numbers by default. uniform: distances of uniform attention, each a dashed line.
    """
    count, heads = values.shape
    depth = np.arange(1, count + 1)
    names = [name.split()[0] for name in layers] or [str(i) for i in depth]
    axial = bool(layers) and layers[0] != names[0]

    def draw(theme: Theme) -> Figure:
        figure, (axes,) = new_figure(theme, (340, 320), title=title or "Attention distance")
        dots = {"s": 20, "color": theme.series[0], "alpha": 0.7, "linewidths": 0, "zorder": 2}
        axes.scatter(np.repeat(depth, heads), values.ravel(), label="one head", **dots)
        axes.plot(depth, values.mean(axis=1), color=theme.series[1], lw=1.5, label="mean of the layer", zorder=1)
        for level in uniform:
            axes.axhline(level, color=theme.muted, lw=1, ls=(0, (5, 3)), label=f"uniform: {level:.4g}", zorder=0)
        axes.grid(axis="y", color=theme.line, lw=0.7)
        axes.set(xlim=(0.5, count + 0.5), ylim=(0, 1.12 * max(float(values.max()), *uniform, 1e-6)))
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        axes.xaxis.set_major_formatter(lambda x, _: names[round(x) - 1] if 1 <= round(x) <= count else "")
        axes.yaxis.set_major_locator(MaxNLocator(6))
        label = "layer; rows, then columns" if axial else "layer"
        axes.set(xlabel=f"network depth ({label})", ylabel="mean attention distance (pixels)")
        columns = 2 if len(uniform) != 1 else 3
        compact = {"handlelength": 1.4, "columnspacing": 1.2, "handletextpad": 0.5, "borderaxespad": 0.2}
        style = {"frameon": False, "fontsize": 8.5, "labelcolor": theme.muted, "ncols": columns}
        figure.legend(loc="outside lower center", **style, **compact)
        return figure

    alt = (
        f"Mean attention distance of {heads} heads in each of {count} layers; on average {values[0].mean():.1f} pixels "
        f"in the first layer and {values[-1].mean():.1f} in the last."
    )
    arrays = {"distances": values, "layers": np.array(layers, np.str_), "uniform": np.array(uniform, np.float64)}
    return Drawing(draw, alt, "distances", arrays)


def heads(capture: Capture, name: str) -> Drawing:
    """Every head (column) of every layer (row, the lowest at the top) in the first image, called `name`.

    The arrays are of all images.
    """
    maps = overlays.levels(capture.heads[0])
    count, columns = maps.shape[:2]
    sheet, pitches = _tiles(np.round(31 * maps[..., None]) / 31)  # few colors make a small file

    def draw(theme: Theme) -> Figure:
        width = max(min(620 // columns, 48), 24) * columns
        size = (max(width + 90, 220), round(width * sheet.shape[0] / sheet.shape[1]) + 80)
        figure, (axes,) = new_figure(theme, size, title="Attention of every head", layout="compressed")
        axes.imshow(sheet[..., 0], cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        ticks = range(0, columns, math.ceil(columns * 14 / width))
        axes.set_xticks([pitches[1] * (i + 0.45) for i in ticks], [str(i + 1) for i in ticks])
        axes.set_yticks([pitches[0] * (i + 0.45) for i in range(count)], capture.layers)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set(xlabel="head", ylabel="layer")
        return figure

    alt = f"Attention maps of {columns} heads in each of {count} layers in {name}."
    arrays = {"heads": capture.heads, "layers": np.array(capture.layers), "distances": capture.image_distances}
    return Drawing(draw, alt, "heads", arrays)


def pairs(capture: Capture, images: Sequence[UInt8[np.ndarray, "H W 3"]]) -> list[Drawing]:
    """Images beside themselves under their rollout, and beside their tokens as colors (Fig. 6, Fig. 14)."""
    side = 2 * PAIR
    inputs = [overlays.fit(image, side, enlarge=True) for image in images]
    masked = [overlays.masked(image, rollout) for image, rollout in zip(inputs, capture.rollout, strict=True)]
    tokens = [overlays.fit(overlays.to_uint8(colors), side, enlarge=True) for colors in capture.components]
    rollouts = {"rollout": capture.rollout, "rollout_plain": capture.rollout_plain}
    return [
        Drawing(lambda theme: _pairs(inputs, masked, "Attention", theme), name="attention", arrays=rollouts),
        Drawing(
            lambda theme: _pairs(inputs, tokens, "Tokens", theme),
            name="components",
            arrays={"components": capture.components},
        ),
    ]


def _pairs(left: Sequence[np.ndarray], right: Sequence[np.ndarray], name: str, theme: Theme) -> Figure:
    """Pairs of images side by side, up to four pairs to a row."""
    across = min(len(left), 4)
    rows = math.ceil(len(left) / across)
    size = (across * round(2.2 * PAIR), rows * PAIR + 24)
    figure, grid = new_figure(theme, size, rows, across * 2, layout="compressed", gridspec_kw={"wspace": 0.04})
    for axes in grid:
        axes.set_axis_off()
    for i, images in enumerate(zip(left, right, strict=True)):
        for axes, image, title in zip(grid[2 * i :], images, ("Input", name), strict=False):
            axes.imshow(image)
            if i < across:
                axes.set_title(title, color=theme.ink, fontsize=10)
    return figure


def _tiles(grid: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """[R, C, h, w, c] as one sheet [.., .., c] with NaN between the tiles; and the pitch of rows and columns."""
    zoom = math.ceil(24 / max(grid.shape[2:4]))
    grid = grid.repeat(zoom, axis=2).repeat(zoom, axis=3)
    rows, columns, height, width, channels = grid.shape
    gap = max(round(0.09 * max(height, width)), 1)
    spaced = np.pad(grid, ((0, 0), (0, 0), (0, gap), (0, gap), (0, 0)), constant_values=np.nan)
    sheet = spaced.transpose(0, 2, 1, 3, 4).reshape(rows * (height + gap), columns * (width + gap), channels)
    return sheet[:-gap, :-gap], (height + gap, width + gap)
