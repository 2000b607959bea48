"""A run from its config to its result: train, test, and save a model that `vitlab.load_model` reads.

`TrainingRun` is one run: of `pretrain`, of `vtab`, or of a job of `finetuning`.
"""

import copy
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitlab.config import DataConfig, FewShotConfig, ReadConfig, TrainConfig
from vitlab.data.dataset import Dataset
from vitlab.data.exclude import list_fingerprint
from vitlab.data.identity import names_and_labels_fingerprint, portable_fingerprints
from vitlab.data.registry import load_dataset, require_disjoint
from vitlab.errors import UserError
from vitlab.evaluation.accuracy import evaluate
from vitlab.evaluation.calibration import Calibrator
from vitlab.evaluation.features import features, frozen_preprocessing
from vitlab.evaluation.fewshot import accuracies, sample_examples
from vitlab.evaluation.load import device_of
from vitlab.evaluation.masked import evaluate_masked, format_masked
from vitlab.evaluation.options import LoaderOptions
from vitlab.evaluation.predictions import write_predictions
from vitlab.evaluation.result import format_evaluation
from vitlab.models.init import scale_head
from vitlab.models.vit import Model
from vitlab.recipes.resolve import Reason
from vitlab.runs.masked import save_masked, write_reconstructions
from vitlab.runs.splits import Splits
from vitlab.settings import to_dict
from vitlab.train.clock import TimeLimit
from vitlab.train.distributed import SINGLE, World
from vitlab.train.loop import train
from vitlab.train.memory import inference_bytes
from vitlab.train.microbatch import MEMORY_FRACTION, default_microbatch
from vitlab.train.precision import frozen_dtype, prepare_for_inference, should_pack
from vitlab.train.workdir import SPEED, Workdir
from vitlab.weights import save_model

PREDICTIONS = "predictions.csv"
"""In a run's folder: the predictions for the test images."""


@dataclass(frozen=True)
class RunContext:
    """Where a run is executed, and what it writes beside its results; not part of the run's settings."""

    device: torch.device
    tensorboard: bool = True
    world: World = SINGLE
    microbatch: int | None = None
    """Images per forward pass, if they have been measured."""


@dataclass(frozen=True)
class RunResult:
    """What a finished run leaves."""

    config: TrainConfig
    """The complete settings."""
    result: dict[str, Any]
    """The content of `result.json`: the same however often the run was interrupted."""

    def summary(self, workdir: Path) -> str:
        """The test's metrics, and the paths of model and curves."""
        masked = self.config.masking is not None
        test = format_masked(self.result["test"]) if masked else format_evaluation(self.result["test"])
        images = f" · images: {workdir / 'reconstructions.png'}" if masked else ""
        return f"{test}\nmodel: {workdir / 'model'} · curves: {workdir / 'metrics.jsonl'}{images}"


@dataclass(frozen=True)
class TrainingRun:
    """What a run trains and tests: the model of `create_model()` on the images of `splits`."""

    config: TrainConfig
    splits: Splits
    create_model: Callable[[], nn.Module]
    command: str
    context: RunContext
    init_id: str | None = None
    """Identifies the initial weights."""
    description: str | None = None
    """Shown with the progress; None: `command`."""
    finish: Callable[[Any], Any] = lambda model: model
    """Turns the trained model into the one that is evaluated, tested and saved."""
    thresholds: Sequence[float] | None = None
    """Of each of several labels."""
    calibrator: Calibrator | None = None
    """For the test; its temperature becomes part of the saved head."""
    keep_logits: bool = False
    """Of the images of the val split, to fit a calibrator."""
    settings: Mapping[str, Any] | None = None
    """More for config.json."""
    limit: TimeLimit | None = None
    """When the training must end."""

    def run(self, workdir: str | Path) -> RunResult:
        """Trains and tests the model; the result of a finished run is read from its folder."""
        config, splits, world = self.config, self.splits, self.context.world
        few_shot = None
        if config.fewshot is not None:
            few_shot = create_fewshot_evaluator(config.fewshot, config.data, world)
        settings = run_settings(self.command, self.init_id, splits, config) | dict(self.settings or {})
        with Workdir(workdir, settings, tensorboard=self.context.tensorboard, world=world) as folder:
            if folder.finished:
                return RunResult(config, folder.read_result())
            began = time.perf_counter()
            model, val = self.train_and_evaluate(folder, few_shot)
            test = val if splits.val is splits.test else None
            if test is None:
                test = evaluate_split(config, model, splits.test, world, self.calibrator is not None)
            if self.calibrator is not None:
                test = test.with_calibrator(self.calibrator)
            if self.thresholds is not None:
                test = test.with_thresholds(self.thresholds)
            folder.log(SPEED, config.total_steps(len(splits.train)), {"run_seconds": time.perf_counter() - began})
            return RunResult(config, write_run(config, folder, splits, model, test, self.init_id))

    def train_and_evaluate(
        self, folder: Workdir, few_shot: Callable[[nn.Module], dict[str, float]] | None = None
    ) -> tuple[nn.Module, Any]:
        """The finished model, and its evaluation on the val split; None if training was over before.

        The metrics of every evaluation and of `few_shot(model)` are logged.
        """
        config, context = self.config, self.context
        evaluation: Any = None  # the last one; in the end, of the returned weights

        def evaluate_model(model: nn.Module) -> dict[str, float]:
            nonlocal evaluation
            model = self.finish(model)
            keep = self.keep_logits or self.calibrator is not None
            evaluation = evaluate_split(config, model, self.splits.val, context.world, keep)
            metrics = {f"{config.data.eval_split}_{name}": value for name, value in evaluation.metrics().items()}
            return metrics | (few_shot(getattr(model, "vit", model)) if few_shot else {})  # of a MaskedViT the ViT

        model = train(
            config,
            folder,
            self.create_model(),
            self.splits.train,
            evaluate_model,
            device=context.device,
            description=self.description or self.command,
            microbatch=context.microbatch,
            limit=self.limit,
        )
        return self.finish(model), evaluation


def write_run(
    config: TrainConfig, folder: Workdir, splits: Splits, model: Any, test: Any, init_id: str | None, **record: Any
) -> dict[str, Any]:
    """Ends a run whose model is tested: writes the model, its predictions or reconstructions, and the result with
    `record`, which is returned."""
    data, path = config.data, folder.path
    preprocessing = data.preprocessing(config.model.image_size)
    metadata = {
        "dataset": data.name,
        "root": data.root,
        "class_indices": data.classes,
        "on_error": data.on_error,
        "read": data.read_settings,
        "preprocessing": preprocessing.to_metadata(),
        "start": init_id,
    }
    if folder.writes and config.masking is None:
        write_predictions(path / PREDICTIONS, test, splits.test)
        metadata |= {"classes": list(splits.test.classes), **test.metadata()}
        if test.calibrator is not None and test.calibrator.temperature is not None:
            scale_head(model, 1 / test.calibrator.temperature)
        save_model(model, path / "model", extra=metadata | ({"multi_label": True} if splits.test.multi_label else {}))
    elif folder.writes:
        save_masked(model, path, extra=metadata)
        write_reconstructions(model, splits.test, path, preprocessing=preprocessing)
    folder.write_result({"test": test.record(), **record, **splits.record})
    return folder.read_result()  # a barrier: all files are written


def run_settings(command: str, init_id: str | None, splits: Splits, config: TrainConfig) -> dict[str, Any]:
    """The content of `config.json`, which must be the same when a run is resumed."""
    images = {"train": splits.train, "val": splits.val, "test": splits.test}
    if splits.val is splits.train or splits.val is splits.test:
        del images["val"]
    origin = {"command": command, "start": init_id, "examples": len(splits.train), **portable_fingerprints(images)}
    origin["names_and_labels"] = {split: names_and_labels_fingerprint(images[split]) for split in ("train", "test")}
    return {**origin, **excluded(config.data), **to_dict(config)}


def load_reasons(workdir: Path, world: World = SINGLE) -> tuple[Reason, ...]:
    """What a job in this folder has decided, as rank 0 reads it; empty for a new folder and for anything else."""

    def read() -> list[Any]:
        try:
            saved = json.loads((workdir / "config.json").read_bytes())["reasons"]
            return [[str(name), value, str(why)] for name, value, why in saved]
        except (OSError, ValueError, TypeError, KeyError):
            return []  # opening the folder reports what is wrong with it

    saved = world.broadcast_object(read)
    return tuple(Reason(name, tuple(value) if isinstance(value, list) else value, why) for name, value, why in saved)


def excluded(data: DataConfig) -> dict[str, Any]:
    """What identifies the list of excluded images, if there is one. Raises UserError if it cannot be read."""
    return {} if data.exclude is None else {"excluded": list_fingerprint(data.exclude)}


def evaluation_options(config: TrainConfig, device: torch.device) -> LoaderOptions:
    """The LoaderOptions with which a run evaluates."""
    # Evaluation takes a third of the FLOPs of training, for it has no backward pass, and stores no activations.
    batch_size = min(256, 2 * default_microbatch(config.model.forward_macs, device, 128))
    if device.type == "cuda":
        # All of its memory, not what is free, so that ranks agree.
        available = MEMORY_FRACTION * torch.cuda.get_device_properties(device).total_memory
        while batch_size > 1 and inference_bytes(config.model, batch_size, torch.float32, "cuda") > available:
            batch_size //= 2
    return LoaderOptions(batch_size, config.data.workers, config.data.on_error)


def evaluate_split(
    config: TrainConfig, model: Any, dataset: Dataset, world: World = SINGLE, keep_logits: bool = False
) -> Any:
    """An Evaluation, or a MaskedEvaluation, of the model in the precision of training (`frozen_dtype`); images are
    prepared as `config` says. keep_logits: as in `evaluate`."""
    device = device_of(model)
    options = evaluation_options(config, device)
    dtype = frozen_dtype(config.precision, device)
    if dtype != torch.float32 or should_pack(device, dtype):
        model = copy.deepcopy(model)
        prepare_for_inference(model, device, dtype)
    preprocessing = config.data.preprocessing(config.model.image_size)
    if config.masking is not None:
        return evaluate_masked(model, dataset, options, preprocessing=preprocessing, world=world)
    given: dict[str, Any] = {"preprocessing": preprocessing, "keep_logits": keep_logits, "world": world}
    return evaluate(model, dataset, config.model.image_hw, options, **given)


def create_fewshot_evaluator(
    settings: FewShotConfig, data: DataConfig, world: World = SINGLE
) -> Callable[[nn.Module], dict[str, float]]:
    """A function of the model that returns `fewshot_10shot` and the like, for a run on `data` (Sec. 4.1): least squares
    on frozen features. The examples are sampled here, from the whole training split even where the run trains on a
    fraction of it.
    """
    own = settings.dataset is None
    name = data.name if settings.dataset is None else settings.dataset
    root = data.root if own else settings.root
    if (name, root) == (data.name, data.root):
        joined = {"trainval": {"train", "val"}, "all": {"train", "val", "test"}}
        train_splits, test_splits = (joined.get(split, {split}) for split in (data.train_split, settings.test_split))
        if train_splits & test_splits:
            raise UserError(
                f"the few-shot test would be on {settings.test_split}, which is part of what the run trains on "
                f"({data.train_split}); give --fewshot.test-split test, --data.train-split train or --fewshot.dataset."
            )
    load = functools.partial(
        load_dataset,
        name,
        root=root,
        classes=settings.classes or (data.classes if own else None),
        on_error=data.on_error,
        levels=data.levels,
        read=data if name == data.name else ReadConfig(),
    )
    with world.rank_0_first():
        train = load(settings.train_split, exclude=data.exclude if own else None)
        test = load(settings.test_split)
    require_disjoint(train, test)
    examples = sample_examples(train, test, settings.shots, range(settings.seeds), settings.test_images)
    options = LoaderOptions(workers=data.workers, on_error=data.on_error)

    def few_shot(model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Model)
        prepared = frozen_preprocessing(data.preprocessing(model.config.image_size), model.config.image_hw)
        train_x, test_x = (
            features(model, split, options, preprocessing=prepared, world=world)
            for split in (examples.train, examples.test)
        )
        result = accuracies(examples, train_x, test_x, [settings.l2])
        return {f"fewshot_{shots}shot": float(values.mean()) for shots, values in result.items()}

    return few_shot
