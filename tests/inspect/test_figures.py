"""Figures say what they were given, in the size they promise, with every label inside."""

import io
from collections.abc import Callable

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from vitlab.inspect import figures
from vitlab.inspect.figures import DARK, LIGHT, Theme

RANDOM = np.random.default_rng(0)
RECORDS = [{"step": s, "loss": 1 / s, "lr": 3e-5 * s} for s in range(1, 400, 3)]
RECORDS += [{"step": 400, "eval_accuracy": 0.98765}, {"step": 800, "eval_accuracy": 0.98766, "loss": None}]


def counts(kinds: int) -> np.ndarray:
    return RANDOM.integers(0, 3, (kinds, kinds)) + np.diag(RANDOM.integers(50, 9000, kinds))


def confused(kinds: int, name: str) -> Callable[[Theme], Figure]:
    return lambda theme: figures.confusion(counts(kinds), [f"{name}{i}" for i in range(kinds)], theme=theme)


def similar(rows: int, columns: int) -> Callable[[Theme], Figure]:
    return lambda theme: figures.positions(RANDOM.uniform(-1, 1, (rows, columns) * 2), theme=theme)


DRAWN: dict[str, Callable[[Theme], Figure]] = {
    "loss": lambda theme: figures.curves(RECORDS, ["loss"], "Loss", theme=theme),
    "rate": lambda theme: figures.curves(RECORDS, ["lr"], "Learning rate", theme=theme),
    "accuracy": lambda theme: figures.curves(RECORDS, ["eval_accuracy"], "Accuracy", percent=True, theme=theme),
    "2 classes": confused(2, "no "),
    "10 classes": confused(10, ""),
    "12 long names": confused(12, "WIDE AND LONG NAME "),
    "40 classes": confused(40, "class "),
    "41 classes": confused(41, "class "),
    "100 classes": confused(100, "class "),
    "4x4 patches": similar(4, 4),
    "14x14 patches": similar(14, 14),
    "3x5 patches": similar(3, 5),
    "28 filters": lambda theme: figures.filters(RANDOM.random((28, 4, 4, 3)), theme=theme),
    "3 filters": lambda theme: figures.filters(RANDOM.random((3, 16, 16, 3)), theme=theme),
    "distance": lambda theme: figures.attention_distance(116 * RANDOM.random((12, 12)), theme=theme),
    "one layer, no distance": lambda theme: figures.attention_distance(np.zeros((1, 1)), theme=theme),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_figures_decode_to_their_size_on_both_pages(draw: Callable[[Theme], Figure]) -> None:
    light, dark = draw(LIGHT), draw(DARK)
    width, height = light.get_size_inches()
    for figure, theme in ((light, LIGHT), (dark, DARK)):
        data = figures.png(figure)
        assert len(data) < 400_000
        image = Image.open(io.BytesIO(data))
        assert image.size == (round(200 * width), round(200 * height))
        assert image.convert("RGB").getpixel((0, 0)) == tuple(round(255 * part) for part in to_rgb(theme.card))
    assert 100 <= 100 * width <= 700


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_every_label_lies_inside_its_figure(draw: Callable[[Theme], Figure]) -> None:
    figure = draw(LIGHT)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    drawn = figure.get_tightbbox(canvas.get_renderer())
    width, height = figure.get_size_inches()
    assert min(drawn.x0, drawn.y0) > -0.01
    assert drawn.x1 < width + 0.01
    assert drawn.y1 < height + 0.01


def test_the_same_numbers_give_the_same_bytes() -> None:
    first, second = (figures.png(figures.curves(RECORDS, ["loss"], "Loss")) for _ in range(2))
    assert first == second
    assert b"matplotlib" not in first


def test_curves_leave_out_what_is_missing_or_not_finite() -> None:
    records = [{"step": 1, "loss": 2.0}, {"step": 2}, {"step": 3, "loss": float("nan"), "eval_loss": 1.5},
               {"step": 4, "loss": 1.0, "eval_loss": None}, {"step": 5, "loss": float("inf")}]  # fmt: skip
    axes = figures.curves(records, ["loss", "eval_loss", "other"], "Loss").axes[0]
    lines = [np.asarray(line.get_xydata()).tolist() for line in axes.lines]
    assert lines == [[[1, 2.0], [4, 1.0]], [[3, 1.5]], []]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["loss", "eval loss", "other"]


def test_confusion_shows_shares_of_the_true_class() -> None:
    given = np.array([[3, 1], [0, 0]])
    axes = figures.confusion(given, ["cat", "dog"]).axes[0]
    shown = np.asarray(axes.images[0].get_array())
    np.testing.assert_allclose(shown, [[0.75, 0.25], [0, 0]])
    assert sorted((text.get_position(), text.get_text()) for text in axes.texts) == [((0, 0), "3"), ((1, 0), "1")]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog"]


def test_tiles_stand_in_the_paper_s_order() -> None:
    similarity = RANDOM.uniform(-1, 1, (2, 3, 2, 3))
    shown = np.asarray(figures.positions(similarity).axes[0].images[0].get_array())
    zoom, gap = 8, 2  # 3 patches to a tile of 24 pixels
    for i, j, row, column in np.ndindex(2, 3, 2, 3):
        top, left = i * (2 * zoom + gap) + row * zoom, j * (3 * zoom + gap) + column * zoom
        assert (shown[top : top + zoom, left : left + zoom] == similarity[i, j, row, column]).all()


def test_overlay_is_yellow_where_attention_is_highest_and_blue_where_lowest() -> None:
    attention = np.full((4, 4), 0.2)
    attention[0, 3], attention[3, 0] = 0.9, 0.1
    seen = figures.overlay(np.full((64, 64, 3), 128, dtype=np.uint8), attention).astype(int)
    red, green, blue = seen[2, 61]
    assert min(red, green) > blue + 80
    red, green, blue = seen[61, 2]
    assert blue > max(red, green)


def test_overlay_of_even_attention_is_even() -> None:
    seen = figures.overlay(np.full((8, 8, 3), 9, dtype=np.uint8), np.full((2, 2), 0.25))
    assert (seen == seen[0, 0]).all()


def test_rollout_shows_the_picture_a_gap_and_the_overlay() -> None:
    picture = RANDOM.integers(0, 256, (8, 4, 3), dtype=np.uint8)
    attention = RANDOM.random((4, 2))
    sheet = figures.rollout(picture, attention, side=48)
    assert sheet.shape == (48, 24 + 2 + 24, 4)
    large = picture.repeat(6, axis=0).repeat(6, axis=1)
    assert (sheet[:, :24, :3] == large).all()
    assert (sheet[:, 24:26] == 0).all()
    assert (sheet[:, 26:, :3] == figures.overlay(large, attention)).all()
    assert (sheet[:, 26:, 3] == 255).all()


def test_fit_makes_large_pictures_smaller_and_leaves_small_ones() -> None:
    large = RANDOM.integers(0, 256, (300, 200, 3), dtype=np.uint8)
    assert figures.fit(large, 192).shape == (192, 128, 3)
    assert figures.fit(large[:8, :8], 192) is not None
    assert (figures.fit(large[:8, :8], 192) == large[:8, :8]).all()
    assert figures.fit(large[:8, :8], 192, enlarge=True).shape == (192, 192, 3)
    assert figures.fit(large[:1], 50).shape == (1, 50, 3)


@pytest.mark.parametrize("channels", [3, 4])
def test_a_small_picture_is_kept_exactly_and_a_large_one_nearly(channels: int) -> None:
    small = RANDOM.integers(0, 256, (64, 7, channels), dtype=np.uint8)
    assert (np.asarray(Image.open(io.BytesIO(figures.encoded(small)))) == small).all()
    large = np.zeros((160, 200, channels), dtype=np.uint8)
    large[..., 0], large[..., -1] = np.linspace(0, 255, 200), 255
    large[:, :50] = 0  # with four channels: a clear part
    data = figures.encoded(large)
    assert len(data) < 4000
    found = np.asarray(Image.open(io.BytesIO(data))).astype(int)
    assert found.shape == large.shape
    assert np.abs(found - large)[:, 64:].max() < 16
