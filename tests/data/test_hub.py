"""Sets of the Hugging Face hub, as its package stores them."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import encode
from PIL import Image
from shard_files import write_folders

from vitlab.data.decode import ImageError
from vitlab.data.exclude import image_id
from vitlab.data.identity import exact_fingerprint
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError

REASON = "needs the package datasets (the extra data)"


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
    assert len({exact_fingerprint("", first) for first in firsts}) == 3


def test_images_in_folders_and_parquet(hub: Any, tmp_path: Path) -> None:
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
    with pytest.raises(ImageError, match=r"\.jpg"):
        train.image(0)
    features = hub.Features({"image": hub.Image(), "label": hub.ClassLabel(names=["a", "b"])})
    (tmp_path / "parquet" / "data").mkdir(parents=True)
    for split, labels in (("train", [0, 1, 1]), ("validation", [0]), ("test", [1])):
        table = hub.Dataset.from_dict({"image": [png(i) for i in range(len(labels))], "label": labels}, features)
        table.to_parquet(tmp_path / "parquet" / "data" / f"{split}-00000-of-00001.parquet")
    train = load_dataset(f"hub:{tmp_path / 'parquet'}", "train")
    assert (train.classes, train.labels.tolist()) == (("a", "b"), [0, 1, 1])
    assert int(train.image(2)[0, 0, 0]) == 2


@pytest.mark.parametrize(
    ("kind", "splits", "classes"),
    [
        ("int64", {"train": [3, 0], "val": [1], "test": [2]}, "0123"),
        ("string", {"train": ["10", "9", "x2"], "val": ["10"]}, ("9", "10", "x2")),
        ("int64", {"val": [1], "test": [0, 1, 2]}, "012"),
        (None, {"train": [[3, 0], [1], []], "val": [[2, 3]], "test": [[1]]}, "abcd"),
    ],
)
def test_kinds_of_labels(hub: Any, tmp_path: Path, kind: str | None, splits: Any, classes: Any) -> None:
    """Without train the splits share their classes; lists are several labels in every split."""
    feature = hub.Value(kind) if kind else hub.List(hub.ClassLabel(names=list(classes)))
    name = save(hub, tmp_path / "set", splits, feature)
    for split, labels in splits.items():
        data = load_dataset(name, split)
        assert (data.classes, data.multi_label) == (tuple(classes), kind is None)
        found = [data.all_labels.of_image(i).tolist() for i in range(len(data))]
        assert found == [label if kind is None else [classes.index(str(label))] for label in labels]


def test_which_columns(hub: Any, tmp_path: Path) -> None:
    kind = hub.ClassLabel(names=["a", "b", "c"])
    name = save(hub, tmp_path / "two", {"train": [0, 1], "val": [1], "test": [2]}, kind, coarse=kind)
    for query in ("?label=coarse", "?label=coarse&image=img"):
        assert load_dataset(name + query, "train").labels.tolist() == [0, 1]
    for query, message in (
        ("", r"\?label=COLUMN: img \(Image\), label \(Cl"),
        ("?label=fine", "no label in a column 'fine'"),
        ("?label=coarse&image=label", "no image in a column 'label'"),
        ("?lable=coarse", "the nearest: label"),
    ):
        with pytest.raises(UserError, match=message):
            load_dataset(f"{name}{query}", "train")


def test_a_row_without_an_image_can_be_skipped(hub: Any, tmp_path: Path) -> None:
    features = hub.Features({"img": hub.Image(), "label": hub.ClassLabel(names=["a", "b"])})
    columns = {"img": [png(0, 8), None, png(2, 8)], "label": [0, 1, 1]}
    hub.DatasetDict({"train": hub.Dataset.from_dict(columns, features=features)}).save_to_disk(tmp_path / "set")
    train = load_dataset(f"hub:{tmp_path / 'set'}", "all", on_error="skip")
    with pytest.raises(ImageError, match=r"hub:.*train\[1\]: the row holds no image"):
        train.image(1)
    assert [*train.failures] == [1]


def test_sets_that_cannot_be_loaded(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And splits of other names, which are not read."""
    load_dataset(save(hub, tmp_path / "extra", {"train": [0, 1], "spare": [1]}, hub.Value("int64")), "train")
    assert "spare" in caplog.text
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").write_text("raise SystemExit('this must not run')")
    hub.DatasetDict({"all": hub.Dataset.from_dict({"label": [1]})}).save_to_disk(tmp_path / "all")
    hub.Dataset.from_dict({"label": [1]}).save_to_disk(tmp_path / "none")
    made, ab = {}, hub.ClassLabel(names=["a", "b"])
    for split, names in (("train", ["a", "b"]), ("test", ["b", "a"])):
        features = hub.Features({"img": hub.Image(), "label": hub.ClassLabel(names=names)})
        made[split] = hub.Dataset.from_dict({"img": [png(0)], "label": [0]}, features=features)
    hub.DatasetDict(made).save_to_disk(tmp_path / "turned")
    save(hub, tmp_path / "words", {"train": ["b", "a"], "test": ["c"]}, hub.Value("string"))
    save(hub, tmp_path / "secret", {"train": [0, 1], "test": [0, -1]}, ab)
    save(hub, tmp_path / "missing", {"train": [0, 1], "test": [0, None]}, ab)
    save(hub, tmp_path / "unknown", {"train": [[1, 0], []], "test": [[0], None]}, hub.List(ab))
    save(hub, tmp_path / "dev", {"train": [0], "validation": [1], "dev": [0]}, hub.Value("int64"))
    for name, message in (
        ("nobody/nothing", "nobody/nothing: .*log in"),
        ("script", "hub:script"),
        ("all", "train, validation or test"),
        ("none", "0 columns for the image"),
        ("no name", "hub:OWNER/NAME"),
        ("turned", "other names of classes"),
        ("words", "missing in train: .*c"),
        ("secret", "the label -1"),
        ("missing", "no class"),
        ("unknown", "no class"),
        ("dev", "validation and dev"),
    ):
        with pytest.raises(UserError, match=message):
            load_dataset(f"hub:{name}", "test", root=tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="vitlab's extra data"):
        load_dataset("hub:owner/name", "train")
