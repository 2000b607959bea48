"""What is kept of images belongs to these images alone, and is never read half."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from vitlab.data.cache import digest_images, read_arrays
from vitlab.data.dataset import Dataset
from vitlab.data.decode import Entry, ImageError
from vitlab.io import write_arrays


@pytest.fixture
def pixels() -> Dataset:
    values = np.arange(6 * 4 * 4 * 3, dtype=np.uint8).reshape(6, 4, 4, 3)
    return Dataset("made", "train", ("a", "b"), np.array([0, 1] * 3), values)


@pytest.fixture
def files(tmp_path: Path) -> Dataset:
    paths = [tmp_path / f"{i}.bin" for i in range(4)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes(i + 1))
    return Dataset("disk", "train", ("a",), np.zeros(4, np.int64), entries=[Entry(str(path)) for path in paths])


def digest(dataset: Dataset, places: range = range(1, 3), start: str = "salt") -> str:
    return digest_images(start, dataset, places, {})


def test_images_in_memory_count_by_their_bytes(pixels: Dataset) -> None:
    known = digest(pixels)
    assert pixels.pixels is not None
    assert digest(dataclasses.replace(pixels, name="other", labels=pixels.labels[::-1])) == known
    assert digest(pixels, start="other") != known
    assert digest(pixels, range(1, 4)) != known
    assert digest(dataclasses.replace(pixels, failures={2: ImageError("x", "broken")})) != known
    assert digest(dataclasses.replace(pixels, failures={5: ImageError("x", "broken")})) == known  # not among them
    pixels.pixels[5] += 1
    assert digest(pixels) == known
    pixels.pixels[2, 3, 3, 2] += 1
    assert digest(pixels) != known


def test_images_in_files_count_by_size_time_and_place(files: Dataset) -> None:
    known = digest(files)
    assert digest(files) == known
    Path(files.entries[3].file).write_bytes(b"not among them")
    assert digest(files) == known
    moved = [*files.entries]
    moved[1] = moved[1]._replace(offset=1)
    assert digest(dataclasses.replace(files, entries=moved)) != known
    path = Path(files.entries[2].file)
    state = path.stat()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    later = digest(files)
    assert later != known
    path.unlink()
    assert digest(files) not in (known, later)


def test_arrays_come_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "kept.npz"
    write_arrays(path, {"one": np.arange(5), "two": np.array("text")})
    found = read_arrays(path, "two", "one")
    assert found is not None
    assert (str(found[0]), found[1].tolist()) == ("text", [0, 1, 2, 3, 4])
    assert [file.name for file in path.parent.iterdir()] == ["kept.npz"]
    assert read_arrays(path, "three") is None
    assert read_arrays(tmp_path / "nowhere.npz", "one") is None


def test_no_damage_goes_unnoticed(tmp_path: Path) -> None:
    """Every byte flipped in turn, and every length: the arrays as they were, or nothing."""
    path = tmp_path / "kept.npz"
    write_arrays(path, {"x": np.arange(3, dtype=np.float32)})
    good = path.read_bytes()
    noticed = 0
    for place in range(len(good)):
        for damaged in (good[:place], good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :]):
            path.write_bytes(damaged)
            found = read_arrays(path, "x")
            noticed += found is None
            assert found is None or found[0].tolist() == [0, 1, 2]
    assert noticed > len(good)


def test_objects_are_not_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "kept.npz", x=np.array([{}], dtype=object))
    assert read_arrays(tmp_path / "kept.npz", "x") is None
