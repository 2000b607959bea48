"""Figures show the numbers that they were given, in both themes and as files."""

import io
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from inside import photograph, random_capture
from matplotlib.colors import to_rgb
from PIL import Image

from vitlab.inspect import figures, overlays
from vitlab.inspect.figures import DARK, LIGHT, Drawing, write_drawings
from vitlab.models import ViTConfig

CONFIG = ViTConfig(image_size=32, patch_size=8, width=8, depth=3, heads=2, mlp_dim=8, num_classes=4)
AXIAL = ViTConfig(image_size=(32, 48), patch_size=4, width=12, depth=9, heads=12, mlp_dim=8, encoder="axial")
RANDOM = np.random.default_rng(0)
LAYERS = [f"{i} {line}" for i in range(1, 13) for line in ("rows", "columns")]


def similarity(rows: int, columns: int, blocks: int = 1) -> np.ndarray:
    return RANDOM.uniform(-1, 1, (blocks, *(rows, columns) * 2))


def pairs(n: int) -> list[Drawing]:
    return figures.pairs(random_capture(CONFIG, n), [photograph((32, 32), i) for i in range(n)])


DRAWN = {
    "3x5 patches": figures.positions(similarity(3, 5)),
    "37x30 patches": figures.positions(similarity(37, 30)),
    "5 blocks": figures.positions(similarity(8, 8, blocks=5)),
    "28 filters": figures.filters(RANDOM.random((28, 4, 4, 3))),
    "one layer, no distance": figures.distances(np.zeros((1, 1))),
    "axial distance": figures.distances(90 * RANDOM.random((24, 12)), LAYERS, [50.2, 74.67], "Axial-ViT-B/16"),
    "heads": figures.heads(random_capture(AXIAL, 1), "cat.png"),
    "6 pairs": pairs(6)[1],
}


@pytest.mark.parametrize("drawing", DRAWN.values(), ids=DRAWN)
def test_figures_are_drawn_for_both_pages(drawing: Drawing) -> None:
    image = drawing.image
    assert image.dark is not None
    light, dark = (Image.open(io.BytesIO(data)).convert("RGB") for data in (image.data, image.dark))
    assert len(image.data) + len(image.dark) < 900_000
    assert light.size == dark.size == image.pixels
    assert 100 <= image.width == light.width // 2 <= 1000
    for shown, theme in ((light, LIGHT), (dark, DARK)):
        assert shown.getpixel((0, 0)) == tuple(round(255 * part) for part in to_rgb(theme.card))
    assert (np.asarray(light) == np.asarray(Image.open(io.BytesIO(drawing.png)).convert("RGB"))).all(), "lossless"


def test_the_same_numbers_give_the_same_bytes() -> None:
    first, second = (figures.filters(np.full((2, 2, 2, 3), 0.5)) for _ in range(2))
    assert first.png == second.png
    assert b"matplotlib" not in first.png
    drawn = figures.svg(first.figure)
    assert drawn == figures.svg(second.figure)
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert b"date" not in drawn


def test_files_hold_the_figures_and_none_of_an_earlier_call(tmp_path: Path) -> None:
    components = np.full((2, 2, 2, 3), 0.5)
    write_drawings([figures.filters(components), DRAWN["3x5 patches"]], tmp_path)
    (tmp_path / "mine.png").touch()
    write_drawings([figures.filters(components)], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"filters.png", "filters.svg", "filters.npz", "mine.png"}
    assert (np.load(tmp_path / "filters.npz", allow_pickle=False)["components"] == components).all()


def test_tiles_are_in_the_paper_s_order() -> None:
    given = similarity(2, 3)
    drawing = figures.positions(given)
    assert drawing.arrays["similarity"] is given
    sheet = np.asarray(drawing.figure.axes[0].images[0].get_array())
    zoom, gap = 8, 2  # 3 patches in a tile of 24 pixels
    for i, j, row, column in np.ndindex(2, 3, 2, 3):
        top, left = i * (2 * zoom + gap) + row * zoom, j * (3 * zoom + gap) + column * zoom
        assert np.abs(sheet[top : top + zoom, left : left + zoom] - given[0, i, j, row, column]).max() <= 0.0101


def test_large_grids_show_every_second_patch_by_its_number() -> None:
    given = np.zeros((1, 20, 20, 20, 20))
    given[0, 18, 2] = 1
    axes = figures.positions(given).figure.axes[0]
    sheet = np.asarray(axes.images[0].get_array())
    assert [label.get_text() for label in axes.get_yticklabels()] == [str(i) for i in range(1, 20, 2)]
    pitch = sheet.shape[0] // 10 + 1
    assert (sheet[9 * pitch : 9 * pitch + 40, pitch : pitch + 40] == 1).all()
    assert np.nansum(sheet) == 40 * 40


def test_tables_of_several_blocks_are_in_order() -> None:
    drawing = figures.positions(np.stack([np.full((4, 4, 4, 4), i / 5) for i in range(5)]))
    panels = [axes for axes in drawing.figure.axes if axes.images]
    assert [np.nanmax(np.asarray(axes.images[0].get_array())) for axes in panels] == [0, 0.2, 0.4, 0.6, 0.8]
    assert [axes.get_xlabel() for axes in panels] == [f"block {i}" for i in range(1, 6)]
    assert "5 blocks" in drawing.alt


def test_distances_are_dots_above_their_layers_from_zero_up() -> None:
    values = RANDOM.random((3, 4)) * 50
    drawing = figures.distances(values, ["1", "2", "3"], [60.0], "ViT-X")
    assert {name: array.tolist() for name, array in drawing.arrays.items()} == {
        "distances": values.tolist(),
        "layers": ["1", "2", "3"],
        "uniform": [60.0],
    }
    assert f"{values[0].mean():.1f} pixels in the first layer and {values[2].mean():.1f} in the last" in drawing.alt
    figure = drawing.figure
    axes, title = figure.axes[0], figure.get_suptitle()
    offsets = np.asarray(axes.collections[0].get_offsets())
    np.testing.assert_allclose(offsets, [(1 + layer, values[layer, head]) for layer, head in np.ndindex(3, 4)])
    mean, line = axes.lines
    np.testing.assert_allclose(np.asarray(mean.get_ydata()), values.mean(axis=1))
    assert np.asarray(line.get_ydata()).tolist() == [60, 60]
    assert (title, axes.get_ylim()[0], axes.get_ylim()[1] > 60) == ("ViT-X", 0, True)
    assert "uniform: 60" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_axial_layers_are_numbered_by_layer() -> None:
    axes = figures.distances(RANDOM.random((4, 2)), LAYERS[:4]).figure.axes[0]
    name = axes.xaxis.get_major_formatter()
    assert [name(x) for x in (0, 1, 2, 3, 4, 5)] == ["", "1", "1", "2", "2", ""]
    assert "rows, then columns" in axes.get_xlabel()


def test_heads_are_a_row_for_each_layer_of_the_first_image() -> None:
    capture = random_capture(CONFIG, 2)
    drawing = figures.heads(capture, "cat.png")
    assert drawing.arrays["heads"] is capture.heads
    assert drawing.arrays["distances"] is capture.image_distances
    assert "cat.png" in drawing.alt
    sheet = np.asarray(drawing.figure.axes[0].images[0].get_array())
    zoom, pitch = 6, 26
    for layer, head in np.ndindex(3, 2):
        tile = sheet[layer * pitch : layer * pitch + 24 : zoom, head * pitch : head * pitch + 24 : zoom]
        assert np.abs(tile - overlays.levels(capture.heads[0, layer, head])).max() < 0.02


def test_pairs_stand_side_by_side() -> None:
    capture = random_capture(CONFIG, 3)
    attention, components = pairs(3)
    assert (attention.name, components.name) == ("attention", "components")
    for name in ("rollout", "rollout_plain"):
        np.testing.assert_array_equal(attention.arrays[name], getattr(capture, name))
    np.testing.assert_array_equal(components.arrays["components"], capture.components)
    tokens = np.asarray(components.figure.axes[3].images[0].get_array())  # of the second image
    assert tokens[0, 0] == pytest.approx(255 * capture.components[1, 0, 0], abs=0.6)
    assert [axes.get_title() for axes in attention.figure.axes[:2]] == ["Input", "Attention"]
