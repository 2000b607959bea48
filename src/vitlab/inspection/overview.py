"""Fig. 1: an image as a sequence of patches, through the encoder to a class; beside it one encoder block."""

import numpy as np
from jaxtyping import UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from vitlab.inspection.figures import INK, LINE, MUTED, fit, new_figure

GRID = 3
"""Patches on a side of the drawn image, as in the paper's figure; ViT-B/16 has 14 at 224 pixels."""
PALE = ("#e3edf6", "#fbe7da", "#def1ea", "#f3e6ef", "#f2eedd")
"""Fills: tokens, class token, encoder, head, norms."""
WIDTH, HEIGHT = 940, 470
BLOCK_LEFT = 690
"""Where the drawing of the block begins."""
Point = tuple[int | float, int | float]


def draw_overview(image: UInt8[np.ndarray, "H W 3"]) -> Figure:
    """The figure; one unit of its axes is a CSS pixel."""
    figure, (axes,) = new_figure((WIDTH, HEIGHT))
    axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT), aspect="equal")
    axes.set_axis_off()
    _draw_model(axes, _square(image))
    _draw_block(axes)
    return figure


def _square(image: UInt8[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "s s 3"]:
    """The center of the image, with sides that patches divide."""
    height, width = image.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    small = fit(image[top : top + side, left : left + side], 60 * GRID, enlarge=True)
    return small[: len(small) // GRID * GRID, : len(small) // GRID * GRID]


def _draw_model(axes: Axes, image: UInt8[np.ndarray, "s s 3"]) -> None:
    """From the bottom up: patches, projection, tokens with positions, encoder, head."""
    _text(axes, 20, 450, "Vision Transformer (ViT)", size=13, weight="bold", ha="left")
    patch = len(image) // GRID
    shown, gap, left = 100, 3, 20
    side = (shown - (GRID - 1) * gap) / GRID
    centers = [172 + 52 * number for number in range(GRID**2)]
    for row in range(GRID):
        for column in range(GRID):
            part = image[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
            x, y = left + column * (side + gap), 20 + (GRID - 1 - row) * (side + gap)
            axes.imshow(part, extent=(x, x + side, y, y + side), interpolation="antialiased", aspect="auto")
            center = centers[row * GRID + column]
            axes.imshow(part, extent=(center - 20, center + 20, 50, 90), interpolation="antialiased", aspect="auto")
    axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT), aspect="equal")  # imshow has changed them
    _arrow(axes, (left + shown + 4, 70), (centers[0] - 24, 70))
    _text(axes, (centers[0] + centers[-1]) / 2, 32, "patches of P x P pixels", color=MUTED)
    _box(axes, 148, 112, 464, 30, "Linear projection of flattened patches, E", PALE[3])
    for number, center in enumerate([120, *centers]):
        if number:
            _arrow(axes, (center, 92), (center, 110))
            _arrow(axes, (center, 144), (center, 166))
        _box(axes, center - 22, 168, 19, 38, str(number), PALE[4], size=9)
        _box(axes, center + 1, 168, 19, 38, "" if number else "*", PALE[0] if number else PALE[1], size=11)
        _arrow(axes, (center, 208), (center, 232))
    _text(axes, 20, 196, "position and", ha="left", color=MUTED, size=8)
    _text(axes, 20, 181, "patch; *: class", ha="left", color=MUTED, size=8)
    _box(axes, 92, 234, 520, 66, "Transformer encoder, L blocks", PALE[2], size=12)
    _arrow(axes, (120, 302), (120, 330))
    _box(axes, 84, 332, 72, 36, "MLP head", PALE[1])
    _arrow(axes, (120, 370), (120, 392))
    _text(axes, 120, 404, "class: temple, flower, cup, ...", color=INK)


def _draw_block(axes: Axes) -> None:
    """Eq. 2 and Eq. 3, from the bottom up."""
    left, center = BLOCK_LEFT + 20, BLOCK_LEFT + 125
    _text(axes, BLOCK_LEFT, 450, "Encoder block (Eq. 2, 3)", size=13, weight="bold", ha="left")
    axes.add_patch(_rounded(left, 62, 210, 352, PALE[2]))
    _text(axes, left + 8, 398, "L x", ha="left", size=11)
    _text(axes, center, 22, "tokens z", color=MUTED)
    _arrow(axes, (center, 32), (center, 88))
    for bottom, norm, name, equation in ((90, 90, "Multi-head attention", "Eq. 2"), (250, 250, "MLP", "Eq. 3")):
        _box(axes, center - 70, norm, 140, 26, "Norm", PALE[4])
        _arrow(axes, (center, bottom + 28), (center, bottom + 48))
        _box(axes, center - 70, bottom + 50, 140, 38, name, PALE[0])
        _arrow(axes, (center, bottom + 90), (center, bottom + 108))
        axes.add_patch(Circle((center, bottom + 118), 9, facecolor="white", edgecolor=INK, lw=1))
        _text(axes, center, bottom + 118, "+", size=11)
        _arrow(axes, (center - 82, bottom + 118), (center - 10, bottom + 118))
        axes.plot([center, center - 82, center - 82], [bottom - 12, bottom - 12, bottom + 118], color=MUTED, lw=1)
        _text(axes, center + 64, bottom + 118, equation, color=MUTED)
        _arrow(axes, (center, bottom + 128), (center, bottom + (158 if bottom == 90 else 176)))


def _rounded(x: int | float, y: int | float, width: int | float, height: int | float, fill: str) -> FancyBboxPatch:
    return FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=5", facecolor=fill, edgecolor=LINE, lw=1, zorder=1
    )


def _box(
    axes: Axes,
    x: int | float,
    y: int | float,
    width: int | float,
    height: int | float,
    text: str,
    fill: str,
    size: int | float = 9.5,
) -> None:
    axes.add_patch(_rounded(x, y, width, height, fill))
    _text(axes, x + width / 2, y + height / 2, text, size=size)


def _text(axes: Axes, x: int | float, y: int | float, text: str, **style: object) -> None:
    options = {"ha": "center", "va": "center", "size": 9, "color": INK, "zorder": 3} | style
    axes.text(x, y, text, **options)  # pyright: ignore[reportArgumentType]


def _arrow(axes: Axes, start: Point, end: Point) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=8, color=MUTED, lw=1, shrinkA=0, shrinkB=0, zorder=2
        )
    )
