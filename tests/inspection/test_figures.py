"""Figures show their numbers, also as files; images under attention maps."""

import io
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from inside import photograph, random_capture
from PIL import Image

from vitlab.inspection import figures
from vitlab.inspection.figures import Drawing, write_drawings
from vitlab.models import ViTConfig

CONFIG = ViTConfig(image_size=32, patch_size=8, width=8, depth=3, heads=2, mlp_dim=8, num_classes=4)
RANDOM = np.random.default_rng(0)


def similarity(rows: int, columns: int) -> np.ndarray:
    return RANDOM.uniform(-1, 1, (1, *(rows, columns) * 2))


def pairs(n: int) -> list[Drawing]:
    return figures.pairs(random_capture(CONFIG, n), [photograph((32, 32), i) for i in range(n)])


@pytest.mark.parametrize(
    "drawing",
    [
        pytest.param(lambda: figures.positions(similarity(37, 30)), id="37x30 patches"),
        pytest.param(lambda: figures.distances(np.zeros((1, 1))), id="one layer, no distance"),
    ],
)
def test_an_image_of_a_figure_is_small_and_half_as_wide_as_its_file(drawing) -> None:
    image = drawing().image
    assert len(image.data) < 900_000
    assert 100 <= image.width == Image.open(io.BytesIO(image.data)).width // 2 <= 1000


def test_the_same_numbers_give_the_same_bytes() -> None:
    first, second = (figures.filters(np.full((2, 2, 2, 3), 0.5)) for _ in range(2))
    assert first.png == second.png
    drawn = figures.svg(first.figure)
    assert drawn == figures.svg(second.figure)
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert b"date" not in drawn


def test_files_hold_the_figures_and_none_of_an_earlier_call(tmp_path: Path) -> None:
    components = np.full((2, 2, 2, 3), 0.5)
    write_drawings([figures.filters(components), figures.positions(similarity(3, 5))], tmp_path)
    (tmp_path / "mine.png").touch()
    write_drawings([figures.filters(components)], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"filters.png", "filters.svg", "filters.npz", "mine.png"}
    assert (np.load(tmp_path / "filters.npz", allow_pickle=False)["components"] == components).all()


def test_tiles_are_in_the_papers_order() -> None:
    """Of large grids every second patch."""
    values = similarity(2, 3)
    drawing = figures.positions(values)
    assert drawing.arrays["similarity"] is values
    sheet = np.asarray(drawing.figure.axes[0].images[0].get_array())
    zoom, gap = 8, 2  # 3 patches in a tile of 24 pixels
    for i, j, row, column in np.ndindex(2, 3, 2, 3):
        top, left = i * (2 * zoom + gap) + row * zoom, j * (3 * zoom + gap) + column * zoom
        assert np.abs(sheet[top : top + zoom, left : left + zoom] - values[0, i, j, row, column]).max() <= 0.0101
    values = np.zeros((1, 20, 20, 20, 20))
    values[0, 18, 2] = 1
    axes = figures.positions(values).figure.axes[0]
    sheet = np.asarray(axes.images[0].get_array())
    assert [label.get_text() for label in axes.get_yticklabels()] == [str(i) for i in range(1, 20, 2)]
    pitch = sheet.shape[0] // 10 + 1
    assert (sheet[9 * pitch : 9 * pitch + 40, pitch : pitch + 40] == 1).all()


def test_distances_are_dots_above_their_layers_from_zero_up() -> None:
    values = RANDOM.random((3, 4)) * 50
    drawing = figures.distances(values, ["1", "2", "3"], [60.0], "ViT-X")
    assert {name: array.tolist() for name, array in drawing.arrays.items()} == {
        "distances": values.tolist(),
        "layers": ["1", "2", "3"],
        "uniform": [60.0],
    }
    assert f"{values[0].mean():.1f} pixels in the first layer and {values[2].mean():.1f} in the last" in drawing.alt
    axes = drawing.figure.axes[0]
    offsets = np.asarray(axes.collections[0].get_offsets())
    np.testing.assert_allclose(offsets, [(1 + layer, values[layer, head]) for layer, head in np.ndindex(3, 4)])
    mean, line = axes.lines
    np.testing.assert_allclose(np.asarray(mean.get_ydata()), values.mean(axis=1))
    assert np.asarray(line.get_ydata()).tolist() == [60, 60]
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > 60


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
        assert np.abs(tile - figures.scale_maps(capture.heads[0, layer, head])).max() < 0.02


def test_pairs_of_images() -> None:
    capture = random_capture(CONFIG, 3)
    attention, components = pairs(3)
    assert (attention.name, components.name) == ("attention", "components")
    for name in ("rollout", "rollout_plain"):
        np.testing.assert_array_equal(attention.arrays[name], getattr(capture, name))
    np.testing.assert_array_equal(components.arrays["components"], capture.components)
    tokens = np.asarray(components.figure.axes[3].images[0].get_array())  # of the second image
    assert tokens[0, 0] == pytest.approx(255 * capture.components[1, 0, 0], abs=0.6)
    assert [axes.get_title() for axes in attention.figure.axes[:2]] == ["Input", "Attention"]


def test_levels_are_of_each_map_and_one_patch_does_not_hide_the_rest() -> None:
    level = np.linspace(0.2, 0.4, 100).reshape(10, 10)
    np.testing.assert_allclose(figures.scale_maps(level).ravel()[:95], np.linspace(0, 99 / 94.05, 100)[:95], rtol=1e-6)
    np.testing.assert_allclose(figures.scale_maps(np.stack([level, 9 * level]))[1], figures.scale_maps(level))
    spiked = level.copy()
    spiked[0, 0] = 2.0
    assert np.abs(figures.scale_maps(spiked) - figures.scale_maps(level)).ravel()[1:].max() < 0.02
    alone = np.full((10, 10), 1e-6) * level
    alone[3, 3] = 1.0
    assert np.delete(figures.scale_maps(alone).ravel(), 33).max() < 1e-4, "rounding errors must not show"
    assert (figures.scale_maps(np.full((2, 2), 0.25)) == 0).all()


def test_masked_is_black_without_attention_and_the_image_at_the_maximum() -> None:
    attention = np.zeros((3, 3))
    attention[1, 1] = attention[1, 2] = 0.5
    masked = figures.masked(np.full((60, 60, 3), 200, dtype=np.uint8), attention)
    assert (masked[30, 50] == 200).all()
    assert (masked[5, 5] <= 2).all()


def test_a_small_image_is_encoded_exactly_and_a_large_one_nearly() -> None:
    small = RANDOM.integers(0, 256, (64, 7, 4), dtype=np.uint8)
    assert (np.asarray(Image.open(io.BytesIO(figures.encode(small)))) == small).all()
    large = np.zeros((160, 200, 4), dtype=np.uint8)
    large[..., 0], large[..., -1] = np.linspace(0, 255, 200), 255
    large[:, :50] = 0  # transparent
    data = figures.encode(large)
    assert len(data) < 4000
    assert np.abs(np.asarray(Image.open(io.BytesIO(data))).astype(int) - large)[:, 64:].max() < 16
