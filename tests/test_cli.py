"""The program as its users meet it: what it prints, what it leaves, and its errors."""

import contextlib
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from program import SMALL, call

from vitlab.cli import main
from vitlab.commands import command_type
from vitlab.data import registry as datasets
from vitlab.models import ViTConfig
from vitlab.models.vit import ViT
from vitlab.train.loop import NonFiniteError
from vitlab.train.signals import StoppedError
from vitlab.weights import ParityError, save_model


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


# ------------------------------------------------------------------------------------------------- parsing


def test_names_that_are_no_text_are_printed(run: Path, tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"b\xff.png")).write_bytes(b"no image")
    done = subprocess.run(
        [sys.executable, "-m", "vitlab", "predict", str(run), str(tmp_path), "--device", "cpu"],
        capture_output=True, env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"}, check=False,
    )  # fmt: skip
    assert b"b\xff.png: cannot be read" in done.stdout
    assert done.returncode == 1


# -------------------------------------------------------------------------------------------------- output


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (StoppedError("saved at step 5"), 143, "vitlab: saved at step 5"),
        (NonFiniteError("not finite at step 5"), 1, "vitlab: not finite at step 5"),
        (ParityError("the file differs"), 1, "vitlab: the file differs"),
        (
            RuntimeError("InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx"),
            2,
            "vitlab: torch.compile needs a C++ compiler (g++); install one, or leave --compile out.",
        ),
        (PermissionError(13, "Permission denied", "runs"), 2, "vitlab: [Errno 13] Permission denied: 'runs'"),
        (KeyboardInterrupt(), 130, "vitlab: interrupted."),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Any) -> int:
        raise error

    monkeypatch.setattr(command_type("list"), "run", fail)
    assert call(capsys, "list", "models") == (code, "", message)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("pretrain tiny-digits", " Give a smaller --microbatch or --model.image-size."),
        ("finetune m --dataset digits", " Give a smaller --microbatch or --image-size."),
        ("evaluate m", " Give a smaller --batch-size or --image-size."),
        ("bench", " Give a smaller --batch."),
        ("list models", ""),
    ],
)
def test_a_full_memory_names_the_flags_of_the_command(
    words: str, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Any) -> int:
        raise torch.OutOfMemoryError("tried 9 GB")

    monkeypatch.setattr(command_type(words.split()[0]), "run", fail)
    assert call(capsys, *words.split()) == (1, "", f"vitlab: out of device memory.{advice} (tried 9 GB)")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What torch.compile prints without one is recognized."""
    builder = pytest.importorskip("torch._inductor.cpp_builder")
    builder.cpp_compiler_search.cache_clear()
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no-such-compiler"))

    def fail(_: Any) -> int:
        builder.get_cpp_compiler()
        raise AssertionError

    monkeypatch.setattr(command_type("list"), "run", fail)
    code, out, err = call(capsys, "list", "models")
    assert (code, out) == (2, "")
    assert "install one, or leave --compile out" in err
    builder.cpp_compiler_search.cache_clear()


def test_unknown_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(command_type("list"), "run", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["list", "models"])


# ----------------------------------------------------------------------------------------------- bad input

WORDS: list[tuple[str, list[str]]] = [
    ("", ["usage: vitlab COMMAND", "finetune Fine-tune a checkpoint"]),
    ("pretrian", ["unknown command 'pretrian'; the nearest: pretrain"]),
    ("--jsn", ["--jsn stands before the command; give a command first, one of demo, pretrain"]),
    ("list", ["{models,datasets,recipes,studies,vtab}", "required"]),
    ("list modls", ["'modls'", "'models', 'datasets', 'recipes'"]),
    ("list models --jsn", ["Unrecognized options: --jsn", "--json"]),
    ("list models --root images", ["--root has no effect on a list of models", "`vitlab list vtab`"]),
    ("demo --seed x", ["--seed", "'x'"]),
    ("pretrain", ["RECIPE", "`vitlab list recipes`"]),
    ("pretrain tiny-digit", ["unknown recipe 'tiny-digit'; the nearest: tiny-digits", "`vitlab list recipes`"]),
    ("pretrain --steps 5 jft", ["write the recipe first", "`vitlab pretrain jft"]),
    ("pretrain jft --model ViT-B/15", ["no row for 'ViT-B/15' on JFT", "ViT-B/16", "`--model.*`"]),
    ("pretrain imagenet --model ViT-Q/16", ["unknown model 'ViT-Q/16'; the nearest: ViT-", "`vitlab list models`"]),
    ("pretrain tiny-digits --model.patch-sze 4", ["--model.patch-sze", "Perhaps you meant", "--model.patch-size"]),
    ("pretrain tiny-digits --optim.lr fast", ["--optim.lr", "'fast'"]),
    ("pretrain tiny-digits --optim.lr -1", ["optim", "lr is -1.0; allowed: finite float >= 0"]),
    ("pretrain tiny-digits --steps 0", ["steps is 0; allowed: int >= 1"]),
    ("pretrain tiny-digits --steps 1.5", ["--steps", "1.5"]),
    ("pretrain tiny-digits --steps", ["--steps"]),
    ("pretrain tiny-digits --steps 2 --epochs 3", ["steps=2 and epochs=3.0: give exactly one"]),
    ("pretrain tiny-digits --data.crop inceptoin", ["'inceptoin'", "'inception', 'random', 'pad', 'none'"]),
    ("pretrain tiny-digits --optim.end-lr 0.5", [
        "optim.end_lr=0.5 has no effect with optim.schedule='cosine'; give optim.schedule='linear' too, or leave"]),
    ("pretrain tiny-digits --optim.momentum=0.3", ["no effect with optim.name='adam'; give optim.name='sgd' too"]),
    ("pretrain tiny-digits --data.min_area 0.9", ["no effect with data.crop='pad'; give data.crop='inception' too"]),
    ("pretrain tiny-digits --data.crop none --data.pad 2", ["no effect with data.crop='none'; give data.crop='pad'"]),
    ("pretrain tiny-digits --data.randaugment-magnitude 20", ["data.randaugment_layers=0; give data.randaugment_la"]),
    ("pretrain tiny-digits --optim.weight-decay 0 --optim.decay-on kernels", ["give optim.weight_decay above 0 too"]),
    ("pretrain tiny-digits --data.part-seed 3", ["part_seed=3 has no effect without part"]),
    ("finetune RUN --dataset digits --optim.beta1 0.8", ["optim.beta1=0.8 has no effect with optim.name='sgd'"]),
    ("vtab RUN --optim.beta2 0.8", ["optim.beta2=0.8 has no effect with optim.name='sgd'"]),
    ("pretrain tiny-digits --data.crop random", ["crop='random' with crop_resize=None", "requires crop_resize"]),
    ("pretrain tiny-digits --model.image-size 18", ["18x18", "patches of 4x4", "the nearest: 16, 20"]),
    ("pretrain tiny-digits --model.heads 5", ["heads=5 does not divide width=96", "the nearest"]),
    ("pretrain tiny-digits --model.num-classes 7", ["--model.num-classes has no effect", "the data set decides"]),
    ("pretrain tiny-digits --masking.share 0.2", ["--masking.* has no effect in tiny-digits", "one of masked, tiny-"]),
    ("pretrain tiny-masked --masking.share 2", ["share is 2.0; allowed: finite float > 0 and <= 1"]),
    ("pretrain tiny-masked --masking.target blue", ["'blue'", "'mean-color', 'downsized', 'regression'"]),
    ("pretrain tiny-masked --mixup 0.2", ["mixup=0.2 has no effect in masked patch prediction"]),
    ("pretrain tiny-masked --model R50x1", ["cut from the image", "`vitlab list models 'ViT*'`"]),
    ("pretrain tiny-digits --data.name digit", ["unknown data set 'digit'; the nearest: digits"]),
    ("pretrain tiny-digits --data.name images", ["unknown data set 'images'; for your own", "folder:images"]),
    ("pretrain tiny-digits --data.name folder:nowhere", ["nowhere does not exist", "give a folder of class folders"]),
    ("pretrain tiny-digits --data.name shards:images", ["images has no train-*.tar"]),
    ("pretrain tiny-digits --data.name folder:images", ["class folder images/dogs holds no images", "remove it"]),
    ("pretrain tiny-digits --data.train-split tset", ["train, val, test, trainval", "'tset'"]),
    ("pretrain tiny-digits --data.classes 3 12", ["numbers from 0 to 9 of digits", "(3, 12)"]),
    ("pretrain tiny-digits --data.eval-resize 8", ["resize=8 must be at least image_size=16"]),
    ("pretrain tiny-digits --device quantum", ["device 'quantum' is unknown; give auto, cpu, cuda"]),
    ("pretrain tiny-digits --device mps", ["device 'mps' is unknown; give auto, cpu, cuda"]),
    ("pretrain tiny-digits --device cuda:99", ["device 'cuda:99'", "`vitlab doctor`"]),
    ("pretrain tiny-digits --workdir images", ["work folder images is not empty and holds no run", "empty folder"]),
    ("pretrain tiny-digits --workdir notes.txt", ["notes.txt is a file; give the name of a folder"]),
    ("finetune", ["CHECKPOINT", "Google .npz"]),
    ("finetune nowhere.npz --dataset digits", ["there is nothing at nowhere.npz; give a Google .npz"]),
    ("finetune RUN --recipe vtab", ["`vitlab vtab CHECKPOINT --tasks"]),
    ("vtab RUN --model.image-size 16", ["--model.image-size has no effect here", "give --image-size"]),
    ("finetune RUN --recipe tinny", ["unknown recipe 'tinny'; the nearest: tiny"]),
    ("finetune RUN --model.mlp-dim 64", ["--model.mlp-dim has no effect here: the checkpoint brings", "--image-size"]),
    ("finetune RUN --dataset digits --image-size 18", ["18x18", "the nearest: 16, 20"]),
    ("finetune RUN", ["name the images with --dataset folder:PATH", "--recipe"]),
    ("finetune RUN --dataset folder:nowhere", ["nowhere does not exist", "give a folder of class folders"]),
    ("finetune RUN --dataset images", ["unknown data set 'images'; for your own", "folder:images"]),
    ("finetune RUN --dataset digits --data.name digits", ["--dataset and --data.name are the same setting"]),
    ("finetune RUN --root x --data.root x", ["--root and --data.root are the same setting"]),
    ("finetune RUN --optim.lr 0.1 --learning-rates 0.1 0.2", ["--optim.lr is one learning rate"]),
    ("finetune RUN --learning-rates 0.1 0.1", ["learning_rates is (0.1, 0.1)", "once"]),
    ("finetune RUN --learning-rates 0.1 -0.2", ["learning_rates is (0.1, -0.2)", "> 0"]),
    (
        "finetune RUN --optim.lr 0.1 --held-out 0.2",
        ["--held-out has no effect with one learning rate", "--learning-rates 0.003 0.01"],
    ),
    ("finetune RUN --recipe cifar10 --held-out 2", ["held_out is 2.0", "< 1"]),
    ("finetune RUN --optim.lr 0.1 --sweep-steps 5", ["sweep_steps=5 has no effect without two learning_rates"]),
    ("finetune RUN --runs 0", ["runs is 0; allowed: int >= 1"]),
    ("finetune RUN --dataset digits --data.eval-resize 4", ["resize=4 must be at least image_size=8"]),
    ("finetune RUN --dataset digits --device quantum", ["device 'quantum' is unknown; give auto, cpu, cuda"]),
    ("finetune RUN --data.nme x", ["--data.nme", "--data.name"]),
    ("finetune model.pt --dataset digits", ["model.pt is a pickle", "never loaded", "convert it to safetensors"]),
    ("finetune notes.txt --dataset digits", ["notes.txt is not a checkpoint", "give a Google .npz"]),
    ("finetune other.npz --dataset digits", ["does not hold a supported model", "The file has weight"]),
    ("finetune cut.npz --dataset digits", ["cut.npz"]),
    ("finetune lone.safetensors --dataset digits", ["lone.safetensors", "Supported are plain ViTs"]),
    ("finetune images --dataset digits", ["images holds no checkpoint; give a Google .npz"]),
    ("finetune unfinished --dataset digits", ["training that has not ended", "Run its command again"]),
    ("finetune mixed --dataset digits", ["mixed/model.safetensors is corrupt", "SHA-256"]),
    ("vtab", ["CHECKPOINT", "Google .npz"]),
    ("vtab RUN --tasks svnh", ["unknown VTAB task 'svnh'; the nearest: svhn", "`vitlab list vtab`"]),
    ("vtab RUN --tasks dmlab --root images --image-size 16", ["1 of the requested tasks are missing", "dmlab"]),
    ("vtab RUN", ["384 pixels are far from the 8", "--image-size 16"]),
    ("vtab RUN --data.name cifar10", ["--data.name has no effect here", "--root and --tasks"]),
    ("vtab RUN --model.depth 3", ["--model.depth has no effect here: the checkpoint brings"]),
    ("vtab RUN --learning-rates 0.1", ["Unrecognized options: --learning-rates"]),
    ("vtab nowhere.npz", ["there is nothing at nowhere.npz; give a Google .npz"]),
    ("evaluate", ["CHECKPOINT", "Google .npz"]),
    ("evaluate RUN --split tset", ["'tset'", "'train', 'val', 'test', 'trainval'"]),
    ("evaluate RUN --image-size 18", ["18x18", "the nearest: 16, 20"]),
    ("evaluate RUN --dataset folder:other", ["knows the classes 0, 1, 2 and not ants, bees, which", "fine-tune"]),
    ("evaluate RUN --batch-size 0", ["batch_size is 0"]),
    ("evaluate RUN --precision auto", ["'auto'", "'float32', 'bfloat16'"]),
    ("evaluate RUN --resize 4", ["resize=4 must be at least image_size=8"]),
    ("evaluate RUN --dataset imagenet", ["imagenet is not downloaded", "image-net.org", "license: research"]),
    ("evaluate RUN --dataset imagenet_real --root other", ["imagenet_real needs real.json and val; looked in other"]),
    ("evaluate RUN --dataset imagenet_v2 --root other", ["imagenetv2-matched-frequency-format-val", "ImageNetV2"]),
    ("evaluate RUN --dataset objectnet --root other", ["objectnet needs images and mappings", "objectnet.dev"]),
    ("evaluate headless --dataset digits", ["headless has no head", "`vitlab finetune`"]),
    ("evaluate headless", ["has no head"]),
    ("predict RUN", ["no image was named; give images, folders of them, or -"]),
    ("predict RUN nowhere.png", ["there is no file or folder nowhere.png"]),
    ("predict RUN images/dogs", ["the folder images/dogs holds no image", ".jpg"]),
    ("predict RUN notes.txt --top 0", ["top is 0"]),
    ("predict RUN notes.txt --precision float16", ["'float16'", "'float32', 'bfloat16'"]),
    ("predict model.pt notes.txt", ["model.pt is a pickle"]),
    ("inspect nowhere", ["there is nothing at nowhere; give a Google .npz"]),
    ("inspect RUN nowhere.png", ["there is no file or folder nowhere.png"]),
    ("inspect RUN notes.txt", ["none of the 1 images can be read; the first, notes.txt: "]),
    ("inspect RUN --shown 0", ["shown is 0; give at least 1"]),
    ("inspect RUN --out notes.txt", ["notes.txt is a file; give"]),
    ("inspect RUN --image-size 9", ["image size 9x9 cannot be cut into patches of 4x4", "the nearest: 8, 12"]),
    ("inspect model.pt", ["model.pt is a pickle"]),
    ("app nowhere", ["there is nothing at nowhere; give a Google .npz"]),
    ("app RUN --port 99999", ["port 99999 of 127.0.0.1"]),
    ("app RUN --max-megapixels 0", ["the limit of megapixels is 0.0; give a number above 0"]),
    ("fewshot RUN", ["--dataset"]),
    ("fewshot RUN --dataset digit", ["unknown data set 'digit'; the nearest: digits"]),
    ("fewshot RUN --dataset digits --shots 5 0", ["shots is (5, 0)", ">= 1"]),
    ("fewshot RUN --dataset digits --l2 -1", ["l2 is (-1.0,)", "> 0"]),
    ("fewshot RUN --dataset digits --original --seeds 2", ["first images of each class", "leave out l2 and seeds"]),
    ("fewshot RUN --dataset digits --original --leave-self-out", ["by the other data sets", "30 l2 and 1 data sets"]),
    ("fewshot RUN --dataset digits --batch-size 0", ["batch_size is 0"]),
    ("fewshot nowhere.npz --dataset digits", ["there is nothing at nowhere.npz; give a Google .npz"]),
    ("probe RUN --dataset digits --kind svm", ["'svm'", "'knn', 'linear'"]),
    ("probe RUN --dataset digits --kind linear --k 5", ["ks is for knn"]),
    ("probe RUN --dataset digits --kind linear --l2 0", ["l2 is (0.0,); give one or more positive"]),
    ("probe RUN --dataset digits --k 5000", ["give numbers from 1 to the 1259 training images"]),
    ("probe RUN --dataset other", ["unknown data set 'other'; for your own images", "write folder:other"]),
    ("pretrain tiny-digits --fewshot.shots 0", ["shots is (0,)", "int >= 1"]),
    ("pretrain tiny-digits --fewshot.dataset digit", ["unknown data set 'digit'; the nearest: digits"]),
    ("pretrain tiny-digits --model R50x9", ["unknown model 'R50x9'; the nearest: R50x"]),
    ("pretrain tiny-digits --model.position relative", ["give position_at='every' or 'shared'"]),
    ("pretrain tiny-digits --model.pool mean", ["'mean'", "'token', 'gap', 'map', 'token+gap'"]),
    ("pretrain tiny-digits --model.registers -1", ["registers is -1"]),
    ("pretrain tiny-digits --model R50x1 --model.body.width 48", ["48 channels", "a multiple of 32"]),
    ("duplicates digits", ["Missing from vitlab duplicates", "TEST"]),
    ("duplicates digits digit", ["unknown data set 'digit'; the nearest: digits"]),
    ("duplicates digits digits --train-split test", ["digits (test) was given twice", "another data set or split"]),
    ("duplicates digits digits --threshold 2", ["threshold is 2.0", "at most 0.5", "0.25"]),
    ("duplicates digits digits --out notes.txt", ["File exists", "notes.txt"]),
    ("pretrain tiny-digits --data.exclude nowhere.txt", ["nowhere.txt (No such file", "`vitlab duplicates`"]),
    ("pretrain tiny-digits --data.exclude notes.txt", ["1 of the 1 images listed in notes.txt", "no checkpoint, no"]),
    ("shard", ["Missing from vitlab shard", "SOURCE"]),
    ("shard digits", ["give a DESTINATION, a new folder for the shards"]),
    ("shard digits images", ["images is not empty; give the name of a new folder"]),
    ("shard digits notes.txt", ["notes.txt is a file; give the name of a new folder"]),
    ("shard digit out", ["unknown data set 'digit'; the nearest: digits"]),
    ("shard digits out --size 0", ["size is 0", ">= 1"]),
    ("shard digits out --records 5 --megabytes 2", ["records=5 and megabytes=2.0 both limit a tar; give one"]),
    ("shard digits --check", ["--check takes SOURCE alone, as shards:PATH"]),
    ("shard shards:images --check", ["images has no index.json: give a folder that `vitlab shard` wrote"]),
    ("convert RUN", ["DESTINATION", "--to"]),
    ("convert RUN out --to onnx", ["'onnx'", "'google', 'timm', 'huggingface', 'vitlab'"]),
    ("convert nowhere.npz out --to timm", ["there is nothing at nowhere.npz; give a Google .npz"]),
    ("convert RUN out.npz --to google", ["gelu='erf'"]),
    ("convert RUN out --to huggingface", ["pool='gap'", "`--to vitlab`"]),
    ("convert RUN images --to timm", ["images already holds cats, dogs; give a new folder"]),
    ("convert RUN notes.txt --to vitlab", ["notes.txt is a file; give the name of a folder"]),
    ("export RUN --to tflite", ["'tflite'", "'onnx', 'torch-export'"]),
    ("export RUN --to onnx --out notes.txt", ["notes.txt", ".onnx"]),
    ("export model.pt --to onnx", ["model.pt is a pickle"]),
    ("evaluate hub:nobody", ["hub:OWNER/NAME"]),
]  # fmt: skip


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
    save_model(ViT(tiny), tmp_path / "headless")
    save_model(ViT(tiny), tmp_path / "mixed")
    (tmp_path / "mixed" / "model.safetensors").write_bytes(weights)
    (tmp_path / "unfinished" / "checkpoints").mkdir(parents=True)
    (tmp_path / "unfinished" / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(("words", "expected"), WORDS, ids=[words or "nothing" for words, _ in WORDS])
def test_bad_input(
    words: str,
    expected: list[str],
    run: Path,
    bad_input_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Says what was given, what is allowed and what to do; exit code 2, no traceback, nothing trained."""
    monkeypatch.chdir(bad_input_folder)
    code, out, err = call(capsys, *(str(run) if word == "RUN" else word for word in words.split()))
    assert (code, out) == (2, "")
    for text in expected:
        assert text in err
    assert "Traceback" not in err
    assert "tyro" not in err.lower()
    assert not any(log.stat().st_size for log in Path().glob("runs/*/metrics.jsonl"))
    shutil.rmtree("runs", ignore_errors=True)


CHEAP = [
    ("evaluate nowhere --dataset digits", "there is nothing at nowhere"),
    ("evaluate RUN --image-size 9", "cannot be cut into patches of 4x4"),
    ("evaluate RUN --device cuda:99", "device 'cuda:99'"),
    ("evaluate RUN --batch-size 0", "batch_size is 0"),
    ("evaluate RUN --resize 4", "resize=4 must be at least"),
    ("evaluate headless --dataset digits", "headless has no head"),
    ("fewshot nowhere --dataset digits", "there is nothing at nowhere"),
    ("fewshot RUN --dataset digits --image-size 9", "cannot be cut into patches of 4x4"),
    ("fewshot RUN --dataset digits --batch-size 0", "batch_size is 0"),
    ("fewshot RUN --dataset digits --out images", "images is a folder; give the name of a file"),
    ("fewshot RUN --dataset digits digit", "unknown data set 'digit'"),
    ("probe nowhere --dataset digits", "there is nothing at nowhere"),
    ("probe RUN --dataset digits --image-size 9", "cannot be cut into patches of 4x4"),
    ("probe RUN --dataset digits --batch-size 0", "batch_size is 0"),
    ("probe RUN --dataset digits --kind linear --l2 0", "l2 is (0.0,)"),
    ("predict nowhere images", "there is nothing at nowhere"),
    ("predict RUN images --device cuda:99", "device 'cuda:99'"),
    ("inspect nowhere images", "there is nothing at nowhere"),
    ("inspect RUN images --image-size 9", "cannot be cut into patches of 4x4"),
    ("vtab nowhere", "there is nothing at nowhere"),
    ("vtab RUN --image-size 9", "cannot be cut into patches of 4x4"),
    ("vtab RUN --image-size 16 --data.eval-resize 4", "resize=4 must be at least"),
    ("vtab RUN --image-size 16 --device cuda:99", "device 'cuda:99'"),
    ("duplicates digits digit", "unknown data set 'digit'"),
    ("duplicates digits folder:nowhere", "the folder nowhere does not exist"),
    ("duplicates digits digits --out notes.txt", "notes.txt"),
    ("pretrain tiny-digits --device cuda:99", "device 'cuda:99'"),
    ("pretrain tiny-digits --workdir images", "images is not empty and holds no run"),
    ("pretrain tiny-digits --workdir notes.txt", "notes.txt is a file"),
    ("pretrain tiny-digits --data.eval-resize 8", "resize=8 must be at least"),
    ("pretrain tiny-digits --data.exclude nowhere.txt", "nowhere.txt (No such file"),
    ("pretrain tiny-digits --fewshot.dataset digit", "unknown data set 'digit'"),
    ("shard digits notes.txt", "notes.txt is a file"),
]


@pytest.mark.parametrize(("words", "message"), CHEAP, ids=[words for words, _ in CHEAP])
def test_errors_that_need_no_data_come_before_it_is_read(
    words: str,
    message: str,
    run: Path,
    bad_input_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(bad_input_folder)

    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("the data was read")

    monkeypatch.setattr(datasets, "digits_splits", read)
    monkeypatch.setattr("vitlab.data.vtab.tasks.load_task", read)
    for module in ("vitlab.evaluate.predict", "vitlab.pipelines.inspect"):
        monkeypatch.setattr(f"{module}.find_images", read)
    code, _, err = call(capsys, *(str(run) if word == "RUN" else word for word in words.split()))
    assert code == 2
    assert message in err


def test_bad_option_speaks_of_its_own_command(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = call(capsys, "pretrain", "tiny-digits", "--optim.lrr", "1")
    assert "--optim.lr FLOAT" in err
    assert "finetune" not in err


def test_another_runs_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    argv = ["pretrain", "tiny-digits", "--workdir", str(run), "--steps", "3", *SMALL, "--optim.lr", "0.5"]
    code, _, err = call(capsys, *argv)
    assert code == 2
    assert (
        f"the work folder {run} holds a run with other settings: optim.lr: 0.002 -> 0.5 Give another --workdir" in err
    )
    assert (run / "metrics.jsonl").read_bytes() == before


# ---------------------------------------------------------------------------------------------- as a process


def process(*argv: str, **options: Any) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", "vitlab", *argv]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_bad_input_as_a_process() -> None:
    started = process("evaluate", "nowhere")
    out, err = started.communicate()
    assert (started.returncode, out) == (2, b"")
    assert err.startswith(b"vitlab: loading nowhere ...\nvitlab: there is nothing at nowhere; give a Google .npz")


def test_several_processes_print_once(run: Path, in_ranks: Callable[[int, Callable[[], Any]], list[Any]]) -> None:
    """What torchrun does, without its start: both test their share, one prints what a single process prints."""

    def job() -> str:
        message = io.StringIO()
        with contextlib.redirect_stdout(message), contextlib.suppress(SystemExit):
            main(["evaluate", str(run), "--json", "--device", "cpu"])
        return message.getvalue()

    (whole,) = in_ranks(1, job)
    assert len(json.loads(whole)["per_class"]) == 3
    assert in_ranks(2, job) == [whole, ""]


def test_several_processes_end_together(in_ranks: Callable[[int, Callable[[], Any]], list[Any]]) -> None:
    def job() -> None:
        main(["evaluate", "nowhere"])

    assert [str(ended) for ended in in_ranks(2, job)] in (["2", "2"], ["2", "1"], ["1", "2"])


def written(folder: Path) -> list[str]:
    """What a run has left, without TensorBoard's files, whose names tell the time."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(path.as_posix() for path in files if "tensorboard" not in path.parts)


def test_several_processes_train(
    tmp_path: Path, run: Path, in_ranks: Callable[[int, Callable[[], Any]], list[Any]]
) -> None:
    """Two of them pre-train, and fine-tune with a search and two runs; what is written and printed is what one alone
    writes and prints, up to the rounding of sums, and only one of them prints."""
    fewshot = ["--eval-every", "2", "--fewshot.shots", "2", "--fewshot.test-split", "test"]
    words = [
        ["pretrain", "tiny-digits", "--steps", "4", *SMALL, "--precision", "float32", *fewshot, "--json"],
        ["finetune", str(run), "--dataset", "digits", "--data.classes", "0", "1", "--learning-rates", "0.01", "0.03",
         "--steps", "3", "--batch-size", "8", "--runs", "2", "--image-size", "16", "--precision", "float32", "--json"],
    ]  # fmt: skip

    def job(which: int, folder: Path) -> tuple[str, str]:
        message, log_text = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(message), contextlib.redirect_stderr(log_text), pytest.raises(SystemExit):
            main([*words[which], "--workdir", str(folder), "--device", "cpu"])
        return message.getvalue(), log_text.getvalue()

    for which in range(2):
        ((alone, _),) = in_ranks(1, functools.partial(job, which, tmp_path / f"one-{which}"))
        (message, log_text), (silent, silent_log) = in_ranks(
            2, functools.partial(job, which, tmp_path / f"two-{which}")
        )
        assert (silent, silent_log) == ("", "")
        assert "by 2 processes" in log_text
        given, expected = json.loads(message), json.loads(alone)
        assert given["test"]["images"] == expected["test"]["images"]
        assert given["test"]["loss"] == pytest.approx(expected["test"]["loss"], abs=1e-4)
        names = [written(tmp_path / f"{count}-{which}") for count in ("one", "two")]
        assert names[0] == names[1]
    records = (tmp_path / "two-0/metrics.jsonl").read_text()
    assert records.count("fewshot_2shot") == 2


def test_several_processes_where_one_is_enough(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, _, err = call(capsys, "list", "models")
    assert code == 2
    assert "`vitlab list` runs in one process, and torchrun has started 4" in err


@pytest.mark.slow
def test_torchrun(run: Path) -> None:
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2"]
    command = ["-m", "vitlab", "evaluate", str(run), "--device", "cpu"]
    ended = subprocess.run([*torchrun, *command], check=False, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    alone = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True)
    assert ended.stdout == alone.stdout
    assert ended.stdout.count("images · accuracy") == 1


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_a_process_of_torchrun_is_killed() -> None:
    """The job ends at once, and what was saved is there to go on from."""
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", "-m", "vitlab"]
    command = [*torchrun, "pretrain", "tiny-digits", "--steps", "2000", *SMALL, "--checkpoint-every", "10"]
    with Path("message.txt").open("wb") as message:
        started = subprocess.Popen([*command, "--workdir", "run"], stdout=subprocess.DEVNULL, stderr=message)
    log, children = Path("run/metrics.jsonl"), Path(f"/proc/{started.pid}/task/{started.pid}/children")
    try:
        wait_until(lambda: started.poll() is not None or (log.exists() and log.read_text().count("\n") > 20))
        assert started.poll() is None, "ended before it was killed"
        os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
        assert started.wait(200) == 1
    finally:
        started.terminate()  # it ends its processes
    assert "forcefully exiting" not in Path("message.txt").read_text()  # as torchrun prints after a timeout
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert any(Path("run/checkpoints").glob("step-*"))


def test_terminated_and_continued(capsys: pytest.CaptureFixture[str]) -> None:
    """SIGTERM saves and ends with 143; the same command continues, to the same bytes as a run left alone."""
    argv = ["pretrain", "tiny-digits", "--steps", "120", *SMALL, "--mixup", "0.2", "--average-decay", "0.9"]
    argv += ["--model.dropout", "0.1", "--microbatch", "5", "--eval-every", "25"]
    started = process(*argv, "--workdir", "stopped")
    log = Path("stopped/metrics.jsonl")
    wait_until(lambda: started.poll() is not None or (log.exists() and log.read_text().count("\n") > 8))
    started.send_signal(signal.SIGTERM)
    _, err = started.communicate()
    assert started.returncode == 143, err.decode()
    assert re.search(r"vitlab: stopped and saved at step \d+/120; the same command continues\.", err.decode())
    assert b"Traceback" not in err
    code, _, err = call(capsys, *argv, "--workdir", "stopped")
    assert code == 0
    assert "continues from step-000000" in err
    assert call(capsys, *argv, "--workdir", "quiet")[0] == 0
    for name in ("metrics.jsonl", "result.json", "model/model.safetensors"):
        assert Path("stopped", name).read_bytes() == Path("quiet", name).read_bytes()


def wait_until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.005)
