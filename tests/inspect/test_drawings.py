"""Drawings hold the figure, its words, and the numbers that it shows."""

import io
from pathlib import Path

import numpy as np
import pytest
from inside import look_at, photograph
from PIL import Image

from vitlab.inspect import drawings
from vitlab.inspect.drawings import Drawing, write_drawings
from vitlab.models import ViTConfig

CONFIG = ViTConfig(image_size=32, patch_size=8, width=8, depth=3, heads=2, mlp_dim=8, num_classes=4)


def words(drawing: Drawing) -> str:
    assert drawing.image is not None
    return f"{drawing.image.alt} {drawing.image.caption}"


def test_a_figure_is_drawn_light_and_dark_in_the_same_size() -> None:
    image = drawings.filters(np.random.default_rng(0).random((5, 4, 4, 3))).image
    assert image is not None
    assert image.dark is not None
    light, dark = (Image.open(io.BytesIO(data)).convert("RGB") for data in (image.data, image.dark))
    assert light.size == dark.size == (2 * image.width, light.height)
    assert light.getpixel((0, 0)) != dark.getpixel((0, 0))


def test_filters() -> None:
    components = np.random.default_rng(0).random((5, 4, 4, 3))
    drawing = drawings.filters(components)
    assert drawing.name == "filters"
    assert (drawing.arrays["components"] == components).all()
    assert "first 5 principal components of the filters that embed the patches" in words(drawing)
    assert "the ResNet below" in words(drawings.filters(components, hybrid=True))


def test_positions() -> None:
    similarity = np.random.default_rng(0).uniform(-1, 1, (3, 2, 4, 2, 4))
    drawing = drawings.positions(similarity)
    assert (drawing.arrays["similarity"] == similarity).all()
    assert "2 by 4 tiles" in words(drawing)
    assert "each of 3 blocks" in words(drawing)
    assert "blocks" not in words(drawings.positions(similarity[:1]))


def test_distances() -> None:
    far = np.array([[10.0, 20.0], [30.0, 31.0]])
    drawing = drawings.distances(far, ["1", "2"], [40.0], "ViT-X")
    assert {name: array.tolist() for name, array in drawing.arrays.items()} == {
        "distances": far.tolist(), "layers": ["1", "2"], "uniform": [40.0],
    }  # fmt: skip
    assert "15.0 pixels in the first layer and 30.5 in the last" in words(drawing)
    assert "dashed line" in words(drawing)
    assert "dashed line" not in words(drawings.distances(far))
    assert drawing.figure.texts[0].get_text() == "ViT-X"


def test_heads_draws_the_first_image_and_keeps_the_numbers_of_all() -> None:
    look = look_at(CONFIG, 2)
    drawing = drawings.heads(look, "cat.png")
    assert (drawing.arrays["heads"] == look.heads).all()
    assert (drawing.arrays["distances"] == look.image_distances).all()
    assert "2 heads in each of 3 layers looks in cat.png" in words(drawing)
    other = drawings.heads(look_at(CONFIG, 2, seed=1), "cat.png")
    assert drawing.image != other.image


def test_pairs_are_files_only() -> None:
    look = look_at(CONFIG, 3)
    attention, components = drawings.pairs(look, [photograph((32, 32), i) for i in range(3)])
    assert (attention.name, components.name) == ("attention", "components")
    assert attention.image is components.image is None
    assert attention.arrays.keys() == {"rollout", "rollout_plain"}
    assert (attention.arrays["rollout"] == look.rollout).all()
    assert (components.arrays["components"] == look.components).all()
    shown = np.asarray(components.figure.axes[3].images[0].get_array())  # the second image's tokens
    assert shown[0, 0] == pytest.approx(255 * look.components[1, 0, 0], abs=0.6)
    assert [axes.get_title() for axes in attention.figure.axes[:2]] == ["Input", "Attention"]


def test_files_hold_the_figures_and_their_numbers_and_no_others_of_an_earlier_look(tmp_path: Path) -> None:
    components, similarity = np.full((2, 2, 2, 3), 0.5), np.zeros((1, 2, 2, 2, 2))
    write_drawings([drawings.filters(components), drawings.positions(similarity)], tmp_path)
    (tmp_path / "mine.png").touch()
    write_drawings([drawings.filters(components)], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"filters.png", "filters.svg", "filters.npz", "mine.png"}
    assert (np.load(tmp_path / "filters.npz", allow_pickle=False)["components"] == components).all()
    assert Image.open(tmp_path / "filters.png").size == (576, Image.open(tmp_path / "filters.png").height)
    assert (tmp_path / "filters.svg").read_bytes().startswith(b"<?xml")


def test_columns_are_the_panels_of_figure_7() -> None:
    look = look_at(CONFIG, 1)
    drawn = [drawings.distances(look.distances), *drawings.pairs(look, [photograph((32, 32))])[:0]]
    assert [section.heading for section in drawings.columns(drawn)] == ["Attention distance"]
