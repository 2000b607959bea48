"""The table tells the truth, splits are stratified and never overlap, and every set is found or asked for by name."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitlab.data import registry as datasets
from vitlab.data.dataset import Dataset
from vitlab.data.registry import DATASETS, SPLITS, check_source, load_dataset, require_disjoint
from vitlab.data.subsets import stratified_split
from vitlab.errors import UserError

rng = np.random.default_rng(0)


def pixels_of(data: Dataset) -> np.ndarray:
    assert data.pixels is not None
    return data.pixels


# ------------------------------------------------------------------------------------------------- splits


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.floats(0.01, 0.4), st.integers(0, 2**64 - 1))
def test_stratified_split(labels: list[int], share: float, seed: int) -> None:
    given_labels = np.array(labels)
    parts = stratified_split(given_labels, {"val": share, "test": 0.2}, seed)
    np.testing.assert_array_equal(np.sort(np.concatenate(list(parts.values()))), np.arange(len(labels)))
    for name, wanted in (("val", share), ("test", 0.2)):
        for label in set(labels):
            size = labels.count(label)
            got = int((given_labels[parts[name]] == label).sum())
            assert got == (max(1, round(wanted * size)) if size > 2 else 0)
    again = stratified_split(given_labels, {"val": share, "test": 0.2}, seed)
    assert all(np.array_equal(parts[name], again[name]) for name in parts)


def test_digits() -> None:
    info = DATASETS["digits"]
    parts = {split: load_dataset("digits", split) for split in SPLITS}
    assert {s: len(parts[s]) for s in ("train", "val", "test")} == info.splits
    assert len(parts["trainval"]) == info.splits["train"] + info.splits["val"]
    assert len(parts["all"]) == sum(info.splits.values())
    for data in parts.values():
        assert data.classes == info.classes
        assert pixels_of(data).shape[1:] == (8, 8, 3)
        assert np.bincount(data.labels, minlength=10).min() >= len(data) / 10 * 0.9  # stratified
        np.testing.assert_array_equal(data.image(3), pixels_of(data)[3])
        assert data.path(3).startswith("digits/test[" if data.split == "test" else "digits/train[")
    every = np.concatenate([pixels_of(parts[s]) for s in ("train", "val", "test")]).reshape(1797, -1)
    assert len(np.unique(every, axis=0)) == 1797  # no image in two splits
    assert every.max() == 255


def test_the_digits_test_split_is_fixed_and_val_is_seeded() -> None:
    test, val = ([load_dataset("digits", split, seed=s) for s in (0, 1)] for split in ("test", "val"))
    np.testing.assert_array_equal(test[0].pixels, test[1].pixels)
    assert not np.array_equal(pixels_of(val[0]), pixels_of(val[1]))


def test_classes_are_kept_and_relabeled_in_the_order_given() -> None:
    whole, part = load_dataset("digits", "test"), load_dataset("digits", "test", classes=(7, 2))
    assert part.classes == ("7", "2")
    np.testing.assert_array_equal(pixels_of(part)[part.labels == 0], pixels_of(whole)[whole.labels == 7])
    np.testing.assert_array_equal(pixels_of(part)[part.labels == 1], pixels_of(whole)[whole.labels == 2])
    assert len(part) == np.isin(whole.labels, (2, 7)).sum()


@pytest.mark.parametrize("classes", [(), (0, 10), (-1,), (3, 3)])
def test_wrong_classes(classes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="classes must be different numbers from 0 to 9 of digits"):
        load_dataset("digits", "test", classes=classes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar", "unknown data set 'cifar'; the nearest: cifar10, cifar100"),
        ("fashionmnist", "the nearest: fashion_mnist"),
        ("folder:", "the nearest: folder:PATH"),
        ("pet", "the nearest: pets"),
        ("kinetics", r"unknown data set 'kinetics' \(there are digits, fashion_mnist"),
        ("hub:x", "hub:x is no name on the hub and no folder"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_dataset(name, "train")


def test_a_bare_folder_is_pointed_to_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"write folder:{tmp_path}"):
        load_dataset(str(tmp_path), "train")


def test_a_folder_that_is_called_nearly_like_a_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flowers").mkdir()
    for root, here in ((None, tmp_path), (tmp_path, tmp_path.parent)):
        monkeypatch.chdir(here)
        with pytest.raises(UserError, match=r"'flowers'; for your .* write folder:flowers; the nearest: flowers102"):
            load_dataset("flowers", "train", root=root)


def test_splits_that_share_images(tmp_path: Path) -> None:
    digits = {split: load_dataset("digits", split) for split in ("train", "test", "trainval")}
    require_disjoint(digits["train"], digits["test"])
    with pytest.raises(UserError, match=r"1259 of the 1259 test images of digits are also .* \(trainval and train\)"):
        require_disjoint(digits["trainval"], digits["train"])


def test_partial_is_for_imagenet() -> None:
    with pytest.raises(UserError, match="partial goes with imagenet and imagenet_real, not with digits"):
        load_dataset("digits", "test", partial=True)


def test_wrong_split_and_policy() -> None:
    with pytest.raises(ValueError, match="split must be one of train, val, test, trainval, all, not 'validation'"):
        load_dataset("digits", "validation")
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'skip', not 'warn'"):
        load_dataset("digits", "train", on_error="warn")


# -------------------------------------------------------------------------------------------------- table


def test_the_table_is_complete() -> None:
    for name, info in DATASETS.items():
        assert info.source
        assert info.license
        assert len(set(info.classes)) == len(info.classes)
        assert (":" in name) == (not info.classes and not info.num_classes)
        assert not (info.classes and info.num_classes)
        assert info.splits or name in ("folder:PATH", "shards:PATH", "hub:OWNER/NAME")
        assert not info.splits.keys() & info.held_out.keys() or info.classes or name == "imagenet"
    sizes = {name: len(info.classes) or info.num_classes for name, info in DATASETS.items()}
    assert sizes["digits"] == sizes["svhn"] == 10
    assert (sizes["cifar100"], sizes["flowers102"], sizes["pets"], sizes["sun397"]) == (100, 102, 37, 397)
    assert list(DATASETS["cifar100"].classes) == sorted(DATASETS["cifar100"].classes)


def test_the_real_cifar10_shards(shared: Path) -> None:
    data = load_dataset("shards:cifar10", "test", root=shared / "data")
    assert data.classes == DATASETS["cifar10"].classes
    assert np.bincount(data.labels).tolist() == [1000] * 10
    assert pixels_of(data).shape == (10_000, 32, 32, 3)
    assert data.path(0).endswith("test-00.tar/00000.png")


def test_a_source_is_checked_without_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("it was read")

    (tmp_path / "there").mkdir()
    monkeypatch.setitem(datasets._PATH_READERS, "folder", read)
    monkeypatch.setitem(datasets._READERS, "digits", read)
    for name in ("digits", "folder:there", "shards:https://host/set", "hub:owner/name", "vtab:svhn", "cifar10"):
        check_source(name, tmp_path)
    for name, message in (
        ("digit", "unknown data set 'digit'; the nearest: digits"),
        ("folder:away", r"away does not exist .*give a folder of class folders with images"),
        ("shards:away", r"away does not exist .*give a folder of shards named train-"),
        ("folder:", "unknown data set 'folder:'"),
    ):
        with pytest.raises(ValueError, match=message):
            check_source(name, tmp_path)
