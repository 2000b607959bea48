"""Fig. 1 (`vitlab paper fig1`): an image as patches, through the encoder to a class; beside it one encoder block."""

import numpy as np
from jaxtyping import UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from vitlab.inspection.figures import INK, LINE, MUTED, fit, new_figure

Number = int | float
Row = tuple[Number, Number]
"""Bottom and top of boxes side by side."""
WIDTH = 940
HEIGHT = 470
GRID = 3
"""Patches per side of the drawn image, as in the paper's figure; ViT-B/16 has 14 at 224 pixels."""
LEFT = 20
IMAGE_SIDE = 100
CENTERS = [120, *(172 + 52 * number for number in range(GRID**2))]
"""x of the class token and the head above it, then of each patch in the sequence and its token."""
BLOCK_LEFT = 690
BLOCK_CENTER = 815
PATCHES: Row = (50, 90)
PROJECTION: Row = (112, 142)
TOKENS: Row = (168, 206)
ENCODER: Row = (234, 300)
HEAD: Row = (332, 368)
CLASSES: Row = (394, 414)
FILLS = {"token": "#e3edf6", "class": "#fbe7da", "encoder": "#def1ea", "projection": "#f3e6ef", "norm": "#f2eedd"}
"""Layers of a block have the color of tokens, the head has the class token's, and positions have the norms'."""


def draw_overview(image: UInt8[np.ndarray, "H W 3"]) -> Figure:
    """The figure; one unit of its axes is a CSS pixel."""
    figure, (axes,) = new_figure((WIDTH, HEIGHT))
    _draw_patches(axes, _square(image))
    axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT), aspect="equal")  # which the patches have changed
    axes.set_axis_off()
    _draw_model(axes)
    _draw_block(axes)
    return figure


def _square(image: UInt8[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "s s 3"]:
    """The center of the image, with sides that patches divide."""
    height, width = image.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    small = fit(image[top : top + side, left : left + side], 60 * GRID, enlarge=True)
    return small[: len(small) // GRID * GRID, : len(small) // GRID * GRID]


def _draw_patches(axes: Axes, image: UInt8[np.ndarray, "s s 3"]) -> None:
    """Every patch twice: in the image, and in the sequence."""
    pixels = len(image) // GRID
    gap = 3
    side = (IMAGE_SIDE - (GRID - 1) * gap) / GRID
    for number, center in enumerate(CENTERS[1:]):
        row, column = divmod(number, GRID)
        patch = image[row * pixels : (row + 1) * pixels, column * pixels : (column + 1) * pixels]
        x, y = LEFT + column * (side + gap), 20 + (GRID - 1 - row) * (side + gap)
        for extent in ((x, x + side, y, y + side), (center - 20, center + 20, *PATCHES)):
            axes.imshow(patch, extent=extent, interpolation="antialiased", aspect="auto")


def _draw_model(axes: Axes) -> None:
    """From the bottom up: patches, projection, tokens with positions, encoder, head."""
    _text(axes, LEFT, 450, "Vision Transformer (ViT)", size=13, weight="bold", ha="left")
    _arrow(axes, (LEFT + IMAGE_SIDE + 4, 70), (CENTERS[1] - 24, 70))
    _text(axes, (CENTERS[1] + CENTERS[-1]) / 2, 32, "patches of P x P pixels", color=MUTED)
    _box(axes, 148, 464, PROJECTION, "Linear projection of flattened patches, E", "projection")
    for number, center in enumerate(CENTERS):
        if number:
            _arrow_up(axes, center, PATCHES, PROJECTION)
            _arrow_up(axes, center, PROJECTION, TOKENS)
        _box(axes, center - 22, 19, TOKENS, str(number), "norm", size=9)
        _box(axes, center + 1, 19, TOKENS, "" if number else "*", "token" if number else "class", size=11)
        _arrow_up(axes, center, TOKENS, ENCODER)
    _text(axes, LEFT, 196, "position and", ha="left", color=MUTED, size=8)
    _text(axes, LEFT, 181, "patch; *: class", ha="left", color=MUTED, size=8)
    _box(axes, 92, 520, ENCODER, "Transformer encoder, L blocks", "encoder", size=12)
    _arrow_up(axes, CENTERS[0], ENCODER, HEAD)
    _box(axes, 84, 72, HEAD, "MLP head", "class")
    _arrow_up(axes, CENTERS[0], HEAD, CLASSES)
    _text(axes, CENTERS[0], 404, "class: temple, flower, cup, ...", color=INK)


def _draw_block(axes: Axes) -> None:
    """Eq. 2 and Eq. 3, from the bottom up."""
    _text(axes, BLOCK_LEFT, 450, "Encoder block (Eq. 2, 3)", size=13, weight="bold", ha="left")
    _box(axes, BLOCK_LEFT + 20, 210, (62, 414), "", "encoder")
    _text(axes, BLOCK_LEFT + 28, 398, "L x", ha="left", size=11)
    _text(axes, BLOCK_CENTER, 22, "tokens z", color=MUTED)
    _arrow(axes, (BLOCK_CENTER, 32), (BLOCK_CENTER, 88))
    _draw_branch(axes, 90, "Multi-head attention", "Eq. 2", end=248)
    _draw_branch(axes, 250, "MLP", "Eq. 3", end=426)


def _draw_branch(axes: Axes, bottom: int, name: str, equation: str, end: int) -> None:
    """A norm, the layer `name`, and the sum with what entered the norm; an arrow from there to `end`."""
    norm: Row = (bottom, bottom + 26)
    layer: Row = (bottom + 50, bottom + 88)
    center, plus = BLOCK_CENTER, bottom + 118
    _box(axes, center - 70, 140, norm, "Norm", "norm")
    _arrow_up(axes, center, norm, layer)
    _box(axes, center - 70, 140, layer, name, "token")
    _arrow(axes, (center, bottom + 90), (center, plus - 10))
    axes.add_patch(Circle((center, plus), 9, facecolor="white", edgecolor=INK, lw=1))
    _text(axes, center, plus, "+", size=11)
    _arrow(axes, (center - 82, plus), (center - 10, plus))
    axes.plot([center, center - 82, center - 82], [bottom - 12, bottom - 12, plus], color=MUTED, lw=1)
    _text(axes, center + 64, plus, equation, color=MUTED)
    _arrow(axes, (center, plus + 10), (center, end))


def _box(axes: Axes, left: Number, width: Number, row: Row, text: str, fill: str, size: Number = 9.5) -> None:
    style = {"boxstyle": "round,pad=0,rounding_size=5", "edgecolor": LINE, "lw": 1, "zorder": 1}
    axes.add_patch(FancyBboxPatch((left, row[0]), width, row[1] - row[0], facecolor=FILLS[fill], **style))
    _text(axes, left + width / 2, sum(row) / 2, text, size=size)


def _text(axes: Axes, x: Number, y: Number, text: str, **style: object) -> None:
    options = {"ha": "center", "va": "center", "size": 9, "color": INK, "zorder": 3} | style
    axes.text(x, y, text, **options)  # pyright: ignore[reportArgumentType]


def _arrow_up(axes: Axes, x: Number, lower: Row, upper: Row) -> None:
    """An arrow from the top of a row to the bottom of the one above."""
    _arrow(axes, (x, lower[1] + 2), (x, upper[0] - 2))


def _arrow(axes: Axes, start: tuple[Number, Number], end: tuple[Number, Number]) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 8, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(start, end, color=MUTED, lw=1, zorder=2, **style))
