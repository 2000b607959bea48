"""The data set in memory and on disk, and images with several labels."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitlab.data import dataset
from vitlab.data.dataset import Labels
from vitlab.data.decode import ImageError
from vitlab.data.registry import load_dataset


def put(path: Path, side: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side)).save(path)


def test_large_or_uneven_images_stay_on_disk(tmp_path: Path) -> None:
    for i, side in enumerate((8, 9)):
        put(tmp_path / "uneven" / "a" / f"{i}.png", side=side)
        put(tmp_path / "large" / "a" / f"{i}.png", side=dataset.MEMORY_SIDE + 1)
    for name in ("uneven", "large"):
        part = load_dataset(f"folder:{tmp_path / name}", "train")
        assert part.pixels is None
        assert part.image(0).shape[2] == 3


def test_unreadable_images_of_a_small_set(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        put(tmp_path / split / "a" / "0.png")
    (tmp_path / "train" / "a" / "1.png").write_bytes(b"")
    with pytest.raises(ImageError, match=r"1\.png: the file is empty"):
        load_dataset(f"folder:{tmp_path}", "train")
    part = load_dataset(f"folder:{tmp_path}", "train", on_error="skip")
    assert part.pixels is not None
    assert list(part.failures) == [1]
    assert part.image(0).max() == 0
    with pytest.raises(ImageError, match="zero bytes"):
        part.image(1)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=8), st.data())
def test_label_sets_against_lists(lists: list[list[int]], data: st.DataObject) -> None:
    labels = Labels.of_lists(lists)
    assert [labels.of(i).tolist() for i in range(len(labels))] == lists
    assert labels.firsts.tolist() == [each[0] for each in lists]
    chosen = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=10))
    taken = labels.take(np.array(chosen, np.int64))
    assert [taken.of(i).tolist() for i in range(len(taken))] == [lists[i] for i in chosen]
    both = labels.join(taken)
    assert [both.of(i).tolist() for i in range(len(both))] == lists + [lists[i] for i in chosen]
    new = np.array([2, -1, 0, -1, 1, -1])
    fewer = labels.renumber(new)
    expected = [[int(new[label]) for label in each if new[label] >= 0] for each in lists]
    assert [fewer.of(i).tolist() for i in range(len(fewer))] == expected
    hot = labels.multi_hot(np.array(chosen, np.int64), 6)
    assert hot.tolist() == [[c in lists[i] for c in range(6)] for i in chosen]
