"""Splits in whole groups, wherever they are drawn; groups by the paths of images."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import paths_of, put

from vitlab.config.data import ReadConfig
from vitlab.data.dataset import Dataset
from vitlab.data.registry import load_dataset
from vitlab.data.splits import group_by, stratified_split, warn_of_shared_groups
from vitlab.errors import UserError


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=80), st.integers(0, 5))
def test_groups_are_kept_whole(images: list[tuple[int, int]], seed: int) -> None:
    """Of several classes too; all indices once, and train has a group of each class."""
    labels, groups = np.array([c for c, _ in images]), np.array([f"g{g}" for _, g in images], dtype=object)
    parts, again = (stratified_split(labels, {"val": 0.2, "test": 0.2}, seed, groups=groups) for _ in range(2))
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(images)))
    assert all(parts[name].tolist() == again[name].tolist() for name in parts)
    held = [set(groups[indices]) for indices in parts.values()]
    assert sum(map(len, held)) == len(set(groups))
    assert set(labels[parts["train"]]) == set(labels)


def test_groups_are_stratified() -> None:
    """Close to the fraction of each class; a class of a few large groups is in each split all the same."""
    random = np.random.default_rng(0)
    sizes = [*random.integers(1, 9, 200), 20, 25, 30, 35]
    classes = [*random.integers(0, 3, 200), 3, 3, 3, 3]
    labels, groups = np.repeat(classes, sizes), np.repeat(np.arange(204), sizes)
    parts = stratified_split(labels, {"val": 0.1, "test": 0.2}, 0, groups=groups)
    counts = {name: np.bincount(labels[indices], minlength=4) for name, indices in parts.items()}
    for name, share in (("val", 0.1), ("test", 0.2)):
        np.testing.assert_allclose(counts[name][:3] / np.bincount(labels)[:3], share, atol=0.02)
        assert counts[name][3] in (20, 25, 30, 35)
    other = stratified_split(labels, {"val": 0.1, "test": 0.2}, 7, groups=groups)
    assert other["test"].tolist() != parts["test"].tolist()


def patients(folder: Path, splits: tuple[str, ...] = ("",)) -> str:
    """Ten patients with four images each, of two classes."""
    for patient in range(10):
        for image in range(4):
            put(folder / splits[patient % len(splits)] / "ab"[patient % 2] / f"p{patient:02}_{image}.png", patient)
    return f"folder:{folder}"


def named(dataset: Dataset) -> set[str]:
    return {Path(path).name[:3] for path in paths_of(dataset)}


@pytest.mark.parametrize("column", [True, False])
def test_no_patient_is_on_both_sides(column: bool, tmp_path: Path) -> None:
    """By a table's column, or by the paths; every split that is cut from train."""
    name, read = patients(tmp_path), ReadConfig(group_by=r"(p\d+)_")
    if column:
        rows = [f"{'ab'[p % 2]}/p{p:02}_{i}.png,{'ab'[p % 2]},{p}" for p in range(10) for i in range(4)]
        (tmp_path / "labels.csv").write_text("\n".join(["file,label,Patient_ID", *rows]))
        name, read = f"csv:{tmp_path / 'labels.csv'}", ReadConfig()
    whole = load_dataset(name, "all", read=read)
    assert whole.groups is not None
    parts = [named(load_dataset(name, split, read=read)) for split in ("train", "val", "test")]
    assert set.union(*parts) == named(whole)
    assert sum(map(len, parts)) == 10
    assert all(parts)
    assert column or named(load_dataset(name, "train")) & named(load_dataset(name, "test"))


def test_the_group_is_what_the_expression_captures(tmp_path: Path) -> None:
    whole = load_dataset(patients(tmp_path), "all")
    for pattern, groups in (
        (r"p(\d+)_", {f"{i:02}" for i in range(10)}),
        ("^[ab]", {"a", "b"}),
        ("^(?:.*?(p00)|.*)", {"p00"} | {f"{'ab'[p % 2]}/p{p:02}_{i}.png" for p in range(1, 10) for i in range(4)}),
    ):
        found = group_by(whole, pattern).groups
        assert found is not None
        assert set(found) == groups
    with pytest.raises(UserError, match=r"36 of the 40 paths .*a/p02_0.png"):
        group_by(whole, "p00")
    with pytest.raises(UserError, match="not a regular expression"):
        ReadConfig(group_by="(")
    for read in (ReadConfig(label_separator=","), ReadConfig(test_fold=1)):
        for name in (whole.name, "digits"):
            with pytest.raises(UserError, match="not a table"):
                load_dataset(name, "train", read=read)


def test_groups_on_both_sides_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of train and test, and of train and the user's val."""
    patients(tmp_path, ("train", "val", "test"))
    put(tmp_path / "test" / "a" / "p00_9.png")
    put(tmp_path / "val" / "a" / "p03_9.png")
    name, read = f"folder:{tmp_path}", ReadConfig(group_by=r"p\d+")
    train, test = load_dataset(name, "trainval", read=read), load_dataset(name, "test", read=read)
    warn_of_shared_groups(train, test)
    assert "1 groups have images in trainval and in test" in caplog.text
    assert "1 groups have images in train and in val" in caplog.text
    assert train.from_val is not None
    assert set(paths_of(train.take(np.flatnonzero(train.from_val)))) == set(paths_of(load_dataset(name, "val")))
