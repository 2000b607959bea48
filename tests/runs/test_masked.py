"""Runs of masked patch prediction from settings to their files: figures, a plain ViT, images."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from masked_models import MODEL, constant, flat
from PIL import Image

from vitlab.config import DataConfig, FewShotConfig, FinetuneConfig, MaskingConfig, OptimConfig, TrainConfig
from vitlab.data.decode import ImageError
from vitlab.data.registry import load_dataset
from vitlab.evaluation.masked import evaluate_masked
from vitlab.finetuning.protocol import sweep_and_finetune
from vitlab.preprocessing import Preprocessing
from vitlab.runs.masked import reconstruct, save_masked, write_reconstructions
from vitlab.runs.pretrain import pretrain
from vitlab.runs.run import RunResult
from vitlab.settings import from_dict
from vitlab.train.masking import MASK, MaskedViT, class_colors, draw_corruption
from vitlab.weights import load_metadata, load_model

CONFIG = TrainConfig(
    model=MODEL,
    data=DataConfig(name="digits", crop="none", flip=False),
    optim=OptimConfig(lr=1e-2, warmup_steps=10),
    masking=MaskingConfig(),
    steps=80,
    batch_size=32,
    log_every=40,
    eval_every=40,
    precision="float32",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("masked") / "run"


@pytest.fixture(scope="module")
def finished(folder: Path) -> RunResult:
    config = dataclasses.replace(CONFIG, fewshot=FewShotConfig(shots=(5,), seeds=1))
    return pretrain(config, folder, device="cpu", tensorboard=False)


def load_whole(folder: Path) -> MaskedViT:
    """The trained model, from its two files."""
    with safetensors.safe_open(folder / "masking.safetensors", framework="pt") as file:
        model = MaskedViT(MODEL, from_dict(MaskingConfig, json.loads((file.metadata() or {})["masking"])))
    parts = safetensors.torch.load_file(folder / "masking.safetensors")
    vit = {f"vit.{name}": tensor for name, tensor in load_model(folder / "model").state_dict().items()}
    model.load_state_dict(parts | vit)
    return model.eval()


def test_files_of_a_run(finished: RunResult, folder: Path) -> None:
    """Both of the model's make the whole that was tested. A second call only reads."""
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model", "masking.safetensors"}
    assert finished.result == json.loads((folder / "result.json").read_text())
    prepared, test = CONFIG.data.preprocessing(16), load_dataset("digits", "test")
    assert finished.result == {"test": evaluate_masked(load_whole(folder), test, preprocessing=prepared).record()}
    summary = finished.summary(folder)
    assert f"images: {folder / 'reconstructions.png'}" in summary
    assert f"(the best constant prediction: {finished.result['test']['constant_loss']:.4f})" in summary
    before = (folder / "masking.safetensors").stat().st_mtime_ns
    assert pretrain(finished.config, folder, device="cpu", tensorboard=False) == finished
    assert (folder / "masking.safetensors").stat().st_mtime_ns == before


def test_it_learns_more_than_the_best_constant_prediction(finished: RunResult, folder: Path) -> None:
    test = finished.result["test"]
    assert test["loss"] < 0.9 * test["constant_loss"]
    assert test["accuracy"] > test["constant_accuracy"] + 0.05
    assert (test["images"], test["patches"], test["skipped"]) == (359, 359 * 8, 0)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = {line["step"]: line for line in lines if "val_loss" in line}
    assert list(evaluations) == [40, 80]
    assert evaluations[80]["val_loss"] < evaluations[40]["val_loss"]
    assert evaluations[80]["val_constant_loss"] == evaluations[40]["val_constant_loss"]
    assert {"val_accuracy", "val_constant_accuracy", "fewshot_5shot"} <= evaluations[40].keys()
    assert all({"loss", "accuracy"} <= line.keys() for line in lines if "grad_norm" in line)


@pytest.mark.usefixtures("finished")
def test_its_model_is_a_plain_vit(folder: Path, tmp_path: Path) -> None:
    """Which is fine-tuned as any checkpoint."""
    assert load_model(folder).config == MODEL
    card = load_metadata(folder)
    assert (card["dataset"], "classes" in card) == ("digits", False)
    config = dataclasses.replace(CONFIG, masking=None, steps=2, optim=OptimConfig(), eval_every=None)
    tuned = sweep_and_finetune(folder, FinetuneConfig(**vars(config)), tmp_path, device="cpu", tensorboard=False)
    assert tuned.config.model == dataclasses.replace(MODEL, num_classes=10)


@pytest.mark.parametrize("target", ["downsized", "regression"])
def test_other_targets(target: Any, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, masking=MaskingConfig(target), steps=2, optim=OptimConfig(), eval_every=None)
    finished = pretrain(config, tmp_path, device="cpu", tensorboard=False)
    assert finished.result["test"]["loss"] > 0
    model = load_whole(tmp_path)
    assert model.masking == MaskingConfig(target)
    with Image.open(tmp_path / "reconstructions.png") as sheet:
        assert min(sheet.width / 4, sheet.height / 8) > 112
    before = (tmp_path / "masking.safetensors").read_bytes()
    save_masked(model, tmp_path, extra={})
    assert (tmp_path / "masking.safetensors").read_bytes() == before


def patch_of(images: np.ndarray, position: int) -> np.ndarray:
    y, x = divmod(position, 4)
    return images[0, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4]


PLAN = torch.tensor([[[0, MASK], [5, 2], [9, 9], [15, MASK]]])


def test_reconstruction_of_a_constant_prediction() -> None:
    """Corrupted patches change, the others stay."""
    pixels = np.random.default_rng(0).integers(0, 256, (1, 16, 16, 3)).astype(np.uint8)
    images = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() - 127.5) / 127.5
    bias = torch.zeros(512)
    bias[408] = 1
    drawn = reconstruct(constant("mean-color", bias), images, PLAN)
    np.testing.assert_array_equal(drawn["image"], pixels)
    for position in range(16):
        clean = patch_of(pixels, position)
        shown = {0: np.full_like(clean, 128), 15: np.full_like(clean, 128), 5: patch_of(pixels, 2)}.get(position, clean)
        np.testing.assert_array_equal(patch_of(drawn["corrupted"], position), shown)
        predicted, target = patch_of(drawn["predicted"], position), patch_of(drawn["target"], position)
        if position in (0, 5, 9, 15):
            assert (predicted == (208, 112, 16)).all()
            assert (target == target[0, 0]).all()
            assert (np.abs(target[0, 0] - clean.reshape(-1, 3).mean(axis=0)) <= 16).all()
        else:
            np.testing.assert_array_equal(predicted, clean)
            np.testing.assert_array_equal(target, clean)


@pytest.mark.parametrize("patch", [4, 6])
def test_reconstructions_of_sixteen_colors_and_of_pixels(patch: int) -> None:
    config = dataclasses.replace(MODEL, image_size=2 * patch, patch_size=patch)
    model = MaskedViT(config, MaskingConfig("downsized")).requires_grad_(False)
    images, plan = 2 * torch.rand(1, 3, 2 * patch, 2 * patch) - 1, torch.tensor([[[1, MASK], [2, 2]]])
    classes = model(images, plan)[0, 0].unflatten(0, (16, 512)).argmax(dim=1)
    at = ((np.arange(patch) + 0.5) * 4 / patch).astype(int)  # the cell in whose middle part a pixel lies
    expected = class_colors(classes).reshape(4, 4, 3).numpy()[at][:, at]
    np.testing.assert_array_equal(reconstruct(model, images, plan)["predicted"][0, :patch, patch:], expected)
    images = 2 * torch.rand(1, 3, 16, 16) - 1  # of regression the target is the image; a prediction of 0 is gray
    drawn = reconstruct(constant("regression", torch.zeros(48)), images, PLAN)
    np.testing.assert_array_equal(drawn["target"], drawn["image"])
    for position in (0, 5, 9, 15):
        assert (np.abs(patch_of(drawn["predicted"], position).astype(int) - 127.5) < 1).all()


def test_reconstructions_are_of_the_patches_of_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[torch.Tensor] = []

    def recorded(*args: Any) -> torch.Tensor:
        plans.append(draw_corruption(*args))
        return plans[-1]

    monkeypatch.setattr("vitlab.runs.masked.draw_corruption", recorded)
    monkeypatch.setattr("vitlab.evaluation.masked.draw_corruption", recorded)
    model, data = MaskedViT(MODEL, MaskingConfig()).eval(), flat([0, 80, 160, 240])
    evaluate_masked(model, data)
    write_reconstructions(model, data, tmp_path, count=2)
    evaluated, drawn = plans
    assert torch.equal(drawn, evaluated[[0, 2]])


def test_unreadable_images_are_left_out(tmp_path: Path) -> None:
    data = flat([0, 80, 160])
    data.failures[1] = ImageError("1", "broken")
    model = MaskedViT(MODEL, MaskingConfig()).eval()
    with Image.open(write_reconstructions(model, data, tmp_path, preprocessing=Preprocessing(resize=18))) as sheet:
        assert sheet.height < 3 * 112  # two rows
    with pytest.raises(ValueError, match="1 images of flat"):
        write_reconstructions(model, data.take(np.array([1])), tmp_path)
