"""Numbers to images, in the paper's form (Fig. 6, 7, 10, 11, 14). The only file that imports matplotlib.

A figure is drawn for a light or a dark page; 100 units of its size are 100 pixels on the page, at twice the
density. No global state: `matplotlib.figure.Figure` without pyplot, so threads and windows do not matter.
"""

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float, Int, UInt8
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator
from PIL import Image


@dataclass(frozen=True)
class Theme:
    """Colors of a page and its figures; the color-blind can tell the first four of `series` apart (after Okabe and
    Ito), the others with their markers."""

    page: str
    card: str
    ink: str
    muted: str
    line: str
    accent: str
    series: tuple[str, ...]
    ramp: tuple[str, ...]
    """From nothing to all, each step further from the card's color in lightness."""


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


PAIR = 112
"""Side of a image in a pair, in page pixels."""


def png(figure: Figure) -> bytes:
    """The figure as PNG, two pixels to a unit of length; no date or version is written into it."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=200, metadata={"Software": None})
    return out.getvalue()


def webp(image: bytes) -> bytes:
    """A figure's `png` without loss in a third of the bytes, for a page that holds its figures."""
    out = io.BytesIO()
    Image.open(io.BytesIO(image)).convert("RGB").save(out, format="WEBP", lossless=True, method=2)
    return out.getvalue()


def svg(figure: Figure) -> bytes:
    """The figure as SVG, letters as outlines; the same figure gives the same bytes."""
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "vitlab", "svg.fonttype": "path"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def curves(
    records: Sequence[Mapping[str, Any]],
    keys: Sequence[str],
    title: str,
    *,
    percent: bool = False,
    theme: Theme = LIGHT,
) -> Figure:
    """Each of `keys` over the steps of those records (of metrics.jsonl) that hold a finite number for it."""
    figure, axes = _axes(theme, (288, 220), (50, 10, 34, 40), title)
    for key, color in zip(keys, itertools.cycle(theme.series), strict=False):
        points = [(r["step"], r[key]) for r in records if r.get(key) is not None and math.isfinite(r[key])]
        steps, values = np.array(points, dtype=float).reshape(-1, 2).T
        marker = "o" if len(points) <= 30 else None
        axes.plot(steps, values, color=color, lw=1.5, marker=marker, ms=3, label=key.replace("_", " "))
    axes.grid(axis="y", color=theme.line, lw=0.7)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if percent:
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, high - 0.02), high)  # a curve that hardly moves must not look as if it did
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%" if percent else _short(value))
    if len(keys) > 1:
        axes.legend(frameon=False, fontsize=8.5, labelcolor=theme.ink)
    return figure


def confusion(counts: Int[np.ndarray, "K K"], classes: Sequence[str], *, theme: Theme = LIGHT) -> Figure:
    """Rows: the true class; columns: the answer; color: the share of the row, by its square root.

    Counts are written in while they can be read (12 classes), names up to 40 classes, above that every tenth
    class's number, from 0.
    """
    kinds = len(counts)
    names = [name if len(name) <= 16 else name[:15] + "…" for name in classes] if kinds <= 40 else ["00"]
    cell = max(min(48, (360 if kinds <= 12 else 480) // kinds), 4)
    size = min(8.5, 0.6 * cell)
    longest = max(text_width(name, size) for name in names)
    upright, margin = longest < 0.9 * cell or kinds > 40, round(longest) + 36
    below, side = (38 if upright else margin), cell * kinds
    figure, axes = _axes(theme, (margin + side + 6, side + below + 6), (margin, 6, 6, below))
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    ramp = LinearSegmentedColormap.from_list("ramp", theme.ramp)
    axes.imshow(share, cmap=ramp, norm=PowerNorm(0.5, vmin=0, vmax=1), interpolation="nearest")
    axes.set_xlabel("answer")
    axes.set_ylabel("true class")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(True)
    if kinds > 40:
        axes.set_xticks(range(0, kinds, 10))
        axes.set_yticks(range(0, kinds, 10))
    else:
        axes.set_xticks(range(kinds), names, rotation=0 if upright else 90, fontsize=size)
        axes.set_yticks(range(kinds), names, fontsize=size)
    if kinds <= 12:
        for row, column in zip(*counts.nonzero(), strict=True):
            text = str(counts[row, column])
            lightness = np.dot(ramp(share[row, column] ** 0.5)[:3], (0.299, 0.587, 0.114))
            color = LIGHT.ink if lightness > 0.5 else "#ffffff"
            size = min(9.0, cell / len(text))
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=size)
    return figure


def positions(similarity: Float[np.ndarray, "J h w h2 w2"], *, theme: Theme = LIGHT) -> Figure:
    """A grid of grids: the tile in row i, column j shows how near all places are to that patch (Fig. 7 center).

    Of tables that enter at several blocks, each is one such grid, three to a row, the first block's first (Fig. 10).
    Of more than 16 places to a side every second (or third, ...) has a tile.
    """
    step = math.ceil(max(similarity.shape[1:3]) / 16)
    similarity = similarity[:, ::step, ::step]
    count, rows, columns = similarity.shape[:3]
    across, down = min(count, 3), math.ceil(count / 3)
    sheets = [_tiles(np.round(50 * each[..., None]) / 50) for each in similarity]  # few colors: half of the file
    high, wide = _enlarged(sheets[0][0], 200 if max(rows, columns) <= 8 else 380 if count == 1 else 260)
    left, below = (34 if step * rows < 10 else 42), 38
    width, height = across * (left + wide + 8) + 56, 34 + down * (high + below)
    figure = blank(theme, (width, height), "Position embedding similarity")
    for i, (sheet, pitches) in enumerate(sheets):
        row, column = divmod(i, across)
        axes = place(figure, theme, (column * (left + wide + 8) + left, 34 + row * (high + below), wide, high))
        image = axes.imshow(sheet[..., 0], cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
        for pitch, patches, ticks in zip(pitches, (rows, columns), (axes.set_yticks, axes.set_xticks), strict=True):
            numbers = [str(1 + step * j) for j in range(patches)]  # from 1, as in the paper
            ticks([pitch * (j + 0.45) for j in range(patches)], numbers)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("input patch column" if count == 1 else f"block {i + 1}")
        axes.set_ylabel("input patch row" if column == 0 else "")
        if i == 0:
            scale = place(figure, theme, (width - 54, 34, 10, high))
            bar = figure.colorbar(image, cax=scale, ticks=[-1, 0, 1])
            bar.set_label("cosine similarity", color=theme.muted, fontsize=9, labelpad=-4)
            scale.tick_params(length=0)
            bar.ax.spines[:].set_visible(False)
    return figure


def filters(components: Float[np.ndarray, "n P P 3"], *, theme: Theme = LIGHT) -> Figure:
    """The components of `filter_components`, seven to a row, the first at the top left (Fig. 7 left)."""
    columns = min(7, len(components))
    rows = math.ceil(len(components) / columns)
    sheet = np.full((rows * columns, *components.shape[1:]), np.nan)
    sheet[: len(components)] = components
    tiles, _ = _tiles(sheet.reshape(rows, columns, *components.shape[1:]))
    high = round(288 * tiles.shape[0] / tiles.shape[1])
    figure, axes = _axes(theme, (288, high + 34), (0, 0, 34, 0), "RGB embedding filters")
    opaque = np.isfinite(tiles[..., :1]).astype(float)
    axes.imshow(np.concatenate([np.nan_to_num(tiles), opaque], axis=-1), interpolation="nearest")
    axes.set_axis_off()
    return figure


def attention_distance(
    distances: Float[np.ndarray, "L k"],
    layers: Sequence[str] = (),
    uniform: Sequence[float] = (),
    *,
    title: str = "",
    theme: Theme = LIGHT,
) -> Figure:
    """One dot for each head of each layer, and a line through the layers' means (Fig. 7 right, Fig. 11).

    layers: what the layers are called, numbers unless given. uniform: the distances of heads that look everywhere
    alike, each a dashed line.
    """
    count, each = distances.shape
    figure, axes = _axes(theme, (320, 300), (54, 10, 54, 40), title)
    depth = np.arange(1, count + 1)
    axes.plot(depth, distances.mean(axis=1), color=theme.series[1], lw=1.5, label="mean of the layer", zorder=1)
    dots = {"s": 20, "color": theme.series[0], "alpha": 0.7, "linewidths": 0, "label": "one head", "zorder": 2}
    axes.scatter(np.repeat(depth, each), distances.ravel(), **dots)
    top = max(float(distances.max()), *uniform, 1e-6)
    for level in uniform:
        axes.axhline(level, color=theme.muted, lw=1, ls=(0, (5, 3)), zorder=0)
        said = f"uniform attention: {level:.4g}"
        axes.text(0.6, level + 0.015 * top, said, color=theme.muted, fontsize=8.5, va="bottom")
    axes.grid(axis="y", color=theme.line, lw=0.7)
    axes.set_ylim(0, 1.12 * top)
    axes.set_xlim(0.5, count + 0.5)
    names = [name.split()[0] for name in layers] or [str(i) for i in depth]
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(lambda x, _: names[round(x) - 1] if 1 <= round(x) <= count else "")
    axes.yaxis.set_major_locator(MaxNLocator(6))
    halves = "; rows, then columns" if layers and layers[0] != names[0] else ""
    axes.set_xlabel(f"network depth (layer{halves})")
    axes.set_ylabel("mean attention distance (pixels)")
    axes.legend(
        frameon=False,
        fontsize=8.5,
        labelcolor=theme.muted,
        ncols=2,
        loc="lower left",
        bbox_to_anchor=(-0.04, 0.98),
        handlelength=1.2,
        columnspacing=1.2,
    )
    return figure


def heads(maps: Float[np.ndarray, "L k h w"], layers: Sequence[str], *, theme: Theme = LIGHT) -> Figure:
    """Every head's map of one image: a row for each layer, the lowest at the top, a column for each head.

    `maps` are levels from 0, dark blue, to 1, yellow (`overlays.levels`).
    """
    count, columns = maps.shape[:2]
    sheet, pitches = _tiles(np.round(31 * maps[..., None]) / 31)  # few colors: a third of the file
    tall, wide = _enlarged(sheet, max(min(620 // columns, 48), 24) * columns)
    left = 30 + 8 * max(len(name) for name in layers)
    right = 8 + max(190 - left - wide, 0)  # the title has to fit
    size = (left + wide + right, 34 + tall + 40)
    figure, axes = _axes(theme, size, (left, right, 34, 40), "Attention of every head")
    axes.imshow(sheet[..., 0], cmap="viridis", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    step = math.ceil(columns * 14 / wide)
    axes.set_xticks(
        [pitches[1] * (i + 0.45) for i in range(0, columns, step)], [str(i) for i in range(1, columns + 1, step)]
    )
    axes.set_yticks([pitches[0] * (i + 0.45) for i in range(count)], layers)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    return figure


def pairs(
    left: Sequence[UInt8[np.ndarray, "_ _ 3"]],
    right: Sequence[UInt8[np.ndarray, "_ _ 3"]],
    names: tuple[str, str] = ("Input", "Attention"),
    *,
    theme: Theme = LIGHT,
) -> Figure:
    """Images beside what became of them, in their order, up to four pairs to a row (Fig. 6; Fig. 14).

    Each fills a square of PAIR page pixels, so one with a longer side of twice that is shown pixel for pixel.
    """
    side, gap = PAIR, 6
    across = min(len(left), 4)
    pitch = 2 * side + gap + 16
    width, height = across * pitch - 16 + 2 * gap, 28 + math.ceil(len(left) / across) * (side + gap) + gap
    figure = blank(theme, (width, height))
    for i, both in enumerate(zip(left, right, strict=True)):
        row, column = divmod(i, across)
        for j, image in enumerate(both):
            corner = (gap + column * pitch + j * (side + gap), 28 + row * (side + gap))
            axes = place(figure, theme, (*corner, side, side))
            axes.imshow(image)
            axes.set_axis_off()
            if row == 0:
                axes.set_title(names[j], color=theme.ink, fontsize=10, pad=5)
    return figure


def ramp(count: int) -> UInt8[np.ndarray, "count 3"]:
    """The colors of a map of attention, from least to most."""
    return (255 * matplotlib.colormaps["viridis"](np.linspace(0, 1, count))[:, :3]).round().astype(np.uint8)


def _tiles(grid: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """[R, C, h, w, c] laid out as one [.., .., c], NaN between the tiles; and the pitch of rows and columns."""
    zoom = math.ceil(24 / max(grid.shape[2:4]))
    grid = grid.repeat(zoom, axis=2).repeat(zoom, axis=3)
    rows, columns, height, width, channels = grid.shape
    gap = max(round(0.09 * max(height, width)), 1)
    spaced = np.pad(grid, ((0, 0), (0, 0), (0, gap), (0, gap), (0, 0)), constant_values=np.nan)
    sheet = spaced.transpose(0, 2, 1, 3, 4).reshape(rows * (height + gap), columns * (width + gap), channels)
    return sheet[:-gap, :-gap], (height + gap, width + gap)


def _enlarged(sheet: np.ndarray, width: int) -> tuple[int, int]:
    """(height, width) in page pixels, about `width` wide, at which a sheet's squares are all of one size in a PNG."""
    scale = max(round(2 * width / sheet.shape[1]), 1) / 2
    return math.ceil(sheet.shape[0] * scale), math.ceil(sheet.shape[1] * scale)


def _short(value: float) -> str:
    """At most six signs, for a tick: 0.0075, 2.5e-4."""
    text = f"{value:.4g}"
    return text if len(text) <= 6 else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")


def _axes(
    theme: Theme, size: tuple[int, int], margins: tuple[int, int, int, int], title: str = ""
) -> tuple[Figure, Axes]:
    """A figure of `size` (width, height) with axes inside its margins (left, right, top, bottom).

    Page pixels all. Margins are given, not found by a layout engine of matplotlib: those draw twice and do not
    settle around images.
    """
    (width, height), (left, right, top, bottom) = size, margins
    figure = blank(theme, size, title)
    return figure, place(figure, theme, (left, top, width - left - right, height - top - bottom))


def blank(theme: Theme, size: tuple[int, int], title: str = "") -> Figure:
    """A figure of `size` (width, height) in page pixels."""
    width, height = size
    figure = Figure(figsize=(width / 100, height / 100), facecolor=theme.card)
    if title:
        figure.text(2 / width, 1 - 2 / height, title, va="top", color=theme.ink, fontsize=10, fontweight="bold")
    return figure


def place(figure: Figure, theme: Theme, box: tuple[int, int, int, int]) -> Axes:
    """Axes at `box` (left, top, width, height) of the figure, in page pixels from its top left."""
    width, height = 100 * figure.get_size_inches()
    left, top, wide, high = box
    rectangle = (left / width, 1 - (top + high) / height, wide / width, high / height)
    axes = figure.add_axes(rectangle, facecolor=theme.card)
    axes.tick_params(colors=theme.muted, labelsize=8.5, length=3)
    axes.xaxis.label.set(color=theme.muted, fontsize=9)
    axes.yaxis.label.set(color=theme.muted, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[:].set_color(theme.line)
    return axes


def text_width(text: str, size: float) -> float:
    """Of one line, in page pixels."""
    return float(TextPath((0, 0), text, size=size).get_extents().width) * 100 / 72
