"""Sets of the Hugging Face hub, as its package stores them."""

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import encode, paths_of
from PIL import Image
from shard_files import write_folders

from vitlab.data.dataset import digest_images
from vitlab.data.decode import ImageError
from vitlab.data.exclude import image_id
from vitlab.data.loader import train_batches
from vitlab.data.registry import load_dataset
from vitlab.data.transforms import TrainTransform
from vitlab.errors import UserError

REASON = "needs the package datasets (pip install 'vitlab[data]')"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The package, without a network and with an empty cache."""
    package = pytest.importorskip("datasets", reason=REASON)
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(package.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    package.disable_progress_bars()
    return package


def png(value: int, side: int = 70) -> dict[str, Any]:
    return {"bytes": encode(Image.new("RGB", (side, side), (value, value, value)), "PNG"), "path": None}


def save(hub: Any, path: Path, splits: dict[str, list[Any]], label: Any, **further: Any) -> str:
    """Split -> labels; image i of a split is gray i, of the second split 100 + i, and so on."""
    made = {}
    for number, (split, labels) in enumerate(splits.items()):
        columns = {"img": [png(100 * number + i) for i in range(len(labels))], "label": labels}
        columns |= dict.fromkeys(further, labels)
        features = hub.Features({"img": hub.Image(), "label": label, **further})
        made[split] = hub.Dataset.from_dict(columns, features=features)
    hub.DatasetDict(made).save_to_disk(path)
    return f"hub:{path}"


def test_a_set_on_disk(hub: Any, tmp_path: Path) -> None:
    splits = {"train": [2, 0, 1, 0], "validation": [1, 1], "test": [0]}
    name = save(hub, tmp_path / "set", splits, hub.ClassLabel(names=["ant", "bee", "cat"]))
    train, val, both = (load_dataset(name, split) for split in ("train", "val", "trainval"))
    assert train.classes == val.classes == ("ant", "bee", "cat")
    assert (train.labels.tolist(), val.labels.tolist()) == ([2, 0, 1, 0], [1, 1])
    assert both.labels.tolist() == [2, 0, 1, 0, 1, 1]
    assert [int(both.image(i)[0, 0, 0]) for i in range(6)] == [0, 1, 2, 3, 100, 101]
    assert train.pixels is None
    assert both.path(5) == f"{name}/validation[1]"
    assert image_id(both, 5) == "validation[1]"
    part = both.take(np.array([5, 2]))
    assert [int(part.image(i)[0, 0, 0]) for i in range(2)] == [101, 2]
    assert load_dataset("hub:set", "test", root=tmp_path).labels.tolist() == [0]
    firsts = [load_dataset(name, split).take(np.array([0])) for split in ("train", "val", "test")]
    assert len({digest_images("", first) for first in firsts}) == 3


def test_training_starts_anywhere(hub: Any, tmp_path: Path) -> None:
    name = save(hub, tmp_path / "set", {"train": [0, 1] * 8, "val": [0], "test": [0]}, hub.ClassLabel(names=["a", "b"]))
    data, transform = load_dataset(name, "train"), TrainTransform(8, crop="inception")
    whole = list(itertools.islice(train_batches(data, transform, batch_size=4, seed=0), 8))
    batches = train_batches(data, transform, batch_size=4, seed=0, first_example=12, workers=1)
    for part, expected in zip(itertools.islice(batches, 5), whole[3:], strict=True):
        np.testing.assert_array_equal(part.indices, expected.indices)
        np.testing.assert_array_equal(part.images, expected.images)


def test_images_in_folders_and_small_ones(hub: Any, tmp_path: Path) -> None:
    """The package stores the paths of files only; small images are decoded into memory, as of every source."""
    write_folders(tmp_path / "set" / "train", {"ant": 4, "bee": 3})
    write_folders(tmp_path / "set" / "test", {"ant": 2, "bee": 1}, side=20)
    train = load_dataset(f"hub:{tmp_path / 'set'}", "train")
    stored = load_dataset(f"folder:{tmp_path / 'set'}", "test")
    assert train.classes == ("ant", "bee")
    assert len(train) == 5  # and one of each class for val
    test = load_dataset(f"hub:{tmp_path / 'set'}", "test")
    for i in range(3):
        np.testing.assert_array_equal(test.image(i), stored.image(i))
    for path in (tmp_path / "set" / "train").rglob("*.jpg"):
        path.unlink()
    with pytest.raises(ValueError, match=r"cannot read the image .*\.jpg: No such file"):
        train.image(0)


def test_parquet(hub: Any, tmp_path: Path) -> None:
    """The format of sets on the hub."""
    features = hub.Features({"image": hub.Image(), "label": hub.ClassLabel(names=["a", "b"])})
    for split, labels in (("train", [0, 1, 1]), ("validation", [0]), ("test", [1])):
        table = hub.Dataset.from_dict({"image": [png(i) for i in range(len(labels))], "label": labels}, features)
        (tmp_path / "set" / "data").mkdir(parents=True, exist_ok=True)
        table.to_parquet(tmp_path / "set" / "data" / f"{split}-00000-of-00001.parquet")
    train = load_dataset(f"hub:{tmp_path / 'set'}", "train")
    assert (train.classes, train.labels.tolist()) == (("a", "b"), [0, 1, 1])
    assert int(train.image(2)[0, 0, 0]) == 2


def test_kinds_of_labels(hub: Any, tmp_path: Path) -> None:
    splits: dict[str, list[Any]] = {"train": [3, 0], "val": [1], "test": [2]}
    numbers = save(hub, tmp_path / "numbers", splits, hub.Value("int64"))
    assert load_dataset(numbers, "val").classes == ("0", "1", "2", "3")
    words = save(hub, tmp_path / "words", {"train": ["b", "a"], "val": ["b"], "test": ["c"]}, hub.Value("string"))
    assert load_dataset(words, "train").labels.tolist() == [1, 0]
    assert load_dataset(words, "val").labels.tolist() == [1]
    with pytest.raises(ValueError, match=r"test has classes that are missing in train: \['c'\]"):
        load_dataset(words, "test")
    counts = save(hub, tmp_path / "counts", {"train": ["10", "9", "x2"], "val": ["10"]}, hub.Value("string"))
    assert load_dataset(counts, "val").classes == ("9", "10", "x2")
    assert load_dataset(counts, "val").labels.tolist() == [1]
    several = {"train": [[3, 0], [1]], "val": [[2, 3]], "test": [[1]]}
    lists = save(hub, tmp_path / "lists", several, hub.List(hub.ClassLabel(names=list("abcd"))))
    train = load_dataset(lists, "train")
    assert train.label_sets is not None
    assert [train.label_sets.of_image(i).tolist() for i in range(2)] == several["train"]
    assert train.classes == tuple("abcd")
    assert load_dataset(lists, "test").multi_label  # as train, though each of its images has one


def test_some_images_of_a_split_have_no_label(hub: Any, tmp_path: Path) -> None:
    """Where images of train have several; but an unknown label is another thing."""
    splits: dict[str, list[Any]] = {"train": [[1, 0], []], "val": [[1], []], "test": [[0], None]}
    name = save(hub, tmp_path / "set", splits, hub.List(hub.ClassLabel(names=["a", "b"])))
    val = load_dataset(name, "val")
    assert val.label_sets is not None
    assert [val.label_sets.of_image(i).tolist() for i in range(2)] == [[1], []]
    with pytest.raises(UserError, match="some images have no class"):
        load_dataset(name, "test")


@pytest.mark.parametrize(("kind", "labels"), [("string", ["a", "b", "c"]), ("int64", [0, 1, 2])])
def test_without_train_the_splits_share_their_classes(hub: Any, tmp_path: Path, kind: str, labels: list[Any]) -> None:
    name = save(hub, tmp_path / "set", {"val": labels[1:2], "test": labels}, hub.Value(kind))
    val, test = (load_dataset(name, split) for split in ("val", "test"))
    assert val.classes == test.classes == tuple(map(str, labels))
    assert (val.labels.tolist(), test.labels.tolist()) == ([1], [0, 1, 2])


def test_splits_of_other_names_of_classes(hub: Any, tmp_path: Path) -> None:
    made = {}
    for split, names in (("train", ["a", "b"]), ("test", ["b", "a"])):
        features = hub.Features({"img": hub.Image(), "label": hub.ClassLabel(names=names)})
        made[split] = hub.Dataset.from_dict({"img": [png(0)], "label": [0]}, features=features)
    hub.DatasetDict(made).save_to_disk(tmp_path / "set")
    with pytest.raises(UserError, match="test has other names of classes in the column label"):
        load_dataset(f"hub:{tmp_path / 'set'}", "test")


def test_tables_of_other_names(hub: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    splits: dict[str, list[Any]] = {"train": [0], "extra": [1], "validation": [1]}
    load_dataset(save(hub, tmp_path / "extra", splits, hub.Value("int64")), "train")
    assert "the splits extra are not read, only train, validation" in caplog.text
    name = save(hub, tmp_path / "dev", splits | {"dev": [0]}, hub.Value("int64"))
    with pytest.raises(UserError, match="has the splits validation and dev, which are both val"):
        load_dataset(name, "train")


def test_names_are_known_before_images_are_read(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = save(hub, tmp_path / "set", {"train": [0, 1], "test": [0]}, hub.Value("int64"))
    data = load_dataset(name, "all")
    monkeypatch.delattr(hub.Dataset, "__getitem__")
    assert paths_of(data) == [f"{name}/train[0]", f"{name}/train[1]", f"{name}/test[0]"]


def test_which_columns(hub: Any, tmp_path: Path) -> None:
    kind = hub.ClassLabel(names=["a", "b", "c"])
    name = save(hub, tmp_path / "two", {"train": [0, 1], "val": [1], "test": [2]}, kind, coarse=kind)
    assert load_dataset(f"{name}?label=coarse", "train").labels.tolist() == [0, 1]
    assert load_dataset(f"{name}?label=coarse&image=img", "train").labels.tolist() == [0, 1]
    for query, message in (
        ("", r"2 columns for the label; choose by .*\?label=COLUMN: img \(Image\), label \(Cl"),
        ("?label=fine", "no label in a column 'fine'.*: img"),
        ("?label=coarse&image=label", "no image in a column 'label'"),
        ("?lable=coarse", "unknown 'lable'; the nearest: label"),
    ):
        with pytest.raises(ValueError, match=message):
            load_dataset(f"{name}{query}", "train")


def test_a_row_without_an_image_can_be_skipped(hub: Any, tmp_path: Path) -> None:
    features = hub.Features({"img": hub.Image(), "label": hub.ClassLabel(names=["a", "b"])})
    columns = {"img": [png(0), None, png(2)], "label": [0, 1, 1]}
    hub.DatasetDict({"train": hub.Dataset.from_dict(columns, features=features)}).save_to_disk(tmp_path / "set")
    train = load_dataset(f"hub:{tmp_path / 'set'}", "all", on_error="skip")
    with pytest.raises(ImageError, match=r"hub:.*train\[1\]: the row holds no image"):
        train.image(1)
    batch = next(train_batches(train, TrainTransform(8), batch_size=3, seed=0, on_error="skip"))
    assert (sorted(batch.indices.tolist()), batch.skipped) == ([0, 2], 1)


@pytest.mark.parametrize(
    ("labels", "message"),
    [([0, -1], "has the label -1 and classes from 0 to 1"), ([0, None], "some images have no class in the column")],
)
def test_labels_that_are_secret_or_missing(hub: Any, tmp_path: Path, labels: list[Any], message: str) -> None:
    name = save(hub, tmp_path / "set", {"train": [0, 1], "val": [0], "test": labels}, hub.ClassLabel(names=["a", "b"]))
    assert len(load_dataset(name, "train")) == 2
    with pytest.raises(ValueError, match=message):
        load_dataset(name, "test")


def test_sets_that_cannot_be_loaded(hub: Any, tmp_path: Path) -> None:
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").write_text("raise SystemExit('this must not run')")
    hub.DatasetDict({"all": hub.Dataset.from_dict({"label": [1]})}).save_to_disk(tmp_path / "all")
    hub.Dataset.from_dict({"label": [1]}).save_to_disk(tmp_path / "none")
    for name, message in (
        ("nobody/nothing", "cannot load hub:nobody/nothing: .*log in"),
        ("script", "cannot load hub:script"),
        ("all", "the splits all; one must be called train, validation or test"),
        ("none", "0 columns for the image"),
        ("no name", "hub:OWNER/NAME or hub:PATH"),
    ):
        with pytest.raises(ValueError, match=message):
            load_dataset(f"hub:{name}", "train", root=tmp_path)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'vitlab\[data\]'"):
        load_dataset("hub:owner/name", "train")
