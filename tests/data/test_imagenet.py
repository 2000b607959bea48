"""Small imitations of the layouts in which ImageNet, ReaL, V2 and ObjectNet are kept; answers counted by hand."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from vitlab.data import imagenet
from vitlab.data.decode import ImageError
from vitlab.data.imagenet import ORIGINS, answers_imagenet, objectnet_classes
from vitlab.data.registry import DATASETS, load_dataset

WNIDS = [f"n{11 * number + 1_440_764:08}" for number in range(1000)]
FREE_SPLITS = ("train", "val", "trainval")


def put(path: Path, value: int = 0, size: tuple[int, int] = (80, 70)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(path)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "80x70.jpg"
    put(path)
    return path


def fill(folder: Path, image: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).hardlink_to(image)


# ------------------------------------------------------------------------------------------------ ImageNet


@pytest.fixture
def val(tmp_path: Path, image: Path) -> Path:
    """A root with val/: the image of class c has the number 1000 - c."""
    names = [f"{wnid}/ILSVRC2012_val_{1000 - c:08}.JPEG" for c, wnid in enumerate(WNIDS)]
    fill(tmp_path / "val", image, names)
    return tmp_path


def test_imagenets_val_is_its_test_split(val: Path) -> None:
    test = load_dataset("imagenet", "test", root=val)
    assert test.classes == tuple(WNIDS)
    assert test.labels.tolist() == list(range(1000))
    assert test.path(7).endswith(f"val/{WNIDS[7]}/ILSVRC2012_val_00000993.JPEG")
    assert test.image(7).shape == (70, 80, 3)
    with pytest.raises(ValueError, match=r"there is no folder .*train: unpack the whole set"):
        load_dataset("imagenet", "train", root=val)


def test_imagenets_held_out_part_comes_from_train(tmp_path: Path, image: Path) -> None:
    """Below the folders in which Kaggle packs it; three images of each class."""
    fill(tmp_path / "ILSVRC/Data/CLS-LOC/train", image, [f"{w}/{w}_{i}.JPEG" for w in WNIDS for i in range(3)])
    train, held = (load_dataset("imagenet", split, root=tmp_path) for split in ("train", "val"))
    assert (len(train), len(held)) == (2000, 1000)
    assert held.labels.tolist() == list(range(1000))
    assert not {entry.path for entry in train.entries} & {entry.path for entry in held.entries}


@pytest.mark.parametrize("order", ["LOC_synset_mapping.txt", "synset_words.txt"])
def test_folders_with_names_are_put_in_order_by_a_list(order: str, tmp_path: Path, image: Path) -> None:
    """By their whole line of names or the first of them; names in the alphabet's order would be reversed."""
    lines = [f"{wnid} thing {999 - c:03}, Res {c}" for c, wnid in enumerate(WNIDS)]
    folders = [line.partition(" ")[2] if c % 2 else f"thing {999 - c:03}" for c, line in enumerate(lines)]
    fill(tmp_path / "val", image, [f"{folder}/1.JPEG" for folder in folders])
    with pytest.raises(ValueError, match=r"names do not give the order of .* add LOC_synset_mapping.txt"):
        load_dataset("imagenet", "test", root=tmp_path)
    (tmp_path / order).write_text("\n".join(lines) + "\n")
    test = load_dataset("imagenet", "test", root=tmp_path)
    assert test.classes == tuple(WNIDS)
    assert [Path(entry.file).parent.name for entry in test.entries] == folders
    (tmp_path / order).write_text("\n".join([*lines[:-1], f"{WNIDS[-1]} thing 998, Res 999"]))
    with pytest.raises(ValueError, match=r"class folder 'thing 000, Res 999' is \(1 such"):
        load_dataset("imagenet", "test", root=tmp_path)
    (tmp_path / order).write_text("\n".join([*lines[:-2], f"{WNIDS[-2]} thing 999, B", f"{WNIDS[-1]} thing 000, C"]))
    with pytest.raises(ValueError, match="does not say which WordNet id"):  # and "thing 999" is two classes
        load_dataset("imagenet", "test", root=tmp_path)


def test_part_of_imagenet_is_refused(val: Path) -> None:
    shutil.rmtree(val / "val" / WNIDS[0])
    message = r"has 999 class folders.* --partial .* folder:PATH .* comes from image-net.org"
    with pytest.raises(ValueError, match=message):
        load_dataset("imagenet", "test", root=val)


def test_part_of_imagenets_val(val: Path, image: Path, caplog: pytest.LogCaptureFixture) -> None:
    """300 of 1,000 classes, whose numbers train/ or a list of names tells."""
    there = WNIDS[1::3][:300]
    for wnid in set(WNIDS) - set(there):
        shutil.rmtree(val / "val" / wnid)
    with pytest.raises(ValueError, match=r"1,000 outputs .* is unknown: add LOC_synset_mapping.txt"):
        load_dataset("imagenet", "test", root=val, partial=True)
    (val / "LOC_synset_mapping.txt").write_text("".join(f"{wnid} thing\n" for wnid in WNIDS))
    test = load_dataset("imagenet", "test", root=val, partial=True)
    assert test.classes == tuple(WNIDS)
    assert test.labels.tolist() == list(range(1, 900, 3))
    assert test.full_size == 50_000
    assert "imagenet: 300 of its 50,000 test images are there" in caplog.text
    (val / "LOC_synset_mapping.txt").unlink()
    fill(val / "train", image, [f"{wnid}/1.JPEG" for wnid in WNIDS])
    assert load_dataset("imagenet", "test", root=val, partial=True).labels.tolist() == test.labels.tolist()
    with pytest.raises(ValueError, match=r"has 300 class folders"):
        load_dataset("imagenet", "test", root=val)


def test_flat_val(tmp_path: Path) -> None:
    put(tmp_path / "val" / "ILSVRC2012_val_00000001.jpeg")
    with pytest.raises(ValueError, match="has 0 class folders, named by WordNet id"):
        load_dataset("imagenet", "test", root=tmp_path)


# ---------------------------------------------------------------------------------------------------- ReaL

ANSWERS = [[3], [], [5, 2], [0], [], [999, 1, 7]]


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six val images, the number in their gray, two of them without a label; two in folders, as some keep them."""
    monkeypatch.setattr(imagenet, "VAL_IMAGES", 6)
    for number in range(1, 7):
        folder = "n01440764/" if number in (2, 3) else ""
        put(tmp_path / "val" / f"{folder}ILSVRC2012_val_{number:08}.JPEG", 40 * number)
    put(tmp_path / "val" / "notes.JPEG")
    (tmp_path / "real.json").write_text(json.dumps(ANSWERS))
    return tmp_path


def test_real_labels(real: Path) -> None:
    test = load_dataset("imagenet_real", "test", root=real)
    assert (len(test), test.left_out, len(test.classes)) == (4, 2, 1000)
    assert test.label_sets is not None
    assert [test.label_sets.of(i).tolist() for i in range(4)] == [[3], [5, 2], [0], [999, 1, 7]]
    assert test.labels.tolist() == [3, 5, 0, 999]
    assert [round(int(test.image(i)[0, 0, 0]) / 40) for i in range(4)] == [1, 3, 4, 6]


def test_real_accuracy_by_hand(real: Path) -> None:
    """Said: 3 (right), 2 (right, the second label), 4 (wrong), 7 (right, the third): three of the four that count."""
    from vitlab.evaluate.accuracy import evaluate

    class Says(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            numbers = ((images[:, 0, 0, 0] + 1) * 127.5 / 40).round().long()
            return torch.eye(1000)[torch.tensor([0, 3, 0, 2, 4, 0, 7])[numbers]]

    found = evaluate(Says(), load_dataset("imagenet_real", "test", root=real), (8, 8))
    assert found.right.tolist() == [True, True, False, True]
    assert found.figures()["accuracy"] == 0.75
    assert (found.record()["images"], found.record()["left_out"]) == (4, 2)


def test_part_of_real(real: Path) -> None:
    """Images 1, 2 (without a label) and 4 are there; four of the six have labels."""
    from vitlab.evaluate.accuracy import evaluate

    for number in (3, 5, 6):
        (real / "val" / f"{'n01440764/' if number == 3 else ''}ILSVRC2012_val_{number:08}.JPEG").unlink()
    with pytest.raises(ValueError, match=r"lacks 3 of 6 images.*Give --partial"):
        load_dataset("imagenet_real", "test", root=real)
    test = load_dataset("imagenet_real", "test", root=real, partial=True)
    assert (len(test), test.left_out, test.full_size, test.labels.tolist()) == (2, 1, 4, [3, 0])

    class Says(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return torch.eye(1000)[torch.full((len(images),), 3)]

    found = evaluate(Says(), test, (8, 8))
    assert (found.record()["images"], found.record()["full_size"], found.accuracy) == (2, 4, 0.5)
    assert "2 of 4 images" in found.as_table().splitlines()[-1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "real.json").write_text("[[1]"), r"real.json is not valid JSON"),
        (lambda p: (p / "real.json").write_text("[" * 100_000), r"real.json is JSON nested"),
        (lambda p: (p / "real.json").write_text('{"1": [1]}'), r"real.json must be a JSON list"),
        (lambda p: (p / "real.json").write_text("[[1], [2]]"), r"must hold 6 lists of class numbers \(0 to 999\)"),
        (lambda p: (p / "real.json").write_text(json.dumps([*ANSWERS[:5], [1000]])), "must hold 6 lists"),
        (lambda p: (p / "real.json").write_text(json.dumps([*ANSWERS[:5], 7])), "must hold 6 lists"),
        (
            lambda p: (p / "real.json").unlink(),
            r"imagenet_real needs real.json and val; looked in .*reassessed-imagenet",
        ),
        (
            lambda p: (p / "val" / "n01440764" / "ILSVRC2012_val_00000003.JPEG").unlink(),
            r"lacks 1 of 6 images, first ILSVRC2012_val_00000003.JPEG: the labels go by these names",
        ),
    ],
)
def test_incomplete_real(damage: Callable[[Path], object], message: str, real: Path) -> None:
    damage(real)
    with pytest.raises(ValueError, match=message):
        load_dataset("imagenet_real", "test", root=real)


# ------------------------------------------------------------------------------------------------------ V2


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("imagenet_v2", "imagenetv2-matched-frequency-format-val"),
        ("imagenet_v2_threshold", "imagenetv2-threshold0.7-format-val"),
        ("imagenet_v2_top", "imagenetv2-top-images-format-val"),
    ],
)
def test_v2_folders_are_numbers_not_words(name: str, folder: str, tmp_path: Path, image: Path) -> None:
    fill(tmp_path / folder, image, [f"{c}/a.jpeg" for c in range(1000)])
    test = load_dataset(name, "test", root=tmp_path)
    assert test.labels.tolist() == list(range(1000))
    assert [int(Path(entry.file).parent.name) for entry in test.entries] == list(range(1000))
    assert load_dataset(name, "test", root=tmp_path / folder).entries == test.entries
    other = next(other for other in ("imagenet_v2", "imagenet_v2_top") if other != name)
    with pytest.raises(ValueError, match=f"{folder} is not {other} but {name}"):
        load_dataset(other, "test", root=tmp_path / folder)
    (tmp_path / folder / "17").rename(tmp_path / folder / "n01440764")
    with pytest.raises(ValueError, match=r"must have the folders 0 to 999 and no others; wrong: 17, n01440764"):
        load_dataset(name, "test", root=tmp_path)


# ----------------------------------------------------------------------------------------------- ObjectNet


@pytest.fixture
def objectnet(tmp_path: Path) -> Path:
    """313 classes, of which the first 113 are ImageNet's; the class c of ImageNet stands in line 999 - c.

    "Alarm clock" is two of ImageNet's classes; three images of it, one of each other class. An image is gray, in a
    red border of 2 pixels.
    """
    home = tmp_path / "objectnet-1.0"
    (home / "mappings").mkdir(parents=True)
    folders = ["alarm_clock", *(f"object_{i:03}" for i in range(1, 313))]
    labels = {folder: folder.replace("_", " ").capitalize() for folder in folders}
    names = [f"thing {999 - line}, Res {999 - line}" for line in range(1000)]
    shared = {labels[folder]: f"thing {2 * i}, Res {2 * i}" for i, folder in enumerate(folders[:113])}
    shared["Alarm clock"] = "thing 409, Res 409; thing 530, Res 530"
    write = {
        "folder_to_objectnet_label.json": json.dumps(labels),
        "objectnet_to_imagenet_1k.json": json.dumps(shared),
        "pytorch_to_imagenet_2012_id.json": json.dumps({str(c): 999 - c for c in range(1000)}),
        "imagenet_to_label_2012_v2": "\n".join(names) + "\n",
    }
    for name, text in write.items():
        (home / "mappings" / name).write_text(text)
    for number, folder in enumerate(folders):
        for count in range(3 if folder == "alarm_clock" else 1):
            bordered = Image.new("RGB", (84, 74), (255, 0, 0))
            bordered.paste((number, number, number), (2, 2, 82, 72))
            (home / "images" / folder).mkdir(parents=True, exist_ok=True)
            bordered.save(home / "images" / folder / f"{count}.png")
    return home


def test_objectnets_map_is_read_from_its_own_files(objectnet: Path) -> None:
    classes = objectnet_classes(objectnet / "mappings")
    assert len(classes) == 113
    assert classes["alarm_clock"] == [409, 530]
    assert classes["object_112"] == [224]
    assert "object_113" not in classes


@pytest.mark.parametrize("below", [True, False])
def test_objectnets_shared_classes(below: bool, objectnet: Path) -> None:
    test = load_dataset("objectnet", "test", root=objectnet.parent if below else objectnet)
    assert (len(test), test.left_out, len(test.classes)) == (115, 200, 1000)
    assert test.label_sets is not None
    assert [test.label_sets.of(i).tolist() for i in (0, 1, 2, 3, 114)] == [[409, 530]] * 3 + [[2], [224]]
    for index, gray in ((0, 0), (3, 1), (114, 112)):
        np.testing.assert_array_equal(test.image(index), np.full((70, 80, 3), gray, np.uint8))


def test_objectnet_accuracy_by_hand(objectnet: Path) -> None:
    """Said: 530 of the three alarm clocks, which is right; 224 of almost everything else, which is wrong, but for the
    objects 1 to 10 the right class comes second: 3 of 115 right, 13 among the first five."""
    from vitlab.evaluate.accuracy import evaluate

    class Says(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            number = ((images[:, 0, 4, 4] + 1) * 127.5).round().long()
            logits = torch.zeros(len(images), 1000)
            logits[torch.arange(len(images)), torch.where(number == 0, 530, 224)] = 3
            logits[:, 990:993] = 2
            logits[torch.arange(len(images)), torch.where(number == 0, 530, 2 * number)] += torch.where(
                number < 11, 2.5, -5
            )
            return logits

    found = evaluate(Says(), load_dataset("objectnet", "test", root=objectnet), (8, 8))
    assert found.right.sum() == 3  # object 112 is taken for nothing: its class has been pushed down
    assert found.in_top5.sum() == 13
    assert found.accuracy == 3 / 115
    assert found.figures()["top5"] == pytest.approx(13 / 115)


def test_objectnets_own_resize(objectnet: Path, tmp_path: Path) -> None:
    """512 to 480 where the model's images are 15 pixels is 16 to 15."""
    from vitlab.evaluate.accuracy import evaluate, evaluate_checkpoint
    from vitlab.evaluate.options import EvalOptions
    from vitlab.models import ViTConfig
    from vitlab.models.vit import ViT
    from vitlab.preprocessing import Preprocessing
    from vitlab.weights import save_model

    model = ViT(ViTConfig(image_size=15, patch_size=5, width=8, depth=1, heads=2, mlp_dim=8, num_classes=1000))
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight)
    save_model(model, tmp_path / "model", extra={"eval_resize": 20, "dataset": "imagenet", "classes": WNIDS})
    found = evaluate_checkpoint(tmp_path / "model", "objectnet", options=EvalOptions(device="cpu"), root=str(objectnet))
    prepared = Preprocessing.google(15, 16)
    same = evaluate(model, load_dataset("objectnet", "test", root=objectnet), (15, 15), preprocessing=prepared)
    np.testing.assert_array_equal(found.losses, same.losses)
    assert found.record()["left_out"] == 200


def test_image_that_is_all_border(objectnet: Path) -> None:
    put(objectnet / "images" / "alarm_clock" / "1.png", 5, (4, 90))
    test = load_dataset("objectnet", "test", root=objectnet)
    with pytest.raises(ImageError, match=r"1.png: 4 x 90 pixels are nothing but border"):
        test.image(1)


def change(name: str, edit: Callable[[Any], Any]) -> Callable[[Path], object]:
    def apply(home: Path) -> None:
        path = home / "mappings" / name
        path.write_text(json.dumps(edit(json.loads(path.read_text()))))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "mappings" / "imagenet_to_label_2012_v2").unlink(), "does not name 1,000 classes"),
        (lambda p: (p / "mappings" / "imagenet_to_label_2012_v2").write_text("a\n"), "does not name 1,000 classes"),
        (change("pytorch_to_imagenet_2012_id.json", lambda d: {**d, "3": 0}), "does not name 1,000 classes"),
        (change("folder_to_objectnet_label.json", list), "must be a JSON dict"),
        (
            change("objectnet_to_imagenet_1k.json", lambda d: {**d, "Object 001": "thing 2; nothing"}),
            r"names that stand for no class, or for two: \['nothing', 'thing 2'\]",
        ),
        (change("objectnet_to_imagenet_1k.json", lambda d: dict(list(d.items())[:50])), "maps 50 classes .* 1.0 113"),
        (lambda p: shutil.rmtree(p / "images" / "object_009"), "no images of 1 of 113 classes, first 'object_009'"),
        (
            lambda p: shutil.rmtree(p / "images"),
            "objectnet needs images and mappings; looked in .*objectnet.dev.*CC BY",
        ),
    ],
)
def test_incomplete_objectnet(damage: Callable[[Path], object], message: str, objectnet: Path) -> None:
    damage(objectnet)
    with pytest.raises(ValueError, match=message):
        load_dataset("objectnet", "test", root=objectnet)


# ------------------------------------------------------------------------------------------------- together


@pytest.mark.parametrize("name", ORIGINS)
def test_each_says_where_it_comes_from_and_on_what_terms(name: str, tmp_path: Path) -> None:
    info = DATASETS[name]
    assert (info.source, info.license, info.num_classes) == (*ORIGINS[name], 1000)
    for root, start in ((None, f"{name} is not downloaded: give the folder"), (tmp_path, f"{name} needs ")):
        with pytest.raises(ValueError, match=start) as raised:
            load_dataset(name, "test", root=root)
        assert f"It comes from {info.source} (license: {info.license})." in str(raised.value)


@pytest.mark.usefixtures("real")
@pytest.mark.parametrize("split", FREE_SPLITS)
def test_sets_that_are_there_to_test(split: str, tmp_path: Path, objectnet: Path) -> None:
    for name, root in (("imagenet_real", tmp_path), ("objectnet", objectnet)):
        with pytest.raises(ValueError, match=f"{name} has no other split than test"):
            load_dataset(name, split, root=root)


def test_whose_answers_are_imagenets() -> None:
    assert answers_imagenet(None, None)  # Google's
    assert answers_imagenet(["tench, Tinca tinca"], None)  # Hugging Face's
    assert answers_imagenet(["anything"], "imagenet_v2")
    assert answers_imagenet(WNIDS, "folder:train")
    assert not answers_imagenet(WNIDS[::-1], "folder:train")
    assert not answers_imagenet(["ant", "bee"], "folder:train")
    assert not answers_imagenet(None, "folder:train")


def test_classes_are_kept_by_any_of_their_labels(real: Path) -> None:
    """Of 2 and 7: the third image (5 and 2) and the sixth (999, 1 and 7)."""
    part = load_dataset("imagenet_real", "test", root=real, classes=(7, 2))
    assert part.classes == ("7", "2")
    assert part.labels.tolist() == [1, 0]
    assert part.label_sets is not None
    assert part.label_sets.values.tolist() == [1, 0]
    assert [Path(part.path(i)).stem[-1] for i in (0, 1)] == ["3", "6"]
    assert dataclasses.replace(part, split="x").left_out == 2
