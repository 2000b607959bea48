"""Drawings hold the figure, its text, and the arrays that it shows."""

import io
from pathlib import Path

import numpy as np
import pytest
from inside import photograph, random_capture
from PIL import Image

from vitlab.inspect import drawings
from vitlab.inspect.drawings import Drawing, write_drawings
from vitlab.models import ViTConfig

CONFIG = ViTConfig(image_size=32, patch_size=8, width=8, depth=3, heads=2, mlp_dim=8, num_classes=4)
RANDOM = np.random.default_rng(0)


def text(drawing: Drawing) -> str:
    return f"{drawing.alt} {drawing.caption}"


def test_filters_for_a_light_and_a_dark_page() -> None:
    components = RANDOM.random((5, 4, 4, 3))
    drawing = drawings.filters(components)
    assert (drawing.arrays["components"] == components).all()
    assert "first 5 principal components of the patch embedding" in text(drawing)
    assert "the ResNet below" in text(drawings.filters(components, hybrid=True))
    image = drawing.image
    assert image.dark is not None
    light, dark = (Image.open(io.BytesIO(data)).convert("RGB") for data in (image.data, image.dark))
    assert light.size == dark.size == image.pixels
    assert light.width // 2 == image.width
    assert light.getpixel((0, 0)) != dark.getpixel((0, 0))


def test_positions() -> None:
    similarity = RANDOM.uniform(-1, 1, (3, 2, 4, 2, 4))
    drawing = drawings.positions(similarity)
    assert (drawing.arrays["similarity"] == similarity).all()
    assert "2 by 4 tiles" in text(drawing)
    assert "each of 3 blocks" in text(drawing)
    assert "blocks" not in text(drawings.positions(similarity[:1]))


def test_distances() -> None:
    far = np.array([[10.0, 20.0], [30.0, 31.0]])
    drawing = drawings.distances(far, ["1", "2"], [40.0], "ViT-X")
    arrays = {name: array.tolist() for name, array in drawing.arrays.items()}
    assert arrays == {"distances": far.tolist(), "layers": ["1", "2"], "uniform": [40.0]}
    assert "15.0 pixels in the first layer and 30.5 in the last" in text(drawing)
    assert "dashed line" in text(drawing)
    assert "dashed line" not in text(drawings.distances(far))
    assert drawing.figure.get_suptitle() == "ViT-X"


def test_heads_draws_the_first_image_and_stores_all() -> None:
    capture = random_capture(CONFIG, 2)
    drawing = drawings.heads(capture, "cat.png")
    assert (drawing.arrays["heads"] == capture.heads).all()
    assert (drawing.arrays["distances"] == capture.image_distances).all()
    assert "2 heads in each of 3 layers in cat.png" in text(drawing)
    assert drawing.image != drawings.heads(random_capture(CONFIG, 2, seed=1), "cat.png").image


def test_pairs() -> None:
    capture = random_capture(CONFIG, 3)
    attention, components = drawings.pairs(capture, [photograph((32, 32), i) for i in range(3)])
    assert (attention.name, components.name) == ("attention", "components")
    assert (attention.arrays["rollout"] == capture.rollout).all()
    assert (attention.arrays["rollout_plain"] == capture.rollout_plain).all()
    assert (components.arrays["components"] == capture.components).all()
    shown = np.asarray(components.figure.axes[3].images[0].get_array())  # the second image's tokens
    assert shown[0, 0] == pytest.approx(255 * capture.components[1, 0, 0], abs=0.6)
    assert [axes.get_title() for axes in attention.figure.axes[:2]] == ["Input", "Attention"]


def test_files_hold_the_figures_and_none_of_an_earlier_call(tmp_path: Path) -> None:
    components, similarity = np.full((2, 2, 2, 3), 0.5), np.zeros((1, 2, 2, 2, 2))
    write_drawings([drawings.filters(components), drawings.positions(similarity)], tmp_path)
    (tmp_path / "mine.png").touch()
    write_drawings([drawings.filters(components)], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"filters.png", "filters.svg", "filters.npz", "mine.png"}
    assert (np.load(tmp_path / "filters.npz", allow_pickle=False)["components"] == components).all()
    assert Image.open(tmp_path / "filters.png").width > 500
    assert (tmp_path / "filters.svg").read_bytes().startswith(b"<?xml")
