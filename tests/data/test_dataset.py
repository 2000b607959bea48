"""The data set in memory and on disk, images with several labels, digests of images, and intact arrays or none."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_files import put

from vitlab.data import dataset
from vitlab.data.dataset import Dataset, Labels, digest_images, read_arrays
from vitlab.data.decode import Entry, ImageError
from vitlab.data.registry import load_dataset
from vitlab.io import write_arrays


def test_large_or_uneven_images_stay_on_disk(tmp_path: Path) -> None:
    large = dataset.MEMORY_SIDE + 1
    for i, side in enumerate((8, 9)):
        put(tmp_path / "uneven" / "a" / f"{i}.png", size=(side, side))
        put(tmp_path / "large" / "a" / f"{i}.png", size=(large, large))
    for name in ("uneven", "large"):
        assert load_dataset(f"folder:{tmp_path / name}", "train").pixels is None


def test_unreadable_images_of_a_small_set(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        put(tmp_path / split / "a" / "0.png")
    (tmp_path / "train" / "a" / "1.png").write_bytes(b"")
    with pytest.raises(ImageError, match=r"1\.png: the file is empty"):
        load_dataset(f"folder:{tmp_path}", "train")
    part = load_dataset(f"folder:{tmp_path}", "train", on_error="skip")
    assert part.pixels is not None
    assert list(part.failures) == [1]
    with pytest.raises(ImageError, match="zero bytes"):
        part.image(1)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=8), st.data())
def test_label_sets_against_lists(lists: list[list[int]], data: st.DataObject) -> None:
    def as_lists(labels: Labels) -> list[list[int]]:
        return [labels.of(i).tolist() for i in range(len(labels))]

    labels = Labels.of_lists(lists)
    assert as_lists(labels) == lists
    assert labels.firsts.tolist() == [several[0] for several in lists]
    chosen = np.array(data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=10)), np.int64)
    taken = labels.take(chosen)
    assert as_lists(taken) == [lists[i] for i in chosen]
    assert as_lists(labels.join(taken)) == lists + [lists[i] for i in chosen]
    new = np.array([2, -1, 0, -1, 1, -1])
    assert as_lists(labels.renumber(new)) == [[int(new[c]) for c in several if new[c] >= 0] for several in lists]
    assert labels.multi_hot(chosen, 6).tolist() == [[c in lists[i] for c in range(6)] for i in chosen]


# ---------------------------------------------------------------------------------------------------- caches


def digest(data: Dataset, indices: range = range(1, 3), start: str = "salt") -> str:
    return digest_images(start, data, indices, {})


def test_images_in_memory_are_identified_by_their_bytes() -> None:
    values = np.arange(6 * 4 * 4 * 3, dtype=np.uint8).reshape(6, 4, 4, 3)
    data = Dataset("made", "train", ("a", "b"), np.array([0, 1] * 3), values)
    before = digest(data)
    assert digest(dataclasses.replace(data, name="other", labels=data.labels[::-1])) == before
    assert digest(data, start="other") != before
    assert digest(data, range(1, 4)) != before
    assert digest(dataclasses.replace(data, failures={2: ImageError("x", "broken")})) != before
    assert digest(dataclasses.replace(data, failures={5: ImageError("x", "broken")})) == before  # not among them
    values[5] += 1
    assert digest(data) == before
    values[2, 3, 3, 2] += 1
    assert digest(data) != before


def test_images_in_files_are_identified_by_path_size_and_time(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.bin" for i in range(4)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes(i + 1))
    entries = [Entry(str(path)) for path in paths]
    data = Dataset("disk", "train", ("a",), np.zeros(4, np.int64), entries=entries)
    digests = [digest(data)]
    paths[3].write_bytes(b"not among them")
    assert digest(data) == digests[0]
    moved = [*entries[:1], entries[1]._replace(offset=1), *entries[2:]]
    digests.append(digest(dataclasses.replace(data, entries=moved)))
    os.utime(paths[2], ns=(paths[2].stat().st_atime_ns, paths[2].stat().st_mtime_ns + 1))
    digests.append(digest(data))
    paths[2].unlink()
    digests.append(digest(data))
    assert len(set(digests)) == 4


def test_arrays_are_intact_or_none(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cache.npz"
    write_arrays(path, {"x": np.arange(3, dtype=np.float32), "text": np.array("text")})
    arrays = read_arrays(path, "text", "x")
    assert arrays is not None
    assert (str(arrays[0]), arrays[1].tolist()) == ("text", [0, 1, 2])
    assert read_arrays(path, "y") is None
    assert read_arrays(tmp_path / "missing.npz", "x") is None
    good, corrupt = path.read_bytes(), 0
    for i in range(0, len(good), 3):
        for damaged in (good[:i], good[:i] + bytes([good[i] ^ 0x10]) + good[i + 1 :]):
            path.write_bytes(damaged)
            arrays = read_arrays(path, "x")
            corrupt += arrays is None
            assert arrays is None or arrays[0].tolist() == [0, 1, 2]
    assert corrupt > len(good) / 3
    np.savez(path, x=np.array([{}], dtype=object))
    assert read_arrays(path, "x") is None
