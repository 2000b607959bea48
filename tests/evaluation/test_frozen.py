"""Features of checkpoints: their splits and preprocessing, and the files that other tools read."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from image_files import put
from PIL import Image

from vitlab.data.dataset import Dataset, Labels
from vitlab.errors import UserError
from vitlab.evaluation.frozen import check_train_and_test, frozen_preprocessing, load_train_and_test, write_features
from vitlab.evaluation.options import EvalOptions, SplitOptions
from vitlab.models import ViTConfig
from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing
from vitlab.weights import save_model

TINY = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, num_classes=3, representation_size=6)


@pytest.fixture
def model() -> ViT:
    model = ViT(TINY, generator=torch.Generator().manual_seed(1)).eval()
    assert model.pre_logits is not None
    torch.nn.init.normal_(model.pre_logits.weight, generator=torch.Generator().manual_seed(2))
    return model


@pytest.fixture
def pixels() -> Dataset:
    images = np.random.default_rng(1).integers(0, 256, (11, 8, 8, 3), np.uint8)
    return Dataset("made", "test", ("a", "b", "c"), np.arange(11, dtype=np.int64) % 3, images)


def test_splits_that_make_no_classifier(pixels: Dataset, tmp_path: Path) -> None:
    check_train_and_test(pixels, pixels)
    several = dataclasses.replace(pixels, label_sets=Labels(pixels.labels, np.arange(12)))
    for test, message in (
        (dataclasses.replace(pixels, classes=("a", "b", "d")), "other classes"),
        (several, "several labels"),
        (pixels.take(np.arange(0)), "no images"),
    ):
        with pytest.raises(UserError, match=message):
            check_train_and_test(pixels, test)
    for i in range(40):
        put(tmp_path / "ab"[i % 2] / f"{i}.png", i)
    name = f"folder:{tmp_path}"  # whose val is held out of train, if it is the test
    options: Any
    for dataset, options, expected in (
        ("digit", {}, "unknown data set 'digit'"),
        ("digits", {"train_split": "trainval", "test_split": "val"}, "also in the training split"),
        ("digits", {"train_split": "val"}, ("val", "test", 179)),
        (name, {"test_split": "test"}, ("trainval", "test", 36)),
        (name, {"test_split": "val"}, ("train", "val", 32)),
        *((name, {"test_split": split}, "also in the training split") for split in ("train", "trainval")),
    ):
        if isinstance(expected, str):
            with pytest.raises(UserError, match=expected):
                load_train_and_test(dataset, SplitOptions(**options), "raise")
        else:
            train, test = load_train_and_test(dataset, SplitOptions(**options), "raise")
            assert (train.split, test.split, len(train)) == expected


def test_preprocessing_of_frozen_models() -> None:
    """Google's few-shot evaluation resizes to 256 / 224 of the image size; other checkpoints bring their own."""
    google = Preprocessing((224, 224), 256, keep_aspect=False, antialias=False, crop_offset="floor")
    assert frozen_preprocessing(Preprocessing.google(), (224, 224)) == google
    assert frozen_preprocessing(Preprocessing.google(384, 400), (384, 384)).resize == 439
    assert frozen_preprocessing(Preprocessing.google(), (224, 160)).resize == 256
    bicubic = Preprocessing(224, 256, interpolation="bicubic")
    assert frozen_preprocessing(bicubic, (224, 224)) == bicubic.at((224, 224))


def test_features_are_written_with_paths_and_labels(model: ViT, tmp_path: Path) -> None:
    """Both kinds of file hold what a plain forward pass computes; an unreadable image is skipped and counted."""
    save_model(model, tmp_path / "model")
    for number in range(6):
        path = tmp_path / "pets" / "cd"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(path)
    (tmp_path / "pets" / "c" / "2.png").write_bytes(b"not an image")
    (tmp_path / "pets" / "c" / "4.png").rename(tmp_path / "pets" / "c" / "4\udcff.png")  # a name that is not UTF-8
    options = EvalOptions(device="cpu", on_error="skip")
    write = functools.partial(
        write_features, tmp_path / "model", f"folder:{tmp_path / 'pets'}", options=options, cache=tmp_path / "cache"
    )
    result = write(tmp_path / "pets.npz")
    assert (result["images"], result["skipped"], result["dimensions"]) == (5, 1, 6)
    with np.load(tmp_path / "pets.npz") as file:
        arrays = dict(file)
    names = [Path(path).relative_to(tmp_path / "pets").as_posix() for path in arrays["files"]]
    assert sorted(names) == ["c/0.png", "c/4\udcff.png", "d/1.png", "d/3.png", "d/5.png"]
    assert arrays["classes"][arrays["labels"]].tolist() == [name[0] for name in names]
    images = torch.stack([torch.from_numpy(np.array(Image.open(path))) for path in arrays["files"]])
    with torch.inference_mode():
        inputs = images.permute(0, 3, 1, 2) / 127.5 - 1
        expected = model.forward_head(model.forward_features(inputs), pre_logits=True)
    np.testing.assert_allclose(arrays["features"], expected, atol=1e-5)
    write(tmp_path / "pets.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "pets.parquet").to_pydict()
    escaped = [path.replace("\udcff", r"\udcff") for path in arrays["files"].tolist()]
    assert (table["file"], table["label"]) == (escaped, [name[0] for name in names])
    np.testing.assert_array_equal(np.array(table["features"], np.float32), arrays["features"])
    with pytest.raises(UserError, match=r"give a file that ends in \.npz or \.parquet"):
        write(tmp_path / "pets.csv")


def test_features_are_written_with_several_labels(model: ViT, tmp_path: Path) -> None:
    labels = {"1.png": "b|a", "2.png": "", "3.png": "a", "0.png": "c"}
    rows = "".join(f"{name},{several}\n" for name, several in labels.items())
    (tmp_path / "labels.csv").write_text("file,label\n" + rows)
    for name in labels:
        put(tmp_path / name, 9)
    save_model(model, tmp_path / "model", extra={})
    for suffix in ("npz", "parquet"):
        write_features(tmp_path / "model", f"csv:{tmp_path / 'labels.csv'}", tmp_path / f"out.{suffix}")
    with np.load(tmp_path / "out.npz") as arrays:
        names = [Path(path).name for path in arrays["files"].tolist()]
        written = ["|".join(arrays["classes"][row].tolist()) for row in arrays["labels"]]
    assert dict(zip(names, written, strict=True)) == labels | {"1.png": "a|b"}
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert {Path(path).name: label for path, label in zip(table["file"], table["label"], strict=True)} == labels
