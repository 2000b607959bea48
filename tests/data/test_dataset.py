"""The data set in memory and on disk, several labels, parts of a split, digests of images, intact arrays or none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import paths_of, put

from vitlab.data.dataset import Dataset, Labels, read_arrays
from vitlab.data.decode import Entry, ImageError
from vitlab.data.registry import load_dataset
from vitlab.data.splits import stratified_split, stratified_subset
from vitlab.errors import UserError
from vitlab.io import write_arrays


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


@given(st.integers(0, 2**32 - 1))
def test_label_sets_against_lists(seed: int) -> None:
    random = np.random.default_rng(seed)
    lists = [random.permutation(6)[: random.integers(1, 5)].tolist() for _ in range(random.integers(1, 9))]

    def as_lists(labels: Labels) -> list[list[int]]:
        return [labels.of_image(i).tolist() for i in range(len(labels))]

    labels = Labels.of_lists(lists)
    assert as_lists(labels) == lists
    assert labels.first_labels.tolist() == [several[0] for several in lists]
    chosen = random.integers(0, len(lists), random.integers(0, 11))
    taken = labels.take(chosen)
    assert as_lists(taken) == [lists[i] for i in chosen]
    assert as_lists(labels.join(taken)) == lists + [lists[i] for i in chosen]
    new = np.array([2, -1, 0, -1, 1, -1])
    assert as_lists(labels.renumber(new)) == [[int(new[c]) for c in several if new[c] >= 0] for several in lists]
    assert labels.multi_hot(chosen, 6).tolist() == [[c in lists[i] for c in range(6)] for i in chosen]


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.floats(0.01, 0.4), st.integers(0, 2**64 - 1))
def test_stratified_split(labels: list[int], share: float, seed: int) -> None:
    parts, again = (stratified_split(np.array(labels), {"val": share, "test": 0.2}, seed) for _ in range(2))
    np.testing.assert_array_equal(np.sort(np.concatenate(list(parts.values()))), np.arange(len(labels)))
    for name, expected in (("val", share), ("test", 0.2)):
        for label in set(labels):
            size = labels.count(label)
            count = int((np.array(labels)[parts[name]] == label).sum())
            assert count == (max(1, round(expected * size)) if size > 2 else 0)
    assert all(np.array_equal(parts[name], again[name]) for name in parts)


def made(labels: list[int]) -> Dataset:
    """A set whose images are named by their index."""
    entries = [Entry(str(i)) for i in range(len(labels))]
    return Dataset("made", "train", tuple("abcdef"), np.array(labels), entries=entries)


def indices(dataset: Dataset) -> list[int]:
    return list(map(int, paths_of(dataset)))


SHARES = st.tuples(st.floats(1e-3, 1), st.floats(1e-3, 1))


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), SHARES, st.integers(0, 2**63 - 1))
def test_nested_and_stratified(labels: list[int], shares: tuple[float, float], seed: int) -> None:
    whole = made(labels)
    small, large = parts = [stratified_subset(whole, share, seed) for share in sorted(shares)]
    assert set(indices(small)) <= set(indices(large))
    for part, share in zip(parts, sorted(shares), strict=True):
        assert indices(part) == sorted(indices(part))
        assert [labels[i] for i in indices(part)] == part.labels.tolist()
        for label in set(labels):
            assert part.labels.tolist().count(label) == max(1, round(share * labels.count(label)))
    assert indices(stratified_subset(whole, 1.0, seed)) == list(range(len(labels)))


def test_classes_and_exclusion_take_from_the_part(tmp_path: Path) -> None:
    """They bring no other images in."""
    whole, exclude = load_dataset("digits", "train"), tmp_path / "exclude.txt"
    options: dict[str, Any] = {"subset_fraction": 0.1, "subset_seed": 1}
    part = load_dataset("digits", "train", **options)
    some = load_dataset("digits", "train", classes=(7, 2), **options)
    assert paths_of(some) == [name for name, c in zip(paths_of(part), part.labels, strict=True) if c in (7, 2)]
    excluded = set(paths_of(whole)[::3])
    exclude.write_text("\n".join(excluded))
    rest = load_dataset("digits", "train", exclude=exclude, **options)
    assert paths_of(rest) == [name for name in paths_of(part) if name not in excluded] != []
    for share in (0.0, 1.01, float("nan")):
        with pytest.raises(UserError, match=str(share)):
            load_dataset("digits", "train", subset_fraction=share)


def test_arrays_are_intact_or_none(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cache.npz"
    write_arrays(path, {"x": np.arange(3, dtype=np.float32), "text": np.array("text")})
    arrays = read_arrays(path, "text", "x")
    assert arrays is not None
    assert (str(arrays[0]), arrays[1].tolist()) == ("text", [0, 1, 2])
    assert read_arrays(path, "y") is None
    assert read_arrays(tmp_path / "missing.npz", "x") is None
    good = path.read_bytes()
    for i in range(0, len(good), 29):
        for damaged in (good[:i], good[:i] + bytes([good[i] ^ 0x10]) + good[i + 1 :]):
            path.write_bytes(damaged)
            arrays = read_arrays(path, "x")
            assert arrays is None or arrays[0].tolist() == [0, 1, 2]
    np.savez(path, x=np.array([{}], dtype=object))
    assert read_arrays(path, "x") is None
