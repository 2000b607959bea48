"""Few-shot accuracy while a model trains (Sec. 4.1): least squares on its frozen features, at each evaluation."""

from collections.abc import Callable
from typing import Any

from torch import nn

from vitlab.config import DataConfig, FewShotConfig, ReadConfig
from vitlab.data.registry import load_dataset, require_disjoint
from vitlab.errors import UserError
from vitlab.evaluation.features import features, frozen_preprocessing
from vitlab.evaluation.fewshot import accuracies, sample_examples
from vitlab.evaluation.options import LoaderOptions
from vitlab.models.vit import Model
from vitlab.train.distributed import SINGLE, World


def create_fewshot_evaluator(
    settings: FewShotConfig, data: DataConfig, world: World = SINGLE
) -> Callable[[nn.Module], dict[str, float]]:
    """A function of the model that returns `fewshot_10shot` and the like, for a run on `data`.

    The examples are sampled here, from the whole training split even where the run trains on a fraction of it.
    """
    if settings.dataset is None:
        name = data.name
        root = data.root
        classes = data.classes
        exclude = data.exclude
    else:
        name = settings.dataset
        root = settings.root
        classes = None
        exclude = None
    if (name, root) == (data.name, data.root):
        joined = {"trainval": {"train", "val"}, "all": {"train", "val", "test"}}
        train_splits, test_splits = (joined.get(split, {split}) for split in (data.train_split, settings.test_split))
        if train_splits & test_splits:
            raise UserError(
                f"the few-shot test would be on {settings.test_split}, which is part of what the run trains on "
                f"({data.train_split}); give --fewshot.test-split test, --data.train-split train or --fewshot.dataset."
            )
    read = data if name == data.name else ReadConfig()
    classes = classes if settings.classes is None else settings.classes
    how: dict[str, Any] = {"root": root, "classes": classes, "on_error": data.on_error, "levels": data.levels}
    with world.rank_0_first():
        train, test = (
            load_dataset(name, split, exclude=excluded, read=read, **how)
            for split, excluded in ((settings.train_split, exclude), (settings.test_split, None))
        )
    require_disjoint(train, test)
    examples = sample_examples(train, test, settings.shots, range(settings.seeds), settings.test_images)
    options = LoaderOptions(workers=data.workers, on_error=data.on_error)

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Model)
        prepared = frozen_preprocessing(data.preprocessing(model.config.image_size), model.config.image_hw)
        train_x, test_x = (
            features(model, split, options, preprocessing=prepared, world=world)
            for split in (examples.train, examples.test)
        )
        result = accuracies(examples, train_x, test_x, [settings.l2])
        return {f"fewshot_{shots}shot": float(values.mean()) for shots, values in result.items()}

    return evaluate
