"""Few-shot accuracy while a model trains (Sec. 4.1): least squares on its frozen features, at each evaluation."""

import functools
from collections.abc import Callable

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
