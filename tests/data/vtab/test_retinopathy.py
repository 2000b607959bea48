"""The preparation of eyes: its geometry, its arithmetic, its files."""

import copy
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.data.decode import ImageError
from vitlab.data.vtab import retinopathy
from vitlab.data.vtab.retinopathy import EyeEntry, eye_radius, prepare

rng = np.random.default_rng(0)


def eye(height: int, width: int, radius: int, color: tuple[int, int, int] = (180, 90, 40)) -> np.ndarray:
    """A disc of one color on black, in the middle."""
    down, right = np.ogrid[:height, :width]
    inside = (down - height // 2) ** 2 + (right - width // 2) ** 2 <= radius**2
    return (inside[..., None] * np.array(color)).astype(np.uint8)


def test_the_radius_is_found_on_the_middle_row() -> None:
    assert eye_radius(eye(500, 700, 200)) == 200.5
    assert eye_radius(np.zeros((300, 400, 3), np.uint8)) == 150  # nothing to see: half the height


@pytest.mark.parametrize(("height", "width", "radius"), [(500, 700, 200), (900, 901, 440), (200, 200, 90)])
def test_an_eye_is_scaled_and_cropped(height: int, width: int, radius: int) -> None:
    done = prepare(eye(height, width, radius))
    assert done.shape == (540, 540, 3)  # 90 % of 300 pixels each way
    # An even disc is its own average. What is left is gray, but for the bright rim, 30 pixels inside which it ends.
    assert (done[135:405, 135:405] == 128).all()
    assert (done[0, 0] == 128).all()  # outside the circle
    assert done.dtype == np.uint8


def test_a_small_part_of_an_eye_is_not_padded() -> None:
    done = prepare(eye(300, 700, 300))  # cut off above and below, as many of the photographs are
    assert done.shape[1] == 540
    assert done.shape[0] == round(300 * 300 / 300.5)


def test_local_average_is_subtracted_and_contrast_is_fourfold() -> None:
    image = eye(601, 601, 300)  # its radius is 300.5: hardly scaled
    image[299:302, 299:302] += 20
    middle = prepare(image)[260:280, 260:280].astype(int)
    assert middle.max() == 128 + 4 * 20  # nine pixels are too few to raise the average of 61 x 61 by a level
    assert (middle[:7] == 128).all()


def test_what_is_prepared_is_kept(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    image = eye(400, 500, 150)
    image[rng.integers(150, 250, 50), rng.integers(200, 300, 50)] += 60
    Image.fromarray(image).save(tmp_path / "train" / "1_left.jpeg", quality=95)
    entry = EyeEntry(str(tmp_path / "btgraham-300" / "train" / "1_left.jpeg"))
    first = copy.deepcopy(entry).read()  # a copy is an EyeEntry too, also in a worker of the loader
    assert [p.name for p in (tmp_path / "btgraham-300" / "train").iterdir()] == ["1_left.jpeg"]
    with Image.open(entry.file) as stored, Image.open(tmp_path / "train" / "1_left.jpeg") as original:
        assert stored.format == "JPEG"
        wanted = io.BytesIO()
        Image.fromarray(prepare(np.asarray(original))).save(wanted, "JPEG", quality=72)
    assert Path(entry.file).read_bytes() == wanted.getvalue()
    (tmp_path / "train" / "1_left.jpeg").unlink()  # is needed no more
    np.testing.assert_array_equal(entry.read(), first)


def test_originals_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "1_left.jpeg").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"test/1_left.jpeg: not an image"):
        EyeEntry(str(tmp_path / "btgraham-300" / "test" / "1_left.jpeg")).read()
    with pytest.raises(ImageError, match=r"test/2_left.jpeg: No such file"):
        EyeEntry(str(tmp_path / "btgraham-300" / "test" / "2_left.jpeg")).read()


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    Image.fromarray(eye(40, 40, 15)).save(tmp_path / "train" / "1_left.jpeg")
    (tmp_path / "btgraham-300").write_text("a file is in the way")
    with pytest.raises(ValueError, match=r"cannot write .*1_left.jpeg .*prepared images are kept beside the originals"):
        retinopathy.write_prepared(tmp_path / "train" / "1_left.jpeg", tmp_path / "btgraham-300/train/1_left.jpeg")
