"""Figures show the numbers that they were given."""

import io
from collections.abc import Callable
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from vitlab.inspect import figures, overlays
from vitlab.inspect.figures import DARK, LIGHT, Theme

RANDOM = np.random.default_rng(0)
RECORDS = [{"step": s, "loss": 1 / s, "lr": 3e-5 * s} for s in range(1, 400, 3)]
RECORDS += [{"step": 400, "eval_accuracy": 0.98765}, {"step": 800, "eval_accuracy": 0.98766, "loss": None}]


def confused(kinds: int, name: str) -> Callable[[Theme], Figure]:
    counts = RANDOM.integers(0, 3, (kinds, kinds)) + np.diag(RANDOM.integers(50, 9000, kinds))
    return lambda theme: figures.confusion(counts, [f"{name}{i}" for i in range(kinds)], theme=theme)


def similar(rows: int, columns: int, blocks: int = 1) -> Callable[[Theme], Figure]:
    return lambda theme: figures.positions(RANDOM.uniform(-1, 1, (blocks, *(rows, columns) * 2)), theme=theme)


def halves(layers: int) -> list[str]:
    return [f"{i} {line}" for i in range(1, layers + 1) for line in ("rows", "columns")]


def noise(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, (*shape, 3), dtype=np.uint8)


DRAWN: dict[str, Callable[[Theme], Figure]] = {
    "rate": lambda theme: figures.curves(RECORDS, ["lr"], "Learning rate", theme=theme),
    "accuracy": lambda theme: figures.curves(RECORDS, ["eval_accuracy"], "Accuracy", percent=True, theme=theme),
    "2 classes": confused(2, "no "),
    "12 long names": confused(12, "WIDE AND LONG NAME "),
    "40 classes": confused(40, "class "),
    "100 classes": confused(100, "class "),
    "3x5 patches": similar(3, 5),
    "37x30 patches": similar(37, 30),
    "5 blocks": similar(8, 8, blocks=5),
    "28 filters": lambda theme: figures.filters(RANDOM.random((28, 4, 4, 3)), theme=theme),
    "one layer, no distance": lambda theme: figures.attention_distance(np.zeros((1, 1)), theme=theme),
    "axial distance": lambda theme: figures.attention_distance(
        90 * RANDOM.random((24, 12)), halves(12), [50.2, 74.67], title="Axial-ViT-B/16", theme=theme
    ),
    "heads": lambda theme: figures.heads(RANDOM.random((12, 6, 14, 14)), [str(i) for i in range(12)], theme=theme),
    "one head": lambda theme: figures.heads(np.ones((1, 1, 2, 2)), ["1"], theme=theme),
    "6 pairs": lambda theme: figures.pairs([noise(9, 9)] * 6, [noise(9, 9)] * 6, ("Input", "Tokens"), theme=theme),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_figures_are_drawn_for_both_pages(draw: Callable[[Theme], Figure]) -> None:
    for theme in (LIGHT, DARK):
        data = figures.png(draw(theme))
        assert len(data) < 900_000
        image = Image.open(io.BytesIO(data))
        assert 100 <= figures.width_of(data) == image.width // 2 <= 1000
        assert image.convert("RGB").getpixel((0, 0)) == tuple(round(255 * part) for part in to_rgb(theme.card))


def test_the_same_numbers_give_the_same_bytes() -> None:
    first, second = (figures.heads(np.eye(4).reshape(1, 1, 4, 4), ["1"]) for _ in range(2))
    assert figures.png(first) == figures.png(second)
    assert b"matplotlib" not in figures.png(first)
    drawn = figures.svg(first)
    assert drawn == figures.svg(second)
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert b"date" not in drawn


def test_curves_leave_out_missing_and_non_finite_values() -> None:
    records = [
        {"step": 1, "loss": 2.0},
        {"step": 3, "loss": float("nan"), "eval_loss": 1.5},
        {"step": 4, "loss": 1.0, "eval_loss": None},
        {"step": 5, "loss": float("inf")},
    ]
    axes = figures.curves(records, ["loss", "eval_loss", "other"], "Loss").axes[0]
    lines = [np.asarray(line.get_xydata()).tolist() for line in axes.lines]
    assert lines == [[[1, 2.0], [4, 1.0]], [[3, 1.5]], []]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["loss", "eval loss", "other"]


def test_confusion_shows_shares_of_the_label() -> None:
    axes = figures.confusion(np.array([[3, 1], [0, 0]]), ["cat", "dog"]).axes[0]
    np.testing.assert_allclose(np.asarray(axes.images[0].get_array()), [[0.75, 0.25], [0, 0]])
    assert sorted((text.get_position(), text.get_text()) for text in axes.texts) == [((0, 0), "3"), ((1, 0), "1")]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog"]


def test_tiles_are_in_the_paper_s_order() -> None:
    similarity = RANDOM.uniform(-1, 1, (2, 3, 2, 3))
    shown = np.asarray(figures.positions(similarity[None]).axes[0].images[0].get_array())
    zoom, gap = 8, 2  # 3 patches in a tile of 24 pixels
    for i, j, row, column in np.ndindex(2, 3, 2, 3):
        top, left = i * (2 * zoom + gap) + row * zoom, j * (3 * zoom + gap) + column * zoom
        assert np.abs(shown[top : top + zoom, left : left + zoom] - similarity[i, j, row, column]).max() <= 0.0101


def test_large_grids_show_every_second_patch_by_its_number() -> None:
    similarity = np.zeros((1, 20, 20, 20, 20))
    similarity[0, 18, 2] = 1
    axes = figures.positions(similarity).axes[0]
    shown = np.asarray(axes.images[0].get_array())
    assert [label.get_text() for label in axes.get_yticklabels()] == [str(i) for i in range(1, 20, 2)]
    pitch = shown.shape[0] // 10 + 1
    assert (shown[9 * pitch : 9 * pitch + 40, pitch : pitch + 40] == 1).all()
    assert np.nansum(shown) == 40 * 40


def test_tables_of_several_blocks_are_in_order() -> None:
    similarity = np.stack([np.full((4, 4, 4, 4), i / 5) for i in range(5)])
    panels = [axes for axes in figures.positions(similarity).axes if axes.images]
    assert [np.nanmax(np.asarray(axes.images[0].get_array())) for axes in panels] == [0, 0.2, 0.4, 0.6, 0.8]
    assert [axes.get_xlabel() for axes in panels] == [f"block {i}" for i in range(1, 6)]


def test_distances_are_dots_above_their_layers_from_zero_up() -> None:
    distances = RANDOM.random((3, 4)) * 50
    figure = figures.attention_distance(distances, uniform=[60.0])
    axes = figure.axes[0]
    offsets = np.asarray(axes.collections[0].get_offsets())
    np.testing.assert_allclose(
        offsets, [(layer + 1, distances[layer, head]) for layer in range(3) for head in range(4)]
    )
    mean, line = axes.lines
    np.testing.assert_allclose(np.asarray(mean.get_ydata()), distances.mean(axis=1))
    assert np.asarray(line.get_ydata()).tolist() == [60, 60]
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > 60
    assert "uniform: 60" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_axial_layers_are_numbered_by_layer() -> None:
    axes = figures.attention_distance(RANDOM.random((4, 2)), halves(2)).axes[0]
    name = axes.xaxis.get_major_formatter()
    assert [name(x) for x in (0, 1, 2, 3, 4, 5)] == ["", "1", "1", "2", "2", ""]
    assert "rows, then columns" in axes.get_xlabel()


def test_heads_are_a_row_for_each_layer() -> None:
    maps = RANDOM.random((2, 3, 4, 4)) * np.array([1, 1e-3]).reshape(2, 1, 1, 1)
    shown = np.asarray(figures.heads(overlays.levels(maps), ["1", "2"]).axes[0].images[0].get_array())
    zoom, pitch = 6, 26
    for layer, head in np.ndindex(2, 3):
        tile = shown[layer * pitch : layer * pitch + 24 : zoom, head * pitch : head * pitch + 24 : zoom]
        np.testing.assert_allclose(tile, overlays.levels(maps[layer, head]), atol=1 / 60)


def test_pairs_are_side_by_side_in_order() -> None:
    left, right = ([np.full((4, 4, 3), 10 * i + j, np.uint8) for i in range(6)] for j in (0, 1))
    figure = figures.pairs(left, right, ("Input", "Other"))
    shown = [int(np.asarray(axes.images[0].get_array())[0, 0, 0]) for axes in figure.axes if axes.images]
    assert shown == [10 * i + j for i in range(6) for j in (0, 1)]
    assert [axes.get_title() for axes in figure.axes[:9]] == [*["Input", "Other"] * 4, ""]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.03, "0.03"), (0.0025, "0.0025"), (1e-4, "1e-4"), (1.23e-6, "1.2e-6"), (600, "600"), (1800, "1.8k"),
     (999.9, "1k"), (60000, "60k"), (1.3e6, "1.3M"), (3.03e8, "303M"), (1e9, "1G"), (-2, "-2"), (64, "64")],
)  # fmt: skip
def test_tick_numbers_are_short(value: float, text: str) -> None:
    assert figures.short(value) == text


def test_webp_is_lossless() -> None:
    data = figures.png(figures.filters(np.full((2, 2, 2, 3), 0.3)))
    before, after = (np.asarray(Image.open(io.BytesIO(each)).convert("RGB")) for each in (data, figures.webp(data)))
    assert (before == after).all()
