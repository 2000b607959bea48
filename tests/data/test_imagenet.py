"""Small imitations of the layouts of ImageNet, ReaL, V2 and ObjectNet; results counted by hand."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import link_all, put
from PIL import Image
from torch import nn

from vitlab.data import imagenet
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.imagenet import has_imagenet_classes
from vitlab.data.registry import DATASETS, load_dataset
from vitlab.errors import UserError
from vitlab.evaluation.accuracy import evaluate, evaluate_checkpoint

WNIDS = [f"n{11 * number + 1_440_764:08}" for number in range(1000)]
FEW = WNIDS[:60]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "80x70.jpg"
    put(path, size=(80, 70))
    return path


def label_sets(dataset: Dataset) -> list[list[int]]:
    assert dataset.label_sets is not None
    return [dataset.label_sets.of_image(i).tolist() for i in range(len(dataset))]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if ImageNet had 60 classes."""
    monkeypatch.setattr(imagenet, "CLASSES", len(FEW))
    return tmp_path


@pytest.fixture
def val(root: Path, image: Path) -> Path:
    """A root with val/: the image of class c has the number 1000 - c."""
    names = [f"{wnid}/ILSVRC2012_val_{1000 - c:08}.JPEG" for c, wnid in enumerate(FEW)]
    link_all(root / "val", image, names)
    return root


def test_imagenets_val_is_its_test_split(val: Path) -> None:
    test = load_dataset("imagenet", "test", root=val)
    assert test.classes == tuple(FEW)
    assert test.labels.tolist() == list(range(60))
    assert test.path(7).endswith(f"val/{FEW[7]}/ILSVRC2012_val_00000993.JPEG")
    assert test.image(7).shape == (70, 80, 3)
    with pytest.raises(UserError, match=r"there is no folder .*train"):
        load_dataset("imagenet", "train", root=val)
    (val / "val" / FEW[3]).rename(val / "val" / "tench")
    with pytest.raises(UserError, match="tench"):
        load_dataset("imagenet", "test", root=val)


def test_imagenets_val_is_cut_from_train(root: Path, image: Path) -> None:
    """Below the folders in which Kaggle packs it; three images of each class."""
    link_all(root / "ILSVRC/Data/CLS-LOC/train", image, [f"{w}/{w}_{i}.JPEG" for w in FEW for i in range(3)])
    train, val = (load_dataset("imagenet", split, root=root) for split in ("train", "val"))
    assert (len(train), val.labels.tolist()) == (120, list(range(60)))
    assert not {entry.path for entry in train.entries} & {entry.path for entry in val.entries}


def test_a_part_of_imagenets_val(val: Path, image: Path) -> None:
    """20 of 60 classes; train/ or a list has the numbers of all."""
    for wnid in set(FEW) - set(FEW[1::3]):
        shutil.rmtree(val / "val" / wnid)
    options: dict[str, Any]
    for options, message in (({}, "--partial"), ({"partial": True}, "add LOC_synset_mapping.txt")):
        with pytest.raises(UserError, match=message):
            load_dataset("imagenet", "test", root=val, **options)
    (val / "LOC_synset_mapping.txt").write_text("".join(f"{wnid} thing\n" for wnid in FEW))
    test = load_dataset("imagenet", "test", root=val, partial=True)
    assert (test.classes, test.full_size) == (tuple(FEW), 50_000)
    assert test.labels.tolist() == list(range(1, 60, 3))
    (val / "LOC_synset_mapping.txt").unlink()
    link_all(val / "train", image, [f"{wnid}/1.JPEG" for wnid in FEW])
    assert load_dataset("imagenet", "test", root=val, partial=True).labels.tolist() == test.labels.tolist()


REAL = [[3], [], [5, 2], [0], [], [999, 1, 7]]


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six val images, the number in their gray, two of them without a label; two in folders, as some have them."""
    monkeypatch.setattr(imagenet, "VAL_IMAGES", 6)
    for number in range(1, 7):
        folder = "n01440764/" if number in (2, 3) else ""
        put(tmp_path / "val" / f"{folder}ILSVRC2012_val_{number:08}.JPEG", 40 * number, (80, 70))
    put(tmp_path / "val" / "notes.JPEG")
    (tmp_path / "real.json").write_text(json.dumps(REAL))
    return tmp_path


def test_real_labels(real: Path) -> None:
    test = load_dataset("imagenet_real", "test", root=real)
    assert (test.left_out, len(test.classes), test.multi_label) == (2, 1000, False)
    assert label_sets(test) == [[3], [5, 2], [0], [999, 1, 7]]
    assert test.labels.tolist() == [3, 5, 0, 999]
    assert [round(int(test.image(i)[0, 0, 0]) / 40) for i in range(4)] == [1, 3, 4, 6]
    part = load_dataset("imagenet_real", "test", root=real, classes=(7, 2))  # of any of their labels
    assert (part.classes, part.labels.tolist(), label_sets(part)) == (("7", "2"), [1, 0], [[1], [0]])
    for split in ("train", "val", "trainval"):
        with pytest.raises(UserError, match="one of test, all"):
            load_dataset("imagenet_real", split, root=real)


def test_a_part_of_real(real: Path) -> None:
    """Images 1, 2 (without a label) and 4 are there; four of the six have labels."""
    for name in ("n01440764/ILSVRC2012_val_00000003", "ILSVRC2012_val_00000005", "ILSVRC2012_val_00000006"):
        (real / "val" / f"{name}.JPEG").unlink()
    with pytest.raises(UserError, match=r"first ILSVRC2012_val_00000003.JPEG.*--partial"):
        load_dataset("imagenet_real", "test", root=real)
    test = load_dataset("imagenet_real", "test", root=real, partial=True)
    assert (len(test), test.left_out, test.full_size, test.labels.tolist()) == (2, 1, 4, [3, 0])
    record = evaluate(nn.Sequential(nn.Flatten(), nn.Linear(192, 1000)), test, (8, 8)).record()
    assert (record["full_size"], record["left_out"]) == (4, 1)


def test_invalid_real_labels(real: Path) -> None:
    for content in ({"1": [1]}, [[1], [2]], [*REAL[:5], [1000]], [*REAL[:5], 7]):
        (real / "real.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=r"real\.json"):
            load_dataset("imagenet_real", "test", root=real)


def test_v2_folders_are_numbers(tmp_path: Path, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 comes after 9; as if ImageNet had 30 classes."""
    monkeypatch.setattr(imagenet, "NUMBERS", imagenet.NUMBERS[:30])
    folder = tmp_path / "imagenetv2-threshold0.7-format-val"
    link_all(folder, image, [f"{c}/a.jpeg" for c in range(30)])
    test = load_dataset("imagenet_v2_threshold", "test", root=tmp_path)
    assert test.labels.tolist() == [int(Path(entry.file).parent.name) for entry in test.entries] == list(range(30))
    with pytest.raises(UserError, match="not imagenet_v2_top but imagenet_v2_threshold"):
        load_dataset("imagenet_v2_top", "test", root=folder)
    (folder / "17").rename(folder / "n01440764")
    with pytest.raises(UserError, match="17, n01440764"):
        load_dataset("imagenet_v2_threshold", "test", root=tmp_path)


@pytest.fixture
def objectnet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """31 classes, of which the first 11 are ImageNet's; the class c of ImageNet is in line 999 - c.

    "Alarm clock" is two of ImageNet's classes; three images of it, one of each other class. An image is gray, in a
    red border of 2 pixels.
    """
    monkeypatch.setattr(imagenet, "SHARED_CLASSES", 11)
    home = tmp_path / "objectnet-1.0"
    (home / "mappings").mkdir(parents=True)
    folders = ["alarm_clock", *(f"object_{i:03}" for i in range(1, 31))]
    labels = {folder: folder.replace("_", " ").capitalize() for folder in folders}
    names = [f"thing {999 - line}, Res {999 - line}" for line in range(1000)]
    shared = {labels[folder]: f"thing {2 * i}, Res {2 * i}" for i, folder in enumerate(folders[:11])}
    shared["Alarm clock"] = "thing 409, Res 409; thing 530, Res 530"
    (home / "mappings" / "folder_to_objectnet_label.json").write_text(json.dumps(labels))
    (home / "mappings" / "objectnet_to_imagenet_1k.json").write_text(json.dumps(shared))
    lines = {str(c): 999 - c for c in range(1000)}
    (home / "mappings" / "pytorch_to_imagenet_2012_id.json").write_text(json.dumps(lines))
    (home / "mappings" / "imagenet_to_label_2012_v2").write_text("\n".join(names) + "\n")
    for number, folder in enumerate(folders):
        for count in range(3 if folder == "alarm_clock" else 1):
            bordered = Image.new("RGB", (84, 74), (255, 0, 0))
            bordered.paste((number, number, number), (2, 2, 82, 72))
            (home / "images" / folder).mkdir(parents=True, exist_ok=True)
            bordered.save(home / "images" / folder / f"{count}.png")
    return home


def test_objectnets_shared_classes(objectnet: Path) -> None:
    test = load_dataset("objectnet", "test", root=objectnet.parent)
    assert (test.left_out, len(test.classes), test.multi_label) == (20, 1000, False)
    assert label_sets(test) == [[409, 530]] * 3 + [[2 * i] for i in range(1, 11)]
    for index, gray in ((0, 0), (3, 1), (12, 10)):
        np.testing.assert_array_equal(test.image(index), np.full((70, 80, 3), gray, np.uint8))
    put(objectnet / "images" / "alarm_clock" / "1.png", 5, (4, 90))
    with pytest.raises(ImageError, match=r"1.png: 4 x 90 pixels"):
        test.image(1)


def test_objectnets_resize(objectnet: Path, tmp_path: Path) -> None:
    """512 to 480 where the model's images are 15 pixels is 16 to 15."""
    from vitlab.evaluation.options import EvalOptions
    from vitlab.models import ViTConfig
    from vitlab.models.vit import ViT
    from vitlab.preprocessing import Preprocessing
    from vitlab.weights import save_model

    model = ViT(ViTConfig(image_size=15, patch_size=5, width=8, depth=1, heads=2, mlp_dim=8, num_classes=1000))
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight)
    metadata = {"preprocessing": Preprocessing.google(15, 20).to_metadata(), "dataset": "imagenet", "classes": WNIDS}
    save_model(model, tmp_path / "model", extra=metadata)
    result = evaluate_checkpoint(
        tmp_path / "model", "objectnet", options=EvalOptions(device="cpu"), root=str(objectnet)
    )
    prepared = Preprocessing.google(15, 16)
    same = evaluate(model, load_dataset("objectnet", "test", root=objectnet), (15, 15), preprocessing=prepared)
    np.testing.assert_array_equal(result.losses, same.losses)


def change(name: str, edit: Callable[[Any], Any]) -> Callable[[Path], object]:
    def apply(home: Path) -> None:
        path = home / "mappings" / name
        path.write_text(json.dumps(edit(json.loads(path.read_text()))))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "mappings" / "imagenet_to_label_2012_v2").unlink(), "does not map"),
        (change("pytorch_to_imagenet_2012_id.json", lambda d: {**d, "3": 0}), "does not map"),
        (change("folder_to_objectnet_label.json", list), "must be a JSON dict"),
        (change("objectnet_to_imagenet_1k.json", lambda d: {**d, "Object 001": "thing 2; nothing"}), "does not map"),
        (lambda p: shutil.rmtree(p / "images" / "object_009"), "object_009"),
        (lambda p: shutil.rmtree(p / "images"), "there is no folder .*images"),
        (lambda p: shutil.rmtree(p), "objectnet.dev"),
    ],
)
def test_incomplete_objectnet(damage: Callable[[Path], object], message: str, objectnet: Path) -> None:
    damage(objectnet)
    with pytest.raises(UserError, match=message):
        load_dataset("objectnet", "test", root=objectnet)


@pytest.mark.parametrize("name", [name for name in DATASETS if has_imagenet_classes(name)])
def test_errors_name_source_and_license(name: str, tmp_path: Path) -> None:
    for root in (None, tmp_path):
        with pytest.raises(UserError, match=name) as raised:
            load_dataset(name, "test", root=root)
        assert f"{DATASETS[name].source} (license: {DATASETS[name].license})" in str(raised.value)
