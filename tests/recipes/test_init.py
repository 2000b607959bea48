"""Every recipe is one complete config, and each of them, made small, runs."""

import dataclasses
import functools
from pathlib import Path

import pytest

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.models import ResNetBody, ViTConfig
from vitlab.models.vit import ViT
from vitlab.pipelines import pretrain as run
from vitlab.pipelines.finetune import sweep_and_finetune
from vitlab.pipelines.pretrain import Outcome, load_splits, pretrain
from vitlab.recipes import FINETUNE, PRETRAIN
from vitlab.weights import save_model


@pytest.fixture(autouse=True, scope="module")
def _digits_are_read_once() -> None:
    """Every recipe's stand-in for its data is the same."""
    patch = pytest.MonkeyPatch()
    patch.setattr(run, "load_splits", functools.cache(load_splits))


def shrunken(config: TrainConfig) -> TrainConfig:
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
    data = dataclasses.replace(
        config.data, name="digits", workers=0, eval_resize=10 if config.data.eval_resize else None
    )
    return dataclasses.replace(config, model=model, data=data, steps=2, epochs=None, batch_size=8)


def check(outcome: Outcome, recipe: TrainConfig, folder: Path) -> None:
    assert outcome.config == dataclasses.replace(shrunken(recipe), model=outcome.config.model)
    if recipe.masking is None:
        assert outcome.model.config.num_classes == 10
        assert len(outcome.test.labels) == 359
    else:
        assert outcome.model.config.num_classes == 0
        assert outcome.test.images == 359
    assert (folder / "result.json").is_file()
    assert '"step": 2' in (folder / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("name", "model"), [*((name, None) for name in PRETRAIN), ("jft", "R50x1"), ("jft", "R50+ViT-L/16")]
)
def test_pretraining_recipe_runs(name: str, model: str | None, tmp_path: Path) -> None:
    recipe = PRETRAIN[name](*([model] if model else []))
    check(pretrain(shrunken(recipe), tmp_path, device="cpu", tensorboard=False), recipe, tmp_path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, representation_size=8)
    folder = tmp_path_factory.mktemp("recipes") / "model"
    save_model(ViT(config), folder)
    return folder


@pytest.mark.parametrize("name", FINETUNE)
def test_finetuning_recipe_runs(name: str, checkpoint: Path, tmp_path: Path) -> None:
    recipe = FINETUNE[name]()
    config = FinetuneConfig(**vars(shrunken(recipe.single())))
    tuned = sweep_and_finetune(checkpoint, config, tmp_path, device="cpu", tensorboard=False)
    assert tuned.config == dataclasses.replace(config, model=tuned.config.model)
    assert tuned.result["test"]["images"] == 359
    assert '"step": 2' in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize("name", PRETRAIN)
def test_pretraining_takes_the_name_of_a_model(name: str) -> None:
    recipe = PRETRAIN[name]
    large = recipe("ViT-L/16")
    assert isinstance(large.model, ViTConfig)
    assert (large.model.width, large.model.depth, large.model.heads) == (1024, 24, 16)
    assert large.model.num_classes == recipe().model.num_classes


@pytest.mark.parametrize("recipe", [*PRETRAIN.values(), *FINETUNE.values()])
def test_recipe_is_the_same_each_time(recipe) -> None:
    assert recipe() == recipe()
