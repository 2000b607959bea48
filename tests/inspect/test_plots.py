"""A study's figure shows the numbers that it was given, every label inside and no note on a point."""

import math
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from vitlab.inspect import figures, plots
from vitlab.inspect.figures import DARK
from vitlab.inspect.panels import Panel, Series

SIZES = [600, 1800, 6000, 18000, 60000]
FAMILIES = ("ViT-Ti/4", "ViT-S/4", "ResNet-10", "ResNet-18", "R+ViT-Ti/4")
GROWING = [Series(f, SIZES, [0.5 + 0.07 * i + 0.01 * n for i in range(5)], [0.01] * 5) for n, f in enumerate(FAMILIES)]
COSTS = [
    Series("ViT", [1e-6, 3e-6, 1.1e-5, 4e-5], [0.70, 0.78, 0.83, 0.86], [0.01] * 4, ["Ti/7", "S/7", "Ti/4", "S/4"]),
    Series("ResNet", [2e-6, 5e-6, 2e-5, 6e-5], [0.72, 0.77, 0.82, 0.835], [0.01] * 4, ["w32", "w64", "w96", "w128"]),
    Series("hybrid", [1.5e-6, 4e-6, 1.5e-5, 5e-5], [0.75, 0.80, 0.845, 0.86], [0.01] * 4, ["", "", "R+Ti", "R+S"]),
]
KINDS = [Series("stem", [0, 1, 2, 3], [0.61, 0.64, 0.63, 0.64], [0.01] * 4), Series("every", [1, 2, 3], [0.6] * 3)]
POSITIONS = Panel("Positions", "", "5-shot accuracy", KINDS, ticks=["none", "1-D", "2-D", "relative"])
SCALING = Panel("Scaling", "pre-training compute (exaFLOPs)", "accuracy", COSTS, log_x=True, front=True)
LONG = ["from scratch", "mean color", "4 x 4 downsized colors", "regression of all pixels", "every seventh patch"]
LOSS = Series("loss", [0, 1, 2, 3, 4], [2.31, 2.5, 2.6, 0.0125, 2.7])
SHOWN = {
    "sizes": [Panel(t, "images", "accuracy", GROWING, log_x=True) for t in ("Fine-tuned", "5-shot")],
    "scaling": [SCALING],
    "two fronts": [SCALING, SCALING],
    "positions": [POSITIONS],
    "words": [Panel("Masking", "", "loss", [LOSS], ticks=LONG, percent=False)],
    "words on edge": [Panel("Masking", "target", "loss", [LOSS], ticks=LONG, percent=False)] * 3,
    "five panels": [Panel(str(i), "x", "accuracy", GROWING, log_x=True) for i in range(5)],
    "four of ten": [
        Panel("P", "step", "accuracy", [Series(f"series {i}", [0, 500], [0.4 + i / 50] * 2) for i in range(10)])
    ] * 4,
    "narrow": [Panel("P", "rate", "accuracy", [Series("a", [1e-4, 3e-4, 1e-3], [0.9991, 0.9993, 0.9992])], log_x=True)],
    "speeds": [Panel("P", "px", "1/s", [Series("a", [64, 512], [4e4, 3], [4e3, 1])], True, True, percent=False)] * 2,
    "one point": [Panel("P", "rate", "accuracy", [Series("a", [1e-4], [0.0], [0.0])], log_x=True)],
    "none": [Panel("P", "x", "y", [Series("a", [1, 2], [math.nan] * 2, notes=["a", "b"])], log_x=True, front=True)],
}  # fmt: skip


def boxes(figure: Figure, axes: Axes) -> Iterator[tuple[str, tuple[float, float, float, float]]]:
    """Every note's text and what its letters cover (left, bottom, right, top), in page pixels."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    for text in axes.texts:
        assert isinstance(text, Annotation)
        text.set_bbox(None)  # pyright: ignore[reportArgumentType]  # the pale ground goes a little further
        yield text.get_text(), text.get_window_extent(renderer).extents


@pytest.mark.parametrize("shown", SHOWN.values(), ids=SHOWN)
def test_the_legend_names_every_series_and_covers_no_axes(shown: list[Panel]) -> None:
    figure = plots.panels(shown)
    renderer = FigureCanvasAgg(figure).get_renderer()
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


def test_numbers_stand_where_they_belong() -> None:
    axes = plots.panels(SHOWN["sizes"]).axes
    assert [each.get_title(loc="left") for each in axes] == ["Fine-tuned", "5-shot"]
    lines = [np.asarray(line.get_xydata()) for line in axes[0].lines if line.get_linestyle() == "-"]
    np.testing.assert_allclose(lines, [np.stack([SIZES, series.y], axis=1) for series in GROWING])
    bars = axes[0].collections[0].get_segments()  # type: ignore[attr-defined]
    assert [tuple(bar[:, 1]) for bar in bars] == [pytest.approx((y - 0.01, y + 0.01)) for y in GROWING[0].y]
    assert axes[0].get_xscale() == "log"
    name = axes[0].xaxis.get_major_formatter()
    assert [name(tick, 0) for tick in axes[0].get_xticks()] == ["600", "1.8k", "6k", "18k", "60k"]


def test_a_series_looks_the_same_in_all_panels_and_unlike_the_others() -> None:
    two = [Panel("a", "x", "y", GROWING), Panel("b", "x", "y", GROWING[::-1][:2])]
    figure = plots.panels(two, theme=DARK)
    looks = [
        [(line.get_color(), line.get_marker()) for line in axes.lines if line.get_linestyle() == "-"]
        for axes in figure.axes
    ]
    assert looks[1] == looks[0][::-1][:2]
    assert len({plots._style(i, DARK) for i in range(64)}) == 64
    assert {color for color, _ in looks[0]} <= set(DARK.series)


def test_names_on_an_axis_hold_series_beside_each_other_and_unjoined() -> None:
    (axes,) = plots.panels([POSITIONS]).axes
    dots = [line for line in axes.lines if str(line.get_marker()) in "os"]
    assert [line.get_linestyle() for line in dots] == ["None", "None"]
    stem, every = (np.asarray(line.get_xdata()) for line in dots)
    np.testing.assert_allclose(np.round(stem), [0, 1, 2, 3])
    assert (every - stem[1:] > 0.1).all()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["none", "1-D", "2-D", "relative"]


def test_the_front_is_a_staircase_below_which_nothing_is_best() -> None:
    (axes,) = plots.panels([SCALING]).axes
    (stairs,) = [line for line in axes.lines if line.get_drawstyle() == "steps-post"]
    found = np.asarray(stairs.get_xydata())
    np.testing.assert_allclose(found[:, 0], [1e-6, 1.5e-6, 3e-6, 4e-6, 1.1e-5, 1.5e-5, 4e-5])
    assert (np.diff(found[:, 1]) > 0).all()


@pytest.mark.parametrize("shown", [SHOWN["scaling"], SHOWN["two fronts"]], ids=["one", "two"])
def test_no_note_covers_a_point_or_another_note(shown: list[Panel]) -> None:
    figure = plots.panels(shown)
    axes = figure.axes[0]
    notes = dict(boxes(figure, axes))
    assert set(notes) == {note for series in COSTS for note in series.notes if note}
    for (_, one), (_, other) in combinations(notes.items(), 2):
        assert one[0] >= other[2] or other[0] >= one[2] or one[1] >= other[3] or other[1] >= one[3]
    dots = axes.transData.transform([point for s in COSTS for point in zip(s.x, s.y, strict=True)])
    for left, bottom, right, top in notes.values():
        assert not any(left < x < right and bottom < y < top for x, y in dots)
    places = {note: point for s in COSTS for note, point in zip(s.notes, zip(s.x, s.y, strict=True), strict=True)}
    for note, (left, bottom, right, top) in notes.items():  # and each is near its own point
        x, y = axes.transData.transform(places[note])
        assert max(left - x, x - right, bottom - y, y - top) < 20


def test_shares_are_percentages_of_an_axis_that_exaggerates_nothing() -> None:
    (axes,) = plots.panels(SHOWN["narrow"]).axes
    low, high = axes.get_ylim()
    assert high - low >= 0.02 - 1e-9
    assert high <= 1.001
    name = axes.yaxis.get_major_formatter()
    assert (name(0.675, 0), name(0.9925, 0), name(1, 0)) == ("67.5%", "99.25%", "100%")
    (axes,) = plots.panels(SHOWN["words"]).axes
    assert axes.yaxis.get_major_formatter()(2.5, 0) == "2.5"


@pytest.mark.parametrize("span", [3.0, 30.0, 1e3, 1e9])
@pytest.mark.parametrize("low", [1e-6, 0.02, 700.0])
def test_logarithmic_axes_have_a_few_ticks(low: float, span: float) -> None:
    many = Series("a", np.geomspace(low, low * span, 30).tolist(), [0.5] * 30)
    (axes,) = plots.panels([Panel("P", "x", "y", [many], log_x=True)]).axes
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= low * span * (1 + 1e-9)]
    assert 2 <= len(ticks) <= 10


def test_logarithmic_axes_of_few_values_have_a_tick_at_each() -> None:
    few = Panel("P", "x", "y", [Series("a", [8, 2, 4, 2], [0.5] * 4)], log_x=True)
    near = Panel("P", "x", "y", [Series("a", [2, 2.02, 8], [0.5] * 3)], log_x=True)
    assert plots.panels([few]).axes[0].get_xticks().tolist() == [2, 4, 8]
    assert 2.02 not in plots.panels([near]).axes[0].get_xticks()


def test_a_logarithmic_axis_of_y() -> None:
    axes, _ = plots.panels(SHOWN["speeds"]).axes
    assert axes.get_yscale() == "log"
    name = axes.yaxis.get_major_formatter()
    assert {name(y, 0) for y in axes.get_yticks()} >= {"1", "10", "100", "1k", "10k", "100k"}


def test_the_same_panels_give_the_same_bytes() -> None:
    first, second = (plots.panels(SHOWN["scaling"]) for _ in range(2))
    assert figures.png(first) == figures.png(second)
    assert figures.svg(first) == figures.svg(second)
