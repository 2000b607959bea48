"""A run from its config to its result: train, test, and leave a model that `vitlab.load_model` reads."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitlab.data.datasets import load_dataset
from vitlab.data.sources import Dataset
from vitlab.data.transforms import EvalTransform
from vitlab.models import build_model
from vitlab.models.vit import Model
from vitlab.settings import to_dict
from vitlab.train.config import DataConfig, TrainConfig
from vitlab.train.loop import train
from vitlab.train.workdir import Workdir
from vitlab.transfer.evaluate import Evaluation, choose_device, evaluate
from vitlab.weights import load_model, save_model

OnSettings = Callable[[TrainConfig], None]


@dataclass(frozen=True)
class Pictures:
    """The splits that a run needs, each loaded once."""

    train: Dataset
    val: Dataset
    test: Dataset


@dataclass(frozen=True)
class Outcome:
    """What a finished run leaves."""

    config: TrainConfig
    """The complete settings."""
    pictures: Pictures
    model: Model
    test: Evaluation
    result: dict[str, Any]
    """The content of `result.json`: the same however often the run was interrupted."""

    def summary(self, workdir: Path) -> str:
        """The test's figures and where things lie."""
        return f"{self.test.as_table()}\nmodel: {workdir / 'model'} · curves: {workdir / 'metrics.jsonl'}"


def load_pictures(data: DataConfig) -> Pictures:
    """The run's training and evaluation splits, and the test split."""
    splits = {
        split: load_dataset(data.name, split, root=data.root, classes=data.classes, on_error=data.on_error)
        for split in dict.fromkeys((data.train_split, data.eval_split, "test"))
    }
    return Pictures(splits[data.train_split], splits[data.eval_split], splits["test"])


def fitted(config: TrainConfig, dataset: Dataset) -> TrainConfig:
    """`config` with as many outputs as the data set has classes."""
    model = dataclasses.replace(config.model, num_classes=len(dataset.classes))
    return dataclasses.replace(config, model=model)


def pretrain(
    config: TrainConfig,
    workdir: str | Path,
    *,
    device: str = "auto",
    tensorboard: bool = True,
    on_settings: OnSettings | None = None,
) -> Outcome:
    """Trains a freshly initialised model as `config` says, for the classes of its data set, then tests it.

    The same call on the same folder continues an interrupted run, and only tests again where the run has ended.
    `on_settings` hears the settings once they are complete.
    """
    pictures = load_pictures(config.data)
    config = fitted(config, pictures.train)
    if on_settings:
        on_settings(config)
    generator = torch.Generator().manual_seed(config.seed)
    return run(
        config, workdir, pictures, lambda: build_model(config.model, generator=generator), command="pretrain",
        device=device, tensorboard=tensorboard,
    )  # fmt: skip


def run(
    config: TrainConfig,
    workdir: str | Path,
    pictures: Pictures,
    create: Callable[[], Model],
    *,
    command: str,
    start: str | None = None,
    device: str = "auto",
    tensorboard: bool = True,
) -> Outcome:
    """Trains what `create()` makes and tests it; `start` says which weights those were."""
    place = choose_device(device)
    EvalTransform(config.model.image_hw, resize=config.data.eval_resize)  # a wrong size is refused before the training
    settings = {"command": command, "start": start, "examples": len(pictures.train), **to_dict(config)}
    with Workdir(workdir, settings, tensorboard=tensorboard) as folder:
        since = time.perf_counter()

        def judge(model: nn.Module) -> dict[str, float]:
            found = judge_split(config, model, pictures.val, place)
            return {f"{config.data.eval_split}_{name}": value for name, value in found.figures().items()}

        if folder.finished:
            model = load_model(folder.path / "model").to(place)
        else:
            model = train(config, folder, create(), dataset=pictures.train, evaluate=judge, device=place, label=command)
        test = judge_split(config, model, pictures.test, place)
        result = {"test": test.record()}
        if not folder.finished:
            card = {
                "classes": list(pictures.test.classes),
                "dataset": config.data.name,
                "root": config.data.root,
                "class_indices": config.data.classes,
                "eval_resize": config.data.eval_resize,
                "start": start,
                "test_accuracy": test.accuracy,
            }
            save_model(model, folder.path / "model", extra=card)
            steps = config.total_steps(len(pictures.train))
            folder.log_speed(steps, {"run_seconds": time.perf_counter() - since})
            folder.write_result(result)
    return Outcome(config, pictures, model, test, result)


def judge_split(config: TrainConfig, model: nn.Module, dataset: Dataset, device: torch.device) -> Evaluation:
    """Evaluates with the run's own test pictures: size, resize, workers and policy for unreadable ones.

    Computes in float32 whatever the run's precision when `model` holds float32 weights.
    """
    data = config.data
    return evaluate(
        model, dataset, config.model.image_hw, resize=data.eval_resize, workers=data.workers,
        on_error=data.on_error, device=device,
    )  # fmt: skip
