"""A plot shows its numbers, every label inside and no note on a point."""

import math
from itertools import combinations

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation

from vitlab.inspection import figures, plots
from vitlab.panels import Panel, Series
from vitlab.studies.scaling import paper_panel

SIZES = [600, 1800, 6000, 18000, 60000]
FAMILIES = ("ViT-Ti/4", "ViT-S/4", "ResNet-10", "ResNet-18", "R+ViT-Ti/4")
GROWING = [Series(f, SIZES, [0.5 + 0.07 * i + 0.01 * n for i in range(5)], [0.01] * 5) for n, f in enumerate(FAMILIES)]
COSTS = [
    Series("ViT", [1e-6, 3e-6, 1.1e-5, 4e-5], [0.70, 0.78, 0.83, 0.86], [0.01] * 4, ["Ti/7", "", "", "S/4"]),
    Series("ResNet", [2e-6, 5e-6, 2e-5, 6e-5], [0.72, 0.77, 0.82, 0.835], [0.01] * 4, ["w32", "", "", "w128"]),
    Series("hybrid", [1.5e-6, 4e-6, 1.5e-5, 5e-5], [0.75, 0.80, 0.845, 0.86], [0.01] * 4, ["", "", "", "R+S"]),
]
SCALING = Panel("Scaling", "pre-training compute (exaFLOPs)", "accuracy", COSTS, log_x=True, front=True)
LONG = ["from scratch", "mean color", "4 x 4 downsized colors", "regression of all pixels", "every seventh patch"]
WORDS = Panel("Masking", "", "loss", [Series("loss", [0, 1, 2, 3, 4], [2.31, 2.5, 2.6, 0.0125, 2.7])], ticks=LONG)
SPEEDS = Panel("P", "px", "1/s", [Series("a", [64, 512], [4e4, 3], [4e3, 1])], True, True, percent=False)
NONE = Panel("P", "x", "y", [Series("a", [1, 2], [math.nan] * 2, notes=["a", "b"])], log_x=True, front=True)
SHOWN = {
    "sizes": [Panel(title, "images", "accuracy", GROWING, log_x=True) for title in ("Fine-tuned", "5-shot")],
    "a front": [SCALING],
    "words": [WORDS],
    "five panels": [Panel(str(i), "x", "accuracy", GROWING, log_x=True) for i in range(5)],
    "one point": [Panel("P", "rate", "accuracy", [Series("a", [1e-4], [0.0], [0.0])], log_x=True)],
    "none": [NONE],
    "two logarithms": [SPEEDS],
}


def axes_of(panel: Panel) -> Axes:
    return plots.panels([panel]).axes[0]


@pytest.mark.parametrize("shown", SHOWN.values(), ids=SHOWN)
def test_the_legend_names_every_series_and_covers_no_axes(shown: list[Panel]) -> None:
    figure = plots.panels(shown)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()  # lays it out
    names = {series.name for panel in shown for series in panel.series}
    names |= {"Pareto front"} if any(panel.front for panel in shown) else set()
    if len(names) == 1:
        assert not figure.legends
        return
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == names
    extent = legend.get_window_extent(renderer)
    assert all(axes.get_tightbbox(renderer).y0 >= extent.y1 - 2 for axes in figure.axes)  # pyright: ignore
    assert 0 <= extent.x0 <= extent.x1 <= 100 * figure.get_figwidth()


def test_lines_bars_and_ticks_are_those_of_the_panel() -> None:
    axes = plots.panels(SHOWN["sizes"]).axes
    assert [panel.get_title(loc="left") for panel in axes] == ["Fine-tuned", "5-shot"]
    lines = [np.asarray(line.get_xydata()) for line in axes[0].lines if line.get_linestyle() == "-"]
    np.testing.assert_allclose(lines, [np.stack([SIZES, series.y], axis=1) for series in GROWING])
    styles = [
        [(line.get_color(), line.get_marker()) for line in each.lines if line.get_linestyle() == "-"] for each in axes
    ]
    assert styles[0] == styles[1]  # a series looks the same in all panels, and unlike the others
    assert len(set(styles[0])) == len(GROWING)
    bars = axes[0].collections[0].get_segments()  # type: ignore[attr-defined]
    assert [tuple(bar[:, 1]) for bar in bars] == [pytest.approx((y - 0.01, y + 0.01)) for y in GROWING[0].y]
    name = axes[0].xaxis.get_major_formatter()
    assert [name(tick, 0) for tick in axes[0].get_xticks()] == ["600", "1800", "6000", "18000", "60000"]


def test_series_over_names_are_side_by_side_and_unjoined() -> None:
    kinds = [Series("stem", [0, 1, 2, 3], [0.61, 0.64, 0.63, 0.64], [0.01] * 4), Series("every", [1, 2, 3], [0.6] * 3)]
    axes = axes_of(Panel("Positions", "", "5-shot accuracy", kinds, ticks=["none", "1-D", "2-D", "relative"]))
    dots = [line for line in axes.lines if str(line.get_marker()) in "os"]
    assert [line.get_linestyle() for line in dots] == ["None", "None"]
    stem, every = (np.asarray(line.get_xdata()) for line in dots)
    np.testing.assert_allclose(np.round(stem), [0, 1, 2, 3])
    assert (every - stem[1:] > 0.1).all()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["none", "1-D", "2-D", "relative"]


def test_the_front_is_a_staircase() -> None:
    (stairs,) = [line for line in axes_of(SCALING).lines if line.get_drawstyle() == "steps-post"]
    points = np.asarray(stairs.get_xydata())
    np.testing.assert_allclose(points[:, 0], [1e-6, 1.5e-6, 3e-6, 4e-6, 1.1e-5, 1.5e-5, 4e-5])
    assert (np.diff(points[:, 1]) > 0).all()


@pytest.mark.parametrize(("panel", "count"), [(SCALING, 2), (paper_panel(), 3), (paper_panel(), 4)])
def test_no_note_covers_a_point_or_another_note(panel: Panel, count: int) -> None:
    figure = plots.panels([panel] * count)
    renderer, axes = FigureCanvasAgg(figure).get_renderer(), figure.axes[0]
    figure.draw_without_rendering()  # lays it out
    notes = []
    for text in axes.texts:
        assert isinstance(text, Annotation)
        notes.append((text.get_text(), text.get_window_extent(renderer).extents))
    assert [text for text, _ in notes] == [note for series in panel.series for note in series.notes if note]
    for (_, one), (_, other) in combinations(notes, 2):
        assert one[0] >= other[2] or other[0] >= one[2] or one[1] >= other[3] or other[1] >= one[3]
    for series in panel.series:
        for x, y, note in zip(series.x, series.y, series.notes, strict=True):
            x, y = axes.transData.transform((x, y))
            assert not any(left < x < right and bottom < y < top for _, (left, bottom, right, top) in notes)
            distances = [
                max(left - x, x - right, bottom - y, y - top) for t, (left, bottom, right, top) in notes if t == note
            ]
            assert not note or min(distances) < 20, "a note stays at its point"


def test_ranges_and_ticks_of_axes() -> None:
    """Percentages do not magnify noise; logarithmic axes have a few ticks, and of few values one at each."""
    low, high = axes_of(Panel("P", "rate", "accuracy", [Series("a", [1e-4, 1e-3], [0.9991, 0.9993])])).get_ylim()
    assert high - low >= 0.02 - 1e-9
    assert high <= 1.001
    for span in (3.0, 1e3, 1e9):
        many = Series("a", np.geomspace(1e-6, 1e-6 * span, 30).tolist(), [0.5] * 30)
        ticks = axes_of(Panel("P", "x", "y", [many], log_x=True)).get_xticks()
        assert 2 <= sum(1e-6 <= tick <= 1e-6 * span * (1 + 1e-9) for tick in ticks) <= 10
    few = Panel("P", "x", "y", [Series("a", [8, 2, 4, 2], [0.5] * 4)], log_x=True)
    dense = Panel("P", "x", "y", [Series("a", [2, 2.02, 8], [0.5] * 3)], log_x=True)
    assert axes_of(few).get_xticks().tolist() == [2, 4, 8]
    assert 2.02 not in axes_of(dense).get_xticks()


def test_curves_leave_out_missing_and_non_finite_values() -> None:
    records = [
        {"step": 1, "loss": 2.0},
        {"step": 3, "loss": float("nan"), "eval_loss": 1.5},
        {"step": 4, "loss": 1.0, "eval_loss": None},
        {"step": 5, "loss": float("inf")},
    ]
    records[0] |= {"lr": 0.1, "train_accuracy": float("nan")}
    loss, rate = plots.curves(records)
    assert [(s.name, [*s.x], [*s.y]) for s in loss.series] == [("loss", [1, 4], [2.0, 1.0]), ("eval loss", [3], [1.5])]
    assert (rate.title, rate.percent, [*rate.series[0].y]) == ("Learning rate", False, [0.1])


def test_confusion_shows_shares_of_the_label() -> None:
    axes = plots.confusion(np.array([[3, 1], [0, 0]]), ["cat", "dog"]).axes[0]
    np.testing.assert_allclose(np.asarray(axes.images[0].get_array()), [[0.75, 0.25], [0, 0]])
    assert sorted((text.get_position(), text.get_text()) for text in axes.texts) == [((0, 0), "3"), ((1, 0), "1")]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog"]
    many = np.random.default_rng(0).integers(0, 9000, (100, 100))
    assert len(figures.png(plots.confusion(many, [f"class {i}" for i in range(100)]))) < 900_000


def test_reliability_has_a_bar_for_each_bin() -> None:
    """Up to its accuracy, then the gap to its mean confidence, which may go down; below, the share of the images."""
    nan = float("nan")
    accuracies, confidences = np.array([nan, 0.9, 0.5]), np.array([nan, 0.6, 0.8])
    top, bottom = plots.reliability(np.array([0, 1, 3]), accuracies, confidences).axes
    upper, lower = ([patch for patch in axes.patches if isinstance(patch, Rectangle)] for axes in (top, bottom))
    bars, gaps = np.split(np.array([(bar.get_y(), bar.get_height()) for bar in upper]), 2)
    np.testing.assert_allclose(bars[1:], [(0, 0.9), (0, 0.5)])
    np.testing.assert_allclose(gaps[1:], [(0.9, -0.3), (0.5, 0.3)])
    assert [bar.get_height() for bar in lower] == [0, 0.25, 0.75]
    assert [bar.get_x() + bar.get_width() / 2 for bar in upper[:3]] == pytest.approx([1 / 6, 1 / 2, 5 / 6])


def test_names_are_no_formulas() -> None:
    """A `$` in the name of a class, in a title, a legend and an axis of names."""
    name = r"$x^{$ \frac{"
    panel = Panel(name, name, name, [Series(name, [0, 1], [1, 2]), Series("b", [0, 1], [2, 1])], ticks=[name, "\x1b"])
    for figure in (plots.confusion(np.eye(2, dtype=int), [name, "a\nb"]), plots.panels([panel])):
        assert figures.png(figure).startswith(b"\x89PNG")
        assert figures.svg(figure)
