"""Files of pixels: idx, SVHN's .mat, HDF5; complete, compressed, corrupt, missing."""

import gzip
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.io
from image_files import pixels_of

from vitlab.data.vtab.readers import read_h5, read_idx, svhn
from vitlab.data.vtab.tasks import READ_ERRORS

rng = np.random.default_rng(0)


@pytest.mark.parametrize("packed", [True, False])
def test_idx(tmp_path: Path, packed: bool) -> None:
    images, path = rng.integers(0, 256, (20, 28, 28), np.uint8), tmp_path / f"images{'.gz' if packed else ''}"
    data = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in images.shape) + images.tobytes()
    path.write_bytes(gzip.compress(data) if packed else data)
    np.testing.assert_array_equal(read_idx(tmp_path / "images"), images)
    whole = path.read_bytes()
    for damaged in (whole[:-1], b"x" + whole[1:], b""):
        path.write_bytes(damaged)
        with pytest.raises(READ_ERRORS):
            read_idx(tmp_path / "images")


def test_svhn_matrices(tmp_path: Path) -> None:
    images, labels = rng.integers(0, 256, (32, 32, 3, 12), np.uint8), np.arange(1, 13) % 10 + 1
    scipy.io.savemat(tmp_path / "train_32x32.mat", {"X": images, "y": labels[:, None].astype(np.uint8)})
    data = svhn(tmp_path, "train").dataset
    np.testing.assert_array_equal(pixels_of(data), np.moveaxis(images, 3, 0))
    assert data.labels.tolist() == (labels % 10).tolist()  # the digit 0 is stored as 10
    whole = (tmp_path / "train_32x32.mat").read_bytes()
    for count in (0, 50, 200, 3000):
        (tmp_path / "train_32x32.mat").write_bytes(whole[:count])
        with pytest.raises(READ_ERRORS):
            svhn(tmp_path, "train")


def test_two_processes_map_hdf5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One finishes before the other."""
    content, replace = rng.integers(0, 256, (9, 4), np.uint8), Path.replace
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = content

    def finish_later(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        np.testing.assert_array_equal(read_h5(tmp_path / "a.h5", "x"), content)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", finish_later)
    np.testing.assert_array_equal(read_h5(tmp_path / "a.h5", "x"), content)


def test_corrupt_hdf5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["y"] = np.zeros(5000, np.uint8)
    whole = path.read_bytes()
    for data, name in ((whole, "x"), (b"", "y"), (whole[:100], "y"), (b"x" * 5000, "y")):
        path.write_bytes(data)
        with pytest.raises(READ_ERRORS):
            read_h5(path, name)
    path.unlink()
    (tmp_path / "a.h5.gz").write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(READ_ERRORS):
        read_h5(path, "y")
    assert not path.exists()
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ValueError, match=r"h5py is not installed: pip install 'vitlab\[vtab\]'"):
        read_h5(path, "x")
