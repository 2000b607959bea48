"""The contenders `fastai` and `autogluon` of `finetune_peers.py`: libraries that train in one call."""

import importlib
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from job import PROBE, Examples, Fitted, Job, time_images


def fit_fastai(job: Job) -> Fitted:
    """fastai's `vision_learner` and `fine_tune` at their defaults, with the presizing of its documentation.

    Where not even the epoch with a frozen body and one more fit, they are of as many random images as fit.
    """
    vision: Any = importlib.import_module("fastai.vision.all")
    size, batch = job.image_size, 64
    vision.set_seed(job.seed)

    def loaders(examples: Examples) -> Any:
        block = vision.DataBlock(
            (vision.ImageBlock, vision.CategoryBlock(vocab=job.classes)), get_y=vision.parent_label,
            splitter=vision.IndexSplitter([]), item_tfms=vision.Resize(2 * size),
            batch_tfms=vision.aug_transforms(size=size),
        )  # fmt: skip
        return block.dataloaders([path for path, _ in examples], bs=batch)

    examples, stop = list(job.examples), job.deadline

    class Deadline(vision.Callback):
        steps = 0

        def after_batch(self) -> None:
            self.steps += self.training
            if self.training and time.time() > stop:
                raise vision.CancelFitException

    deadline, paths = Deadline(), [path for path, _ in examples[:PROBE]]
    learner = vision.vision_learner(
        loaders(examples), f"local-dir:{job.checkpoints / 'timm'}", img_size=size, cbs=deadline
    )

    def load() -> Any:
        return next(iter(learner.dls.test_dl(paths, num_workers=0)))[0].as_subclass(vision.Tensor)

    frozen, prediction = time_images(learner.model, load, batch)
    learner.unfreeze()
    full, _ = time_images(learner.model, load, batch)
    per_epoch = max(1, len(examples) // batch) * batch
    if job.images is not None:
        epochs = round(job.images / per_epoch) - 1
    else:
        stop = job.stop(prediction)
        epochs = int(((stop - time.time()) / (1.05 * per_epoch) - frozen) / full)
        if epochs < 1:
            random.Random(job.seed).shuffle(examples)
            learner.dls = loaders(examples[: max(batch, int((stop - time.time()) / (frozen + full)))])
    with learner.no_bar(), learner.no_logging():
        learner.fine_tune(max(1, epochs), base_lr=2e-3 * job.factor)

    def predict(files: Sequence[Path]) -> list[int]:
        with learner.no_bar(), learner.no_logging():
            scores, _ = learner.get_preds(dl=learner.dls.test_dl(list(files)))
        return scores.argmax(1).tolist()

    return Fitted(predict, deadline.steps, deadline.steps * batch)


def fit_autogluon(job: Job) -> Fitted:
    """AutoGluon's `MultiModalPredictor.fit` at its defaults with a time limit, on the model registered in timm.

    It takes a folder of timm only at the size of pre-training, and a registered model at any.
    """
    import pandas
    import torch

    multimodal: Any = importlib.import_module("autogluon.multimodal")
    name, seen = register_in_timm(job.checkpoints / "timm", job.image_size)
    started = time.time()
    model: Any = importlib.import_module("timm").create_model(name, pretrained=True, num_classes=len(job.classes))
    _, prediction = time_images(model, lambda: torch.randn(PROBE, 3, job.image_size, job.image_size), PROBE)
    start_up = 2.0 + time.time() - started  # of a prediction
    table = pandas.DataFrame({"image": [str(file) for file, _ in job.examples], "label": [n for _, n in job.examples]})
    settings: dict[str, Any] = {
        "model.names": ["timm_image"], "model.timm_image.checkpoint_name": name, "optim.lr": 1e-4 * job.factor,
    }  # fmt: skip
    limit = None
    if job.images is None:
        averaging = 4 * prediction * len(table) / 5  # of its checkpoints, after the limit, on a fifth that it holds out
        limit = max(1, int(job.stop(prediction) - averaging - start_up - time.time()))
    else:
        settings |= {"optim.max_epochs": max(1, round(job.images / len(table))), "optim.patience": 10**6}
    out = tempfile.TemporaryDirectory()
    predictor = multimodal.MultiModalPredictor(
        label="label", problem_type="multiclass", path=f"{out.name}/predictor", verbosity=0
    )
    seen.clear()
    predictor.fit(table, time_limit=limit, seed=job.seed, hyperparameters=settings)
    images = sum(seen)

    def predict(files: Sequence[Path], _out: Any = out) -> list[int]:
        return predictor.predict(pandas.DataFrame({"image": list(map(str, files))})).astype(int).tolist()

    return Fitted(predict, images // 128, images)


def register_in_timm(folder: Path, size: int) -> tuple[str, list[int]]:
    """Name of the folder's model at this size in timm's registry, and a list to which training adds its batch sizes.

    For a timm that does not know `local-dir:` and the newer arguments.
    """
    import inspect

    from safetensors.torch import load_file
    from timm.models import registry

    vision_transformer: Any = importlib.import_module("timm.models.vision_transformer")
    config, seen = json.loads((folder / "config.json").read_text()), []
    known = inspect.signature(vision_transformer.VisionTransformer).parameters
    shape = {key: value for key, value in config["model_args"].items() if key in known} | {"img_size": size}
    card = config["pretrained_cfg"] | {"input_size": (3, size, size), "architecture": "vitlab_checkpoint"}

    def vitlab_checkpoint(pretrained: bool = False, num_classes: int = 0, **_: Any) -> Any:
        model: Any = vision_transformer.VisionTransformer(**shape, num_classes=num_classes)
        model.pretrained_cfg = model.default_cfg = card
        state = vision_transformer.checkpoint_filter_fn(load_file(folder / "model.safetensors"), model)
        wrong = model.load_state_dict(state, strict=False)
        assert not wrong.unexpected_keys, wrong
        assert not [key for key in wrong.missing_keys if not key.startswith("head.")], wrong
        model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])) if module.training else None)
        return model

    vitlab_checkpoint.__module__ = vision_transformer.__name__
    registry.register_model(vitlab_checkpoint)
    return "vitlab_checkpoint", seen
