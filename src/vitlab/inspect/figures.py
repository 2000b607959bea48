"""The paper's figures (Fig. 6, 7, 10, 11, 14) and those of a training run. The only file that imports matplotlib.

Every figure is drawn for a light or a dark page. 100 units of its size are 100 CSS pixels, at twice the density. Only
`matplotlib.figure.Figure` is used, without pyplot and its global state, so threads are safe.
"""

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
import numpy as np
from jaxtyping import Float, Int, UInt8
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator as FixedLocator
from matplotlib.ticker import LogLocator as LogLocator
from matplotlib.ticker import MaxNLocator
from PIL import Image


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
PAIR = 112
"""Side of one image of a pair, in CSS pixels."""


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


def width_of(image: bytes) -> int:
    """Width of a figure's `png` in CSS pixels."""
    return Image.open(io.BytesIO(image)).width // 2


def webp(image: bytes) -> bytes:
    """A PNG as lossless WebP, a third of the size."""
    out = io.BytesIO()
    Image.open(io.BytesIO(image)).convert("RGB").save(out, format="WEBP", lossless=True, method=2)
    return out.getvalue()


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
    shown = figure.subplots(rows, columns, squeeze=False, **grid).ravel().tolist()
    for axes in shown:
        axes.set_facecolor(theme.card)
        axes.tick_params(colors=theme.muted, labelsize=8.5, length=3)
        axes.xaxis.label.set(color=theme.muted, fontsize=9)
        axes.yaxis.label.set(color=theme.muted, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[:].set_color(theme.line)
    return figure, shown


def curves(
    records: Sequence[Mapping[str, Any]],
    keys: Sequence[str],
    title: str,
    *,
    percent: bool = False,
    theme: Theme = LIGHT,
) -> Figure:
    """Each of `keys` over `step`, from the records (of metrics.jsonl) that hold a finite number for it."""
    figure, (axes,) = new_figure(theme, (288, 220), title=title)
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
        axes.set_ylim(min(low, high - 0.02), high)  # do not magnify noise
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%" if percent else short(value))
    if len(keys) > 1:
        axes.legend(frameon=False, fontsize=8.5, labelcolor=theme.ink)
    return figure


def confusion(counts: Int[np.ndarray, "K K"], classes: Sequence[str], *, theme: Theme = LIGHT) -> Figure:
    """The confusion matrix; rows are labels, columns predictions, color is the square root of the share of the row.

    Counts are written for up to 12 classes, names for up to 40; beyond that every tenth class has its index.
    """
    kinds = len(counts)
    cell = max(min(48, (360 if kinds <= 12 else 480) // kinds), 4)
    names = [name if len(name) <= 16 else name[:15] + "…" for name in classes] if kinds <= 40 else ["00"]
    size = min(8.5, 0.6 * cell)
    longest = round(0.9 * size * max(map(len, names)))  # a letter is about 0.9 CSS pixels a point wide
    upright = longest < 0.9 * cell or kinds > 40
    side = cell * kinds + 60
    figure, (axes,) = new_figure(theme, (side + longest, side if upright else side + longest), layout="compressed")
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    ramp = LinearSegmentedColormap.from_list("ramp", theme.ramp)
    axes.imshow(share, cmap=ramp, norm=PowerNorm(0.5, vmin=0, vmax=1), interpolation="nearest")
    axes.set(xlabel="prediction", ylabel="label")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(True)
    if kinds > 40:
        axes.set(xticks=range(0, kinds, 10), yticks=range(0, kinds, 10))
    else:
        axes.set_xticks(range(kinds), names, rotation=0 if upright else 90, fontsize=size)
        axes.set_yticks(range(kinds), names, fontsize=size)
    if kinds <= 12:
        for row, column in zip(*counts.nonzero(), strict=True):
            text = str(counts[row, column])
            lightness = np.dot(ramp(share[row, column] ** 0.5)[:3], (0.299, 0.587, 0.114))
            color = LIGHT.ink if lightness > 0.5 else "#ffffff"
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=min(9, cell / len(text)))
    return figure


def positions(similarity: Float[np.ndarray, "J h w h2 w2"], *, theme: Theme = LIGHT) -> Figure:
    """Cosine similarity of position embeddings: a tile for each patch, over all patches (Fig. 7 center).

    Tables of several blocks are drawn three to a row, the first block first (Fig. 10). Of more than 16 patches to a
    side only every second (third, ...) has a tile.
    """
    step = math.ceil(max(similarity.shape[1:3]) / 16)
    similarity = similarity[:, ::step, ::step]
    count, rows, columns = similarity.shape[:3]
    across, down = min(count, 3), math.ceil(count / 3)
    side = 230 if max(rows, columns) <= 8 else 420 if count == 1 else 290
    size = (across * side + 70, round(down * (side * min(rows / columns, 2) + 50)) + 30)
    figure, grid = new_figure(theme, size, down, across, "Position embedding similarity", "compressed")
    image = None
    for block, axes in enumerate(grid):
        if block >= count:
            axes.remove()
            continue
        sheet, pitches = _tiles(np.round(50 * similarity[block, ..., None]) / 50)  # few colors make a small file
        image = axes.imshow(sheet[..., 0], cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
        for pitch, patches, set_ticks in zip(pitches, (rows, columns), (axes.set_yticks, axes.set_xticks), strict=True):
            numbers = [str(1 + step * i) for i in range(patches)]  # from 1, as in the paper
            set_ticks([pitch * (i + 0.45) for i in range(patches)], numbers)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("input patch column" if count == 1 else f"block {block + 1}")
        axes.set_ylabel("input patch row" if block % across == 0 else "")
    assert image is not None
    bar = figure.colorbar(image, ax=grid[:count], ticks=[-1, 0, 1], aspect=25, pad=0.02)
    bar.set_label("cosine similarity", color=theme.muted, fontsize=9, labelpad=-4)
    bar.ax.tick_params(colors=theme.muted, labelsize=8.5, length=0)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure


def filters(components: Float[np.ndarray, "n P P 3"], *, theme: Theme = LIGHT) -> Figure:
    """The components of `filter_components`, seven to a row (Fig. 7 left)."""
    columns = min(7, len(components))
    rows = math.ceil(len(components) / columns)
    sheet = np.full((rows * columns, *components.shape[1:]), np.nan)
    sheet[: len(components)] = components
    tiles, _ = _tiles(sheet.reshape(rows, columns, *components.shape[1:]))
    height = round(288 * tiles.shape[0] / tiles.shape[1])
    figure, (axes,) = new_figure(theme, (288, height + 34), title="RGB embedding filters")
    opaque = np.isfinite(tiles[..., :1]).astype(float)
    axes.imshow(np.concatenate([np.nan_to_num(tiles), opaque], axis=-1), interpolation="nearest")
    axes.set_axis_off()
    return figure


def attention_distance(
    distances: Float[np.ndarray, "L k"],
    layers: Sequence[str] = (),
    uniform: Sequence[float] = (),
    *,
    title: str = "Attention distance",
    theme: Theme = LIGHT,
) -> Figure:
    """One dot for each head of each layer, and a line through the layers' means (Fig. 7 right, Fig. 11).

    layers: names, numbers by default. uniform: distances of uniform attention, each a dashed line.
    """
    count, heads = distances.shape
    figure, (axes,) = new_figure(theme, (340, 320), title=title)
    depth = np.arange(1, count + 1)
    dots = {"s": 20, "color": theme.series[0], "alpha": 0.7, "linewidths": 0, "zorder": 2}
    axes.scatter(np.repeat(depth, heads), distances.ravel(), label="one head", **dots)
    axes.plot(depth, distances.mean(axis=1), color=theme.series[1], lw=1.5, label="mean of the layer", zorder=1)
    for level in uniform:
        axes.axhline(level, color=theme.muted, lw=1, ls=(0, (5, 3)), label=f"uniform: {level:.4g}", zorder=0)
    axes.grid(axis="y", color=theme.line, lw=0.7)
    axes.set(xlim=(0.5, count + 0.5), ylim=(0, 1.12 * max(float(distances.max()), *uniform, 1e-6)))
    names = [name.split()[0] for name in layers] or [str(i) for i in depth]
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(lambda x, _: names[round(x) - 1] if 1 <= round(x) <= count else "")
    axes.yaxis.set_major_locator(MaxNLocator(6))
    halves = "; rows, then columns" if layers and layers[0] != names[0] else ""
    axes.set(xlabel=f"network depth (layer{halves})", ylabel="mean attention distance (pixels)")
    compact = {"handlelength": 1.4, "columnspacing": 1.2, "handletextpad": 0.5, "borderaxespad": 0.2}
    style = {"frameon": False, "fontsize": 8.5, "labelcolor": theme.muted, "ncols": 2 if len(uniform) != 1 else 3}
    figure.legend(loc="outside lower center", **style, **compact)
    return figure


def heads(maps: Float[np.ndarray, "L k h w"], layers: Sequence[str], *, theme: Theme = LIGHT) -> Figure:
    """The map of every head in one image: rows are layers, the lowest at the top, columns are heads.

    `maps` are `overlays.levels`, from 0 (dark blue) to 1 (yellow).
    """
    count, columns = maps.shape[:2]
    sheet, pitches = _tiles(np.round(31 * maps[..., None]) / 31)  # few colors make a small file
    width = max(min(620 // columns, 48), 24) * columns
    size = (max(width + 90, 220), round(width * sheet.shape[0] / sheet.shape[1]) + 80)
    figure, (axes,) = new_figure(theme, size, title="Attention of every head", layout="compressed")
    axes.imshow(sheet[..., 0], cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
    shown = range(0, columns, math.ceil(columns * 14 / width))
    axes.set_xticks([pitches[1] * (i + 0.45) for i in shown], [str(i + 1) for i in shown])
    axes.set_yticks([pitches[0] * (i + 0.45) for i in range(count)], layers)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set(xlabel="head", ylabel="layer")
    return figure


def pairs(
    left: Sequence[UInt8[np.ndarray, "_ _ 3"]],
    right: Sequence[UInt8[np.ndarray, "_ _ 3"]],
    names: tuple[str, str] = ("Input", "Attention"),
    *,
    theme: Theme = LIGHT,
) -> Figure:
    """Pairs of images side by side, up to four pairs to a row (Fig. 6; Fig. 14)."""
    across = min(len(left), 4)
    rows = math.ceil(len(left) / across)
    size = (across * round(2.2 * PAIR), rows * PAIR + 24)
    figure, grid = new_figure(theme, size, rows, across * 2, layout="compressed", gridspec_kw={"wspace": 0.04})
    for axes in grid:
        axes.set_axis_off()
    for i, images in enumerate(zip(left, right, strict=True)):
        for j, (image, name) in enumerate(zip(images, names, strict=True)):
            grid[2 * i + j].imshow(image)
            if i < across:
                grid[2 * i + j].set_title(name, color=theme.ink, fontsize=10)
    return figure


def ramp(count: int) -> UInt8[np.ndarray, "count 3"]:
    """The colors of attention maps, from least to most."""
    return (255 * matplotlib.colormaps["viridis"](np.linspace(0, 1, count))[:, :3]).round().astype(np.uint8)


def short(value: float | int) -> str:
    """A number for a tick: 0.0075, 2.5e-4, 600, 60k, 1.3M."""
    for unit, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * unit:
            return f"{value / unit:.3g}{sign}"
    if value == 0 or abs(value) >= 0.00095:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _tiles(grid: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """[R, C, h, w, c] as one sheet [.., .., c] with NaN between the tiles; and the pitch of rows and columns."""
    zoom = math.ceil(24 / max(grid.shape[2:4]))
    grid = grid.repeat(zoom, axis=2).repeat(zoom, axis=3)
    rows, columns, height, width, channels = grid.shape
    gap = max(round(0.09 * max(height, width)), 1)
    spaced = np.pad(grid, ((0, 0), (0, 0), (0, gap), (0, gap), (0, 0)), constant_values=np.nan)
    sheet = spaced.transpose(0, 2, 1, 3, 4).reshape(rows * (height + gap), columns * (width + gap), channels)
    return sheet[:-gap, :-gap], (height + gap, width + gap)
