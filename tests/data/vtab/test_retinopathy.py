"""The preparation of eyes: its geometry, its arithmetic, its files."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.data.decode import ImageError
from vitlab.data.vtab.readers import EyeEntry, prepare_eye


def eye(height: int, width: int, radius: int) -> np.ndarray:
    """A disc of one color on black, in the middle."""
    down, right = np.ogrid[:height, :width]
    inside = (down - height // 2) ** 2 + (right - width // 2) ** 2 <= radius**2
    return (inside[..., None] * np.array((180, 90, 40))).astype(np.uint8)


@pytest.mark.parametrize(("height", "width", "radius"), [(500, 700, 200), (900, 901, 440), (300, 700, 300)])
def test_an_eye_is_scaled_and_cropped(height: int, width: int, radius: int) -> None:
    done = prepare_eye(eye(height, width, radius))
    # 90 % of 300 pixels each way; an eye that is cut off above and below, as many are, is not padded.
    assert done.shape == (540 if height > 300 else round(300 * 300 / 300.5), 540, 3)
    # A uniform disc is its own average: gray, but for the bright rim, 30 pixels inside which it ends.
    assert (done[135:250, 135:405] == 128).all()
    assert height == 300 or (done[0, 0] == 128).all()  # outside the circle


def test_local_average_is_subtracted_and_contrast_is_fourfold() -> None:
    image = eye(601, 601, 300)  # its radius is 300.5: hardly scaled
    image[299:302, 299:302] += 20
    middle = prepare_eye(image)[260:280, 260:280].astype(int)
    assert middle.max() == 128 + 4 * 20  # nine pixels are too few to raise the average of 61 x 61 by a level
    assert (middle[:7] == 128).all()


def test_unreadable_originals_and_folders(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "1_left.jpeg").write_bytes(b"not an image")
    Image.fromarray(eye(40, 40, 15)).save(tmp_path / "test" / "3_left.jpeg")
    for name, message in (("1_left", "not an image"), ("2_left", "No such file")):
        with pytest.raises(ImageError, match=rf"test/{name}.jpeg: {message}"):
            EyeEntry(str(tmp_path / "btgraham-300" / "test" / f"{name}.jpeg")).read()
    (tmp_path / "btgraham-300").write_text("a file is in the way")
    with pytest.raises(ImageError, match="cannot be written"):
        EyeEntry(str(tmp_path / "btgraham-300" / "test" / "3_left.jpeg")).read()
