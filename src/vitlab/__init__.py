"""The Vision Transformer ("An Image is Worth 16x16 Words", ICLR 2021) as software.

The public names, each imported on first use, so that `import vitlab` is fast and does not import torch. They are listed
three times: as imports for type checkers, in `__all__`, and in NAMES, which imports them at run time.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from vitlab import app, data, evaluation, inspection, models, recipes, runs, train, weights
    from vitlab.api import evaluate, finetune, inspect, predict
    from vitlab.config import DataConfig, OptimConfig, TrainConfig
    from vitlab.data.registry import load_dataset
    from vitlab.evaluation.tensors import features, preprocess
    from vitlab.models import MODELS, ResNetConfig, Variant, ViTConfig, create_model, get_config, list_models
    from vitlab.models.resnet import ResNet
    from vitlab.models.vit import ViT
    from vitlab.train.optim import parameter_groups
    from vitlab.weights import convert, load_model, save_model

__version__ = "0.1.0"
__all__ = ["MODELS", "DataConfig", "OptimConfig", "ResNet", "ResNetConfig", "TrainConfig", "Variant", "ViT"]
__all__ += ["ViTConfig", "convert", "create_model", "evaluate", "features", "finetune", "get_config", "inspect"]
__all__ += ["list_models", "load_dataset", "load_model", "parameter_groups", "predict", "preprocess", "save_model"]
__all__ += ["app", "data", "evaluation", "inspection", "models", "recipes", "runs", "train", "weights"]

NAMES = {
    "api": "evaluate finetune inspect predict",
    "config": "DataConfig OptimConfig TrainConfig",
    "data.registry": "load_dataset",
    "evaluation.tensors": "features preprocess",
    "models": "MODELS ResNetConfig Variant ViTConfig create_model get_config list_models",
    "models.resnet": "ResNet",
    "models.vit": "ViT",
    "train.optim": "parameter_groups",
    "weights": "convert load_model save_model",
}
MODULE_OF = {name: f"vitlab.{module}" for module, names in NAMES.items() for name in names.split()}
SUBPACKAGES = [name for name in __all__ if name not in MODULE_OF]

if not typing.TYPE_CHECKING:  # or a type checker would take any name for a public one

    def __getattr__(name: str) -> typing.Any:
        if name in SUBPACKAGES:
            return importlib.import_module(f"vitlab.{name}")
        if name in MODULE_OF:
            return getattr(importlib.import_module(MODULE_OF[name]), name)
        raise AttributeError(f"vitlab has no {name!r}; its public names are {', '.join(__all__)}.")


def __dir__() -> list[str]:
    return ["__version__", *__all__]
