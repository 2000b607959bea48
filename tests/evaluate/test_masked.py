"""Runs of masked patch prediction from settings to what they leave: figures, a plain ViT, images."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from vitlab.config import DataConfig, FewShotConfig, FinetuneConfig, MaskingConfig, OptimConfig, TrainConfig
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.registry import load_dataset
from vitlab.evaluate.masked import (
    MaskedEvaluation,
    evaluate_masked,
    load_masked,
    reconstruct,
    save_masked,
    write_reconstructions,
)
from vitlab.evaluate.options import LoaderOptions
from vitlab.models import ViTConfig
from vitlab.models.vit import ViT
from vitlab.pipelines.finetune import sweep_and_finetune
from vitlab.pipelines.pretrain import Outcome, pretrain
from vitlab.preprocessing import Preprocessing
from vitlab.train.distributed import init_distributed
from vitlab.train.masking import MASK, MaskedViT, class_colors
from vitlab.weights import load_card, load_model, save_model

MODEL = ViTConfig(
    image_size=16, patch_size=4, width=32, depth=2, heads=2, mlp_dim=32, num_classes=0, pool="gap", position_std=1.0
)
CONFIG = TrainConfig(
    model=MODEL,
    data=DataConfig(name="digits", crop="none", flip=False),
    optim=OptimConfig(lr=1e-2, warmup_steps=10),
    masking=MaskingConfig(),
    steps=120,
    batch_size=32,
    log_every=40,
    eval_every=60,
    precision="float32",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("masked") / "run"


@pytest.fixture(scope="module")
def outcome(folder: Path) -> Outcome[MaskedEvaluation]:
    config = dataclasses.replace(CONFIG, fewshot=FewShotConfig(shots=(5,), seeds=1))
    return pretrain(config, folder, device="cpu", tensorboard=False)


def test_what_a_run_leaves(outcome: Outcome[MaskedEvaluation], folder: Path) -> None:
    assert {each.name for each in folder.iterdir()} >= {
        "config.json", "metrics.jsonl", "result.json", "model", "masking.safetensors", "reconstructions.png",
    }  # fmt: skip
    assert outcome.result == {"test": outcome.test.record()} == json.loads((folder / "result.json").read_text())
    assert json.loads((folder / "config.json").read_text())["masking"] == dataclasses.asdict(MaskingConfig())
    summary = outcome.summary(folder)
    assert f"images: {folder / 'reconstructions.png'}" in summary
    assert f"(the best constant prediction: {outcome.test.constant_loss:.4f})" in summary


def test_it_learns_more_than_the_best_constant_prediction(outcome: Outcome[MaskedEvaluation], folder: Path) -> None:
    test = outcome.test
    assert test.accuracy is not None
    assert test.constant_accuracy is not None
    assert test.loss < 0.9 * test.constant_loss
    assert test.accuracy > test.constant_accuracy + 0.05
    assert (test.images, test.patches, test.skipped) == (359, 359 * 8, 0)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    judged = {line["step"]: line for line in lines if "val_loss" in line}
    assert list(judged) == [60, 120]
    assert judged[120]["val_loss"] < judged[60]["val_loss"]
    assert judged[120]["val_constant_loss"] == judged[60]["val_constant_loss"]
    assert {"val_accuracy", "val_constant_accuracy", "fewshot_5shot"} <= judged[60].keys()
    assert all({"loss", "accuracy"} <= line.keys() for line in lines if "grad_norm" in line)


def test_started_again_it_only_tests_again(outcome: Outcome[MaskedEvaluation], folder: Path) -> None:
    before = (folder / "masking.safetensors").stat().st_mtime_ns
    again = pretrain(outcome.config, folder, device="cpu", tensorboard=False)
    assert again.test == outcome.test
    assert (folder / "masking.safetensors").stat().st_mtime_ns == before


def test_it_leaves_a_plain_vit(outcome: Outcome[MaskedEvaluation], folder: Path) -> None:
    model = load_model(folder)
    assert isinstance(model, ViT)
    assert model.config == MODEL
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), outcome.model.parameters(), strict=True))
    card = load_card(folder)
    assert (card["dataset"], "classes" in card) == ("digits", False)


def test_it_is_fine_tuned_as_any_checkpoint(outcome: Outcome[MaskedEvaluation], folder: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, masking=None, steps=200, eval_every=None)
    tuned = sweep_and_finetune(folder, FinetuneConfig(**vars(config)), tmp_path, device="cpu", tensorboard=False)
    assert tuned.config.model == dataclasses.replace(MODEL, num_classes=10)
    assert tuned.result["test"]["accuracy"] > 0.6


@pytest.mark.parametrize("target", ["downsized", "regression"])
def test_other_targets(target: Any, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, masking=MaskingConfig(target))
    test = pretrain(config, tmp_path, device="cpu", tensorboard=False).test
    assert test.loss < 0.9 * test.constant_loss
    assert (test.accuracy is None) == (target == "regression")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [("accuracy" in line) for line in lines if "grad_norm" in line] == [target == "downsized"] * 3
    assert ("accuracy" in json.loads((tmp_path / "result.json").read_text())["test"]) == (target == "downsized")
    again = load_masked(tmp_path)
    assert again.masking == MaskingConfig(target)
    with Image.open(tmp_path / "reconstructions.png") as sheet:
        assert sheet.width > 4 * 112
        assert sheet.height > 8 * 112


# ------------------------------------------------------------------------------------------- the constant prediction


def flat(levels: list[int]) -> Dataset:
    """Images of one gray each."""
    pixels = np.array(levels, np.uint8)[:, None, None, None] * np.ones((1, 16, 16, 3), np.uint8)
    return Dataset("flat", "test", ("a",), np.zeros(len(levels), np.int64), pixels)


def constant(target: Any, bias: torch.Tensor) -> MaskedViT:
    """A model that says the same of every patch."""
    model = MaskedViT(MODEL, MaskingConfig(target))
    with torch.no_grad():
        model.predictor.weight.zero_()
        model.predictor.bias.copy_(bias)
    return model


def test_entropy_is_the_loss_of_the_best_constant_prediction() -> None:
    """A quarter of class 73 and three of class 4 * 73: entropy 0.5623 nats; the model that knows it says no more."""
    shares = torch.full((512,), 1e-30)
    shares[73], shares[4 * 73] = 0.25, 0.75
    found = evaluate_masked(constant("mean-color", shares.log()), flat([40, 130, 130, 130]), LoaderOptions(3))
    assert found.constant_loss == pytest.approx(-(0.25 * np.log(0.25) + 0.75 * np.log(0.75)))
    assert found.loss == pytest.approx(found.constant_loss, rel=1e-5)
    assert (found.accuracy, found.constant_accuracy) == (0.75, 0.75)
    worse = evaluate_masked(constant("mean-color", torch.zeros(512)), flat([40, 130, 130, 130]))
    assert worse.loss == pytest.approx(np.log(512))
    assert worse.constant_loss == found.constant_loss


def test_entropy_of_each_cell_by_itself() -> None:
    shares = torch.full((16, 512), 1e-30)
    shares[:, 0] = shares[:, 511] = 0.5
    found = evaluate_masked(constant("downsized", shares.log().flatten()), flat([0, 255]))
    assert found.loss == pytest.approx(found.constant_loss, rel=1e-5)
    assert found.constant_loss == pytest.approx(np.log(2))


def test_variance_is_the_loss_of_the_best_constant_prediction() -> None:
    """Values -1, 1 and 1: mean 1/3, variance 8/9."""
    found = evaluate_masked(constant("regression", torch.full((48,), 1 / 3)), flat([0, 255, 255]))
    assert found.constant_loss == pytest.approx(8 / 9)
    assert found.loss == pytest.approx(8 / 9)
    assert found.figures().keys() == {"loss", "constant_loss"}


def test_evaluation_does_not_depend_on_batches() -> None:
    model, data = MaskedViT(MODEL, MaskingConfig()).eval(), load_dataset("digits", "val")
    one, two = (evaluate_masked(model, data, LoaderOptions(size)) for size in (7, 200))
    assert dataclasses.replace(one, loss=two.loss) == two
    assert one.loss == pytest.approx(two.loss)


@pytest.mark.parametrize("target", ["mean-color", "downsized", "regression"])
@pytest.mark.parametrize("count", [2, 3])
def test_several_ranks_find_what_one_finds(
    count: int, target: Any, in_ranks: Callable[[int, Callable[[], Any]], list[Any]]
) -> None:
    """Each judges its share only, and every one has the whole: 13 images, one of which cannot be read."""
    model, data = MaskedViT(MODEL, MaskingConfig(target)).eval(), load_dataset("digits", "val").take(np.arange(13))
    data.failures[4] = ImageError("4.png", "broken")
    alone = evaluate_masked(model, data, LoaderOptions(2, on_error="skip"))
    assert (alone.images, alone.skipped) == (12, 1)

    def job() -> tuple[MaskedEvaluation, int]:
        seen = []
        model.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
        with init_distributed() as world:
            return evaluate_masked(model, data, LoaderOptions(2, on_error="skip"), world=world), sum(seen)

    found = in_ranks(count, job)
    assert sum(seen for _, seen in found) == 12
    for each, seen in found:
        assert seen <= -(-13 // count)
        assert each == found[0][0]
        assert dataclasses.replace(each, loss=alone.loss, constant_loss=alone.constant_loss) == alone
        assert each.loss == pytest.approx(alone.loss, rel=1e-6)
        assert each.constant_loss == pytest.approx(alone.constant_loss, rel=1e-12)


def test_ranks_without_a_image(in_ranks: Callable[[int, Callable[[], Any]], list[Any]]) -> None:
    model, data = constant("mean-color", torch.zeros(512)), flat([40, 130])
    one, none = dataclasses.replace(data), dataclasses.replace(data)
    one.failures = {0: ImageError("0", "broken")}
    none.failures = {i: ImageError(str(i), "broken") for i in range(2)}

    def job(data: Dataset) -> MaskedEvaluation:
        with init_distributed() as world:
            return evaluate_masked(model, data, LoaderOptions(on_error="skip"), world=world)

    assert in_ranks(3, lambda: job(one)) == [evaluate_masked(model, one, LoaderOptions(on_error="skip"))] * 3
    for error in in_ranks(3, lambda: job(none)):
        assert "none of the 2 images of flat (test) could be read" in str(error)


@pytest.mark.parametrize("target", ["downsized", "regression"])
def test_waits_for_the_device_once(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is brought over before the last batch has been asked for."""
    model, data = MaskedViT(MODEL, MaskingConfig(target)).eval(), flat(list(range(0, 250, 10)))
    expected, done, asked = evaluate_masked(model, data, LoaderOptions(4)), [], []

    def refuse(_: torch.Tensor, brought: Callable[..., Any], *given: Any) -> Any:
        assert len(asked) == 7
        done.append(brought)
        return brought(*given)

    model.register_forward_pre_hook(lambda *_: asked.append(None))
    for name in ("cpu", "item", "tolist", "numpy", "__float__", "__int__", "__bool__"):
        brought = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda tensor, *given, of=brought: refuse(tensor, of, tensor, *given))
    assert evaluate_masked(model, data, LoaderOptions(4)) == expected
    assert done


def test_back_in_training_mode_after_an_error() -> None:
    model = MaskedViT(MODEL, MaskingConfig()).train()

    def fail(*_: Any) -> None:
        assert not model.training
        raise RuntimeError("inside")

    model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="inside"):
        evaluate_masked(model, flat([0, 255]))
    assert model.training


# -------------------------------------------------------------------------------------------------- on the disk


def test_saved_and_loaded_whole(tmp_path: Path) -> None:
    model = MaskedViT(MODEL, MaskingConfig("downsized", share=0.15))
    save_masked(model, tmp_path, extra={})
    again = load_masked(tmp_path)
    assert again.masking == model.masking
    assert not again.training
    assert model.state_dict().keys() == again.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_saved_to_the_same_bytes_each_time(tmp_path: Path) -> None:
    config = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=1, mlp_dim=8, num_classes=0)
    model = MaskedViT(config, MaskingConfig())
    written = set()
    for _ in range(8):
        save_masked(model, tmp_path, extra={})
        written.add((tmp_path / "masking.safetensors").read_bytes())
    assert len(written) == 1


def test_what_is_no_masked_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"masking\.safetensors is missing"):
        load_masked(tmp_path)
    model = MaskedViT(MODEL, MaskingConfig())
    save_masked(model, tmp_path, extra={})
    save_model(ViT(dataclasses.replace(MODEL, width=16)), tmp_path / "model")
    with pytest.raises(ValueError, match="does not fit the model beside it"):
        load_masked(tmp_path)
    whole = (tmp_path / "masking.safetensors").read_bytes()
    (tmp_path / "masking.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is corrupt"):
        load_masked(tmp_path)
    safetensors.torch.save_file({"mask": torch.zeros(1)}, tmp_path / "masking.safetensors")
    with pytest.raises(ValueError, match="is corrupt"):
        load_masked(tmp_path)


# --------------------------------------------------------------------------------------------- reconstructions


def patch_of(images: np.ndarray, place: int) -> np.ndarray:
    y, x = divmod(place, 4)
    return images[0, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4]


PLAN = torch.tensor([[[0, MASK], [5, 2], [9, 9], [15, MASK]]])


def test_reconstruction_of_a_constant_prediction() -> None:
    """Each panel by hand: corrupted patches change, the others stay."""
    pixels = np.random.default_rng(0).integers(0, 256, (1, 16, 16, 3)).astype(np.uint8)
    images = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() - 127.5) / 127.5
    bias = torch.zeros(512)
    bias[408] = 1
    found = reconstruct(constant("mean-color", bias), images, PLAN)
    np.testing.assert_array_equal(found.images, pixels)
    for place in range(16):
        clean = patch_of(pixels, place)
        shown = {0: np.full_like(clean, 128), 15: np.full_like(clean, 128), 5: patch_of(pixels, 2)}.get(place, clean)
        np.testing.assert_array_equal(patch_of(found.corrupted, place), shown)
        told, right = patch_of(found.predicted, place), patch_of(found.wanted, place)
        if place in (0, 5, 9, 15):
            assert (told == (208, 112, 16)).all()
            mean = clean.reshape(-1, 3).mean(axis=0)
            assert (right == right[0, 0]).all()
            assert (np.abs(right[0, 0] - mean) <= 16).all()
        else:
            np.testing.assert_array_equal(told, clean)
            np.testing.assert_array_equal(right, clean)


@pytest.mark.parametrize("patch", [4, 8, 6])
def test_downsized_reconstruction_shows_sixteen_colors(patch: int) -> None:
    config = dataclasses.replace(MODEL, image_size=2 * patch, patch_size=patch)
    model = MaskedViT(config, MaskingConfig("downsized"))
    images = 2 * torch.rand(1, 3, 2 * patch, 2 * patch) - 1
    found = reconstruct(model, images, torch.tensor([[[1, MASK], [2, 2]]]))
    model.requires_grad_(False)
    classes = model(images, torch.tensor([[[1, MASK], [2, 2]]]))[0, 0].unflatten(0, (16, 512)).argmax(dim=1)
    at = ((np.arange(patch) + 0.5) * 4 / patch).astype(int)  # the cell in whose middle part a pixel lies
    expected = class_colors(classes).reshape(4, 4, 3).numpy()[at][:, at]
    np.testing.assert_array_equal(found.predicted[0, :patch, patch:], expected)


def test_regression_reconstructs_pixels() -> None:
    """What is wanted is the image itself; a model that says 0 everywhere says gray."""
    images = 2 * torch.rand(1, 3, 16, 16) - 1
    found = reconstruct(constant("regression", torch.zeros(48)), images, PLAN)
    np.testing.assert_array_equal(found.wanted, found.images)
    for place in (0, 5, 9, 15):
        assert (np.abs(patch_of(found.predicted, place).astype(int) - 127.5) < 1).all()


def test_images_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    from vitlab.data.decode import Entry

    entries = []
    for number in range(3):
        path = tmp_path / f"{number}.png"
        Image.fromarray(np.full((20, 20, 3), 80 * number, np.uint8)).save(path)
        entries.append(Entry(str(path)))
    (tmp_path / "1.png").write_text("no image")
    data = Dataset("disk", "test", ("a",), np.zeros(3, np.int64), entries=entries)
    model = MaskedViT(MODEL, MaskingConfig()).eval()
    path = write_reconstructions(model, data, tmp_path, preprocessing=Preprocessing(resize=18))
    with Image.open(path) as sheet:
        assert sheet.height < 3 * 112  # two rows
    assert evaluate_masked(model, data, LoaderOptions(on_error="skip")).skipped == 1
    with pytest.raises(ValueError, match="none of 8 images of disk"):
        write_reconstructions(model, data.take(np.array([1])), tmp_path)
