"""Data sets by name, splits cut from train, and the messages for names that are not there."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import pixels_of

from vitlab.data import registry
from vitlab.data.registry import DATASETS, SPLITS, check_source, load_dataset, require_disjoint
from vitlab.errors import UserError


def test_the_table_is_complete() -> None:
    for name, info in DATASETS.items():
        assert info.source
        assert info.license
        assert (":" in name) == (info.num_classes is None) == (not info.reader)
        module, _, function = info.reader.partition(":")
        assert not info.reader or callable(getattr(importlib.import_module(f"vitlab.data.{module}"), function))
        assert info.splits or name in ("folder:PATH", "csv:PATH", "shards:PATH", "hub:OWNER/NAME")
    sizes = {name: info.num_classes for name, info in DATASETS.items()}
    assert sizes["digits"] == sizes["svhn"] == 10
    assert (sizes["cifar100"], sizes["flowers102"], sizes["pets"], sizes["sun397"]) == (100, 102, 37, 397)


def test_digits() -> None:
    info, parts = DATASETS["digits"], {split: load_dataset("digits", split) for split in SPLITS}
    assert {split: len(parts[split]) for split in ("train", "val", "test")} == info.splits
    assert len(parts["trainval"]) == info.splits["train"] + info.splits["val"]
    assert len(parts["all"]) == sum(info.splits.values())
    for data in parts.values():
        assert (len(data.classes), pixels_of(data).shape[1:]) == (info.num_classes, (8, 8, 3))
        assert np.bincount(data.labels, minlength=10).min() >= len(data) / 10 * 0.9  # stratified
        assert data.path(3).startswith("digits/test[" if data.split == "test" else "digits/train[")
    images = np.concatenate([pixels_of(parts[split]) for split in ("train", "val", "test")]).reshape(1797, -1)
    assert len(np.unique(images, axis=0)) == 1797  # no image in two splits
    for split, is_fixed in (("test", True), ("val", False)):
        other = load_dataset("digits", split, seed=1)
        assert np.array_equal(pixels_of(parts[split]), pixels_of(other)) == is_fixed
    whole, part = parts["test"], load_dataset("digits", "test", classes=(7, 2))
    assert part.classes == ("7", "2")
    for new, old in enumerate((7, 2)):
        np.testing.assert_array_equal(pixels_of(part)[part.labels == new], pixels_of(whole)[whole.labels == old])


@pytest.mark.parametrize(
    ("name", "split", "options", "message"),
    [
        ("digits", "test", {"classes": ()}, "numbers from 0 to 9"),
        ("digits", "test", {"partial": True}, "imagenet and imagenet_real, not with digits"),
        ("digits", "validation", {}, "not 'validation'"),
        ("digits", "train", {"on_error": "warn"}, "not 'warn'"),
        ("cifar", "train", {}, "'cifar'; the nearest: cifar10, cifar100"),
        ("hub:x", "train", {}, "hub:OWNER/NAME"),
    ],
)
def test_invalid_requests(name: str, split: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_dataset(name, split, **options)


def test_splits_that_share_images() -> None:
    train, test, both = (load_dataset("digits", split) for split in ("train", "test", "trainval"))
    require_disjoint(train, test)
    with pytest.raises(UserError, match=r"1259 of the 1259 test images of digits .* \(trainval and train\)"):
        require_disjoint(both, train)


def test_a_source_is_checked_without_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "folder_splits", None)
    monkeypatch.setattr(registry, "digits_splits", None)
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    for name in ("digits", "folder:there", "csv:file", "shards:https://host/set", "hub:owner/name", "vtab:svhn"):
        check_source(name, tmp_path)
    for name, message in (
        ("kinetics", "'kinetics'; .*`vitlab list datasets`"),
        ("folder:away", "away does not exist"),
        ("folder:file", "file is a file .* csv:PATH"),
        ("csv:there", "there is a folder"),
        ("there", "folder:there"),
        ("file", "csv:file"),
        ("folder:", "'folder:'; the nearest: folder:PATH"),
    ):
        with pytest.raises(UserError, match=message):
            check_source(name, tmp_path)
