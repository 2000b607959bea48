"""Fig. 1 as a drawing."""

import numpy as np
import pytest
from matplotlib.image import AxesImage

from vitlab.inspection.overview import GRID, draw_overview


@pytest.mark.parametrize("size", [(90, 90), (40, 120), (301, 200)])
def test_the_drawing_shows_every_patch_twice(size: tuple[int, int]) -> None:
    """In the image, and in the sequence; in reading order."""
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    (axes,) = draw_overview(image).axes
    patches = [np.asarray(child.get_array()) for child in axes.get_children() if isinstance(child, AxesImage)]
    assert len(patches) == 2 * GRID**2
    assert all(np.array_equal(grid, row) for grid, row in zip(patches[::2], patches[1::2], strict=True))
    texts = {text.get_text() for text in axes.texts}
    assert {"*", *map(str, range(GRID**2 + 1)), "Multi-head attention", "MLP", "MLP head"} <= texts
