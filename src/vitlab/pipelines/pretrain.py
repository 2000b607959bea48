"""A run from its config to its result: train, test, and leave a model that `vitlab.load_model` reads."""

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import nn

from vitlab.config import DataConfig, TrainConfig
from vitlab.data import exclude as exclusion
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.registry import check_source, load_dataset, require_disjoint
from vitlab.errors import UserError
from vitlab.evaluate.accuracy import Evaluation, evaluate
from vitlab.evaluate.fewshot import during_training
from vitlab.evaluate.load import choose_device
from vitlab.evaluate.masked import MaskedEvaluation, evaluate_masked, load_masked, save_masked, write_reconstructions
from vitlab.evaluate.options import LoaderOptions
from vitlab.evaluate.predictions import write_predictions
from vitlab.models.vit import Model
from vitlab.preprocessing import Preprocessing
from vitlab.settings import to_dict
from vitlab.train.distributed import SINGLE, World
from vitlab.train.loop import train
from vitlab.train.masking import MaskedViT
from vitlab.train.microbatch import default_microbatch
from vitlab.train.objectives import create_training_model
from vitlab.train.workdir import Workdir, check_folder
from vitlab.weights import load_model, save_model

OnSettings = Callable[[TrainConfig], None]
PREDICTIONS = "predictions.csv"
"""In a run's folder: its answers to the test images."""
Judged = TypeVar("Judged", bound=Evaluation | MaskedEvaluation)


@dataclass(frozen=True)
class Images:
    """The splits that a run needs, each loaded once."""

    train: Dataset
    val: Dataset
    test: Dataset
    unreadable: tuple[ImageError, ...] | None = None
    """What `readable` found and left out; None where it has not looked."""


@dataclass(frozen=True)
class Outcome(Generic[Judged]):
    """What a finished run leaves. `Judged` is a MaskedEvaluation after masked patch prediction, else an Evaluation."""

    config: TrainConfig
    """The complete settings."""
    images: Images
    model: Model
    """Of masked patch prediction, the plain ViT."""
    test: Judged
    result: dict[str, Any]
    """The content of `result.json`: the same however often the run was interrupted."""

    def summary(self, workdir: Path) -> str:
        """The test's figures and where things lie."""
        seen = "" if self.config.masking is None else f" · images: {workdir / 'reconstructions.png'}"
        return f"{self.test.as_table()}\nmodel: {workdir / 'model'} · curves: {workdir / 'metrics.jsonl'}{seen}"


def load_images(data: DataConfig, world: World = SINGLE) -> Images:
    """The run's training and evaluation splits, and the test split; with several processes the first loads them first.

    `exclude` and `part` are for what is learned from: they never change what a run is judged on.
    """

    def load(split: str, **fewer: Any) -> Dataset:
        return load_dataset(
            data.name, split, root=data.root, classes=data.classes, on_error=data.on_error, partial=data.partial,
            **fewer,
        )  # fmt: skip

    with world.rank_0_first():
        judged = {split: load(split) for split in dict.fromkeys((data.eval_split, "test"))}
        train = judged.get(data.train_split) if data.exclude is None and data.part is None else None
        if train is None:
            train = load(data.train_split, exclude=data.exclude, part=data.part, part_seed=data.part_seed or 0)
    if data.train_split == "val":  # it is the test of a set of the user's own that has no other
        require_disjoint(train, judged["test"])
    return Images(train, judged[data.eval_split], judged["test"])


def readable(images: Images, world: World = SINGLE, say: Callable[[str], None] = lambda _: None) -> Images:
    """The same without what cannot be read: every image is decoded once, and the failures are listed; `say` hears how
    far it is.

    With several processes the first decodes them for all: sets that differed between them could not be shared out.
    """
    found: dict[str, ImageError] = {}

    def failures(dataset: Dataset) -> list[tuple[int, str, str]]:
        def attempt(index: int) -> ImageError | None:
            try:
                dataset.image(index)
            except ImageError as error:
                return error
            return None

        if dataset.pixels is not None:
            errors = {i: dataset.failures.get(i) for i in range(len(dataset))}
        else:
            errors, heard = {}, time.monotonic()
            say(f"checking that the {len(dataset):,} images of {dataset.split} can be read")
            # In blocks, or millions of tasks would wait.
            blocks = np.array_split(np.arange(len(dataset)), len(dataset) // 512 + 1)
            with ThreadPoolExecutor() as pool:  # decoding leaves the interpreter's lock
                for block in blocks:
                    errors |= dict(zip(block.tolist(), pool.map(attempt, block.tolist()), strict=True))
                    if time.monotonic() - heard > 10:
                        heard = time.monotonic()
                        say(f"checked {len(errors):,} of {len(dataset):,} images")
        return [(i, error.path, error.reason) for i, error in errors.items() if error]

    def without_failures(dataset: Dataset) -> Dataset:
        failed = world.broadcast_object(lambda: failures(dataset))
        found.update({path: ImageError(path, reason) for _, path, reason in failed})
        kept = dataset.take(np.setdiff1d(np.arange(len(dataset)), [i for i, *_ in failed]))
        if not len(kept):
            raise UserError(f"none of the {len(dataset)} images of {dataset.name} ({dataset.split}) can be read.")
        return kept

    train, test = without_failures(images.train), without_failures(images.test)
    val = test if images.val is images.test else without_failures(images.val)
    return Images(train, val, test, tuple(found[path] for path in sorted(found)))


def fitted(config: TrainConfig, dataset: Dataset) -> TrainConfig:
    """`config` with as many outputs as the data set has classes; masked patch prediction knows none."""
    if config.masking is not None:
        return config
    model = dataclasses.replace(config.model, num_classes=len(dataset.classes))
    return dataclasses.replace(config, model=model)


def check_run(config: TrainConfig, workdir: str | Path, device: str, world: World = SINGLE) -> torch.device:
    """The device of a run. Raises UserError for what can be refused without its data: asked before that is read."""
    place = choose_device(world.device(device))
    world.check_batch_size(config.batch_size)
    config.data.preprocessing(config.model.image_size)  # a wrong size
    check_folder(Path(workdir))
    return place


def pretrain(
    config: TrainConfig,
    workdir: str | Path,
    *,
    device: str = "auto",
    tensorboard: bool = True,
    on_settings: OnSettings | None = None,
    world: World = SINGLE,
) -> Outcome[Any]:
    """Trains a freshly initialized model as `config` says, for the classes of its data set, then tests it.

    The same call on the same folder continues an interrupted run, and only tests again where the run has ended.
    `on_settings` hears the settings once they are complete. Several `world` do it together, see `train`.
    """
    check_run(config, workdir, device, world)
    check_source(config.data.name, config.data.root)
    if config.data.exclude is not None:
        exclusion.read_exclusion(config.data.exclude)
    if config.fewshot is not None and config.fewshot.dataset is not None:
        check_source(config.fewshot.dataset, config.fewshot.root)
    images = load_images(config.data, world)
    config = fitted(config, images.train)
    if on_settings:
        on_settings(config)
    generator = torch.Generator().manual_seed(config.seed)
    return run(
        config, workdir, images, lambda: create_training_model(config, generator), command="pretrain",
        device=device, tensorboard=tensorboard, world=world,
    )  # fmt: skip


def run(
    config: TrainConfig,
    workdir: str | Path,
    images: Images,
    create: Callable[[], Model | MaskedViT],
    *,
    command: str,
    start: str | None = None,
    label: str | None = None,
    device: str = "auto",
    tensorboard: bool = True,
    microbatch: int | None = None,
    world: World = SINGLE,
) -> Outcome[Any]:
    """Trains what `create()` makes and tests it; `start` says which weights those were, `label` what to call it.

    `microbatch` is as in `train`."""
    place = check_run(config, workdir, device, world)
    prepared = config.data.preprocessing(config.model.image_size)
    few_shot = during_training(config, world)
    settings = run_settings(command, start, images.train, config)
    with Workdir(workdir, settings, tensorboard=tensorboard, world=world) as folder:
        since = time.perf_counter()

        # The latest; the last of a training is of the weights that it returns.
        judged: list[Evaluation | MaskedEvaluation] = []

        def judge(model: nn.Module) -> dict[str, float]:
            judged[:] = [_judge(config, model, images.val, place, world)]
            figures = {f"{config.data.eval_split}_{name}": value for name, value in judged[0].figures().items()}
            return figures | few_shot(_plain(model))

        if folder.trained:
            model = load_model(folder.path / "model") if config.masking is None else load_masked(folder.path)
            model = model.to(place)
        else:
            folder.check_checkpoints()
            model = train(
                config, folder, create(), dataset=images.train, evaluate=judge, device=place,
                label=label or command, microbatch=microbatch, world=world,
            )  # fmt: skip
        if judged and images.val is images.test:
            test = judged[0]
        else:
            test = _judge(config, model, images.test, place, world)
        if (
            folder.writes
            and isinstance(test, Evaluation)
            and not (folder.finished and (folder.path / PREDICTIONS).exists())
        ):
            write_predictions(folder.path / PREDICTIONS, test, images.test)
        result = {"test": test.record(), **unreadable(images)}
        if folder.writes and not folder.finished:
            card = {
                "dataset": config.data.name,
                "root": config.data.root,
                "class_indices": config.data.classes,
                "preprocessing": prepared.to_card(),
                "start": start,
            }
            if isinstance(model, MaskedViT):
                save_masked(model, folder.path, extra=card)
                write_reconstructions(model, images.test, folder.path, preprocessing=prepared)
            else:
                card |= {"classes": list(images.test.classes), "test_accuracy": test.accuracy}
                save_model(model, folder.path / "model", extra=card)
            steps = config.total_steps(len(images.train))
            if not folder.damaged:  # else they are those of the first time
                folder.log_speed(steps, {"run_seconds": time.perf_counter() - since})
            folder.write_result(result)
        world.broadcast_object(lambda: None)  # nobody goes on before all is written
    return Outcome(config, images, _plain(model), test, result)


def _plain(model: nn.Module) -> Any:
    """The model itself, without what masked patch prediction adds."""
    return model.vit if isinstance(model, MaskedViT) else model


def run_settings(command: str, start: str | None, train: Dataset, config: TrainConfig) -> dict[str, Any]:
    """What `config.json` says of a run, and a run that continues must say again."""
    listed = {} if config.data.exclude is None else {"excluded": exclusion.identity(config.data.exclude)}
    return {"command": command, "start": start, "examples": len(train), **listed, **to_dict(config)}


def unreadable(images: Images) -> dict[str, list[dict[str, str]]]:
    """The images left out as plain data for `result.json`: path and reason of each; nothing if none were sought."""
    if images.unreadable is None:
        return {}
    return {"unreadable": [{"path": error.path, "reason": error.reason} for error in images.unreadable]}


def judge_split(
    config: TrainConfig, model: nn.Module, dataset: Dataset, device: torch.device, world: World = SINGLE
) -> Evaluation:
    """Evaluates with the run's own test images: size, resize, workers and policy for unreadable ones.

    Computes in float32 whatever the run's precision when `model` holds float32 weights.
    """
    options, prepared = _loading(config, device)
    return evaluate(model, dataset, config.model.image_hw, options, preprocessing=prepared, world=world)


def _judge(config: TrainConfig, model: nn.Module, dataset: Dataset, device: torch.device, world: World) -> Any:
    """`judge_split`, or the same for masked patch prediction: a MaskedEvaluation."""
    if isinstance(model, MaskedViT):
        options, prepared = _loading(config, device)
        return evaluate_masked(model, dataset, options, preprocessing=prepared, world=world)
    return judge_split(config, model, dataset, device, world)


def _loading(config: TrainConfig, device: torch.device) -> tuple[LoaderOptions, Preprocessing]:
    """How the run's evaluation images are read and prepared."""
    # A batch of evaluation does a third of the work of one of training, and keeps nothing.
    size = min(256, 2 * default_microbatch(config, device, 128))
    data = config.data
    return LoaderOptions(size, data.workers, data.on_error), data.preprocessing(config.model.image_size)
