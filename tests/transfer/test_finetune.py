"""A checkpoint carried to other classes at twice the resolution, from both formats."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.models import ViTConfig
from vitlab.models.position import interpolate_positions
from vitlab.models.vit import Model, ViT
from vitlab.train.config import DataConfig, OptimConfig, TrainConfig
from vitlab.transfer import run
from vitlab.transfer.finetune import finetune
from vitlab.transfer.run import Outcome
from vitlab.weights import load_model
from vitlab.weights.google import write_google


@pytest.fixture
def task(config: TrainConfig) -> TrainConfig:
    """Four other digits at 16 pixels; its model is a stand-in."""
    return TrainConfig(
        model=dataclasses.replace(config.model, image_size=16, width=8, dropout=0.1),
        data=DataConfig(classes=(3, 4, 5, 6), crop="none", flip=False),
        optim=OptimConfig(name="sgd", lr=0.1, clip_norm=1.0),
        steps=60,
        batch_size=16,
        precision="float32",
    )


@pytest.fixture(params=["folder", "google"])
def checkpoint(request: pytest.FixtureRequest, pretrained: Outcome, workdir: Path, tmp_path: Path) -> Path:
    """The same model in our format and in Google's."""
    if request.param == "folder":
        return workdir
    write_google(pretrained.model, tmp_path / "vit.npz")
    return tmp_path / "vit.npz"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Model]:
    """The models that training started from."""
    seen: list[Model] = []
    train: Callable[..., Model] = run.train

    def watched(config: Any, folder: Any, model: ViT, **options: Any) -> Model:
        seen.append(ViT(model.config))
        seen[-1].load_state_dict(model.state_dict())
        return train(config, folder, model, **options)

    monkeypatch.setattr(run, "train", watched)
    return seen


def carry(checkpoint: Path, config: TrainConfig, folder: Path, image_size: int | None = None) -> Outcome:
    return finetune(checkpoint, config, folder, image_size=image_size, device="cpu", tensorboard=False)


def test_carried_to_other_classes_at_twice_the_size(
    checkpoint: Path, task: TrainConfig, pretrained: Outcome, begun: list[ViT], tmp_path: Path
) -> None:
    outcome = carry(checkpoint, task, tmp_path / "run")
    (start,) = begun
    old, new = pretrained.model.state_dict(), start.state_dict()
    assert new["head.weight"].shape == (4, 16)
    assert not new["head.weight"].any()
    assert not new["head.bias"].any()
    assert old.keys() - new.keys() == {"pre_logits.weight", "pre_logits.bias"}
    assert old["position.table"].shape == (1, 5, 16)
    expected = interpolate_positions(old["position.table"], (2, 2), (4, 4), 1)
    assert torch.equal(new["position.table"], expected)
    assert torch.equal(new["position.table"][0, [1, 4, 13, 16]], old["position.table"][0, 1:])  # corners aligned
    for name in new.keys() - {"head.weight", "head.bias", "position.table"}:
        assert torch.equal(new[name], old[name]), name
    assert outcome.test.classes == ("3", "4", "5", "6")
    assert outcome.test.accuracy > 0.4
    assert load_model(tmp_path / "run").config == outcome.model.config == outcome.config.model


def test_the_model_is_the_checkpoints(checkpoint: Path, task: TrainConfig, config: TrainConfig, tmp_path: Path) -> None:
    """Only resolution and dropout are the recipe's, and the outputs are the data set's classes."""
    short = dataclasses.replace(task, steps=1)
    model = dataclasses.replace(
        config.model, image_size=16, num_classes=4, representation_size=None, dropout=0.1, head_bias=0.0
    )
    assert carry(checkpoint, short, tmp_path / "own").config == dataclasses.replace(short, model=model)
    larger = dataclasses.replace(model, image_size=24)
    assert carry(checkpoint, short, tmp_path / "24", 24).config == dataclasses.replace(short, model=larger)


def test_settings_are_told_once_complete(workdir: Path, pretrained: Outcome, task: TrainConfig, tmp_path: Path) -> None:
    told: list[TrainConfig] = []
    config = dataclasses.replace(task, steps=1)
    outcome = finetune(workdir, config, tmp_path, device="cpu", tensorboard=False, on_settings=told.append)
    assert told == [outcome.config]
    widths = [
        each.width for each in (told[0].model, pretrained.model.config, config.model) if isinstance(each, ViTConfig)
    ]
    assert widths[0] == widths[1] != widths[2]


@pytest.mark.usefixtures("pretrained")
def test_size_that_the_patch_does_not_divide(workdir: Path, task: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"image size 18x18 cannot be cut into patches of 4x4.* the nearest: 16, 20"):
        carry(workdir, task, tmp_path, 18)


def test_as_many_classes_still_need_a_new_head(
    workdir: Path, pretrained: Outcome, task: TrainConfig, begun: list[ViT], tmp_path: Path
) -> None:
    three = dataclasses.replace(task, data=dataclasses.replace(task.data, classes=(7, 8, 9)), steps=1)
    assert pretrained.model.config.num_classes == 3
    carry(workdir, three, tmp_path)
    assert begun[0].head is not None
    assert not begun[0].head.weight.any()


@pytest.mark.usefixtures("pretrained")
def test_started_again(workdir: Path, task: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = carry(workdir, task, tmp_path)
    monkeypatch.setattr(run, "train", None)
    assert carry(workdir, task, tmp_path).result == first.result


def test_other_weights_are_another_run(workdir: Path, pretrained: Outcome, task: TrainConfig, tmp_path: Path) -> None:
    """The folder remembers the weights that it started from, by what they are and not by their place."""
    write_google(pretrained.model, tmp_path / "vit.npz")
    short = dataclasses.replace(task, steps=1)
    carry(tmp_path / "vit.npz", short, tmp_path / "run")
    start = json.loads((tmp_path / "run" / "config.json").read_text())["start"]
    assert start.startswith("vit.npz sha256:")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "vit.npz").rename(tmp_path / "elsewhere" / "vit.npz")
    carry(tmp_path / "elsewhere" / "vit.npz", short, tmp_path / "run")
    other = load_model(workdir)
    assert isinstance(other, ViT)
    with torch.no_grad():
        other.norm.bias[0] += 1e-3
    write_google(other, tmp_path / "vit.npz")
    with pytest.raises(ValueError, match=r"holds a run with other settings:\n  start: vit.npz sha256:"):
        carry(tmp_path / "vit.npz", short, tmp_path / "run")


@pytest.mark.usefixtures("pretrained")
def test_far_resolution_must_be_asked_for(workdir: Path, task: TrainConfig, tmp_path: Path) -> None:
    """A checkpoint of 8 pixels under a recipe of 64 would have 64 times the patches."""
    far = dataclasses.replace(task, model=dataclasses.replace(task.model, image_size=64))
    with pytest.raises(ValueError, match=r"64 pixels are far from the 8 .* 64 times the patches; .*--image-size 16"):
        carry(workdir, far, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    asked = carry(workdir, dataclasses.replace(far, steps=1), tmp_path / "asked", image_size=64)
    assert asked.model.config.grid == (16, 16)
