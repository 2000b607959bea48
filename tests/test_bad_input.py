"""Bad input, as a user types it: the message says what was given, what is allowed and what to do."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from program import call

import vitlab.evaluation.predict
import vitlab.inspection.write_pages
from vitlab.data import registry
from vitlab.models import ViTConfig
from vitlab.models.vit import ViT
from vitlab.weights import save_model

BAD_INPUT: list[tuple[str, list[str]]] = [
    ("", ["usage: vitlab COMMAND", "finetune Make a classifier of images"]),
    ("pretrian", ["unknown command 'pretrian'; the nearest: pretrain"]),
    ("train", ["no command 'train'", "`vitlab pretrain`", "`vitlab finetune`"]),
    ("list modls", ["no list of 'modls'; the nearest: models"]),
    ("list models --root images", ["--root has no effect on a list of models", "`vitlab list vtab`"]),
    ("pretrain", ["RECIPE", "`vitlab list recipes`"]),
    ("pretrain tiny-digit", ["unknown recipe 'tiny-digit'; the nearest: tiny-digits", "`vitlab list recipes`"]),
    ("pretrain --steps 5 jft", ["write the recipe first", "`vitlab pretrain jft"]),
    ("pretrain jft --model ViT-B/15", ["no row for 'ViT-B/15' on JFT", "ViT-B/16", "`--model.*`"]),
    ("pretrain tiny-digits --model.patch-sze 4", ["--model.patch-sze", "Perhaps you meant", "--model.patch-size"]),
    ("pretrain tiny-digits --steps 2 --epochs 3", ["steps=2 and epochs=3.0: give exactly one"]),
    ("pretrain tiny-digits --optim.momentum=0.3", ["no effect with optim.name='adam'; give optim.name='sgd' too"]),
    ("pretrain tiny-digits --model.image-size 18", ["18x18", "patches of 4x4", "the nearest: 16, 20"]),
    ("pretrain tiny-digits --model.num-classes 7", ["--model.num-classes has no effect", "the data set decides"]),
    ("pretrain tiny-digits --masking.share 0.2", ["Unrecognized options: --masking.share"]),
    ("pretrain tiny-masked --model R50x1", ["cut from the image", "`vitlab list models 'ViT*'`"]),
    ("pretrain tiny-digits --data.name digit", ["unknown data set 'digit'; the nearest: digits"]),
    ("pretrain tiny-digits --data.name images", ["unknown data set 'images'; for your own", "folder:images"]),
    ("pretrain tiny-digits --data.name folder:nowhere", ["nowhere does not exist", "give a folder of class folders"]),
    ("pretrain tiny-digits --data.name folder:images", ["folder images/dogs holds no images", "remove it"]),
    ("pretrain tiny-digits --data.train-split tset", ["train, val, test, trainval", "'tset'"]),
    ("pretrain tiny-digits --data.classes 3 12", ["numbers from 0 to 9 of digits", "(3, 12)"]),
    ("pretrain tiny-digits --data.classes 3", ["digits has one class", "two classes or more"]),
    ("pretrain tiny-digits --device quantum", ["device 'quantum' is unknown or missing; give auto, cpu, cuda"]),
    ("pretrain tiny-digits --workdir images", ["work folder images is not empty and holds no run", "empty folder"]),
    ("pretrain tiny-digits --workdir notes.txt", ["notes.txt is a file; give the name of a folder"]),
    ("finetune", ["--dataset is missing; give --dataset folder:PATH, csv:PATH"]),
    ("finetune RUN --model.mlp-dim 64", ["--model.mlp-dim has no effect here: the model comes from", "--image-size"]),
    ("finetune RUN --dataset digits --data.name digits", ["--data.name has no effect here: give --dataset"]),
    ("finetune RUN --optim.lr 0.1 --learning-rates 0.1 0.2", ["optim.lr is one learning rate"]),
    ("finetune model.pt --dataset digits", ["model.pt is a pickle", "`vitlab convert model.pt OUT`"]),
    ("finetune other.npz --dataset digits", ["does not hold a supported model", "The file has weight"]),
    ("finetune cut.npz --dataset digits", ["cut.npz"]),
    ("finetune lone.safetensors --dataset digits", ["19 tensors whose names are vitlab's: give the folder"]),
    ("finetune images --dataset digits", ["images holds no checkpoint; give a Google .npz"]),
    ("finetune mixed --dataset digits", ["mixed/model.safetensors is corrupt", "SHA-256"]),
    ("vtab RUN --tasks svnh", ["unknown VTAB task 'svnh'; the nearest: svhn", "`vitlab list vtab`"]),
    ("vtab RUN --tasks dmlab --root images --image-size 16", ["1 of the requested tasks are missing", "dmlab"]),
    ("vtab RUN", ["384 pixels are far from the 8", "--image-size 16"]),
    ("vtab RUN --data.name cifar10", ["--data.name has no effect here", "--root and --tasks"]),
    ("evaluate RUN --image-size 18", ["18x18", "the nearest: 16, 20"]),
    ("evaluate RUN --dataset folder:other", ["knows the classes 0, 1, 2 and not ants, bees, which", "fine-tune"]),
    ("evaluate RUN --dataset imagenet", ["imagenet is not downloaded", "image-net.org", "license: research"]),
    ("evaluate RUN --dataset imagenet_real --root other", ["imagenet_real needs real.json and val; looked in other"]),
    ("predict RUN", ["there are no images; give images or folders of them"]),
    ("predict RUN nowhere.png", ["there is no file or folder nowhere.png"]),
    ("predict RUN images/dogs", ["the folder images/dogs holds no image", ".jpg"]),
    ("inspect RUN notes.txt", ["none of the 1 images can be read; the first, notes.txt: "]),
    ("inspect RUN --out notes.txt", ["notes.txt is a file; give the name of a folder"]),
    ("app RUN --port 99999", ["port 99999 of 127.0.0.1"]),
    ("fewshot RUN --dataset digits --original --leave-self-out", ["by the other data sets", "30 l2 and 1 data sets"]),
    ("probe RUN --dataset digits --kind linear --l2 0", ["l2 is (0.0,); give one or more positive"]),
    ("probe RUN --dataset digits --k 5000", ["give numbers from 1 to the 1259 training images"]),
    ("duplicates digits digits --train-split test", ["digits (test) was given twice", "another data set or split"]),
    ("duplicates digits digits --threshold 2", ["threshold is 2.0", "at most 0.5", "0.25"]),
    ("duplicates digits digits --out notes.txt", ["notes.txt is not a folder"]),
    ("pretrain tiny-digits --data.exclude nowhere.txt", ["nowhere.txt (No such file", "`vitlab duplicates`"]),
    ("pretrain tiny-digits --data.exclude notes.txt", ["1 of the 1 images listed in notes.txt", "no checkpoint, no"]),
    ("shard digits images", ["images is not empty; give the name of a new folder"]),
    ("convert RUN", ["DESTINATION"]),
    ("convert RUN out.npz --to google", ["gelu='erf'"]),
    ("convert RUN images --to timm", ["images already holds cats, dogs; give a new folder"]),
    ("export RUN --to onnx --out notes.txt", ["notes.txt", ".onnx"]),
    ("export RUN --to torch-export --with-preprocessing", ["written into ONNX files alone, not to torch-export"]),
    *(
        (command, ["images of 1 channels (in_chans)", "read as RGB"])
        for command in (
            "pretrain tiny-digits --model.in-chans 1",
            "finetune gray --dataset digits",
            "vtab gray --image-size 16",
            "evaluate gray --dataset digits",
            "inspect gray images",
            "app gray",
            "export gray --to onnx --with-preprocessing",
        )
    ),
    ("evaluate hub:nobody", ["hub:OWNER/NAME"]),
    ("fewshot RUN --dataset digits --out images", ["images is a folder; give the name of a file"]),
]
NEEDS_DATA = {
    "pretrain tiny-digits --data.train-split tset",
    "pretrain tiny-digits --data.classes 3 12",
    "pretrain tiny-digits --data.classes 3",
    "pretrain tiny-digits --data.exclude notes.txt",
    "vtab RUN --tasks dmlab --root images --image-size 16",
    "predict RUN",
    "predict RUN nowhere.png",
    "predict RUN images/dogs",
    "inspect RUN notes.txt",
    "probe RUN --dataset digits --k 5000",
}
"""Commands whose error is known only after the data set has been read."""


@pytest.fixture(scope="module")
def bad_input_folder(tmp_path_factory: pytest.TempPathFactory, run: Path) -> Path:
    """A folder with the files that the tables of bad input name."""
    tmp_path = tmp_path_factory.mktemp("bad-input")
    for name, count in (("images/cats", 3), ("images/dogs", 0), ("other/ants", 5), ("other/bees", 5)):
        (tmp_path / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{number}.png")
    (tmp_path / "notes.txt").write_text("no checkpoint, no image")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "model.pt")
    np.savez(tmp_path / "other.npz", weight=np.zeros(3))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "other.npz").read_bytes()[:100])
    weights = (run / "model" / "model.safetensors").read_bytes()
    (tmp_path / "lone.safetensors").write_bytes(weights)
    tiny = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, num_classes=0)
    save_model(ViT(replace(tiny, in_chans=1, num_classes=2)), tmp_path / "gray")
    save_model(ViT(tiny), tmp_path / "mixed")
    (tmp_path / "mixed" / "model.safetensors").write_bytes(weights)
    return tmp_path


@pytest.mark.parametrize(("words", "expected"), BAD_INPUT, ids=[words or "nothing" for words, _ in BAD_INPUT])
def test_bad_input(
    words: str,
    expected: list[str],
    run: Path,
    bad_input_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, no traceback, nothing trained; no data is read if the error can be seen without it."""

    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("the data was read")

    if words not in NEEDS_DATA:
        monkeypatch.setattr(registry, "digits_splits", read)
        monkeypatch.setattr("vitlab.data.vtab.tasks.load_task", read)
        for module in (vitlab.evaluation.predict, vitlab.inspection.write_pages):
            monkeypatch.setattr(module, "find_images", read)
    monkeypatch.chdir(bad_input_folder)
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = call(capsys, *(str(run) if word == "RUN" else word for word in words.split()))
    assert (code, out) == (2, "")
    for text in expected:
        assert text in err
    assert "Traceback" not in err
    assert "tyro" not in err.lower()
    assert not any(log.stat().st_size for log in Path().glob("runs/*/metrics.jsonl"))
    shutil.rmtree("runs", ignore_errors=True)
