"""Every recipe is one complete config; made small, those that differ in more than numbers run."""

import dataclasses
import functools
from pathlib import Path

import pytest

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.finetuning.protocol import sweep_and_finetune
from vitlab.models import ResNetBody, ViTConfig
from vitlab.models.vit import ViT
from vitlab.recipes import FINETUNE, PRETRAIN
from vitlab.runs import pretrain as pretrain_module
from vitlab.runs.pretrain import pretrain
from vitlab.runs.splits import load_splits
from vitlab.weights import load_model, save_model


@pytest.fixture(autouse=True, scope="module")
def _load_digits_once() -> None:
    pytest.MonkeyPatch().setattr(pretrain_module, "load_splits", functools.cache(load_splits))


def shrink(config: TrainConfig) -> TrainConfig:
    """The recipe with everything that takes time or data made small, and all else as it is."""
    model = config.model
    if isinstance(model, ViTConfig):
        hybrid = model.stem is not None
        size = {"image_size": 8, "patch_size": 1 if hybrid else 4, "width": 8, "depth": 1, "heads": 2, "mlp_dim": 8}
        head = {"representation_size": 8 if model.representation_size else None}
        stem = {"stem": ResNetBody((1,), width=32) if hybrid else None}
        model = dataclasses.replace(model, **size, **head, **stem)
    else:
        model = dataclasses.replace(model, image_size=8, body=ResNetBody((1,), width=32, version="v2"))
    resize = {"eval_resize": 10 if config.data.eval_resize else None}
    data = dataclasses.replace(config.data, name="digits", workers=0, **resize)
    return dataclasses.replace(config, model=model, data=data, steps=2, epochs=None, batch_size=8)


@pytest.mark.parametrize(("name", "model"), [("jft", "R50x1"), ("jft", "R50+ViT-L/16"), ("masked", "ViT-L/16")])
def test_pretraining_recipe_runs(name: str, model: str, tmp_path: Path) -> None:
    config = shrink(PRETRAIN[name](model))
    finished = pretrain(config, tmp_path, device="cpu", tensorboard=False)
    assert finished.config == dataclasses.replace(config, model=finished.config.model)
    assert load_model(tmp_path).config.num_classes == (0 if config.masking else 10)
    assert '"step": 2' in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize("name", ["imagenet", "vtab"])
def test_finetuning_recipe_runs(name: str, tmp_path: Path) -> None:
    start = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, representation_size=8)
    save_model(ViT(start), tmp_path / "checkpoint")
    config = FinetuneConfig(**vars(shrink(FINETUNE[name]().single())))
    tuned = sweep_and_finetune(tmp_path / "checkpoint", config, tmp_path / "run", device="cpu", tensorboard=False)
    assert tuned.config == dataclasses.replace(config, model=tuned.config.model)
    assert tuned.result["test"]["images"] == 359
    assert '"step": 2' in (tmp_path / "run" / "metrics.jsonl").read_text()
